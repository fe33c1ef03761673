"""Reused buffers for reading and writing files: one for each purpose and worker, never a fresh one for each piece.

A fresh buffer costs a page fault for every 4 KiB, which makes reading several times slower. So does a copy whose target
lies, within its 4 KiB page, up to 63 bytes above its source: the processor then takes each load to depend on the store
just before it (4K aliasing; 8 to 10 times slower on current AMD cores). File data lies in the page cache at its offset
modulo the page, so a ``Lane`` places what it reads at that same place.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

PAGE_BYTES = 4096
WORD_BYTES = 8
MAX_PARTS = 512
"""How many views one ``preadv`` fills at most (systems allow 1024)."""

_ALIASED_BYTES = 64


def round_up(length: int) -> int:
    """Return ``length`` rounded up to whole words."""
    return (length + WORD_BYTES - 1) & -WORD_BYTES


def phase(read_offset: int, write_offset: int | None = None) -> int:
    """Return where in its page a buffer should lie to be filled from one file offset and written to another."""
    place = read_offset % PAGE_BYTES & -WORD_BYTES
    if write_offset is not None and 0 < (write_offset - place) % PAGE_BYTES < _ALIASED_BYTES:
        place = (place - _ALIASED_BYTES) % PAGE_BYTES
    return place


class Lane:
    """A buffer that holds one read: parts of a chunk together, one after the other, each beginning on a whole word."""

    def __init__(self, chunk_bytes: int) -> None:
        raw = np.empty(chunk_bytes + MAX_PARTS * WORD_BYTES + 2 * PAGE_BYTES, np.uint8)
        start = -raw.ctypes.data % PAGE_BYTES
        self._raw: Bytes = raw[start:]
        self._address = int(self._raw.ctypes.data)
        self._view = self._raw.data
        self.data: Bytes = self._raw[:0]
        """The parts that were placed last, up to a whole word."""
        self.address = self._address
        """Address of the first part."""

    def piece(self, position: int, length: int) -> memoryview:
        """Return the view of a part that begins there, counted from the buffer's begin, to be filled or read."""
        return self._view[position : position + length]

    def settle(self, lengths: Sequence[int], positions: Sequence[int]) -> list[memoryview]:
        """Return the views of parts that were filled by ``piece``; the rest of each one's last word becomes zero."""
        end = positions[-1] + round_up(lengths[-1])
        self.data, self.address = self._raw[:end], self._address
        views = []
        for length, position in zip(lengths, positions, strict=True):
            if length % WORD_BYTES:
                self._raw[position + length : position + round_up(length)] = 0
            views.append(self._view[position : position + length])
        return views

    def place(self, lengths: Sequence[int], positions: Sequence[int], at: int) -> list[memoryview]:
        """Return a view for each part, to be filled; the rest of its last word is zero.

        ``positions`` are those of the parts, multiples of a word, from the place ``at`` in the page on.
        """
        end = positions[-1] + round_up(lengths[-1])
        self.data = self._raw[at : at + end]
        self.address = self._address + at
        if len(lengths) == 1 and end == lengths[0]:
            return [self._view[at : at + end]]
        views = []
        for length, position in zip(lengths, positions, strict=True):
            begin = at + position
            if length % WORD_BYTES:
                last = begin + round_up(length)
                self._raw[last - WORD_BYTES : last] = 0
            views.append(self._view[begin : begin + length])
        return views


def untouched(size: int) -> memoryview:
    """Return a buffer whose memory is taken only where it is written to; what is in it at first is undefined."""
    return np.empty(size, np.uint8).data


def positions_of(lengths: Sequence[int]) -> list[int]:
    """Return where parts of these lengths lie in a lane."""
    positions = []
    end = 0
    for length in lengths:
        positions.append(end)
        end += round_up(length)
    return positions
