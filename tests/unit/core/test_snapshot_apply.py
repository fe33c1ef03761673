"""From directory to directory: a delta applied to its base, and one of another format converted."""

import os
import random
import struct
import zlib

import pytest

from cwtrain.errors import ChecksumError, ConfigError, SnapshotChangedError, SnapshotError, SnapshotLayoutError
from cwtrain.hotload.delta import AppliedDelta, apply_delta, convert_delta, write_delta, write_full_snapshot
from cwtrain.snapshots import decode_delta, inspect_snapshot
from cwtrain.snapshots._checksums import CHECKSUM_FORMATS, hashers
from cwtrain.snapshots._sweep import sweep
from cwtrain.snapshots._zstd import ENCODER_VARIABLE, ENCODERS
from cwtrain.snapshots.changes import open_delta
from cwtrain.snapshots.checkpoint import open_checkpoint
from helpers import snapshot_files as sf

SHARD = "model-00000-of-00001.safetensors"


@pytest.fixture(params=ENCODERS)
def encoder(request, monkeypatch):
    """Every test runs with both ways to encode and decode."""
    monkeypatch.setenv(ENCODER_VARIABLE, request.param)
    return request.param


@pytest.fixture
def base(tmp_path):
    tensors = sf.toy(0)
    names = list(tensors)
    return sf.write_full(tmp_path / "base", {n: tensors[n] for n in names[:2]}, {n: tensors[n] for n in names[2:]})


def large(seed, *, change=0.0):
    """A model of large and small tensors, sizes that are no whole words included."""
    rng = random.Random(seed)
    sizes = {"a": (3 << 20) + 5, "b": 100, "c": 0, "d": 1 << 20, "e": 7, "f": (1 << 20) + 1, "g": 65_536}
    tensors = {}
    for name, size in sizes.items():
        data = bytearray(rng.randbytes(size))
        if change and size:
            for place in range(0, size, max(1, int(1 / change))):
                data[place] ^= 0x55
        tensors[name] = ("U8", [size], bytes(data))
    return tensors


def xor_payload(old, new):
    return sf.xor(old, new)


def overwrite_payload(old, new):
    places = [place for place, (one, two) in enumerate(zip(old, new, strict=True)) if one != two]
    return struct.pack(f"<{len(places) + 1}I", len(places), *places) + bytes(new[place] for place in places)


def foreign_delta(directory, old, new, *, encoding="xor", algorithm="adler32", change_payload=lambda data: data):
    """Write a delta as slime and miles may: another encoding, other checksums."""
    make_hasher = hashers(algorithm)
    payload = overwrite_payload if encoding == "overwrite" else xor_payload
    blobs, sums = {}, {}
    for name in new:
        if old[name] == new[name]:
            continue
        blob = sf.frame(change_payload(payload(old[name][2], new[name][2])))
        blobs[name] = ("U8", [len(blob)], blob)
        hasher = make_hasher()
        hasher.update(memoryview(new[name][2]))
        sums[name] = hasher.hexdigest()
    directory.mkdir()
    (directory / SHARD).write_bytes(sf.safetensors(blobs, sums))
    metadata = {**sf.DELTA_METADATA, "delta_encoding": encoding, "checksum_format": algorithm}
    sf.write_json(directory / sf.INDEX, {"metadata": metadata, "weight_map": dict.fromkeys(blobs, SHARD)})
    return directory


def library_of(algorithm):
    package = {"xxh3-128": "xxhash", "blake3": "blake3"}.get(algorithm)
    if package:
        pytest.importorskip(package, reason="the extra [checksums]")


def test_a_delta_is_applied(tmp_path, base, encoder):
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    done = apply_delta(base, delta, tmp_path / "out")
    assert isinstance(done, AppliedDelta)
    assert (done.path, done.version, done.base_version) == (tmp_path / "out", "000001", "000000")
    assert (done.tensors, done.changed_tensors, done.workers) == (7, 2, 1)
    assert done.raw_bytes == sum(len(raw) for _, _, raw in sf.toy(0).values())
    assert sf.read_checkpoint(tmp_path / "out") == sf.toy(1)
    snapshot = inspect_snapshot(tmp_path / "out", verify="full")
    assert snapshot.checksums == {name: f"{zlib.adler32(raw):08x}" for name, (_, _, raw) in sf.toy(1).items()}
    assert sorted(os.listdir(tmp_path / "out")) == sorted(os.listdir(base))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("change", [0.001, 0.3])
