"""An update of a mirror's shards in place, for when the disk has no room for a second file of each.

A delta is its own inverse: applied to the new bytes it gives the old ones. So it takes little to undo an update that
was cut short, all in a directory ``pending`` that is there until the new version counts:

    update.json       which switch this is
    delta/            the delta, hard-linked
    N.head            the header of shard N as it was
    W.slot            worker W's pre-image: the old bytes of the piece that it is writing
    W.log, undo.log   one record for each piece that was written, or put back

A piece is written in three steps: its old bytes to the slot, the new ones into the shard, a record to the log. Killed
in between, the slot says what to put back; with the record there the piece is whole.
"""

from __future__ import annotations

import itertools
import json
import os
import struct
import threading
from collections.abc import Iterator, Mapping, Sequence

import attrs

from cwtrain.errors import ChecksumError, MirrorDamagedError, SnapshotChangedError
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_files import REBUILD, Layout, Shard, digest
from cwtrain.hotload._mirror_state import ShardState
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._adler import adler32
from cwtrain.snapshots._codec import CHUNK_BYTES
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._patch import Blobs, Patcher
from cwtrain.snapshots._spans import Part
from cwtrain.snapshots._write import is_full
from cwtrain.snapshots._zstd import encoder_library
from cwtrain.snapshots.changes import Change, DeltaDirectory, open_delta
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor

__all__ = ["HeldTensor", "InPlaceWriter", "is_pending", "undo"]

_RECORD = struct.Struct("<4sIQQI")  # of a log: magic, shard, offset, length, Adler-32 of the record so far
_SLOT = struct.Struct("<4sIQQI")  # of a slot: direction, shard, offset, length, Adler-32 of these and the old bytes
_LOG, _FORWARD, _BACK = b"done", b"new ", b"old "


@attrs.frozen(kw_only=True)
class HeldTensor(Tensor):
    """A tensor in a file that only the holder of the lock changes, and does change while it is read."""

    def check(self, file: RegularFile) -> None:
        """Check nothing."""


class InPlaceWriter:
    """Takes the new bytes of ``shards`` and writes them over the old ones. Close it at the end, come what may."""

    def __init__(self, disk: Disk, layout: Layout, shards: Sequence[Shard]) -> None:
        self._disk, self._layout, self._shards = disk, layout, shards
        self._numbers = {shard.header.path: number for number, shard in enumerate(shards)}
        self._fds: list[int] = []
        self._local = threading.local()
        self._workers = itertools.count()
        self._journals: list[_Journal] = []

    def prepare(self, delta: DeltaDirectory, serial: int) -> None:
        """Put down what it takes to undo the update, which will be switch ``serial``."""
        stage = f"{self._layout.pending}.new"
        self._disk.remove_tree(stage)
        self._disk.mkdir(stage)
        self._disk.mkdir(os.path.join(stage, "delta"))
        for path in {change.blob.file.path for change in delta.changes.values()}:
            self._disk.link(path, os.path.join(stage, "delta", os.path.basename(path)))
        self._disk.link(os.path.join(delta.path, INDEX_NAME), os.path.join(stage, "delta", INDEX_NAME))
        for number, shard in enumerate(self._shards):
            self._put(os.path.join(stage, f"{number}.head"), shard.head(shard.header.metadata))
        update = {"schema_version": 1, "serial": serial, "shards": [shard.name for shard in self._shards]}
        self._put(os.path.join(stage, "update.json"), json.dumps(update).encode())
        self._disk.rename(stage, self._layout.pending)
        self._disk.remove(self._layout.current)  # the root is no snapshot while it is a mixture
        self._fds = [self._disk.open(shard.header.path) for shard in self._shards]

    def _put(self, path: str, data: bytes) -> None:
        fd = self._disk.open(path, create=True)
        try:
            self._disk.write(fd, [data], 0)
        finally:
            os.close(fd)

    def offset(self, tensor: Tensor, start: int) -> int:
        """Return where the bytes from ``start`` on go: where they are."""
        return tensor.offset + start

    def follows(self, tensor: Tensor, after: Tensor) -> bool:
        """Return whether ``tensor`` begins where ``after`` ends."""
        return tensor.file is after.file and after.offset + after.size_bytes == tensor.offset

    def write(self, tensor: Tensor, start: int, new: Sequence[memoryview], old: Sequence[memoryview]) -> None:
        """Write new bytes over the old ones."""
        journal: _Journal | None = getattr(self._local, "journal", None)
        if journal is None:
            journal = self._local.journal = _Journal(self._disk, self._layout.pending, str(next(self._workers)))
            self._journals.append(journal)
        number = self._numbers[tensor.file.path]
        journal.replace(_FORWARD, self._fds[number], number, tensor.offset + start, new, old)

    def finish(self, checksums: Mapping[str, str], changed: frozenset[str]) -> dict[str, Shard]:
        """Write the headers, sync each shard, and return all as they are then."""
        done: dict[str, Shard] = {}
        for shard, fd in zip(self._shards, self._fds, strict=True):
            metadata = shard.metadata(checksums)
            head = shard.head(metadata)
            self._disk.write(fd, [head], 0)
            self._disk.fsync(fd)
            spare = shard.state.spare
            if spare is not None:
                spare = spare | changed.intersection(shard.header.tensors)
            state = ShardState(slot=shard.state.slot, head=digest(head), spare=spare)
            done[shard.name] = shard.written(fd, shard.header.path, metadata, state)
        return done

    def close(self) -> None:
        """Close the files."""
        for journal in self._journals:
            journal.close()
        self._disk.close(self._fds)
        self._fds, self._journals = [], []


