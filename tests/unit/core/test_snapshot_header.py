"""Headers of safetensors files: read as strictly as the reference reader, and told apart when they are none."""

import json
import struct

import pytest
import safetensors

from cwtrain.errors import SnapshotLayoutError
from cwtrain.snapshots.header import build_header, read_header
from helpers import snapshot_files as sf


def header_of(tmp_path, raw: bytes):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    return read_header(str(path), label="x.safetensors")


def refusal(tmp_path, raw: bytes) -> str:
    with pytest.raises(SnapshotLayoutError) as caught:
        header_of(tmp_path, raw)
    assert caught.value.problems
    assert all(problem.startswith("x.safetensors: ") for problem in caught.value.problems)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(tmp_path / "x.safetensors", "np"):
        pass  # what we refuse, the reference reader refuses
    return caught.value.message


def tensor(dtype="U8", shape=(1,), begin=0, end=1):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


def one(entry, data=b"x"):
    return sf.with_header(json.dumps({"a": entry}), data)


def test_everything_in_a_header_is_returned(tmp_path):
    raw = sf.safetensors(sf.toy(0), {"format": "pt"})
    header = header_of(tmp_path, raw)
    assert header.metadata == {"format": "pt"}
    assert list(header.tensors) == list(sf.toy(0))
    assert header.file_bytes == len(raw)
    for name, (dtype, shape, data) in sf.toy(0).items():
        info = header.tensors[name]
        assert (info.dtype, list(info.shape), info.size_bytes) == (dtype, shape, len(data))
        assert raw[header.data_start + info.begin : header.data_start + info.end] == data


def test_b53_empty_tensors_and_scalars(tmp_path):
    """B53: shapes [0], [3,0] and [] are allowed everywhere, also at equal offsets between others."""
    tensors = {
        "first": ("F8_E4M3", [0], b""),
        "a": ("F32", [], b"1234"),
        "none": ("F32", [3, 0], b""),
        "none too": ("F64", [0, 7], b""),
        "b": ("I8", [2], b"ab"),
    }
    header = header_of(tmp_path, sf.safetensors(tensors))
    assert [info.size_bytes for info in header.tensors.values()] == [0, 4, 0, 0, 2]
    assert header.tensors["a"].shape == ()
    assert not header_of(tmp_path, sf.with_header("{}")).tensors


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "empty (0 bytes)"),
        (b"1234567", "only 7 bytes"),
        (sf.safetensors({"a": ("U8", [8], b"12345678")})[:-3], "truncated by 3 bytes"),
        (sf.safetensors({"a": ("U8", [8], b"12345678")}) + b"12", "2 bytes after the last tensor"),
        (sf.safetensors({"a": ("U8", [8], b"12345678")})[:30], "truncated inside its header"),
        (bytes(4096), "filled with zeros"),
        (bytes(8) + b"x" * 100, "its header has no bytes"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 5\n", "git lfs pull"),
        (b"<!DOCTYPE html><html><body>Sign in</body></html>", "HTML page"),
        (b"  <html lang=en>", "HTML page"),
        (b"<?xml version='1.0'?><Error><Code>AccessDenied</Code></Error>", "XML document"),
        (b"PK\x03\x04" + bytes(100), "zip archive"),
        (b"GGUF" + b"\x03" * 100, "GGUF"),
        (struct.pack("<Q", 100_000_001) + bytes(100), "100000001 bytes"),
        (struct.pack("<Q", 2**63) + b"x" * 100, "not a safetensors file"),
        (struct.pack("<Q", 500) + b"x" * 100, "truncated inside its header, by at least 400 bytes"),
        (sf.with_header(bytes(64), b"x"), "does not begin with '{'"),
        (sf.with_header('{"a": ', b"x"), "cut off?"),
        (sf.with_header(b'{"\xff": 1}', b"x"), "not UTF-8"),
        (sf.with_header('{"a": ' + "[" * 100_000, b"x"), "nested too deeply"),
    ],
)
def test_b55_files_that_are_no_weights_are_told_apart(tmp_path, raw, words):
    """B55: truncated files, LFS pointers, pages and zeros are refused, and the message says which it is."""
    assert words in refusal(tmp_path, raw)


@pytest.mark.parametrize("text", ["null", "{}", None])
def test_b62_no_metadata_in_all_its_spellings(tmp_path, text):
    """B62: null, an empty object and absence of ``__metadata__`` are the same."""
    meta = "" if text is None else f'"__metadata__": {text}, '
    header = header_of(tmp_path, sf.with_header(f'{{{meta}"a": {json.dumps(tensor())}}}', b"x"))
    assert header.metadata == {}


@pytest.mark.parametrize("value", ['{"n": 1}', '{"n": null}', '{"a": {"b": "c"}}', '{"a": ["b"]}', '"text"', "7", "[]"])
def test_b62_metadata_holds_strings_only(tmp_path, value):
    """B62: numbers, null and nested values in ``__metadata__`` are refused, as the reference reader refuses them."""
    raw = sf.with_header(f'{{"__metadata__": {value}, "a": {json.dumps(tensor())}}}', b"x")
    assert "__metadata__" in refusal(tmp_path, raw)