def test_large_and_small_tensors_in_several_chunks(tmp_path, encoder, workers, change):
    old, new = large(1), large(1, change=change)
    one = {name: old[name] for name in "abcd"}
    two = {name: old[name] for name in "efg"}
    base = sf.write_full(tmp_path / "base", one, two)
    after = sf.write_full(tmp_path / "after", {name: new[name] for name in "gfedcba"})  # another order, one shard
    stats = write_delta(base, after, tmp_path / "delta", version=1, base_version=0, workers=workers)
    assert stats.encoder == ("public" if encoder == "public" else "sequences")
    assert stats.changed_bytes == sum(x != y for n in old for x, y in zip(old[n][2], new[n][2], strict=True))
    seen = []
    apply_delta(
        base, tmp_path / "delta", tmp_path / "out", workers=workers, on_progress=lambda *done: seen.append(done)
    )
    assert sf.read_checkpoint(tmp_path / "out") == new
    total = sum(len(raw) for _, _, raw in old.values())
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert dict(decode_delta(base, tmp_path / "delta")) == {n: new[n][2] for n in new if new[n] != old[n]}


def test_deltas_of_one_encoder_are_read_by_the_other(tmp_path, monkeypatch):
    old, new = large(2), large(2, change=0.01)
    base, after = sf.write_full(tmp_path / "base", old), sf.write_full(tmp_path / "after", new)
    for writer, reader in zip(ENCODERS, ENCODERS[::-1], strict=True):
        monkeypatch.setenv(ENCODER_VARIABLE, writer)
        write_delta(base, after, tmp_path / writer, version=1, base_version=0)
        monkeypatch.setenv(ENCODER_VARIABLE, reader)
        inspect_snapshot(tmp_path / writer, verify="full", base=base)
        assert sf.apply_delta(old, tmp_path / writer) == new


@pytest.mark.parametrize("algorithm", CHECKSUM_FORMATS)
@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_other_formats_are_read_applied_and_converted(tmp_path, encoding, algorithm, encoder):
    library_of(algorithm)
    old, new = large(3), large(3, change=0.002)
    base = sf.write_full(tmp_path / "base", old)
    delta = foreign_delta(tmp_path / "delta", old, new, encoding=encoding, algorithm=algorithm)
    assert dict(decode_delta(base, delta)) == {n: new[n][2] for n in new if new[n] != old[n]}
    apply_delta(base, delta, tmp_path / "applied", workers=2)
    assert sf.read_checkpoint(tmp_path / "applied") == new
    stats = convert_delta(base, delta, tmp_path / "converted", workers=2)
    assert sf.apply_delta(old, tmp_path / "converted") == new
    snapshot = inspect_snapshot(tmp_path / "converted", verify="full", base=base)
    assert (snapshot.version, snapshot.base_version) == ("000001", "000000")
    assert (stats.changed_tensors, stats.tensors) == (6, 7)
    assert stats.delta_bytes == snapshot.total_bytes
    if (encoding, algorithm) != ("xor", "adler32"):
        with pytest.raises(SnapshotLayoutError, match="cwtrain snapshot convert"):
            inspect_snapshot(delta)


@pytest.mark.parametrize("encoding", ["xor", "overwrite"])
def test_b05_a_damaged_frame_that_still_decodes(tmp_path, encoding, encoder):
    """B05: only the checksum shows that these are not the writer's bytes; no reader of deltas does without it."""
    old, new = sf.toy(0), sf.toy(1)
    base = sf.write_full(tmp_path / "base", old)

    def damage(data):
        return data[:-1] + bytes([data[-1] ^ 1]) if len(data) > 100 or encoding == "overwrite" else data

    delta = foreign_delta(tmp_path / "delta", old, new, encoding=encoding, change_payload=damage)
    for use in (
        lambda: apply_delta(base, delta, tmp_path / "out"),
        lambda: convert_delta(base, delta, tmp_path / "out"),
        lambda: list(decode_delta(base, delta)),
    ):
        with pytest.raises(ChecksumError, match="Adler-32") as caught:
            use()
        assert caught.value.tensor == "layer.weight"
        assert "is not the base" in caught.value.hint
    assert sorted(os.listdir(tmp_path)) == ["base", "delta"]


def test_b05_a_checksum_that_begins_with_a_zero(tmp_path, encoder):
    """B05: about one Adler-32 in sixteen has fewer than 8 digits before it is padded."""
    old = {"w": ("U8", [4], b"\0\0\0\0")}
    new = {"w": ("U8", [4], b"\1\0\0\0")}
    base, after = sf.write_full(tmp_path / "a", old), sf.write_full(tmp_path / "b", new)
    write_delta(base, after, tmp_path / "d", version=1, base_version=0)
    assert sf.read_tensors(tmp_path / "d" / SHARD)[1] == {"w": "00080002"}
    apply_delta(base, tmp_path / "d", tmp_path / "out")
    assert inspect_snapshot(tmp_path / "out", verify="full").checksums == {"w": "00080002"}


def test_a_delta_on_another_base_names_all_wrong_tensors(tmp_path, base, encoder):
    other = sf.write_full(tmp_path / "other", sf.toy(3))
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    for use in (apply_delta, convert_delta):
        with pytest.raises(ChecksumError) as caught:
            use(other, delta, tmp_path / "out")
        assert "'layer.weight'" in caught.value.message
        assert "'odd.weight'" in caught.value.message
        assert str(other) in caught.value.hint
    assert not (tmp_path / "out").exists()


