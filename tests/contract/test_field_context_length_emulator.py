"""Prompts that are too long, at the emulator's endpoint in the words of several engines.

Kind: one refusal in words that were not foreseen ended the batch of everybody.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import requests

from cwtrain_rollout import Group, RolloutRequestError, Sampler, SampleStatus, SamplingParams
from helpers.served_policy import CONTEXT_LIMIT, Served, serve

LENGTHS = (5, CONTEXT_LIMIT - 6, CONTEXT_LIMIT - 3, CONTEXT_LIMIT - 1, CONTEXT_LIMIT, CONTEXT_LIMIT + 30)
PARAMS = SamplingParams(max_tokens=6, ignore_eos=True)
WORDS = ["vllm", "vllm-length", "vllm-old", "sglang", "sglang-input", "none"]


@pytest.fixture(scope="module")
def served(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("lengths"), {})


def lengths_of(served: Served, *, partial: bool = False) -> list[list[int]]:
    async def scenario() -> list[Any]:
        async with Sampler(served.config) as one:
            groups = [Group(prompt=[5] * length, n=2) for length in LENGTHS]
            async with one.rollout(groups, PARAMS, partial=partial) as rollout:
                found = sorted([group async for group in rollout], key=lambda group: group.place)
        assert {sample.status for group in found for sample in group.samples} == {SampleStatus.TRUNCATED}
        return [[len(sample.token_ids) for sample in group.samples] for group in found]

    return asyncio.run(scenario())


EXPECTED = [[6, 6], [6, 6], [3, 3], [1, 1], [0, 0], [0, 0]]


@pytest.mark.parametrize(("words", "partial"), [*((words, False) for words in WORDS), ("sglang", True)])
def test_a_prompt_that_is_too_long_is_truncated_in_anybody_s_words(
    served: Served, faults: Any, words: str, partial: bool
) -> None:
    faults.add("replica", "too_long", words=words)
    assert lengths_of(served, partial=partial) == EXPECTED


@pytest.mark.parametrize("words", WORDS[:-1])
def test_the_words_are_enough_where_models_are_not_listed(served: Served, faults: Any, words: str) -> None:
    faults.add("replica", "too_long", words=words)
    faults.add("endpoint", "status", status=404, path="models$")
    assert lengths_of(served) == EXPECTED
    faults.clear()
    faults.add("replica", "too_long", words="none")
    faults.add("endpoint", "status", status=404, path="models$")
    with pytest.raises(RolloutRequestError, match="cannot be served"):
        lengths_of(served)


@pytest.mark.parametrize(("by", "tokens"), [(20, 6), (CONTEXT_LIMIT - 5 - 4, 4), (CONTEXT_LIMIT - 5, 0), (200, 0)])
@pytest.mark.parametrize("words", ["vllm", "sglang-input"])
def test_an_image_that_becomes_many_tokens_leaves_the_room_that_is_left(
    served: Served, faults: Any, words: str, by: int, tokens: int
) -> None:
    faults.add("replica", "too_long", words=words)
    faults.add("replica", "expand", by=by)
    images = {"multi_modal_data": {"image": ["data:,"]}}
    (group,) = Sampler(served.config).sample_groups([Group(prompt=[5] * 5, n=2, extra=images)], PARAMS)
    assert [len(sample.token_ids) for sample in group.samples] == [tokens] * 2
    assert {sample.status for sample in group.samples} == {SampleStatus.TRUNCATED}


def test_the_list_of_models_says_how_long_a_prompt_and_its_answer_may_be(
    served: Served, emulator: Any, tmp_path: Any
) -> None:
    def listed(one: Served) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {one.config.api_key}"}
        answer = requests.get(f"{one.config.base_url}/models", headers=headers, timeout=60).json()
        return {row["id"]: row["max_model_len"] for row in answer["data"]}

    assert listed(served) == {served.config.model: CONTEXT_LIMIT}
    shorter = serve(emulator, tmp_path, {"max-model-len": "40"})
    one = next(shorter)
    assert listed(one) == {one.config.model: 40}
    (group,) = Sampler(attrs.evolve(one.config)).sample_groups([Group(prompt=[5] * 38)], PARAMS)
    assert len(group.samples[0].token_ids) == 2
    for _ in shorter:
        pass