def test_b26_two_names_may_not_share_bytes(tmp_path):
    """B26: tied tensors that point at the same bytes are refused; two equal copies are two tensors."""
    shared = {"embed": tensor("U8", [4], 0, 4), "lm_head": tensor("U8", [4], 0, 4)}
    assert "may not share bytes" in refusal(tmp_path, sf.with_header(json.dumps(shared), b"1234"))
    header_of(tmp_path, sf.safetensors({"embed": ("U8", [4], b"1234"), "lm_head": ("U8", [4], b"1234")}))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (one(tensor("F32", [1], 0, 1)), "F32 [1] has 4"),
        (one(tensor("F4", [3], 0, 1)), "whole byte"),
        (one(tensor("U8", [2**62, 2**62, 0], 0, 1)), "U8"),
        (one(tensor("U8", [2**40] * 8, 0, 1)), "U8"),
        (one(tensor("U8", [1], 1, 0)), "before it begins"),
        (one(tensor("U8", [-1])), "shape"),
        (one(tensor("U8", [True])), "shape"),
        (one(tensor("U8", [1.0])), "shape"),
        (one({"dtype": "U8", "shape": [1]}), "data_offsets"),
        (one({"dtype": "U8", "shape": [1], "data_offsets": [0]}), "data_offsets"),
        (one({"dtype": 7, "shape": [1], "data_offsets": [0, 1]}), "no dtype"),
        (one([]), "a list, not an object"),
        (sf.with_header(json.dumps({"a": tensor(begin=1, end=2)}), b"xx"), "1 bytes before tensor 'a'"),
        (sf.with_header('{"a": %s, "a": %s}' % ((json.dumps(tensor()),) * 2), b"x"), "'a' twice"),
        (sf.with_header('{"a": {"dtype":"U8","shape":[1],"shape":[1],"data_offsets":[0,1]}}', b"x"), "'shape' twice"),
        (sf.with_header('{"__metadata__": {"x": "1", "x": "2"}}'), "'x' twice"),
        (sf.with_header('{"a": {"dtype":"U8","shape":[1],"data_offsets":[0,NaN]}}', b"x"), "NaN"),
        (sf.with_header('{"\\ud800": ' + json.dumps(tensor()) + "}", b"x"), "half a character"),
    ],
)
def test_wrong_entries_are_refused(tmp_path, raw, words):
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    with pytest.raises(SnapshotLayoutError) as caught:
        read_header(str(path), label="x.safetensors")
    assert words in caught.value.message


def test_all_wrong_entries_are_reported_at_once(tmp_path):
    entries = {f"t{i}": tensor("F32", [1], i, i + 1) for i in range(5)}
    with pytest.raises(SnapshotLayoutError) as caught:
        header_of(tmp_path, sf.with_header(json.dumps({"__metadata__": {"n": 1}, **entries}), b"12345"))
    assert len(caught.value.problems) == 6


def test_unknown_dtypes_must_fit_themselves(tmp_path):
    good = {"a": tensor("X9", [8], 0, 9), "b": tensor("X9", [16], 9, 27), "c": tensor("X9", [0], 27, 27)}
    assert header_of(tmp_path, sf.with_header(json.dumps(good), bytes(27))).tensors["b"].size_bytes == 18
    for second, words in (
        (tensor("X9", [16], 9, 29), "10 bits per element"),
        (tensor("X9", [3], 9, 10), "3 elements"),
        (tensor("X9", [3], 9, 9), "0 bytes"),
        (tensor("X9", [0], 9, 10), "no elements"),
    ):
        raw = sf.with_header(json.dumps({"a": good["a"], "b": second}), bytes(second["data_offsets"][1]))
        with pytest.raises(SnapshotLayoutError, match=words):
            header_of(tmp_path, raw)


def test_names_may_be_odd(tmp_path):
    names = ["", "a/b", "..", "new\nline", "nul\0", "'\"\\", "é漢😀", " ", "x" * 5000]
    header = header_of(tmp_path, sf.safetensors({name: ("U8", [1], b"x") for name in names}))
    assert list(header.tensors) == names


def test_built_headers_are_padded_deterministic_and_readable(tmp_path):
    tensors = [("é", "F32", [2], 8), ("b", "U8", [0], 0), ("c", "U8", [], 1)]
    head = build_header(tensors, {"format": "pt", "k": "v"})
    assert head == build_header(tensors, {"format": "pt", "k": "v"})
    assert len(head) % 8 == 0
    assert len(head.rstrip(b" ")) > len(head) - 8
    header = header_of(tmp_path, head + bytes(9))
    assert list(header.tensors) == ["é", "b", "c"]
    assert header.metadata == {"format": "pt", "k": "v"}
    with safetensors.safe_open(tmp_path / "x.safetensors", "np") as file:
        assert file.metadata() == {"format": "pt", "k": "v"}
