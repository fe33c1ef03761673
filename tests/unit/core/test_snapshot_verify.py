"""``verify="full"``: frames, lengths and checksums, on a base and without one."""

import struct
import zlib

import pytest
import zstandard

from cwtrain.errors import ChecksumError, SnapshotChangedError, SnapshotLayoutError
from cwtrain.snapshots import decode_delta, inspect_snapshot
from helpers import snapshot_files as sf


@pytest.fixture
def base(tmp_path):
    return sf.write_full(tmp_path / "base", sf.toy(0))


def made(tmp_path, make_frame=sf.frame, **options):
    return sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1), make_frame=make_frame, **options)


def refusal(path, base=None):
    with pytest.raises(ChecksumError) as caught:
        inspect_snapshot(path, verify="full", base=base)
    assert caught.value.tensor in ("layer.weight", "odd.weight")
    assert caught.value.hint
    return caught.value


def test_good_deltas_verify_and_decode(tmp_path, base):
    directory = made(tmp_path)
    assert inspect_snapshot(directory, verify="full", base=base).verified == "full"
    assert inspect_snapshot(directory, verify="full").verified == "frames"
    assert inspect_snapshot(directory).verified == "headers"
    want = {name: raw for name, (_, _, raw) in sf.toy(1).items() if raw != sf.toy(0)[name][2]}
    assert dict(decode_delta(base, directory)) == want


def test_a_chain_decodes_step_by_step(tmp_path):
    for version in range(4):
        sf.write_full(tmp_path / f"full{version}", sf.toy(version))
    for version in range(3):
        directory = sf.write_delta(tmp_path / f"d{version}", sf.toy(version), sf.toy(version + 1))
        got = dict(decode_delta(tmp_path / f"full{version}", directory))
        assert got == {name: sf.toy(version + 1)[name][2] for name in got}
        assert {name: (*t[:2], got.get(name, t[2])) for name, t in sf.toy(version).items()} == sf.toy(version + 1)
    error = refusal(tmp_path / "d1", base=tmp_path / "full0")
    assert "not the base" in error.hint


def test_unchanged_tensors_may_be_in_a_delta(tmp_path, base):
    directory = made(tmp_path, names=["embed_tokens.weight", "layer.weight", "odd.weight", "scaled_fp8"])
    assert inspect_snapshot(directory, verify="full", base=base).tensors == 4


@pytest.mark.parametrize("level", [-5, 1, 3, 19])
@pytest.mark.parametrize("checksum", [False, True])
def test_frames_of_any_writer_are_read(tmp_path, base, level, checksum):
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=checksum)
    assert inspect_snapshot(made(tmp_path, compressor.compress), verify="full", base=base)


def test_frames_without_content_size_are_read_within_the_tensors_length(tmp_path, base):
    directory = made(tmp_path, sf.streamed_frame)
    assert inspect_snapshot(directory, verify="full", base=base)
    assert inspect_snapshot(directory, verify="full")
    directory = made(tmp_path, lambda data: sf.streamed_frame(data + b"x"))
    assert "decodes to more than" in refusal(directory, base).message
    directory = made(tmp_path, lambda data: sf.streamed_frame(data[:-1]))
    assert "but the tensor has" in refusal(directory, base).message


def flipped(data):
    raw = bytearray(sf.frame(data))
    raw[-1] ^= 1
    return bytes(raw)


def claims(size):
    """Return a frame maker whose header claims ``size`` bytes, followed by one small block."""
    head = struct.pack("<IBBQ", 0xFD2FB528, 0xC0, 0x38, size)
    return lambda data: head + struct.pack("<I", 1 | (4 << 3))[:3] + b"1234"


