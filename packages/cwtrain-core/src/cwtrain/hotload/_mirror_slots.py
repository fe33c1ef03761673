"""The next version of a mirror's shards, written into the other slots; the current one is only read.

What the other slot has already is kept: it holds the version before, so only the tensors that changed since are
written. Where there is no file yet, it begins as a clone of the current one (reflink) if the file system can.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping, Sequence

from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_files import Layout, Shard, digest
from cwtrain.hotload._mirror_state import OTHER, ShardState
from cwtrain.snapshots.checkpoint import Tensor

__all__ = ["SlotWriter", "missing_bytes"]


def missing_bytes(layout: Layout, shards: Iterable[Shard]) -> int:
    """Return how many bytes of the other slots of ``shards`` the disk has still to give."""
    missing = 0
    for shard in shards:
        try:
            status = os.stat(layout.shard(shard.name, OTHER[shard.state.slot]))
            have = min(status.st_size, status.st_blocks * 512)
        except OSError:
            have = 0
        missing += max(0, shard.header.file_bytes - have)
    return missing


class SlotWriter:
    """Takes the new bytes of ``shards``, as a target of a sweep or an encoder. Close it at the end, come what may.

    ``written`` names the tensors that will be written; all others are brought up to date by ``prepare``.
    """

    def __init__(self, disk: Disk, layout: Layout, shards: Sequence[Shard], written: frozenset[str]) -> None:
        self._disk, self._layout, self._shards, self._written = disk, layout, shards, written
        self._fds: dict[str, int] = {}  # path of the current file -> descriptor of the next one
        # The kernel lets one writer into a file at a time, and has the others spin: waiting here costs nothing.
        self._locks = {shard.header.path: threading.Lock() for shard in shards}
        self._entered: set[str] = set()  # directories with new entries

    def prepare(self) -> None:
        """Open the other slots, and copy into them what is not written and not there."""
        for shard in self._shards:
            path = self._next_path(shard)
            reuse = os.path.exists(path)
            fd = self._disk.open(path, create=True)
            self._fds[shard.header.path] = fd
            if not reuse:
                self._entered.add(os.path.dirname(path))
            missing = shard.state.spare
            if not reuse or os.fstat(fd).st_size != shard.header.file_bytes:
                missing = None
            self._copy(shard, fd, missing)

    def _copy(self, shard: Shard, fd: int, missing: frozenset[str] | None) -> None:
        size = shard.header.file_bytes
        source = os.open(shard.header.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size != size:
                if self._disk.clone(source, fd):
                    self._disk.truncate(fd, size)
                    return
                self._disk.allocate(fd, size)
            begin = end = 0
            for name, info in shard.header.tensors.items():
                if name in self._written or (missing is not None and name not in missing):
                    continue
                offset = shard.header.data_start + info.begin
                if offset != end:
                    if end > begin:
                        self._disk.copy_range(source, fd, begin, end - begin)
                    begin = offset
                end = shard.header.data_start + info.end
            if end > begin:
                self._disk.copy_range(source, fd, begin, end - begin)
        finally:
            os.close(source)

    def _next_path(self, shard: Shard) -> str:
        return self._layout.shard(shard.name, OTHER[shard.state.slot])

    def offset(self, tensor: Tensor, start: int) -> int:
        """Return where the bytes from ``start`` on go: where they are in the current file."""
        return tensor.offset + start

    def follows(self, tensor: Tensor, after: Tensor) -> bool:
        """Return whether ``tensor`` begins where ``after`` ends."""
        return tensor.file is after.file and after.offset + after.size_bytes == tensor.offset

    def write(self, tensor: Tensor, start: int, new: Sequence[memoryview], old: Sequence[memoryview]) -> None:
        """Write new bytes."""
        path = tensor.file.path
        with self._locks[path]:
            self._disk.write(self._fds[path], new, tensor.offset + start)

    def finish(self, checksums: Mapping[str, str], changed: frozenset[str]) -> dict[str, Shard]:
        """Write the headers, sync each shard that has a tensor of ``changed``, and return all as they are then."""
        done: dict[str, Shard] = {}
        for shard in self._shards:
            fd = self._fds[shard.header.path]
            names = {name: info.size_bytes for name, info in shard.header.tensors.items()}
            here = changed.intersection(names)
            if not here:  # written all the same: the other slot is equal now
                state = ShardState(slot=shard.state.slot, head=shard.state.head, spare=frozenset())
                done[shard.name] = Shard(name=shard.name, header=shard.header, state=state)
                continue
            metadata = shard.metadata(checksums)
            head = shard.head(metadata)
            self._disk.write(fd, [head], 0)
            self._disk.fsync(fd)
            whole = all(name in here for name, size in names.items() if size)
            state = ShardState(
                slot=OTHER[shard.state.slot], head=digest(head), spare=None if whole else frozenset(here)
            )
            done[shard.name] = shard.written(fd, self._next_path(shard), metadata, state)
        for directory in self._entered:  # none, unless somebody removed the empty files that a mirror is made with
            self._disk.fsync_directory(directory)
        return done

    def close(self) -> None:
        """Close the files."""
        self._disk.close(self._fds.values())
        self._fds = {}
