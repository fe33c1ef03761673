"""Compiled code for cwtrain's delta encoder: the XOR of two versions of a tensor, and where it is zero.

It is no interface for users. ``cwtrain-core`` takes it where it is installed (``pip install 'cwtrain-core[fast]'``),
and makes the same deltas without it, byte for byte, more slowly. ``difference.c`` says what is given and told.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable

__all__ = ["COLUMNS", "VERSION", "difference", "library_path"]

VERSION = 1
"""Of the function's interface."""

COLUMNS = 5
"""Numbers in a row of the table: position, length; changed bytes, first record, records."""

_PLACE = os.path.join("cwtrain_native.libs", "difference.so")
_POINTER = ctypes.c_void_p
_ARGUMENTS = (
    *(_POINTER, _POINTER),  # old, new
    *(ctypes.c_int64, _POINTER),  # parts, table
    *(_POINTER, _POINTER),  # masks, records
    *(ctypes.c_double, ctypes.c_int32),  # dense, shortest
    *(ctypes.c_double, ctypes.c_int32),  # clumped, clumped_shortest
)


def library_path() -> str | None:
    """Return where the library is, or None: this package was built without a C compiler.

    It lies beside the package, or where an editable installation puts what cannot be in the source folder.
    """
    beside = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    for folder in (beside, *sys.path):
        path = os.path.join(folder, _PLACE)
        if os.path.isabs(path) and os.path.isfile(path):
            return path
    return None


def difference() -> Callable[..., None]:
    """Return the function ``cwtrain_native_difference``; calls release the interpreter lock.

    Raises OSError where the library is not there, cannot be loaded, or is of another version.
    """
    path = library_path()
    if path is None:
        raise OSError("cwtrain-native was built without its library: install it again where there is a C compiler")
    library = ctypes.CDLL(path)
    try:
        version, function = library.cwtrain_native_version(), library.cwtrain_native_difference
    except AttributeError as error:
        raise OSError(f"{path} is not what it should be: {error}") from None
    if version != VERSION:
        raise OSError(f"{path} is of version {version}, not {VERSION}")
    function.argtypes, function.restype = list(_ARGUMENTS), None
    found: Callable[..., None] = function
    return found
