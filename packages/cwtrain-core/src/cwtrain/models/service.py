"""Resources of the Dedicated Inference API as typed, frozen objects.

Every object keeps the wire object it came from in ``raw``, so nothing that the service says is lost. Enums print as
bare names (``COMPLETED``). A value that this version does not know becomes ``UNSPECIFIED`` and is never terminal; what
the service really said is in ``raw`` (and in ``state_text`` / ``status_text``).
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

__all__ = [
    "CapacityClaim",
    "ChecksumFormat",
    "CompressionFormat",
    "Condition",
    "ConditionStatus",
    "Deployment",
    "Gateway",
    "HotLoad",
    "HotLoadReplica",
    "HotLoadSpec",
    "HotLoadState",
    "HotLoadStatus",
    "HotLoadTarget",
    "IncrementalSnapshotMetadata",
    "PromptCachePolicy",
    "ReplicaState",
    "ResourceStatus",
    "SnapshotChainEntry",
    "SnapshotType",
    "TransitionMode",
]


class SnapshotType(StrEnum):
    """What a hot-load installs."""

    UNSPECIFIED = "UNSPECIFIED"
    FULL = "FULL"
    INCREMENTAL = "INCREMENTAL"


class CompressionFormat(StrEnum):
    """How a delta's tensors are compressed."""

    UNSPECIFIED = "UNSPECIFIED"
    ZSTD = "ZSTD"


class ChecksumFormat(StrEnum):
    """How a delta's new bytes are checked."""

    UNSPECIFIED = "UNSPECIFIED"
    ADLER32 = "ADLER32"


class PromptCachePolicy(StrEnum):
    """What happens to the prompt cache at the swap; UNSPECIFIED leaves it to the server (PRESERVE)."""

    UNSPECIFIED = "UNSPECIFIED"
    RESET_ALL = "RESET_ALL"
    PRESERVE = "PRESERVE"


class HotLoadState(StrEnum):
    """Where a hot-load is."""

    UNSPECIFIED = "UNSPECIFIED"
    PENDING = "PENDING"
    IN_PROGRESS = "IN_PROGRESS"
    COMPLETED = "COMPLETED"
    FAILED = "FAILED"
    CANCELED = "CANCELED"

    @property
    def terminal(self) -> bool:
        """True when the hot-load has ended, well or not. UNSPECIFIED has not."""
        return self in (HotLoadState.COMPLETED, HotLoadState.FAILED, HotLoadState.CANCELED)


class ReplicaState(StrEnum):
    """Where one replica is in a hot-load."""

    UNSPECIFIED = "UNSPECIFIED"
    PENDING_UPDATE = "PENDING_UPDATE"
    UPDATING = "UPDATING"
    READY = "READY"
    ERROR = "ERROR"


class TransitionMode(StrEnum):
    """How replicas change weights."""

    UNSPECIFIED = "UNSPECIFIED"
    ASYNC = "ASYNC"


class ResourceStatus(StrEnum):
    """Where a gateway, deployment or claim is. ERROR may recover, FAILED never does."""

    UNSPECIFIED = "UNSPECIFIED"
    CREATING = "CREATING"
    UPDATING = "UPDATING"
    DELETING = "DELETING"
    ERROR = "ERROR"
    FAILED = "FAILED"
    READY = "READY"


class ConditionStatus(StrEnum):
    """Whether a condition holds."""

    UNSPECIFIED = "UNSPECIFIED"
    TRUE = "TRUE"
    FALSE = "FALSE"
    UNKNOWN = "UNKNOWN"


@attrs.frozen(kw_only=True)
class Condition:
    """One statement of the service about a resource."""

    type: str = ""
    status: ConditionStatus = ConditionStatus.UNSPECIFIED
    reason: str = ""
    message: str = ""
    zone: str = ""
    last_update_time: dt.datetime | None = None


@attrs.frozen(kw_only=True)
class Gateway:
    """An endpoint that authenticates and routes requests to deployments."""

    id: str
    name: str = ""
    status: ResourceStatus = ResourceStatus.UNSPECIFIED
    status_text: str = ""
    zones: tuple[str, ...] = ()
    endpoints: tuple[str, ...] = ()
    conditions: tuple[Condition, ...] = ()
    organization_id: str = ""
    created_at: dt.datetime | None = None
    updated_at: dt.datetime | None = None
    raw: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)


@attrs.frozen(kw_only=True)
class HotLoadTarget:
    """Where a deployment takes hot-loaded snapshots from: ``s3://<bucket>/<path_prefix>/<identity>/``."""

    bucket: str
    path_prefix: str = ""
    transition_mode: TransitionMode = TransitionMode.UNSPECIFIED


