"""Read a snapshot's file once to hash it and again to send it, and notice when it changes in between.

A file is opened once, so one that replaces it by a rename does no harm. Everything else (size, modification time,
inode against what inspection saw, and the SHA-256 of the bytes sent against that of the bytes hashed) is an error.

How the second read is checked part by part without a second hash: SHA-256 goes through the file in order, so its state
at each part's beginning is kept, and a part that is sent continues from there and must arrive at the next one's.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from typing import Any

from cwtrain.errors import SnapshotChangedError, SnapshotError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage.report import ObjectDigest

__all__ = ["BLOCK", "PartBody", "SendingStopped", "Source"]

BLOCK = 1 << 20


class SendingStopped(BaseException):
    """Raised inside a request that must not go on; ``error`` says why, None when the whole upload was stopped.

    Not an Exception: botocore takes any Exception of a body for a broken connection and sends it again.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(str(error or "the upload was stopped"))
        self.error = error


class Source:
    """The bytes of one object-to-be: ``file.head``, then ranges of the file at ``file.path``."""

    def __init__(self, file: SnapshotFile, *, part_bytes: int, stopped: threading.Event) -> None:
        self.file = file
        self.part_bytes = part_bytes
        self.parts = max(1, -(-file.size_bytes // part_bytes))
        self.digest: ObjectDigest | None = None
        self._stopped = stopped
        self._states: list[Any] = []
        self._fd: int | None = None
        self._opened: os.stat_result | None = None
        self._segments: list[tuple[int, int, int | None]] = []  # (where in the object, length, where in the file)
        start = len(file.head)
        if start:
            self._segments.append((0, start, None))
        for offset, length in file.ranges:
            if length:
                self._segments.append((start, length, offset))
                start += length
        if start != file.size_bytes:
            raise SnapshotError(f"{file.name}: head and ranges make {start} bytes, not {file.size_bytes}")

    def hash(self) -> ObjectDigest:
        """Read everything once and return size and SHA-256. Raises SnapshotChangedError, or SendingStopped."""
        self._open()
        state = hashlib.sha256()
        states = [state.copy()]
        for part in range(self.parts):
            begin, end = self.span(part)
            while begin < end:
                if self._stopped.is_set():
                    raise SendingStopped
                block = self.read(begin, min(BLOCK, end - begin))
                state.update(block)
                begin += len(block)
            states.append(state.copy())
        self.check()
        self._states = states
        self.digest = ObjectDigest(self.file.size_bytes, state.hexdigest())
        return self.digest

    def span(self, part: int) -> tuple[int, int]:
        """Return where part number ``part`` (from 0) begins and ends."""
        begin = part * self.part_bytes
        return begin, min(begin + self.part_bytes, self.file.size_bytes)

    def body(self, part: int, *, on_bytes: Callable[[int], None], block: int = BLOCK) -> PartBody:
        """Return part number ``part`` (from 0) as a body to send.

        ``on_bytes`` is told how many bytes were taken (less than none when a request is repeated), at most ``block``
        at once.
        """
        begin, end = self.span(part)
        states = self._states[part], self._states[part + 1]
        return PartBody(self, begin, end, states, on_bytes=on_bytes, block=block, stopped=self._stopped)

    def read(self, offset: int, size: int) -> bytes:
        """Return up to ``size`` bytes from ``offset`` of the object, at least one before its end."""
        for start, length, place in self._segments:
            if not start <= offset < start + length:
                continue
            size = min(size, start + length - offset)
            if place is None:
                return self.file.head[offset : offset + size]
            assert self._fd is not None
            try:
                block = os.pread(self._fd, size, place + offset - start)
            except OSError as error:
                raise SnapshotError(
                    f"{self.file.path} cannot be read: {error.strerror}",
                    hint="check the file system, then run it again",
                ) from error
            if not block:
                raise self.changed("it became shorter")
            return block
        return b""

    def check(self) -> None:
        """Raise SnapshotChangedError when the open file is not as it was opened."""
        if self._fd is None or self._opened is None:
            return
        now = os.fstat(self._fd)
        if now.st_size != self._opened.st_size:
            raise self.changed(f"it had {self._opened.st_size} bytes and has {now.st_size}")
        if now.st_mtime_ns != self._opened.st_mtime_ns:
            raise self.changed("it was written to")

    def close(self) -> None:
        """Close the file and forget what was kept for sending."""
        self._states = []
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _open(self) -> None:
        if self.file.path is None or self._fd is not None:
            return
        try:
            self._fd = os.open(self.file.path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise self.changed("it is gone") from error
        except OSError as error:
            raise SnapshotError(f"{self.file.path} cannot be opened: {error.strerror}") from error
        self._opened = now = os.fstat(self._fd)
        if now.st_size != self.file.file_bytes:
            raise self.changed(f"it had {self.file.file_bytes} bytes and has {now.st_size}")
        # 0 means that whoever described the file did not look.
        if self.file.mtime_ns and now.st_mtime_ns != self.file.mtime_ns:
            raise self.changed("it was written to")
        if self.file.inode and (now.st_ino, now.st_dev) != (self.file.inode, self.file.device):
            raise self.changed("another file took its place")

    def changed(self, how: str) -> SnapshotChangedError:
        """Return the error that says how the file changed."""
        return SnapshotChangedError(
            f"{self.file.path or self.file.name} changed after it was inspected: {how}",
            file=self.file.path or self.file.name,
            hint="wait until the trainer has finished writing, then publish again (under a new identity if it asks so)",
        )


class PartBody:
    """A part of an object as a stream to send: read in blocks, hashed as it goes, rewound when it is sent again."""

    def __init__(
        self,
        source: Source,
        begin: int,
        end: int,
        states: tuple[Any, Any],
        *,
        on_bytes: Callable[[int], None],
        block: int,
        stopped: threading.Event,
    ) -> None:
        self._source = source
        self._begin = begin
        self._end = end
        self._state, self._wanted = states
        self._on_bytes = on_bytes
        self._block_bytes = block
        self._stopped = stopped
        self._loaded = begin
        self._block = b""
        self._given = 0
        self._counted = 0
        self._hash = self._state.copy()

    def __len__(self) -> int:
        return self._end - self._begin

    def tell(self) -> int:
        """Return the position in the part."""
        return self._loaded - len(self._block) + self._given - self._begin

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to the beginning or the end; nothing else can be checked."""
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: len(self)}[whence]
        if position == self.tell():
            return position
        if position not in (0, len(self)):
            raise ValueError("a part can be sent again from its beginning only")
        if position == 0:
            self._on_bytes(-self._counted)
            self._counted = 0
        self._loaded = self._begin + position
        self._block, self._given = b"", 0
        self._hash = self._state.copy()
        return position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes. Raises SendingStopped when the file changed or the upload was stopped."""
        if self._stopped.is_set():
            raise SendingStopped
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(self._block_bytes), b""))
        if self._given == len(self._block):
            self._load()
        piece = self._block[self._given : self._given + size]
        self._given += len(piece)
        return piece

    def _load(self) -> None:
        self._block, self._given = b"", 0
        if self._loaded == self._end:
            return
        try:
            block = self._source.read(self._loaded, min(self._block_bytes, self._end - self._loaded))
            self._hash.update(block)
            # Checked before the last block is handed out, so that a changed part never arrives whole.
            if self._loaded + len(block) == self._end:
                self._check_end()
        except (SnapshotError, OSError) as error:
            raise SendingStopped(error) from error
        self._block = block
        self._loaded += len(block)
        self._counted += len(block)
        self._on_bytes(len(block))

    def _check_end(self) -> None:
        self._source.check()
        if self._hash.digest() != self._wanted.digest():
            raise self._source.changed("the bytes that were sent are not those that were hashed")
