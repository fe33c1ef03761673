"""The header of a safetensors file: read without torch, checked as strictly as the reference reader does, written."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from cwtrain.errors import SnapshotLayoutError
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._json import MAX_JSON_BYTES, encodable, may_hold_half_characters, parse_json
from cwtrain.snapshots._sniff import SNIFF_BYTES, describe_content

__all__ = ["DTYPE_BITS", "Header", "TensorInfo", "build_header", "parse_header", "read_header", "unfit_names"]

DTYPE_BITS: Mapping[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip
"""Bits of one element of each known dtype."""

_METADATA = "__metadata__"
_MAX_ELEMENTS = 1 << 63
_EXAMPLES = 8


@attrs.frozen(kw_only=True)
class TensorInfo:
    """Where a tensor lies in its file's data: bytes ``begin`` to ``end``, counted from ``Header.data_start``."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Length of the tensor's data in bytes."""
        return self.end - self.begin


@attrs.frozen(kw_only=True)
class Header:
    """The header of one file, and what the file was when it was read.

    ``tensors`` is in the order of the data. ``metadata`` is empty where the file has none, or null.
    """

    path: str
    tensors: Mapping[str, TensorInfo] = attrs.field(repr=False)
    metadata: Mapping[str, str] = attrs.field(repr=False)
    data_start: int
    """Offset of the data in the file, in bytes."""
    file_bytes: int
    mtime_ns: int
    inode: int
    device: int


def read_header(path: str, *, label: str | None = None) -> Header:
    """Return the checked header of the safetensors file at ``path``; only the header is read.

    ``label`` names the file in messages. Raises SnapshotLayoutError with everything that is wrong: not a regular file,
    truncated, a Git LFS pointer, a page, zeros, broken JSON, offsets that overlap or leave gaps, sizes that do not fit.
    """
    with RegularFile(path, label=label) as file:
        return parse_header(file)


def parse_header(file: RegularFile) -> Header:
    """Return the header of an open file; see ``read_header``."""
    problems: list[str] = []
    raw, data_start = _header_bytes(file)
    data_bytes = file.size_bytes - data_start
    try:
        if raw[:1] != b"{":
            raise ValueError("does not begin with '{'")
        value = parse_json(raw)
    except ValueError as error:
        raise _refused(
            file, [f"the header {error}; not a safetensors file, or damaged: save or download it again"]
        ) from None
    halves = may_hold_half_characters(raw)
    metadata = _metadata(value.pop(_METADATA, None), problems, halves)
    tensors = _tensors(value, problems, halves)
    if not problems:
        _check_offsets(tensors, data_bytes, problems)
    if problems:
        raise _refused(file, problems)
    return Header(
        path=file.path,
        tensors=tensors,
        metadata=metadata,
        data_start=data_start,
        file_bytes=file.size_bytes,
        mtime_ns=file.mtime_ns,
        inode=file.inode,
        device=file.device,
    )


def _refused(file: RegularFile, problems: list[str]) -> SnapshotLayoutError:
    named = [f"{file.label}: {problem}" for problem in problems]
    return SnapshotLayoutError("; ".join(named), problems=named)


def _header_bytes(file: RegularFile) -> tuple[bytes, int]:
    """Return the header's JSON and where the data begins; its length is checked before memory is spent on it."""
    size = file.size_bytes
    length = int.from_bytes(file.read(0, 8), "little") if size >= 8 else 0
    if 0 < length <= MAX_JSON_BYTES and 8 + length <= size:
        return file.read(8, length), 8 + length
    if what := describe_content(file.read(0, min(size, SNIFF_BYTES))):
        problem = what
    elif size < 8:
        problem = f"has only {size} bytes, less than the length field of a header; truncated: save or download it again"
    elif length == 0:
        problem = "says that its header has no bytes; not a safetensors file, or damaged: save or download it again"
    elif length > MAX_JSON_BYTES:
        problem = (
            f"says that its header has {length} bytes (at most {MAX_JSON_BYTES}); not a safetensors file, or damaged"
        )
    else:
        problem = (
            f"is truncated inside its header, by at least {8 + length - size} bytes "
            f"(the header has {length} bytes, the file {size}); save or download it again"
        )
    raise _refused(file, [problem])


def _metadata(value: Any, problems: list[str], halves: bool) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        problems.append(f"__metadata__ is {_kind(value)}, not an object; rewrite the file with strings only")
        return {}
    wrong = [key for key, text in value.items() if not isinstance(text, str)]
    if halves:
        wrong += [
            key for key, text in value.items() if isinstance(text, str) and not (encodable(key) and encodable(text))
        ]
    if wrong:
        what = ", ".join(f"{key!r} is {_kind(value[key])}" for key in wrong[:_EXAMPLES])
        problems.append(f"__metadata__ may hold only strings: {what}; no reader opens such a file, rewrite it")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _tensors(value: dict[str, Any], problems: list[str], halves: bool) -> dict[str, TensorInfo]:
    found: dict[str, TensorInfo] = {}
    wrong: list[str] = []
    unknown: dict[str, tuple[int, str]] = {}
    for name, entry in value.items():
        result = _tensor(name, entry, halves)
        if isinstance(result, TensorInfo):
            result = _check_size(name, result, unknown) or result
        if isinstance(result, TensorInfo):
            found[name] = result
        else:
            wrong.append(f"tensor {name!r} {result}")
    problems.extend(wrong[:_EXAMPLES])
    if len(wrong) > _EXAMPLES:
        problems.append(f"{len(wrong) - _EXAMPLES} more tensors are described wrongly")
    return dict(sorted(found.items(), key=lambda item: (item[1].begin, item[1].end)))


