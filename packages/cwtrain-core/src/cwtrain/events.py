"""Typed events: what happened, for plugins, logs and metrics. Frozen data without behaviour.

``to_json`` turns any of them into plain JSON data with its class name under ``kind``, so that a JSONL log is one line.
More fields with defaults, and more kinds, may come: keep a ``case _`` when you match on them.
"""

from __future__ import annotations

import datetime as dt
from enum import StrEnum
from typing import Any, TypeAlias

import attrs

from cwtrain.errors import CWTrainError
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.models.sync import SnapshotChoice

__all__ = [
    "AnyEvent",
    "Event",
    "HotLoadProgressed",
    "HotLoadRequested",
    "RolloutBatchCompleted",
    "RolloutEvent",
    "RolloutRetried",
    "RolloutUnavailable",
    "SnapshotInspected",
    "SnapshotUploaded",
    "SyncCompleted",
    "SyncFailed",
    "SyncSkipped",
    "SyncStarted",
    "WeightSyncEvent",
    "WeightVersionSeen",
    "WeightsWritten",
    "WriteMode",
    "to_json",
]


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class WriteMode(StrEnum):
    """What a trainer's post-write call points at."""

    FULL = "full"
    DELTA = "delta"
    ROOT = "root"


@attrs.frozen(kw_only=True)
class Event:
    """Something that happened ``at`` a time (UTC), in the run ``run_id`` where there is one."""

    at: dt.datetime = attrs.field(factory=_now)
    run_id: str | None = None


@attrs.frozen(kw_only=True)
class WeightsWritten(Event):
    """A trainer's files exist (post-write event). ``version`` is None for the baseline call."""

    framework: str
    path: str
    mode: WriteMode
    version: int | None = None
    rank: int = 0
    world_size: int = 1


@attrs.frozen(kw_only=True)
class SyncStarted(Event):
    """A snapshot is about to be published."""

    identity: str
    choice: SnapshotChoice
    version: int | None = None
    previous_identity: str | None = None


@attrs.frozen(kw_only=True)
class SnapshotInspected(Event):
    """A directory passed inspection."""

    identity: str
    kind: SnapshotKind
    files: int
    size_bytes: int


@attrs.frozen(kw_only=True)
class SnapshotUploaded(Event):
    """All objects of a snapshot are in the bucket; ``reused_bytes`` were there already."""

    identity: str
    objects: int
    uploaded_bytes: int
    reused_bytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class HotLoadRequested(Event):
    """The service accepted a hot-load."""

    hot_load_id: str
    identity: str
    previous_identity: str | None = None


@attrs.frozen(kw_only=True)
class HotLoadProgressed(Event):
    """A hot-load moved; ``elapsed`` is in seconds. ``waiting_on`` names another hot-load that is waited for."""

    hot_load_id: str
    state: str
    replicas_done: int
    replicas: int
    elapsed: float
    waiting_on: str | None = None


@attrs.frozen(kw_only=True)
class SyncCompleted(Event):
    """The identity is served by all replicas."""

    identity: str
    hot_load_id: str
    seconds: float
    version: int | None = None


@attrs.frozen(kw_only=True)
class SyncSkipped(Event):
    """Nothing was published for a version, and why."""

    reason: str
    version: int | None = None


@attrs.frozen(kw_only=True)
class SyncFailed(Event):
    """A publish ended with an error."""

    error: CWTrainError
    identity: str | None = None
    version: int | None = None


@attrs.frozen(kw_only=True)
class RolloutBatchCompleted(Event):
    """A batch of rollouts came back."""

    backend: str
    requests: int
    retries: int
    completion_tokens: int
    seconds: float
    weight_versions: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RolloutRetried(Event):
    """A burst of requests is being tried again."""

    backend: str
    reason: str
    attempt: int
    delay: float


@attrs.frozen(kw_only=True)
class RolloutUnavailable(Event):
    """The endpoint has not answered since a time."""

    backend: str
    since: dt.datetime
    reason: str


@attrs.frozen(kw_only=True)
class WeightVersionSeen(Event):
    """The first answer of a weight version."""

    backend: str
    identity: str
    first_request_at: dt.datetime


WeightSyncEvent: TypeAlias = (
    SyncStarted
    | SnapshotInspected
    | SnapshotUploaded
    | HotLoadRequested
    | HotLoadProgressed
    | SyncCompleted
    | SyncSkipped
    | SyncFailed
)
RolloutEvent: TypeAlias = RolloutBatchCompleted | RolloutRetried | RolloutUnavailable | WeightVersionSeen
AnyEvent: TypeAlias = WeightsWritten | WeightSyncEvent | RolloutEvent


def to_json(event: AnyEvent) -> dict[str, Any]:
    """Return ``event`` as plain JSON data with its class name under ``kind``."""
    data: dict[str, Any] = {"kind": type(event).__name__}
    for field in attrs.fields(type(event)):
        data[field.name] = _plain(getattr(event, field.name))
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, CWTrainError):
        return {"type": type(value).__name__, "message": str(value), "hint": value.hint}
    return value
