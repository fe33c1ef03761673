"""The emulator's own routes, for tests and tools: ``/emulator/v1/...`` and ``/openapi.json``."""

from __future__ import annotations

import itertools
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from cwtrain_emulator.api.app import JsonResponse, endpoint
from cwtrain_emulator.api.claims import CLAIMS
from cwtrain_emulator.api.deployments import DEPLOYMENTS
from cwtrain_emulator.api.errors import ApiError, internal, not_found, unavailable
from cwtrain_emulator.api.gateways import GATEWAYS
from cwtrain_emulator.api.hot_loads import shown_hot_load
from cwtrain_emulator.api.resources import Kind, shown
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.gateway.app import RequestLog
from cwtrain_emulator.openapi import openapi
from cwtrain_emulator.replica.pool import Replica, ReplicaError

__all__ = ["admin_routes"]

_SHOWN_HOT_LOADS = 50


def admin_routes(service: Service, log: RequestLog) -> list[BaseRoute]:
    """Return the routes; all but those for health and for the description want a token, of either role."""

    def state(service: Service, request: Request) -> dict[str, Any]:
        def all_of(kind: Kind) -> list[dict[str, Any]]:
            return [shown(service, kind, row) for row in service.store.resources(kind.name)]

        recent = service.store.hot_loads(deployment_id=None, before=None, limit=_SHOWN_HOT_LOADS)
        return {
            "emulator": _about(service),
            "gateways": all_of(GATEWAYS),
            "deployments": [_deployment(service, entry) for entry in all_of(DEPLOYMENTS)],
            "capacity_claims": all_of(CLAIMS),
            "hot_loads": [shown_hot_load(service, row) for row in recent],
        }

    def replica_state(service: Service, request: Request) -> dict[str, Any]:
        return _shown_replica(_replica(service, request))

    async def tensors(service: Service, request: Request) -> dict[str, Any]:
        found: dict[str, Any] = (await _hashes(service, request))["tensors"]
        return found

    def request_record(service: Service, request: Request) -> dict[str, Any]:
        request_id = request.path_params["id"]
        attempts = log.get(request_id)
        if attempts is None:
            raise not_found("request", request_id)
        return {"request_id": request_id, "attempts": [_attempt(attempt) for attempt in attempts]}

    async def health(request: Request) -> Response:
        return JsonResponse({"status": "ok"})

    async def description(request: Request) -> Response:
        return JsonResponse(openapi())

    return [
        Route("/openapi.json", description),
        Route("/emulator/v1/health", health),
        Route("/emulator/v1/state", endpoint(service, state, role="viewer")),
        Route("/emulator/v1/replicas/{name}", endpoint(service, replica_state, role="viewer")),
        Route("/emulator/v1/replicas/{name}/tensors", endpoint(service, tensors, role="viewer")),
        Route("/emulator/v1/requests/{id:path}", endpoint(service, request_record, role="viewer")),
    ]


def _about(service: Service) -> dict[str, Any]:
    settings = service.settings
    return {
        "base_url": service.base_url,
        "s3_endpoint": service.s3_endpoint,
        "bucket": settings.bucket,
        "region": settings.region,
        "replicas": settings.replicas,
        "seed": settings.seed,
    }


def _deployment(service: Service, entry: dict[str, Any]) -> dict[str, Any]:
    deployment_id = entry["spec"]["id"]
    completed = service.store.latest_completed(deployment_id)
    return {
        "id": deployment_id,
        "name": entry["spec"]["name"],
        "model": entry["spec"]["model"]["name"],
        "status": entry["status"]["status"],
        "identity": "" if completed is None else completed.identity,
        "replicas": [_shown_replica(replica) for replica in service.pool.of_deployment(deployment_id)],
    }


def _shown_replica(replica: Replica) -> dict[str, Any]:
    return {
        "name": replica.name,
        "zone": replica.zone,
        "deployment_id": replica.deployment_id,
        "state": replica.state,
        "identity": replica.identity,
        "serving": replica.serving,
        "error": replica.error,
        "pid": replica.pid,
    }


def _replica(service: Service, request: Request) -> Replica:
    name = request.path_params["name"]
    replica = service.pool.get(name)
    if replica is None:
        raise not_found("replica", name)
    return replica


async def _hashes(service: Service, request: Request) -> dict[str, Any]:
    try:
        return (await service.pool.ask(_replica(service, request), {"op": "hashes"}))[0]
    except ReplicaError as exc:
        raise _as_api_error(exc) from exc


def _as_api_error(exc: ReplicaError) -> ApiError:
    return unavailable(str(exc)) if exc.status == 503 else internal()


def _attempt(record: dict[str, Any]) -> dict[str, Any]:
    return {**record, "choices": [_choice(choice) for choice in record["choices"]]}


def _choice(record: dict[str, Any]) -> dict[str, Any]:
    """Return a choice's record token by token: `tokens` has the identity that computed each one, `kv` whose KV it saw.

    `prompt_kv` has, for each token of the prompt, the identity whose weights read it.
    """
    tokens, kv = _flat(record["runs"]), _flat(record["kv"])
    prompt, window = record["prompt_tokens"], record["window"]
    seen = []
    for position in range(len(tokens)):
        end = prompt + position
        seen.append(list(dict.fromkeys(kv[0 if window is None else max(0, end - window) : end])))
    return {
        "index": record["index"],
        "cached_tokens": record["cached_tokens"],
        "prompt_kv": kv[:prompt],
        "tokens": tokens,
        "kv": seen,
    }


def _flat(runs: list[list[Any]]) -> list[str]:
    return list(itertools.chain.from_iterable([identity] * count for identity, count in runs))
