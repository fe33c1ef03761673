"""Tensors of a checkpoint on disk: checked against index and checksums, changed by deltas, hashed."""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections import defaultdict
from pathlib import Path

import numpy as np
import zstandard

from cwtrain_emulator.engine.safetensors import INDEX_NAME, Header, TensorInfo, read_header
from cwtrain_emulator.snapshots import Index, parse_index

__all__ = ["SnapshotError", "apply_delta", "check_full", "damage_full", "hash_tensors"]

_CHUNK_BYTES = 1 << 20


class SnapshotError(Exception):
    """A chain cannot be materialised; the message is the replica's errorReason."""


def check_full(directory: Path, index: Index) -> dict[str, str]:
    """Check a full snapshot's files against its index, and each tensor against its Adler-32 where one is recorded.

    Returns the SHA-256 of every tensor's bytes. Raises FormatError or SnapshotError.
    """
    headers = _checked_headers(directory, index)
    recorded = index.metadata.get("checksum_format") == "adler32"
    hashes: dict[str, str] = {}
    for name, header in headers.items():
        with open(directory / name, "rb") as file:
            for tensor, info in header.tensors.items():
                sha256, adler32 = _hash_range(file.fileno(), header.data_start + info.begin, info.size_bytes)
                if recorded and header.metadata.get(tensor) != adler32:
                    raise SnapshotError(
                        f"{name}: tensor {tensor!r} has Adler-32 {adler32}, recorded is {header.metadata.get(tensor)!r}"
                    )
                hashes[tensor] = sha256
    return hashes


def apply_delta(checkpoint: Path, delta: Path, index: Index, *, damage: bool = False) -> dict[str, str]:
    """Apply a delta's files to the checkpoint, shard by shard, and return the SHA-256 of every changed tensor.

    A shard that changes is written beside the old one and renamed over it: other links to the old one keep the old
    bytes. Raises SnapshotError or FormatError; the checkpoint is then of no more use.
    """
    base = parse_index((checkpoint / INDEX_NAME).read_bytes())
    delta_headers = _checked_headers(delta, index)
    changed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for tensor, delta_file in index.weight_map.items():
        if tensor not in base.weight_map:
            raise SnapshotError(f"the delta changes {tensor!r}, which the chain's full snapshot does not have")
        changed[base.weight_map[tensor]].append((tensor, delta_file))
    hashes: dict[str, str] = {}
    for shard, tensors in changed.items():
        header = read_header(checkpoint / shard)
        renewed = checkpoint / f"{shard}.new"
        shutil.copyfile(checkpoint / shard, renewed)
        with open(renewed, "r+b") as file:
            for tensor, delta_file in tensors:
                delta_header = delta_headers[delta_file]
                frame = _frame(delta / delta_file, delta_header, tensor)
                expected = delta_header.metadata.get(tensor)
                info = header.tensors[tensor]
                hashes[tensor] = _patch(file.fileno(), header.data_start, info, frame, tensor, expected, damage=damage)
        os.replace(renewed, checkpoint / shard)
    return hashes


def hash_tensors(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of the bytes of every tensor of a checkpoint, read from disk now."""
    index = parse_index((checkpoint / INDEX_NAME).read_bytes())
    hashes: dict[str, str] = {}
    for name in index.files:
        header = read_header(checkpoint / name)
        with open(checkpoint / name, "rb") as file:
            for tensor, info in header.tensors.items():
                hashes[tensor] = _hash_range(file.fileno(), header.data_start + info.begin, info.size_bytes)[0]
    return hashes


def _patch(
    descriptor: int,
    data_start: int,
    info: TensorInfo,
    frame: bytes,
    tensor: str,
    expected: str | None,
    *,
    damage: bool,
) -> str:
    """Replace a tensor's bytes by the XOR with the frame's content; return the new bytes' SHA-256."""
    difference = _decompress(frame, info.size_bytes, tensor)
    if damage and difference:
        difference = bytes([difference[0] ^ 1]) + difference[1:]
    offset = data_start + info.begin
    old = os.pread(descriptor, info.size_bytes, offset)
    if len(old) != info.size_bytes:
        raise SnapshotError(f"tensor {tensor!r}: the shard on disk is cut")
    new = np.bitwise_xor(np.frombuffer(old, np.uint8), np.frombuffer(difference, np.uint8)).tobytes()
    adler32 = f"{zlib.adler32(new):08x}"
    if expected != adler32:
        raise SnapshotError(f"tensor {tensor!r} has Adler-32 {adler32} after the delta, expected {expected!r}")
    written = 0
    while written < len(new):
        written += os.pwrite(descriptor, memoryview(new)[written:], offset + written)
    return hashlib.sha256(new).hexdigest()


def _decompress(frame: bytes, size: int, tensor: str) -> bytes:
    """Return the content of one zstd frame, which must be exactly `size` bytes; never makes more than that."""
    try:
        declared = zstandard.get_frame_parameters(frame).content_size
        if declared not in (zstandard.CONTENTSIZE_UNKNOWN, size):
            raise SnapshotError(f"tensor {tensor!r}: the frame claims {declared} bytes, the tensor has {size}")
        content = zstandard.ZstdDecompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as exc:
        raise SnapshotError(f"tensor {tensor!r}: not one zstd frame of {size} bytes ({exc})") from None
    if len(content) != size:
        raise SnapshotError(f"tensor {tensor!r}: the frame has {len(content)} bytes, the tensor has {size}")
    return content


def _frame(path: Path, header: Header, tensor: str) -> bytes:
    info = header.tensors[tensor]
    if info.dtype != "U8" or info.shape != (info.size_bytes,):
        raise SnapshotError(f"{path.name}: {tensor!r} is {info.dtype} {list(info.shape)}, expected a U8 vector")
    with open(path, "rb") as file:
        file.seek(header.data_start + info.begin)
        return file.read(info.size_bytes)


def _checked_headers(directory: Path, index: Index) -> dict[str, Header]:
    """Return the header of each file that the index names; each must have exactly the tensors that the index says."""
    expected: dict[str, set[str]] = defaultdict(set)
    for tensor, name in index.weight_map.items():
        expected[name].add(tensor)
    headers: dict[str, Header] = {}
    for name, tensors in sorted(expected.items()):
        header = read_header(directory / name)
        differing = sorted(tensors ^ header.tensors.keys())
        if differing:
            raise SnapshotError(f"{name}: the index and the file do not agree about {', '.join(differing[:5])}")
        headers[name] = header
    return headers


def damage_full(directory: Path, index: Index) -> None:
    """Flip a bit of a tensor; where no checksum would tell, cut the file instead."""
    path = directory / index.files[0]
    if index.metadata.get("checksum_format") != "adler32":
        os.truncate(path, path.stat().st_size - 1)
        return
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))


def _hash_range(descriptor: int, offset: int, size: int) -> tuple[str, str]:
    sha256, adler32 = hashlib.sha256(), 1
    end = offset + size
    while offset < end:
        chunk = os.pread(descriptor, min(_CHUNK_BYTES, end - offset), offset)
        if not chunk:
            raise SnapshotError("a shard on disk is cut")
        sha256.update(chunk)
        adler32 = zlib.adler32(chunk, adler32)
        offset += len(chunk)
    return sha256.hexdigest(), f"{adler32:08x}"
