"""Exactness: every log-prob and every id of a sample against the weights, recomputed with none of the engine's code.

The model is that of docs/reference/numpy-model.md; seeded and greedy ids must be the same, others fit the distribution.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from cwtrain_rollout import Group, Sample, Sampler, SampleStatus, SamplingParams
from helpers.served_policy import CONTEXT_LIMIT, VOCABULARY, Served, serve

PROMPT = (5, 6, 7)
CLOSE = 1e-4
END = VOCABULARY - 1
"""The model's own end token."""


@pytest.fixture(scope="module")
def served(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("exact"), {"logprobs-mode": "processed_logprobs"})


@pytest.fixture(scope="module")
def sampler(served: Served) -> Sampler:
    return Sampler(served.config)


def distribution(served: Served, sequence: tuple[int, ...], sampling: SamplingParams) -> np.ndarray:
    """Return the log-probs of the next token after temperature and filters; greedy ones are of neither."""
    row = served.policy.logprobs(served.policy.contexts([*sequence, 0], len(sequence)))[0].astype(np.float64)
    if sampling.temperature == 0:
        return row
    row = row / sampling.temperature
    if sampling.min_p:
        row = np.where(row < row.max() + np.log(sampling.min_p), -np.inf, row)
    if 0 < sampling.top_k < len(row):
        row = np.where(row < np.sort(row)[-sampling.top_k], -np.inf, row)
    if sampling.top_p < 1:
        order = np.argsort(-row, kind="stable")
        share = np.exp(row[order] - row.max())
        share /= share.sum()
        cut = order[share.cumsum() - share >= sampling.top_p]
        row[cut[cut != order[0]]] = -np.inf
    row = row - row.max()
    return row - np.log(np.exp(row).sum())


def seeded(served: Served, prompt: tuple[int, ...], seed: int, place: int, sampling: SamplingParams) -> tuple[int, ...]:
    """Return the ids that a seeded choice must have."""
    digest = hashlib.sha256(b"".join(str(word).encode() + b"\0" for word in ("seeded", seed, place))).digest()
    draws = np.random.default_rng(int.from_bytes(digest[:16], "big")).random(sampling.max_tokens)
    answer: tuple[int, ...] = ()
    for draw in draws:
        row = distribution(served, prompt + answer, sampling)
        if sampling.temperature == 0:
            token = int(row.argmax())
        else:
            cumulative = np.exp(row).cumsum()
            token = int((cumulative > draw * cumulative[-1]).argmax())
        answer += (token,)
        if token in (*sampling.stop_token_ids, END):
            break
    return answer


def off(served: Served, prompt: tuple[int, ...], sample: Sample, sampling: SamplingParams) -> float:
    """Return how far a sample's log-probs are from the weights'."""
    worst = 0.0
    for place, (token, logprob) in enumerate(zip(sample.token_ids, sample.logprobs, strict=True)):
        row = distribution(served, prompt + sample.token_ids[:place], sampling)
        worst = max(worst, abs(float(row[token]) - logprob))
    return worst


FILTERS = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_p": 0.7},
    {"top_k": 5},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 12, "min_p": 0.03},
]


@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("filters", FILTERS, ids=lambda given: ",".join(given) or "neutral")
def test_ids_and_log_probs_are_those_of_the_weights(
    served: Served, sampler: Sampler, filters: dict[str, Any], n: int
) -> None:
    sampling = SamplingParams(max_tokens=9, **filters)
    prompts = [PROMPT, (1,), tuple(range(20))]
    groups = [Group(prompt=prompt, n=n, seed=77) for prompt in prompts]
    for group in sampler.sample_groups(groups, sampling, cache_salt=served.hot_load_id):
        for sample in group.samples:
            assert sample.token_ids == seeded(served, group.group.prompt, 77, sample.index, sampling)
            assert off(served, group.group.prompt, sample, sampling) < CLOSE
            stopped = sample.token_ids[-1] == END
            assert sample.status is (SampleStatus.COMPLETED if stopped else SampleStatus.TRUNCATED)
            assert sample.finish_reason == ("stop" if stopped else "length")


