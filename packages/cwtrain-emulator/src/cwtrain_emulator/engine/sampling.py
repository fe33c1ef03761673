"""From logits to tokens: penalties, temperature, filters, one draw each, and the log-probs that go with it.

The order of the steps is that of docs/reference/numpy-model.md. Nothing here knows an engine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

__all__ = ["Penalties", "Sampling", "Step", "generator", "log_softmax", "sample"]

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sampling:
    """The sampling fields of one request, all of them neutral by default."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    @property
    def penalised(self) -> bool:
        """True when any penalty is not neutral."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


@dataclass
class Penalties:
    """What penalties look at: which tokens stood in the prompt, and how often each one stands in the answers."""

    in_prompt: npt.NDArray[np.bool_]
    counts: Ints

    @classmethod
    def of(cls, prompt: Sequence[int], *, vocab_size: int, copies: int) -> Penalties:
        """Return the state of `copies` answers that have not begun."""
        in_prompt = np.zeros(vocab_size, np.bool_)
        in_prompt[list(prompt)] = True
        return cls(np.repeat(in_prompt[None], copies, axis=0), np.zeros((copies, vocab_size), np.int64))

    def apply(self, logits: Floats, sampling: Sampling) -> Floats:
        """Return the penalised logits."""
        seen = self.in_prompt | (self.counts > 0)
        repeated = np.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
        result = np.where(seen, repeated, logits)
        result -= sampling.frequency_penalty * self.counts
        result -= sampling.presence_penalty * (self.counts > 0)
        return result


@dataclass(frozen=True)
class Step:
    """One token for each sequence, with both kinds of log-probs over the whole vocabulary."""

    tokens: Ints
    raw: Floats
    processed: Floats


def generator(words: Sequence[object]) -> np.random.Generator:
    """Return the source of a choice's uniform numbers; equal words, equal numbers."""
    digest = hashlib.sha256(b"".join(str(word).encode() + b"\0" for word in words)).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def log_softmax(logits: Floats) -> Floats:
    """Return the log-probs of logits along the last axis; minus infinity stays so."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    result: Floats = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result


def sample(
    logits: npt.NDArray[np.float32],
    sampling: Sampling,
    uniforms: Floats,
    *,
    penalties: Penalties | None = None,
    banned: Sequence[int] = (),
) -> Step:
    """Draw one token for each row of `logits` with one uniform number each. `banned` ids cannot be drawn."""
    values = logits.astype(np.float64)
    raw = log_softmax(values)
    if penalties is not None:
        values = penalties.apply(values, sampling)
    if banned:
        values = values.copy()
        values[:, list(banned)] = -np.inf
    if sampling.temperature == 0:
        tokens = values.argmax(axis=-1)
        return Step(tokens, raw, log_softmax(values))
    if sampling == Sampling() and not banned:
        processed = raw
    else:
        processed = log_softmax(_filtered(values / sampling.temperature, sampling))
    cumulative = np.exp(processed).cumsum(axis=-1)
    # The last cumulative sum is 1 up to rounding: scaling by it keeps every draw inside, and "exceeds" never picks a
    # token of probability 0.
    tokens = (cumulative > uniforms[:, None] * cumulative[:, -1:]).argmax(axis=-1)
    return Step(tokens, raw, processed)


def _filtered(values: Floats, sampling: Sampling) -> Floats:
    """Return the scaled logits with what min_p, top_k and top_p remove set to minus infinity."""
    if sampling.min_p > 0:
        floor = values.max(axis=-1, keepdims=True) + np.log(sampling.min_p)
        values = np.where(values < floor, -np.inf, values)
    if 0 < sampling.top_k < values.shape[-1]:
        kth = np.partition(values, -sampling.top_k, axis=-1)[:, -sampling.top_k, None]
        values = np.where(values < kth, -np.inf, values)
    if sampling.top_p < 1:
        order = np.argsort(-values, axis=-1, kind="stable")
        probabilities = np.exp(log_softmax(np.take_along_axis(values, order, axis=-1)))
        before = probabilities.cumsum(axis=-1) - probabilities
        removed = before >= sampling.top_p
        removed[:, 0] = False
        dropped = np.zeros_like(removed)
        np.put_along_axis(dropped, order, removed, axis=-1)
        values = np.where(dropped, -np.inf, values)
    return values
