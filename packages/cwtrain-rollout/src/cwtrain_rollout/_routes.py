"""Routed experts as an answer brings them: base64 of a C-ordered array. The only module here that knows numpy."""

from __future__ import annotations

import binascii
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from cwtrain_rollout.protocol import RoutedExperts

__all__ = ["as_array", "read_routes"]

_DTYPES = ("uint8", "uint16")


class _Routes(msgspec.Struct):
    data: str
    shape: list[int]
    dtype: str
    start: int = 0


def read_routes(raw: bytes, *, rows: int) -> RoutedExperts | str:
    """Return the routes of an answer for ``rows`` tokens (prompt + answer - 1), or what is wrong with them."""
    try:
        found = msgspec.json.decode(raw, type=_Routes)
        data = binascii.a2b_base64(found.data, strict_mode=True)
    except (msgspec.DecodeError, binascii.Error) as exc:
        return f"its routed experts cannot be read: {exc}"
    if found.dtype not in _DTYPES:
        return f"its routed experts are of type {found.dtype!r}, not {' or '.join(_DTYPES)}"
    if found.start != 0:
        return f"its routed experts begin at token {found.start}, not at the first"
    if len(found.shape) != 3 or min(found.shape) < 0:
        return f"its routed experts have the shape {found.shape}, not [tokens, layers, top_k]"
    if found.shape[0] != rows:
        return f"it has routed experts for {found.shape[0]} tokens, and {rows} were run through the model"
    tokens, layers, top_k = found.shape
    if len(data) != tokens * layers * top_k * np.dtype(found.dtype).itemsize:
        return f"its routed experts have {len(data)} bytes, which is no {found.dtype} array of shape {found.shape}"
    return RoutedExperts(data=data, shape=(tokens, layers, top_k), dtype=found.dtype)


def as_array(routes: RoutedExperts) -> npt.NDArray[np.integer[Any]]:
    """Return the routes as a read-only array."""
    return np.frombuffer(routes.data, np.dtype(routes.dtype).newbyteorder("<")).reshape(routes.shape)
