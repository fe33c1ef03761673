"""The endpoint's routes: models, completions and chat completions of one gateway, or of all of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import anyio
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from cwtrain_emulator.api.app import JsonResponse, bearer_token, nobody_listens, read_object
from cwtrain_emulator.api.errors import ApiError
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.gateway.completion_request import CompletionRequest, parse_chat, parse_completion
from cwtrain_emulator.gateway.errors import GatewayError
from cwtrain_emulator.gateway.routing import Router, max_model_len
from cwtrain_emulator.replica.pool import Replica, ReplicaError
from cwtrain_emulator.store import Resource

__all__ = ["Gateway", "RequestLog", "gateway_app", "gateway_routes"]

_log = logging.getLogger("cwtrain_emulator.gateway")

_KEPT_RECORDS = 20_000
_KEPT_PROMPTS = 200_000

Endpoint = Callable[[Request], Awaitable[Response]]


class RequestLog:
    """Which identity computed each token of the last requests, by request id. In memory, bounded."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, list[dict[str, Any]]] = OrderedDict()

    def add(self, request_id: str, record: dict[str, Any]) -> None:
        """Note an attempt; a client that tries again under one id gets one entry with several attempts."""
        self._records.setdefault(request_id, []).append(record)
        self._records.move_to_end(request_id)
        while len(self._records) > _KEPT_RECORDS:
            self._records.popitem(last=False)

    def clear(self) -> None:
        """Forget every request."""
        self._records.clear()

    def get(self, request_id: str) -> list[dict[str, Any]] | None:
        """Return the attempts under an id, oldest first, or None."""
        return self._records.get(request_id)


@dataclass
class Gateway:
    """What the endpoint's handlers share, whatever port they serve."""

    service: Service
    router: Router
    log: RequestLog = field(default_factory=RequestLog)
    draws: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    def next_draw(self, deployment: Resource, prompt: list[int] | str | dict[str, Any]) -> int:
        """Return how many unseeded prompts equal to this one came before, and count it."""
        words = f"{deployment.id}\0{prompt if isinstance(prompt, str) else json.dumps(prompt)}"
        key = hashlib.sha256(words.encode("utf-8", errors="replace")).digest()
        count = self.draws.pop(key, 0)
        self.draws[key] = count + 1
        if len(self.draws) > _KEPT_PROMPTS:
            self.draws.popitem(last=False)
        return count


def gateway_app(gateway: Gateway, gateway_id: str) -> Starlette:
    """Return the application of one gateway's own port."""

    async def missing(request: Request, exc: Exception) -> Response:
        return JsonResponse(GatewayError(404, "Not Found").body, status_code=404)

    return Starlette(
        routes=gateway_routes(gateway, gateway_id), exception_handlers={404: missing, ClientDisconnect: nobody_listens}
    )


def gateway_routes(gateway: Gateway, gateway_id: str | None) -> list[BaseRoute]:
    """Return the endpoint's routes, for one gateway's deployments or (None) for all."""

    async def models(request: Request) -> Response:
        rows = {(row.spec["model"]["name"], int(row.created_at)): row for row in gateway.router.models(gateway_id)}
        data = []
        for (name, made), row in sorted(rows.items(), key=lambda one: one[0]):
            model = {"id": name, "object": "model", "created": made, "owned_by": "cwtrain", "root": name}
            data.append({**model, "parent": None, "max_model_len": gateway.router.context_length(row)})
        return JsonResponse({"object": "list", "data": data})

    async def completions(request: Request) -> Response:
        return await _complete(gateway, gateway_id, request, parse_completion(await body_of(request)))

    async def chat(request: Request) -> Response:
        return await _complete(gateway, gateway_id, request, parse_chat(await body_of(request)))

    async def body_of(request: Request) -> dict[str, Any]:
        body = await read_object(request, limit=gateway.service.settings.max_completion_body_bytes)
        return _with_routed_model(gateway, gateway_id, request, body)

    return [
        Route("/v1/models", _guarded(gateway, models), methods=["GET"]),
        Route("/v1/completions", _guarded(gateway, completions), methods=["POST"]),
        Route("/v1/chat/completions", _guarded(gateway, chat), methods=["POST"]),
    ]


def _guarded(gateway: Gateway, handler: Endpoint) -> Endpoint:
    """Return the handler with authentication in front and OpenAI-style errors behind."""

    async def call(request: Request) -> Response:
        try:
            if gateway.service.role_of(bearer_token(request)) is None:
                raise GatewayError(401, "the request has no valid bearer token")
            return await handler(request)
        except GatewayError as exc:
            return JsonResponse(exc.body, status_code=exc.status)
        except ApiError as exc:
            return JsonResponse(GatewayError(exc.status, exc.message).body, status_code=exc.status)
        except ReplicaError as exc:
            headers = {"Retry-After": exc.retry_after} if exc.retry_after else None
            refusal = GatewayError(exc.status, str(exc), param=exc.param)
            return JsonResponse(refusal.body, status_code=exc.status, headers=headers)
        except ClientDisconnect:
            raise
        except Exception:  # noqa: BLE001 - the last resort of a handler: logged, and answered as an error
            _log.exception("%s %s failed", request.method, request.url.path)
            return JsonResponse(GatewayError(500, "internal error").body, status_code=500)

    return call


