"""The sampler against the emulator's endpoint: two readings of one wire, and of what a log-prob is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

from cwtrain_rollout import (
    Group,
    RolloutAnswerError,
    RolloutConfig,
    RolloutRequestError,
    Sampler,
    SampleStatus,
    SamplingParams,
)
from helpers.served_policy import VOCABULARY, Served, serve

PROMPT = (5, 6, 7)


@pytest.fixture(scope="module")
def processed(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("processed"), {"logprobs-mode": "processed_logprobs"})


@pytest.fixture(scope="module")
def raw(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("raw"), {})


def table(served: Served, prompt: tuple[int, ...], answer: tuple[int, ...]) -> np.ndarray:
    return served.policy.logprobs(served.policy.contexts([*prompt, *answer], len(prompt)))


def test_neutral_log_probs_are_the_model_s_in_both_modes(processed: Served, raw: Served) -> None:
    for served in (processed, raw):
        sampler = Sampler(served.config)
        groups = [Group(prompt=(i, i + 1), n=4, seed=100 * i) for i in range(5)]
        got = sampler.sample_groups(groups, SamplingParams(max_tokens=6), cache_salt=served.hot_load_id)
        assert [group.group for group in got] == groups
        for group in got:
            for sample in group.samples:
                ours = served.policy.logprobs_of(group.group.prompt, sample.token_ids)
                assert np.abs(ours - np.asarray(sample.logprobs)).max() < 1e-4
        assert sampler.totals.requests == len(groups)
        assert sampler.totals.samples == 20


def test_filtered_log_probs_are_of_what_was_sampled_from(processed: Served) -> None:
    sampling = SamplingParams(max_tokens=8, temperature=0.7, top_k=6, top_p=0.9, min_p=0.02)
    sampler = Sampler(processed.config)
    (group,) = sampler.sample_groups([Group(prompt=PROMPT, n=16, seed=3)], sampling)
    for sample in group.samples:
        rows = table(processed, PROMPT, sample.token_ids) / sampling.temperature
        for row, token, logprob in zip(rows, sample.token_ids, sample.logprobs, strict=True):
            probabilities = np.exp(row - row.max())
            probabilities /= probabilities.sum()
            probabilities[probabilities < sampling.min_p * probabilities.max()] = 0
            kept = np.argsort(-probabilities)[: sampling.top_k]
            share = probabilities[kept] / probabilities[kept].sum()
            enough = int(np.searchsorted(share.cumsum(), sampling.top_p)) + 1
            kept, share = kept[:enough], share[:enough] / share[:enough].sum()
            assert token in kept
            assert logprob == pytest.approx(float(np.log(share[kept.tolist().index(token)])), abs=1e-4)
    assert sampler.totals.requests == 2  # one of them asked for the mode


def test_filtered_sampling_is_refused_where_log_probs_are_raw(raw: Served) -> None:
    with pytest.raises(RolloutAnswerError, match="raw log-probs") as caught:
        Sampler(raw.config).sample_groups([Group(prompt=PROMPT)], SamplingParams(max_tokens=2, temperature=0.5))
    assert "logprobs-mode: processed_logprobs" in (caught.value.hint or "")


def test_greedy_log_probs_are_those_of_the_model_in_both_modes(processed: Served, raw: Served) -> None:
    for served in (processed, raw):
        (group,) = Sampler(served.config).sample_groups(
            [Group(prompt=PROMPT)], SamplingParams(max_tokens=5, temperature=0.0)
        )
        (sample,) = group.samples
        rows = table(served, PROMPT, sample.token_ids)
        assert sample.token_ids == tuple(int(token) for token in rows.argmax(axis=1))
        assert np.abs(rows.max(axis=1) - np.asarray(sample.logprobs)).max() < 1e-4


def test_a_seed_repeats_and_choices_differ(processed: Served) -> None:
    def draw(seed: int | None) -> list[tuple[int, ...]]:
        groups = [Group(prompt=PROMPT, n=8, seed=seed)]
        (group,) = Sampler(processed.config).sample_groups(groups, SamplingParams(max_tokens=12))
        return [sample.token_ids for sample in group.samples]

    first = draw(11)
    assert draw(11) == first
    assert draw(12) != first
    assert len(set(first)) > 1
    assert draw(None) != draw(None)


def test_the_stop_token_is_in_the_sample_and_the_reason_is_told(processed: Served) -> None:
    everything = SamplingParams(max_tokens=1)
    (group,) = Sampler(processed.config).sample_groups([Group(prompt=PROMPT, seed=1)], everything)
    (first,) = group.samples[0].token_ids
    assert group.samples[0].status is SampleStatus.TRUNCATED
    stopping = SamplingParams(max_tokens=20, stop_token_ids=(first,))
    (group,) = Sampler(processed.config).sample_groups([Group(prompt=PROMPT, seed=1)], stopping)
    (sample,) = group.samples
    assert sample.token_ids == (first,)
    assert len(sample.logprobs) == 1
    assert (sample.status, sample.finish_reason) == (SampleStatus.COMPLETED, "stop")


def test_final_refusals_name_what_is_wrong(processed: Served) -> None:
    def refused(config: RolloutConfig, prompt: tuple[int, ...] = PROMPT) -> RolloutRequestError:
        with pytest.raises(RolloutRequestError) as caught:
            Sampler(config).sample_groups([Group(prompt=prompt)], SamplingParams(max_tokens=1))
        return caught.value

    wrong_key = attrs.evolve(processed.config, api_key="not-the-key")
    assert refused(wrong_key).status == 401
    assert refused(attrs.evolve(processed.config, model="another-model")).status == 404
    assert refused(processed.config, prompt=(VOCABULARY,)).status == 400


def test_settings_come_from_the_environment(processed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CWTRAIN_ROLLOUT_BASE_URL", processed.config.base_url)
    monkeypatch.setenv("CWTRAIN_ROLLOUT_MODEL", processed.config.model)
    monkeypatch.setenv("CWTRAIN_ROLLOUT_API_KEY", processed.config.api_key or "")
    sampler = Sampler(RolloutConfig.from_env())
    (group,) = sampler.sample_groups([Group(prompt=PROMPT, n=2)], SamplingParams(max_tokens=2))
    assert len(group.samples) == 2
