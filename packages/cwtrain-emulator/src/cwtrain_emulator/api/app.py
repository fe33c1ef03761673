"""The control plane as an ASGI application: routes, roles, bounded bodies, and errors that are never a bare 500."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from cwtrain_emulator.api import hot_loads, resources
from cwtrain_emulator.api.claims import CLAIMS, claim_parameters
from cwtrain_emulator.api.deployments import DEPLOYMENTS, delete_deployment, deployment_parameters
from cwtrain_emulator.api.errors import (
    ApiError,
    internal,
    invalid,
    permission_denied,
    too_large,
    unauthenticated,
    unimplemented,
)
from cwtrain_emulator.api.gateways import GATEWAYS, gateway_parameters
from cwtrain_emulator.api.resources import Kind
from cwtrain_emulator.api.service import Service

__all__ = [
    "HUNG_UP",
    "PREFIX",
    "JsonResponse",
    "bearer_token",
    "endpoint",
    "make_app",
    "nobody_listens",
    "read_body",
    "read_object",
]

PREFIX = "/v1alpha1/inference"
HUNG_UP = 499
"""The status, nginx's own, of a request whose caller has gone."""

_log = logging.getLogger("cwtrain_emulator.api")

Answer = Mapping[str, Any]
Handler = Callable[[Service, Request], Answer | Awaitable[Answer]]
Endpoint = Callable[[Request], Awaitable[Response]]


class JsonResponse(Response):
    """JSON in ASCII, so that no text in it can break the answer."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Return the body."""
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def make_app(service: Service, extra_routes: list[BaseRoute]) -> Starlette:
    """Return the application; `extra_routes` are served beside the API (gateway, admin, page)."""

    async def refuse(request: Request, exc: Exception) -> Response:
        if isinstance(exc, ApiError):
            return JsonResponse(exc.body, status_code=exc.status)
        if isinstance(exc, HTTPException):
            # As a gRPC JSON gateway answers: an unknown path is NOT_FOUND, an unknown method UNIMPLEMENTED.
            known = exc.status_code == 404
            refusal = ApiError("NOT_FOUND", "Not Found") if known else unimplemented("Method Not Allowed")
            return JsonResponse(refusal.body, status_code=refusal.status)
        raise exc

    return Starlette(
        routes=[Mount(PREFIX, routes=_routes(service)), *extra_routes],
        exception_handlers={ApiError: refuse, HTTPException: refuse, ClientDisconnect: nobody_listens},
    )


async def nobody_listens(request: Request, exc: Exception) -> Response:
    """Answer, for the counts alone, a caller that has hung up: there is nobody to hear it, and nothing to log."""
    return Response(status_code=HUNG_UP)


def _routes(service: Service) -> list[BaseRoute]:
    def route(path: str, method: str, handler: Handler, *, role: str) -> Route:
        return Route(path, endpoint(service, handler, role=role), methods=[method])

    def reads(path: str, handler: Handler) -> Route:
        return route(path, "GET", handler, role="viewer")

    def writes(path: str, method: str, handler: Handler) -> Route:
        return route(path, method, handler, role="admin")

    def kind_routes(path: str, kind: Kind) -> list[Route]:
        one = path + "/{id}"

        async def create(service: Service, request: Request) -> Answer:
            return resources.create(service, kind, await _body(service, request))

        async def update(service: Service, request: Request) -> Answer:
            body = await _body(service, request)
            old = service.store.resource(kind.name, request.path_params["id"].lower())
            answer = resources.update(service, kind, request.path_params["id"], body)
            if kind is DEPLOYMENTS and old is not None:
                service.controller.deployment_updated(old.id)
                service.controller.autoscaling_changed(old.id, old.spec["autoscaling"])
            return answer

        def listed(service: Service, request: Request) -> Answer:
            return resources.listed(service, kind, request.query_params, among=_attached(service, kind, request))

        def found(service: Service, request: Request) -> Answer:
            resource = resources.find(service, kind, request.path_params["id"])
            return {kind.name: resources.shown(service, kind, resource)}

        def deleted(service: Service, request: Request) -> Answer:
            if kind is DEPLOYMENTS:
                return delete_deployment(service, request.path_params["id"])
            return resources.delete(service, kind, request.path_params["id"])

        return [
            reads(path, listed),
            writes(path, "POST", create),
            reads(one, found),
            writes(one, "PATCH", update),
            writes(one, "DELETE", deleted),
        ]

    async def create_hot_load(service: Service, request: Request) -> Answer:
        return await hot_loads.create_hot_load(service, await _body(service, request))

    async def cancel_hot_load(service: Service, request: Request) -> Answer:
        await _body(service, request)
        return hot_loads.cancel_hot_load(service, request.path_params["id"])

    return [
        reads("/gateways/parameters", lambda _service, _request: gateway_parameters()),
        reads("/deployments/parameters", _deployment_parameters),
        reads("/capacityclaims/parameters", lambda _service, _request: claim_parameters()),
        *kind_routes("/gateways", GATEWAYS),
        *kind_routes("/deployments", DEPLOYMENTS),
        *kind_routes("/capacityclaims", CLAIMS),
        writes("/hotLoads", "POST", create_hot_load),
        reads("/hotLoads", lambda service, request: hot_loads.list_hot_loads(service, request.query_params)),
        writes("/hotLoads/{id}:cancel", "POST", cancel_hot_load),
        reads("/hotLoads/{id}", lambda service, request: hot_loads.get_hot_load(service, request.path_params["id"])),
        reads(
            "/hotLoads/{id}/replicas",
            lambda service, request: hot_loads.list_replicas(service, request.path_params["id"], request.query_params),
        ),
    ]


