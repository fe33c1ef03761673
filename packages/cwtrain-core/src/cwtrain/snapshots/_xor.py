"""XOR of buffers."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def xor_into(target: memoryview, other: memoryview) -> None:
    """Set ``target`` to ``target`` XOR ``other``, byte by byte. Both have the same length."""
    array = np.frombuffer(target, dtype=np.uint8)
    np.bitwise_xor(array, np.frombuffer(other, dtype=np.uint8), out=array)


def xor_words(target: npt.NDArray[np.uint8], other: npt.NDArray[np.uint8]) -> None:
    """Set ``target`` to ``target`` XOR ``other``; both have whole words and begin on one."""
    words = target.view(np.uint64)
    np.bitwise_xor(words, other.view(np.uint64), out=words)


def array_of(data: memoryview) -> npt.NDArray[np.uint8]:
    """Return bytes that somebody else has as an array, without a copy."""
    return np.frombuffer(data, dtype=np.uint8)


def count_nonzero(data: memoryview) -> int:
    """Return how many bytes of ``data`` are not zero."""
    return int(np.count_nonzero(np.frombuffer(data, dtype=np.uint8) != 0))
