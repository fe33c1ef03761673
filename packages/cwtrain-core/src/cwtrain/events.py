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


_JSON_NAME = "cwtrain.json"
"""The name in JSON of a field that has another one there: ``kind`` is the event's class."""


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
    """A snapshot is about to be published. Exactly one SyncCompleted, SyncFailed or SyncSkipped of it follows.

    With ``wait=False`` it follows once this process sees how the hot-load ended; after a kill, the next one tells it.
    """

    identity: str
    choice: SnapshotChoice
    version: int | None = None
    previous_identity: str | None = None


@attrs.frozen(kw_only=True)
class SnapshotInspected(Event):
    """A directory passed inspection."""

    identity: str
    kind: SnapshotKind = attrs.field(metadata={_JSON_NAME: "snapshot_kind"})
    files: int
    size_bytes: int


@attrs.frozen(kw_only=True)
class SnapshotUploaded(Event):
    """All objects of a snapshot are in the bucket; ``reused_bytes`` were there already.

    ``seconds``: from the first look at the bucket to the last object; of tensors, from the first of them on.
    """

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
    """The identity is served by all replicas.

    ``seconds``: since it was asked for, with everything: reading, encoding, upload and hot-load. (Where a process that
    was killed began it: since its hot-load was.)
    """

    identity: str
    hot_load_id: str
    seconds: float
    version: int | None = None


@attrs.frozen(kw_only=True)
class SyncSkipped(Event):
    """Nothing was published for a version, and why. ``identity`` where that was known, and had started."""

    reason: str
    version: int | None = None
    identity: str | None = None


@attrs.frozen(kw_only=True)
class SyncFailed(Event):
    """A publish ended with an error: what was raised, or a CWTrainError that names it and has it as its cause."""

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
    """Return ``event`` as plain JSON data with its class name under ``kind``; a snapshot's is ``snapshot_kind``."""
    data: dict[str, Any] = {"kind": type(event).__name__}
    for field in attrs.fields(type(event)):
        data[field.metadata.get(_JSON_NAME, field.name)] = _plain(getattr(event, field.name))
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
