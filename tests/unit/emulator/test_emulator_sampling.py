from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cwtrain_emulator.engine.sampling import Penalties, Sampling, generator, log_softmax, sample

# Quantiles of the chi-square distribution at 99.9 %, by degrees of freedom.
CHI_SQUARE_999 = {3: 16.27, 7: 24.32, 15: 37.70}


def _draw(logits: Any, sampling: Sampling, count: int) -> Any:
    rows = np.repeat(np.asarray(logits, np.float32)[None], count, axis=0)
    return sample(rows, sampling, generator(["test", count]).random(count))


def _statistic(tokens: Any, probabilities: Any) -> tuple[float, int]:
    kept = probabilities > 0
    counts = np.bincount(tokens, minlength=len(probabilities))
    assert not counts[~kept].any()
    expected = len(tokens) * probabilities[kept]
    return float(((counts[kept] - expected) ** 2 / expected).sum()), int(kept.sum()) - 1


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(), 16),
        (Sampling(temperature=0.7), 16),
        (Sampling(top_k=8), 8),
        (Sampling(temperature=2.0, top_k=8, min_p=1e-9), 8),
    ],
)
def test_draws_follow_the_processed_distribution(sampling: Sampling, kept: int) -> None:
    logits = np.random.default_rng(5).standard_normal(16)
    step = _draw(logits, sampling, 20_000)
    scaled = logits.astype(np.float32).astype(np.float64) / sampling.temperature
    if sampling.top_k:
        scaled = np.where(scaled < np.sort(scaled)[-sampling.top_k], -np.inf, scaled)
    probabilities = np.exp(scaled) / np.exp(scaled).sum()
    assert np.allclose(np.exp(step.processed[0]), probabilities)
    statistic, freedom = _statistic(step.tokens, probabilities)
    assert freedom == kept - 1
    assert statistic < CHI_SQUARE_999[freedom]
    assert np.allclose(step.raw[0], log_softmax(logits.astype(np.float32).astype(np.float64)))


def test_temperature_zero_is_greedy_with_log_probs_of_temperature_one() -> None:
    step = _draw([1.0, 3.0, 3.0, 2.0], Sampling(temperature=0.0, top_k=1, top_p=0.1), 4)
    assert step.tokens.tolist() == [1, 1, 1, 1]
    assert np.allclose(step.processed[0], log_softmax(np.array([1.0, 3.0, 3.0, 2.0])))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = np.log([0.5, 0.3, 0.15, 0.05])

    def kept(top_p: float, **others: Any) -> list[int]:
        processed = _draw(logits, Sampling(top_p=top_p, **others), 1).processed[0]
        return [int(token) for token in np.flatnonzero(np.isfinite(processed))]

    assert kept(0.4) == [0]
    assert kept(0.6) == [0, 1]
    assert kept(0.81) == [0, 1, 2]
    assert kept(1e-12) == [0]
    # After top_k two tokens are left, 0.625 and 0.375: the first alone reaches 0.6 now.
    assert kept(0.6, top_k=2) == [0]


def test_min_p_is_relative_to_the_largest() -> None:
    processed = _draw(np.log([0.5, 0.26, 0.2, 0.04]), Sampling(min_p=0.5), 1).processed[0]
    assert np.isfinite(processed).tolist() == [True, True, False, False]


def test_top_k_keeps_equals_of_the_last_one() -> None:
    processed = _draw([2.0, 1.0, 1.0, 0.0], Sampling(top_k=2), 1).processed[0]
    assert np.isfinite(processed).tolist() == [True, True, True, False]


def test_penalties() -> None:
    sampling = Sampling(repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    penalties = Penalties.of([0], vocab_size=4, copies=1)
    penalties.counts[0, 1] = 2
    logits = np.array([[2.0, -1.0, 1.0, 0.0]])
    # In the prompt: divided. In the answer: multiplied since negative, then 2 x 0.25 and 0.5 off.
    assert penalties.apply(logits, sampling).tolist() == [[1.0, -3.0, 1.0, 0.0]]
    step = sample(logits.astype(np.float32), sampling, np.array([0.5]), penalties=penalties)
    assert np.allclose(step.processed, log_softmax(np.array([[1.0, -3.0, 1.0, 0.0]])))
    assert np.allclose(step.raw, log_softmax(logits))


def test_banned_tokens_cannot_be_drawn() -> None:
    rows = np.zeros((1000, 3), np.float32)
    step = sample(rows, Sampling(), generator(["ban"]).random(1000), banned=[1])
    assert set(step.tokens.tolist()) == {0, 2}


def test_a_draw_at_the_edge_stays_inside_and_avoids_what_has_no_probability() -> None:
    rows = np.array([[0.0, -np.inf, 0.0, -np.inf]] * 2, np.float32)
    step = sample(rows, Sampling(), np.array([0.0, np.nextafter(1.0, 0.0)]))
    assert step.tokens.tolist() == [0, 2]


def test_equal_words_give_equal_numbers_and_words_do_not_run_together() -> None:
    assert generator(["a", 1]).random(3).tolist() == generator(["a", 1]).random(3).tolist()
    assert generator(["a", 1]).random(3).tolist() != generator(["a1", ""]).random(3).tolist()
    first = generator(["a"])
    assert [first.random() for _ in range(3)] == generator(["a"]).random(3).tolist()
