"""Hot-loads: the rules of a request, the resolved chain, lists and their pages."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cwtrain_emulator.api.controller import replica_names
from cwtrain_emulator.api.errors import (
    ApiError,
    Violation,
    already_exists,
    failed_precondition,
    invalid,
    not_found,
    unimplemented,
)
from cwtrain_emulator.api.objects import check_snapshot_objects
from cwtrain_emulator.api.paging import page_size, page_token, read_page_token
from cwtrain_emulator.api.resources import UUID, read_id, shown_conditions
from cwtrain_emulator.api.service import Service, gateway_zones
from cwtrain_emulator.api.wire import Reader, enum_json, pruned, timestamp
from cwtrain_emulator.snapshots import INITIAL, MAX_DELTAS, ChainEntry, snapshot_prefix
from cwtrain_emulator.store import Conflict, HotLoadRow, ReplicaRow, Resource

__all__ = ["cancel_hot_load", "create_hot_load", "get_hot_load", "list_hot_loads", "list_replicas"]

_MAX_IDENTITY = 128


@dataclass(frozen=True)
class _Request:
    """A create request that is well formed."""

    id: str
    deployment_id: str
    identity: str
    type: str
    policy: str
    previous: str


async def create_hot_load(service: Service, body: Mapping[str, Any]) -> dict[str, Any]:
    """Accept a hot-load, or refuse it; the replicas load it afterwards."""
    problems: list[Violation] = []
    reader = Reader(body, problems)
    hot_load_id = read_id(reader, "hotLoadId")
    # First of all, so that whoever repeats a create whose answer was lost learns that it worked.
    if not problems and service.store.hot_load(hot_load_id) is not None:
        raise already_exists("hotLoad", hot_load_id)
    request = _parse(reader, hot_load_id)
    if problems:
        raise invalid(*problems)
    _deployment(service, request)
    async with service.create_locks[request.deployment_id]:
        if service.store.hot_load(hot_load_id) is not None:
            raise already_exists("hotLoad", hot_load_id)
        deployment = _deployment(service, request)
        chain = _resolved_chain(service, request, deployment)
        entry = chain[-1]
        digest = await asyncio.to_thread(
            check_snapshot_objects,
            service.bucket_reader,
            bucket=entry.bucket,
            prefix=entry.prefix,
            identity=request.identity,
            kind=request.type,
            previous=request.previous,
        )
        chain[-1] = ChainEntry(**{**entry.to_json(), "digest": digest})
        row = _add(service, request, deployment, chain)
    service.controller.begin_hot_load(row)
    return {"hotLoad": shown_hot_load(service, row)}


def get_hot_load(service: Service, hot_load_id: str) -> dict[str, Any]:
    """Return one hot-load."""
    return {"hotLoad": shown_hot_load(service, _find(service, hot_load_id))}


def list_hot_loads(service: Service, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of hot-loads, newest first, of one deployment or of all."""
    size = page_size(query.get("maxPageSize") or query.get("max_page_size"))
    parent = (query.get("parentDeploymentId") or query.get("parent_deployment_id") or "").lower()
    if parent and not UUID.fullmatch(parent):
        raise invalid(("parentDeploymentId", "must be a UUID"))
    token = query.get("pageToken") or query.get("page_token")
    scope = f"hotLoads/{service.keys.organization_id}/{parent}"
    before = int(read_page_token(service.keys.page_key, scope, token)) if token else None
    rows = service.store.hot_loads(deployment_id=parent or None, before=before, limit=size + 1)
    answer: dict[str, Any] = {"hotLoads": [shown_hot_load(service, row) for row in rows[:size]]}
    if len(rows) > size:
        answer["nextPageToken"] = page_token(service.keys.page_key, scope, rows[size - 1].seq)
    return answer


def list_replicas(service: Service, hot_load_id: str, query: Mapping[str, str]) -> dict[str, Any]:
    """Return a page of a hot-load's replicas, by zone and name."""
    size = page_size(query.get("maxPageSize") or query.get("max_page_size"))
    row = _find(service, hot_load_id)
    token = query.get("pageToken") or query.get("page_token")
    scope = f"replicas/{service.keys.organization_id}/{row.id}"
    zone, name = read_page_token(service.keys.page_key, scope, token) if token else ("", "")
    rows = service.store.replicas(row.id, after=(zone, name), limit=size + 1)
    answer: dict[str, Any] = {"replicas": [shown_replica(replica) for replica in rows[:size]]}
    if len(rows) > size:
        last = rows[size - 1]
        answer["nextPageToken"] = page_token(service.keys.page_key, scope, [last.zone, last.name])
    return answer


