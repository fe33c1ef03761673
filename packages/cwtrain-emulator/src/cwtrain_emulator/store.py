"""What the service remembers: resources, hot-loads and their replicas, in SQLite under the state directory.

One connection, used from the event loop's thread alone. Each public method is one transaction, so that a process killed
at any instant leaves a consistent state. Times are seconds since the epoch.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

__all__ = ["ACTIVE", "Conflict", "HotLoadRow", "ReplicaRow", "Resource", "Store"]

ACTIVE = ("PENDING", "IN_PROGRESS")
"""States of a hot-load that has not ended."""

_SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS resources (
    kind TEXT NOT NULL, id TEXT NOT NULL, name TEXT NOT NULL, spec TEXT NOT NULL, status TEXT NOT NULL,
    conditions TEXT NOT NULL, extra TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, due_at REAL,
    PRIMARY KEY (kind, id), UNIQUE (kind, name)
);
CREATE TABLE IF NOT EXISTS hot_loads (
    seq INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, deployment_id TEXT NOT NULL,
    identity TEXT NOT NULL, state TEXT NOT NULL, spec TEXT NOT NULL, chain TEXT NOT NULL, conditions TEXT NOT NULL,
    created_at REAL NOT NULL, updated_at REAL NOT NULL, finished_at REAL
);
CREATE INDEX IF NOT EXISTS hot_loads_by_deployment ON hot_loads (deployment_id, seq);
CREATE UNIQUE INDEX IF NOT EXISTS one_active_hot_load
    ON hot_loads (deployment_id) WHERE state IN ('PENDING', 'IN_PROGRESS');
CREATE TABLE IF NOT EXISTS replicas (
    hot_load_id TEXT NOT NULL, name TEXT NOT NULL, zone TEXT NOT NULL, state TEXT NOT NULL, identity TEXT NOT NULL,
    error TEXT NOT NULL, transitioned_at REAL NOT NULL, started_at REAL, finished_at REAL, updated_at REAL NOT NULL,
    PRIMARY KEY (hot_load_id, zone, name)
);
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
"""


class Conflict(Exception):
    """A row of this id, or of this name, or another active hot-load is there already; nothing was written."""


@dataclass(frozen=True)
class Resource:
    """A gateway, deployment or capacity claim. `due_at`: when the state it is in may end, None when it stays."""

    kind: str
    id: str
    name: str
    spec: dict[str, Any]
    status: str
    created_at: float
    updated_at: float
    due_at: float | None = None
    conditions: list[dict[str, Any]] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HotLoadRow:
    """One hot-load. `chain` is ours: where each snapshot's objects are, and the digest of their listing."""

    id: str
    deployment_id: str
    identity: str
    state: str
    spec: dict[str, Any]
    chain: list[dict[str, Any]]
    created_at: float
    updated_at: float
    finished_at: float | None = None
    conditions: list[dict[str, Any]] = field(default_factory=list)
    seq: int = 0


@dataclass(frozen=True)
class ReplicaRow:
    """Where one replica is in one hot-load."""

    hot_load_id: str
    name: str
    zone: str
    state: str
    identity: str
    transitioned_at: float
    updated_at: float
    error: str = ""
    started_at: float | None = None
    finished_at: float | None = None


