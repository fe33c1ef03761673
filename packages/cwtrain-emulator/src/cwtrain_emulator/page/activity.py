"""What the page shows of requests: counts by the second, and the last things that went wrong. In memory, bounded."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal

from starlette.types import ASGIApp, Message, Receive, Scope, Send

__all__ = ["KEPT_SECONDS", "WE_HUNG_UP", "Activity", "LogProblems", "Problem", "Watched"]

KEPT_SECONDS = 300
"""For how long counts are kept."""

WE_HUNG_UP = "cwtrain_emulator.we_hung_up"
"""In a request's scope where a fault closed the connection: else it was the caller."""

_KEPT_PROBLEMS = 40
_KEPT_BODY_BYTES = 4096
_LONGEST_TEXT = 500

Kind = Literal["endpoint", "api"]
_COLUMNS: dict[tuple[Kind, bool], int] = {
    ("endpoint", False): 0,
    ("endpoint", True): 1,
    ("api", False): 2,
    ("api", True): 3,
}


@dataclass
class Problem:
    """Something that went wrong, `count` times alike. `status`: 0 where no answer was given, None outside requests."""

    source: str
    what: str
    status: int | None
    message: str
    request_id: str
    at: float
    count: int = 1


class Activity:
    """Counts of requests and the last problems. `clock` gives seconds since the epoch. Safe to use from any thread."""

    def __init__(self, *, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seconds: OrderedDict[int, list[int]] = OrderedDict()
        self._totals = [0, 0, 0, 0]
        self._problems: OrderedDict[tuple[str, str, int | None, str], Problem] = OrderedDict()
        self.started_at = clock()

    def answered(self, kind: Kind, *, refused: bool) -> None:
        """Count a request that has ended."""
        column = _COLUMNS[kind, refused]
        second = int(self._clock())
        with self._lock:
            self._totals[column] += 1
            self._seconds.setdefault(second, [0, 0, 0, 0])[column] += 1
            while next(iter(self._seconds)) < second - KEPT_SECONDS:
                self._seconds.popitem(last=False)

    def problem(self, source: str, what: str, *, status: int | None, message: str, request_id: str = "") -> None:
        """Note a problem; one like an earlier one is counted there."""
        what, message = _shortened(what), _shortened(message)
        key = (source, what, status, message)
        with self._lock:
            earlier = self._problems.pop(key, None)
            count = 1 if earlier is None else earlier.count + 1
            self._problems[key] = Problem(source, what, status, message, request_id, self._clock(), count)
            if len(self._problems) > _KEPT_PROBLEMS:
                self._problems.popitem(last=False)

    def counts(self) -> dict[str, Any]:
        """Return the counts: for each second with any, and since the start.

        Each is [endpoint answered, endpoint refused, API answered, API refused]; a second's row begins with its time.
        """
        oldest = int(self._clock()) - KEPT_SECONDS
        with self._lock:
            rows = [[second, *counts] for second, counts in self._seconds.items() if second >= oldest]
            return {"seconds": sorted(rows), "total": list(self._totals)}

    def problems(self) -> list[Problem]:
        """Return the last problems, newest first."""
        with self._lock:
            return list(reversed(self._problems.values()))


class LogProblems(logging.Handler):
    """Notes the service's own warnings and errors."""

    def __init__(self, activity: Activity) -> None:
        super().__init__(logging.WARNING)
        self._activity = activity

    def emit(self, record: logging.LogRecord) -> None:
        """Note one record."""
        message = record.getMessage()
        if record.exc_info and record.exc_info[1] is not None:
            message += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        what = record.name.removeprefix("cwtrain_emulator.")
        self._activity.problem("service", what, status=None, message=message)


class Watched:
    """An application whose requests are counted and whose refusals are kept; the emulator's own routes are left out."""

    def __init__(self, app: ASGIApp, activity: Activity) -> None:
        self._app = app
        self._activity = activity

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one connection event."""
        kind = _kind(scope)
        if kind is None:
            await self._app(scope, receive, send)
            return
        status = 0
        ended = left = False
        body = bytearray()

        async def receive_and_look() -> Message:
            nonlocal left
            message = await receive()
            left = left or (message["type"] == "http.disconnect" and not ended and not scope.get(WE_HUNG_UP))
            return message

        async def send_and_look(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                ended = not message.get("more_body", False)
                if status >= 400 and len(body) < _KEPT_BODY_BYTES:
                    body.extend(message.get("body", b"")[:_KEPT_BODY_BYTES])
            await send(message)

        try:
            await self._app(scope, receive_and_look, send_and_look)
        finally:
            # A caller that went away was refused nothing.
            refused = not left and (status >= 400 or not ended)
            self._activity.answered(kind, refused=refused)
            if refused:
                self._note(scope, status, ended=ended, body=bytes(body))

    def _note(self, scope: Scope, status: int, *, ended: bool, body: bytes) -> None:
        message = _message(status, body) if ended else "the connection ended before the answer did"
        what = f"{scope['method']} {scope['path']}"
        self._activity.problem("request", what, status=status, message=message, request_id=scope.get("request_id", ""))


def _kind(scope: Scope) -> Kind | None:
    """Return what a request counts as; None for what is not counted."""
    if scope["type"] != "http":
        return None
    path: str = scope["path"]
    if path.startswith("/v1/"):
        return "endpoint"
    return None if path in ("/", "/favicon.ico") or path.startswith("/emulator/") else "api"


def _message(status: int, body: bytes) -> str:
    """Return what a refusal says: the API's message, the endpoint's, or the status's own words."""
    try:
        values = json.loads(body)
        found = values["error"]["message"] if isinstance(values.get("error"), dict) else values["message"]
        if isinstance(found, str) and found:
            return found
    except (ValueError, KeyError, AttributeError, RecursionError):
        pass
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "refused"


def _shortened(text: str) -> str:
    return text if len(text) <= _LONGEST_TEXT else f"{text[: _LONGEST_TEXT - 1]}…"
