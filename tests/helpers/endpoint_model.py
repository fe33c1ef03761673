"""A model of an endpoint on a virtual clock, in place of HTTP: slots, a queue, outages, and misfortunes by chance."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Any

import attrs

from cwtrain_rollout.transport import NoAnswer, Reply, StreamedReply

MISFORTUNES = ("drop", "cut", "503", "slow", "html", "error")


@attrs.define(kw_only=True, slots=False)
class EndpointModel:
    """``service`` is the seconds of a choice; ``misfortune`` the chance of each kind; ``outage`` is (from, to)."""

    service: float = 1.0
    slots: int = 10**9
    misfortune: float = 0.0
    outage: tuple[float, float] = (0.0, 0.0)
    gateway: bool = False
    """Whether somebody stands before it who answers 502 in an outage."""
    refuse_first: int = 0
    seed: int = 0
    bodies: list[dict[str, Any]] = attrs.field(factory=list)
    times: list[float] = attrs.field(factory=list)
    answered: Counter[str] = attrs.field(factory=Counter)
    happened: Counter[str] = attrs.field(factory=Counter)
    busy: int = 0
    queue: asyncio.Queue[asyncio.Future[None]] = attrs.field(factory=asyncio.Queue)
    running: int = 0

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        loop = asyncio.get_running_loop()
        request = json.loads(body)
        self.bodies.append(request)
        self.times.append(loop.time())
        self.running += 1
        try:
            return await self._serve(request, headers, loop)
        finally:
            self.running -= 1

    async def _serve(
        self, request: dict[str, Any], headers: Mapping[str, str], loop: asyncio.AbstractEventLoop
    ) -> Reply:
        if self.outage[0] <= loop.time() < self.outage[1]:
            if self.gateway:
                return Reply(status=502, body=b"<html>bad gateway</html>")
            raise NoAnswer("the connection failed (refused)")
        if self.refuse_first:
            self.refuse_first -= 1
            return Reply(status=429, body=b"busy")
        kind = None
        if self._rng.random() < self.misfortune * len(MISFORTUNES):
            kind = self._rng.choice(MISFORTUNES)
            self.happened[kind] += 1
        if kind == "drop":
            raise NoAnswer("the connection failed")
        if kind == "503":
            return Reply(status=503, body=b"overloaded", retry_after=1.0)
        n = int(request["n"])
        came = loop.time()
        await self._take(n)
        started = loop.time()
        try:
            took = self.service * self._rng.lognormvariate(0, 0.3) * (5 if kind == "slow" else 1)
            await asyncio.sleep(took)
        finally:
            self._give(n)
        if self.outage[0] <= loop.time() < self.outage[1]:
            raise NoAnswer("the answer was cut short", cut=True)
        if kind == "cut":
            raise NoAnswer("the answer was cut short", cut=True)
        if kind == "html":
            return Reply(status=200, body=b"<html>a proxy</html>")
        if kind == "error":
            return Reply(status=200, body=b'{"error": {"message": "engine died"}}')
        self.answered[headers["X-Request-Id"]] += 1
        return Reply(status=200, body=self._answer(request, n, started - came))

    def _answer(self, request: dict[str, Any], n: int, queued: float) -> bytes:
        choices = [
            {
                "index": index,
                "text": "t",
                "finish_reason": "stop",
                "token_ids": [request["prompt"][0], index],
                "logprobs": {"token_logprobs": [-0.5, -0.25]},
            }
            for index in range(n)
        ]
        timing = {"prefill_wait_time_ms": 1000 * queued}
        return json.dumps({"choices": choices, "nvext": {"timing": timing}}).encode()

    async def _take(self, n: int) -> None:
        # Waits in line for its slots; the line is as long as it needs to be in these tests.
        while self.busy + n > self.slots:
            turn = asyncio.get_running_loop().create_future()
            self.queue.put_nowait(turn)
            await turn
        self.busy += n

    def _give(self, n: int) -> None:
        self.busy -= n
        while not self.queue.empty():
            turn = self.queue.get_nowait()
            if not turn.done():
                turn.set_result(None)

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """One token every ``service`` seconds, for ever."""
        self.bodies.append(json.loads(body))
        self.running += 1

        async def events() -> AsyncIterator[bytes]:
            token = 0
            while True:
                await asyncio.sleep(self.service)
                token += 1
                choice = {
                    "index": 0,
                    "text": "t",
                    "token_ids": [token],
                    "logprobs": {"token_logprobs": [-0.5]},
                    "finish_reason": "length" if token == self.bodies[-1]["max_tokens"] else None,
                }
                yield json.dumps({"choices": [choice]}).encode()
                if choice["finish_reason"]:
                    return

        try:
            yield StreamedReply(reply=None, events=events())
        finally:
            self.running -= 1

    async def aclose(self) -> None:
        """Nothing is open."""