class _Journal:
    """The slot and the log of one worker."""

    def __init__(self, disk: Disk, directory: str, name: str) -> None:
        self._disk = disk
        self._slot = disk.open(os.path.join(directory, f"{name}.slot"), create=True)
        self._log = disk.open(os.path.join(directory, f"{name}.log"), create=True)
        self._end = os.fstat(self._log).st_size // _RECORD.size * _RECORD.size

    def replace(
        self,
        direction: bytes,
        fd: int,
        shard: int,
        offset: int,
        after: Sequence[bytes | memoryview],
        before: Sequence[bytes | memoryview],
    ) -> None:
        """Write ``after`` over ``before``, so that it can be undone whenever it stops."""
        length = sum(map(len, before))
        head = _slot_head(direction, shard, offset, length)
        checksum = adler32(head)
        for view in before:
            checksum = adler32(view, checksum)
        self._disk.write(self._slot, [head, checksum.to_bytes(4, "little"), *before], 0)
        self._disk.write(fd, after, offset)
        self._disk.write(self._log, [_record(shard, offset, length)], self._end)
        self._end += _RECORD.size

    def close(self) -> None:
        self._disk.close([self._slot, self._log])


def _slot_head(direction: bytes, shard: int, offset: int, length: int) -> bytes:
    """Return what a slot begins with, up to its checksum, which covers it: half a new head and old data are nothing."""
    return _SLOT.pack(direction, shard, offset, length, 0)[:-4]


def _record(shard: int, offset: int, length: int) -> bytes:
    record = _RECORD.pack(_LOG, shard, offset, length, 0)
    return record[:-4] + adler32(record[:-4]).to_bytes(4, "little")


def is_pending(layout: Layout, serial: int) -> bool:
    """Return whether an update in place was begun after switch ``serial`` and never got to its own."""
    try:
        with open(os.path.join(layout.pending, "update.json"), "rb") as file:
            return bool(json.load(file)["serial"] > serial)
    except FileNotFoundError:
        return False
    except (OSError, ValueError, KeyError, TypeError):
        return False  # only a crash of the machine leaves it so, and then everything is verified


_Range = tuple[int, int, int]  # shard, offset, length


def undo(disk: Disk, layout: Layout) -> None:
    """Put the old bytes back that an update in place has replaced. May itself be cut short and called again.

    Raises MirrorDamagedError where that cannot be done.
    """
    pending = layout.pending
    with open(os.path.join(pending, "update.json"), "rb") as file:
        names: list[str] = json.load(file)["shards"]
    heads, paths = [], []
    for number, name in enumerate(names):
        with open(os.path.join(pending, f"{number}.head"), "rb") as file:
            heads.append(file.read())
        paths.append(_slot_of(layout, name))
    fds = [disk.open(path) for path in paths]
    journal: _Journal | None = None
    try:
        entries = os.listdir(pending)
        back = set(_records(os.path.join(pending, "undo.log")))
        done = {
            record
            for entry in entries
            if entry.endswith(".log") and entry != "undo.log"
            for record in _records(os.path.join(pending, entry))
        }
        for entry in entries:
            if entry.endswith(".slot"):
                _restore(disk, os.path.join(pending, entry), fds, done, back)
        for head, fd in zip(heads, fds, strict=True):
            disk.write(fd, [head], 0)
        if done:
            journal = _Journal(disk, pending, "undo")
            _apply_again(layout, paths, fds, done, back, journal)
    except (ChecksumError, SnapshotChangedError, OSError) as error:
        if is_full(error):  # nothing is lost: it can be undone as soon as there is room
            raise
        raise MirrorDamagedError(
            f"{layout.root}: an update in place cannot be undone: {error}", hint=REBUILD
        ) from error
    finally:
        if journal is not None:
            journal.close()
        disk.close(fds)