def _with_routed_model(
    gateway: Gateway, gateway_id: str | None, request: Request, body: dict[str, Any]
) -> dict[str, Any]:
    """Return the body with the model that a header-routed gateway takes from its header."""
    resource = gateway.service.store.resource("gateway", gateway_id) if gateway_id else None
    header = (resource.spec.get("headerBasedRouting") or {}).get("headerName") if resource else None
    named = request.headers.get(header) if header else None
    return {**body, "model": named} if named else body


async def _complete(gateway: Gateway, gateway_id: str | None, request: Request, asked: CompletionRequest) -> Response:
    deployment = gateway.router.deployment(gateway_id, asked.model)
    replica = gateway.router.replica(deployment, request.headers.get("x-session-id"))
    config = deployment.spec["runtime"].get("engineConfig", {})
    prompts = asked.for_replica["prompts"]
    seeded = asked.for_replica["seed"] is not None
    draws = [0 if seeded else gateway.next_draw(deployment, prompt) for prompt in prompts]
    longest = max_model_len(deployment)
    order = {
        "op": "complete",
        "mode": config.get("logprobs-mode", "raw_logprobs"),
        "request": {
            **asked.for_replica,
            "draws": draws,
            "max_model_len": longest,
            "prefix_caching": str(config.get("enable-prefix-caching", True)).lower() != "false",
        },
    }
    call = _Call(gateway, request.scope["request_id"], deployment, replica, asked, order)
    if asked.stream:
        return await call.streamed()
    return await call.whole(request)


class _Call:
    """One request on its way to a replica and back."""

    def __init__(
        self,
        gateway: Gateway,
        request_id: str,
        deployment: Resource,
        replica: Replica,
        asked: CompletionRequest,
        order: dict[str, Any],
    ) -> None:
        self._gateway = gateway
        self._pool = gateway.service.pool
        self._request_id = request_id
        self._deployment = deployment
        self._replica = replica
        self._asked = asked
        self._order = order
        self._started = time.time()

    async def whole(self, request: Request) -> Response:
        """Return the whole answer; the replica stops when the client hangs up."""
        answer: tuple[dict[str, Any], bytes] | None = None
        failure: ReplicaError | None = None

        async with anyio.create_task_group() as group:

            async def hang_up() -> None:
                while (await request.receive())["type"] != "http.disconnect":
                    pass
                group.cancel_scope.cancel()

            group.start_soon(hang_up)
            try:
                answer = await self._pool.ask(self._replica, self._order)
            except ReplicaError as exc:
                failure = exc
            group.cancel_scope.cancel()
        if failure is not None:
            raise failure
        if answer is None:
            raise ClientDisconnect
        head, choices = answer
        self._record(head["record"])
        body = {**self._frame(), "usage": head["usage"], **self._extras(head)}
        if "prompt_token_ids" in head:
            body["prompt_token_ids"] = head["prompt_token_ids"]
        raw = json.dumps(body, separators=(",", ":")).encode()
        return Response(raw[:-1] + b',"choices":' + choices + b"}", media_type="application/json")

    async def streamed(self) -> Response:
        """Return the answer as server-sent events; what fails before the first token is an ordinary refusal."""
        answers = self._pool.stream(self._replica, self._order)
        first = await anext(answers)

        async def events() -> AsyncIterator[bytes]:
            async with contextlib.aclosing(answers):
                head, payload = first
                try:
                    while head["op"] == "part":
                        yield _event(self._frame(), payload)
                        head, payload = await anext(answers)
                except ReplicaError as exc:
                    yield b"data: " + json.dumps(GatewayError(exc.status, str(exc)).body).encode() + b"\n\n"
                    return
                self._record(head["record"])
                if self._asked.include_usage:
                    yield _event({**self._frame(), "usage": head["usage"], **self._extras(head)}, b"[]")
                yield b"data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    def _frame(self) -> dict[str, Any]:
        kind = "text_completion"
        if self._asked.chat:
            kind = "chat.completion.chunk" if self._asked.stream else "chat.completion"
        return {
            "id": f"{'chatcmpl' if self._asked.chat else 'cmpl'}-{self._request_id}",
            "object": kind,
            "created": int(self._started),
            "model": self._asked.model,
        }

    def _record(self, record: list[dict[str, Any]]) -> None:
        self._gateway.log.add(
            self._request_id,
            {
                "deployment_id": self._deployment.id,
                "model": self._asked.model,
                "replica": self._replica.name,
                "started_at": self._started,
                "finished_at": time.time(),
                "cache_salt": self._asked.cache_salt,
                "choices": record,
            },
        )

    def _extras(self, head: dict[str, Any]) -> dict[str, Any]:
        """Return what only some answers have: the fields asked for in nvext, and the identity where it is reported."""
        record, tokens = head["record"], head.get("tokens")
        extras: dict[str, Any] = {}
        nvext: dict[str, Any] = {}
        if tokens is not None:
            nvext["completion_token_ids"] = tokens
        if "worker_id" in self._asked.extra_fields:
            nvext["worker_id"] = {"decode_worker_id": self._replica.ordinal}
        if "timing" in self._asked.extra_fields:
            nvext["timing"] = head["timing"]
        if nvext:
            extras["nvext"] = nvext
        if self._gateway.service.settings.report_identity:
            identities = list(dict.fromkeys(identity for choice in record for identity, _ in choice["runs"]))
            extras["identities"] = identities
            if len(identities) == 1:
                extras["identity"] = identities[0]
        return extras


def _event(frame: dict[str, Any], choices: bytes) -> bytes:
    raw = json.dumps(frame, separators=(",", ":")).encode()
    return b"data: " + raw[:-1] + b',"choices":' + choices + b"}\n\n"
