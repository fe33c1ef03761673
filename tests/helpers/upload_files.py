"""Small files on disk, described for an upload as an inspection would describe them."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Mapping
from pathlib import Path

from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile

INDEX = b'{"metadata": {}, "weight_map": {}}'


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def describe(path: Path, name: str | None = None) -> SnapshotFile:
    about = os.stat(path)
    return SnapshotFile(
        name=name or path.name,
        size_bytes=about.st_size,
        path=str(path),
        ranges=((0, about.st_size),),
        file_bytes=about.st_size,
        mtime_ns=about.st_mtime_ns,
        inode=about.st_ino,
        device=about.st_dev,
    )


def contents(shards: int = 2, shard_bytes: int = 5000, seed: int = 0) -> dict[str, bytes]:
    """A snapshot's objects by name, the index last."""
    objects = {"config.json": b"{}"}
    for number in range(shards):
        objects[f"model-{number + 1:05d}-of-{shards:05d}.safetensors"] = noise(seed + number, shard_bytes)
    return objects | {INDEX_NAME: INDEX}


def write(directory: Path, objects: Mapping[str, bytes]) -> list[SnapshotFile]:
    """Write the objects as files, and describe them in the same order."""
    directory.mkdir(parents=True, exist_ok=True)
    files = []
    for name, data in objects.items():
        (directory / name).write_bytes(data)
        files.append(describe(directory / name))
    return files