@attrs.frozen(kw_only=True)
class Deployment:
    """A served model: engine, resources and, where hot-load is on, the place of its snapshots."""

    id: str
    name: str = ""
    status: ResourceStatus = ResourceStatus.UNSPECIFIED
    status_text: str = ""
    model_name: str = ""
    engine: str = ""
    hot_load: HotLoadTarget | None = None
    gateway_ids: tuple[str, ...] = ()
    disabled: bool = False
    model_bucket: str = ""
    model_path: str = ""
    conditions: tuple[Condition, ...] = ()
    organization_id: str = ""
    created_at: dt.datetime | None = None
    updated_at: dt.datetime | None = None
    raw: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)


@attrs.frozen(kw_only=True)
class CapacityClaim:
    """Reserved instances."""

    id: str
    name: str = ""
    status: ResourceStatus = ResourceStatus.UNSPECIFIED
    status_text: str = ""
    instance_id: str = ""
    instance_count: int = 0
    capacity_type: str = ""
    zones: tuple[str, ...] = ()
    allocated_instances: int = 0
    pending_instances: int = 0
    conditions: tuple[Condition, ...] = ()
    organization_id: str = ""
    created_at: dt.datetime | None = None
    updated_at: dt.datetime | None = None
    raw: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)


@attrs.frozen(kw_only=True)
class IncrementalSnapshotMetadata:
    """What an INCREMENTAL hot-load says of its snapshot."""

    previous_snapshot_identity: str
    compression_format: CompressionFormat = CompressionFormat.ZSTD
    checksum_format: ChecksumFormat = ChecksumFormat.ADLER32


@attrs.frozen(kw_only=True)
class SnapshotChainEntry:
    """One snapshot of a resolved chain."""

    identity: str
    type: SnapshotType = SnapshotType.UNSPECIFIED
    hot_load_id: str = ""
    compression_format: CompressionFormat = CompressionFormat.UNSPECIFIED
    checksum_format: ChecksumFormat = ChecksumFormat.UNSPECIFIED


@attrs.frozen(kw_only=True)
class HotLoadSpec:
    """What a hot-load was asked to do. ``snapshot_chain`` is oldest first; entry 0 is the full snapshot."""

    id: str
    deployment_id: str = ""
    organization_id: str = ""
    identity: str = ""
    type: SnapshotType = SnapshotType.UNSPECIFIED
    incremental_snapshot_metadata: IncrementalSnapshotMetadata | None = None
    prompt_cache_policy: PromptCachePolicy = PromptCachePolicy.UNSPECIFIED
    snapshot_chain: tuple[SnapshotChainEntry, ...] = ()


@attrs.frozen(kw_only=True)
class HotLoadStatus:
    """Where a hot-load is, as the service last said."""

    state: HotLoadState = HotLoadState.UNSPECIFIED
    state_text: str = ""
    created_at: dt.datetime | None = None
    updated_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    canceled_at: dt.datetime | None = None
    conditions: tuple[Condition, ...] = ()


@attrs.frozen(kw_only=True)
class HotLoad:
    """One operation of the service that brings a snapshot into a running deployment.

    ``timings`` is filled by ``HotLoader``: seconds of its phases, byte counts and ratio (see ``PublishTimings``).
    """

    spec: HotLoadSpec
    status: HotLoadStatus = attrs.field(factory=HotLoadStatus)
    timings: Mapping[str, float] = attrs.field(factory=dict, eq=False)
    raw: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)

    @property
    def id(self) -> str:
        """The hot-load's id."""
        return self.spec.id

    @property
    def identity(self) -> str:
        """The identity of the snapshot that it installs."""
        return self.spec.identity

    @property
    def state(self) -> HotLoadState:
        """Where it is."""
        return self.status.state

    @property
    def previous_identity(self) -> str | None:
        """The identity that a delta applies to; None for a full snapshot."""
        metadata = self.spec.incremental_snapshot_metadata
        return metadata.previous_snapshot_identity if metadata else None


@attrs.frozen(kw_only=True)
class HotLoadReplica:
    """One replica in a hot-load. It has caught up when READY with ``current_snapshot_identity`` = the target."""

    name: str
    zone: str = ""
    state: ReplicaState = ReplicaState.UNSPECIFIED
    state_text: str = ""
    current_snapshot_identity: str = ""
    error_reason: str = ""
    transitioned_at: dt.datetime | None = None
    started_at: dt.datetime | None = None
    finished_at: dt.datetime | None = None
    updated_at: dt.datetime | None = None
    raw: Mapping[str, Any] = attrs.field(factory=dict, repr=False, eq=False)

    def caught_up(self, identity: str) -> bool:
        """Return whether this replica serves ``identity``."""
        return self.state is ReplicaState.READY and self.current_snapshot_identity == identity
