"""Snapshots on disk: what a directory holds, whether it can be published, and how its bytes are encoded.

    from cwtrain.snapshots import inspect_snapshot

    snapshot = inspect_snapshot("/ckpt/step_000100")
    print(snapshot.kind, snapshot.total_bytes, snapshot.warnings)

Everything here works offline and without credentials. The names are loaded at first use; numpy and zstandard only when
frames are encoded or decoded (``verify="full"`` of a delta).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain.models.snapshot import INDEX_NAME, LocalSnapshot, SnapshotFile, SnapshotKind
    from cwtrain.snapshots._report import local_snapshot_to_json
    from cwtrain.snapshots.checkpoint import Checkpoint, open_checkpoint
    from cwtrain.snapshots.header import Header, TensorInfo, read_header
    from cwtrain.snapshots.identity import check_identity, check_previous_identity, identity_for_version
    from cwtrain.snapshots.index import files_for_upload, index_for_upload
    from cwtrain.snapshots.inspect import inspect_snapshot
    from cwtrain.snapshots.manifest import build_manifest, manifest_to_bytes, parse_manifest
    from cwtrain.snapshots.verify import decode_delta

__all__ = [
    "INDEX_NAME",
    "Checkpoint",
    "Header",
    "LocalSnapshot",
    "SnapshotFile",
    "SnapshotKind",
    "TensorInfo",
    "build_manifest",
    "check_identity",
    "check_previous_identity",
    "decode_delta",
    "files_for_upload",
    "identity_for_version",
    "index_for_upload",
    "inspect_snapshot",
    "local_snapshot_to_json",
    "manifest_to_bytes",
    "open_checkpoint",
    "parse_manifest",
    "read_header",
]

_HOMES = {
    "INDEX_NAME": "cwtrain.models.snapshot",
    "LocalSnapshot": "cwtrain.models.snapshot",
    "SnapshotFile": "cwtrain.models.snapshot",
    "SnapshotKind": "cwtrain.models.snapshot",
    "Checkpoint": "cwtrain.snapshots.checkpoint",
    "open_checkpoint": "cwtrain.snapshots.checkpoint",
    "Header": "cwtrain.snapshots.header",
    "TensorInfo": "cwtrain.snapshots.header",
    "read_header": "cwtrain.snapshots.header",
    "check_identity": "cwtrain.snapshots.identity",
    "check_previous_identity": "cwtrain.snapshots.identity",
    "identity_for_version": "cwtrain.snapshots.identity",
    "files_for_upload": "cwtrain.snapshots.index",
    "index_for_upload": "cwtrain.snapshots.index",
    "inspect_snapshot": "cwtrain.snapshots.inspect",
    "local_snapshot_to_json": "cwtrain.snapshots._report",
    "build_manifest": "cwtrain.snapshots.manifest",
    "manifest_to_bytes": "cwtrain.snapshots.manifest",
    "parse_manifest": "cwtrain.snapshots.manifest",
    "decode_delta": "cwtrain.snapshots.verify",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain.snapshots' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
