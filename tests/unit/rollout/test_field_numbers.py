"""Alarms and figures. Kind: equal samples of a policy that is certain were told as a fault of the endpoint.

And: what was sent was counted as answered, and numbers of nothing were 0.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from cwtrain.plugins import Plugins
from cwtrain_rollout import Group, RolloutConfig, RolloutError, Sampler, SamplingParams
from cwtrain_rollout.bench import Bench
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.transport import NoAnswer, Reply
from helpers.endpoint_model import EndpointModel
from helpers.told_endpoint import ToldEndpoint, no_pause, sampler
from helpers.virtual_loop import run_virtually

PARAMS = SamplingParams(max_tokens=8)


def equal_choices(*logprobs: float, unlike: Sequence[int] = (), probe: float = 0.0) -> Any:
    """Answer every choice with the same tokens; requests at the places of `unlike` with others."""
    seen = [0]

    def tell(request: dict[str, Any]) -> Any:
        if request["max_tokens"] == 1 and request["top_k"] == 1:
            values = {"token_logprobs": [probe]}
            return {"choices": [{"index": 0, "token_ids": [1], "finish_reason": "length", "logprobs": values}]}
        place = seen[0]
        seen[0] += 1
        values = {"token_logprobs": list(logprobs)}
        tokens = list(range(len(logprobs)))
        return {
            "choices": [
                {
                    "index": index,
                    "token_ids": [*tokens[:-1], index if place in unlike else 7],
                    "finish_reason": "stop",
                    "logprobs": values,
                }
                for index in range(request["n"])
            ]
        }

    return tell


def alarms(caplog: pytest.LogCaptureFixture, tell: Any, *, groups: int, n: int = 8, **options: Any) -> int:
    params = options.pop("params", PARAMS)
    seed = options.pop("seed", 3)
    one = sampler(ToldEndpoint(tell), **options)
    with caplog.at_level("WARNING", "cwtrain.rollout"):
        for number in range(groups):
            one.sample_groups([Group(prompt=[1], n=n, seed=None if seed is None else seed + number)], params)
    return sum("equal" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("logprobs", [(0.0,), (-1e-6, 0.0), (-0.01, -0.001, 0.0), (0.0004,)])
def test_a_policy_that_is_certain_raises_no_alarm(
    logprobs: tuple[float, ...], caplog: pytest.LogCaptureFixture
) -> None:
    assert alarms(caplog, equal_choices(*logprobs), groups=12) == 0


def test_a_policy_that_is_nearly_certain_is_no_alarm_by_one_group(caplog: pytest.LogCaptureFixture) -> None:
    """0.9 to the power of 7 is a chance of one in two."""
    assert alarms(caplog, equal_choices(-0.05, -0.05), groups=1) == 0


@pytest.mark.parametrize(("logprobs", "n", "groups"), [((-1.0, -2.0), 8, 1), ((-0.3,) * 8, 8, 1), ((-1.0,), 2, 9)])
def test_an_endpoint_that_gives_every_choice_one_seed_is_told_once(
    logprobs: tuple[float, ...], n: int, groups: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups that could each be chance are none together."""
    assert alarms(caplog, equal_choices(*logprobs), groups=groups + 3, n=n) == 1


def test_an_endpoint_that_has_drawn_each_choice_by_itself_is_not_suspected(caplog: pytest.LogCaptureFixture) -> None:
    assert alarms(caplog, equal_choices(-3.0, -3.0, unlike=[0]), groups=6) == 0


@pytest.mark.parametrize("temperature", [0.0, 1e-6])
def test_greedy_samples_are_equal_by_themselves(temperature: float, caplog: pytest.LogCaptureFixture) -> None:
    """Their log-probs are those of temperature 1, and say nothing of how they were drawn."""
    params = SamplingParams(max_tokens=8, temperature=temperature)
    assert alarms(caplog, equal_choices(-2.0, -2.0), groups=4, params=params) == 0