def endpoint(service: Service, handler: Handler, *, role: str | None) -> Endpoint:
    """Return a handler as an ASGI endpoint that wants a token of `role` (admin may do what viewer may).

    With `role` None the handler looks itself who is asking.
    """

    async def call(request: Request) -> Response:
        known = service.role_of(bearer_token(request))
        if known is None and role is not None:
            raise unauthenticated()
        if role == "admin" and known != "admin":
            raise permission_denied("the token's role is Inference Viewer; this call needs Inference Admin")
        try:
            answer = handler(service, request)
            content = await answer if inspect.isawaitable(answer) else answer
        except (ApiError, HTTPException, ClientDisconnect):
            raise
        except Exception:  # noqa: BLE001 - the last resort of a handler: logged, and answered as INTERNAL
            _log.exception("%s %s failed", request.method, request.url.path)
            raise internal() from None
        return JsonResponse(content)

    return call


def bearer_token(request: Request) -> str:
    """Return the bearer token of a request, or an empty text."""
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""


async def read_body(request: Request, *, limit: int) -> bytes:
    """Return a request's body; raise ApiError for one above `limit` bytes, without reading it to its end."""
    announced = request.headers.get("content-length", "0")
    if announced.isascii() and announced.isdigit() and int(announced[:20]) > limit:
        raise too_large(limit)
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > limit:
            raise too_large(limit)
    return bytes(body)


async def read_object(request: Request, *, limit: int) -> dict[str, Any]:
    """Return a request's body as a JSON object; raise ApiError."""
    raw = await read_body(request, limit=limit)
    try:
        values = json.loads(raw or b"{}")
    except (ValueError, RecursionError):
        raise invalid(("", "the body is not JSON")) from None
    if not isinstance(values, dict):
        raise invalid(("", "the body is not a JSON object"))
    return values


async def _body(service: Service, request: Request) -> dict[str, Any]:
    return await read_object(request, limit=service.settings.max_body_bytes)


def _attached(service: Service, kind: Kind, request: Request) -> set[str] | None:
    """Return the ids of the deployments on the gateway that the query names, or None for all."""
    gateway_id = request.query_params.get("parentGatewayId") or request.query_params.get("parent_gateway_id")
    if kind is not DEPLOYMENTS or not gateway_id:
        return None
    rows = service.store.resources(DEPLOYMENTS.name)
    return {row.id for row in rows if gateway_id.lower() in row.spec["gatewayIds"]}


def _deployment_parameters(service: Service, request: Request) -> Answer:
    query = request.query_params
    asked = [*query.getlist("gatewayIds"), *query.getlist("gateway_ids")]
    return deployment_parameters(service, [gateway_id for gateway_id in asked if gateway_id])
