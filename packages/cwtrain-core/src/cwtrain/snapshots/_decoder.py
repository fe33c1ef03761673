"""From the frame of a tensor to its bytes, trusting nothing that the frame says.

There must be exactly one frame, nothing after it, and it must decode to exactly the tensor's size; where that is not
known, to what the frame claims, and the claim is bounded. A claim that is too large is refused before anything is
decoded, more output than allowed as soon as it appears. Memory: the input buffer, and zstd's window (at most 128 MiB,
never more than the claim); the output goes straight into the caller's buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol

import zstandard

from cwtrain.snapshots._frames import (
    BLOCK_BYTES,
    MAGIC,
    MAX_CLAIM_BYTES,
    MAX_HEADER_BYTES,
    FrameError,
    FrameHeader,
    check_frame_header,
    what_follows,
)
from cwtrain.snapshots._zstd import Library, StreamDecompressor, address_of

INPUT_BYTES = 256 << 10
"""How much of a frame is read at once; must hold a block."""

_RAW, _RLE, _COMPRESSED = 0, 1, 2
_MAGIC_BYTES = MAGIC.to_bytes(4, "little")

ReadInto = Callable[[int, memoryview], None]
"""Fill the view with the frame's bytes from the offset on."""


class FrameReader(Protocol):
    """One frame being decoded."""

    def read(self, view: memoryview) -> int:
        """Fill ``view`` as far as the frame goes; return how far that was. Raises FrameError."""
        ...

    def finish(self) -> None:
        """Raise FrameError unless the frame ends here, with nothing after it."""
        ...


class Decoder:
    """One worker's input buffer and context, used for one frame after the other. For one thread at a time."""

    def __init__(self, library: Library | None) -> None:
        self._input = bytearray(INPUT_BYTES)
        self._view = memoryview(self._input)
        self._address = address_of(self._input)
        self._stream = StreamDecompressor(library) if library is not None else None

    def fill(self, read_into: ReadInto, length: int, view: memoryview) -> None:
        """Decode the frame in ``length`` bytes into ``view``, which it must fill exactly. Raises FrameError."""
        if self._stream is not None and 0 < length <= INPUT_BYTES:
            read_into(0, self._view[:length])
            known = self._input.startswith(_MAGIC_BYTES)  # not what zstd calls a skippable frame
            if known and self._stream.decode_small(self._address, length, address_of(view), len(view)) == len(view):
                return
        reader = self.open(read_into, length, size=len(view))
        read_exactly(reader, view, done=0, size=len(view))
        reader.finish()

    def open(self, read_into: ReadInto, length: int, *, size: int | None) -> FrameReader:
        """Return a reader of the frame in ``length`` bytes; the one before is not used any more.

        ``size`` is what the frame must decode to, None where that is not known. Raises FrameError for its header.
        """
        first = self._view[: min(INPUT_BYTES, length)]
        if length:
            read_into(0, first)
        header = check_frame_header(first[:MAX_HEADER_BYTES], size=size)
        limit = size if size is not None else header.content_bytes
        if self._stream is None:
            return _PublicReader(read_into, length, header, limit)
        return _LibraryReader(self._stream, read_into, length, first, self._view, self._address, limit)


def read_exactly(reader: FrameReader, view: memoryview, *, done: int, size: int) -> None:
    """Fill ``view`` from a frame that gave ``done`` of ``size`` bytes so far. Raises FrameError if it ends before."""
    got = reader.read(view)
    if got < len(view):
        raise FrameError(f"decodes to {done + got} bytes, but the tensor has {size}")


def decoded_pieces(reader: FrameReader, view: memoryview) -> Iterator[memoryview]:
    """Yield what a frame of unknown size decodes to in ``view``, piece by piece, up to its end. Raises FrameError."""
    total = 0
    while got := reader.read(view):
        total += got
        if total > MAX_CLAIM_BYTES:
            raise FrameError(f"decodes to more than any tensor has ({MAX_CLAIM_BYTES} bytes)")
        yield view[:got]
    reader.finish()