def test_one_token_to_draw_from_is_no_alarm_whatever_log_probs_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    params = SamplingParams(max_tokens=8, top_k=1)
    assert alarms(caplog, equal_choices(0.0, 0.0), groups=4, params=params) == 0
    # Raw ones, where log-probs are not required: of another distribution.
    assert alarms(caplog, equal_choices(-2.0, -2.0), groups=4, params=params, logprobs=False) == 0


def test_groups_without_a_seed_are_not_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    assert alarms(caplog, equal_choices(-2.0, -2.0), groups=4, seed=None) == 0


# Figures ---------------------------------------------------------------------------------------------------------


def measured(endpoint: Any, seconds: float = 20.0, **settings: Any) -> dict[str, Any]:
    async def scenario() -> Any:
        config = RolloutConfig(base_url="http://endpoint", model="m", concurrency=4, **settings)
        clock = asyncio.get_running_loop().time
        one = Sampler(config, transport=endpoint, plugins=Plugins(), clock=clock)
        load = Bench(one, [(1,)], n=2, seconds=seconds, sampling=SamplingParams(max_tokens=1))
        try:
            await load.run()
        except RolloutError:
            pass
        return load.result()

    found = run_virtually(scenario)
    assert found is not None
    return json.loads(json.dumps(found, allow_nan=False))  # type: ignore[no-any-return]


class Busy(EndpointModel):
    """Answers three requests, and refuses all others."""

    async def post(self, body: bytes, headers: Any) -> Reply:
        await asyncio.sleep(0)
        if len(self.bodies) < 3:
            return await super().post(body, headers)
        self.bodies.append({})
        return Reply(status=429, body=b"busy")


class Dead(EndpointModel):
    """Nobody is there."""

    async def post(self, body: bytes, headers: Any) -> Reply:
        self.bodies.append({})
        raise NoAnswer("the connection failed")


def test_a_measurement_of_nothing_has_no_latencies_and_no_requests() -> None:
    dead = Dead()
    found = measured(dead, deadline=1.0)
    assert dead.bodies
    assert found["totals"]["requests"] > 0
    assert (found["requests_per_second"], found["totals"]["answers"], found["groups"]) == (0.0, 0, 0)
    assert set(found["latency_seconds"].values()) == {None}


def test_only_answered_requests_are_in_the_rate() -> None:
    async def scenario() -> Any:
        endpoint = Busy(service=0.0)
        config = RolloutConfig(base_url="http://endpoint", model="m", concurrency=4)
        one = Sampler(config, transport=endpoint, plugins=Plugins())
        load = Bench(one, [(1,)], n=1, seconds=1e9, sampling=SamplingParams(max_tokens=1))
        task = asyncio.create_task(load.run())
        while len(endpoint.bodies) < 6 or len(load._latencies) < 3:
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return load.result()

    found = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert found["totals"]["requests"] >= 6
    assert (found["totals"]["answers"], found["groups"]) == (3, 3)
    assert found["requests_per_second"] == found["groups_per_second"] > 0


def test_an_evaluation_of_no_conversations_is_no_number() -> None:
    async def scenario() -> float:
        one = ChatSampler(RolloutConfig(base_url="http://e", model="m"), transport=ToldEndpoint(dict), sleep=no_pause)
        return await one.evaluate([], lambda messages, answer: 1.0)

    assert math.isnan(asyncio.run(scenario()))


def test_answers_are_counted_apart_from_requests() -> None:
    script: list[Any] = [Reply(status=503, body=b"busy"), Reply(status=200, body=b"<html>")]
    good = equal_choices(-0.5)
    one = sampler(ToldEndpoint(lambda request: script.pop(0) if script else good(request)))
    one.sample_groups([Group(prompt=[1], n=2)], PARAMS)
    assert (one.totals.requests, one.totals.answers) == (3, 1)
