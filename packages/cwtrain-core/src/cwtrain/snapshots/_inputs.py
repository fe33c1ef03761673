"""Tensors of other libraries as bytes: numpy, torch and whatever has the buffer protocol; none of them is imported.

torch's own ways out (numpy, DLPack) refuse bfloat16 and float8, so its bytes are read where ``data_ptr`` says. Dtypes
are told by name. What does not lie in memory in one piece, or on a device, is copied out a few MiB at a time.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from cwtrain.errors import SnapshotError
from cwtrain.snapshots.checkpoint import Tensor
from cwtrain.snapshots.header import DTYPE_BITS

__all__ = ["TensorInput", "checkpoint_input", "tensor_input"]

_COPY_BYTES = 4 << 20
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4",
}  # fmt: skip
_VIEWED = frozenset({"BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4"})
"""What numpy has no dtype for: there, integers of the same width hold the bits. ``U8`` is bytes, and so anything."""
_RAW = "U8"
_UNTYPED = ("void", "bits")
"""How numpy and torch call words of which they know the width alone."""
_FORMATS = {"?": "BOOL", "B": "U8", "c": "U8", "b": "I8", "e": "F16", "f": "F32", "d": "F64", "Zf": "C64"}
_INTEGERS = {"H": "U", "I": "U", "L": "U", "Q": "U", "N": "U", "h": "I", "i": "I", "l": "I", "q": "I", "n": "I"}


@attrs.frozen(kw_only=True)
class TensorInput:
    """A tensor that can be read once. ``dtype`` is spelled as in a safetensors header."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    pieces: Callable[[], Iterator[memoryview]] = attrs.field(repr=False)
    """Its bytes in order, in views that are valid until the next one."""
    address: int | None = attrs.field(default=None, repr=False)
    """Where its bytes lie in memory in one piece, None where they do not."""


def tensor_input(
    name: str, tensor: Any, *, dtype: str | None = None, shape: Sequence[int] | None = None
) -> TensorInput:
    """Return ``tensor`` as bytes. ``dtype`` and ``shape`` say what does not say it itself; the sizes must fit.

    That is raw bytes, words without a type, and integers that hold the bits of what numpy lacks (``BF16``, ``F8_*``,
    ``F4``). Anything else has a dtype of its own, and another one is refused: nothing is ever converted.

    Raises SnapshotError for that, and for what has no bytes to read (a meta tensor, a sharded one) or no dtype that we
    know.
    """
    if dtype is not None and dtype not in DTYPE_BITS:
        raise _refused(name, f"is said to be {dtype!r}, which is no dtype of a safetensors file")
    if hasattr(tensor, "data_ptr") and hasattr(tensor, "element_size"):
        found = _from_torch(name, tensor)
    elif hasattr(tensor, "__array_interface__"):
        found = _from_array(name, tensor)
    else:
        try:
            view = memoryview(tensor)
        except (TypeError, ValueError, BufferError):
            if not hasattr(tensor, "__array__"):
                raise _refused(name, f"is a {type(tensor).__name__}, which has no bytes to read") from None
            found = _from_array(name, tensor.__array__())
        else:
            found = _from_buffer(name, view)
    return _as_told(name, found, dtype, shape)


def checkpoint_input(tensor: Tensor) -> TensorInput:
    """Return a tensor of a checkpoint on the disk, read in blocks."""

    def pieces() -> Iterator[memoryview]:
        block = memoryview(bytearray(min(_COPY_BYTES, tensor.size_bytes)))
        with tensor.open() as file:
            for begin in range(0, tensor.size_bytes, _COPY_BYTES):
                view = block[: min(_COPY_BYTES, tensor.size_bytes - begin)]
                file.read_into(tensor.offset + begin, view)
                yield view
            tensor.check(file)

    return TensorInput(dtype=tensor.dtype, shape=tensor.shape, size_bytes=tensor.size_bytes, pieces=pieces)


