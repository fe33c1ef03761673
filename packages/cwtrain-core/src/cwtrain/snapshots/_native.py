"""The XOR of two versions and the runs of zeros in it, found by compiled code where ``cwtrain-native`` is installed.

It gives the same records as the numpy code of ``_sequences``, byte for byte, in about half of the time. It is tried
once, at first use, against that code; what is missing, of another version, or wrong is not used.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from importlib import import_module

import numpy as np
import numpy.typing as npt

from cwtrain._process import renew_locks_after_fork
from cwtrain.snapshots._buffers import MAX_PARTS, WORD_BYTES, Bytes, positions_of, round_up
from cwtrain.snapshots._sequences import CLUMPED, CLUMPED_RUN, DENSE, FEW, MIN_RUN, Found, SequenceBuilder

_log = logging.getLogger("cwtrain.snapshots")

_MODULE, _VERSION = "cwtrain_native", 1
_COLUMNS = 5
_GROUP_BYTES = 64

_Function = Callable[..., None]
_trying = threading.Lock()
renew_locks_after_fork(sys.modules[__name__], "_trying")


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
        self._scratch = (int(self._table.ctypes.data), int(self._masks.ctypes.data), self.address)
        self._parts = 0

    def subtract(self, old: Bytes, new: Bytes, lengths: Sequence[int], positions: Sequence[int]) -> None:
        """Set ``old`` to old XOR new, and find what is in each part; see ``SequenceBuilder``."""
        if old.size != new.size or old.size < positions[-1] + round_up(lengths[-1]):
            raise ValueError(f"{old.size} bytes of one version and {new.size} of the other for {len(lengths)} parts")
        self._parts = parts = len(lengths)
        self._table[:parts, 0], self._table[:parts, 1] = positions, lengths
        self._function(
            old.ctypes.data,
            new.ctypes.data,
            parts,
            *self._scratch,
            DENSE,
            MIN_RUN - 1,
            CLUMPED if parts <= FEW else 0.0,
            CLUMPED_RUN - 1,
        )

    def found(self) -> list[Found]:
        """Return what is in each part that was subtracted last."""
        return [Found(*row) for row in self._table[: self._parts, 2:].tolist()]

    def records_of(self, found: Found) -> npt.NDArray[np.int32]:
        """Return the records of a part, which stay valid until the next call."""
        return self._records[found.first : found.first + max(0, found.records)]


def native_function() -> _Function | None:
    """Return the compiled function, or None where it cannot be used. Tried at the first call."""
    with _trying:
        return _tried()[0]


def native_problem() -> str:
    """Return why the compiled function is installed and not used; empty where it is used, or not installed."""
    with _trying:
        return _tried()[1]


@functools.cache
def _tried() -> tuple[_Function | None, str]:
    try:
        module = import_module(_MODULE)
        if (module.VERSION, module.COLUMNS) != (_VERSION, _COLUMNS):
            raise OSError(f"it is of version {module.VERSION}, and {_VERSION} is needed")
        if module.library_path() is None:  # built without a compiler: as if it were not installed
            return None, ""
        function: _Function = module.difference()
        if not agrees(function):
            raise OSError("it does not find what the numpy code finds")
    except ImportError:
        return None, ""
    except Exception as error:  # noqa: BLE001 - whatever is wrong with what is only quicker, numpy does the work
        problem = f"cwtrain-native is not used, and deltas take more time: {error}; install cwtrain-native again"
        _log.warning(problem)
        return None, problem
    return function, ""


def agrees(function: _Function) -> bool:
    """Return whether the function finds what the numpy code finds, in parts of each kind.

    By itself, with a few others (where clumped parts are looked at twice) and with many.
    """
    kinds = sample()
    return all(_agrees_on(function, some) for some in (kinds[:1], kinds[:FEW], kinds))


def sample() -> list[npt.NDArray[np.uint8]]:
    """Return differences of each kind, more than ``FEW``: equal, sparse, clumped and dense ones."""
    equal, sparse, clumped, dense = (np.zeros(size, np.uint8) for size in (4099, 4163, 4101, 4096))
    sparse[np.cumsum(np.arange(1, 88))] = 0x81  # runs of each length up to 86, the last one to the end
    clumped[7:2000:16] = clumped[8:2000:16] = 1  # two words to each run, which is short
    dense[:2600] = 0xFF  # and a run that would be worth a match in a part that is not dense
    return [sparse, equal, clumped, dense] * (FEW // 4 + 1)


def _agrees_on(function: _Function, kinds: Sequence[npt.NDArray[np.uint8]]) -> bool:
    lengths = [kind.size for kind in kinds]
    positions = positions_of(lengths)
    size = positions[-1] + round_up(lengths[-1])
    old, new = np.zeros(size, np.uint8), np.zeros(size, np.uint8)
    for kind, position in zip(kinds, positions, strict=True):
        old[position : position + kind.size] = np.arange(kind.size) % 251
        new[position : position + kind.size] = old[position : position + kind.size] ^ kind
    left, right = old.copy(), old.copy()
    ours, theirs = NativeBuilder(function, size), SequenceBuilder(size)
    ours.subtract(left, new, lengths, positions)
    theirs.subtract(right, new, lengths, positions)
    return bool(np.array_equal(left, right)) and all(
        (one.changed_bytes, one.records) == (other.changed_bytes, other.records)
        and bool(np.array_equal(ours.records_of(one), theirs.records_of(other)))
        for one, other in zip(ours.found(), theirs.found(), strict=True)
    )