class _LibraryReader:
    """Decodes by ``ZSTD_decompressStream``, from the decoder's input buffer straight into the caller's."""

    def __init__(
        self,
        stream: StreamDecompressor,
        read_into: ReadInto,
        length: int,
        first: memoryview,
        buffer: memoryview,
        address: int,
        limit: int | None,
    ) -> None:
        self._stream, self._read_into, self._length = stream, read_into, length
        self._buffer, self._address = buffer, address
        self._begin, self._end = 0, len(first)  # what is in the buffer and not taken yet
        self._offset = len(first)  # of the next byte that is not in the buffer
        self._given, self._limit = 0, limit
        self._ended = False
        stream.begin()

    def read(self, view: memoryview) -> int:
        room = len(view) if self._limit is None else min(len(view), self._limit - self._given)
        target = address_of(view)
        done = 0
        while done < room and not self._ended:
            done += self._step(target + done, room - done)
        self._given += done
        return done

    def _step(self, target: int, capacity: int) -> int:
        """Decode a little; return how many bytes it gave."""
        more = self._begin < self._end or self._refill()
        taken, given, self._ended = self._stream.feed(
            self._address + self._begin, self._end - self._begin, target, capacity
        )
        self._begin += taken
        if not (more or given or self._ended):  # no input is left, and nothing is left inside zstd either
            raise FrameError("ends too early")
        return given

    def _refill(self) -> bool:
        more = min(len(self._buffer), self._length - self._offset)
        if more:
            self._read_into(self._offset, self._buffer[:more])
        self._offset += more
        self._begin, self._end = 0, more
        return more > 0

    def finish(self) -> None:
        spare = bytearray(1)
        while not self._ended:
            if self._step(address_of(spare), 1):
                raise FrameError(f"decodes to more than the {self._given} bytes of its tensor")
        if self._limit is not None and self._given != self._limit:
            raise FrameError(f"decodes to {self._given} bytes, but the tensor has {self._limit}")
        if rest := self._length - self._offset + self._end - self._begin:
            if self._begin == self._end:
                self._refill()
            raise what_follows(bytes(self._buffer[self._begin : self._begin + 4]), rest)


class _PublicReader:
    """Decodes by ``zstandard``'s public interface: block by block, so at most 128 KiB come out at once."""

    def __init__(self, read_into: ReadInto, length: int, header: FrameHeader, limit: int | None) -> None:
        self._source = _Source(read_into, length)
        self._limit, self._given = limit, 0
        self._decoder = zstandard.ZstdDecompressor().decompressobj()
        self._pieces = self._decoded(header)
        self._pending = memoryview(b"")

    def read(self, view: memoryview) -> int:
        done = 0
        while done < len(view):
            if not self._pending:
                piece = next(self._pieces, None)
                if piece is None:
                    break
                self._pending = memoryview(piece)
            count = min(len(self._pending), len(view) - done)
            view[done : done + count] = self._pending[:count]
            self._pending = self._pending[count:]
            done += count
        return done

    def finish(self) -> None:
        if self._pending or next(self._pieces, None) is not None:
            raise FrameError("decodes to more bytes than its tensor has")
        if not self._decoder.eof:
            raise FrameError("does not end where its last block ends")
        if self._limit is not None and self._given != self._limit:
            raise FrameError(f"decodes to {self._given} bytes, but the tensor has {self._limit}")
        if rest := self._source.left:
            raise what_follows(self._source.peek(min(4, rest)), rest)

    def _decoded(self, header: FrameHeader) -> Iterator[bytes]:
        try:
            self._decoder.decompress(self._source.take(header.header_bytes))
            for block in _blocks(self._source, header):
                piece = self._decoder.decompress(block)
                self._given += len(piece)
                if self._limit is not None and self._given > self._limit:
                    raise FrameError(f"decodes to more than the {self._limit} bytes of its tensor")
                if piece:
                    yield piece
        except zstandard.ZstdError as error:
            raise FrameError(f"is damaged: {error}") from error


class _Source:
    """The bytes of one frame, read in order in chunks of bounded size."""

    def __init__(self, read_into: ReadInto, length: int) -> None:
        self._read_into, self._length = read_into, length
        self._buffer = bytearray(min(INPUT_BYTES, length))
        self._offset = 0  # of the next byte that is not in the buffer
        self._begin = self._end = 0  # what is in the buffer and not taken yet

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return self._length - self._offset + self._end - self._begin

    def peek(self, count: int) -> bytes:
        """Return the next bytes and leave them there."""
        if count > self.left:
            raise FrameError("ends too early")
        if self._end - self._begin < count:
            have = self._end - self._begin
            self._buffer[:have] = self._buffer[self._begin : self._end]
            more = min(len(self._buffer) - have, self._length - self._offset)
            self._read_into(self._offset, memoryview(self._buffer)[have : have + more])
            self._offset += more
            self._begin, self._end = 0, have + more
        return bytes(self._buffer[self._begin : self._begin + count])

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        data = self.peek(count)
        self._begin += count
        return data


def _blocks(source: _Source, header: FrameHeader) -> Iterator[bytes]:
    """Yield a frame's blocks with their 3-byte headers, the last one with the frame's checksum.

    Fed to the decoder one by one they bound what it can put out at once, while a plain chunk of input could hold
    thousands of blocks.
    """
    last = False
    while not last:
        word = int.from_bytes(source.peek(3), "little")
        last, kind, size = bool(word & 1), (word >> 1) & 3, word >> 3
        if kind not in (_RAW, _RLE, _COMPRESSED) or size > BLOCK_BYTES:
            raise FrameError("is damaged: it has a block that the format does not allow")
        stored = 1 if kind == _RLE else size
        yield source.take(3 + stored + (4 if last and header.checksum else 0))
