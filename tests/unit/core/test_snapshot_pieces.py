"""The parts that readers and writers of snapshots are made of: spans, buffers, targets, the files of a delta."""

import contextlib
import ctypes
import errno
import json
import os
import random
import threading

import pytest
import zstandard

from cwtrain.errors import SnapshotError
from cwtrain.snapshots._buffers import MAX_PARTS, PAGE_BYTES, Lane, phase, positions_of
from cwtrain.snapshots._codec import EncodedTensor, delta_codec
from cwtrain.snapshots._delta_files import DeltaFiles
from cwtrain.snapshots._encode import encode_delta
from cwtrain.snapshots._sequences import FEW
from cwtrain.snapshots._spans import Part, batches, spans
from cwtrain.snapshots._targets import FileTarget
from cwtrain.snapshots._write import Spill, allocate, staged_directory
from cwtrain.snapshots._zstd import ENCODERS
from cwtrain.snapshots.checkpoint import open_checkpoint
from helpers import snapshot_files as sf


def test_large_tensors_are_cut_and_small_neighbours_share_a_span():
    found = list(spans([20, 3, 4, 0, 1], adjacent=lambda n: n != 4, chunk_bytes=8))
    assert found == [
        (Part(0, 0, 8),),
        (Part(0, 8, 8),),
        (Part(0, 16, 4), Part(1, 0, 3)),
        (Part(2, 0, 4), Part(3, 0, 0)),
        (Part(4, 0, 1),),
    ]
    apart = list(spans([2, 2, 2], adjacent=lambda n: True, chunk_bytes=8, alone=lambda n: n == 1))
    assert [len(span) for span in apart] == [1, 1, 1]
    many = list(spans([1] * (MAX_PARTS + 1), adjacent=lambda n: True, chunk_bytes=1 << 20))
    assert [len(span) for span in many] == [MAX_PARTS, 1]


def test_batches_end_where_a_file_ends_or_enough_is_there():
    found = list(spans([16, 8, 8, 8], adjacent=lambda n: False, chunk_bytes=8))
    assert [len(batch) for batch in batches(found, same_files=lambda m, n: n != 3, batch_bytes=16)] == [2, 2, 1]
    whole = batches(found, same_files=lambda m, n: True, batch_bytes=8, whole=lambda part: part.tensor == 0)
    assert [len(batch) for batch in whole] == [2, 1, 1, 1]


@pytest.mark.parametrize("read", [0, 8, 9, 4088, 4095, 123_456_789])
@pytest.mark.parametrize("write", [None, 0, 1, 8, 63, 64, 4090, 987_654_321])
def test_copies_never_run_into_aliasing(read, write):
    """A copy whose target lies 1 to 63 bytes above its source, within the page, can be ten times slower."""
    place = phase(read, write)
    assert place % 8 == 0
    assert 0 <= place < PAGE_BYTES
    assert (place - read) % PAGE_BYTES == 0 or (place - read) % PAGE_BYTES >= 64
    if write is not None and write % 8 == 0:
        assert (write - place) % PAGE_BYTES == 0 or (write - place) % PAGE_BYTES >= 64


def test_parts_begin_on_whole_words_with_zeros_behind_them():
    lane = Lane(64)
    lengths = [3, 8, 0, 9]
    positions = positions_of(lengths)
    assert positions == [0, 8, 16, 16]
    for filling in (b"\xff", b"\x01"):
        views = lane.place(lengths, positions, 40)
        for view, length in zip(views, lengths, strict=True):
            assert len(view) == length
            view[:] = filling * length
        assert lane.data.tobytes() == filling * 3 + bytes(5) + filling * 8 + filling * 9 + bytes(7)
        assert lane.address % PAGE_BYTES == 40