def _as_told(name: str, found: TensorInput, told: str | None, shape: Sequence[int] | None) -> TensorInput:
    """Return what was ``found`` as the caller says; ``found.dtype`` is empty for words that have no type."""
    own = found.dtype
    if told is None and not own:
        raise _refused(name, "has elements without a type", 'say what they are: dtype="BF16"')
    if told is not None and told != own and not _leaves_open(found, told):
        raise _refused(
            name,
            f"is {own} {list(found.shape)} by itself, and is said to be {told}",
            f"leave dtype= out, or convert the tensor to {told} first: nothing is converted here, its bytes would be "
            "read as other numbers",
        )
    dtype = told or own
    bits = DTYPE_BITS[dtype]
    if shape is None:
        if math.prod(found.shape) * bits == found.size_bytes * 8:
            shape = found.shape
        elif len(found.shape) == 1:
            shape = (found.size_bytes * 8 // bits,)
        else:
            raise _refused(
                name, f"has bytes in the shape {list(found.shape)}, which is not that of {dtype}", "give shape=, too"
            )
    shape = tuple(int(extent) for extent in shape)
    if min(shape, default=0) < 0 or math.prod(shape) * bits != found.size_bytes * 8:
        raise _refused(name, f"has {found.size_bytes} bytes, which are not {dtype} {list(shape)}")
    if len(found.shape) > 1 and shape != found.shape and bits * math.prod(found.shape) == found.size_bytes * 8:
        raise _refused(
            name,
            f"has the shape {list(found.shape)} by itself, and is said to have {list(shape)}",
            "leave shape= out, or reshape the tensor first",
        )
    return attrs.evolve(found, dtype=dtype, shape=shape)


def _leaves_open(found: TensorInput, told: str) -> bool:
    """Return whether the elements of a tensor may be ``told``, which is not their own dtype."""
    if found.dtype == _RAW:
        return True
    elements = math.prod(found.shape)
    width = found.size_bytes * 8 // elements if elements else DTYPE_BITS[told]
    return width == DTYPE_BITS[told] and (not found.dtype or (found.dtype[0] in "UI" and told in _VIEWED))


def _refused(name: str, why: str, hint: str | None = None) -> SnapshotError:
    return SnapshotError(
        f"tensor {name!r} {why}",
        hint=hint or "give a numpy array, a torch tensor or raw bytes; dtype= and shape= say what raw bytes are",
    )


def _dtype(name: str, found: str) -> str:
    known = _NAMES.get(found)
    if known is None and found.startswith(_UNTYPED):
        return ""
    if known is None:
        raise _refused(
            name, f"has the dtype {found}, which safetensors files do not have", "convert it to one that they have"
        )
    return known


def _from_torch(name: str, tensor: Any) -> TensorInput:
    if hasattr(tensor, "full_tensor"):
        raise _refused(name, "is sharded over ranks (a DTensor)", "add tensor.full_tensor(), or gather it first")
    device = str(getattr(tensor.device, "type", tensor.device))
    if str(getattr(tensor, "layout", "torch.strided")) != "torch.strided" or device == "meta":
        what = "is on the meta device" if device == "meta" else f"is {tensor.layout}"
        raise _refused(name, f"{what}, so its bytes are not there", "add a dense tensor that is in memory")
    found = str(tensor.dtype).rpartition(".")[2]
    shape = tuple(int(extent) for extent in tensor.shape)
    if found == "float4_e2m1fn_x2" and shape:
        shape = (*shape[:-1], shape[-1] * 2)
    size = int(tensor.numel()) * int(tensor.element_size())

    def pieces() -> Iterator[memoryview]:
        if not size:
            return
        plain = tensor.detach()
        if not plain.data_ptr():
            raise _refused(
                name,
                f"is a {type(tensor).__name__} whose bytes are in other tensors, or nowhere",
                "add the plain tensor that it stands for (dequantised, or what it wraps)",
            )
        for lazy, resolve in (("is_conj", "resolve_conj"), ("is_neg", "resolve_neg")):
            if hasattr(plain, lazy) and getattr(plain, lazy)():
                plain = getattr(plain, resolve)()
        if plain.is_contiguous():
            plain = plain.reshape(-1)
            if device == "cpu":
                yield _at_pointer(plain, size)
                return
        width = int(plain.element_size())
        for part in _parts(plain, lambda one: int(one.numel()) * width):
            here = part.contiguous().to("cpu")
            yield _at_pointer(here, int(here.numel()) * width)

    return TensorInput(
        dtype=_dtype(name, found),
        shape=shape,
        size_bytes=size,
        pieces=pieces,
        address=int(tensor.data_ptr()) if tensor.is_contiguous() else None,
    )


def _at_pointer(tensor: Any, size: int) -> memoryview:
    """Return the bytes of a contiguous tensor, valid as long as it is."""
    return memoryview((ctypes.c_ubyte * size).from_address(tensor.data_ptr())).cast("B")


def _from_array(name: str, array: Any) -> TensorInput:
    found = str(array.dtype.newbyteorder("=").name) if array.dtype.isnative is False else str(array.dtype.name)
    if getattr(array.dtype, "names", None):
        raise _refused(name, "has elements of several fields", "give one tensor for each field")
    size = int(array.nbytes)

    def pieces() -> Iterator[memoryview]:
        if not size:
            return
        if array.flags.c_contiguous and array.dtype.isnative:
            yield memoryview(array.reshape(-1).view("u1"))
            return
        native = array.dtype.newbyteorder("=")
        for part in _parts(array, lambda one: int(one.nbytes)):
            yield memoryview(part.astype(native, order="C").reshape(-1).view("u1"))

    plain = array.flags.c_contiguous and array.dtype.isnative
    return TensorInput(
        dtype=_dtype(name, found),
        shape=tuple(map(int, array.shape)),
        size_bytes=size,
        pieces=pieces,
        address=int(array.__array_interface__["data"][0]) if plain else None,
    )


def _from_buffer(name: str, view: memoryview) -> TensorInput:
    code = view.format.lstrip("@=<")
    dtype = f"{_INTEGERS[code]}{8 * view.itemsize}" if code in _INTEGERS else _FORMATS.get(code)
    if dtype is None:
        raise _refused(
            name,
            f"has elements of the format {view.format!r}, which safetensors files do not have",
            "convert it: numbers are little-endian there, and of one of the usual types",
        )

    def pieces() -> Iterator[memoryview]:
        if view.nbytes:
            yield view.cast("B") if view.c_contiguous else memoryview(view.tobytes())

    return TensorInput(dtype=dtype, shape=tuple(view.shape or ()), size_bytes=view.nbytes, pieces=pieces)


def _parts(tensor: Any, size_of: Callable[[Any], int]) -> Iterator[Any]:
    """Yield parts of a tensor in the order of its elements, each of a few MiB at the most."""
    size, shape = size_of(tensor), tuple(tensor.shape)
    if size <= _COPY_BYTES or not shape:
        yield tensor
        return
    rows = int(shape[0])
    row = size // rows
    if row > _COPY_BYTES:
        for number in range(rows):
            yield from _parts(tensor[number], size_of)
        return
    step = max(1, _COPY_BYTES // row)
    for begin in range(0, rows, step):
        yield tensor[begin : begin + step]
