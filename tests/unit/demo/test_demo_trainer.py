from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import attrs
import numpy as np
import pytest

from cwtrain.errors import ConfigError
from cwtrain_demo.task import Alphabet, check_logprobs
from cwtrain_demo.trainer import Adam, Batch, Policy, Trainer, new_model, policy_gradient, read_model, round_to_bf16
from cwtrain_emulator.engine.model_io import f32_to_bf16, make_model
from cwtrain_rollout.protocol import Group, Sample, SampledGroup, SampleStatus
from helpers.exact_sampling import sample_exactly


def _small(tmp_path: Path, seed: int = 0) -> Policy:
    model = make_model(tmp_path / "small", vocab_size=7, hidden_size=5, context=3, seed=seed)
    rng = np.random.default_rng(seed)
    tensors = {
        name: values + rng.standard_normal(values.shape).astype(np.float32) / 4
        for name, values in model.tensors.items()
    }
    return Policy(tensors, 3)


# BF16 ----------------------------------------------------------------------------------------------------------------


def test_rounding_to_bf16_is_to_nearest_with_ties_to_even() -> None:
    def bits(value: float) -> int:
        return int(np.float32(value).view(np.uint32))

    def of(pattern: int) -> np.float32:
        return np.uint32(pattern).view(np.float32)

    cases = {
        0x3F800000: 0x3F800000,  # exact
        0x3F807FFF: 0x3F800000,  # below the middle
        0x3F808000: 0x3F800000,  # a tie goes to the even one below
        0x3F808001: 0x3F810000,  # above the middle
        0x3F818000: 0x3F820000,  # a tie goes to the even one above
        0xBF818000: 0xBF820000,
        0x7F7FFFFF: 0x7F800000,  # too large: infinity
        0x00008000: 0x00000000,
        0x80000000: 0x80000000,  # minus zero
        0xFF800000: 0xFF800000,
    }
    got = round_to_bf16(np.array([of(pattern) for pattern in cases], dtype=np.float32))
    assert [bits(value) for value in got] == list(cases.values())
    assert np.isnan(round_to_bf16(np.array([np.nan], dtype=np.float32))).all()


def test_rounding_agrees_with_the_engine_s_for_random_bits() -> None:
    patterns = np.random.default_rng(0).integers(0, 2**32, size=20_000, dtype=np.uint32)
    values = patterns.view(np.float32)
    finite = values[~np.isnan(values)]
    ours = (round_to_bf16(finite).view(np.uint32) >> 16).astype(np.uint16)
    assert (ours == f32_to_bf16(finite)).all()


def test_rounding_twice_changes_nothing() -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(np.float32)
    once = round_to_bf16(values)
    assert (round_to_bf16(once) == once).all()
    assert np.abs(once - values).max() <= np.abs(values).max() * 2.0**-8


# The model's maths ---------------------------------------------------------------------------------------------------


def test_logprobs_follow_the_documented_formula(tmp_path: Path) -> None:
    policy = _small(tmp_path)
    ids = [3, 1, 6, 0]
    for length in range(1, 5):
        seen = ids[:length]
        z = policy.weights["model.context.bias"].astype(np.float64)
        for i in range(min(3, length)):
            row = policy.weights["model.embed_tokens.weight"][seen[-1 - i]].astype(np.float64)
            z = z + row @ policy.weights[f"model.context.{i}.weight"]
        logits = policy.weights["lm_head.weight"] @ np.tanh(z) + policy.weights["lm_head.bias"]
        expected = logits - np.log(np.exp(logits).sum())
        got = policy.logprobs(policy.contexts([*seen, 0], length))[0]
        assert np.abs(got - expected).max() < 1e-5


def test_contexts_have_the_nearest_token_first(tmp_path: Path) -> None:
    policy = _small(tmp_path)
    assert policy.contexts([4, 5, 6, 2, 1], 1).tolist() == [[4, -1, -1], [5, 4, -1], [6, 5, 4], [2, 6, 5]]


def test_the_gradient_agrees_with_finite_differences(tmp_path: Path) -> None:
    policy = _small(tmp_path)
    # float64 all through, so that the differences are sharp
    policy = Policy({name: values.astype(np.float64) for name, values in policy.weights.items()}, 3)  # type: ignore[misc]
    rng = np.random.default_rng(5)
    contexts = policy.contexts(rng.integers(0, 7, size=40).tolist(), 1)
    batch = Batch(contexts=contexts, tokens=rng.integers(0, 7, size=39), advantages=rng.standard_normal(39))
    _, gradients = policy_gradient(policy, batch)
    assert set(gradients) == set(policy.weights)
    step = 1e-5
    for name, values in policy.weights.items():
        for place in rng.choice(values.size, size=min(12, values.size), replace=False):
            sides = []
            for sign in (1, -1):
                moved = values.copy()
                moved.flat[place] += sign * step
                sides.append(policy_gradient(Policy({**policy.weights, name: moved}, 3), batch)[0])
            expected = (sides[0] - sides[1]) / (2 * step)
            assert gradients[name].flat[place] == pytest.approx(expected, rel=1e-3, abs=1e-6), (name, place)


def test_adam_s_first_step_has_the_size_of_the_rate() -> None:
    masters = {"w": np.zeros(3, dtype=np.float32)}
    Adam(rate=0.5).climb(masters, {"w": np.array([2.0, -3.0, 0.0], dtype=np.float32)})
    assert masters["w"].tolist() == pytest.approx([0.5, -0.5, 0.0])
    assert masters["w"].dtype == np.float32


# The trainer ---------------------------------------------------------------------------------------------------------


