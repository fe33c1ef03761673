"""Bring snapshots into a running deployment: publish, trigger, wait, roll back.

    from cwtrain.hotload import HotLoader
    from cwtrain.infra import InferenceClient

    loader = HotLoader(InferenceClient(), deployment_id="<uuid>")
    loader.publish("/ckpt/step_000100", identity="step_000100")

Names are loaded at first use: `inspect_snapshot` and the writers in `cwtrain.hotload.delta` need neither httpx nor
boto3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain.errors import (
        HotLoadFailedError,
        HotLoadTimeoutError,
        SnapshotConflictError,
        SnapshotError,
    )
    from cwtrain.hotload.bases import BaseTensors, CheckpointBase, MemoryBase, MirrorBase, TensorType
    from cwtrain.hotload.loader import HotLoader, ServedReport
    from cwtrain.hotload.mirror import DeltaReport, WeightMirror
    from cwtrain.hotload.progress import ProgressEvent
    from cwtrain.hotload.publisher import Publisher, PublishOutcome, PublishState
    from cwtrain.hotload.streamed import IdentityStanding, complete_streamed, free_identity, identity_standing
    from cwtrain.hotload.upload import upload_snapshot
    from cwtrain.hotload.writer import ShardReceipt, SnapshotWriter, WrittenSnapshot, new_upload_id
    from cwtrain.models.service import (
        HotLoad,
        HotLoadReplica,
        HotLoadSpec,
        HotLoadState,
        HotLoadStatus,
        HotLoadTarget,
        IncrementalSnapshotMetadata,
        PromptCachePolicy,
        ReplicaState,
        SnapshotChainEntry,
        SnapshotType,
    )
    from cwtrain.models.snapshot import LocalSnapshot, PublishPlan, SnapshotKind
    from cwtrain.snapshots import inspect_snapshot

__all__ = [
    "BaseTensors",
    "CheckpointBase",
    "DeltaReport",
    "HotLoad",
    "HotLoadFailedError",
    "HotLoadReplica",
    "HotLoadSpec",
    "HotLoadState",
    "HotLoadStatus",
    "HotLoadTarget",
    "HotLoadTimeoutError",
    "HotLoader",
    "IdentityStanding",
    "IncrementalSnapshotMetadata",
    "LocalSnapshot",
    "MemoryBase",
    "MirrorBase",
    "ProgressEvent",
    "PromptCachePolicy",
    "PublishOutcome",
    "PublishPlan",
    "PublishState",
    "Publisher",
    "ReplicaState",
    "ServedReport",
    "ShardReceipt",
    "SnapshotChainEntry",
    "SnapshotConflictError",
    "SnapshotError",
    "SnapshotKind",
    "SnapshotType",
    "SnapshotWriter",
    "TensorType",
    "WeightMirror",
    "WrittenSnapshot",
    "complete_streamed",
    "free_identity",
    "identity_standing",
    "inspect_snapshot",
    "new_upload_id",
    "upload_snapshot",
]

_ERRORS = ("HotLoadFailedError", "HotLoadTimeoutError", "SnapshotConflictError", "SnapshotError")
_BASES = ("BaseTensors", "CheckpointBase", "MemoryBase", "MirrorBase", "TensorType")
_STREAMED = ("IdentityStanding", "complete_streamed", "free_identity", "identity_standing")
_WRITER = ("ShardReceipt", "SnapshotWriter", "WrittenSnapshot", "new_upload_id")
_HOMES = {
    "HotLoader": "cwtrain.hotload.loader",
    "ServedReport": "cwtrain.hotload.loader",
    "DeltaReport": "cwtrain.hotload.mirror",
    "WeightMirror": "cwtrain.hotload.mirror",
    "ProgressEvent": "cwtrain.hotload.progress",
    **dict.fromkeys(("PublishOutcome", "PublishState", "Publisher"), "cwtrain.hotload.publisher"),
    "upload_snapshot": "cwtrain.hotload.upload",
    "inspect_snapshot": "cwtrain.snapshots",
    "LocalSnapshot": "cwtrain.models.snapshot",
    "PublishPlan": "cwtrain.models.snapshot",
    "SnapshotKind": "cwtrain.models.snapshot",
    **dict.fromkeys(_BASES, "cwtrain.hotload.bases"),
    **dict.fromkeys(_STREAMED, "cwtrain.hotload.streamed"),
    **dict.fromkeys(_WRITER, "cwtrain.hotload.writer"),
    **dict.fromkeys(_ERRORS, "cwtrain.errors"),
}


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name in __all__:
        return getattr(import_module(_HOMES.get(name, "cwtrain.models.service")), name)
    raise AttributeError(f"module 'cwtrain.hotload' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