class Store:
    """The database. `path` may be ``:memory:`` in tests."""

    def __init__(self, path: Path | str) -> None:
        self._db = sqlite3.connect(path, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        # A killed process loses nothing with NORMAL; only a machine that loses power may lose the last transactions.
        self._db.execute("PRAGMA synchronous=NORMAL")
        self._db.executescript(_SCHEMA)
        version = self.get_meta("schema_version")
        if version is None:
            self.set_meta("schema_version", str(_SCHEMA_VERSION))
        elif version != str(_SCHEMA_VERSION):
            self._db.close()
            raise ValueError(f"{path}: state of schema version {version}; this emulator knows {_SCHEMA_VERSION}")

    def close(self) -> None:
        """Close the database."""
        self._db.close()

    def get_meta(self, key: str) -> str | None:
        """Return a remembered value, or None."""
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row["value"])

    def set_meta(self, key: str, value: str) -> None:
        """Remember a value."""
        self._db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, value))

    def clear(self) -> None:
        """Forget every resource and every hot-load; what is remembered by key stays."""
        with self._transaction():
            for table in ("resources", "hot_loads", "replicas"):
                self._db.execute(f"DELETE FROM {table}")  # noqa: S608 - a name from the line above

    # Gateways, deployments, capacity claims

    def add_resource(self, resource: Resource) -> None:
        """Add a resource; raise Conflict when its id or its name is taken."""
        with self._transaction():
            try:
                self._db.execute(
                    "INSERT INTO resources VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _resource_values(resource)
                )
            except sqlite3.IntegrityError as exc:
                raise Conflict(str(exc)) from None

    def update_resource(self, resource: Resource) -> None:
        """Write a resource that is there over its old row."""
        with self._transaction():
            self._db.execute(
                "INSERT OR REPLACE INTO resources VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", _resource_values(resource)
            )

    def remove_resource(self, kind: str, resource_id: str) -> None:
        """Forget a resource."""
        with self._transaction():
            self._db.execute("DELETE FROM resources WHERE kind = ? AND id = ?", (kind, resource_id))

    def resource(self, kind: str, resource_id: str) -> Resource | None:
        """Return one resource, or None."""
        row = self._db.execute("SELECT * FROM resources WHERE kind = ? AND id = ?", (kind, resource_id)).fetchone()
        return None if row is None else _resource(row)

    def resource_named(self, kind: str, name: str) -> Resource | None:
        """Return the resource of this name, or None."""
        row = self._db.execute("SELECT * FROM resources WHERE kind = ? AND name = ?", (kind, name)).fetchone()
        return None if row is None else _resource(row)

    def resources(self, kind: str, *, updated_after: float | None = None) -> list[Resource]:
        """Return all resources of a kind, oldest first."""
        rows = self._db.execute(
            "SELECT * FROM resources WHERE kind = ? AND updated_at > ? ORDER BY created_at, id",
            (kind, -1.0 if updated_after is None else updated_after),
        )
        return [_resource(row) for row in rows]

    # Hot-loads

    def add_hot_load(self, row: HotLoadRow, replicas: Iterable[ReplicaRow]) -> None:
        """Add a hot-load and its replicas; raise Conflict when the id is taken or another one is active."""
        with self._transaction():
            try:
                self._db.execute(
                    "INSERT INTO hot_loads (id, deployment_id, identity, state, spec, chain, conditions, created_at,"
                    " updated_at, finished_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                    _hot_load_values(row),
                )
            except sqlite3.IntegrityError as exc:
                raise Conflict(str(exc)) from None
            for replica in replicas:
                self._put_replica(replica)

    def update_hot_load(self, row: HotLoadRow) -> None:
        """Write a hot-load's state, conditions and times."""
        with self._transaction():
            self._update_hot_load(row)

    def hot_load(self, hot_load_id: str) -> HotLoadRow | None:
        """Return one hot-load, or None."""
        row = self._db.execute("SELECT * FROM hot_loads WHERE id = ?", (hot_load_id,)).fetchone()
        return None if row is None else _hot_load(row)

    def hot_loads(self, *, deployment_id: str | None, before: int | None, limit: int) -> list[HotLoadRow]:
        """Return up to `limit` hot-loads, newest first, of one deployment or of all, older than number `before`."""
        rows = self._db.execute(
            "SELECT * FROM hot_loads WHERE (?1 IS NULL OR deployment_id = ?1) AND (?2 IS NULL OR seq < ?2)"
            " ORDER BY seq DESC LIMIT ?3",
            (deployment_id, before, limit),
        )
        return [_hot_load(row) for row in rows]

    def hot_load_ids(self, *, limit: int) -> list[str]:
        """Return the ids of up to `limit` hot-loads, newest first; much cheaper than the hot-loads themselves."""
        rows = self._db.execute("SELECT id FROM hot_loads ORDER BY seq DESC LIMIT ?", (limit,))
        return [str(row["id"]) for row in rows]

    def active_hot_loads(self) -> list[HotLoadRow]:
        """Return every hot-load that has not ended."""
        return [_hot_load(row) for row in self._db.execute("SELECT * FROM hot_loads WHERE state IN (?, ?)", ACTIVE)]

    def active_hot_load(self, deployment_id: str) -> HotLoadRow | None:
        """Return the deployment's hot-load that has not ended, or None."""
        row = self._db.execute(
            "SELECT * FROM hot_loads WHERE deployment_id = ? AND state IN (?, ?)", (deployment_id, *ACTIVE)
        ).fetchone()
        return None if row is None else _hot_load(row)

    def latest_completed(self, deployment_id: str, *, identity: str | None = None) -> HotLoadRow | None:
        """Return the deployment's newest COMPLETED hot-load (of `identity`), or None."""
        row = self._db.execute(
            "SELECT * FROM hot_loads WHERE deployment_id = ?1 AND state = 'COMPLETED'"
            " AND (?2 IS NULL OR identity = ?2) ORDER BY seq DESC LIMIT 1",
            (deployment_id, identity),
        ).fetchone()
        return None if row is None else _hot_load(row)

    def latest_hot_load(self, deployment_id: str) -> HotLoadRow | None:
        """Return the deployment's newest hot-load, whatever its state, or None."""
        rows = self.hot_loads(deployment_id=deployment_id, before=None, limit=1)
        return rows[0] if rows else None

    # Replicas

    def replicas(self, hot_load_id: str, *, after: tuple[str, str] = ("", ""), limit: int = -1) -> list[ReplicaRow]:
        """Return the replicas of a hot-load by (zone, name), those after the pair `after`."""
        rows = self._db.execute(
            "SELECT * FROM replicas WHERE hot_load_id = ? AND (zone, name) > (?, ?) ORDER BY zone, name LIMIT ?",
            (hot_load_id, *after, limit),
        )
        return [ReplicaRow(**dict(row)) for row in rows]

    def put_replica(self, row: ReplicaRow, hot_load: HotLoadRow | None = None) -> None:
        """Write where a replica is, and with it, if given, its hot-load."""
        with self._transaction():
            self._put_replica(row)
            if hot_load is not None:
                self._update_hot_load(hot_load)

    def drop_replicas(self, hot_load_id: str, names: Iterable[str]) -> None:
        """Forget replicas that a hot-load no longer has."""
        with self._transaction():
            for name in names:
                self._db.execute("DELETE FROM replicas WHERE hot_load_id = ? AND name = ?", (hot_load_id, name))

    def _put_replica(self, row: ReplicaRow) -> None:
        self._db.execute(
            "INSERT OR REPLACE INTO replicas (hot_load_id, name, zone, state, identity, error, transitioned_at,"
            " started_at, finished_at, updated_at) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                row.hot_load_id,
                row.name,
                row.zone,
                row.state,
                row.identity,
                row.error,
                row.transitioned_at,
                row.started_at,
                row.finished_at,
                row.updated_at,
            ),
        )

    def _update_hot_load(self, row: HotLoadRow) -> None:
        self._db.execute(
            "UPDATE hot_loads SET state = ?, conditions = ?, updated_at = ?, finished_at = ? WHERE id = ?",
            (row.state, json.dumps(row.conditions), row.updated_at, row.finished_at, row.id),
        )

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")


