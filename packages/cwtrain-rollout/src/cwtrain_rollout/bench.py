"""What an endpoint gives under load: groups for some seconds, as fast as the window lets them through."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from cwtrain.errors import ConfigError
from cwtrain_rollout.protocol import Group, SamplingParams
from cwtrain_rollout.sampler import Sampler

__all__ = ["measure"]

_TICK = 0.25


async def measure(
    sampler: Sampler,
    prompts: Sequence[Sequence[int]],
    *,
    n: int,
    seconds: float,
    sampling: SamplingParams,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return rates, latencies of groups, and the window over time. Sends groups for ``seconds``, then lets them end."""
    if not prompts:
        raise ConfigError("there is nothing to send")
    began = time.monotonic()
    latencies: list[float] = []
    window: list[dict[str, float]] = []
    before = sampler.totals.as_json()
    running: set[asyncio.Task[None]] = set()

    async def one(number: int) -> None:
        started = time.monotonic()
        await sampler.sample([Group(prompt=tuple(prompts[number % len(prompts)]), n=n)], sampling)
        latencies.append(time.monotonic() - started)

    sent, next_tick = 0, began
    try:
        while (now := time.monotonic()) - began < seconds:
            # Twice the window wait for their turn, so that the window is the limit.
            while len(running) * n < 2 * sampler.window + n:
                task = asyncio.create_task(one(sent))
                running.add(task)
                sent += 1
            if now >= next_tick:
                window.append(
                    {"seconds": round(now - began, 2), "window": sampler.window, "in_flight": sampler.in_flight}
                )
                say(f"{now - began:5.1f} s: window {sampler.window}, {len(latencies)} groups done")
                next_tick += max(_TICK, seconds / 200)
            done, running = await asyncio.wait(running, timeout=_TICK, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        busy = time.monotonic() - began
        finished = len(latencies)
        tokens = sampler.totals.completion_tokens - before["completion_tokens"]
        requests = sampler.totals.requests - before["requests"]
        await asyncio.gather(*running)
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    after = sampler.totals.as_json()
    return {
        "seconds": round(busy, 3),
        "groups": finished,
        "groups_per_second": round(finished / busy, 3),
        "requests_per_second": round(requests / busy, 3),
        "tokens_per_second": round(tokens / busy, 1),
        "latency_seconds": {name: _percentile(latencies, share) for name, share in _PERCENTILES.items()},
        "window": window,
        "totals": {name: round(after[name] - before[name], 3) for name in after},
    }


_PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 4) if ordered else 0.0
