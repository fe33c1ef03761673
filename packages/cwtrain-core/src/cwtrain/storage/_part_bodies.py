"""The parts of a snapshot's file as bodies to send. What is hashed on the way depends on what ``Source`` knows."""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.errors import SnapshotError
from cwtrain.storage._buffers import Buffers, SendingStopped

if TYPE_CHECKING:
    from cwtrain.storage._source import Source

__all__ = ["BLOCK", "ChainBody", "FileSpan", "HeldBody", "PartBody", "unreadable"]

BLOCK = 1 << 20


@attrs.frozen
class FileSpan:
    """``size`` bytes from ``offset`` of the open file ``fd``, which is the one at ``path``."""

    fd: int
    offset: int
    size: int
    path: str

    def __len__(self) -> int:
        return self.size


def unreadable(path: str | None, error: OSError) -> SnapshotError:
    """Return the error that says that the disk does not give a file's bytes."""
    return SnapshotError(f"{path} cannot be read: {error.strerror}", hint="check the file system, then run it again")


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
        if self._hash is None:
            self._hash = self._state.copy()
        block = self._read(offset, size)
        self._hash.update(block)
        return block

    def _read(self, offset: int, size: int) -> memoryview:
        if self._scratch is None:
            self._scratch = memoryview(bytearray(min(self._block_bytes, len(self))))
        return self._scratch[: self._source.readinto(offset, self._scratch[:size])]

    def _check_end(self) -> None:
        if self._hash.digest() != self._wanted:
            raise self._source.not_as_known()


class HeldBody(PartBody):
    """A part of a file that nobody writes to, by its owner's word: it was hashed, and is sent without reading it again.

    The word is not all: the store compares a single PUT with its SHA-256, over https too (``signed``), and the file's
    size and times are looked at before each block, and when the part has arrived. The kernel sends from ``fd``.
    """

    signed = True

    def __init__(
        self,
        source: Source,
        begin: int,
        end: int,
        fd: int,
        *,
        on_bytes: Callable[[int], None],
        block: int,
        stopped: threading.Event,
    ) -> None:
        super().__init__(source, begin, end, None, None, on_bytes=on_bytes, block=block, stopped=stopped)
        self._fd = fd

    def spans(self) -> Iterator[FileSpan | memoryview]:
        """Give everything from the beginning on, as places in the file where it comes from there. Raises as read."""
        self.seek(0)
        while self._loaded < self._end:
            if self._stopped.is_set():
                raise SendingStopped
            try:
                self._source.check()
            except SnapshotError as error:
                raise SendingStopped(error) from error
            span = self._source.span_at(self._loaded, min(self._block_bytes, self._end - self._loaded))
            self._loaded += len(span)
            self._counted += len(span)
            self._on_bytes(len(span))
            yield attrs.evolve(span, fd=self._fd) if isinstance(span, FileSpan) else span

    def _fetch(self, offset: int, size: int) -> memoryview:
        self._source.check()
        return self._read(offset, size)

    def _check_end(self) -> None:
        pass  # the bytes were hashed; that the file is as it was then is checked already


class ChainBody(PartBody):
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
