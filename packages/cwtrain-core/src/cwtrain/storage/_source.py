"""Read a snapshot's file to hash it and to send it, and notice when it changes meanwhile.

A file is opened once, so one that replaces it by a rename does no harm. Everything else (size, modification time,
inode against what inspection saw, and the SHA-256 of the bytes sent against that of the bytes hashed) is an error.
The bytes that are hashed and those that are sent are the same memory, never two reads of the file (but see the end).

A file whose SHA-256 nobody knows is read twice: it must be known before the first byte goes out. SHA-256 goes through a
file in order, so its state at each part's beginning is kept from the first read; a part that is sent continues from
there and must arrive at the next one's, and parts go in any order.

A file whose SHA-256 is known is read once, and hashed as it is sent: its last block is held back until the hash is
right. Its parts are hashed in order, one after the other. Where the line is what takes the time, a part that is being
sent reads the rest of itself into memory, so that the next one can begin.

A file that its owner holds (a mirror's, under its lock) and whose SHA-256 nobody knows is hashed, and then sent without
hashing it again; see ``HeldBody`` for what is checked beside the owner's word.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

from cwtrain.errors import SnapshotChangedError, SnapshotError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage._buffers import Buffers, SendingStopped
from cwtrain.storage._digests import forget, known_digest, remember
from cwtrain.storage._part_bodies import BLOCK, ChainBody, FileSpan, HeldBody, PartBody, unreadable
from cwtrain.storage.report import ObjectDigest

__all__ = ["BLOCK", "PartBody", "SendingStopped", "Source"]

_TURN_SECONDS = 0.2


class Source:
    """The bytes of one object-to-be: ``file.head``, then ranges of the file at ``file.path``."""

    def __init__(self, file: SnapshotFile, *, part_bytes: int, stopped: threading.Event) -> None:
        self.file = file
        self.part_bytes = part_bytes
        self.parts = max(1, -(-file.size_bytes // part_bytes))
        self.digest: ObjectDigest | None = None
        self._known = False
        self._turn = threading.Condition()
        self._read_parts = 0  # parts of a known file that were hashed, in order
        self._waiting = 0
        self._chain: Any = None
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

    def learn(self) -> ObjectDigest:
        """Return size and SHA-256, read from the file only where nobody knows it. Raises as ``hash``."""
        if (known := known_digest(self.file)) is None:
            return self.hash()
        self._open()
        self._known = True
        self._chain = hashlib.sha256()
        self.digest = known
        return known

    def hash(self) -> ObjectDigest:
        """Read everything once and return size and SHA-256. Raises SnapshotChangedError, or SendingStopped."""
        self._open()
        state = hashlib.sha256()
        states = [state.copy()]
        scratch = memoryview(bytearray(min(BLOCK, max(1, self.file.size_bytes))))
        for part in range(self.parts):
            self._hash_span(state, scratch, *self.span(part))
            states.append(state.copy())
        self.check()
        self._states = states
        self.digest = ObjectDigest(self.file.size_bytes, state.hexdigest())
        remember(self.file, self.digest)
        return self.digest

    def _hash_span(self, state: Any, scratch: memoryview, begin: int, end: int) -> None:
        while begin < end:
            if self._stopped.is_set():
                raise SendingStopped
            size = self.readinto(begin, scratch[: min(BLOCK, end - begin)])
            state.update(scratch[:size])
            begin += size

    def span(self, part: int) -> tuple[int, int]:
        """Return where part number ``part`` (from 0) begins and ends."""
        begin = part * self.part_bytes
        return begin, min(begin + self.part_bytes, self.file.size_bytes)

    @contextlib.contextmanager
    def body(
        self, part: int, *, on_bytes: Callable[[int], None], block: int = BLOCK, buffers: Buffers | None = None
    ) -> Iterator[PartBody]:
        """Give part number ``part`` (from 0) as a body to send.

        ``on_bytes`` is told how many bytes were taken (less than none when a request is repeated), at most ``block``
        at once. For a file whose SHA-256 was known this waits until the parts before it were read, in whatever
        threads: they must have been asked for already. ``buffers`` is memory that lets parts of it overlap.
        """
        begin, end = self.span(part)
        if self.file.held and not self._known:
            with self._descriptor() as fd:
                yield HeldBody(self, begin, end, fd, on_bytes=on_bytes, block=block, stopped=self._stopped)
                self.check()
            return
        if not self._known or self.parts == 1:
            assert self.digest is not None
            state = hashlib.sha256() if self._known else self._states[part]
            wanted = bytes.fromhex(self.digest.sha256) if self._known else self._states[part + 1].digest()
            yield PartBody(self, begin, end, state, wanted, on_bytes=on_bytes, block=block, stopped=self._stopped)
            return
        with self._turn:
            self._waiting += 1
            while self._read_parts != part:
                if self._stopped.is_set():
                    raise SendingStopped
                self._turn.wait(_TURN_SECONDS)
            self._waiting -= 1
            state = self._chain
        body = ChainBody(self, begin, end, state, on_bytes, block, self._stopped, buffers)
        try:
            yield body
            body.finish()
        finally:
            body.close()

    def skip(self, part: int) -> None:
        """Read part number ``part``, which is not sent, where the parts after it are hashed after it."""
        if self._known and self.parts > 1:
            with self.body(part, on_bytes=lambda _: None):
                pass

    @contextlib.contextmanager
    def _descriptor(self) -> Iterator[int]:
        """Give a descriptor of the open file that is open until the end, whoever closes the source meanwhile.

        A thread that hangs in a request is left behind by an upload that was stopped. The number of a descriptor that
        is closed under it may be that of any other file a moment later.
        """
        assert self._fd is not None
        fd = os.dup(self._fd)
        try:
            yield fd
        finally:
            os.close(fd)

    def others_wait(self) -> bool:
        """Return whether a part of a known file waits for its turn."""
        return self._waiting > 0

    def read_to(self, end: int, state: Any) -> None:
        """Let the next part of a known file begin: everything up to ``end`` was read and came to ``state``.

        Raises SnapshotChangedError when this is all of it and it is not as it was known.
        """
        if end == self.file.size_bytes:
            assert self.digest is not None
            if state.hexdigest() != self.digest.sha256:
                raise self.not_as_known()
        with self._turn:
            self._chain = state
            self._read_parts += 1
            self._turn.notify_all()

    def readinto(self, offset: int, into: memoryview) -> int:
        """Read bytes from ``offset`` of the object into ``into`` and return how many: at least one before its end."""
        found = self.span_at(offset, len(into))
        into = into[: len(found)]
        if isinstance(found, memoryview):
            into[:] = found
            return len(into)
        try:
            size = os.preadv(found.fd, [into], found.offset) if found.size else 0
        except OSError as error:
            raise unreadable(self.file.path, error) from error
        if found.size and not size:
            raise self.changed("it became shorter")
        return size

    def span_at(self, offset: int, size: int) -> FileSpan | memoryview:
        """Return what the object has at ``offset``, at most ``size`` bytes: where in the file, or bytes of ours."""
        for start, length, place in self._segments:
            if not start <= offset < start + length:
                continue
            size = min(size, start + length - offset)
            if place is None:
                return memoryview(self.file.head)[offset : offset + size]
            assert self._fd is not None
            assert self.file.path is not None
            return FileSpan(self._fd, place + offset - start, size, self.file.path)
        return memoryview(b"")

    def check(self) -> None:
        """Raise SnapshotChangedError when the open file is not as it was opened."""
        if self._fd is None or self._opened is None:
            return
        now = os.fstat(self._fd)
        if now.st_size != self._opened.st_size:
            raise self.changed(f"it had {self._opened.st_size} bytes and has {now.st_size}")
        if now.st_mtime_ns != self._opened.st_mtime_ns:
            raise self.changed("it was written to")
        if self.file.held and now.st_ctime_ns != self._opened.st_ctime_ns:
            raise self.changed("it was touched")

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
            raise SnapshotError(
                f"{self.file.path} cannot be opened: {error.strerror}",
                hint="check its permissions and the file system, then run it again: what was sent is kept",
            ) from error
        self._opened = now = os.fstat(self._fd)
        if now.st_size != self.file.file_bytes:
            raise self.changed(f"it had {self.file.file_bytes} bytes and has {now.st_size}")
        # 0 means that whoever described the file did not look.
        if self.file.mtime_ns and now.st_mtime_ns != self.file.mtime_ns:
            raise self.changed("it was written to")
        if self.file.inode and (now.st_ino, now.st_dev) != (self.file.inode, self.file.device):
            raise self.changed("another file took its place")

    def not_as_known(self) -> SnapshotChangedError:
        """Return the error that says that the bytes have another SHA-256 than the known one, which is forgotten."""
        forget(self.file)
        return self.changed("the bytes that were sent are not those that were hashed")

    def changed(self, how: str) -> SnapshotChangedError:
        """Return the error that says how the file changed."""
        return SnapshotChangedError(
            f"{self.file.path or self.file.name} changed after it was inspected: {how}",
            file=self.file.path or self.file.name,
            hint="wait until the trainer has finished writing, then publish again (under a new identity if it asks so)",
        )
