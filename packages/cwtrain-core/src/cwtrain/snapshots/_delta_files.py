"""The files of a delta, written while it is being encoded: data first, the header last.

How long a shard's header gets is known when its last frame is there. So a shard's frames wait in memory until they are
8 MiB; a delta that stays below is written in one go. A larger one gets room for the header that it would need if all
tensors that are still to come went into it, then its data, then the header, padded with spaces. Where the padding is
more than a few percent (few of many small tensors changed), the data is moved down.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence

from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._buffers import MAX_PARTS
from cwtrain.snapshots._codec import EncodedTensor
from cwtrain.snapshots._digests import record_digest
from cwtrain.snapshots._write import synced_file
from cwtrain.snapshots.header import build_header
from cwtrain.snapshots.index import dump_index

HOLD_BYTES = 8 << 20
_GATHER_BYTES = 1 << 20
_WASTE = 32
"""Padding may be one part in this many of a shard."""


class DeltaFiles:
    """A sink for ``encode_delta`` that writes shards and index into the directory ``stage``.

    ``names`` are the tensors that may come, in order. A shard is complete when it has ``shard_bytes`` of frames or
    more.
    """

    def __init__(
        self, stage: str, names: Sequence[str], *, raw_bytes: int, shard_bytes: int, hold_bytes: int = HOLD_BYTES
    ) -> None:
        self._stage, self._names, self._shard_bytes, self._hold = stage, names, shard_bytes, hold_bytes
        self._largest = len(str(2 * raw_bytes + (1 << 20)))  # digits of the largest offset there can be
        self._seen = 0  # tensors that are done
        self._members: list[tuple[str, EncodedTensor]] = []  # of the open shard
        self._pieces: list[bytes] = []
        self._pending = self._size = 0  # bytes of pieces; bytes of the open shard's frames
        self._fd: int | None = None
        self._reserved = 0
        self._shards: list[tuple[str, list[str]]] = []
        self.total_bytes = 0
        """Bytes of all files, when ``close`` is done."""

    def write(self, piece: bytes) -> None:
        """Take the next piece of the current tensor's frame."""
        self._pieces.append(piece)
        self._pending += len(piece)
        if self._fd is not None and self._pending >= _GATHER_BYTES:
            self._flush(self._fd)
        elif self._fd is None and self._pending >= self._hold:
            self._fd = self._open()
            self._flush(self._fd)

    def end_tensor(self, name: str, encoded: EncodedTensor) -> None:
        """Note that a tensor is done."""
        self._seen += 1
        if encoded.frame_bytes:
            self._members.append((name, encoded))
            self._size += encoded.frame_bytes
            if self._size >= self._shard_bytes:
                self._end_shard()

    def close(self, versions: tuple[str, str]) -> int:
        """Finish the last shard, name all of them, write the index, and return how many shards there are."""
        if self._members:
            self._end_shard()
        weight_map: dict[str, str] = {}
        for number, (path, names) in enumerate(self._shards):
            shard = f"model-{number:05d}-of-{len(self._shards):05d}.safetensors"
            os.rename(path, os.path.join(self._stage, shard))
            weight_map.update(dict.fromkeys(names, shard))
        metadata = {
            "version": versions[0],
            "base_version": versions[1],
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
        index = dump_index({"metadata": metadata, "weight_map": weight_map})
        with synced_file(os.path.join(self._stage, INDEX_NAME)) as file:
            file.write(index)
        self.total_bytes += len(index)
        return len(self._shards)

    def abandon(self) -> None:
        """Close what is open, after an error."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _path(self) -> str:
        return os.path.join(self._stage, f"{len(self._shards)}.part")

    def _open(self) -> int:
        coming = [name for name, _ in self._members] + list(self._names[self._seen :])
        self._reserved = 64 + sum(self._header_bytes(name) for name in coming)
        self._reserved += -self._reserved % 8
        fd = os.open(self._path(), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.lseek(fd, self._reserved, os.SEEK_SET)
        return fd

    def _header_bytes(self, name: str) -> int:
        """Return how long a tensor's entries in the header get at most."""
        spelled = len(json.dumps(name, ensure_ascii=False).encode())
        numbers = 3 * self._largest
        return 2 * spelled + numbers + len(':"12345678",:{"dtype":"U8","shape":[],"data_offsets":[,]},')

    def _flush(self, fd: int) -> None:
        _write_all(fd, self._pieces)
        self._pieces, self._pending = [], 0

    def _end_shard(self) -> None:
        tensors = ((name, "U8", (item.frame_bytes,), item.frame_bytes) for name, item in self._members)
        head = build_header(tensors, {name: item.checksum for name, item in self._members})
        path = self._path()
        sha256 = None
        if self._fd is None:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            pieces = [head, *self._pieces]
            _write_all(self._fd, pieces)
            sha256 = _sha256(pieces)
            self._pieces, self._pending = [], 0
        else:
            self._flush(self._fd)
            if (self._reserved - len(head)) * _WASTE > self._size:
                _move_down(self._fd, self._reserved, len(head), self._size)
            else:
                head = _padded(head, self._reserved)
            _write_at(self._fd, head, 0)
        # An upload needs it. Where the header was not known before the data went by, everything is read once more.
        record_digest(self._fd, sha256)
        os.fsync(self._fd)
        os.close(self._fd)
        self._fd = None
        self.total_bytes += len(head) + self._size
        self._shards.append((path, [name for name, _ in self._members]))
        self._members, self._size = [], 0


def _padded(head: bytes, length: int) -> bytes:
    """Return a header of this whole length."""
    return (length - 8).to_bytes(8, "little") + head[8:] + b" " * (length - len(head))


def _sha256(pieces: Sequence[bytes]) -> str:
    digest = hashlib.sha256()
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def _write_all(fd: int, pieces: Sequence[bytes]) -> None:
    """Write the pieces where the file stands."""
    for start in range(0, len(pieces), MAX_PARTS):
        group = pieces[start : start + MAX_PARTS]
        done = os.writev(fd, group)
        for piece in group:
            rest = memoryview(piece)[min(done, len(piece)) :]
            done = max(0, done - len(piece))
            while rest:
                rest = rest[os.write(fd, rest) :]


def _write_at(fd: int, data: bytes | memoryview, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def _move_down(fd: int, source: int, target: int, size: int) -> None:
    """Move ``size`` bytes towards the file's begin, and cut off what is left behind them."""
    done = 0
    while done < size:
        piece = os.pread(fd, min(_GATHER_BYTES, size - done), source + done)
        assert piece  # it was written a moment ago
        _write_at(fd, piece, target + done)
        done += len(piece)
    os.ftruncate(fd, target + size)
