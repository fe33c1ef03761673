"""One batch of rollouts in a fresh process, with what it cost: python sampler_op.py '{"who": ..., "url": ..., ...}'

WHO is `ours` (`cwtrain_rollout.Sampler`) or `peer` (the published wheel's `CompletionSampler`), each called as its
documentation says. Imports, the client and one request to warm up are outside the clock. Prints JSON: wall and CPU
seconds, peak MiB, and sums over what came, for the check.
"""

from __future__ import annotations

import asyncio
import json
import resource
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

Choice = tuple[int, tuple[int, ...], tuple[float, ...]]
PROMPT = list(range(1, 257))


async def ours(task: dict[str, Any]) -> tuple[Callable[[int], Awaitable[list[Any]]], Callable[[Any], list[Choice]]]:
    """Return a call for so many groups, and how to take its results apart."""
    from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams

    concurrency = task["concurrency"] * task["n"]
    sampler = Sampler(RolloutConfig(base_url=task["url"], model="m", concurrency=concurrency))
    sampling = SamplingParams(max_tokens=task["tokens"])

    async def call(count: int) -> list[Any]:
        return await sampler.sample([Group(prompt=PROMPT, n=task["n"]) for _ in range(count)], sampling)

    return call, lambda group: [(one.index, one.token_ids, one.logprobs) for one in group.samples]


async def peer(task: dict[str, Any]) -> tuple[Callable[[int], Awaitable[list[Any]]], Callable[[Any], list[Choice]]]:
    """Return a call for so many groups, and how to take its results apart."""
    from cwtrain.integrations.rollout import CompletionSampler, RolloutConfig

    config = RolloutConfig(base_url=task["url"], model="m", concurrency=task["concurrency"])
    sampler = CompletionSampler(config)

    async def call(count: int) -> list[Any]:
        one = [sampler.sample(PROMPT, task["n"], max_tokens=task["tokens"], temperature=1.0) for _ in range(count)]
        return list(await asyncio.gather(*one))

    return call, lambda group: [(one.index, one.token_ids, one.token_logprobs) for one in group]


async def main() -> None:
    """Run one batch."""
    task = json.loads(sys.argv[1])
    call, apart = await (ours if task["who"] == "ours" else peer)(task)
    await call(1)
    began, before = time.perf_counter(), cpu()
    found = await call(task["groups"])
    wall, spent = time.perf_counter() - began, cpu() - before
    choices = [choice for group in found for choice in apart(group)]
    print(
        json.dumps(
            {
                "wall": wall,
                "cpu": spent,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
                "groups": len(found),
                "indices": sum(index for index, _, _ in choices),
                "ids": sum(sum(ids) for _, ids, _ in choices),
                "tokens": sum(len(ids) for _, ids, _ in choices),
                "logprobs": sum(sum(values) for _, _, values in choices),
            }
        )
    )


def cpu() -> float:
    """Return the CPU seconds of this process."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    asyncio.run(main())
