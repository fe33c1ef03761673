"""How much one replica does at once, how fast, and what the request waited for.

A slot is one sequence: a request with n choices of p prompts takes n * p of them (at most all). Requests that find too
few free wait in one line; a request that finds the line full is refused. `between_tokens` is called by whoever makes
tokens, after each one that is not the last.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextvars import ContextVar
from dataclasses import dataclass, field

__all__ = ["Capacity", "Full", "Limits", "Turn", "between_tokens"]

Interruption = Callable[[int], Awaitable[None]]


class Full(Exception):
    """There is no slot, and no place in the line either."""


@dataclass(frozen=True)
class Limits:
    """What a replica can do. None: no limit.

    `slots` sequences at once, `queue` requests in line, `tokens_per_second` for each sequence.
    """

    slots: int | None = None
    queue: int | None = None
    tokens_per_second: float | None = None


@dataclass
class Turn:
    """One admitted request: when it came, when it got its slots, when its first token was there. Seconds, monotonic."""

    received: float
    started: float
    seconds_per_token: float = 0.0
    received_at: float = field(default_factory=time.time)
    steps: int = 0
    first_token: float | None = None
    interruption: Interruption | None = None

    async def step(self) -> None:
        """Note one more token of each sequence, and wait until it is due."""
        self.steps += 1
        if self.interruption is not None:
            await self.interruption(self.steps)
        due = self.started + self.steps * self.seconds_per_token
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        if self.first_token is None:
            self.first_token = time.monotonic()

    def timing(self) -> dict[str, float]:
        """Return the fields of ``nvext.timing``, in milliseconds, as Dynamo names them."""
        now = time.monotonic()
        first = now if self.first_token is None else self.first_token
        return {
            "request_received_ms": int(self.received_at * 1000),
            "prefill_wait_time_ms": _ms(self.started - self.received),
            "prefill_time_ms": _ms(first - self.started),
            "ttft_ms": _ms(first - self.received),
            "total_time_ms": _ms(now - self.received),
        }


_TURN: ContextVar[Turn | None] = ContextVar("turn", default=None)


async def between_tokens() -> None:
    """Let others run, and wait until the next token is due."""
    turn = _TURN.get()
    if turn is None:
        await asyncio.sleep(0)
    else:
        await turn.step()


class Capacity:
    """The slots of one replica and the line before them. Lives on one event loop."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._used = 0
        self._line: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def queued(self) -> int:
        """Requests that wait."""
        return len(self._line)

    @contextlib.asynccontextmanager
    async def admit(self, sequences: int, interruption: Interruption | None = None) -> AsyncIterator[Turn]:
        """Wait for the slots and hold them; raise Full. The last token is due before the slots are given back.

        `interruption` is awaited after each token with the number of tokens so far.
        """
        received = time.monotonic()
        slots = self._limits.slots
        wanted = 0 if slots is None else min(max(sequences, 1), slots)
        if self._line or (slots is not None and self._used + wanted > slots):
            if self._limits.queue is not None and len(self._line) >= self._limits.queue:
                raise Full(f"{self._used} of {slots} slots are taken and {len(self._line)} requests wait")
            await self._wait(wanted)
        else:
            self._used += wanted
        rate = self._limits.tokens_per_second
        turn = Turn(received, time.monotonic(), 1 / rate if rate else 0.0, interruption=interruption)
        token = _TURN.set(turn)
        try:
            yield turn
        finally:
            _TURN.reset(token)
            self._used -= wanted
            self._advance()

    async def _wait(self, wanted: int) -> None:
        place = (wanted, asyncio.get_running_loop().create_future())
        self._line.append(place)
        try:
            await place[1]
        except asyncio.CancelledError:
            if place in self._line:
                self._line.remove(place)
            else:
                # The slots had come just then.
                self._used -= wanted
            self._advance()
            raise

    def _advance(self) -> None:
        """Give what is free to those in front of the line."""
        slots = self._limits.slots
        while self._line and (slots is None or self._used + self._line[0][0] <= slots):
            wanted, place = self._line.popleft()
            self._used += wanted
            place.set_result(None)


def _ms(seconds: float) -> float:
    return round(1000 * seconds, 3)
