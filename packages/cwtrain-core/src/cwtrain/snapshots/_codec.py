"""How bytes are encoded: XOR, zstd frames, Adler-32. Pure functions and workers on buffers; no files, no directories.

A delta holds for each changed tensor one standalone zstd frame of new XOR old bytes. This is the only module that knows
numpy and zstandard; it is imported when frames are made or read, never before.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator

import attrs
import numpy as np
import zstandard

CHUNK_BYTES = 1 << 20
"""Tensors are worked on in pieces of this size. It is part of the format of our output: another size, other bytes."""

MAX_CLAIM_BYTES = 1 << 40
"""Largest tensor that a frame may claim where nothing else bounds it (no tensor of a model comes near 1 TiB)."""

_LEVEL = 1
_MAGIC = 0xFD2FB528
_BLOCK_BYTES = 128 << 10  # what one block of a frame may decode to, by the format
_MAX_WINDOW_BYTES = 128 << 20  # zstd's own default limit for decoders
_RAW, _RLE, _COMPRESSED = 0, 1, 2

Buffer = bytes | bytearray | memoryview
ReadInto = Callable[[int, memoryview], None]
"""Fill the view with the bytes from the offset on."""


class FrameError(ValueError):
    """A frame is damaged, or is not what a delta may hold."""


def adler32(data: Buffer, value: int = 1) -> int:
    """Return the Adler-32 of ``data``, going on from ``value``."""
    return zlib.adler32(data, value)


def adler32_hex(value: int) -> str:
    """Return an Adler-32 as it is written: 8 lower-case hex digits."""
    return f"{value:08x}"


def xor_into(target: memoryview, other: memoryview) -> None:
    """Set ``target`` to ``target`` XOR ``other``, byte by byte."""
    array = np.frombuffer(target, dtype=np.uint8)
    np.bitwise_xor(array, np.frombuffer(other, dtype=np.uint8), out=array)


@attrs.frozen(kw_only=True)
class EncodedTensor:
    """What became of one tensor: bytes that differ, Adler-32 of the new bytes, and the length of its frame."""

    changed_bytes: int
    checksum: str
    frame_bytes: int


class DeltaEncoder:
    """One worker's buffers and compressor: about 2 chunks and zstd's context, whatever the tensor's size.

    For one thread at a time. The frames depend on the bytes alone, not on the worker.
    """

    def __init__(self) -> None:
        self._old = bytearray(CHUNK_BYTES)
        self._new = bytearray(CHUNK_BYTES)
        self._compressor = zstandard.ZstdCompressor(level=_LEVEL)

    def encode(
        self, size: int, read_old: ReadInto, read_new: ReadInto, write: Callable[[bytes], object]
    ) -> EncodedTensor:
        """Read both versions of a tensor of ``size`` bytes and ``write`` its frame piece by piece.

        Nothing is written when no byte differs.
        """
        stream = None
        checksum, changed, written = 1, 0, 0
        for start in range(0, size, CHUNK_BYTES):
            length = min(CHUNK_BYTES, size - start)
            old, new = memoryview(self._old)[:length], memoryview(self._new)[:length]
            read_old(start, old)
            read_new(start, new)
            checksum = zlib.adler32(new, checksum)
            xor_into(old, new)
            differing = int(np.count_nonzero(np.frombuffer(old, dtype=np.uint8)))
            changed += differing
            if stream is None:
                if not differing:
                    continue
                stream = self._compressor.compressobj(size=size)
                for _ in range(start // CHUNK_BYTES):  # the equal chunks before the first difference
                    written += _pass_on(stream.compress(_ZEROS), write)
            written += _pass_on(stream.compress(old), write)
        if stream is not None:
            written += _pass_on(stream.flush(), write)
        return EncodedTensor(changed_bytes=changed, checksum=adler32_hex(checksum), frame_bytes=written)


_ZEROS = bytes(CHUNK_BYTES)


def _pass_on(piece: bytes, write: Callable[[bytes], object]) -> int:
    if piece:
        write(piece)
    return len(piece)


def encode_xor(old: Buffer, new: Buffer) -> bytes:
    """Return the frame that leads from ``old`` to ``new``, even where they are equal. For tensors in memory."""
    if len(old) != len(new):
        raise ValueError(f"the tensor has {len(old)} bytes in one version and {len(new)} in the other")
    pieces: list[bytes] = []
    left, right = memoryview(old).cast("B"), memoryview(new).cast("B")
    encoded = DeltaEncoder().encode(len(left), _reader(left), _reader(right), pieces.append)
    if not encoded.changed_bytes:
        stream = zstandard.ZstdCompressor(level=_LEVEL).compressobj(size=len(left))
        pieces = [stream.compress(bytes(len(left))), stream.flush()]
    return b"".join(pieces)


def decode_xor(frame: Buffer, old: Buffer) -> bytes:
    """Return the new bytes of a tensor from its frame and its old bytes. Raises FrameError."""
    view = memoryview(frame).cast("B")
    new = bytearray(old)
    done = 0
    for piece in decode_frame(_reader(view), len(view), size=len(new)):
        xor_into(memoryview(new)[done : done + len(piece)], memoryview(piece))
        done += len(piece)
    return bytes(new)


def _reader(source: memoryview) -> ReadInto:
    def read_into(offset: int, view: memoryview) -> None:
        view[:] = source[offset : offset + len(view)]

    return read_into


@attrs.frozen(kw_only=True)
class FrameHeader:
    """The first bytes of a frame. ``content_bytes`` is what it claims to decode to, None where it does not say."""

    content_bytes: int | None
    window_bytes: int
    checksum: bool
    header_bytes: int


def parse_frame_header(first: Buffer) -> FrameHeader:
    """Return what a frame's first 18 bytes (or all, if it is shorter) say. Raises FrameError."""
    data = bytes(first[:18])
    if len(data) < 5 or int.from_bytes(data[:4], "little") != _MAGIC:
        raise FrameError("is no zstd frame")
    descriptor = data[4]
    single, checksum = bool(descriptor & 0x20), bool(descriptor & 0x04)
    if descriptor & 0x08:
        raise FrameError("has a reserved bit set in its frame header")
    dictionary_bytes = (0, 1, 2, 4)[descriptor & 3]
    size_bytes = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    position = 5 if single else 6
    end = position + dictionary_bytes + size_bytes
    if len(data) < end:
        raise FrameError("ends inside its frame header")
    if any(data[position : position + dictionary_bytes]):
        raise FrameError("needs a dictionary")
    content = int.from_bytes(data[end - size_bytes : end], "little") if size_bytes else None
    if content is not None and size_bytes == 2:
        content += 256
    if single:
        window = content or 0
    else:
        base = 1 << (10 + (data[5] >> 3))
        window = base + (base >> 3) * (data[5] & 7)
    return FrameHeader(content_bytes=content, window_bytes=window, checksum=checksum, header_bytes=end)


