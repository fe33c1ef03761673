"""What the check programs of the field cases about rollouts call, each with the signature that its case asks for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams

PARAMS = SamplingParams(max_tokens=8)


def _sampler(base_url: str, **settings: Any) -> Sampler:
    config = RolloutConfig(
        base_url=base_url, model="m", **{"logprobs_mode": "processed", "concurrency": 64, **settings}
    )
    return Sampler(config)


def answers(base_url: str, n: int) -> list[tuple[tuple[int, ...], tuple[float, ...], str]]:
    """`openai_answers`: n samples of one prompt, with few attempts so that a bad answer for ever is over soon."""
    sampler = _sampler(base_url, max_attempts=3)
    (group,) = sampler.sample_groups([Group(prompt=[1, 2, 3], n=n)], PARAMS)
    return [(sample.token_ids, sample.logprobs, sample.status.value) for sample in group.samples]


def pool(base_url: str, concurrency: int) -> Callable[[int], Awaitable[Any]]:
    """`pool_cap`: n requests of one sample at once."""
    sampler = _sampler(base_url, concurrency=concurrency)
    return lambda n: sampler.sample([Group(prompt=[1])] * n, PARAMS)


class _Loops:
    def __init__(self, base_url: str) -> None:
        self._sampler = _sampler(base_url, concurrency=2)

    async def sample(self) -> Any:
        return await self._sampler.sample([Group(prompt=[1])], PARAMS)


def loops(base_url: str) -> _Loops:
    """`event_loop`: one object for several event loops."""
    return _Loops(base_url)


def single(base_url: str) -> Callable[[], Any]:
    """`proxy_env` and `retry_after`: one sample a call."""
    sampler = _sampler(base_url)
    return lambda: sampler.sample_groups([Group(prompt=[1])], PARAMS)


def kept_alive(base_url: str) -> Callable[[], Any]:
    """`keepalive_race`: one sample a call, in an event loop that goes on, so that connections are used again."""
    sampler = _sampler(base_url)
    runner = asyncio.Runner()
    return lambda: runner.run(sampler.sample([Group(prompt=[1])], PARAMS))
