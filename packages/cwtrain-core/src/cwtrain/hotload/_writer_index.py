"""The index of a streamed snapshot: the same from its writer's memory and from what lies in the bucket."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cwtrain.snapshots.index import dump_index

__all__ = ["streamed_index"]


def streamed_index(identity: str, previous: str | None, weight_map: Mapping[str, str], raw_bytes: int) -> bytes:
    """Return the index of a delta on ``previous``, or without it of a full snapshot of ``raw_bytes``."""
    metadata: dict[str, Any] = {"total_size": raw_bytes, "checksum_format": "adler32"}
    if previous is not None:
        metadata = {
            "version": identity,
            "base_version": previous,
            "delta_encoding": "xor",
            "compression_format": "zstd",
            "checksum_format": "adler32",
        }
    return dump_index({"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))})
