"""Read a snapshot's file to hash it and to send it, and notice when it changes meanwhile.

A file is opened once, so one that replaces it by a rename does no harm. Everything else (size, modification time,
inode against what inspection saw, and the SHA-256 of the bytes sent against that of the bytes hashed) is an error.
The bytes that are hashed and those that are sent are the same memory, never two reads of the file.

A file whose SHA-256 nobody knows is read twice: it must be known before the first byte goes out. SHA-256 goes through a
file in order, so its state at each part's beginning is kept from the first read; a part that is sent continues from
there and must arrive at the next one's, and parts go in any order.

A file whose SHA-256 is known is read once, and hashed as it is sent: its last block is held back until the hash is
right. Its parts are hashed in order, one after the other. Where the line is what takes the time, a part that is being
sent reads the rest of itself into memory, so that the next one can begin.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from cwtrain.errors import SnapshotChangedError, SnapshotError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage._buffers import Buffers, SendingStopped
from cwtrain.storage._digests import forget, known_digest, remember
from cwtrain.storage.report import ObjectDigest

__all__ = ["BLOCK", "PartBody", "SendingStopped", "Source"]

BLOCK = 1 << 20
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
        body = _ChainBody(self, begin, end, state, on_bytes, block, self._stopped, buffers)
        try:
            yield body
            body.finish()
        finally:
            body.close()

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
        for start, length, place in self._segments:
            if not start <= offset < start + length:
                continue
            into = into[: start + length - offset]
            if place is None:
                into[:] = self.file.head[offset : offset + len(into)]
                return len(into)
            assert self._fd is not None
            try:
                size = os.preadv(self._fd, [into], place + offset - start)
            except OSError as error:
                raise SnapshotError(
                    f"{self.file.path} cannot be read: {error.strerror}",
                    hint="check the file system, then run it again",
                ) from error
            if not size:
                raise self.changed("it became shorter")
            return size
        return 0

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


class PartBody:
    """A part of an object as a stream to send: read in blocks, hashed as it goes, rewound when it is sent again.

    ``state`` is the hash of everything before the part, ``wanted`` the SHA-256 of everything up to its end (None as
    long as it is not known).
    """

    def __init__(
        self,
        source: Source,
        begin: int,
        end: int,
        state: Any,
        wanted: bytes | None,
        *,
        on_bytes: Callable[[int], None],
        block: int,
        stopped: threading.Event,
    ) -> None:
        self._source = source
        self._begin = begin
        self._end = end
        self._state = state
        self._wanted = wanted
        self._on_bytes = on_bytes
        self._block_bytes = block
        self._stopped = stopped
        self._loaded = begin
        self._block = memoryview(b"")
        self._given = 0
        self._counted = 0
        self._scratch: memoryview | None = None
        self._hash: Any = None

    def __len__(self) -> int:
        return self._end - self._begin

    @property
    def sha256(self) -> str | None:
        """SHA-256 of the part in hex, where it is the whole object; else None."""
        digest = self._source.digest
        return digest.sha256 if digest is not None and self._source.parts == 1 else None

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
        self._block, self._given = memoryview(b""), 0
        self._hash = None
        return position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes. Raises SendingStopped when the file changed or the upload was stopped."""
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(self._block_bytes), b""))
        if self._given == len(self._block):
            self._load()
        elif self._stopped.is_set():
            raise SendingStopped
        piece = self._block[self._given : self._given + size]
        self._given += len(piece)
        return bytes(piece)

    def blocks(self) -> Iterator[memoryview]:
        """Give everything from the beginning on, in large blocks that are valid until the next one. Raises as read."""
        self.seek(0)
        while True:
            self._load()
            if not self._block:
                return
            self._given = len(self._block)
            yield self._block

    def _load(self) -> None:
        if self._stopped.is_set():
            raise SendingStopped
        self._block, self._given = memoryview(b""), 0
        if self._loaded == self._end:
            return
        try:
            block = self._fetch(self._loaded, min(self._block_bytes, self._end - self._loaded))
            # Checked before the last block is handed out, so that a changed part never arrives whole.
            if self._loaded + len(block) == self._end:
                self._source.check()
                self._check_end()
        except (SnapshotError, OSError) as error:
            raise SendingStopped(error) from error
        self._block = block
        self._loaded += len(block)
        self._counted += len(block)
        self._on_bytes(len(block))

    def _fetch(self, offset: int, size: int) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(min(self._block_bytes, len(self))))
        if self._hash is None:
            self._hash = self._state.copy()
        block = self._scratch[: self._source.readinto(offset, self._scratch[:size])]
        self._hash.update(block)
        return block

    def _check_end(self) -> None:
        if self._hash.digest() != self._wanted:
            raise self._source.not_as_known()