def with_state(
    row: HotLoadRow, state: str, *, now: float, conditions: list[dict[str, Any]] | None = None
) -> HotLoadRow:
    """Return `row` in another state, with its end noted when that is one."""
    return replace(
        row,
        state=state,
        updated_at=now,
        finished_at=None if state in ACTIVE else now,
        conditions=row.conditions if conditions is None else conditions,
    )


def _resource_values(resource: Resource) -> tuple[object, ...]:
    return (
        resource.kind,
        resource.id,
        resource.name,
        json.dumps(resource.spec),
        resource.status,
        json.dumps(resource.conditions),
        json.dumps(resource.extra),
        resource.created_at,
        resource.updated_at,
        resource.due_at,
    )


def _resource(row: sqlite3.Row) -> Resource:
    values = dict(row)
    for name in ("spec", "conditions", "extra"):
        values[name] = json.loads(values[name])
    return Resource(**values)


def _hot_load_values(row: HotLoadRow) -> tuple[object, ...]:
    return (
        row.id,
        row.deployment_id,
        row.identity,
        row.state,
        json.dumps(row.spec),
        json.dumps(row.chain),
        json.dumps(row.conditions),
        row.created_at,
        row.updated_at,
        row.finished_at,
    )


def _hot_load(row: sqlite3.Row) -> HotLoadRow:
    values = dict(row)
    for name in ("spec", "chain", "conditions"):
        values[name] = json.loads(values[name])
    return HotLoadRow(**values)