def _tensor(name: str, entry: Any, halves: bool) -> TensorInfo | str:
    """Return the tensor, or what is wrong with it; ``halves`` says that its name may have half a character."""
    if halves and not encodable(name):
        return "has half a character in its name"
    if not isinstance(entry, dict):
        return f"is {_kind(entry)}, not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not dtype:
        return "has no dtype"
    if not isinstance(shape, list) or not all(map(_is_count, shape)):
        return f"has the shape {_short(shape)}, not a list of whole numbers"
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_count, offsets)):
        return f"has the data_offsets {_short(offsets)}, not two whole numbers"
    if offsets[0] > offsets[1]:
        return f"ends at {offsets[1]}, before it begins at {offsets[0]}"
    return TensorInfo(dtype=dtype, shape=tuple(shape), begin=offsets[0], end=offsets[1])


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _MAX_ELEMENTS


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _elements(shape: tuple[int, ...]) -> int:
    """Return the product, or 2**63 for anything larger (a hostile shape must not cost a huge multiplication)."""
    if 0 in shape:
        return 0
    count = 1
    for extent in shape:
        count *= extent
        if count >= _MAX_ELEMENTS:
            return _MAX_ELEMENTS
    return count


def _check_size(name: str, tensor: TensorInfo, unknown: dict[str, tuple[int, str]]) -> str | None:
    """Return what is wrong with the tensor's size, if anything.

    A dtype that we do not know is let through if it fits itself: whole bits per element, the same for each tensor of
    that dtype (``unknown`` remembers), and no bytes for no elements.
    """
    count, bits = _elements(tensor.shape), tensor.size_bytes * 8
    per_element = DTYPE_BITS.get(tensor.dtype)
    if per_element is not None:
        if (count * per_element) % 8:
            return f"of {count} {tensor.dtype} elements does not end on a whole byte"
        if count * per_element != bits:
            return (
                f"has {tensor.size_bytes} bytes, but {tensor.dtype} {_short(list(tensor.shape))} "
                f"has {count * per_element // 8}"
            )
        return None
    if count == 0:
        return f"has {tensor.size_bytes} bytes, but no elements" if bits else None
    if bits % count or not bits:
        return f"has {tensor.size_bytes} bytes for {count} elements of the unknown dtype {_short(tensor.dtype)}"
    known, other = unknown.setdefault(tensor.dtype, (bits // count, name))
    if known != bits // count:
        return (
            f"has {bits // count} bits per element of the unknown dtype {_short(tensor.dtype)}, "
            f"but tensor {other!r} has {known}"
        )
    return None


def _check_offsets(tensors: Mapping[str, TensorInfo], data_bytes: int, problems: list[str]) -> None:
    end, before = 0, ""
    for name, tensor in tensors.items():
        if tensor.begin < end:
            problems.append(
                f"tensor {name!r} begins at {tensor.begin}, inside tensor {before!r}, which ends at {end}; "
                "tensors may not share bytes: save each one by itself"
            )
        elif tensor.begin > end:
            problems.append(
                f"{tensor.begin - end} bytes before tensor {name!r} belong to no tensor; save the file again"
            )
        end, before = max(end, tensor.end), name
        if len(problems) == _EXAMPLES:
            problems.append("and perhaps more")
            return
    if end > data_bytes:
        problems.append(
            f"is truncated by {end - data_bytes} bytes (the header describes {end} bytes of data, there are "
            f"{data_bytes}); save or download it again"
        )
    elif end < data_bytes:
        problems.append(f"has {data_bytes - end} bytes after the last tensor; save or download it again")


def unfit_names(names: Iterable[str]) -> list[str]:
    """Return the tensor names that nothing may be published under: blank ones, and those that cannot be printed."""
    return [name for name in names if not (name.isprintable() and name.strip())]


def build_header(tensors: Iterable[tuple[str, str, Iterable[int], int]], metadata: Mapping[str, str]) -> bytes:
    """Return the length field and header of a file that holds ``tensors`` (name, dtype, shape, bytes) in this order.

    The JSON is padded with spaces to a multiple of 8. The same input gives the same bytes.
    """
    value: dict[str, Any] = {_METADATA: dict(metadata)} if metadata else {}
    end = 0
    for name, dtype, shape, size in tensors:
        value[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