@pytest.mark.parametrize("filters", [FILTERS[0], FILTERS[2], FILTERS[-1]], ids=["neutral", "cold", "filtered"])
@pytest.mark.parametrize("group_requests", [True, False], ids=["one request", "split"])
def test_unseeded_samples_fit_the_distribution(served: Served, filters: dict[str, Any], group_requests: bool) -> None:
    """Chi-square of first tokens; the emulator's draws follow from its own seed and so repeat."""
    sampling = SamplingParams(max_tokens=1, **filters)
    config = attrs.evolve(served.config, group_requests=group_requests, seeds=False, concurrency=64)
    count = 2000 if group_requests else 400
    groups = [Group(prompt=PROMPT, n=count // 4)] * 4
    found = Sampler(config).sample_groups(groups, sampling)
    seen = Counter(sample.token_ids[0] for group in found for sample in group.samples)
    expected = np.exp(distribution(served, PROMPT, sampling)) * count
    assert sum(seen.values()) == count
    assert all(expected[token] > 0 for token in seen)
    large = expected >= 5
    observed = np.array([seen[token] for token in range(VOCABULARY)])
    apart = ((observed - expected)[large] ** 2 / expected[large]).sum()
    if (rest := expected[~large].sum()) >= 5:
        apart += (observed[~large].sum() - rest) ** 2 / rest
    freedom = int(large.sum())
    assert apart < freedom + 4 * np.sqrt(2 * freedom)


def test_stops_by_id_by_string_and_at_the_first_token(served: Served, sampler: Sampler) -> None:
    free = SamplingParams(max_tokens=8)
    ids = seeded(served, PROMPT, 3, 0, free)
    for place in (0, 3):
        stop = SamplingParams(max_tokens=8, stop_token_ids=[ids[place]])
        (group,) = sampler.sample_groups([Group(prompt=PROMPT, seed=3)], stop)
        (sample,) = group.samples
        first = ids.index(ids[place])
        assert sample.token_ids == ids[: first + 1], "the stop token is the last one"
        assert (sample.status, len(sample.logprobs)) == (SampleStatus.COMPLETED, first + 1)
        assert off(served, PROMPT, sample, stop) < CLOSE
    (group,) = sampler.sample_groups([Group(prompt=PROMPT, seed=3)], free)
    text = group.samples[0].text
    word = text[len(text) // 2 :][:2]
    (group,) = sampler.sample_groups([Group(prompt=PROMPT, seed=3)], SamplingParams(max_tokens=8, stop=[word]))
    (sample,) = group.samples
    assert sample.text.endswith(word)
    assert sample.token_ids == ids[: len(sample.token_ids)]
    assert sample.status is SampleStatus.COMPLETED
    assert off(served, PROMPT, sample, free) < CLOSE


@pytest.mark.parametrize("told", [True, False], ids=["told", "learned from a refusal"])
def test_prompts_at_the_edge_of_the_context_are_truncated_never_refused(served: Served, told: bool) -> None:
    """B22: a prompt without room is a sample without tokens; the others get what is left."""
    sampler = Sampler(attrs.evolve(served.config, context_length=CONTEXT_LIMIT if told else None))
    sampling = SamplingParams(max_tokens=4)
    lengths = (CONTEXT_LIMIT - 6, CONTEXT_LIMIT - 2, CONTEXT_LIMIT - 1, CONTEXT_LIMIT, CONTEXT_LIMIT + 20)
    groups = [Group(prompt=[1] * length, n=2, seed=5) for length in lengths]
    found = sampler.sample_groups(groups, sampling)
    assert [len(group.samples[0].token_ids) for group in found] == [4, 2, 1, 0, 0]
    for group in found:
        for sample in group.samples:
            assert sample.status is SampleStatus.TRUNCATED
            assert off(served, group.group.prompt, sample, sampling) < CLOSE
    assert sampler.totals.truncated_prompts == 4
    assert sampler.totals.bad_answers == 0


def test_partial_samples_go_on_where_they_were(served: Served, sampler: Sampler) -> None:
    sampling = SamplingParams(max_tokens=8)
    prefixes = [(1, 2, 3), (), (4,) * 8]
    group = Group(prompt=PROMPT, n=3, seeds=[5, 6, 7], prefixes=prefixes)
    (found,) = sampler.sample_groups([group], sampling)
    assert [len(sample.token_ids) for sample in found.samples] == [5, 8, 0]
    for sample, prefix in zip(found.samples, prefixes, strict=True):
        assert off(served, PROMPT + tuple(prefix), sample, sampling) < CLOSE
    first = seeded(served, (*PROMPT, 1, 2, 3), 5, 0, SamplingParams(max_tokens=5))
    assert found.samples[0].token_ids == first


def test_streamed_samples_are_as_exact(served: Served, sampler: Sampler) -> None:
    import asyncio

    sampling = SamplingParams(max_tokens=9, temperature=0.7)

    async def scenario() -> list[Any]:
        groups = [Group(prompt=PROMPT, n=3, seed=4)] * 4
        async with sampler.rollout(groups, sampling, partial=True) as rollout:
            return [group async for group in rollout]

    for group in asyncio.run(scenario()):
        for sample in group.samples:
            assert sample.token_ids == seeded(served, PROMPT, 4 + sample.index, 0, sampling)
            assert off(served, PROMPT, sample, sampling) < CLOSE


def test_hundreds_of_groups_survive_the_emulator_s_faults(served: Served, emulator: Any) -> None:
    """5 % each of dropped connections, cut bodies, 503 with Retry-After, slow answers, HTML pages, errors with 200."""
    kinds = {
        "drop": {},
        "cut": {"bytes": 40},
        "status": {"status": 503, "retry_after": "0.02"},
        "latency": {"seconds": 0.1},
        "html": {},
        "error_body": {},
    }
    emulator.control.clear_faults()
    for number, (kind, values) in enumerate(kinds.items()):
        emulator.control.add_fault("endpoint", kind, path="completions$", probability=0.05, seed=number, **values)
    try:
        sampler = Sampler(attrs.evolve(served.config, concurrency=64, max_attempts=12))
        groups = [Group(prompt=(number % VOCABULARY, number // VOCABULARY % VOCABULARY), n=2) for number in range(400)]
        found = sampler.sample_groups(groups, SamplingParams(max_tokens=2))
        struck = [fault["struck"] for fault in emulator.control.faults()]
    finally:
        emulator.control.clear_faults()
    assert [group.group for group in found] == groups
    assert all(group.whole and len(group.samples) == 2 for group in found)
    assert min(struck) > 8
    for group in itertools.islice(found, 0, None, 100):
        for sample in group.samples:
            assert off(served, group.group.prompt, sample, SamplingParams(max_tokens=2)) < CLOSE
    assert sampler.totals.samples == 800
