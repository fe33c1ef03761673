"""From the bytes of two versions of a tensor to its frame in a delta. Buffers only; no files, no directories.

A worker reads both versions of some parts (chunks of large tensors, or many small tensors), XORs and compresses them:

    worker = codec.worker()
    old, new = worker.place(lengths, old_offset, new_offset)      # fill these views
    diffs = worker.diff([(0, size), ...])

A ``FrameJoiner`` puts the diffs of one tensor together, in order, whoever made them. With the sequences codec each part
is compressed by itself, so the frame does not depend on which worker had which part; the public codec needs all parts
of a tensor one after the other at one worker.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import attrs
import zstandard

from cwtrain.snapshots._adler import LIBRARY, adler32, adler32_hex, combine
from cwtrain.snapshots._buffers import Bytes, Lane, phase, positions_of, untouched
from cwtrain.snapshots._decoder import Decoder
from cwtrain.snapshots._frames import (
    BLOCK_BYTES,
    FRAME_END,
    SPARE_BYTES,
    Buffer,
    FrameError,
    chunk_blocks,
    frame_head,
    zero_blocks,
)
from cwtrain.snapshots._native import NativeBuilder, native_function, native_problem
from cwtrain.snapshots._sequences import EQUAL, RECORD_BYTES, SequenceBuilder
from cwtrain.snapshots._xor import array_of, count_nonzero, xor_into, xor_words
from cwtrain.snapshots._zstd import LEVEL, Library, SequenceCompressor, address_of, chosen_encoder, encoder_library

__all__ = [
    "CHUNK_BYTES",
    "Codec",
    "DeltaEncoder",
    "Diff",
    "EncodedTensor",
    "FrameError",
    "FrameJoiner",
    "adler32",
    "adler32_hex",
    "decode_xor",
    "delta_codec",
    "encode_xor",
    "in_use",
    "xor_into",
]

CHUNK_BYTES = 1 << 20
"""Tensors are worked on in pieces of this size. It is part of the format of our output: another size, other bytes."""

ReadInto = Callable[[int, memoryview], None]
"""Fill the view with the bytes from the offset on."""


class Diff(NamedTuple):
    """What became of one part.

    ``piece`` is None as long as no byte of the tensor differs; otherwise it is what the part adds to the frame, perhaps
    nothing. ``checksum`` is the Adler-32 of the part's new bytes alone.
    """

    checksum: int
    changed_bytes: int
    piece: bytes | None


class DiffWorker:
    """One worker's buffers: 2 chunks, and what compressing takes. For one thread at a time."""

    def __init__(self, chunk_bytes: int) -> None:
        self._old, self._new = Lane(chunk_bytes), Lane(chunk_bytes)
        self._current = self._new
        self._lengths: Sequence[int] = ()
        self._positions: Sequence[int] = ()
        self._new_views: list[memoryview] = []

    def place(
        self, lengths: Sequence[int], old_offset: int = 0, new_offset: int = 0, write_offset: int | None = None
    ) -> tuple[list[memoryview], list[memoryview]]:
        """Return views for the old and the new bytes of each part, to be filled before ``diff``.

        The offsets are those in the files that they are read from, and that the new ones are written to, if they are:
        copies are fastest when buffers are placed accordingly. The parts have at most a chunk together.
        """
        self._lengths, self._positions = lengths, positions_of(lengths)
        old = self._old.place(lengths, self._positions, phase(old_offset))
        self._current = self._new
        self._new_views = self._new.place(lengths, self._positions, phase(new_offset, write_offset))
        return old, self._new_views

    def place_beside(self, lengths: Sequence[int], new: Lane) -> tuple[list[memoryview], list[memoryview]]:
        """As ``place``, but the new bytes are in ``new`` already: only the views for the old ones are to be filled."""
        self._lengths, self._positions = lengths, positions_of(lengths)
        self._current = new
        self._new_views = new.settle(lengths, self._positions)
        return self._old.place(lengths, self._positions, 0), self._new_views

    def place_old(self, length: int) -> memoryview:
        """Return the view for the old bytes of one part of whole words, to be filled before ``take``."""
        self._lengths, self._positions = [length], [0]
        return self._old.place(self._lengths, self._positions, 0)[0]

    def take(self, new: memoryview) -> int:
        """Read the new bytes where they lie, once and for all, and return their checksum; ``diff_taken`` follows."""
        checksum = adler32(new)
        self._subtract(array_of(new))
        return checksum

    def diff_taken(self, checksum: int, place: tuple[int, int]) -> Diff:
        """Return what became of the part whose new bytes were taken; see ``diff``."""
        return self._compress([checksum], [place])[0]

    def diff(self, places: Sequence[tuple[int, int]]) -> list[Diff]:
        """Return what became of each part; ``places`` says where it begins in its tensor, and how large that is.

        The old bytes are overwritten.
        """
        checksums = [adler32(view) for view in self._new_views]
        self._subtract(self._current.data)
        return self._compress(checksums, places)

    def _subtract(self, new: Bytes) -> None:
        """Set the old bytes to old XOR new."""
        xor_words(self._old.data, new)

    def _compress(self, checksums: list[int], places: Sequence[tuple[int, int]]) -> list[Diff]:
        raise NotImplementedError


