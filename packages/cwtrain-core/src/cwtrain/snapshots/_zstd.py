"""zstd, in two ways: the C library inside the ``zstandard`` wheel through ctypes, or the wheel's own Python interface.

The first way is needed to give zstd its matches (``ZSTD_compressSequences``), and decodes straight into our buffers. It
is probed once, at first use: the library must be there, have all functions and a version that was tested, and take and
give back two joined chunks. Where it does not, the second way does the same work, more slowly.

``CWTRAIN_DELTA_ENCODER=sequences|public`` forces one of them, ``numpy`` the first without compiled code of ours: for
tests, and for reports of problems.
"""

from __future__ import annotations

import ctypes
import functools
import glob
import os
import struct
import weakref
from collections.abc import Callable
from typing import Any

import zstandard

from cwtrain.errors import ConfigError
from cwtrain.snapshots._frames import (
    FRAME_END,
    MAX_WINDOW_BYTES,
    SPARE_BYTES,
    FrameError,
    chunk_blocks,
    frame_head,
    zero_blocks,
)

LEVEL = 1
TESTED = (10505, 10599)
"""Lowest and highest version of the library that is used through ctypes (1.5.5 to 1.5.x)."""

ENCODER_VARIABLE = "CWTRAIN_DELTA_ENCODER"
ENCODERS = ("sequences", "numpy", "public")

_SIZE, _POINTER, _INT = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
_RESET_SESSION = 1
_D_WINDOW_LOG_MAX = 100
# level 1, strategy lazy, window log 17, hash and chain log 6 (nothing is searched), no content size, no block
# delimiters in the sequences, no validation of them
_PARAMETERS = {100: LEVEL, 107: 4, 101: 17, 102: 6, 103: 6, 200: 0, 1008: 0, 1009: 0}
_CONTENT_SIZE_ERROR = (1 << 64) - 2


class ZstdError(RuntimeError):
    """The library reported an error."""


class _InBuffer(ctypes.Structure):
    _fields_ = (("source", _POINTER), ("size", _SIZE), ("position", _SIZE))


class _OutBuffer(ctypes.Structure):
    _fields_ = (("target", _POINTER), ("size", _SIZE), ("position", _SIZE))


_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "ZSTD_versionNumber": (ctypes.c_uint, []),
    "ZSTD_isError": (ctypes.c_uint, [_SIZE]),
    "ZSTD_getErrorName": (ctypes.c_char_p, [_SIZE]),
    "ZSTD_compressBound": (_SIZE, [_SIZE]),
    "ZSTD_createCCtx": (_POINTER, []),
    "ZSTD_freeCCtx": (_SIZE, [_POINTER]),
    "ZSTD_CCtx_setParameter": (_SIZE, [_POINTER, _INT, _INT]),
    "ZSTD_compressSequences": (_SIZE, [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE, _POINTER, _SIZE]),
    "ZSTD_createDCtx": (_POINTER, []),
    "ZSTD_freeDCtx": (_SIZE, [_POINTER]),
    "ZSTD_DCtx_setParameter": (_SIZE, [_POINTER, _INT, _INT]),
    "ZSTD_DCtx_reset": (_SIZE, [_POINTER, _INT]),
    "ZSTD_decompressDCtx": (_SIZE, [_POINTER, _POINTER, _SIZE, _POINTER, _SIZE]),
    "ZSTD_decompressStream": (_SIZE, [_POINTER, ctypes.POINTER(_OutBuffer), ctypes.POINTER(_InBuffer)]),
    "ZSTD_findFrameCompressedSize": (_SIZE, [_POINTER, _SIZE]),
    "ZSTD_getFrameContentSize": (ctypes.c_ulonglong, [_POINTER, _SIZE]),
}


class Library:
    """The C functions, with their types. Raises OSError or AttributeError where they cannot be had."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)  # calls release the interpreter lock
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments
            setattr(self, name.removeprefix("ZSTD_"), function)

    def __getattr__(self, name: str) -> Any:  # for type checkers; the functions are set in __init__
        raise AttributeError(f"the library at {self.path} has no function ZSTD_{name}")

    def check(self, result: int) -> int:
        """Return ``result``; raise ZstdError if it is an error code."""
        if self.isError(result):
            raise ZstdError(self.getErrorName(result).decode())
        return result


class SequenceCompressor:
    """Compresses buffers whose matches are given. For one thread at a time; about 1 MiB."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._context = library.createCCtx()
        if not self._context:
            raise MemoryError("zstd could not make a compression context")
        weakref.finalize(self, library.freeCCtx, self._context)
        for key, value in _PARAMETERS.items():
            library.check(library.CCtx_setParameter(self._context, key, value))
        self._compress = library.compressSequences
        self._is_error = library.isError

    def compress(self, target: int, capacity: int, sequences: int, count: int, source: int, length: int) -> int:
        """Write a frame of the ``length`` bytes at address ``source`` to address ``target``; return the frame's length.

        ``sequences`` is the address of ``count`` records of four uint32: offset, literals, match length, 0. What they
        leave over is literals.
        """
        result: int = self._compress(self._context, target, capacity, sequences, count, source, length)
        return self._library.check(result) if self._is_error(result) else result


