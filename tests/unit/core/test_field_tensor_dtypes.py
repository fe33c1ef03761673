"""A tensor is written as what it is: what a caller says counts only for what does not say it itself.

The kind: an argument that describes raw bytes was taken over the description that the data brings along, so the same
bytes became other numbers, or another shape, or came in another byte order.
"""

from __future__ import annotations

import array
import ctypes
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import SnapshotError
from cwtrain.snapshots._inputs import tensor_input


def read(tensor: Any, **told: Any) -> tuple[str, tuple[int, ...], bytes]:
    found = tensor_input("t", tensor, **told)
    return found.dtype, found.shape, b"".join(bytes(piece) for piece in found.pieces())


ONES = {name: np.ones((4, 4), name) for name in ("float16", "float32", "float64", "int64", "uint32", "bool", "int8")}


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (ONES["float16"], "BF16"),
        (ONES["float32"], "BF16"),
        (ONES["float32"], "F16"),
        (ONES["float64"], "F32"),
        (ONES["int64"], "F64"),
        (ONES["int64"], "BF16"),
        (ONES["uint32"], "F32"),
        (ONES["uint32"], "BF16"),
        (ONES["bool"], "F8_E4M3"),
        (ONES["int8"], "U8"),
        (np.float16(1), "BF16"),
        (np.ones((0, 4), np.float32), "BF16"),
        (np.ones(4, np.uint16), "F16"),
        (np.ones(4, np.uint16), "F8_E4M3"),
        (np.ones(4, ">f4"), "BF16"),
        (memoryview(ONES["float16"]), "BF16"),
        (array.array("f", [1.0, 2.0]), "BF16"),
        (array.array("d", [1.0, 2.0]), "F32"),
        ((ctypes.c_float * 4)(), "BF16"),
    ],
)
def test_another_dtype_than_its_own_is_refused(tensor: Any, told: str) -> None:
    with pytest.raises(SnapshotError, match=f"by itself, and is said to be {told}") as caught:
        read(tensor, dtype=told)
    assert "leave dtype= out" in (caught.value.hint or "")


def test_its_own_dtype_may_be_said() -> None:
    for tensor in ONES.values():
        assert read(tensor, dtype=read(tensor)[0]) == read(tensor)


@pytest.mark.parametrize(
    ("tensor", "told", "shape"),
    [
        (np.arange(6, dtype=np.uint16).reshape(2, 3), "BF16", (2, 3)),
        (np.arange(6, dtype=np.int16).reshape(2, 3), "BF16", (2, 3)),
        (np.arange(6, dtype=np.uint8).reshape(2, 3), "F8_E4M3", (2, 3)),
        (np.arange(6, dtype=np.int8).reshape(2, 3), "F8_E5M2", (2, 3)),
        (np.arange(6, dtype=np.uint8), "BF16", (3,)),
        (np.zeros(3, "V2"), "BF16", (3,)),
        (array.array("H", [1, 2]), "BF16", (2,)),
        (b"12345678", "F32", (2,)),
    ],
)
def test_bits_of_what_numpy_lacks_and_raw_bytes_are_what_one_says(tensor: Any, told: str, shape: Any) -> None:
    assert read(tensor, dtype=told) == (
        told,
        shape,
        bytes(memoryview(np.ascontiguousarray(tensor).reshape(-1).view("u1"))),
    )


def test_raw_bytes_in_a_shape_need_the_new_one() -> None:
    packed = np.arange(16, dtype=np.uint8).reshape(2, 8)
    with pytest.raises(SnapshotError, match=r"bytes in the shape \[2, 8\]"):
        read(packed, dtype="F4")
    assert read(packed, dtype="F4", shape=(2, 16))[:2] == ("F4", (2, 16))


def test_another_shape_than_its_own_is_refused() -> None:
    with pytest.raises(SnapshotError, match=r"has the shape \[4, 4\] by itself"):
        read(ONES["float32"], shape=(2, 8))
    assert read(ONES["float32"].reshape(-1), shape=(2, 8))[1] == (2, 8)
    assert read(ONES["float32"], shape=(4, 4)) == read(ONES["float32"])


@pytest.mark.parametrize(
    ("tensor", "told"),
    [
        (memoryview(bytearray(8)).cast("B"), None),
        (np.zeros(2, [("a", "f4"), ("b", "f4")]), "F64"),
        (np.array(["ab"]), "F64"),
        (np.zeros(2, "M8[s]"), "I64"),
        (np.zeros(2, np.complex128), "F64"),
        (np.array([None]), "I64"),
    ],
)
def test_saying_a_dtype_lets_nothing_in_that_has_another_meaning(tensor: Any, told: str | None) -> None:
    if told is None:
        assert read(tensor) == ("U8", (8,), bytes(8))
        return
    with pytest.raises(SnapshotError, match="tensor 't'"):
        read(tensor, dtype=told)


def test_words_in_the_other_byte_order_are_refused_and_not_written_as_they_lie() -> None:
    big = (ctypes.c_uint16.__ctype_be__ * 4)(1, 2, 3, 4)
    with pytest.raises(SnapshotError, match=">H") as caught:
        read(big, dtype="BF16")
    assert "little-endian" in (caught.value.hint or "")