class _SequenceWorker(DiffWorker):
    """Finds the zeros itself and gives zstd the matches. About 10 MiB at the most, half of it at a few percent."""

    def __init__(self, library: Library, builder: SequenceBuilder | NativeBuilder, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._builder = builder
        self._compressor = SequenceCompressor(library)
        self._target = untouched(library.compressBound(chunk_bytes) + SPARE_BYTES)
        self._address = address_of(self._target)

    def _subtract(self, new: Bytes) -> None:
        self._builder.subtract(self._old.data, new, self._lengths, self._positions)

    def _compress(self, checksums: list[int], places: Sequence[tuple[int, int]]) -> list[Diff]:
        compress, capacity = self._compressor.compress, len(self._target) - SPARE_BYTES
        records, source = self._builder.address, self._old.address
        diffs = []
        for checksum, length, position, (changed, first, count) in zip(
            checksums, self._lengths, self._positions, self._builder.found(), strict=True
        ):
            if count == EQUAL:
                diffs.append(Diff(checksum, 0, None))
                continue
            size = compress(self._address, capacity, records + first * RECORD_BYTES, count, source + position, length)
            diffs.append(Diff(checksum, changed, chunk_blocks(self._target, size)))
        return diffs


class _PublicWorker(DiffWorker):
    """Lets zstd search, through the public interface: a tensor's parts must come one after the other."""

    def __init__(self, chunk_bytes: int) -> None:
        super().__init__(chunk_bytes)
        self._zeros = bytes(chunk_bytes)
        self._compressor = zstandard.ZstdCompressor(level=LEVEL)
        self._stream: zstandard.ZstdCompressionObj | None = None

    def _compress(self, checksums: list[int], places: Sequence[tuple[int, int]]) -> list[Diff]:
        diffs = []
        view = self._old.data.data
        for checksum, length, position, (start, size) in zip(
            checksums, self._lengths, self._positions, places, strict=True
        ):
            part = view[position : position + length]
            changed = count_nonzero(part)
            if start == 0:
                self._stream = None
            if self._stream is None and not changed:
                diffs.append(Diff(checksum, 0, None))
                continue
            piece = b""
            if self._stream is None:
                self._stream = self._compressor.compressobj(size=size)
                for done in range(0, start, len(self._zeros)):  # the equal parts before the first difference
                    piece += self._stream.compress(self._zeros[: min(len(self._zeros), start - done)])
            piece += self._stream.compress(part)
            if start + length == size:
                piece += self._stream.flush()
                self._stream = None
            diffs.append(Diff(checksum, changed, piece))
        return diffs


class Codec:
    """A way to make frames. ``independent``: parts may be compressed in any order, on any worker."""

    name: ClassVar[str]
    independent: ClassVar[bool]

    def worker(self) -> DiffWorker:
        """Return a new worker."""
        raise NotImplementedError

    def head(self, size: int) -> bytes:
        """Return what a frame of ``size`` bytes begins with, before the first part that differs."""
        raise NotImplementedError

    def zeros(self, count: int, *, first: bool) -> bytes:
        """Return what stands for ``count`` bytes of equal parts; ``first`` if nothing but the head is before them."""
        raise NotImplementedError

    def end(self) -> bytes:
        """Return what a frame ends with."""
        raise NotImplementedError


@attrs.frozen
class _SequenceCodec(Codec):
    library: Library
    function: Callable[..., None] | None
    """What finds the zeros, compiled; None: the numpy code."""
    chunk_bytes: int
    name = "sequences"
    independent = True

    def worker(self) -> DiffWorker:
        size = self.chunk_bytes
        builder = SequenceBuilder(size) if self.function is None else NativeBuilder(self.function, size)
        return _SequenceWorker(self.library, builder, size)

    def head(self, size: int) -> bytes:
        return frame_head(size)

    def zeros(self, count: int, *, first: bool) -> bytes:
        # A frame may not begin with an RLE block (zstd's command up to 1.4.3 refuses it), so its first is compressed.
        lead = min(count, BLOCK_BYTES) if first else 0
        return (_compressed_zeros(self.library, lead) if lead else b"") + zero_blocks(count - lead)

    def end(self) -> bytes:
        return FRAME_END


@functools.lru_cache(maxsize=16)
def _compressed_zeros(library: Library, count: int) -> bytes:
    source = bytearray(count)
    records = bytearray(b"".join(value.to_bytes(4, "little") for value in (1, 1, count - 1, 0)))
    target = bytearray(library.compressBound(count) + SPARE_BYTES)
    compress = SequenceCompressor(library).compress
    matches = 1 if count > 3 else 0
    size = compress(address_of(target), len(target), address_of(records), matches, address_of(source), count)
    return chunk_blocks(target, size)


@attrs.frozen
class _PublicCodec(Codec):
    chunk_bytes: int
    name = "public"
    independent = False

    def worker(self) -> DiffWorker:
        return _PublicWorker(self.chunk_bytes)

    def head(self, size: int) -> bytes:
        return b""

    def zeros(self, count: int, *, first: bool) -> bytes:
        return b""

    def end(self) -> bytes:
        return b""


def delta_codec(encoder: str | None = None, *, chunk_bytes: int = CHUNK_BYTES) -> Codec:
    """Return the best codec there is, or the one that ``encoder`` (or the environment) names: see ``_zstd``."""
    library = encoder_library(encoder)
    if library is None:
        return _PublicCodec(chunk_bytes)
    function = None if chosen_encoder(encoder) == "numpy" else native_function()
    return _SequenceCodec(library, function, chunk_bytes)


def in_use() -> dict[str, str]:
    """Return what frames are made with here: the way to zstd, what finds the zeros, and what sums up the bytes.

    ``problem`` is there where compiled code is installed and cannot be used. Raises ConfigError when the environment
    names an encoder that there is not.
    """
    codec = delta_codec()
    if not isinstance(codec, _SequenceCodec):
        zeros = "zstd"
    else:
        zeros = "numpy" if codec.function is None else "cwtrain-native"
    used = {"frames": codec.name, "zeros": zeros, "adler32": LIBRARY}
    return used | ({"problem": problem} if (problem := native_problem()) else {})


@attrs.frozen(kw_only=True)
class EncodedTensor:
    """What became of one tensor: bytes that differ, Adler-32 of the new bytes, and the length of its frame.

    An equal tensor has no frame: ``frame_bytes`` is 0.
    """

    changed_bytes: int
    checksum: str
    frame_bytes: int


class FrameJoiner:
    """Writes the frame of one tensor of ``size`` bytes from the diffs of its parts, in order."""

    def __init__(self, codec: Codec, size: int, write: Callable[[bytes], object]) -> None:
        self._codec, self._size, self._write = codec, size, write
        self._checksum = 1
        self._equal = 0  # bytes of equal parts that are not written yet
        self._changed = self._written = 0

    def add(self, length: int, checksum: int, changed_bytes: int, piece: bytes | None) -> None:
        """Take the diff of the next part, of ``length`` bytes."""
        self._checksum = combine(self._checksum, checksum, length)
        self._changed += changed_bytes
        if piece is None:
            self._equal += length
            return
        first = not self._written
        if first:
            self._pass_on(self._codec.head(self._size))
        if self._equal:
            self._pass_on(self._codec.zeros(self._equal, first=first))
            self._equal = 0
        self._pass_on(piece)

    def finish(self) -> EncodedTensor:
        """Write the frame's end, if there is a frame, and return what became of the tensor."""
        if self._changed:
            if self._equal:
                self._pass_on(self._codec.zeros(self._equal, first=False))
            self._pass_on(self._codec.end())
        return EncodedTensor(
            changed_bytes=self._changed, checksum=adler32_hex(self._checksum), frame_bytes=self._written
        )

    def _pass_on(self, piece: bytes) -> None:
        if piece:
            self._write(piece)
            self._written += len(piece)


class DeltaEncoder:
    """Encodes one tensor after the other on one thread, chunk by chunk: about 2 chunks and what compressing takes."""

    def __init__(self, encoder: str | None = None, *, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._codec = delta_codec(encoder, chunk_bytes=chunk_bytes)
        self._worker = self._codec.worker()
        self._chunk = chunk_bytes

    def encode(
        self, size: int, read_old: ReadInto, read_new: ReadInto, write: Callable[[bytes], object]
    ) -> EncodedTensor:
        """Read both versions of a tensor of ``size`` bytes and ``write`` its frame piece by piece.

        Nothing is written when no byte differs.
        """
        joiner = FrameJoiner(self._codec, size, write)
        for start in range(0, size, self._chunk):
            length = min(self._chunk, size - start)
            (old,), (new,) = self._worker.place([length])
            read_old(start, old)
            read_new(start, new)
            (diff,) = self._worker.diff([(start, size)])
            joiner.add(length, *diff)
        return joiner.finish()


def encode_xor(old: Buffer, new: Buffer, encoder: str | None = None, *, chunk_bytes: int = CHUNK_BYTES) -> bytes:
    """Return the frame that leads from ``old`` to ``new``, even where they are equal. For tensors in memory."""
    if len(old) != len(new):
        raise ValueError(f"the tensor has {len(old)} bytes in one version and {len(new)} in the other")
    pieces: list[bytes] = []
    left, right = memoryview(old).cast("B"), memoryview(new).cast("B")
    delta = DeltaEncoder(encoder, chunk_bytes=chunk_bytes)
    if delta.encode(len(left), _reader(left), _reader(right), pieces.append).changed_bytes:
        return b"".join(pieces)
    stream = zstandard.ZstdCompressor(level=LEVEL).compressobj(size=len(left))
    return stream.compress(bytes(len(left))) + stream.flush()


def decode_xor(frame: Buffer, old: Buffer, encoder: str | None = None) -> bytes:
    """Return the new bytes of a tensor from its frame and its old bytes. Raises FrameError."""
    view, new = memoryview(frame).cast("B"), bytearray(len(old))
    Decoder(encoder_library(encoder)).fill(_reader(view), len(view), memoryview(new))
    xor_into(memoryview(new), memoryview(old).cast("B"))
    return bytes(new)


def _reader(source: memoryview) -> ReadInto:
    def read_into(offset: int, view: memoryview) -> None:
        view[:] = source[offset : offset + len(view)]

    return read_into
