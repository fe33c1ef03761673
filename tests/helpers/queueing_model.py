"""A server with slots and a queue, and a client that keeps a window full, on a clock that jumps: seeded and exact."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import attrs

from cwtrain_rollout.window import Window


@attrs.define
class Model:
    """One run. `slots` may be changed between two calls of `run`; the queue is always a quarter of them."""

    window: Window
    slots: int
    service: float
    """Mean seconds that a choice takes once it has a slot."""
    seed: int = 0
    spread: float = 0.3
    timed: bool = True
    """Whether answers say how long they queued."""
    now: float = 0.0
    refused: int = 0
    sent: int = 0
    finished: list[float] = attrs.field(factory=list)
    sizes: list[tuple[float, int]] = attrs.field(factory=list)
    _events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = attrs.field(factory=list)
    _number: int = 0
    _busy: int = 0
    _queue: deque[tuple[float, int]] = attrs.field(factory=deque)
    _in_flight: int = 0
    _rng: random.Random = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._rng = random.Random(self.seed)

    def run(self, choices: int) -> None:
        """Go on until so many more choices are answered."""
        target = len(self.finished) + choices
        self._fill()
        while len(self.finished) < target:
            self.now, _, call, args = heapq.heappop(self._events)
            call(*args)
            self._fill()

    def _at(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        self._number += 1
        heapq.heappush(self._events, (self.now + delay, self._number, call, args))

    def _fill(self) -> None:
        while self._in_flight < self.window.size:
            self._in_flight += 1
            self._send(0, self.window.epoch)
        self.window.was_the_limit()
        if not self.sizes or self.sizes[-1][1] != self.window.size:
            self.sizes.append((self.now, self.window.size))

    def _send(self, tries: int, epoch: int) -> None:
        self.sent += 1
        if self._busy < self.slots:
            self._start(self.now, epoch)
        elif len(self._queue) < self.slots // 4:
            self._queue.append((self.now, epoch))
        else:
            # As the sampler does it: the slot is kept over the pause, and the request counts for its first epoch.
            self.refused += 1
            self.window.refused(epoch)
            pause = min(10.0, 0.25 * 2**tries) * (0.5 + 0.5 * self._rng.random())
            self._at(pause, self._send, tries + 1, epoch)

    def _start(self, came: float, epoch: int) -> None:
        self._busy += 1
        took = self.service * self._rng.lognormvariate(-(self.spread**2) / 2, self.spread)
        self._at(took, self._end, epoch, self.now - came)

    def _end(self, epoch: int, queued: float) -> None:
        self._busy -= 1
        self._in_flight -= 1
        self.finished.append(self.now)
        self.window.answered(epoch, 1, queued if self.timed else None)
        while self._queue and self._busy < self.slots:
            self._start(*self._queue.popleft())


def throughput(finished: list[float]) -> float:
    """Return choices per second between the first and the last of these times."""
    return (len(finished) - 1) / (finished[-1] - finished[0])
