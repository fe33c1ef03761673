"""Snapshots under ``<prefix>/<identity>/``: the index, what a delta's index must say, and the chain's entries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cwtrain_emulator.engine.safetensors import INDEX_NAME, FormatError

__all__ = [
    "INITIAL",
    "MAX_DELTAS",
    "MAX_REPLAYED_DELTAS",
    "ChainEntry",
    "Index",
    "delta_problems",
    "listing_digest",
    "parse_index",
    "snapshot_prefix",
]

INITIAL = "initial"
"""The identity of a deployment's base weights."""

MAX_DELTAS = 128
"""Deltas that a chain may have after its full snapshot."""

MAX_REPLAYED_DELTAS = 63
"""Deltas that a replica replays from the bucket at most."""

_DELTA_METADATA = {"delta_encoding": "xor", "compression_format": "zstd", "checksum_format": "adler32"}


@dataclass(frozen=True)
class ChainEntry:
    """One snapshot of a chain: what it is, and where its objects are.

    `prefix` ends with a slash (or is empty). `digest` names the listing of the objects at the time of the request;
    empty means unknown, and the replica looks for itself.
    """

    identity: str
    type: str
    bucket: str
    prefix: str
    hot_load_id: str = ""
    digest: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the entry as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ChainEntry:
        """Return the entry that `to_json` described."""
        return cls(**values)


@dataclass(frozen=True)
class Index:
    """``model.safetensors.index.json``: which file has which tensor, and what the metadata says."""

    weight_map: dict[str, str]
    metadata: dict[str, Any]

    @property
    def files(self) -> list[str]:
        """The files that the index names, in order."""
        return sorted(set(self.weight_map.values()))

    @property
    def is_delta(self) -> bool:
        """True when the metadata speaks of an encoding, as a delta's does."""
        return "delta_encoding" in self.metadata


def parse_index(raw: bytes) -> Index:
    """Return the index in `raw`; raise FormatError when it is none."""
    try:
        values = json.loads(raw)
    except (ValueError, RecursionError):
        raise FormatError(f"{INDEX_NAME} is not JSON") from None
    weight_map = values.get("weight_map") if isinstance(values, dict) else None
    if not isinstance(weight_map, dict):
        raise FormatError(f"{INDEX_NAME} has no weight_map")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or "/" in name or "\\" in name or not name.endswith(".safetensors"):
            raise FormatError(f"{INDEX_NAME}: {tensor!r} is not in a .safetensors file of the snapshot: {name!r}")
    metadata = values.get("metadata", {})
    if not isinstance(metadata, dict):
        raise FormatError(f"{INDEX_NAME}: metadata is not an object")
    return Index(weight_map=weight_map, metadata=metadata)


def delta_problems(index: Index, *, identity: str, previous: str) -> list[str]:
    """Return what is wrong with a delta's index metadata, given the identities that it must name."""
    expected = {**_DELTA_METADATA, "version": identity, "base_version": previous}
    problems = [
        f"{INDEX_NAME}: metadata {name} is {index.metadata.get(name)!r}, expected {value!r}"
        for name, value in expected.items()
        if index.metadata.get(name) != value
    ]
    if not index.weight_map:
        problems.append(f"{INDEX_NAME}: names no tensor; an empty delta cannot be hot-loaded")
    return problems


def snapshot_prefix(path_prefix: str, identity: str) -> str:
    """Return the key prefix of a snapshot's objects, with the slash at its end."""
    head = path_prefix.strip("/")
    return f"{head}/{identity}/" if head else f"{identity}/"


def listing_digest(objects: Iterable[tuple[str, int, str]]) -> str:
    """Return a digest of (name, size, ETag) of each object: another listing, another digest."""
    digest = hashlib.sha256()
    for name, size, etag in sorted(objects):
        digest.update(f"{name}\0{size}\0{etag}\0".encode())
    return digest.hexdigest()
