"""Routes that change the emulator itself: faults, replicas, keys, and back to the start. All want the admin's token."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.routing import BaseRoute, Route

from cwtrain_emulator.api.app import Handler, endpoint, read_object
from cwtrain_emulator.api.controller import replica_names
from cwtrain_emulator.api.errors import failed_precondition, invalid, not_found
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.faults import FaultError
from cwtrain_emulator.gateway.app import Gateway

__all__ = ["RUNNING_FILE", "control_routes"]

RUNNING_FILE = "running.json"
"""In the state directory while the emulator runs: what `serve` has printed."""

_MAX_REPLICAS = 64


def control_routes(service: Service, gateway: Gateway, stop: Callable[[], None]) -> list[BaseRoute]:
    """Return the routes; `stop` ends the service, soon."""
    spares = itertools.cycle(service.spare_keys) if service.spare_keys else None

    def faults(service: Service, request: Request) -> dict[str, Any]:
        return {"faults": [rule.to_json() for rule in service.faults.rules()]}

    async def add_fault(service: Service, request: Request) -> dict[str, Any]:
        body = await read_object(request, limit=service.settings.max_body_bytes)
        try:
            return {"fault": service.faults.add(body).to_json()}
        except FaultError as exc:
            raise invalid(("", str(exc))) from None

    def clear_faults(service: Service, request: Request) -> dict[str, Any]:
        return {"cleared": service.faults.clear()}

    def fault(service: Service, request: Request) -> dict[str, Any]:
        found = service.faults.get(request.path_params["id"])
        if found is None:
            raise not_found("fault", request.path_params["id"])
        return {"fault": found.to_json()}

    def clear_fault(service: Service, request: Request) -> dict[str, Any]:
        answer = fault(service, request)
        service.faults.clear(request.path_params["id"])
        return answer

    async def reset(service: Service, request: Request) -> dict[str, Any]:
        cleared = service.faults.clear()
        counts = {kind: len(service.store.resources(kind)) for kind in ("gateway", "deployment", "capacityClaim")}
        await service.controller.reset()
        objects = None if service.clear_bucket is None else await service.clear_bucket()
        gateway.log.clear()
        gateway.draws.clear()
        gateway.router.reset()
        return {
            "gateways": counts["gateway"],
            "deployments": counts["deployment"],
            "capacity_claims": counts["capacityClaim"],
            "faults": len(cleared),
            "objects": objects,
        }

    async def scale(service: Service, request: Request) -> dict[str, Any]:
        body = await read_object(request, limit=service.settings.max_body_bytes)
        count = body.get("count")
        if isinstance(count, bool) or not isinstance(count, int) or not 1 <= count <= _MAX_REPLICAS:
            raise invalid(("count", f"must be an integer from 1 to {_MAX_REPLICAS}"))
        deployment_id = request.path_params["id"].lower()
        deployment = service.store.resource("deployment", deployment_id)
        if deployment is None:
            raise not_found("deployment", deployment_id)
        service.controller.scale(deployment, count)
        changed = service.store.resource("deployment", deployment_id) or deployment
        return {"deployment_id": deployment_id, "replicas": replica_names(changed, service.settings.replicas)}

    def credentials(service: Service, request: Request) -> dict[str, Any]:
        if spares is None:
            raise failed_precondition("the store is not the emulator's own: it has no keys to give out")
        access, secret = next(spares)
        return {"access_key_id": access, "secret_access_key": secret}

    def end(service: Service, request: Request) -> dict[str, Any]:
        stop()
        return {"pid": os.getpid(), "state_dir": str(service.settings.state_dir)}

    def route(path: str, method: str, handler: Handler) -> Route:
        return Route(f"/emulator/v1{path}", endpoint(service, handler, role="admin"), methods=[method])

    return [
        route("/faults", "GET", faults),
        route("/faults", "POST", add_fault),
        route("/faults", "DELETE", clear_faults),
        route("/faults/{id}", "GET", fault),
        route("/faults/{id}", "DELETE", clear_fault),
        route("/reset", "POST", reset),
        route("/deployments/{id}/replicas", "POST", scale),
        route("/credentials", "POST", credentials),
        route("/stop", "POST", end),
    ]