def test_a_base_that_is_damaged_itself(tmp_path, encoder):
    """A tensor that the delta does not touch is compared with what the base recorded of it."""
    recorded = write_full_snapshot(sf.write_full(tmp_path / "plain", sf.toy(0)), tmp_path / "base")
    shard = recorded / SHARD.replace("00000-of", "00001-of")
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1  # the last tensor is not in the delta
    shard.write_bytes(bytes(raw))
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    with pytest.raises(ChecksumError, match="expected is") as caught:
        apply_delta(recorded, delta, tmp_path / "out")
    assert caught.value.tensor == "strange \u00e9 'name"
    assert not (tmp_path / "out").exists()


def test_frames_of_an_empty_and_an_unchanged_tensor(tmp_path, base, encoder):
    names = ["embed_tokens.weight", "layer.weight", "odd.weight", "scaled_fp8"]
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1), names=names)
    assert apply_delta(base, delta, tmp_path / "out").changed_tensors == 4
    assert sf.read_checkpoint(tmp_path / "out") == sf.toy(1)
    stats = convert_delta(base, delta, tmp_path / "converted")
    assert stats.changed_tensors == 2  # a conversion leaves out what does not change
    assert sf.apply_delta(sf.toy(0), tmp_path / "converted") == sf.toy(1)
    bad = sf.write_delta(tmp_path / "bad", sf.toy(0), sf.toy(1), names=names, make_frame=lambda d: sf.frame(d or b"x"))
    with pytest.raises(ChecksumError, match="'scaled_fp8'"):
        apply_delta(base, bad, tmp_path / "no")
    skippable = b"\x50\x2a\x4d\x18\0\0\0\0"
    worse = sf.write_delta(
        tmp_path / "worse", sf.toy(0), sf.toy(1), names=names, make_frame=lambda d: sf.frame(d) if d else skippable
    )
    with pytest.raises(ChecksumError, match="is no zstd frame"):
        apply_delta(base, worse, tmp_path / "no")


def test_an_empty_delta_copies_the_base(tmp_path, base, encoder):
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(0))
    assert apply_delta(base, delta, tmp_path / "out").changed_tensors == 0
    assert sf.read_checkpoint(tmp_path / "out") == sf.toy(0)
    assert convert_delta(base, delta, tmp_path / "converted").empty


def test_what_is_refused(tmp_path, base):
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    for use in (apply_delta, convert_delta):
        with pytest.raises(SnapshotError, match="not an empty directory"):
            use(base, delta, base)
        with pytest.raises(SnapshotLayoutError, match="full snapshot"):
            use(base, base, tmp_path / "out")
        with pytest.raises(SnapshotLayoutError, match="is a delta"):
            use(delta, delta, tmp_path / "out")
        with pytest.raises(ConfigError):
            use(base, delta, tmp_path / "out", workers=0)
    unknown = {"delta_encoding": "xor_sparse", "compression_format": "lz4", "checksum_format": "crc32"}
    index = sf.read_index(delta)
    index["metadata"].update(unknown)
    sf.write_json(delta / sf.INDEX, index)
    with pytest.raises(SnapshotLayoutError) as caught:
        apply_delta(base, delta, tmp_path / "out")
    assert len(caught.value.problems) == 3
    assert "'xor' or 'overwrite' can be read" in caught.value.problems[0]
    assert "'adler32' or 'xxh3-128' or 'blake3'" in caught.value.problems[2]


def test_a_checksum_whose_library_is_missing():
    """The refusal has the command that installs it."""

    def load(name):
        raise ImportError(name)

    for algorithm, package in (("xxh3-128", "xxhash"), ("blake3", "blake3")):
        with pytest.raises(ConfigError, match=f"{package} is not installed") as caught:
            hashers(algorithm, load=load)
        assert "pip install 'cwtrain-core[checksums]'" in caught.value.hint
    hashers("adler32", load=load)  # needs none


def test_malformed_foreign_checksums(tmp_path, base):
    library_of("blake3")
    delta = foreign_delta(tmp_path / "delta", sf.toy(0), sf.toy(1), algorithm="blake3")
    tensors, sums = sf.read_tensors(delta / SHARD)
    (delta / SHARD).write_bytes(sf.safetensors(tensors, {name: text.upper() for name, text in sums.items()}))
    with pytest.raises(SnapshotLayoutError, match="is not 64 lower-case hex digits"):
        apply_delta(base, delta, tmp_path / "out")


def test_a_delta_that_changes_while_it_is_read(tmp_path, base, encoder):
    delta = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    root = open_checkpoint(base)
    change = open_delta(delta, base=root)
    os.utime(delta / SHARD, ns=(1, 1))
    with pytest.raises(SnapshotChangedError):
        sweep(list(root.tensors.values()), changes=change.changes, workers=1)
