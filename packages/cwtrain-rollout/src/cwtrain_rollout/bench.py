"""What an endpoint gives under load: groups for some seconds, as fast as the window lets them through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from cwtrain.errors import ConfigError
from cwtrain_rollout.protocol import Group, SamplingParams
from cwtrain_rollout.sampler import Sampler

__all__ = ["Bench"]

_TICK = 0.25
_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


class Bench:
    """Groups of ``n`` samples of ``prompts``, sent through ``sampler`` for ``seconds``; ``say`` hears how it goes.

    ``run`` does it once. ``result`` has what was measured, also when ``run`` was cancelled in the middle.
    """

    def __init__(
        self,
        sampler: Sampler,
        prompts: Sequence[Sequence[int]],
        *,
        n: int,
        seconds: float,
        sampling: SamplingParams,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if not prompts:
            raise ConfigError("there is nothing to send")
        self._sampler, self._prompts, self._n, self._seconds = sampler, prompts, n, seconds
        self._sampling, self._say = sampling, say
        self._before = sampler.totals.as_json()
        self._began: float | None = None
        self._rates: dict[str, float] | None = None
        self._whole = False
        self._latencies: list[float] = []
        self._window: list[dict[str, float]] = []
        self._running: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Send groups for the whole time, then let them end; cancelled, end them at once. Raises ``RolloutError``."""
        self._began = time.monotonic()
        try:
            await self._keep_busy(self._began)
            self._end()
            await asyncio.gather(*self._running)
            self._whole = True
        finally:
            self._end()
            for task in self._running:
                task.cancel()
            await asyncio.gather(*self._running, return_exceptions=True)

    def result(self) -> dict[str, Any] | None:
        """Return rates, latencies of groups, and the window over time; None where nothing has been sent.

        Requests, tokens and groups are those that were answered; where no group was, its latencies are None.
        ``interrupted``: it was ended before all was answered, and the figures are those of what was.
        """
        if self._rates is None:
            return None
        after = self._sampler.totals.as_json()
        return {
            "interrupted": not self._whole,
            **self._rates,
            "latency_seconds": {name: _percentile(self._latencies, share) for name, share in _PERCENTILES.items()},
            "window": self._window,
            "totals": {name: round(after[name] - self._before[name], 3) for name in after},
        }

    async def _keep_busy(self, began: float) -> None:
        sampler, sent, next_tick = self._sampler, 0, began
        while (now := time.monotonic()) - began < self._seconds:
            # Twice the window wait for their turn, so that the window is the limit.
            while len(self._running) * self._n < 2 * sampler.window + self._n:
                self._running.add(asyncio.create_task(self._one(sent)))
                sent += 1
            if now >= next_tick:
                self._window.append(
                    {"seconds": round(now - began, 2), "window": sampler.window, "in_flight": sampler.in_flight}
                )
                self._say(f"{now - began:5.1f} s: window {sampler.window}, {len(self._latencies)} groups done")
                next_tick += max(_TICK, self._seconds / 200)
            done, self._running = await asyncio.wait(self._running, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()

    async def _one(self, number: int) -> None:
        started = time.monotonic()
        prompt = tuple(self._prompts[number % len(self._prompts)])
        await self._sampler.sample([Group(prompt=prompt, n=self._n)], self._sampling)
        self._latencies.append(time.monotonic() - started)

    def _end(self) -> None:
        """Note what was done while the endpoint was kept busy; what comes after is no part of the rates."""
        if self._rates is not None or self._began is None:
            return
        busy = max(time.monotonic() - self._began, 1e-6)
        totals, before, finished = self._sampler.totals, self._before, len(self._latencies)
        self._rates = {
            "seconds": round(busy, 3),
            "groups": finished,
            "groups_per_second": round(finished / busy, 3),
            "requests_per_second": round((totals.answers - before["answers"]) / busy, 3),
            "tokens_per_second": round((totals.completion_tokens - before["completion_tokens"]) / busy, 1),
        }


def _percentile(values: Sequence[float], share: float) -> float | None:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else None
