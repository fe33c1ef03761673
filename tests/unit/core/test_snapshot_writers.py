"""The directory writers: deltas, full snapshots, checksums."""

import json
import os
import random
import shutil
import struct
import zlib

import pytest
import safetensors
import zstandard

from cwtrain.errors import ChecksumError, ConfigError, SnapshotChangedError, SnapshotError, SnapshotLayoutError
from cwtrain.hotload.delta import DeltaStats, checkpoint_checksums, write_delta, write_full_snapshot
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots._parallel import ordered, worker_count
from cwtrain.snapshots._write import require_space, staged_directory
from cwtrain.snapshots._zstd import ENCODER_VARIABLE, ENCODERS
from helpers import snapshot_files as sf


def full(tmp_path, version, name=None):
    tensors = sf.toy(version)
    names = list(tensors)
    shards = ({n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]})
    return sf.write_full(tmp_path / (name or f"v{version}"), *shards)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_delta_leads_from_one_checkpoint_to_the_other(tmp_path):
    stats = write_delta(full(tmp_path, 0), full(tmp_path, 1), tmp_path / "d", version=1, base_version=0)
    out = tmp_path / "d"
    assert sf.apply_delta(sf.toy(0), out) == sf.toy(1)
    assert sf.read_index(out)["metadata"] == sf.DELTA_METADATA
    assert sorted(files(out)) == ["model-00000-of-00001.safetensors", sf.INDEX]
    blobs, sums = sf.read_tensors(out / "model-00000-of-00001.safetensors")
    assert set(blobs) == set(sums) == {"layer.weight", "odd.weight"}
    for name, (dtype, shape, blob) in blobs.items():
        assert (dtype, shape) == ("U8", [len(blob)])
        assert zstandard.get_frame_parameters(blob).content_size == len(sf.toy(0)[name][2])
    with safetensors.safe_open(out / "model-00000-of-00001.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(blobs)
    snapshot = inspect_snapshot(out, verify="full", base=tmp_path / "v0")
    assert isinstance(stats, DeltaStats)
    assert (stats.tensors, stats.changed_tensors, stats.shards, stats.empty) == (7, 2, 1, False)
    assert stats.raw_bytes == sum(len(raw) for _, _, raw in sf.toy(0).values())
    assert stats.changed_tensor_bytes == 6004
    assert stats.changed_bytes == 1 + 2  # one byte of the layer; NaN payload and the sign of zero
    assert stats.delta_bytes == snapshot.total_bytes
    assert stats.ratio == stats.raw_bytes / stats.delta_bytes
    assert stats.density == 3 / stats.raw_bytes
    assert stats.path == out
    assert stats.seconds >= 0
    assert (stats.version, stats.base_version) == ("000001", "000000")
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_chain_of_written_deltas(tmp_path):
    tensors = sf.toy(0)
    full(tmp_path, 0)
    for version in range(3):
        full(tmp_path, version + 1)
        out = tmp_path / f"d{version}"
        write_delta(
            tmp_path / f"v{version}", tmp_path / f"v{version + 1}", out, version=f"{version + 1}", base_version=version
        )
        tensors = sf.apply_delta(tensors, out)
    assert tensors == sf.toy(3)


def test_b53_only_the_scalar_changes_then_nothing(tmp_path):
    """B53: scalars and empty tensors go through both writers; an empty tensor never changes; no change, no shard."""
    old = {
        "scaled_fp8": ("F8_E4M3", [0], b""),
        "bias.masked": ("F32", [], b"\0\0\x80?"),
        "w": ("BF16", [2], b"abcd"),
        "none": ("F32", [3, 0], b""),
    }
    new = {**old, "bias.masked": ("F32", [], b"\0\0\x80\xbf")}
    base, after = sf.write_full(tmp_path / "a", old), sf.write_full(tmp_path / "b", new)
    stats = write_delta(base, after, tmp_path / "d1", version=1, base_version=0)
    assert list(sf.read_index(tmp_path / "d1")["weight_map"]) == ["bias.masked"]
    assert stats.changed_tensors == 1
    assert sf.apply_delta(old, tmp_path / "d1") == new
    stats = write_delta(after, after, tmp_path / "d2", version=2, base_version=1)
    assert stats.empty
    assert sorted(files(tmp_path / "d2")) == [sf.INDEX]
    assert sf.read_index(tmp_path / "d2")["weight_map"] == {}
    assert (stats.shards, stats.changed_bytes, stats.density) == (0, 0, 0.0)
    with pytest.raises(SnapshotLayoutError, match="skip this version"):
        inspect_snapshot(tmp_path / "d2")
    assert inspect_snapshot(tmp_path / "d2", allow_empty_delta=True).empty_delta
    copy = write_full_snapshot(after, tmp_path / "f")
    assert sf.read_checkpoint(copy) == new
    assert inspect_snapshot(copy, verify="full").checksums["scaled_fp8"] == "00000001"


def test_b26_a_tied_head_that_comes_or_goes(tmp_path):
    """B26: a tensor on one side only stops the writer, with its name and a hint about tying; it is not 'unchanged'."""
    embed = ("BF16", [2], b"abcd")
    with_head = {"model.embed_tokens.weight": embed, "lm_head.weight": embed}
    without = {"model.embed_tokens.weight": ("BF16", [2], b"abce")}
    one, two = sf.write_full(tmp_path / "one", with_head), sf.write_full(tmp_path / "two", without)
    for base, new in ((one, two), (two, one)):
        with pytest.raises(SnapshotLayoutError) as caught:
            write_delta(base, new, tmp_path / "d", version=1, base_version=0)
        assert "tensor 'lm_head.weight' is in" in caught.value.message
        assert str(one) in caught.value.message
        assert str(two) in caught.value.message
        assert "tie_word_embeddings" in caught.value.hint
        assert not (tmp_path / "d").exists()
    kept = write_full_snapshot(one, tmp_path / "kept", names=["model.embed_tokens.weight"])
    assert sf.read_index(kept)["metadata"]["total_size"] == 4
    write_delta(kept, two, tmp_path / "d", version=1, base_version=0)
    assert sf.apply_delta({"model.embed_tokens.weight": embed}, tmp_path / "d") == without


def test_other_dtypes_and_shapes_are_refused_with_both_sides(tmp_path):
    """B27: also where the number of bytes is the same."""
    old = {"a": ("F32", [2, 3], bytes(24)), "b": ("BF16", [2], bytes(4)), "c": ("U8", [1], b"x")}
    new = {"a": ("F32", [3, 2], bytes(24)), "b": ("F16", [2], bytes(4)), "c": ("U8", [1], b"y")}
    base, after = sf.write_full(tmp_path / "one", old), sf.write_full(tmp_path / "two", new)
    with pytest.raises(SnapshotLayoutError) as caught:
        write_delta(base, after, tmp_path / "d", version=1, base_version=0)
    assert len(caught.value.problems) == 2
    assert "'a' is F32 [2, 3] in" in caught.value.message
    assert "F32 [3, 2] in" in caught.value.message
    assert "BF16 [2] in" in caught.value.message


@pytest.mark.parametrize("encoder", ENCODERS)
def test_b27_bytes_count_and_not_values(tmp_path, monkeypatch, encoder):
    """B27: NaN payload bits and the sign of zero are changes, although the values compare as they did before."""
    monkeypatch.setenv(ENCODER_VARIABLE, encoder)
    old = {
        "zero": ("F32", [2], struct.pack("<2f", 0.0, 1.0)),
        "nan": ("F32", [1], struct.pack("<I", 0x7FC00001)),
        "bf16": ("BF16", [1], struct.pack("<H", 0x7FC1)),
        "same": ("F32", [1], struct.pack("<I", 0x7FC00001)),
    }
    new = {
        "zero": ("F32", [2], struct.pack("<2f", -0.0, 1.0)),
        "nan": ("F32", [1], struct.pack("<I", 0xFFC00002)),
        "bf16": ("BF16", [1], struct.pack("<H", 0xFFC1)),
        "same": old["same"],
    }
    base, after = sf.write_full(tmp_path / "one", old), sf.write_full(tmp_path / "two", new)
    stats = write_delta(base, after, tmp_path / "d", version=1, base_version=0)
    assert set(sf.read_index(tmp_path / "d")["weight_map"]) == {"zero", "nan", "bf16"}
    assert stats.changed_bytes == 1 + 2 + 1
    assert sf.apply_delta(old, tmp_path / "d") == new


def test_b15_experts_under_other_names(tmp_path):
    """B15: fused experts, or a prefix more, stop the writer with counts and examples of both sides."""
    layer = "model.layers.0.mlp.experts"
    tensor = ("BF16", [2, 2], bytes(8))
    apart = {f"{layer}.{n}.{kind}_proj.weight": tensor for n in range(4) for kind in ("gate", "up", "down")}
    fused = {
        f"{layer}.gate_up_proj": ("BF16", [4, 4, 2], bytes(64)),
        f"{layer}.down_proj": ("BF16", [4, 2, 2], bytes(32)),
    }
    prefixed = {name.replace("model.", "model.language_model."): value for name, value in apart.items()}
    base = sf.write_full(tmp_path / "base", apart)
    for number, other in enumerate((fused, prefixed)):
        after = sf.write_full(tmp_path / f"new{number}", other)
        with pytest.raises(SnapshotLayoutError) as caught:
            write_delta(base, after, tmp_path / "d", version=1, base_version=0)
        here, there = caught.value.problems
        assert f"12 tensors ('{layer}.0.gate_proj.weight', " in here
        assert here.count(f"{layer}.") >= 3
        assert f"{len(other)} tensors (" in there
        assert there.count("mlp.experts.") >= min(3, len(other))
        assert str(base) in caught.value.message
        assert str(after) in caught.value.message
        assert "the same tensors on both sides" in caught.value.hint
    assert not (tmp_path / "d").exists()


def test_many_differences_are_counted_with_examples(tmp_path):
    base = sf.write_full(tmp_path / "one", {f"a{i}": ("U8", [1], b"x") for i in range(9)})
    after = sf.write_full(tmp_path / "two", {f"b{i}": ("U8", [1], b"x") for i in range(8)})
    with pytest.raises(SnapshotLayoutError) as caught:
        write_delta(base, after, tmp_path / "d", version=1, base_version=0)
    assert "9 tensors ('a0', 'a1', 'a2', 'a3', 'a4', ...) are in" in caught.value.problems[0]
    assert "8 tensors ('b0'," in caught.value.problems[1]


def test_output_is_the_same_whatever_the_workers(tmp_path):
    rng = random.Random(5)
    old = {f"t{i:02d}": ("U8", [size], rng.randbytes(size)) for i, size in enumerate([3, 0, 1 << 20, 70_000] * 5)}
    old["big"] = ("U8", [(5 << 20) + 3], rng.randbytes((5 << 20) + 3))
    new = {}
    for name, (dtype, shape, raw) in old.items():
        data = bytearray(raw)
        for _ in range(len(data) // 50):
            data[rng.randrange(len(data))] ^= rng.randrange(256)
        new[name] = (dtype, shape, bytes(data))
    base, after = sf.write_full(tmp_path / "one", old), sf.write_full(tmp_path / "two", new)
    outputs = []
    for workers in (1, 2, 5, None):
        out = tmp_path / f"d{workers}"
        write_delta(base, after, out, version=1, base_version=0, workers=workers, shard_bytes=60_000)
        outputs.append(files(out))
    assert all(output == outputs[0] for output in outputs)
    shards = sorted(name for name in outputs[0] if name != sf.INDEX)
    assert len(shards) > 2
    assert shards == [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    for name in shards:
        length = int.from_bytes(outputs[0][name][:8], "little")
        text = outputs[0][name][8 : 8 + length]
        assert length % 8 == 0
        assert len(text) - len(text.rstrip(b" ")) < 8
    assert sf.apply_delta(old, tmp_path / "d1") == new


def test_what_does_not_fit_in_memory_waits_in_a_file(tmp_path):
    from cwtrain.snapshots import _write

    spill = _write.Spill(str(tmp_path), budget_bytes=10)
    stored = [spill.store(bytes([i]) * 6) for i in range(4)]
    assert [isinstance(item, bytes) for item in stored] == [True, False, False, False]
    assert [spill.load(item) for item in stored] == [bytes([i]) * 6 for i in range(4)]
    assert not os.listdir(tmp_path)  # the file has no name
    spill.close()


@pytest.mark.parametrize(
    ("version", "base_version"),
    [(1, 1), (0, 1), (-1, 0), ("latest", 0), (1, "-1"), (True, 0), (1.0, 0), ("1", None), ("", 0), (1, " 0")],
)
def test_versions_must_be_numbers_that_go_up(tmp_path, version, base_version):
    with pytest.raises(ConfigError):
        write_delta(full(tmp_path, 0), full(tmp_path, 1), tmp_path / "d", version=version, base_version=base_version)
    assert not (tmp_path / "d").exists()


def test_versions_are_written_with_six_digits(tmp_path):
    base = full(tmp_path, 0)
    stats = write_delta(base, base, tmp_path / "d", version="0001234567", base_version="12")
    assert (stats.version, stats.base_version) == ("1234567", "000012")


@pytest.mark.parametrize("options", [{"workers": 0}, {"workers": True}, {"workers": 1.5}, {"shard_bytes": 0}])
def test_other_arguments(tmp_path, options):
    base = full(tmp_path, 0)
    with pytest.raises(ConfigError):
        write_delta(base, base, tmp_path / "d", version=1, base_version=0, **options)


def test_a_directory_with_something_in_it_is_not_written_to(tmp_path):
    base = full(tmp_path, 0)
    out = tmp_path / "d"
    out.mkdir()
    write_delta(base, base, out, version=1, base_version=0)  # an empty one is fine
    before = files(out)
    for write in (
        lambda: write_delta(base, base, out, version=1, base_version=0),
        lambda: write_full_snapshot(base, out),
        lambda: write_full_snapshot(base, base),
        lambda: write_full_snapshot(base, out / sf.INDEX),
    ):
        with pytest.raises(SnapshotError, match="not an empty directory"):
            write()
    assert files(out) == before
    nested = tmp_path / "x" / "y" / "d"
    write_delta(base, base, nested, version=1, base_version=0)
    (tmp_path / "plain").mkdir()
    assert nested.stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_room_on_the_disk_is_checked_first(tmp_path):
    with pytest.raises(SnapshotError, match=r"needs 100 bytes, 99 are free"):
        require_space(str(tmp_path / "x"), 100, "it", free=lambda path: 99)
    require_space(str(tmp_path / "x"), 100, "it", free=lambda path: 100)
    size = shutil.disk_usage(tmp_path).free + (1 << 30)
    directory = tmp_path / "huge"
    sf.write_json(directory / "config.json", {})
    head = sf.with_header(json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}))
    with open(directory / "model.safetensors", "wb") as file:
        file.write(head)
        try:
            file.truncate(len(head) + size)
        except OSError:
            pytest.skip("the file system takes no sparse file larger than its free space")
    with pytest.raises(SnapshotError, match=f"needs {size + 2} bytes, "):
        write_full_snapshot(directory, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["huge"]


def test_nothing_is_left_of_a_write_that_failed(tmp_path):
    def fail(error):
        with staged_directory(str(tmp_path / "out")) as stage:
            open(os.path.join(stage, "file"), "wb").close()
            raise error

    with pytest.raises(OSError, match="boom"):
        fail(OSError("boom"))
    with pytest.raises(SnapshotError, match="disk is full"):
        fail(OSError(28, "No space left on device"))
    assert not os.listdir(tmp_path)


def test_the_first_error_stops_the_other_workers():
    seen = []

    def work(item, check):
        check()
        seen.append(item)
        if item == 3:
            raise ValueError("three")
        return item * 2

    assert list(ordered(work, [1, 2], workers=2)) == [2, 4]
    with pytest.raises(ValueError, match="three"):
        list(ordered(work, [1, 3, *range(4, 50)], workers=1))
    assert seen[2:] == [1, 3]
    with pytest.raises(ValueError, match="three"):
        list(ordered(work, [1, 3, *range(4, 500)], workers=3))
    assert len(seen) < 100


def test_results_come_in_order_and_do_not_pile_up():
    begun = []

    def work(item, check):
        begun.append(item)
        return item

    results = ordered(work, range(100), workers=3)
    assert next(results) == 0
    assert len(begun) <= 6
    assert list(results) == list(range(1, 100))


def test_workers_follow_from_the_memory_budget():
    mib = 1 << 20
    assert worker_count(7) == 7
    assert worker_count(50, 64 * mib + 5 * 16 * mib) == 5
    assert worker_count(3, 1024 * mib) == 3
    assert 1 <= worker_count() <= 16
    assert worker_count(None, 80 * mib) == 1
    with pytest.raises(ConfigError, match="not enough"):
        worker_count(None, 79 * mib)
    with pytest.raises(ConfigError, match="memory_bytes"):
        worker_count(None, 0)


def test_a_file_that_changes_between_header_and_data(tmp_path):
    """B18/B21: what was announced by the header must be what is read."""
    base, new = full(tmp_path, 0), full(tmp_path, 1)
    from cwtrain.snapshots._delta_files import DeltaFiles
    from cwtrain.snapshots._encode import encode_delta
    from cwtrain.snapshots._sweep import sweep
    from cwtrain.snapshots._write import Spill
    from cwtrain.snapshots.checkpoint import open_checkpoint

    old, current = open_checkpoint(base), open_checkpoint(new)
    shard = new / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    files = DeltaFiles(str(tmp_path), list(current.tensors), raw_bytes=1 << 20, shard_bytes=1 << 20)
    spill = Spill(str(tmp_path), budget_bytes=1 << 20)
    with pytest.raises(SnapshotChangedError):
        encode_delta(old, current, files, workers=1, spill=spill)
    with pytest.raises(SnapshotChangedError):
        sweep(list(current.tensors.values()), workers=2)


def test_checksums_of_a_checkpoint(tmp_path):
    want = {name: f"{zlib.adler32(raw):08x}" for name, (_, _, raw) in sf.toy(0).items()}
    assert checkpoint_checksums(full(tmp_path, 0)) == want
    assert checkpoint_checksums(tmp_path / "v0", workers=3) == want
    single = tmp_path / "x.safetensors"
    single.write_bytes(sf.safetensors(sf.toy(0)))
    assert checkpoint_checksums(single) == want
    assert "00000001" in want.values()


def test_a_full_snapshot(tmp_path):
    source = full(tmp_path, 0)
    index = sf.read_index(source)
    index["metadata"] = {"total_size": "wrong", "note": "kept", "nested": {"a": 1}}
    index["extra"] = [1]
    sf.write_json(source / sf.INDEX, index)
    (source / "chat_template.jinja").write_text("{{ x }}")
    (source / "optimizer.pt").write_text("x")
    out = write_full_snapshot(source, tmp_path / "out")
    assert out == tmp_path / "out"
    assert sf.read_checkpoint(out) == sf.toy(0)
    written = sf.read_index(out)
    total = sum(len(raw) for _, _, raw in sf.toy(0).values())
    assert written["metadata"] == {
        "total_size": total, "note": "kept", "nested": {"a": 1}, "checksum_format": "adler32",
    }  # fmt: skip
    assert written["extra"] == [1]
    assert written["weight_map"] == index["weight_map"]
    assert sorted(files(out)) == sorted({*files(source)} - {"optimizer.pt"})
    assert (out / "config.json").read_bytes() == (source / "config.json").read_bytes()
    for path in out.glob("*.safetensors"):
        tensors, metadata = sf.read_tensors(path)
        assert metadata.pop("format") == "pt"
        assert metadata == {name: f"{zlib.adler32(raw):08x}" for name, (_, _, raw) in tensors.items()}
        with safetensors.safe_open(path, "np") as file:
            assert set(file.keys()) == set(tensors)
    snapshot = inspect_snapshot(out, verify="full")
    assert snapshot.kind is SnapshotKind.FULL
    assert len(snapshot.checksums) == snapshot.tensors == 7
    again = write_full_snapshot(out, tmp_path / "again", snapshot.checksums, workers=1)
    assert files(again) == files(out)


def test_a_full_snapshot_of_some_tensors(tmp_path):
    source = full(tmp_path, 0)
    names = ["packed", "odd.weight"]
    out = write_full_snapshot(source, tmp_path / "out", names=iter(names))
    assert sf.read_checkpoint(out) == {name: sf.toy(0)[name] for name in names}
    index = sf.read_index(out)
    assert index["metadata"]["total_size"] == 7
    assert set(index["weight_map"].values()) == {"model-00001-of-00001.safetensors"}
    _, metadata = sf.read_tensors(out / "model-00001-of-00001.safetensors")
    assert set(metadata) == {"format", *names}
    inspect_snapshot(out, verify="full")
    again = write_full_snapshot(out, tmp_path / "again", names=["packed"])
    assert set(sf.read_tensors(again / "model-00001-of-00001.safetensors")[1]) == {"format", "packed"}
    for wrong, words in ((["nope"], "'nope'"), ([], "is empty")):
        with pytest.raises(ConfigError, match=words):
            write_full_snapshot(source, tmp_path / "no", names=wrong)


def test_a_full_snapshot_of_one_file(tmp_path):
    source = tmp_path / "one"
    sf.write_json(source / "config.json", {})
    (source / "model.safetensors").write_bytes(sf.safetensors(sf.toy(0)))
    out = write_full_snapshot(source, tmp_path / "out")
    assert sorted(files(out)) == ["config.json", "model.safetensors", sf.INDEX]
    assert inspect_snapshot(out, verify="full").tensors == 7


def test_given_checksums_are_compared(tmp_path):
    source = full(tmp_path, 0)
    sums = checkpoint_checksums(source)
    write_full_snapshot(source, tmp_path / "out", {**sums, "other": "00000000"})
    with pytest.raises(ChecksumError) as caught:
        write_full_snapshot(source, tmp_path / "no", {**sums, "packed": "12345678"})
    assert caught.value.tensor == "packed"
    sums.pop("packed")
    with pytest.raises(ConfigError, match="'packed'"):
        write_full_snapshot(source, tmp_path / "no", sums)
    assert not (tmp_path / "no").exists()


def test_a_full_snapshot_is_made_of_a_full_checkpoint(tmp_path):
    write_delta(full(tmp_path, 0), full(tmp_path, 1), tmp_path / "d", version=1, base_version=0)
    with pytest.raises(SnapshotLayoutError, match="is a delta"):
        write_full_snapshot(tmp_path / "d", tmp_path / "out")
    for base, new in ((tmp_path / "d", tmp_path / "v1"), (tmp_path / "v0", tmp_path / "d")):
        with pytest.raises(SnapshotLayoutError, match="is a delta"):
            write_delta(base, new, tmp_path / "out", version=1, base_version=0)


def test_names_that_mean_something_elsewhere(tmp_path):
    tensors = {"format": ("U8", [2], b"ab"), "total_size": ("U8", [1], b"c"), "weight": ("U8", [1], b"d")}
    out = write_full_snapshot(sf.write_full(tmp_path / "a", tensors), tmp_path / "out")
    assert inspect_snapshot(out, verify="full").tensors == 3
