"""The XOR of two versions and the runs of zeros in it, found by compiled code where ``cwtrain-native`` is installed.

It gives the same records as the numpy code of ``_sequences``, byte for byte, in less than half of the time. It is tried
once, at first use, against that code; what is missing, of another version, or wrong is not used.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np
import numpy.typing as npt

from cwtrain.snapshots._buffers import MAX_PARTS, WORD_BYTES, Bytes
from cwtrain.snapshots._sequences import CLUMPED, CLUMPED_RUN, DENSE, FEW, MIN_RUN, Found, SequenceBuilder

_log = logging.getLogger("cwtrain.snapshots")

_MODULE, _VERSION = "cwtrain_native", 1
_COLUMNS = 5
_GROUP_BYTES = 64

_Function = Callable[..., None]


class NativeBuilder:
    """As ``SequenceBuilder``, in compiled code: an eighth of a chunk, and records, of which sparse data touches few."""

    def __init__(self, function: _Function, chunk_bytes: int) -> None:
        words = chunk_bytes // WORD_BYTES + MAX_PARTS
        self._function = function
        self._table = np.zeros((MAX_PARTS, _COLUMNS), np.int64)
        self._masks = np.empty(words * WORD_BYTES // _GROUP_BYTES + 1, np.uint64)
        self._records = np.empty((words + MAX_PARTS, 4), np.int32)
        self.address = int(self._records.ctypes.data)
        """Address of the records: offset, literals, match length, 0."""
        self._scratch = (int(self._masks.ctypes.data), self.address)
        self._table_address = int(self._table.ctypes.data)

    def records_of(self, found: Found) -> npt.NDArray[np.int32]:
        """Return the records of a part, which stay valid until the next call."""
        return self._records[found.first : found.first + max(0, found.records)]

    def difference(self, old: Bytes, new: Bytes, lengths: Sequence[int], positions: Sequence[int]) -> list[Found]:
        """Set ``old`` to old XOR new, and return what is in each part; see ``SequenceBuilder``."""
        parts = len(lengths)
        rows = self._table[:parts]
        rows[:, 0], rows[:, 1] = positions, lengths
        self._function(
            old.ctypes.data,
            new.ctypes.data,
            parts,
            self._table_address,
            *self._scratch,
            DENSE,
            MIN_RUN - 1,
            CLUMPED if parts <= FEW else 0.0,
            CLUMPED_RUN - 1,
        )
        return [Found(*row) for row in rows[:, 2:].tolist()]


@functools.cache
def native_function() -> _Function | None:
    """Return the compiled function, or None where it cannot be used. Tried at the first call."""
    try:
        module = import_module(_MODULE)
    except ImportError:
        return None
    try:
        if (module.VERSION, module.COLUMNS) != (_VERSION, _COLUMNS):
            raise OSError(f"it has version {module.VERSION}, and {_VERSION} is needed")
        function: _Function = module.difference()
        if not agrees(function):
            raise OSError("it does not find what the numpy code finds")
    except (OSError, AttributeError, TypeError) as error:
        _log.warning("cwtrain-native is not used: %s; deltas are made by the numpy code, more slowly", error)
        return None
    return function


def agrees(function: _Function) -> bool:
    """Return whether the function finds what the numpy code finds, in parts of each kind."""
    length = 4099
    old = np.arange(6 * (length + 5), dtype=np.int64).astype(np.uint8)
    new = old.copy()
    lengths, positions = [length] * 6, list(range(0, old.size, length + 5))
    for part, step in enumerate((0, 1, 2, 5, 50, 1000)):  # equal, dense, clumped and sparse ones
        if step:
            new[positions[part] : positions[part] + length : step] ^= 0x81
    left, right = old.copy(), old.copy()
    ours, theirs = NativeBuilder(function, old.size), SequenceBuilder(old.size)
    found = ours.difference(left, new, lengths, positions), theirs.difference(right, new, lengths, positions)
    return bool(np.array_equal(left, right)) and all(
        (one.changed_bytes, one.records) == (other.changed_bytes, other.records)
        and bool(np.array_equal(ours.records_of(one), theirs.records_of(other)))
        for one, other in zip(*found, strict=True)
    )