@pytest.mark.parametrize(
    ("make_frame", "words", "alone"),
    [
        (lambda data: sf.frame(data) + b"junk", "4 bytes that belong to no frame", True),
        (lambda data: sf.frame(data[:2]) + sf.frame(data[2:]), "claims to decode to 2 bytes", False),
        (lambda data: sf.frame(data) + sf.frame(b""), "another frame", True),
        (lambda data: sf.frame(data)[:-1], "too early", True),
        (lambda data: sf.frame(data)[:5], "ends inside its frame header", True),
        (lambda data: b"\x28", "no zstd frame", True),
        (zlib.compress, "no zstd frame", True),
        (lambda data: b"\x50\x2a\x4d\x18\x04\0\0\0abcd" + sf.frame(data), "no zstd frame", True),
        (lambda data: sf.frame(data + b"\0"), "claims to decode to", False),
        (lambda data: sf.frame(bytes(64 << 20)), "claims to decode to 67108864 bytes", False),
        (claims(2**63), "claims to decode to 9223372036854775808 bytes", True),
        (lambda data: struct.pack("<IBB", 0xFD2FB528, 0, 0xFF) + b"\x01\0\0", "needs a window", True),
        (lambda data: struct.pack("<IBBB", 0xFD2FB528, 0x21, 7, 0) + b"\x01\0\0", "needs a dictionary", True),
        (lambda data: struct.pack("<IBB", 0xFD2FB528, 0x28, 0) + b"\x01\0\0", "reserved bit", True),
        (lambda data: struct.pack("<IBB", 0xFD2FB528, 0x00, 0x38) + b"\x07\0\0", "is damaged", True),
        (lambda data: struct.pack("<IBB", 0xFD2FB528, 0x00, 0x38) + b"\x02\0\x11x", "is damaged", True),
    ],
)
def test_damaged_and_hostile_frames_are_refused(tmp_path, base, make_frame, words, alone):
    directory = made(tmp_path, make_frame)
    assert words in refusal(directory, base).message
    if alone:
        assert words in refusal(directory).message
    with pytest.raises(ChecksumError):
        list(decode_delta(base, directory))


def test_a_flipped_bit_and_a_wrong_checksum(tmp_path, base):
    assert refusal(made(tmp_path, flipped), base)
    directory = made(tmp_path)
    shard = directory / "model-00000-of-00001.safetensors"
    tensors, sums = sf.read_tensors(shard)
    sums["layer.weight"] = "12345678"
    shard.write_bytes(sf.safetensors(tensors, sums))
    error = refusal(directory, base)
    assert error.tensor == "layer.weight"
    assert "recorded is 12345678" in error.message
    inspect_snapshot(directory, verify="full")  # without the base only the frames can be checked


def test_all_wrong_tensors_are_named(tmp_path, base):
    message = refusal(made(tmp_path, lambda data: sf.frame(data) + b"x"), base).message
    assert "'layer.weight'" in message
    assert "'odd.weight'" in message


def test_tensors_that_the_base_does_not_have(tmp_path, base):
    old = {**sf.toy(0), "lm_head.weight": ("BF16", [1], b"ab")}
    new = {**sf.toy(1), "lm_head.weight": ("BF16", [1], b"ac")}
    directory = sf.write_delta(tmp_path / "delta", old, new)
    with pytest.raises(SnapshotLayoutError) as caught:
        inspect_snapshot(directory, verify="full", base=base)
    assert caught.value.problems == (f"tensor 'lm_head.weight' is not in the base {base}",)
    assert "lm_head" in caught.value.hint


def test_the_base_must_be_a_full_checkpoint(tmp_path, base):
    directory = made(tmp_path)
    for wrong, words in ((directory, "is a delta"), (tmp_path, "is not there"), (tmp_path / "no", "no such directory")):
        with pytest.raises(SnapshotLayoutError, match=words):
            inspect_snapshot(directory, verify="full", base=wrong)
    with pytest.raises(SnapshotLayoutError, match="full snapshot"):
        list(decode_delta(base, base))


def test_the_base_may_be_one_file(tmp_path):
    path = tmp_path / "base.safetensors"
    path.write_bytes(sf.safetensors(sf.toy(0)))
    assert inspect_snapshot(made(tmp_path), verify="full", base=path)


def test_full_snapshots_are_checked_against_their_checksums(tmp_path):
    sums = {name: f"{zlib.adler32(raw):08x}" for name, (_, _, raw) in sf.toy(0).items()}
    assert sums["scaled_fp8"] == "00000001"
    directory = sf.write_full(tmp_path / "full", sf.toy(0), metadata={"checksum_format": "adler32"})
    shard = directory / "model-00001-of-00001.safetensors"
    shard.write_bytes(sf.safetensors(sf.toy(0), sums))
    snapshot = inspect_snapshot(directory, verify="full")
    assert (snapshot.verified, snapshot.warnings) == ("full", ())
    shard.write_bytes(sf.safetensors(sf.toy(1), sums))
    assert "'odd.weight'" in refusal(directory).message
    plain = sf.write_full(tmp_path / "plain", sf.toy(0))
    assert "no checksums" in inspect_snapshot(plain, verify="full", base=plain).warnings[-1]


def test_b56_a_file_that_shrinks_while_it_is_read(tmp_path):
    """B56: a short read is an error that names the file and the offset, never a signal."""
    from cwtrain.snapshots._files import RegularFile

    path = tmp_path / "x"
    path.write_bytes(b"x" * 100)
    with RegularFile(str(path), label="x") as file:
        path.write_bytes(b"x" * 60)
        with pytest.raises(SnapshotChangedError, match="offset 60, 30 bytes short"):
            file.read(10, 80)
