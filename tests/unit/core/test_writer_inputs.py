"""Tensors of numpy, of torch and of anything with the buffer protocol, as bytes."""

from __future__ import annotations

import array
import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import SnapshotError
from cwtrain.snapshots._inputs import tensor_input


def read(tensor: Any, **told: Any) -> tuple[str, tuple[int, ...], bytes]:
    found = tensor_input("t", tensor, **told)
    data = b"".join(bytes(piece) for piece in found.pieces())
    assert len(data) == found.size_bytes
    return found.dtype, found.shape, data


@pytest.mark.parametrize(
    ("dtype", "spelled"),
    [
        ("bool", "BOOL"), ("uint8", "U8"), ("int8", "I8"), ("uint16", "U16"), ("int16", "I16"), ("uint32", "U32"),
        ("int32", "I32"), ("uint64", "U64"), ("int64", "I64"), ("float16", "F16"), ("float32", "F32"),
        ("float64", "F64"), ("complex64", "C64"),
    ],
)  # fmt: skip
def test_numpy_arrays_of_each_dtype(dtype: str, spelled: str) -> None:
    values = np.arange(12).reshape(3, 4).astype(dtype)
    assert read(values) == (spelled, (3, 4), values.tobytes())


@pytest.mark.parametrize(
    "values",
    [
        np.arange(12, dtype=np.int32).reshape(3, 4).T,
        np.arange(24, dtype=np.int32)[::-2],
        np.broadcast_to(np.float32(2.5), (3, 2)),
        np.float64(3.5),
        np.array(7, np.int64),
        np.zeros((3, 0, 2), np.float32),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    ],
    ids=["transposed", "strided", "broadcast", "numpy scalar", "no dimension", "empty", "big endian", "fortran"],
)
def test_numpy_arrays_that_do_not_lie_in_one_piece(values: Any) -> None:
    little = np.asarray(values).astype(np.asarray(values).dtype.newbyteorder("<"))
    assert read(values)[1:] == (np.shape(values), little.tobytes("C"))


def test_a_large_array_with_strides_is_copied_out_a_piece_at_a_time() -> None:
    values = np.arange(3 << 20, dtype=np.uint32).reshape(2, 3 << 9, 1 << 10).transpose(2, 0, 1)
    found = tensor_input("t", values)
    pieces = [bytes(piece) for piece in found.pieces()]
    assert max(map(len, pieces)) <= 4 << 20
    assert len(pieces) > 2
    assert b"".join(pieces) == values.tobytes()


def test_buffers() -> None:
    assert read(b"abc") == ("U8", (3,), b"abc")
    assert read(bytearray(b"abcd")) == ("U8", (4,), b"abcd")
    assert read(array.array("d", [1.0, 2.0])) == ("F64", (2,), struct.pack("<2d", 1, 2))
    assert read(array.array("h", [1, -1])) == ("I16", (2,), struct.pack("<2h", 1, -1))
    assert read(memoryview(b"abcdef")[::2]) == ("U8", (3,), b"ace")


def test_raw_words_are_what_one_says() -> None:
    words = np.arange(6, dtype=np.uint16).reshape(2, 3)
    assert read(words, dtype="BF16") == ("BF16", (2, 3), words.tobytes())
    assert read(b"12345678", dtype="F8_E4M3", shape=(2, 4)) == ("F8_E4M3", (2, 4), b"12345678")
    assert read(b"1234", dtype="BF16") == ("BF16", (2,), b"1234")
    assert read(b"12", dtype="F4", shape=[4]) == ("F4", (4,), b"12")


@pytest.mark.parametrize(
    ("tensor", "told", "says"),
    [
        (object(), {}, "is a object, which has no bytes"),
        (np.array(["a"]), {}, "has the dtype str"),
        (np.array([None]), {}, "has the dtype object"),
        (b"123", {"dtype": "BF16"}, "has 3 bytes, which are not BF16"),
        (b"1234", {"dtype": "F32", "shape": (2,)}, r"has 4 bytes, which are not F32 \[2\]"),
        (b"1234", {"dtype": "FP32"}, "is said to be 'FP32'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tensor: Any, told: dict[str, Any], says: str) -> None:
    with pytest.raises(SnapshotError, match=says) as caught:
        read(tensor, **told)
    assert "tensor 't'" in str(caught.value)
    assert caught.value.hint


def test_torch_tensors_of_each_dtype() -> None:
    """Bytes by address: numpy and DLPack take neither bfloat16 nor float8."""
    torch = pytest.importorskip("torch")
    raw = bytes(range(48))
    for name, spelled in (
        ("bfloat16", "BF16"), ("float16", "F16"), ("float32", "F32"), ("float64", "F64"), ("float8_e4m3fn", "F8_E4M3"),
        ("float8_e5m2", "F8_E5M2"), ("int8", "I8"), ("int64", "I64"), ("uint8", "U8"), ("complex64", "C64"),
    ):  # fmt: skip
        dtype = getattr(torch, name)
        tensor = torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(dtype).reshape(2, -1)
        assert read(tensor) == (spelled, tuple(tensor.shape), raw)
        turned = tensor.T
        assert read(turned)[2] == bytes(turned.contiguous().view(torch.uint8).numpy().tobytes())
        if tensor.dtype.is_floating_point:
            assert read(tensor.clone().requires_grad_(name != "float8_e8m0fnu"))[2] == raw
    assert read(torch.tensor(True)) == ("BOOL", (), b"\x01")
    assert read(torch.tensor(2.0, dtype=torch.bfloat16)) == ("BF16", (), b"\x00\x40")
    assert read(torch.zeros(0, 3)) == ("F32", (0, 3), b"")
    assert read(torch.tensor([1 + 2j]).conj()) == ("C64", (1,), struct.pack("<2f", 1, -2))


def test_torch_tensors_without_bytes_are_refused() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(SnapshotError, match="on the meta device"):
        read(torch.zeros(2, device="meta"))
    with pytest.raises(SnapshotError, match="sparse"):
        read(torch.eye(3).to_sparse())


def test_no_library_of_tensors_is_imported() -> None:
    """Core has no torch: reading inputs must not import it, nor numpy before somebody uses it."""
    code = "import sys; from cwtrain.snapshots import _inputs; print(sorted({'torch', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
