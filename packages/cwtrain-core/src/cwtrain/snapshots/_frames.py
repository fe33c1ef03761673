"""The zstd frame format, as far as we take frames apart or put them together ourselves. No library, no files.

A tensor of any size becomes **one** frame, made of chunks that were compressed independently, in any order, on any
core:

    header (magic, window of 128 KiB, content size)   chunk's blocks   chunk's blocks   ...   an empty last block

A chunk's blocks are those of a frame of its own, without its header, and with the last-block flag cleared. Nothing in
them refers to another chunk: tables are repeated only inside a chunk, and the only offset is 1, which every chunk
leaves and finds as the first repeat offset. A run of equal chunks is written as RLE blocks of zeros.
"""

from __future__ import annotations

import struct

import attrs

BLOCK_BYTES = 128 << 10
"""What one block may decode to, by the format."""

MAX_WINDOW_BYTES = 128 << 20
"""Largest window of a frame that is read: zstd's own default limit for decoders."""

MAX_CLAIM_BYTES = 1 << 40
"""Largest tensor that a frame may claim where nothing else bounds it (no tensor of a model comes near 1 TiB)."""

FRAME_END = b"\x01\x00\x00"
"""An empty raw block with the last-block flag."""

MAGIC = 0xFD2FB528
MAX_HEADER_BYTES = 18

SPARE_BYTES = 8
"""How many bytes more than a chunk's frame its buffer must have."""

_WINDOW_LOG_17 = (17 - 10) << 3
_CHUNK_HEADER_BYTES = 6  # magic, descriptor, window: a frame without content size, dictionary and checksum
_RLE = 1
_WORD = struct.Struct("<I").unpack_from

Buffer = bytes | bytearray | memoryview


class FrameError(ValueError):
    """A frame is damaged, or is not what a delta may hold."""


@attrs.frozen(kw_only=True)
class FrameHeader:
    """The first bytes of a frame. ``content_bytes`` is what it claims to decode to, None where it does not say."""

    content_bytes: int | None
    window_bytes: int
    checksum: bool
    header_bytes: int


def parse_frame_header(first: Buffer) -> FrameHeader:
    """Return what a frame's first 18 bytes (or all, if it is shorter) say. Raises FrameError."""
    data = bytes(first[:MAX_HEADER_BYTES])
    if len(data) < 5 or int.from_bytes(data[:4], "little") != MAGIC:
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


def check_frame_header(first: Buffer, *, size: int | None) -> FrameHeader:
    """Return a frame's header, unless it claims more than ``size`` bytes or needs too much memory. Raises FrameError.

    ``size`` is what it must decode to, None where that is not known.
    """
    header = parse_frame_header(first)
    claim = header.content_bytes
    if claim is not None and size is not None and claim != size:
        raise FrameError(f"claims to decode to {claim} bytes, but the tensor has {size}")
    if claim is not None and claim > MAX_CLAIM_BYTES:
        raise FrameError(f"claims to decode to {claim} bytes, more than any tensor has ({MAX_CLAIM_BYTES})")
    if header.window_bytes > MAX_WINDOW_BYTES:
        raise FrameError(
            f"needs a window of {header.window_bytes} bytes, more than decoders grant by default ({MAX_WINDOW_BYTES})"
        )
    return header


def what_follows(rest: bytes, count: int) -> FrameError:
    """Return the error for ``count`` bytes after a frame that begin with ``rest``."""
    again = rest[:4] == struct.pack("<I", MAGIC)
    return FrameError(f"is followed by {'another frame' if again else f'{count} bytes that belong to no frame'}")


def frame_head(content_bytes: int) -> bytes:
    """Return the header of a frame of chunks: content size in 8 bytes, a window of 128 KiB, no checksum."""
    return struct.pack("<IBBQ", MAGIC, 0xC0, _WINDOW_LOG_17, content_bytes)


def chunk_blocks(buffer: bytearray | memoryview, length: int) -> bytes:
    """Return the blocks of a compressed chunk, a frame of ``length`` bytes, to stand before others in a frame.

    The frame lies at the begin of ``buffer``, which has a few bytes more, and is changed in place.
    """
    position = _CHUNK_HEADER_BYTES
    while True:
        (word,) = _WORD(buffer, position)  # a block's header has 3 bytes; the fourth is cut off below
        if word & 1:
            buffer[position] &= 0xFE
            return bytes(memoryview(buffer)[_CHUNK_HEADER_BYTES:length])
        position += 4 if word & 6 == _RLE << 1 else 3 + ((word & 0xFFFFFF) >> 3)


def zero_blocks(count: int) -> bytes:
    """Return RLE blocks that decode to ``count`` zero bytes. Not for a frame's begin: old decoders refuse that."""
    whole, rest = divmod(count, BLOCK_BYTES)
    return _rle_block(BLOCK_BYTES) * whole + (_rle_block(rest) if rest else b"")


def _rle_block(count: int) -> bytes:
    return struct.pack("<I", count << 3 | _RLE << 1)
