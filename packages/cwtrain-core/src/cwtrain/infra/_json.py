"""Resources as the CLI prints them: snake_case keys, bare state names, RFC 3339 times."""

from __future__ import annotations

import datetime as dt
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

import attrs

from cwtrain.infra._urls import rollout_base_url
from cwtrain.models import service as m

__all__ = ["claim_to_json", "deployment_to_json", "gateway_to_json", "hot_load_to_json", "replica_to_json"]


def gateway_to_json(gateway: m.Gateway) -> dict[str, Any]:
    """Return ``gateway`` as plain data."""
    return _fields(gateway)


def claim_to_json(claim: m.CapacityClaim) -> dict[str, Any]:
    """Return ``claim`` as plain data."""
    return _fields(claim)


def replica_to_json(replica: m.HotLoadReplica) -> dict[str, Any]:
    """Return ``replica`` as plain data."""
    return _fields(replica)


def hot_load_to_json(hot_load: m.HotLoad) -> dict[str, Any]:
    """Return ``hot_load`` as ``{spec, status}``, and ``timings`` where there are any."""
    data = _fields(hot_load)
    if not hot_load.timings:
        del data["timings"]
    return data


def deployment_to_json(deployment: m.Deployment, endpoints: Sequence[str] = ()) -> dict[str, Any]:
    """Return ``deployment`` as plain data, with ``endpoints`` of its gateways and the base URL for rollouts."""
    order = ("id", "name", "status", "status_text", "model_name", "engine", "hot_load", "gateway_ids", "conditions")
    data = _fields(deployment)
    first = {key: data.pop(key) for key in order if key in data}
    return {
        **first,
        "endpoints": list(endpoints),
        "rollout_base_url": rollout_base_url(endpoints[0]) if endpoints else None,
        **data,
    }


def _plain(value: Any) -> Any:
    if attrs.has(type(value)):
        return _fields(value)
    if isinstance(value, StrEnum):
        return value.value
    if isinstance(value, dt.datetime):
        return value.astimezone(dt.UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _fields(value: Any) -> dict[str, Any]:
    """Return the fields of a model. The service's own word for a state is shown only where we do not know it."""
    data = {
        field.name: _plain(getattr(value, field.name)) for field in attrs.fields(type(value)) if field.name != "raw"
    }
    for name in ("state", "status"):
        text = data.pop(f"{name}_text", "")
        if text and data[name] == "UNSPECIFIED" and text != "0" and not text.upper().endswith("UNSPECIFIED"):
            data[f"{name}_text"] = text
    return data
