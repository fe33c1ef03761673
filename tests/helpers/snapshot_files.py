"""Builds checkpoint and delta directories byte by byte, and decodes them, with none of the library's own code."""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import zstandard

INDEX = "model.safetensors.index.json"
Tensors = Mapping[str, tuple[str, list[int], bytes]]
"""name -> (dtype, shape, bytes)"""


def safetensors(tensors: Tensors, metadata: Any = None) -> bytes:
    """Return a file that holds ``tensors`` in this order."""
    header: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return with_header(json.dumps(header), data)


def with_header(header: str | bytes, data: bytes = b"") -> bytes:
    """Return a file with this header text, right or wrong."""
    text = header.encode() if isinstance(header, str) else header
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def read_tensors(path: Path) -> tuple[dict[str, tuple[str, list[int], bytes]], dict[str, str]]:
    """Return the tensors and metadata of one file."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", None) or {}
    found = {}
    for name, info in header.items():
        begin, end = info["data_offsets"]
        found[name] = (info["dtype"], info["shape"], raw[8 + length + begin : 8 + length + end])
    return found, metadata


def read_index(directory: Path) -> dict[str, Any]:
    """Return the index of a directory."""
    index: dict[str, Any] = json.loads((directory / INDEX).read_text())
    return index


def read_checkpoint(directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return all tensors of a full checkpoint by its index."""
    found = {}
    for name, shard in read_index(directory)["weight_map"].items():
        found[name] = read_tensors(directory / shard)[0][name]
    return found


def write_json(path: Path, value: Any) -> None:
    """Write ``value`` to ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))


def write_full(directory: Path, *shards: Tensors, metadata: Mapping[str, Any] | None = None) -> Path:
    """Write a full checkpoint with these shards, a configuration and a tokenizer."""
    write_json(directory / "config.json", {"model_type": "toy"})
    write_json(directory / "tokenizer.json", {"v": 1})
    weight_map = {}
    total = 0
    for number, tensors in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (directory / name).write_bytes(safetensors(tensors, {"format": "pt"}))
        weight_map.update(dict.fromkeys(tensors, name))
        total += sum(len(raw) for _, _, raw in tensors.values())
    metadata = {"total_size": total} if metadata is None else metadata
    write_json(directory / INDEX, {"metadata": metadata, "weight_map": weight_map})
    return directory


def frame(data: bytes) -> bytes:
    """Return one zstd frame as the trainers write it."""
    return zstandard.ZstdCompressor(level=1).compress(data)


def streamed_frame(data: bytes) -> bytes:
    """Return one zstd frame that does not say its content size."""
    stream = zstandard.ZstdCompressor(level=1).compressobj()
    return stream.compress(data) + stream.flush()


def xor(old: bytes, new: bytes) -> bytes:
    """Return old XOR new."""
    return (int.from_bytes(old, "little") ^ int.from_bytes(new, "little")).to_bytes(len(old), "little")


DELTA_METADATA = {
    "version": "000001",
    "base_version": "000000",
    "delta_encoding": "xor",
    "compression_format": "zstd",
    "checksum_format": "adler32",
}


def write_delta(
    directory: Path,
    old: Tensors,
    new: Tensors,
    *,
    names: list[str] | None = None,
    make_frame: Callable[[bytes], bytes] = frame,
    metadata: Mapping[str, Any] | None = None,
    checksum: str = "%08x",
) -> Path:
    """Write the delta directory from ``old`` to ``new`` as the trainers do, in one shard."""
    directory.mkdir(parents=True, exist_ok=True)
    names = [name for name in new if old[name] != new[name]] if names is None else names
    tensors, sums = {}, {}
    for name in names:
        blob = make_frame(xor(old[name][2], new[name][2]))
        tensors[name] = ("U8", [len(blob)], blob)
        sums[name] = checksum % zlib.adler32(new[name][2])
    shard = "model-00000-of-00001.safetensors"
    if names:
        (directory / shard).write_bytes(safetensors(tensors, sums))
    index = {
        "metadata": {**DELTA_METADATA, **(metadata or {})},
        "weight_map": dict.fromkeys(names, shard),
    }
    write_json(directory / INDEX, index)
    return directory


def apply_delta(old: Tensors, directory: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Return ``old`` with the delta in ``directory`` applied and each checksum compared."""
    result = dict(old)
    for name, shard in read_index(directory)["weight_map"].items():
        blobs, sums = read_tensors(directory / shard)
        dtype, shape, before = old[name]
        diff = zstandard.ZstdDecompressor().decompress(blobs[name][2])
        assert len(diff) == len(before)
        after = xor(before, diff)
        assert sums[name] == f"{zlib.adler32(after):08x}"
        result[name] = (dtype, shape, after)
    return result


def toy(version: int) -> dict[str, tuple[str, list[int], bytes]]:
    """Return a small model of all kinds of tensors; ``version`` decides what its bytes are."""

    def words(*values: int) -> bytes:
        return struct.pack(f"<{len(values)}H", *values)

    big = bytearray(random.Random(7).randbytes(6000))
    for step in range(version):
        big[step * 100] ^= 0xFF
    return {
        "embed_tokens.weight": ("BF16", [4, 2], words(*range(100, 108))),  # never changes
        "layer.weight": ("BF16", [30, 100], bytes(big)),  # changes every version
        "layer.scale": ("F32", [], struct.pack("<f", 1.5 if version < 2 else 2.5)),  # a scalar, changes at 2
        "scaled_fp8": ("F8_E4M3", [0], b""),
        "odd.weight": ("BF16", [2], words(0x7FC1, 0) if version < 1 else words(0x7FC2, 0x8000)),  # NaN bits, -0.0
        "packed": ("F4", [2, 3], bytes([1, 2, 3 if version < 3 else 4])),  # changes at 3
        "strange \u00e9 'name": ("I8", [3], bytes([1, 2, 3])),
    }
