"""Routed experts as answers bring them, in every form that says what it is. The only module here that knows numpy.

- An object with base64 ``data``, ``shape`` and ``dtype`` (Dynamo's ``nvext``, and ``choices[]``).
- A text, base64 of a ``.npy`` file (vLLM from 0.22).
- Nested lists of numbers, those of the prompt beside the choices (vLLM 0.21).

SGLang gives base64 of int32 without a shape: how many layers, and how many experts for each, nobody can tell from it.
"""

from __future__ import annotations

import binascii
import io
import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cwtrain_rollout.protocol import RoutedExperts

__all__ = ["as_array", "read_routes"]

_NPY = b"\x93NUMPY"
_BY_SIZE = {1: "uint8", 2: "uint16", 4: "int32", 8: "int64"}

_Array = npt.NDArray[np.integer[Any]]


class _Routes(msgspec.Struct):
    data: str
    shape: list[int]
    dtype: str | None = None
    start: int = 0


class _UnreadableError(Exception):
    """Routes cannot be read; the text goes on behind "its routed experts"."""


def read_routes(raw: bytes, *, rows: int, prompt: bytes = b"") -> RoutedExperts | str:
    """Return the routes of an answer for ``rows`` tokens (prompt + answer - 1), or what is wrong with them.

    ``prompt`` are the prompt's, where the server gives them apart.
    """
    try:
        found = _read(raw)
        if prompt and len(found) != rows:
            found = _joined([_read(prompt), found])
    except _UnreadableError as exc:
        return f"its routed experts {exc}"
    if found.dtype.kind == "i" and found.size and found.min() < 0:
        return "its routed experts hold ids below 0: not every token has its experts"
    if len(found) != rows:
        return f"it has routed experts for {len(found)} tokens, and {rows} were run through the model"
    tokens, layers, top_k = found.shape
    data = np.ascontiguousarray(found, found.dtype.newbyteorder("<"))
    return RoutedExperts(data=data.tobytes(), shape=(tokens, layers, top_k), dtype=found.dtype.name)


def _read(raw: bytes) -> _Array:
    first = raw.lstrip()[:1]
    try:
        if first == b"{":
            routes = msgspec.json.decode(raw, type=_Routes)
            if routes.start != 0:
                raise _UnreadableError(f"begin at token {routes.start}, not at the first")
            return _array(_bytes(routes.data), routes.shape, routes.dtype)
        if first == b'"':
            return _of_text(_bytes(msgspec.json.decode(raw, type=str)))
        lists = msgspec.json.decode(raw, type=list[list[list[int]]])
    except msgspec.DecodeError as exc:
        raise _UnreadableError(f"cannot be read: {exc}") from exc
    try:
        return _three(np.array(lists, np.int32) if lists else np.empty((0, 0, 0), np.int32))
    except (ValueError, OverflowError) as exc:
        raise _UnreadableError(f"cannot be read: {exc}") from exc


def _bytes(text: str) -> bytes:
    try:
        return binascii.a2b_base64(text, strict_mode=True)
    except (binascii.Error, ValueError) as exc:
        raise _UnreadableError(f"cannot be read: {exc}") from exc


def _of_text(data: bytes) -> _Array:
    """Return what a ``.npy`` file holds. Its header is compared with its size before memory is made for it."""
    if not data.startswith(_NPY):
        raise _UnreadableError(
            f"cannot be read: {len(data)} bytes without a shape, as SGLang gives them, fit any number of layers"
        )
    file = io.BytesIO(data)
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}[version]
        shape, columns_first, dtype = read(file)
    except Exception as exc:  # numpy reads it as Python, and raises whatever that raises
        raise _UnreadableError(f"cannot be read: {exc}") from exc
    if columns_first:
        raise _UnreadableError("cannot be read: their array is in Fortran order")
    return _array(data[file.tell() :], shape, dtype.str)


def _array(data: bytes, shape: Sequence[int], dtype: str | None) -> _Array:
    if len(shape) != 3 or min(shape) < 0:
        raise _UnreadableError(f"have the shape {list(shape)}, not [tokens, layers, top_k]")
    count = math.prod(shape)
    if dtype is None:
        dtype = _BY_SIZE.get(len(data) // count if count else 1, "of unknown size")
    try:
        kind = np.dtype(dtype.removeprefix("torch."))
    except (TypeError, ValueError):
        kind = np.dtype(object)
    if kind.kind not in "iu" or kind.byteorder == ">":
        raise _UnreadableError(
            f"are of type {dtype!r}, which is no little-endian integer such as uint8, uint16 or int32"
        )
    if len(data) != count * kind.itemsize:
        raise _UnreadableError(f"have {len(data)} bytes, which is no {dtype} array of shape {list(shape)}")
    return np.frombuffer(data, kind).reshape(tuple(shape))


def _three(array: npt.NDArray[Any]) -> _Array:
    if array.ndim != 3:
        raise _UnreadableError(f"have the shape {list(array.shape)}, not [tokens, layers, top_k]")
    return array


def _joined(parts: Sequence[_Array]) -> _Array:
    shapes = {part.shape[1:] for part in parts if len(part)}
    if len(shapes) > 1:
        raise _UnreadableError(f"have other layers for the prompt than for the answer: {sorted(shapes)}")
    return np.concatenate([part for part in parts if len(part)] or [parts[0]])


def as_array(routes: RoutedExperts) -> npt.NDArray[np.integer[Any]]:
    """Return the routes as a read-only array."""
    return np.frombuffer(routes.data, np.dtype(routes.dtype).newbyteorder("<")).reshape(routes.shape)
