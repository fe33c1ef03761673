"""Faults of the control plane and of the endpoint: a layer in front of an application, and a way to hang up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import MutableMapping
from typing import Any, cast

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from cwtrain_emulator.api.errors import ApiError
from cwtrain_emulator.faults import Fault, FaultBook
from cwtrain_emulator.gateway.errors import GatewayError
from cwtrain_emulator.page.activity import WE_HUNG_UP

__all__ = ["Faulty", "HangUpProtocol"]

_LINGER_SECONDS = 1.0
_LINE_ENDS = {"lf": b"\n", "crlf": b"\r\n", "cr": b"\r"}
_TRANSPORTS: MutableMapping[tuple[Any, Any], asyncio.Transport] = {}
_CODES = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    412: "FAILED_PRECONDITION",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    501: "UNIMPLEMENTED",
    502: "UNAVAILABLE",
    503: "UNAVAILABLE",
}
_HTML = (
    "<!DOCTYPE html>\n<html><head><title>{status}</title></head>\n"
    "<body><center><h1>{status}</h1></center><hr><center>emulated proxy</center></body></html>\n"
)


class HangUpProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, which remembers its transport so that a fault can close a connection in mid-answer.

    What is no HTTP is refused so that the refusal is heard: a connection closed while the caller still sends is
    reset, and a reset may take the answer with it. What is written for a caller that has gone goes nowhere.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Note the connection."""
        super().connection_made(cast("asyncio.Transport", _Quiet(transport)))
        self._refused = False
        self._key = (self.client, self.server)
        _TRANSPORTS[self._key] = transport

    def data_received(self, data: bytes) -> None:
        """Take the next bytes; those after a refusal go nowhere."""
        if not self._refused:
            super().data_received(data)

    def send_400_response(self, msg: str) -> None:
        """Refuse what is no HTTP; the caller may send on for a moment."""
        self._refused = True
        body = msg.encode("ascii", "replace")
        head = f"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain; charset=utf-8\r\nContent-Length: {len(body)}\r\n"
        self.transport.write(head.encode() + b"Connection: close\r\n\r\n" + body)
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.loop.call_later(_LINGER_SECONDS, self.transport.close)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        _TRANSPORTS.pop(self._key, None)
        super().connection_lost(exc)


class _Quiet:
    """A transport on which writing to a caller that has gone is nothing: asyncio logs a line for each write."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Faulty:
    """An application with the faults of `api` and `endpoint` in front of it; the emulator's own routes are exempt."""

    def __init__(self, app: ASGIApp, book: FaultBook) -> None:
        self._app = app
        self._book = book

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        target = _target(scope)
        if target is None:
            await self._app(scope, receive, send)
            return
        cut: _Cut | None = None
        answer = send
        for fault in self._book.take(target, method=scope["method"], path=scope["path"]):
            if fault.kind == "latency":
                await asyncio.sleep(fault["seconds"])
            elif fault.kind == "hold":
                answer = _Held(answer, receive, self._book, fault)
            elif fault.kind == "frames":
                answer = _Framed(answer, fault)
            elif fault.kind == "cut":
                answer = cut = _Cut(answer, scope, fault["bytes"])
            elif fault.kind == "drop":
                await _read_all(receive)
                _hang_up(scope)
                await _disconnected(receive)
                return
            else:
                await _read_all(receive)
                await _answer(send, target, fault)
                return
        await self._app(scope, receive, answer)
        if cut is not None and cut.over:
            await _disconnected(receive)


class _Held:
    """Sends an answer after a while; there is no while for a caller that has gone."""

    def __init__(self, send: Send, receive: Receive, book: FaultBook, fault: Fault) -> None:
        self._send = send
        self._receive = receive
        self._book = book
        self._fault: Fault | None = fault

    async def __call__(self, message: Message) -> None:
        fault, self._fault = self._fault, None
        if fault is not None:
            waits = [asyncio.ensure_future(self._book.held(fault)), asyncio.ensure_future(_disconnected(self._receive))]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
        await self._send(message)


class _Framed:
    """Sends a streamed answer in other frames; any other answer as it is."""

    def __init__(self, send: Send, fault: Fault) -> None:
        self._send = send
        self._streams = False
        self._end = _LINE_ENDS[fault["ends"]]
        self._padding = b'"padding":"' + b"." * fault["bytes"] + b'",' if fault["bytes"] else b""
        before = [f": {fault['comment']}\n\n"] if fault["comment"] is not None else []
        if fault["event"] is not None:
            before.append(f"event: {fault['event']}\ndata: {fault['note']}\n\n")
        self._before = "".join(before).encode()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._streams = any(
                name.lower() == b"content-type" and b"event-stream" in value for name, value in message["headers"]
            )
        elif self._streams and message.get("body"):
            events = message["body"].split(b"\n\n")[:-1]
            body = b"".join(self._before + self._padded(event) + b"\n\n" for event in events)
            message = {**message, "body": body.replace(b"\n", self._end)}
        await self._send(message)

    def _padded(self, event: bytes) -> bytes:
        return event.replace(b"data: {", b"data: {" + self._padding, 1) if event.startswith(b"data: {") else event


class _Cut:
    """Sends an answer up to some bytes of its body and closes the connection; 0 bytes: not even the head."""

    def __init__(self, send: Send, scope: Scope, left: int) -> None:
        self._send = send
        self._scope = scope
        self._left = left
        self._begun = left > 0
        self.over = False

    async def __call__(self, message: Message) -> None:
        if self.over:
            return
        if message["type"] == "http.response.start":
            if self._begun:
                await self._send(message)
            return
        body: bytes = message.get("body", b"")
        last = not message.get("more_body", False)
        if len(body) < self._left and not last:
            self._left -= len(body)
            await self._send(message)
            return
        if self._begun:
            # One byte less than the whole: an answer that fits is cut all the same.
            part = body[: min(self._left, max(len(body) - 1, 0))]
            await self._send({"type": "http.response.body", "body": part, "more_body": True})
        self.over = True
        _hang_up(self._scope, flush=self._begun)


def _target(scope: Scope) -> str | None:
    if scope["type"] != "http":
        return None
    path: str = scope["path"]
    if path.startswith("/v1/"):
        return "endpoint"
    return "api" if path.startswith("/v1alpha1/") else None


async def _read_all(receive: Receive) -> None:
    """Take the request's body in: what answers before that may not be heard."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body", False):
            return


async def _disconnected(receive: Receive) -> None:
    """Wait until the server has noticed that the connection is gone: it would complain about what is missing."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _hang_up(scope: Scope, *, flush: bool = False) -> None:
    scope[WE_HUNG_UP] = True
    transport = _TRANSPORTS.get((scope["client"], scope["server"]))
    if transport is not None:
        if flush:
            transport.close()
        else:
            transport.abort()


async def _answer(send: Send, target: str, fault: Fault) -> None:
    status = 200 if fault.kind == "error_body" else fault["status"]
    headers = [(b"retry-after", fault["retry_after"].encode("latin-1", "replace"))] if fault["retry_after"] else []
    if fault.kind == "html":
        body, kind = _HTML.format(status=status).encode(), b"text/html"
    else:
        body, kind = _error(target, 503 if status == 200 else status, fault["message"]), b"application/json"
    if status in (204, 304):
        body = b""
    headers += [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _error(target: str, status: int, message: str | None) -> bytes:
    """Return a refusal in the target's own style."""
    text = message or "an emulated fault"
    if target == "endpoint":
        return json.dumps(GatewayError(status, text).body).encode()
    code = _CODES.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")
    return json.dumps(ApiError(code, text, status=status).body).encode()
