"""The pieces of a request and of its reply: path segments, bodies, queries, expected keys."""

from __future__ import annotations

import datetime as dt
import uuid
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeVar
from urllib.parse import quote as percent_encoded

from cwtrain.errors import ConfigError, UnexpectedAnswerError
from cwtrain.infra import _wire
from cwtrain.models.service import HotLoadSpec, PromptCachePolicy, SnapshotType

__all__ = ["expected", "hot_load_body", "items", "member", "page_query", "segment", "since", "with_id"]

T = TypeVar("T", bound=StrEnum)


def segment(value: str, what: str) -> str:
    """Return ``value`` percent-encoded as one path segment. Raises ``ConfigError`` for what cannot be one."""
    if not isinstance(value, str) or not value.strip() or "/" in value or value in (".", ".."):
        raise ConfigError(
            f"{value!r} is no {what}: it must be text, not empty, and without '/'", hint=f"give the {what} by itself"
        )
    try:
        return percent_encoded(value, safe="")
    except UnicodeEncodeError as exc:
        raise ConfigError(f"{value!r} is no {what}: it is no valid text") from exc


def with_id(spec: Mapping[str, Any], resource_id: str | None = None) -> dict[str, Any]:
    """Return a copy of ``spec`` with this id, its own, or a new one. Raises ``ConfigError`` when it has another one."""
    if not isinstance(spec, Mapping):
        raise ConfigError(f"a spec must be an object, not {type(spec).__name__}")
    if resource_id is None:
        resource_id = spec.get("id") or str(uuid.uuid4())
    segment(resource_id, "id")
    if spec.get("id") not in (None, "", resource_id):
        raise ConfigError(f"the spec has the id {spec['id']!r}, and the call is about {resource_id!r}")
    return {"id": resource_id, **{key: value for key, value in spec.items() if key != "id"}}


def expected(reply: Mapping[str, Any], key: str, where: str) -> Any:
    if reply.get(key) is None:
        there = ", ".join(sorted(map(str, reply))[:10]) or "nothing"
        raise UnexpectedAnswerError(
            f"unexpected answer to {where}: it has no {key!r} (it has: {there})",
            hint="check that COREWEAVE_API_URL is the API; the call may have taken effect",
        )
    return reply[key]


def items(reply: Mapping[str, Any], key: str, where: str) -> list[Any]:
    """Return the list under ``key``. An empty one may be left out, but not beside keys of another kind of answer."""
    if reply.get(key) is None and set(reply) <= {key, "nextPageToken", "totalSize"}:
        return []
    found = expected(reply, key, where)
    if not isinstance(found, list):
        raise UnexpectedAnswerError(f"unexpected answer to {where}: {key!r} is no list")
    return found


def since(updated_after: dt.datetime | str | None) -> dict[str, str]:
    if updated_after is None or isinstance(updated_after, str):
        return {"updatedAfter": updated_after} if updated_after else {}
    if updated_after.tzinfo is None:
        raise ConfigError(f"updated_after={updated_after!r} has no time zone", hint="use datetime.now(datetime.UTC)")
    return {"updatedAfter": _wire.time_to_wire(updated_after)}


def page_query(page_size: int) -> dict[str, int]:
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 0:
        raise ConfigError(f"page_size={page_size!r} must be 0 (the service's own) or a positive integer")
    return {"maxPageSize": page_size} if page_size else {}


def member(kind: type[T], value: Any, name: str) -> T:
    try:
        return kind(value)
    except ValueError as exc:
        raise ConfigError(
            f"{name}={value!r} is no {kind.__name__}", hint=f"give one of {', '.join(one.name for one in kind)}"
        ) from exc


def hot_load_body(asked: HotLoadSpec) -> dict[str, Any]:
    """Return the body of a create call. Raises ``ConfigError`` when type and metadata do not go together."""
    metadata = asked.incremental_snapshot_metadata
    if asked.type is SnapshotType.UNSPECIFIED:
        raise ConfigError("snapshot_type must be FULL or INCREMENTAL", hint="give SnapshotType.FULL for a checkpoint")
    if (asked.type is SnapshotType.INCREMENTAL) != (metadata is not None):
        need = "needs" if asked.type is SnapshotType.INCREMENTAL else "must not have"
        raise ConfigError(
            f"a hot-load of type {asked.type.name} {need} incremental metadata",
            hint="give incremental=IncrementalSnapshotMetadata(...) for a delta, and only for one",
        )
    body: dict[str, Any] = {
        "deploymentId": asked.deployment_id,
        "hotLoadId": asked.id,
        "identity": asked.identity,
        "type": _wire.enum_to_wire(asked.type),
    }
    if asked.prompt_cache_policy is not PromptCachePolicy.UNSPECIFIED:
        body["promptCachePolicy"] = _wire.enum_to_wire(asked.prompt_cache_policy)
    if metadata is not None:
        if not metadata.previous_snapshot_identity:
            raise ConfigError("incremental metadata names no previous snapshot identity")
        body["incrementalSnapshotMetadata"] = _wire.metadata_to_wire(metadata)
    return body