def test_parts_come_out_alike_however_many_are_looked_at_together():
    rng = random.Random(11)
    worker = delta_codec().worker()
    pairs = []
    for number in range(3 * FEW):
        old = rng.randbytes(rng.choice([0, 1, 7, 8, 100, 2000, 9001]))
        new = bytearray(old)
        for _ in range([0, 1, len(old) // 40, len(old)][number % 4]):
            if old:
                new[rng.randrange(len(old))] = rng.randrange(256)
        pairs.append((old, bytes(new)))

    def diffs(group):
        olds, news = worker.place([len(old) for old, _ in group])
        for view, other, (old, new) in zip(olds, news, group, strict=True):
            view[:], other[:] = old, new
        return worker.diff([(0, len(old)) for old, _ in group])

    together = diffs(pairs)
    for size in (1, 2, FEW, FEW + 1):
        assert [diff for start in range(0, len(pairs), size) for diff in diffs(pairs[start : start + size])] == together


def test_a_target_writes_from_several_threads_and_keeps_one_file_open_for_each(tmp_path):
    raw = {name: ("U8", [10], bytes([i]) * 10) for i, name in enumerate("abcd")}
    tensors = open_checkpoint(sf.write_full(tmp_path / "full", raw)).tensors
    paths = [tmp_path / "one", tmp_path / "two"]
    for path in paths:
        with open(path, "wb") as file:
            allocate(file.fileno(), 30)
        assert path.stat().st_size == 30
    places = {"a": (paths[0], 0), "b": (paths[0], 10), "c": (paths[1], 20), "d": (paths[1], 0)}
    target = FileTarget({name: (str(path), offset) for name, (path, offset) in places.items()})
    assert target.follows(tensors["b"], tensors["a"])
    assert not target.follows(tensors["c"], tensors["b"])
    assert not target.follows(tensors["d"], tensors["c"])
    assert target.offset(tensors["c"], 3) == 23

    def held():
        """Return which of our files are open; those of other tests' threads may come and go."""
        found = []
        for fd in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
            with contextlib.suppress(OSError):
                found.append(os.readlink(f"/proc/self/fd/{fd}"))
        return sorted(path for path in found if path.startswith(str(tmp_path)))

    before = held()

    def write(names):
        for name in names:
            views = [memoryview(raw[name][2])[:4], memoryview(raw[name][2])[4:]]
            target.write(tensors[name], 0, views, views)

    threads = [threading.Thread(target=write, args=(names,)) for names in ("ac", "bd")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    target.close()
    assert held() == before
    assert paths[0].read_bytes() == raw["a"][2] + raw["b"][2] + bytes(10)
    assert paths[1].read_bytes() == raw["d"][2] + bytes(10) + raw["c"][2]


def test_room_that_is_not_there_or_cannot_be_promised(tmp_path):
    def failing(*numbers):
        answers = iter(numbers)

        def reserve(fd, mode, offset, length):
            ctypes.set_errno(next(answers))
            return -1

        return lambda: reserve

    with (
        pytest.raises(SnapshotError, match="disk is full"),
        staged_directory(str(tmp_path / "out")) as stage,
        open(os.path.join(stage, "file"), "wb") as file,
    ):
        allocate(file.fileno(), 100, find=failing(errno.EINTR, errno.ENOSPC))
    assert not os.listdir(tmp_path)
    for find in (failing(errno.EOPNOTSUPP), lambda: None):
        with open(tmp_path / "file", "wb") as file:
            allocate(file.fileno(), 100, find=find)
        assert (tmp_path / "file").stat().st_size == 100


def write_files(stage, names, changed, *, shard_bytes=1 << 30, hold_bytes=1000):
    files = DeltaFiles(str(stage), names, raw_bytes=10_000, shard_bytes=shard_bytes, hold_bytes=hold_bytes)
    for name in names:
        size = changed.get(name, 0)
        if size:
            data = bytes([len(name)]) * size
            for start in range(0, size, 300):
                files.write(data[start : start + 300])
        files.end_tensor(name, EncodedTensor(changed_bytes=size, checksum="00000001", frame_bytes=size))
    shards = files.close(("000001", "000000"))
    files.abandon()
    assert files.total_bytes == sum(path.stat().st_size for path in stage.iterdir())
    return shards


def spaces_in(path):
    raw = path.read_bytes()
    text = raw[8 : 8 + int.from_bytes(raw[:8], "little")]
    assert len(text) % 8 == 0
    json.loads(text)
    return len(text) - len(text.rstrip(b" "))


@pytest.mark.parametrize(
    ("names", "changed", "spaces"),
    [
        (["a", "bb"], {"a": 400, "bb": 500}, (0, 7)),  # fits: held back, then written in one go
        (["a", "bb"], {"a": 4000, "bb": 5000}, (8, 281)),  # streamed: room was left for what could have come
        ([f"n{i}" for i in range(300)], {"n0": 2000, "n7": 10}, (0, 7)),  # streamed, but little came: moved down
        (["a\u00e9\n'", 'b"\\'], {"a\u00e9\n'": 7000, 'b"\\': 3000}, (8, 312)),
    ],
)
def test_the_files_of_a_delta(tmp_path, names, changed, spaces):
    assert write_files(tmp_path, names, changed) == 1
    shard = tmp_path / "model-00000-of-00001.safetensors"
    tensors, sums = sf.read_tensors(shard)
    assert {name: len(blob) for name, (_, _, blob) in tensors.items()} == changed
    assert all(blob == bytes([len(name)]) * changed[name] for name, (_, _, blob) in tensors.items())
    assert set(sums) == set(changed)
    assert spaces[0] <= spaces_in(shard) <= spaces[1]
    assert sf.read_index(tmp_path)["weight_map"] == dict.fromkeys(changed, shard.name)
    assert sorted(os.listdir(tmp_path)) == sorted([shard.name, sf.INDEX])


def test_shards_take_frames_until_they_are_full(tmp_path):
    names = list("abcdefg")
    sizes = dict(zip(names, [400, 700, 5000, 10, 3000, 0, 900], strict=True))
    assert write_files(tmp_path, names, sizes, shard_bytes=1000) == 4
    groups = {}
    for name, shard in sf.read_index(tmp_path)["weight_map"].items():
        groups.setdefault(shard, []).append(name)
        assert len(sf.read_tensors(tmp_path / shard)[0][name][2]) == sizes[name]
    assert list(groups.values()) == [["a", "b"], ["c"], ["d", "e"], ["g"]]


@pytest.mark.parametrize("encoder", ENCODERS)
@pytest.mark.parametrize("workers", [1, 2, 5])
def test_one_pass_encodes_and_writes_the_new_version(tmp_path, encoder, workers):
    """What a mirror needs: the delta, the new bytes in files of the old layout, and every tensor's checksum."""
    rng = random.Random(4)
    sizes = [5000, 3, 0, 129, 64, 2048, 777]
    old = {f"t{i}": ("U8", [size], rng.randbytes(size)) for i, size in enumerate(sizes)}
    new = dict(old)
    for name in ("t0", "t3", "t6"):
        data = bytearray(old[name][2])
        for place in range(0, len(data), 40):
            data[place] ^= 0x80
        new[name] = ("U8", [len(data)], bytes(data))
    one, two = {n: old[n] for n in list(old)[:4]}, {n: old[n] for n in list(old)[4:]}
    base = open_checkpoint(sf.write_full(tmp_path / "old", one, two))
    after = open_checkpoint(sf.write_full(tmp_path / "new", dict(sorted(new.items(), reverse=True))))
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    places = {}
    for tensor in base.tensors.values():
        path = mirror / os.path.basename(tensor.file.path)
        path.write_bytes(bytes(tensor.file.file_bytes))
        places[tensor.name] = (str(path), tensor.offset)
    target = FileTarget(places)
    frames = {}

    class Sink:
        pieces = b""

        def write(self, piece):
            self.pieces += piece

        def end_tensor(self, name, encoded):
            assert len(self.pieces) == encoded.frame_bytes
            frames[name], self.pieces = self.pieces, b""

    codec = delta_codec(encoder, chunk_bytes=256)
    spill = Spill(str(tmp_path), budget_bytes=100)
    options = {"codec": codec, "target": target, "chunk_bytes": 256, "batch_bytes": 700}
    done = encode_delta(base, after, Sink(), workers=workers, spill=spill, **options)
    target.close()
    spill.close()
    assert list(frames) == [name for name in after.tensors if sizes[int(name[1])]]
    for name, (_, _, raw) in new.items():
        path, offset = places[name]
        with open(path, "rb") as file:
            file.seek(offset)
            assert file.read(len(raw)) == raw
        changed = raw != old[name][2]
        assert bool(done[name].frame_bytes) == bool(done[name].changed_bytes) == changed
        if changed:
            assert zstandard.ZstdDecompressor().decompress(frames[name]) == sf.xor(old[name][2], raw)
    assert done["t2"].checksum == "00000001"
