"""Answers that the emulator's replicas end in words of their own, asked for by the whole sampler over HTTP.

Kind: what a server gave up was delivered as a sample, and an empty list was taken for none.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import requests

from cwtrain_rollout import Group, RolloutExhaustedError, Sampler, SampleStatus, SamplingParams
from helpers.served_policy import Served, serve
from helpers.told_endpoint import no_pause

PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def served(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("ends"), {})


async def rollout(one: Sampler, n: int, *, partial: bool) -> list[Any]:
    async with one.rollout([Group(prompt=[5, 6], n=n)], PARAMS, partial=partial) as found:
        return [sample async for group in found for sample in group.samples]


@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize(
    ("reason", "tokens"), [("aborted", 0), ("preempted", 3), ("", None), ("null", 2), ("Abort", 0)]
)
def test_odd_ends_of_replicas_are_asked_again(
    served: Served, faults: Any, partial: bool, reason: str, tokens: int | None
) -> None:
    rule = {"reason": reason, "times": 2} if tokens is None else {"reason": reason, "tokens": tokens, "times": 2}
    faults.add("replica", "finish", **rule)
    one = Sampler(served.config, sleep=no_pause)
    found = asyncio.run(rollout(one, 3, partial=partial))
    assert [(sample.status, len(sample.token_ids)) for sample in found] == [(SampleStatus.TRUNCATED, 6)] * 3
    assert one.totals.bad_answers == 2


def test_one_odd_choice_of_many_is_asked_again_alone(served: Served, faults: Any) -> None:
    faults.add("replica", "finish", reason="timeout", choice=1, tokens=4, times=1)
    one = Sampler(served.config, sleep=no_pause)
    found = asyncio.run(rollout(one, 3, partial=False))
    assert [len(sample.token_ids) for sample in found] == [6, 6, 6]
    assert (one.totals.requests, one.totals.samples) == (2, 3)


def test_a_replica_that_never_ends_right_fails_the_group_by_name(served: Served, faults: Any) -> None:
    faults.add("replica", "finish", reason="preempted")
    with pytest.raises(RolloutExhaustedError, match="finish_reason 'preempted'"):
        asyncio.run(rollout(Sampler(attrs.evolve(served.config, max_attempts=3), sleep=no_pause), 2, partial=False))


def test_an_abort_before_the_first_token_keeps_the_others_of_a_partial_rollout(served: Served, faults: Any) -> None:
    faults.add("replica", "finish", reason="abort", tokens=0, times=1)
    one = Sampler(served.config, sleep=no_pause)
    found = asyncio.run(rollout(one, 3, partial=True))
    ends = sorted((sample.status, len(sample.token_ids)) for sample in found)
    assert ends == [(SampleStatus.ABORTED, 0), (SampleStatus.TRUNCATED, 6), (SampleStatus.TRUNCATED, 6)]


@pytest.mark.parametrize("stream", [False, True])
def test_the_emulator_says_what_it_was_asked_to_say(served: Served, faults: Any, stream: bool) -> None:
    """Seen without the client: reason and number of tokens, in a body or in events."""
    faults.add("replica", "finish", reason="Preempted", tokens=0, choice=0)
    faults.add("replica", "finish", reason="null", tokens=2, choice=1)
    body = {"model": served.config.model, "prompt": [5], "n": 3, "max_tokens": 4, "ignore_eos": True, "stream": stream}
    headers = {"Authorization": f"Bearer {served.config.api_key}"}
    answer = requests.post(
        f"{served.config.base_url}/completions", json={**body, "return_token_ids": True}, headers=headers, timeout=60
    )
    if stream:
        lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
        events = [choice for line in lines for choice in json.loads(line)["choices"]]
    else:
        events = answer.json()["choices"]
    tokens = {index: sum(len(one["token_ids"]) for one in events if one["index"] == index) for index in range(3)}
    last = {one["index"]: one["finish_reason"] for one in events}
    assert tokens == {0: 0, 1: 2, 2: 4}
    assert last == {0: "Preempted", 1: None, 2: "length"}