class StreamDecompressor:
    """Decodes frames straight into buffers. For one thread at a time; memory as the frame's window asks."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._context = library.createDCtx()
        if not self._context:
            raise MemoryError("zstd could not make a decompression context")
        weakref.finalize(self, library.freeDCtx, self._context)
        log = MAX_WINDOW_BYTES.bit_length() - 1
        library.check(library.DCtx_setParameter(self._context, _D_WINDOW_LOG_MAX, log))
        self._in, self._out = _InBuffer(), _OutBuffer()
        self._refs = (ctypes.byref(self._out), ctypes.byref(self._in))

    def decode_small(self, source: int, length: int, target: int, capacity: int) -> int | None:
        """Decode one whole frame and return how much it gave.

        None where it is not exactly one good frame of at most ``capacity`` bytes: decode it as a stream, which says
        why.
        """
        library = self._library
        claim = library.getFrameContentSize(source, length)
        if capacity < claim <= _CONTENT_SIZE_ERROR or library.findFrameCompressedSize(source, length) != length:
            return None
        result: int = library.decompressDCtx(self._context, target, capacity, source, length)
        return None if library.isError(result) else result

    def begin(self) -> None:
        """Forget the frame before; the next ``feed`` begins another one."""
        self._library.check(self._library.DCtx_reset(self._context, _RESET_SESSION))

    def feed(self, source: int, length: int, target: int, capacity: int) -> tuple[int, int, bool]:
        """Decode from ``source`` to ``target``; return bytes taken, bytes given, and whether the frame is at its end.

        Raises FrameError.
        """
        self._in.source, self._in.size, self._in.position = source, length, 0
        self._out.target, self._out.size, self._out.position = target, capacity, 0
        result = self._library.decompressStream(self._context, *self._refs)
        if self._library.isError(result):
            raise FrameError(f"is damaged: {self._library.getErrorName(result).decode()}")
        return self._in.position, self._out.position, result == 0


def address_of(buffer: bytearray | memoryview) -> int:
    """Return the address of a writable buffer; valid while the buffer is neither resized nor dropped."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if len(buffer) else 0


@functools.cache
def library() -> Library | None:
    """Return the library inside the ``zstandard`` wheel, or None where it cannot be used. Probed at the first call."""
    return find_library(os.path.dirname(zstandard.__file__))


def find_library(folder: str, *, tested: tuple[int, int] = TESTED) -> Library | None:
    """Return the first library in ``folder`` that has a tested version and works, or None."""
    for path in sorted(glob.glob(os.path.join(glob.escape(folder), "*cffi*.so"))):
        try:
            found = Library(path)
            if tested[0] <= found.versionNumber() <= tested[1] and _works(found):
                return found
        except (OSError, AttributeError, ZstdError, zstandard.ZstdError, MemoryError):
            continue
    return None


def _works(found: Library) -> bool:
    """Return whether two chunks, compressed by themselves and joined with zeros between, decode to what they were."""
    compressor = SequenceCompressor(found)
    chunk = bytearray(300_001)  # more than two blocks, so that a match is cut at a border
    for position in range(5, len(chunk), 70_000):
        chunk[position : position + 2] = b"\x80\x01"
    runs = []
    before = taken = 0
    for position in [*range(5, len(chunk), 70_000), len(chunk)]:
        runs.append((1, before + 1 - taken, position - before - 1, 0))
        before, taken = position + 2, position
    sequences = bytearray(b"".join(struct.pack("<4I", *run) for run in runs))
    target = bytearray(found.compressBound(len(chunk)) + SPARE_BYTES)
    length = compressor.compress(
        address_of(target), len(target), address_of(sequences), len(runs), address_of(chunk), len(chunk)
    )
    blocks = chunk_blocks(target, length)
    size = 2 * len(chunk) + 1000
    frame = frame_head(size) + blocks + zero_blocks(1000) + blocks + FRAME_END
    want = bytes(chunk) + bytes(1000) + bytes(chunk)
    return len(blocks) < 300 and zstandard.ZstdDecompressor().decompress(frame) == want


def encoder_library(encoder: str | None = None, *, find: Callable[[], Library | None] = library) -> Library | None:
    """Return the library to encode and decode with (what ``find`` finds), None for the public interface.

    ``encoder`` is one of ``ENCODERS``; None means what ``CWTRAIN_DELTA_ENCODER`` says, or the best there is. Raises
    ConfigError for another name, and for ``sequences`` and ``numpy`` where the library cannot be used.
    """
    choice = chosen_encoder(encoder)
    found = None if choice == "public" else find()
    if choice and choice != "public" and found is None:
        raise ConfigError(
            "the zstd library inside the zstandard package cannot be used through ctypes",
            hint=f"unset {ENCODER_VARIABLE}: the public interface of zstandard does the same, more slowly",
        )
    return found


def chosen_encoder(encoder: str | None = None) -> str:
    """Return which of ``ENCODERS`` is asked for, by name or by the environment; empty: the best there is.

    Raises ConfigError for another name.
    """
    choice = encoder or os.environ.get(ENCODER_VARIABLE, "").strip()
    if choice not in ("", *ENCODERS):
        raise ConfigError(f"{ENCODER_VARIABLE}={choice!r} is unknown", hint=f"use {' or '.join(ENCODERS)}, or unset it")
    return choice
