"""Compiled code for cwtrain's delta encoder: the XOR of two versions of a tensor, and where it is zero.

It is no interface for users. ``cwtrain-core`` takes it where it is installed (``pip install 'cwtrain-core[fast]'``),
and makes the same deltas without it, byte for byte, more slowly. ``difference.c`` says what is given and told.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

__all__ = ["COLUMNS", "VERSION", "difference"]

VERSION = 1
"""Of the function's interface."""

COLUMNS = 5
"""Numbers in a row of the table: position, length; changed bytes, first record, records."""

_LIBRARY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "_difference.so")
_POINTER = ctypes.c_void_p
_ARGUMENTS = (
    *(_POINTER, _POINTER),  # old, new
    *(ctypes.c_int64, _POINTER),  # parts, table
    *(_POINTER, _POINTER),  # masks, records
    *(ctypes.c_double, ctypes.c_int32),  # dense, shortest
    *(ctypes.c_double, ctypes.c_int32),  # clumped, clumped_shortest
)


@functools.cache
def difference() -> Callable[..., None]:
    """Return the function ``cwtrain_native_difference``; calls release the interpreter lock.

    Raises OSError where the library is not there (this package was built without a C compiler) or cannot be loaded, and
    where it is of another version.
    """
    library = ctypes.CDLL(_LIBRARY)
    version = library.cwtrain_native_version()
    if version != VERSION:
        raise OSError(f"{_LIBRARY} is of version {version}, not {VERSION}: install cwtrain-native again")
    function = library.cwtrain_native_difference
    function.argtypes, function.restype = list(_ARGUMENTS), None
    found: Callable[..., None] = function
    return found
