"""What the demo teaches: to go on with the alphabet. Prompts, rewards, and the batch to learn from.

A token earns 1 when it is the letter after the one before it (a after z), else 0. A sample's reward is the share of its
tokens that earned 1, so chance is about 0.04 and a model that knows the alphabet gets close to 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import numpy.typing as npt

from cwtrain_demo.trainer import Batch, Policy
from cwtrain_rollout.protocol import Group, SampledGroup, SamplingParams

__all__ = ["Alphabet", "Lesson", "check_logprobs"]

_SEED_STRIDE = 1_000_003
TOLERANCE = 1e-4
"""How far a log-prob may be from the trainer's own: float32 arithmetic in another order of summation."""


@attrs.frozen(kw_only=True)
class Lesson:
    """What one round of rollouts gave."""

    reward: float
    """Mean of the samples' rewards."""
    batch: Batch
    samples: int
    tokens: int
    example: tuple[tuple[int, ...], tuple[int, ...]]
    """Prompt and answer of the first sample, for people."""


@attrs.frozen(kw_only=True)
class Alphabet:
    """The task for a vocabulary of ``letters`` and an end token.

    Every draw follows from ``seed`` and the step, so that two runs see the same prompts and the same samples.
    """

    letters: int
    seed: int = 0
    groups: int = 8
    samples: int = 8
    prompt_tokens: int = 3
    max_tokens: int = 16

    @property
    def sampling(self) -> SamplingParams:
        """How rollouts are drawn: neutrally, up to the end token."""
        return SamplingParams(max_tokens=self.max_tokens, stop_token_ids=(self.letters,))

    def prompts(self, step: int) -> list[Group]:
        """Return the groups to sample in ``step``."""
        rng = np.random.default_rng([self.seed, step])
        prompts = rng.integers(0, self.letters, size=(self.groups, self.prompt_tokens))
        first_seed = (self.seed * _SEED_STRIDE + step) * self.groups * self.samples * 64
        return [
            Group(prompt=prompt.tolist(), n=self.samples, seed=(first_seed + place * self.samples * 64) % 2**62)
            for place, prompt in enumerate(prompts)
        ]

    def rewards(self, prompt: Sequence[int], answer: Sequence[int]) -> npt.NDArray[np.float64]:
        """Return what each token of ``answer`` earns."""
        before = np.asarray([*prompt, *answer][len(prompt) - 1 : -1])
        tokens = np.asarray(answer)
        right = (tokens == (before + 1) % self.letters) & (tokens < self.letters)
        return np.asarray(right, dtype=np.float64)

    def lesson(self, policy: Policy, groups: Sequence[SampledGroup]) -> Lesson:
        """Return the rewards of ``groups`` and the batch to learn from.

        A token's reward depends on it and the one before it alone, so its advantage is its own reward against the mean
        of all, in units of their spread.
        """
        contexts, tokens, rewards, shares = [], [], [], []
        for group in groups:
            prompt = group.group.prompt
            for sample in group.samples:
                earned = self.rewards(prompt, sample.token_ids)
                contexts.append(policy.contexts([*prompt, *sample.token_ids], len(prompt)))
                tokens.append(np.asarray(sample.token_ids, dtype=np.int64))
                rewards.append(earned)
                shares.append(float(earned.mean()))
        earned = np.concatenate(rewards)
        advantages = (earned - earned.mean()) / (earned.std() + 1e-6)
        first = groups[0]
        return Lesson(
            reward=float(np.mean(shares)),
            batch=Batch(contexts=np.concatenate(contexts), tokens=np.concatenate(tokens), advantages=advantages),
            samples=len(shares),
            tokens=len(earned),
            example=(first.group.prompt, first.samples[0].token_ids),
        )


def check_logprobs(policy: Policy, groups: Sequence[SampledGroup]) -> tuple[int, float]:
    """Return how many log-probs differ from those of ``policy``, and the largest difference.

    ``policy`` has the weights of the version that was to be served, so a replica with other weights, a stale cache or
    raw log-probs show here.
    """
    wrong, largest = 0, 0.0
    for group in groups:
        for sample in group.samples:
            ours = policy.logprobs_of(group.group.prompt, sample.token_ids)
            apart = np.abs(ours - np.asarray(sample.logprobs))
            wrong += int((apart > TOLERANCE).sum())
            largest = max(largest, float(apart.max()))
    return wrong, largest
