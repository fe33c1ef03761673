"""How the base checkpoint of a run gets into a deployment, for those who wait for it: one small object in the bucket.

``_manifests/<deployment id>.status`` is the one object that is overwritten. A publisher writes it while its baseline is
on its way; rollouts read it, so that they wait for a base that comes, and do not wait for one that failed.

    {"schema_version": 1, "run_id": "run", "identity": "run-v000000", "state": "publishing",
     "deployment_id": "...", "epoch": 1, "error": null, "hint": null, "host": "node-1", "pid": 4711,
     "updated": "2026-..."}
"""

from __future__ import annotations

import datetime as dt
import json
import os
import socket
from enum import StrEnum
from typing import Any

import attrs

from cwtrain.errors import SnapshotError, StorageNotFoundError
from cwtrain.hotload._publish.names import prefix_of
from cwtrain.snapshots._json import parse_json
from cwtrain.storage import Location, ObjectStore

__all__ = ["BaselineState", "BaselineStatus", "read_status", "write_status"]

SCHEMA_VERSION = 1


class BaselineState(StrEnum):
    """Where the base checkpoint is on its way."""

    PUBLISHING = "publishing"
    SERVED = "served"
    """The deployment serves it, or something of the same run that was published on it."""
    FAILED = "failed"


@attrs.frozen(kw_only=True)
class BaselineStatus:
    """What the status object says. ``error`` and ``hint`` are those of a failure.

    ``epoch`` is the run's epoch that the publisher began with this base; older publishers do not say it.
    """

    deployment_id: str
    run_id: str
    identity: str
    state: BaselineState
    epoch: int | None = None
    error: str | None = None
    hint: str | None = None
    host: str = attrs.field(factory=socket.gethostname)
    pid: int = attrs.field(factory=os.getpid)
    updated: str = attrs.field(factory=lambda: dt.datetime.now(dt.UTC).isoformat(timespec="seconds"))

    @property
    def prefix(self) -> str | None:
        """What identities of that epoch begin with; None where it is not said."""
        if self.epoch is None:
            return None
        return prefix_of(self.run_id, self.epoch)

    def to_json(self) -> dict[str, Any]:
        """Return the status as it stands in the bucket."""
        return {"schema_version": SCHEMA_VERSION, **attrs.asdict(self)}


def write_status(store: ObjectStore, location: Location, status: BaselineStatus) -> None:
    """Write the status over what is there. Raises StorageError naming a refused permission."""
    body = json.dumps(status.to_json(), indent=1, sort_keys=True).encode()
    store.put(location.status_key(status.deployment_id), body)


def read_status(store: ObjectStore, location: Location, deployment_id: str) -> BaselineStatus | None:
    """Return the status of a deployment's base, None where no publisher ever wrote one.

    Raises SnapshotError for an object that is none, or of a schema version that this cwtrain does not know.
    """
    key = location.status_key(deployment_id)
    try:
        raw = store.get(key)
    except StorageNotFoundError as error:
        if error.code == "NoSuchBucket":
            raise
        return None
    try:
        value = parse_json(raw)
        if value.get("schema_version") != SCHEMA_VERSION:
            raise ValueError(f"has schema_version {value.get('schema_version')!r}, this cwtrain reads {SCHEMA_VERSION}")
        names = [field.name for field in attrs.fields(BaselineStatus)]
        found = {name: value[name] for name in names if name != "epoch"}
        epoch = value.get("epoch")
        if epoch is not None and (type(epoch) is not int or epoch < 1):
            raise ValueError(f"has the epoch {epoch!r}")
        return BaselineStatus(**{**found, "epoch": epoch, "state": BaselineState(found["state"])})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise SnapshotError(
            f"s3://{location.bucket}/{key} cannot be read: {error}",
            hint="the next baseline of a run writes it anew; install the cwtrain that wrote it, or a newer one",
        ) from error