def cancel_hot_load(service: Service, hot_load_id: str) -> dict[str, Any]:
    """Refuse: the service does not implement it."""
    _find(service, hot_load_id)
    raise unimplemented("CancelHotLoad is not implemented")


def shown_hot_load(service: Service, row: HotLoadRow) -> dict[str, Any]:
    """Return a hot-load as answers show it."""
    chain = [_shown_entry(entry) for entry in row.chain]
    spec = {**row.spec, "organizationId": service.keys.organization_id, "snapshotChain": chain}
    status = {
        "state": f"HOT_LOAD_STATE_{row.state}",
        "createdAt": timestamp(row.created_at),
        "updatedAt": timestamp(row.updated_at),
        "finishedAt": timestamp(row.finished_at),
        "conditions": shown_conditions(row.conditions),
    }
    return {"spec": spec, "status": pruned(status)}


def shown_replica(row: ReplicaRow) -> dict[str, Any]:
    """Return a replica as answers show it."""
    return pruned(
        {
            "name": row.name,
            "zone": row.zone,
            "state": row.state,
            "currentSnapshotIdentity": row.identity,
            "errorReason": row.error,
            "transitionedAt": timestamp(row.transitioned_at),
            "startedAt": timestamp(row.started_at),
            "finishedAt": timestamp(row.finished_at),
            "updatedAt": timestamp(row.updated_at),
        }
    )


def _parse(reader: Reader, hot_load_id: str) -> _Request:
    deployment_id = reader.text("deploymentId", required=True)
    if deployment_id and not UUID.fullmatch(deployment_id):
        reader.problem("deploymentId", "must be a UUID")
    identity = reader.text("identity", required=True)
    _check_identity(reader, "identity", identity)
    if identity == INITIAL:
        reader.problem("identity", f"{INITIAL!r} is reserved for the deployment's base weights")
    kind = reader.enum("type", "SnapshotType")
    if kind == "UNSPECIFIED":
        reader.problem("type", "must be SNAPSHOT_TYPE_FULL or SNAPSHOT_TYPE_INCREMENTAL")
    policy = reader.enum("promptCachePolicy", "PromptCachePolicy")
    previous = ""
    if kind == "FULL" and reader.has("incrementalSnapshotMetadata"):
        reader.problem("incrementalSnapshotMetadata", "must be absent for a full snapshot")
    elif kind == "INCREMENTAL":
        previous = _previous(reader.message("incrementalSnapshotMetadata", required=True), identity)
    return _Request(
        id=hot_load_id,
        deployment_id=deployment_id.lower(),
        identity=identity,
        type=kind,
        policy=policy,
        previous=previous,
    )


def _previous(metadata: Reader, identity: str) -> str:
    previous = metadata.text("previousSnapshotIdentity", required=True)
    _check_identity(metadata, "previousSnapshotIdentity", previous)
    if previous and previous == identity:
        metadata.problem("previousSnapshotIdentity", "is the snapshot itself")
    if metadata.enum("compressionFormat", "CompressionFormat") != "ZSTD":
        metadata.problem("compressionFormat", "must be COMPRESSION_FORMAT_ZSTD")
    if metadata.enum("checksumFormat", "ChecksumFormat") != "ADLER32":
        metadata.problem("checksumFormat", "must be CHECKSUM_FORMAT_ADLER32")
    return previous


def _check_identity(reader: Reader, name: str, identity: str) -> None:
    if len(identity) > _MAX_IDENTITY:
        reader.problem(name, f"must have 1 to {_MAX_IDENTITY} characters")
    if "/" in identity or identity in (".", ".."):
        reader.problem(name, "must be one path segment, and neither . nor ..")


