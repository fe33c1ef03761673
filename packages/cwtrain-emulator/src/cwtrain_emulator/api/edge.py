"""The outermost layer of every port: whom it serves, and the id of each request."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cwtrain_emulator.s3.client import is_loopback

__all__ = ["Edge"]

_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,200}")


class Edge:
    """Refuses hosts that are not loopback while the emulator is bound to loopback; gives each request an id.

    A page in a browser can have its own host name resolve to 127.0.0.1; the Host header gives that away. The id is the
    client's ``X-Request-Id``, if it is usable, and comes back in the answer.
    """

    def __init__(self, app: ASGIApp, *, loopback_only: bool) -> None:
        self._app = app
        self._loopback_only = loopback_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"")
        request_id = given if _REQUEST_ID.fullmatch(given) else str(uuid.uuid4()).encode()
        scope["request_id"] = request_id.decode("ascii")
        if self._loopback_only and not is_loopback(_host_name(headers.get(b"host", b"").decode("latin-1"))):
            await _refuse(send, request_id)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _host_name(host: str) -> str:
    if host.startswith("["):
        return host.partition("]")[0]
    return host.partition(":")[0]


async def _refuse(send: Send, request_id: bytes) -> None:
    body: dict[str, Any] = {
        "code": 7,
        "message": "this emulator is bound to loopback and serves requests to loopback hosts only",
        "details": [],
    }
    raw = json.dumps(body).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
        (b"x-request-id", request_id),
    ]
    await send({"type": "http.response.start", "status": 403, "headers": headers})
    await send({"type": "http.response.body", "body": raw})
