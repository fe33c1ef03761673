"""The emulator's own reader and writer of safetensors files: headers, raw bytes, and the index. No torch.

A file is an 8-byte little-endian header length, that many bytes of JSON, then the data. The JSON maps each tensor to
``{"dtype", "shape", "data_offsets": [begin, end]}`` (offsets count from the end of the header) and may have
``"__metadata__"``, a map of strings.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "DTYPE_BITS",
    "INDEX_NAME",
    "FormatError",
    "Header",
    "TensorInfo",
    "header_length",
    "parse_header",
    "read_header",
    "write_file",
]

INDEX_NAME = "model.safetensors.index.json"

MAX_HEADER_BYTES = 100 * 1000 * 1000

DTYPE_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
}


class FormatError(ValueError):
    """A file is not what its format says; the message names the file and what is wrong."""


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a file: where its bytes are (counted from the end of the header) and what they mean."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def size_bytes(self) -> int:
        """Length of the tensor's data."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """What the header of one safetensors file says. ``data_start`` is the file offset of the first data byte."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str] = field(default_factory=dict)
    data_start: int = 0

    @property
    def data_bytes(self) -> int:
        """Length of the data part."""
        return max((info.end for info in self.tensors.values()), default=0)


def header_length(first_bytes: bytes, *, name: str) -> int:
    """Return the header's length from the first 8 bytes; raise FormatError when it cannot be one."""
    if len(first_bytes) < 8:
        raise FormatError(f"{name}: {len(first_bytes)} bytes are too few for a safetensors file")
    length = int.from_bytes(first_bytes[:8], "little")
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise FormatError(f"{name}: header length {length} is not that of a safetensors file")
    return length


def parse_header(raw: bytes, *, name: str) -> Header:
    """Return the header of a file from its JSON bytes; raise FormatError unless it describes every byte once."""
    try:
        entries = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (UnicodeDecodeError, ValueError, RecursionError) as exc:
        raise FormatError(f"{name}: the header is not JSON ({exc})") from None
    if not isinstance(entries, dict):
        raise FormatError(f"{name}: the header is not a JSON object")
    metadata = entries.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{name}: __metadata__ is not a map of strings")
    tensors = {str(tensor): _tensor_info(entry, name=name, tensor=str(tensor)) for tensor, entry in entries.items()}
    position = 0
    for tensor, info in sorted(tensors.items(), key=lambda item: (item[1].begin, item[1].end)):
        if info.begin != position:
            raise FormatError(f"{name}: the data of {tensor!r} begins at {info.begin}, expected {position}")
        position = info.end
    return Header(tensors=tensors, metadata=metadata, data_start=8 + len(raw))


def read_header(path: str | os.PathLike[str]) -> Header:
    """Return the header of the file at `path`; raise FormatError when header and file size do not agree."""
    name = Path(path).name
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = header_length(file.read(8), name=name)
        if 8 + length > size:
            raise FormatError(f"{name}: the header claims {length} bytes, the file has {size}")
        header = parse_header(file.read(length), name=name)
    if header.data_start + header.data_bytes != size:
        raise FormatError(f"{name}: {size} bytes, but header and data need {header.data_start + header.data_bytes}")
    return header


def write_file(
    path: str | os.PathLike[str],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes | memoryview]],
    *,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write `tensors` (name -> dtype, shape, bytes) as one safetensors file; the header is padded to 8 bytes."""
    entries: dict[str, Any] = {}
    if metadata:
        entries["__metadata__"] = dict(metadata)
    position = 0
    for tensor, (dtype, shape, data) in tensors.items():
        size = memoryview(data).nbytes
        entries[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    raw = json.dumps(entries, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for _, _, data in tensors.values():
            file.write(data)


def _tensor_info(entry: object, *, name: str, tensor: str) -> TensorInfo:
    if not isinstance(entry, dict):
        raise FormatError(f"{name}: the entry of {tensor!r} is not an object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str):
        raise FormatError(f"{name}: {tensor!r} has no dtype")
    if not isinstance(shape, list) or not all(_is_size(size) for size in shape):
        raise FormatError(f"{name}: {tensor!r} has no proper shape")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise FormatError(f"{name}: {tensor!r} has no proper data_offsets")
    begin, end = offsets
    if begin > end:
        raise FormatError(f"{name}: the data of {tensor!r} ends before it begins")
    if dtype in DTYPE_BITS:
        bits = DTYPE_BITS[dtype]
        for size in shape:
            bits *= size
        if bits != 8 * (end - begin):
            raise FormatError(f"{name}: {tensor!r} is {dtype} {shape} but has {end - begin} bytes")
    return TensorInfo(dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name stands twice")
    return result