def test_masters_keep_what_rounding_hides(tmp_path: Path) -> None:
    trainer = Trainer(new_model(tmp_path, seed=1), rate=3e-6)
    before = trainer.policy
    batch = Batch(
        contexts=before.contexts([1, 2, 3, 4], 1), tokens=np.array([2, 3, 4]), advantages=np.array([1.0, -1.0, 0.5])
    )
    for _ in range(600):
        trainer.learn(batch)
    changed = sum(int((trainer.policy.weights[n] != before.weights[n]).sum()) for n in before.weights)
    assert changed > 0  # 600 steps, each too small for BF16, add up


def test_what_is_saved_is_what_is_sampled_from(tmp_path: Path) -> None:
    trainer = Trainer(new_model(tmp_path / "base", seed=1))
    policy = trainer.policy
    trainer.learn(
        Batch(contexts=policy.contexts([1, 2, 3], 1), tokens=np.array([2, 3]), advantages=np.array([1.0, -1.0]))
    )
    trainer.save(tmp_path / "next")
    read = read_model(tmp_path / "next")
    assert read.tensors.keys() == trainer.policy.weights.keys()
    for name, values in read.tensors.items():
        assert (values == trainer.policy.weights[name]).all(), name
    assert Trainer(read).digests() == trainer.digests()


def test_digests_are_of_the_stored_bytes(tmp_path: Path) -> None:
    from hashlib import sha256

    trainer = Trainer(new_model(tmp_path, seed=1))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    for name, file_name in index["weight_map"].items():
        data = (tmp_path / file_name).read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        begin, end = json.loads(data[8 : 8 + length])[name]["data_offsets"]
        assert trainer.digests()[name] == sha256(data[8 + length + begin : 8 + length + end]).hexdigest()


def test_a_directory_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no model of the numpy engine") as caught:
        read_model(tmp_path)
    assert "make_model" in (caught.value.hint or "")


# The task ------------------------------------------------------------------------------------------------------------


def test_a_token_earns_one_when_it_goes_on_with_the_alphabet() -> None:
    task = Alphabet(letters=26)
    assert task.rewards([0, 3], [4, 5, 7, 26]).tolist() == [1, 1, 0, 0]
    assert task.rewards([25], [0, 1]).tolist() == [1, 1]
    assert task.rewards([25], [26]).tolist() == [0]  # the end token is no letter


def test_prompts_follow_from_seed_and_step() -> None:
    task = Alphabet(letters=26, seed=3)
    assert task.prompts(4) == task.prompts(4)
    assert task.prompts(4) != task.prompts(5)
    assert task.prompts(4) != Alphabet(letters=26, seed=4).prompts(4)
    tasks = [Alphabet(letters=26, seed=seed) for seed in range(3)]
    seeds = sorted(group.seed or 0 for one in tasks for step in range(5) for group in one.prompts(step))
    # room for every choice and for asking again between the seeds of two groups
    assert min(after - before for before, after in itertools.pairwise(seeds)) >= task.samples * 64


def test_a_lesson_has_the_mean_reward_and_centred_advantages(tmp_path: Path) -> None:
    policy = Trainer(new_model(tmp_path, seed=0)).policy
    samples = tuple(
        Sample(
            index=i, token_ids=ids, logprobs=(-1.0,) * len(ids), status=SampleStatus.TRUNCATED, finish_reason="length"
        )
        for i, ids in enumerate([(4, 5), (9, 10, 26)])
    )
    lesson = Alphabet(letters=26).lesson(policy, [SampledGroup(group=Group(prompt=(2, 3), n=2), samples=samples)])
    assert lesson.reward == pytest.approx((1.0 + 1 / 3) / 2)
    assert (lesson.samples, lesson.tokens, lesson.example) == (2, 5, ((2, 3), (4, 5)))
    assert lesson.batch.contexts.tolist() == [[3, 2, -1], [4, 3, 2], [3, 2, -1], [9, 3, 2], [10, 9, 3]]
    assert lesson.batch.advantages.sum() == pytest.approx(0)


def test_log_probs_of_other_weights_are_found(tmp_path: Path) -> None:
    trainer = Trainer(new_model(tmp_path, seed=0))
    task = Alphabet(letters=26, groups=2, samples=3)
    groups = sample_exactly(trainer.policy, task.prompts(0), task.sampling)
    assert check_logprobs(trainer.policy, groups)[0] == 0
    trainer.learn(task.lesson(trainer.policy, groups).batch)
    wrong, largest = check_logprobs(trainer.policy, groups)
    assert wrong > 0
    assert largest > 1e-3
    one = groups[0].samples[0]
    off = attrs.evolve(one, logprobs=(one.logprobs[0] - 2e-4, *one.logprobs[1:]))
    groups = [SampledGroup(group=groups[0].group, samples=(off,))]
    trainer = Trainer(new_model(tmp_path, seed=0))
    assert check_logprobs(trainer.policy, groups)[0] == 1


@pytest.mark.parametrize("seed", range(21))
def test_the_reward_rises_for_every_seed(tmp_path: Path, seed: int) -> None:
    trainer = Trainer(new_model(tmp_path, seed=seed))
    task = Alphabet(letters=trainer.vocab_size - 1, seed=seed, groups=4, samples=8)
    rewards = []
    for step in range(6):
        groups = sample_exactly(trainer.policy, task.prompts(step), task.sampling)
        lesson = task.lesson(trainer.policy, groups)
        rewards.append(lesson.reward)
        trainer.learn(lesson.batch)
    assert rewards[-1] > rewards[0]