def _slot_of(layout: Layout, name: str) -> str:
    from cwtrain.hotload._mirror_state import load_state

    return layout.shard(name, load_state(layout.state).shards[name].slot)


def _records(path: str) -> Iterator[_Range]:
    """Yield the whole records of a log."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return
    for start in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        raw = data[start : start + _RECORD.size]
        _, shard, offset, length, _ = _RECORD.unpack(raw)
        if raw == _record(shard, offset, length):
            yield shard, offset, length


def _restore(disk: Disk, path: str, fds: Sequence[int], done: set[_Range], back: set[_Range]) -> None:
    """Put a slot's bytes back, if writing the piece was begun and not recorded."""
    with open(path, "rb") as file:
        raw = file.read(_SLOT.size)
        if len(raw) < _SLOT.size:
            return
        direction, shard, offset, length, checksum = _SLOT.unpack(raw)
        data = file.read(length)
    if len(data) != length or adler32(data, adler32(raw[:-4])) != checksum or direction not in (_FORWARD, _BACK):
        return  # not whole, so the shard was not touched yet
    if (shard, offset, length) not in (done if direction == _FORWARD else back):
        disk.write(fds[shard], [data], offset)


def _apply_again(
    layout: Layout, paths: Sequence[str], fds: Sequence[int], done: set[_Range], back: set[_Range], journal: _Journal
) -> None:
    """Apply the delta once more to each piece that has new bytes, which gives the old ones."""
    from cwtrain.snapshots.header import read_header

    headers = [read_header(path) for path in paths]
    numbers = {path: number for number, path in enumerate(paths)}
    tensors = {
        tensor.name: tensor
        for path, header in zip(paths, headers, strict=True)
        for tensor in Shard(name=os.path.basename(path), header=header, state=ShardState(slot="a", head="")).tensors(
            HeldTensor
        )
    }
    delta = open_delta(os.path.join(layout.pending, "delta"), base=Checkpoint(path=layout.root, tensors=tensors))
    written = _Covered(done)
    patcher = Patcher(encoder_library(), {})
    # Pieces are written in a whole multiple of a chunk, and so is what is put back, whatever that multiple was.
    old, new = bytearray(CHUNK_BYTES), bytearray(CHUNK_BYTES)
    with Blobs() as blobs:
        for name, change in delta.changes.items():
            tensor = tensors[name]
            number = numbers[tensor.file.path]
            last = written.end_within(number, tensor.offset, tensor.offset + tensor.size_bytes)
            start = 0
            while tensor.offset + start < last:
                length = min(CHUNK_BYTES, tensor.size_bytes - start)
                offset = tensor.offset + start
                before, after = memoryview(old)[:length], memoryview(new)[:length]
                _read(fds[number], before, offset)
                _patch(patcher, change, Part(0, start, length), tensor.size_bytes, before, after, blobs)
                piece = (number, offset, length)
                if written.has(number, offset) and piece not in back:
                    journal.replace(_BACK, fds[number], number, offset, [after], [before])
                start += length


def _patch(
    patcher: Patcher, change: Change, part: Part, size: int, old: memoryview, new: memoryview, blobs: Blobs
) -> None:
    wrong = patcher.patch(change, part, size, old, new, blobs)
    if wrong is not None:
        raise ChecksumError(wrong.text, tensor=change.blob.name)


def _read(fd: int, view: memoryview, offset: int) -> None:
    while view:
        count = os.preadv(fd, [view], offset)
        if not count:
            raise OSError("the shard is shorter than it was")
        view, offset = view[count:], offset + count


class _Covered:
    """Which parts of the shards are covered by ranges. The ranges do not overlap."""

    def __init__(self, ranges: set[_Range]) -> None:
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        for shard, offset, length in sorted(ranges):
            self._ranges.setdefault(shard, []).append((offset, offset + length))

    def has(self, shard: int, offset: int) -> bool:
        """Return whether the byte at ``offset`` is covered."""
        from bisect import bisect_right

        ranges = self._ranges.get(shard, [])
        at = bisect_right(ranges, (offset, 1 << 62)) - 1
        return at >= 0 and offset < ranges[at][1]

    def end_within(self, shard: int, begin: int, end: int) -> int:
        """Return the end of the last covered byte between ``begin`` and ``end``, ``begin`` if there is none."""
        from bisect import bisect_left

        ranges = self._ranges.get(shard, [])
        at = bisect_left(ranges, (end, 0)) - 1
        return max(begin, min(end, ranges[at][1])) if at >= 0 else begin
