"""A record of requests and answers for debugging, one JSON line for each, and its replay in place of an endpoint.

Headers are not recorded, and the key is hidden where an answer repeats it. The file holds prompts and answers.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from cwtrain._process import renew_locks_after_fork
from cwtrain.errors import ConfigError
from cwtrain_rollout.transport import ListsModels, NoAnswer, Reply, StreamedReply, Transport

__all__ = ["Recorder", "Replay"]

log = logging.getLogger("cwtrain.rollout")

_MODELS = b'{"GET": "/models"}'
"""Stands in a recording for the request for the endpoint's models."""
_NO_MODELS = Reply(status=404, body=b"the models are not listed")
_NOT_COMPARED = ("seed", "cache_salt", "nvext")
"""Fields of a request that another run has other values of."""


class _Line(msgspec.Struct):
    at: str
    request_id: str
    request: dict[str, Any]
    status: int | None = None
    retry_after: float | None = None
    queue_seconds: float | None = None
    content_type: str = ""
    answer: str | None = None
    events: list[str] | None = None
    no_answer: str | None = None
    cut: bool = False


class Recorder:
    """Another transport, with every request and what came of it appended to a file.

    A file that cannot be written any more (a full disk, a limit, a mount that is gone) ends the recording with one
    warning, and never a rollout.
    """

    def __init__(
        self, inner: Transport, path: str | os.PathLike[str], *, hide: Callable[[str], str] = lambda text: text
    ) -> None:
        self._inner, self._path, self._hide = inner, Path(path), hide
        self._lock = threading.Lock()
        renew_locks_after_fork(self, "_lock")
        self._stopped = False
        try:
            with self._path.open("ab") as file:
                # A line that another process could not end would take the next one along.
                self._within_a_line = file.seekable() and file.tell() > 0 and not _ends_a_line(self._path)
        except OSError as exc:
            raise ConfigError(
                f"CWTRAIN_ROLLOUT_RECORD={str(self._path)!r} cannot be written: {exc.strerror}",
                hint="check path and mode",
            ) from exc

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Send it on and note what came."""
        return await self._noted(self._line(body, headers), self._inner.post(body, headers))

    async def models(self, headers: Mapping[str, str]) -> Reply:
        """Send it on and note what came; 404 where the other transport has no such call."""
        if not isinstance(self._inner, ListsModels):
            return _NO_MODELS
        return await self._noted(self._line(_MODELS, headers), self._inner.models(headers))

    async def _noted(self, line: _Line, sent: Coroutine[Any, Any, Reply]) -> Reply:
        try:
            reply = await sent
        except NoAnswer as exc:
            line.no_answer, line.cut = self._hide(str(exc)), exc.cut
            raise
        else:
            line.status, line.retry_after, line.queue_seconds = reply.status, reply.retry_after, reply.queue_seconds
            line.content_type = self._hide(reply.content_type)
            line.answer = self._hide(reply.body.decode("utf-8", "replace"))
            return reply
        finally:
            self._write(line)

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """Send it on and note what came, as far as it was read."""
        line = self._line(body, headers)
        events: list[str] | None = None

        async def noted(inner: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
            async for event in inner:
                assert events is not None
                events.append(self._hide(event.decode("utf-8", "replace")))
                yield event

        try:
            async with self._inner.stream(body, headers) as streamed:
                line.status = 200 if streamed.reply is None else streamed.reply.status
                if streamed.reply is not None:
                    line.answer = self._hide(streamed.reply.body.decode("utf-8", "replace"))
                    line.retry_after, line.content_type = streamed.reply.retry_after, streamed.reply.content_type
                    yield streamed
                else:
                    assert streamed.events is not None
                    events, line.queue_seconds = [], streamed.queue_seconds
                    yield StreamedReply(reply=None, events=noted(streamed.events), queue_seconds=streamed.queue_seconds)
        except NoAnswer as exc:
            line.no_answer, line.cut = self._hide(str(exc)), exc.cut
            raise
        finally:
            line.events = events
            self._write(line)

    async def aclose(self) -> None:
        """Close the other transport."""
        await self._inner.aclose()

    def _line(self, body: bytes, headers: Mapping[str, str]) -> _Line:
        at = dt.datetime.now(dt.UTC).isoformat(timespec="milliseconds")
        return _Line(at=at, request_id=headers.get("X-Request-Id", ""), request=msgspec.json.decode(body))

    def _write(self, line: _Line) -> None:
        if self._stopped:
            return
        raw = msgspec.json.encode(line) + b"\n"
        with self._lock:
            if self._stopped:
                return
            whole: int | None = None
            try:
                with self._path.open("ab") as file:
                    whole = file.tell() if file.seekable() else None
                    file.write(b"\n" + raw if self._within_a_line else raw)
                self._within_a_line = False
            except OSError as exc:
                self._stopped = True
                log.warning(
                    "CWTRAIN_ROLLOUT_RECORD=%r cannot be written any more: %s. Recording has stopped; rollouts go on",
                    str(self._path),
                    exc.strerror or exc,
                )
                if whole is not None:
                    # What was written of the last line is of no use.
                    with contextlib.suppress(OSError):
                        os.truncate(self._path, whole)


def _ends_a_line(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"
    except OSError:  # it may be written and not read
        return True


class Replay:
    """A recorded file in place of an endpoint: ``Sampler(config, transport=Replay(path))``.

    A request gets the answers of those recorded ones that asked the same (seeds and salts aside), in their order. A
    line that was not written to its end is left out with a warning.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lines: dict[bytes, deque[_Line]] = {}
        decoder = msgspec.json.Decoder(_Line)
        try:
            with self._path.open("rb") as file:
                for number, raw in enumerate(file, 1):
                    if not raw.strip():
                        continue
                    try:
                        line = decoder.decode(raw.rstrip(b"\n"))
                    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
                        # Cut short: it has no end, or another process ended it for the next line's sake.
                        if raw.endswith(b"\n") and "truncated" not in str(exc):
                            raise
                        log.warning("Line %d of %s was not written to its end, and is left out", number, self._path)
                        continue
                    self._lines.setdefault(_key(line.request), deque()).append(line)
        except (OSError, msgspec.DecodeError, UnicodeDecodeError) as exc:
            raise ConfigError(
                f"{self._path} cannot be replayed: {exc}", hint="give a file that CWTRAIN_ROLLOUT_RECORD wrote"
            ) from exc

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Return what came of the next recorded request like this one."""
        line = self._next(body)
        return self._reply(line)

    async def models(self, headers: Mapping[str, str]) -> Reply:
        """Return what came of the recorded request for the models; 404 where there was none."""
        lines = self._lines.get(_key(msgspec.json.decode(_MODELS)))
        return self._reply(lines.popleft()) if lines else _NO_MODELS

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """Return what came of the next recorded request like this one, event by event."""
        line = self._next(body)
        if line.events is None:
            yield StreamedReply(reply=self._reply(line), events=None)
            return

        async def events() -> AsyncIterator[bytes]:
            for event in line.events or ():
                yield event.encode()
            if line.no_answer is not None:
                raise NoAnswer(line.no_answer, cut=line.cut)

        yield StreamedReply(reply=None, events=events(), queue_seconds=line.queue_seconds)

    async def aclose(self) -> None:
        """Nothing is open."""

    def _next(self, body: bytes) -> _Line:
        lines = self._lines.get(_key(msgspec.json.decode(body)))
        if not lines:
            raise ConfigError(
                f"{self._path} holds no (further) answer to a request like this one",
                hint="replay with the configuration, prompts and sampling parameters of the recorded run",
            )
        return lines.popleft()

    def _reply(self, line: _Line) -> Reply:
        if line.status is None:
            raise NoAnswer(line.no_answer or "recorded without an answer", cut=line.cut)
        return Reply(
            status=line.status,
            body=(line.answer or "").encode(),
            retry_after=line.retry_after,
            queue_seconds=line.queue_seconds,
            content_type=line.content_type,
        )


def _key(request: dict[str, Any]) -> bytes:
    return msgspec.json.encode({name: request[name] for name in sorted(request) if name not in _NOT_COMPARED})