def _deployment(service: Service, request: _Request) -> Resource:
    """Return the deployment; raise unless it can take a hot-load now."""
    deployment = service.store.resource("deployment", request.deployment_id)
    if deployment is None:
        raise not_found("deployment", request.deployment_id)
    if "hotLoad" not in deployment.spec:
        raise failed_precondition(f"deployment {deployment.id} was created without hotLoad")
    _refuse_second(service, deployment)
    if deployment.spec.get("disabled"):
        raise failed_precondition(f"deployment {deployment.id} is disabled")
    if deployment.status not in ("READY", "ERROR"):
        raise failed_precondition(f"deployment {deployment.id} is not ready: STATUS_{deployment.status}")
    return deployment


def _refuse_second(service: Service, deployment: Resource) -> None:
    active = service.store.active_hot_load(deployment.id)
    if active is not None:
        raise _in_progress(active.id)


def _in_progress(hot_load_id: str) -> ApiError:
    return failed_precondition(
        f"a hot-load is already in progress on the deployment: {hot_load_id}",
        ("HOT_LOAD", f"hot-load {hot_load_id} has not ended"),
    )


def _resolved_chain(service: Service, request: _Request, deployment: Resource) -> list[ChainEntry]:
    """Return the chain, oldest first, with the requested snapshot at its end."""
    hot_load = deployment.spec["hotLoad"]
    entry = ChainEntry(
        identity=request.identity,
        type=request.type,
        bucket=hot_load["bucket"],
        prefix=snapshot_prefix(hot_load.get("pathPrefix", ""), request.identity),
        hot_load_id=request.id,
    )
    if request.type == "FULL":
        return [entry]
    previous = service.store.latest_completed(deployment.id, identity=request.previous)
    if previous is None:
        raise failed_precondition(
            f"previousSnapshotIdentity {request.previous!r} is not a completed hot-load of deployment {deployment.id}",
            ("SNAPSHOT_CHAIN", f"{request.previous!r} has not been completed here"),
        )
    chain = [ChainEntry.from_json(values) for values in previous.chain]
    if len(chain) > MAX_DELTAS:
        raise failed_precondition(
            f"resolved snapshot chain is too long: {len(chain)} deltas, at most {MAX_DELTAS}",
            ("SNAPSHOT_CHAIN", "publish a full snapshot"),
        )
    return [*chain, entry]


def _add(service: Service, request: _Request, deployment: Resource, chain: list[ChainEntry]) -> HotLoadRow:
    # The check of the objects took a while: look again before writing.
    if service.store.resource("deployment", deployment.id) is None:
        raise not_found("deployment", deployment.id)
    now = service.clock()
    row = HotLoadRow(
        id=request.id,
        deployment_id=deployment.id,
        identity=request.identity,
        state="PENDING",
        spec=_spec(request),
        chain=[entry.to_json() for entry in chain],
        created_at=now,
        updated_at=now,
    )
    zone = (gateway_zones(service.store, deployment) or [""])[0]
    replicas = []
    for name in replica_names(deployment, service.settings.replicas):
        replica = service.pool.get(name)
        identity = "" if replica is None else replica.identity
        replicas.append(ReplicaRow(row.id, name, zone, "PENDING_UPDATE", identity, now, now))
    try:
        service.store.add_hot_load(row, replicas)
    except Conflict:
        if service.store.hot_load(request.id) is not None:
            raise already_exists("hotLoad", request.id) from None
        _refuse_second(service, deployment)
        raise
    return row


def _spec(request: _Request) -> dict[str, Any]:
    spec: dict[str, Any] = {
        "id": request.id,
        "deploymentId": request.deployment_id,
        "identity": request.identity,
        "type": enum_json("SnapshotType", request.type),
    }
    # What was left to the server stays unsaid, as it was sent.
    spec |= pruned({"promptCachePolicy": enum_json("PromptCachePolicy", request.policy)})
    if request.type == "INCREMENTAL":
        spec["incrementalSnapshotMetadata"] = {
            "previousSnapshotIdentity": request.previous,
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
        }
    return spec


def _shown_entry(entry: Mapping[str, Any]) -> dict[str, Any]:
    delta = entry["type"] == "INCREMENTAL"
    return pruned(
        {
            "identity": entry["identity"],
            "type": enum_json("SnapshotType", entry["type"]),
            "hotLoadId": entry["hot_load_id"],
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD" if delta else "",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32" if delta else "",
        }
    )


def _find(service: Service, hot_load_id: str) -> HotLoadRow:
    row = service.store.hot_load(hot_load_id.lower())
    if row is None:
        raise not_found("hotLoad", hot_load_id)
    return row