def decode_frame(read_into: ReadInto, length: int, *, size: int | None) -> Iterator[bytes]:
    """Yield what the frame in ``length`` bytes decodes to, in pieces of at most a few blocks (128 KiB each).

    ``size`` is what it must decode to, None where that is not known: then it is bounded by its own claim, and the claim
    by ``MAX_CLAIM_BYTES``. A claim that is too large is refused before anything is decoded, more output than allowed as
    soon as it appears. There must be exactly one frame and nothing after it. Raises FrameError.

    Memory: one block of input, its output, and zstd's window (at most 128 MiB, and never more than the claim).
    """
    source = _Source(read_into, length)
    header = parse_frame_header(source.peek(min(18, length)))
    _check_claim(header, size)
    decoder = zstandard.ZstdDecompressor().decompressobj()
    done = 0
    limit = header.content_bytes if size is None else size
    try:
        decoder.decompress(source.take(header.header_bytes))
        for block in _blocks(source, header):
            piece = decoder.decompress(block)
            done += len(piece)
            if limit is not None and done > limit:
                raise FrameError(f"decodes to more than the {limit} bytes of its tensor")
            if piece:
                yield piece
    except zstandard.ZstdError as error:
        raise FrameError(f"is damaged: {error}") from error
    if not decoder.eof:
        raise FrameError("does not end where its last block ends")
    if limit is not None and done != limit:
        raise FrameError(f"decodes to {done} bytes, but the tensor has {limit}")
    if rest := source.left:
        again = source.peek(min(4, rest)) == struct.pack("<I", _MAGIC)
        raise FrameError(f"is followed by {'another frame' if again else f'{rest} bytes that belong to no frame'}")


def _check_claim(header: FrameHeader, size: int | None) -> None:
    claim = header.content_bytes
    if claim is not None and size is not None and claim != size:
        raise FrameError(f"claims to decode to {claim} bytes, but the tensor has {size}")
    if claim is not None and claim > MAX_CLAIM_BYTES:
        raise FrameError(f"claims to decode to {claim} bytes, more than any tensor has ({MAX_CLAIM_BYTES})")
    if header.window_bytes > _MAX_WINDOW_BYTES:
        raise FrameError(
            f"needs a window of {header.window_bytes} bytes, more than decoders grant by default ({_MAX_WINDOW_BYTES})"
        )


class _Source:
    """The bytes of one frame, read in order in chunks of bounded size."""

    def __init__(self, read_into: ReadInto, length: int) -> None:
        self._read_into, self._length = read_into, length
        self._buffer = bytearray(min(CHUNK_BYTES, length))
        self._offset = 0  # of the next byte that is not in the buffer
        self._begin = self._end = 0  # what is in the buffer and not taken yet

    @property
    def left(self) -> int:
        """Bytes that were not taken yet."""
        return self._length - self._offset + self._end - self._begin

    def peek(self, count: int) -> bytes:
        """Return the next bytes and leave them there."""
        if count > self.left:
            raise FrameError(f"ends {count - self.left} bytes too early")
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

    Fed to the decoder one by one they bound what it can put out at once: a block decodes to at most 128 KiB, while a
    plain chunk of input could hold thousands of blocks.
    """
    last = False
    while not last:
        word = int.from_bytes(source.peek(3), "little")
        last, kind, size = bool(word & 1), (word >> 1) & 3, word >> 3
        if kind not in (_RAW, _RLE, _COMPRESSED) or size > _BLOCK_BYTES:
            raise FrameError("has a block that the format does not allow")
        stored = 1 if kind == _RLE else size
        yield source.take(3 + stored + (4 if last and header.checksum else 0))
