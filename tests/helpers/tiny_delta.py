"""Snapshots as maps of file names to bytes, full ones and deltas, written here from the format's description alone."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import zstandard

INDEX = "model.safetensors.index.json"

Tensor = tuple[str, list[int], bytes]
Files = dict[str, bytes]


def shard(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return one safetensors file."""
    header: dict[str, Any] = {}
    if metadata is not None:
        header["__metadata__"] = dict(metadata)
    data = b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def adler(raw: bytes) -> str:
    """Return the Adler-32 of some bytes as 8 hex digits."""
    return f"{zlib.adler32(raw):08x}"


def full_snapshot(
    tensors: Mapping[str, Tensor], *, config: Mapping[str, Any] | None = None, shards: int = 2, checksums: bool = False
) -> Files:
    """Return the files of a full snapshot."""
    names = sorted(tensors)
    files: Files = {}
    weight_map: dict[str, str] = {}
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        if not part:
            continue
        file_name = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        sums = {name: adler(raw) for name, (_, _, raw) in part.items()}
        files[file_name] = shard(part, sums if checksums else None)
        weight_map |= dict.fromkeys(part, file_name)
    metadata: dict[str, Any] = {"total_size": sum(len(raw) for _, _, raw in tensors.values())}
    if checksums:
        metadata["checksum_format"] = "adler32"
    files[INDEX] = json.dumps({"metadata": metadata, "weight_map": weight_map}).encode()
    files["config.json"] = json.dumps(config or {"model_type": "none"}).encode()
    return files


def delta_snapshot(
    old: Mapping[str, Tensor],
    new: Mapping[str, Tensor],
    *,
    version: str,
    base_version: str,
    sums: Mapping[str, str] | None = None,
    content_size: bool = True,
    metadata: Mapping[str, str] | None = None,
    names: Iterable[str] | None = None,
) -> Files:
    """Return the files of a delta: one shard with the tensors that changed (or those in `names`).

    `sums` replaces checksums, `metadata` parts of the index's metadata.
    """
    changed = sorted(names) if names is not None else sorted(name for name in new if old[name][2] != new[name][2])
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=content_size)
    tensors: dict[str, Tensor] = {}
    recorded: dict[str, str] = {}
    for name in changed:
        before, after = old[name][2], new[name][2]
        difference = bytes(left ^ right for left, right in zip(before, after, strict=True))
        frame = compressor.compress(difference)
        tensors[name] = ("U8", [len(frame)], frame)
        recorded[name] = adler(after)
    file_name = "model-00000-of-00001.safetensors"
    index = {
        "metadata": {
            "version": version,
            "base_version": base_version,
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
            **(metadata or {}),
        },
        "weight_map": dict.fromkeys(changed, file_name),
    }
    return {file_name: shard(tensors, {**recorded, **(sums or {})}), INDEX: json.dumps(index).encode()}


def read_tensors(files: Mapping[str, bytes]) -> dict[str, Tensor]:
    """Return every tensor of a full snapshot's files."""
    found: dict[str, Tensor] = {}
    for name, raw in files.items():
        if name.endswith(".safetensors"):
            length = struct.unpack("<Q", raw[:8])[0]
            header = json.loads(raw[8 : 8 + length])
            header.pop("__metadata__", None)
            for tensor, info in header.items():
                begin, end = info["data_offsets"]
                found[tensor] = (info["dtype"], info["shape"], raw[8 + length + begin : 8 + length + end])
    return found


def nudged(tensors: Mapping[str, Tensor], *, seed: int, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Return the tensors with a few bytes of each (or of those in `names`) flipped in their lowest bit."""
    chosen = set(tensors if names is None else names)
    result = dict(tensors)
    for number, name in enumerate(sorted(chosen)):
        dtype, shape, raw = tensors[name]
        changed = bytearray(raw)
        # The low byte of each 2- or 4-byte value: the values stay close to what they were.
        width = {"BF16": 2, "F32": 4}.get(dtype, 1)
        for position in range((seed + number) * width % max(len(raw), 1), len(raw), 7 * width):
            changed[position - position % width] ^= 1
        result[name] = (dtype, shape, bytes(changed))
    return result
