"""Misfortunes by the thousand, outages and refusals, with the whole sampler on a virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections import Counter
from typing import Any

import pytest

from cwtrain.events import RolloutBatchCompleted, RolloutRetried, RolloutUnavailable
from cwtrain.plugins import Plugins, hookimpl
from cwtrain_rollout import (
    Group,
    RolloutConfig,
    RolloutExhaustedError,
    RolloutRequestError,
    SampledGroup,
    Sampler,
    SampleStatus,
    SamplingParams,
)
from helpers.endpoint_model import MISFORTUNES, EndpointModel
from helpers.virtual_loop import run_virtually

PARAMS = SamplingParams(max_tokens=8)


class Ear:
    def __init__(self) -> None:
        self.heard: list[Any] = []

    @hookimpl
    def cwtrain_rollout_backend(self, event: Any) -> None:
        self.heard.append(event)


def sampler(endpoint: EndpointModel, ear: Ear | None = None, **settings: Any) -> Sampler:
    plugins = Plugins()
    if ear is not None:
        plugins.register(ear, name="ear")
    return Sampler(
        RolloutConfig(base_url="http://endpoint", model="m", **settings),
        transport=endpoint,
        plugins=plugins,
        rng=random.Random(3),
        clock=lambda: asyncio.get_running_loop().time(),
    )


def groups(count: int, n: int = 2) -> list[Group]:
    return [Group(prompt=[number], n=n) for number in range(count)]


def test_two_thousand_groups_come_back_complete_once_each_and_in_order() -> None:
    """5 % each of dropped connections, cut bodies, 503 with Retry-After, slow answers, HTML pages, errors with 200."""
    endpoint = EndpointModel(misfortune=0.05)
    ear = Ear()
    one = sampler(endpoint, ear, concurrency=128)
    got = run_virtually(lambda: one.sample(groups(2000), PARAMS))
    assert [group.group.prompt for group in got] == [(number,) for number in range(2000)]
    assert [[sample.token_ids for sample in group.samples] for group in got] == [
        [(number, 0), (number, 1)] for number in range(2000)
    ]
    assert set(endpoint.happened) == set(MISFORTUNES)
    assert all(count > 60 for count in endpoint.happened.values())
    assert one.totals.samples == 4000
    assert max(endpoint.answered.values()) == 1, "nobody is asked twice for what was given"
    assert endpoint.running == 0
    assert one.in_flight == 0
    (batch,) = [event for event in ear.heard if isinstance(event, RolloutBatchCompleted)]
    assert batch.requests == len(endpoint.bodies) == one.totals.requests
    assert batch.retries == one.totals.retries > 400
    assert sum(isinstance(event, RolloutRetried) for event in ear.heard) < 100, "a burst is told once"


def test_the_adaptive_window_lives_through_it_too() -> None:
    endpoint = EndpointModel(misfortune=0.05, slots=64)
    one = sampler(endpoint)
    got = run_virtually(lambda: one.sample(groups(300), PARAMS))
    assert len(got) == 300
    assert all(group.whole for group in got)


@pytest.mark.parametrize("gateway", [False, True], ids=["refused connections", "502 from a gateway"])
def test_an_outage_of_twenty_seconds_exhausts_no_group_and_sends_no_storm(gateway: bool) -> None:
    """B35: a refused request keeps its room, and one at a time looks whether the endpoint is back."""
    endpoint = EndpointModel(service=2.0, outage=(1010.0, 1030.0), gateway=gateway)
    ear = Ear()
    one = sampler(endpoint, ear, concurrency=128)
    got = run_virtually(lambda: one.sample(groups(1500, n=1), PARAMS))
    assert len(got) == 1500
    seconds = Counter(int(moment) for moment in endpoint.times)
    outage = [seconds[second] for second in range(1010, 1030)]
    assert outage[0] <= 2 * 128, "those that were under way, and who came next"
    assert max(outage[3:]) <= 3
    assert sum(outage[3:]) >= 3, "somebody looks"
    assert seconds[1030] + seconds[1031] + seconds[1032] + seconds[1033] + seconds[1034] + seconds[1035] >= 128
    (away,) = [event for event in ear.heard if isinstance(event, RolloutUnavailable)]
    assert ("502" if gateway else "refused") in away.reason


def test_fifty_refusals_in_a_row_change_nothing_about_how_prompts_are_sent() -> None:
    endpoint = EndpointModel(refuse_first=50)
    one = sampler(endpoint, concurrency=8, text_fallback=True, max_attempts=1)
    asked = [Group(prompt=[1, 2], n=4, seed=5, text="one two")]
    (group,) = run_virtually(lambda: one.sample(asked, PARAMS))
    assert group.whole
    assert len(endpoint.bodies) == 51
    assert all(body == endpoint.bodies[0] for body in endpoint.bodies)
    assert endpoint.bodies[0]["prompt"] == [1, 2]
    assert one.totals.refusals == 50


def test_the_window_follows_the_server_with_the_whole_sampler() -> None:
    endpoint = EndpointModel(slots=32, service=1.0)
    one = sampler(endpoint)
    run_virtually(lambda: one.sample(groups(32 * 100, n=1), PARAMS))
    half = endpoint.times[len(endpoint.times) // 2 :]
    assert len(half) / (half[-1] - half[0]) >= 0.9 * 32 / 1.046  # the mean of the service times
    assert 28 <= one.window <= 64


def failing(endpoint: EndpointModel, place: int) -> EndpointModel:
    """Return the endpoint with a final refusal for one prompt."""
    serve = endpoint.post

    async def post(body: bytes, headers: Any) -> Any:
        from cwtrain_rollout.transport import Reply

        if f'"prompt":[{place}]'.encode() in body:
            endpoint.bodies.append({"prompt": [place]})
            return Reply(status=400, body=b"this one is refused")
        return await serve(body, headers)

    endpoint.post = post  # type: ignore[method-assign]
    return endpoint


def test_what_a_failed_group_does_is_a_choice() -> None:
    async def scenario() -> None:
        endpoint = failing(EndpointModel(), 3)
        with pytest.raises(RolloutRequestError, match="this one is refused"):
            await sampler(endpoint).sample(groups(8), PARAMS)
        assert endpoint.running == 0, "nothing runs on"
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

        dropped: list[Group] = []
        endpoint = failing(EndpointModel(), 3)
        config = RolloutConfig(base_url="http://endpoint", model="m", on_failure="drop")
        one = Sampler(
            config,
            transport=endpoint,
            plugins=Plugins(),
            on_drop=lambda group, error: dropped.append(group),
            clock=asyncio.get_running_loop().time,
        )
        got = await one.sample(groups(8), PARAMS)
        assert [group.place for group in got] == [0, 1, 2, 4, 5, 6, 7]
        assert [group.prompt for group in dropped] == [(3,)]
        assert one.totals.dropped_groups == 1

        endpoint = failing(EndpointModel(), 3)
        one = sampler(endpoint, on_failure="requeue")
        with pytest.raises(RolloutRequestError):
            await one.sample(groups(8), PARAMS)
        asked = [body["prompt"] for body in endpoint.bodies]
        assert asked.count([3]) == 2
        assert asked[-1] == [3], "once more, when the others are there"
        assert one.totals.requeued_groups == 1

    run_virtually(scenario)


def test_results_come_as_they_finish_and_the_rest_can_be_left() -> None:
    async def scenario() -> None:
        endpoint = EndpointModel(service=1.0)
        places: list[int] = []
        async for group in sampler(endpoint, concurrency=64).sample_stream(groups(20), PARAMS):
            places.append(group.place)
        assert sorted(places) == list(range(20))
        assert places != sorted(places)

        one = sampler(endpoint, concurrency=64)
        async with one.rollout(groups(20), PARAMS) as rollout:
            first = [await anext(rollout) for _ in range(5)]
        assert len(first) == 5
        assert endpoint.running == 0
        assert one.in_flight == 0

    run_virtually(scenario)


def test_a_partial_rollout_keeps_every_token_there_is() -> None:
    async def scenario() -> list[SampledGroup]:
        endpoint = EndpointModel(service=1.0)
        one = sampler(endpoint, concurrency=64)
        asked = [Group(prompt=[7], n=2, seed=1), Group(prompt=[8], n=1, prefixes=[[1, 2, 3]])]
        async with one.rollout(asked, SamplingParams(max_tokens=30), partial=True) as rollout:
            await asyncio.sleep(5.5)
            left = await rollout.abort()
            assert await anext(rollout, None) is None
        assert endpoint.running == 0, "closing the connection is the abort"
        assert [body["stream"] for body in endpoint.bodies] == [True] * 3
        assert [body["n"] for body in endpoint.bodies] == [1] * 3
        bodies = sorted(endpoint.bodies, key=lambda body: (body["prompt"], body["seed"]))
        assert [body["seed"] for body in bodies[:2]] == [1, 2]
        assert bodies[2]["prompt"] == [8, 1, 2, 3]
        assert bodies[2]["max_tokens"] == 27, "what it has counts"
        return left

    left = run_virtually(scenario)
    assert [group.place for group in left] == [0, 1]
    for group in left:
        for sample in group.samples:
            assert sample.status is SampleStatus.ABORTED
            assert sample.token_ids == (1, 2, 3, 4, 5)
            assert sample.logprobs == (-0.5,) * 5
            assert sample.text == "ttttt"
        assert not group.whole


def test_a_streamed_group_that_is_let_finish_is_whole() -> None:
    async def scenario() -> list[SampledGroup]:
        one = sampler(EndpointModel(service=0.1))
        async with one.rollout([Group(prompt=[7], n=2)], SamplingParams(max_tokens=4), partial=True) as rollout:
            return [group async for group in rollout]

    (group,) = run_virtually(scenario)
    assert [(sample.status, sample.token_ids) for sample in group.samples] == [
        (SampleStatus.TRUNCATED, (1, 2, 3, 4)),
        (SampleStatus.TRUNCATED, (1, 2, 3, 4)),
    ]


def test_a_waiting_retry_blocks_nobody() -> None:
    """B66: nothing in the sampler blocks the event loop."""

    async def scenario() -> None:
        endpoint = EndpointModel(service=0.5, refuse_first=1)
        one = sampler(endpoint, concurrency=64)
        loop = asyncio.get_running_loop()
        beats: list[float] = []

        async def beat() -> None:
            while True:
                beats.append(loop.time())
                await asyncio.sleep(0.1)

        heart = asyncio.create_task(beat())
        await one.sample(groups(20), PARAMS)
        heart.cancel()
        assert max(after - before for before, after in itertools.pairwise(beats)) < 0.11

    run_virtually(scenario)


def test_a_silent_server_ends_within_the_time_and_the_error_says_so() -> None:
    """B68: a request that is never answered is bounded; the error names the last reason."""
    endpoint = EndpointModel(outage=(0.0, 1e9))
    with pytest.raises(RolloutExhaustedError, match="gave no usable samples") as caught:
        run_virtually(lambda: sampler(endpoint, deadline=120).sample(groups(3), PARAMS))
    assert "refused" in str(caught.value)
    assert len(endpoint.bodies) < 60
