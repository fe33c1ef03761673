"""What inspection found, as the command prints it."""

from __future__ import annotations

from typing import Any

from cwtrain.models.snapshot import LocalSnapshot, SnapshotKind

__all__ = ["local_snapshot_to_json"]


def local_snapshot_to_json(snapshot: LocalSnapshot) -> dict[str, Any]:
    """Return ``snapshot`` as the JSON data that ``cwtrain hotload inspect`` prints."""
    delta = snapshot.kind is SnapshotKind.DELTA
    incremental = {
        "previous_snapshot_identity": snapshot.previous_identity,
        "compression_format": "ZSTD",
        "checksum_format": "ADLER32",
    }
    return {
        "path": snapshot.path,
        "type": "INCREMENTAL" if delta else "FULL",
        "files": [file.name for file in snapshot.files],
        "file_bytes": {file.name: file.size_bytes for file in snapshot.files},
        "total_bytes": snapshot.total_bytes,
        "empty_delta": snapshot.empty_delta,
        "incremental": incremental if delta else None,
        "index_metadata": dict(snapshot.index_metadata),
        "index_generated": snapshot.index_generated,
        "tensors": snapshot.tensors,
        "tensor_bytes": snapshot.tensor_bytes,
        "version": snapshot.version,
        "base_version": snapshot.base_version,
        "previous_identity": snapshot.previous_identity,
        "checksums": len(snapshot.checksums),
        "duplicates": list(snapshot.duplicates),
        "left_out": list(snapshot.left_out),
        "warnings": list(snapshot.warnings),
        "verified": snapshot.verified,
    }
