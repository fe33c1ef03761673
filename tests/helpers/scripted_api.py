"""A service in memory: rules of (method, path) with answers used in turn, the last one again and again.

    api = ScriptedApi({"GET /deployments/d-1": [deployment("d-1", "STATUS_CREATING"), deployment("d-1")]})
    client = api.client()

An answer is JSON data (200), a pair (status, JSON data or text), an ``httpx.Response``, an exception that the
transport raises, or a function of the request that gives one of these.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import httpx

from cwtrain.infra import InferenceClient
from helpers.virtual_clock import VirtualClock

PREFIX = "/v1alpha1/inference"
TOKEN = "tok-a1b2c3d4e5f6"

Answer = Any


@attrs.frozen
class Call:
    """One request that came in."""

    method: str
    path: str
    query: dict[str, list[str]]
    body: Any
    headers: httpx.Headers

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


class ScriptedApi:
    """Answers by script and remembers what was asked, on a virtual clock."""

    def __init__(self, rules: Mapping[str, list[Answer]]) -> None:
        self.rules = {rule: list(answers) for rule, answers in rules.items()}
        self.calls: list[Call] = []
        self.clock = VirtualClock()
        self.transport = httpx.MockTransport(self._answer)

    def client(self, **settings: Any) -> InferenceClient:
        settings = {"token": TOKEN, "clock": self.clock.now, "sleep": self.clock.sleep, **settings}
        return InferenceClient(transport=self.transport, **settings)

    def waits(self) -> dict[str, Callable[..., Any]]:
        """The seams of the wait functions."""
        return {"clock": self.clock.now, "sleep": self.clock.sleep}

    @property
    def log(self) -> list[str]:
        return [str(call) for call in self.calls]

    def _answer(self, request: httpx.Request) -> httpx.Response:
        path = request.url.raw_path.decode().partition("?")[0].removeprefix(PREFIX)
        query: dict[str, list[str]] = {}
        for key, value in request.url.params.multi_items():
            query.setdefault(key, []).append(value)
        body = json.loads(request.content) if request.content else None
        call = Call(request.method, path, query, body, request.headers)
        self.calls.append(call)
        answers = self.rules.get(str(call))
        if not answers:
            return httpx.Response(404, json={"code": 5, "message": f"no rule for {call}"})
        return _response(answers.pop(0) if len(answers) > 1 else answers[0], call)


def _response(answer: Answer, call: Call) -> httpx.Response:
    if callable(answer) and not isinstance(answer, type):
        answer = answer(call)
    if isinstance(answer, BaseException):
        raise answer
    if isinstance(answer, httpx.Response):  # a fresh one each time: a response can be read once
        headers = [(k, v) for k, v in answer.headers.multi_items() if k not in ("content-length", "content-encoding")]
        return httpx.Response(answer.status_code, content=answer.content, headers=headers)
    status, data = answer if isinstance(answer, tuple) else (200, answer)
    if isinstance(data, str) or data is None:
        return httpx.Response(status, text="null" if data is None else data)
    return httpx.Response(status, json=data)


# Resources in the wire's form ----------------------------------------------------------------------------------------


def deployment(
    uid: str = "d-1", status: str | int | None = "STATUS_READY", reason: str = "", name: str = "toy", **spec: Any
) -> dict[str, Any]:
    conditions = [{"type": "Ready", "status": "False", "reason": "Broken", "message": reason}] if reason else []
    state = {} if status is None else {"status": {"status": status, "conditions": conditions}}
    return {"deployment": {"spec": {"id": uid, "name": name, **spec}, **state}}


def gateway(uid: str = "g-1", status: str = "STATUS_READY", name: str = "gate", **status_fields: Any) -> dict[str, Any]:
    return {"gateway": {"spec": {"id": uid, "name": name}, "status": {"status": status, **status_fields}}}


def hot_load(
    uid: str = "h-1",
    state: str | int | None = "HOT_LOAD_STATE_COMPLETED",
    identity: str = "step_000002",
    message: str = "",
    **spec: Any,
) -> dict[str, Any]:
    conditions = [{"type": "Completed", "status": "False", "message": message}] if message else []
    status = {} if state is None else {"status": {"state": state, "conditions": conditions}}
    return {
        "hotLoad": {
            "spec": {"id": uid, "deploymentId": "d-1", "identity": identity, "type": "SNAPSHOT_TYPE_FULL", **spec},
            **status,
        }
    }


def exists(text: str = "already exists") -> tuple[int, dict[str, Any]]:
    return 409, {"code": 6, "message": text, "details": []}


def not_found(text: str = "not found") -> tuple[int, dict[str, Any]]:
    return 404, {"code": 5, "message": text, "details": []}
