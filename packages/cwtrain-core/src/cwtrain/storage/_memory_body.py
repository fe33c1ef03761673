"""Bytes in memory as a body to send: large blocks without a copy, rewound when a request is repeated."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence

from cwtrain.storage._buffers import SendingStopped

__all__ = ["MemoryBody"]


class MemoryBody:
    """``pieces`` one after the other, in blocks of at most ``block`` bytes. ``sha256`` is that of all, where known.

    ``on_bytes`` is told how many bytes were taken, less than none when they are to be sent again. Raises
    SendingStopped once ``stopped`` is set.
    """

    def __init__(
        self,
        pieces: Sequence[bytes | memoryview],
        *,
        on_bytes: Callable[[int], None],
        block: int,
        stopped: threading.Event,
        sha256: str | None = None,
    ) -> None:
        self.sha256 = sha256
        self._pieces = [view for piece in pieces if len(view := memoryview(piece))]
        self._size = sum(map(len, self._pieces))
        self._on_bytes = on_bytes
        self._block_bytes = block
        self._stopped = stopped
        self._position = 0

    def __len__(self) -> int:
        return self._size

    def tell(self) -> int:
        """Return the position."""
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move and return the position."""
        position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        if whence == os.SEEK_SET and position < self._position:
            self._on_bytes(position - self._position)
        self._position = position
        return position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes."""
        if size is None or size < 0:
            return b"".join(iter(lambda: self.read(self._block_bytes), b""))
        return bytes(self._next(size))

    def blocks(self) -> Iterator[memoryview]:
        """Give everything from the beginning on, in large blocks."""
        self.seek(0)
        while block := self._next(self._block_bytes):
            yield block

    def _next(self, size: int) -> memoryview:
        if self._stopped.is_set():
            raise SendingStopped
        at = self._position
        for piece in self._pieces:
            if at < len(piece):
                block = piece[at : at + size]
                self._position += len(block)
                self._on_bytes(len(block))
                return block
            at -= len(piece)
        return memoryview(b"")
