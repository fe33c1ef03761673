"""What gateways, deployments and capacity claims have in common: create, get, list, update, delete."""

from __future__ import annotations

import datetime as dt
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from cwtrain_emulator.api.errors import Violation, already_exists, failed_precondition, invalid, not_found
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.api.wire import Reader, pruned, timestamp
from cwtrain_emulator.store import Conflict, Resource

__all__ = ["Kind", "create", "delete", "find", "listed", "shown", "update"]

HOST_LABEL = re.compile(r"[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?")
UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")

Spec = dict[str, Any]


@dataclass(frozen=True)
class Kind:
    """One kind of resource: its key in answers and the three things that differ between kinds."""

    name: str

    def parse(self, service: Service, reader: Reader, old: Resource | None) -> Spec:
        """Return the spec that a request asks for; problems go to the reader."""
        raise NotImplementedError

    def check(self, service: Service, spec: Spec, old: Resource | None) -> None:
        """Raise ApiError when the spec is well formed but cannot be had now."""

    def check_delete(self, service: Service, resource: Resource) -> None:
        """Raise ApiError when the resource cannot be deleted now."""

    def status(self, service: Service, resource: Resource) -> dict[str, Any]:
        """Return what this kind adds to the status."""
        return {}


def create(service: Service, kind: Kind, body: Mapping[str, Any]) -> dict[str, Any]:
    """Add a resource and return it; it takes a moment until it is READY."""
    problems: list[Violation] = []
    reader = Reader(body, problems)
    resource_id = read_id(reader, "id")
    _raise(problems)
    # Before anything else: a client that repeats a create whose answer it lost must learn that it worked.
    if service.store.resource(kind.name, resource_id) is not None:
        raise already_exists(kind.name, resource_id)
    name = read_name(reader)
    spec = kind.parse(service, reader, None)
    _raise(problems)
    if service.store.resource_named(kind.name, name) is not None:
        raise already_exists(kind.name, name, what="name")
    kind.check(service, spec, None)
    now = service.clock()
    resource = Resource(
        kind=kind.name,
        id=resource_id,
        name=name,
        spec=spec,
        status="CREATING",
        created_at=now,
        updated_at=now,
        due_at=now + service.settings.transition_seconds,
    )
    try:
        service.store.add_resource(resource)
    except Conflict:
        raise already_exists(kind.name, resource_id) from None
    service.controller.wake()
    return {kind.name: shown(service, kind, resource)}


def find(service: Service, kind: Kind, resource_id: str) -> Resource:
    """Return a resource; raise NOT_FOUND."""
    resource = service.store.resource(kind.name, resource_id.lower())
    if resource is None:
        raise not_found(kind.name, resource_id)
    return resource


def listed(service: Service, kind: Kind, query: Mapping[str, str], *, among: set[str] | None = None) -> dict[str, Any]:
    """Return all resources of a kind, those updated after `updatedAfter`, and with an id in `among`."""
    after = query.get("updatedAfter") or query.get("updated_after")
    found = service.store.resources(kind.name, updated_after=_parse_time(after) if after else None)
    items = [shown(service, kind, row) for row in found if among is None or row.id in among]
    return {"items": items}


def update(service: Service, kind: Kind, resource_id: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Replace a resource's spec."""
    old = find(service, kind, resource_id)
    problems: list[Violation] = []
    reader = Reader(body, problems)
    if reader.text("id", required=True).lower() not in ("", old.id):
        reader.problem("id", "must be the id in the path")
    spec = kind.parse(service, reader, old)
    if reader.has("name") and reader.text("name") != old.name:
        reader.problem("name", "cannot be changed")
    _raise(problems)
    if old.status == "DELETING":
        raise failed_precondition(f"{kind.name} {old.id} is being deleted")
    kind.check(service, spec, old)
    now = service.clock()
    due = now + service.settings.transition_seconds
    changed = replace(old, spec=spec, status="UPDATING", updated_at=now, due_at=due, conditions=[])
    service.store.update_resource(changed)
    service.controller.wake()
    return {kind.name: shown(service, kind, changed)}


def delete(service: Service, kind: Kind, resource_id: str) -> dict[str, Any]:
    """Begin to delete a resource and return it; a repeat is answered alike while it is there."""
    resource = find(service, kind, resource_id)
    if resource.status != "DELETING":
        kind.check_delete(service, resource)
        now = service.clock()
        due = now + service.settings.transition_seconds
        resource = replace(resource, status="DELETING", updated_at=now, due_at=due)
        service.store.update_resource(resource)
        service.controller.wake()
    return {kind.name: shown(service, kind, resource)}


def shown(service: Service, kind: Kind, resource: Resource) -> dict[str, Any]:
    """Return a resource as answers show it."""
    identity = {"id": resource.id, "name": resource.name, "organizationId": service.keys.organization_id}
    status = {
        "status": f"STATUS_{resource.status}",
        "conditions": shown_conditions(_conditions(resource)),
        "createdAt": timestamp(resource.created_at),
        "updatedAt": timestamp(resource.updated_at),
        **kind.status(service, resource),
    }
    return {"spec": {**identity, **resource.spec}, "status": pruned(status)}


def shown_conditions(conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return stored conditions as answers show them."""
    return [pruned({**entry, "lastUpdateTime": timestamp(entry.get("lastUpdateTime"))}) for entry in conditions]


def read_id(reader: Reader, name: str) -> str:
    """Return the client's id, in lower case, or a fresh one."""
    value = reader.text(name)
    if value and not UUID.fullmatch(value):
        reader.problem(name, "must be a UUID")
    return value.lower() or str(uuid.uuid4())


def read_name(reader: Reader) -> str:
    """Return the name, which must be a host label."""
    name = reader.text("name", required=True)
    if name and not HOST_LABEL.fullmatch(name):
        reader.problem("name", "must be 1 to 63 letters, digits and dashes, with no dash at either end")
    return name


def _raise(problems: list[Violation]) -> None:
    if problems:
        raise invalid(*problems)


def _conditions(resource: Resource) -> list[dict[str, Any]]:
    if resource.conditions:
        return resource.conditions
    ready = resource.status == "READY"
    return [
        {
            "type": "Ready",
            "status": "STATUS_TRUE" if ready else "STATUS_FALSE",
            "reason": "AsExpected" if ready else "Reconciling",
            "lastUpdateTime": resource.updated_at,
        }
    ]


def _parse_time(text: str) -> float:
    try:
        # A plus sign in a query string that was not escaped arrives as a blank.
        moment = dt.datetime.fromisoformat(text.strip().upper().replace(" ", "+"))
        return (moment if moment.tzinfo else moment.replace(tzinfo=dt.UTC)).timestamp()
    except (ValueError, OverflowError):
        raise invalid(("updatedAfter", "must be an RFC 3339 time")) from None
