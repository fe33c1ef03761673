"""The other encoding of deltas: which bytes change, and what they become.

A frame decodes to ``count`` (u32), ``count`` positions in ascending order (u32 each), then ``count`` bytes; all little
endian. Positions and bytes lie far apart, so two decoders walk through the frame at once, one ahead of the other:
memory stays bounded whatever the tensor's size.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cwtrain.snapshots._decoder import Decoder, FrameReader, ReadInto
from cwtrain.snapshots._frames import FrameError
from cwtrain.snapshots._zstd import Library

_BLOCK = 1 << 16  # positions read at once
_POSITION_BYTES = 4


class OverwriteDecoder:
    """One worker's two decoders. For one thread at a time."""

    def __init__(self, library: Library | None) -> None:
        self._library = library
        self._decoders: tuple[Decoder, Decoder] | None = None

    def open(self, read_into: ReadInto, length: int, *, size: int) -> OverwriteReader:
        """Return a reader of the frame in ``length`` bytes for a tensor of ``size`` bytes. Raises FrameError."""
        if self._decoders is None:
            self._decoders = Decoder(self._library), Decoder(self._library)
        ahead, behind = self._decoders
        positions = ahead.open(read_into, length, size=None)
        head = bytearray(_POSITION_BYTES)
        _read(positions, memoryview(head))
        count = int.from_bytes(head, "little")
        if count > size:
            raise FrameError(f"says that {count} bytes change, but the tensor has {size}")
        values = behind.open(read_into, length, size=_POSITION_BYTES + (_POSITION_BYTES + 1) * count)
        _skip(values, _POSITION_BYTES * (count + 1))
        return OverwriteReader(positions, values, count=count, size=size)


def _read(reader: FrameReader, view: memoryview) -> None:
    if reader.read(view) < len(view):
        raise FrameError("ends before the changes that it announces")


def _skip(reader: FrameReader, count: int) -> None:
    view = memoryview(bytearray(min(count, 1 << 18)))
    while count:
        piece = view[: min(len(view), count)]
        _read(reader, piece)
        count -= len(piece)


class OverwriteReader:
    """Applies the changes of one tensor to its bytes, piece by piece in order."""

    def __init__(self, positions: FrameReader, values: FrameReader, *, count: int, size: int) -> None:
        self._positions, self._values, self._size = positions, values, size
        self._left = count  # changes that are not read yet
        self._last = -1
        self._at: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._bytes: npt.NDArray[np.uint8] = np.empty(0, np.uint8)

    def patch(self, view: memoryview, start: int) -> None:
        """Change ``view``, which holds the tensor's bytes from ``start`` on. Raises FrameError."""
        target = np.frombuffer(view, dtype=np.uint8)
        end = start + len(view)
        while True:
            if not self._at.size:
                if not self._left:
                    return
                self._load()
            count = int(np.searchsorted(self._at, end))
            target[self._at[:count] - start] = self._bytes[:count]
            self._at, self._bytes = self._at[count:], self._bytes[count:]
            if self._at.size:
                return

    def finish(self) -> None:
        """Raise FrameError unless all changes were used and the frame ends here."""
        if self._at.size or self._left:
            raise FrameError(f"changes bytes behind the tensor's end ({self._size})")
        self._values.finish()

    def _load(self) -> None:
        count = min(_BLOCK, self._left)
        raw = bytearray(count * _POSITION_BYTES)
        _read(self._positions, memoryview(raw))
        self._at = np.frombuffer(raw, dtype="<u4").astype(np.int64)
        if self._at[0] <= self._last or np.any(np.diff(self._at) <= 0):
            raise FrameError("has positions that do not ascend (a tensor above 4 GiB cannot be encoded this way)")
        self._last = int(self._at[-1])
        values = bytearray(count)
        _read(self._values, memoryview(values))
        self._bytes = np.frombuffer(values, dtype=np.uint8)
        self._left -= count