class _ChainBody(PartBody):
    """A part of a known file whose turn it is: whoever reads it to its end gives the next part its turn.

    Sent again after that, it is a part like any other.
    """

    def __init__(
        self,
        source: Source,
        begin: int,
        end: int,
        state: Any,
        on_bytes: Callable[[int], None],
        block: int,
        stopped: threading.Event,
        buffers: Buffers | None,
    ) -> None:
        super().__init__(source, begin, end, state, None, on_bytes=on_bytes, block=block, stopped=stopped)
        self._buffers = buffers
        self._memory: mmap.mmap | None = None
        self._rest: memoryview | None = None
        self._rest_at = 0
        self._reading_seconds = 0.0
        self._sending_seconds = 0.0
        self._handed_out = 0.0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to the beginning or the end."""
        if offset == 0 and whence == os.SEEK_SET and self.tell():
            self._drop_rest()
        return super().seek(offset, whence)

    def finish(self) -> None:
        """Read what was not asked for, so that the next part has its turn."""
        while self._wanted is None and self._loaded < self._end:
            self._load()

    def close(self) -> None:
        """Give the memory back."""
        self._drop_rest()
        self._block = memoryview(b"")

    def _fetch(self, offset: int, size: int) -> memoryview:
        if self._rest is not None:
            return self._rest[offset - self._rest_at :][:size]
        began = time.perf_counter()
        if self._handed_out:
            self._sending_seconds += began - self._handed_out
        if self._wanted is None and self._line_is_slow() and self._load_rest(offset):
            assert self._rest is not None
            return self._rest[:size]
        block = super()._fetch(offset, size)
        self._handed_out = time.perf_counter()
        self._reading_seconds += self._handed_out - began
        return block

    def _line_is_slow(self) -> bool:
        return (
            self._buffers is not None
            and self._source.others_wait()
            and self._loaded - self._begin >= self._buffers.after_bytes
            and self._sending_seconds >= self._buffers.slow * self._reading_seconds
        )

    def _load_rest(self, offset: int) -> bool:
        """Read the rest of the part into memory if there is some, and let the next part begin."""
        memory = self._buffers.take(self._source.part_bytes) if self._buffers is not None else None
        if memory is None:
            return False
        self._memory = memory
        rest = memoryview(memory)[: self._end - offset]
        at = 0
        while at < len(rest):
            if self._stopped.is_set():
                raise SendingStopped
            size = self._source.readinto(offset + at, rest[at : at + BLOCK])
            self._hash.update(rest[at : at + size])
            at += size
        self._source.check()
        self._check_end()
        self._rest, self._rest_at = rest, offset
        return True

    def _drop_rest(self) -> None:
        self._rest = None
        if self._memory is not None and self._buffers is not None:
            self._block = memoryview(b"")
            self._buffers.give(self._memory)
        self._memory = None

    def _check_end(self) -> None:
        if self._rest is not None:
            return  # checked when it was read
        if self._wanted is not None:
            super()._check_end()
            return
        state = self._hash if self._hash is not None else self._state
        self._source.read_to(self._end, state.copy())
        self._wanted = state.digest()
