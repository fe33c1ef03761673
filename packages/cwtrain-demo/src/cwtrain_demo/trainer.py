"""The demo's trainer: policy gradient on the emulator's log-bilinear model, in numpy.

It works as real trainers do: float32 master weights and Adam, and BF16 weights rounded to the nearest for the engine.
The rollouts come from the rounded weights, so gradients are taken there and applied to the masters. The model's maths
are written down in docs/reference/numpy-model.md; this is a second reading of them, which is what makes the comparison
with the engine's log-probs worth something.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from cwtrain.errors import ConfigError
from cwtrain_emulator.engine.model_io import Model, load_model, make_model, save_model

__all__ = ["Adam", "Batch", "Policy", "Trainer", "new_model", "policy_gradient", "read_model", "round_to_bf16"]

Array = npt.NDArray[np.float32]
Double = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_BIASES = ("model.context.bias", "lm_head.bias")
"""Stored as F32; every other tensor is BF16."""

_EMBED, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
LETTERS = 26
RATE = 0.006


def round_to_bf16(values: Array) -> Array:
    """Return ``values`` rounded to bfloat16, to nearest and ties to even, as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    even = (bits >> np.uint32(16)) & np.uint32(1)
    rounded: Array = ((bits + np.uint32(0x7FFF) + even) & np.uint32(0xFFFF0000)).view(np.float32)
    return np.where(np.isnan(values), np.float32(np.nan), rounded)


@attrs.frozen
class Policy:
    """The model with fixed weights: what an engine samples from."""

    weights: Mapping[str, Array]
    context: int
    """How many preceding tokens count."""

    def contexts(self, tokens: Sequence[int], start: int) -> Ids:
        """Return for each token from ``start`` on the tokens before it, the nearest first, -1 where there is none."""
        padded = np.concatenate([np.full(self.context, -1, dtype=np.int64), np.asarray(tokens, dtype=np.int64)])
        windows = np.lib.stride_tricks.sliding_window_view(padded, self.context)
        return windows[start : len(tokens), ::-1]

    def hidden(self, contexts: Ids) -> tuple[Array, list[Array]]:
        """Return the hidden state of each context, and the embeddings that went into it, by distance."""
        total = np.tile(self.weights["model.context.bias"], (len(contexts), 1))
        embedded: list[Array] = []
        for distance in range(self.context):
            ids = contexts[:, distance]
            rows: Array = self.weights[_EMBED][ids] * (ids >= 0)[:, None].astype(np.float32)
            embedded.append(rows)
            total = total + rows @ self.weights[f"model.context.{distance}.weight"]
        return np.tanh(total), embedded

    def logprobs(self, contexts: Ids) -> Double:
        """Return the log-prob of every token after each context."""
        return self._logprobs(self.hidden(contexts)[0])

    def logprobs_of(self, prompt: Sequence[int], answer: Sequence[int]) -> Double:
        """Return the log-prob of each token of ``answer`` after ``prompt``."""
        contexts = self.contexts([*prompt, *answer], len(prompt))
        chosen: Double = self.logprobs(contexts)[np.arange(len(answer)), np.asarray(answer)]
        return chosen

    def _logprobs(self, hidden: Array) -> Double:
        logits = (hidden @ self.weights[_HEAD].T + self.weights["lm_head.bias"]).astype(np.float64)
        logits -= logits.max(axis=1, keepdims=True)
        result: Double = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        return result


@attrs.frozen(kw_only=True)
class Batch:
    """Sampled tokens, what stood before each, and how much better than usual each was."""

    contexts: Ids
    tokens: Ids
    advantages: Double


def policy_gradient(policy: Policy, batch: Batch) -> tuple[float, dict[str, Array]]:
    """Return the objective, mean of advantage x log-prob, and its gradient for every tensor."""
    hidden, embedded = policy.hidden(batch.contexts)
    logprobs = policy._logprobs(hidden)
    rows = np.arange(len(batch.tokens))
    objective = float((batch.advantages * logprobs[rows, batch.tokens]).mean())

    at_logits = -np.exp(logprobs)
    at_logits[rows, batch.tokens] += 1.0
    at_logits *= batch.advantages[:, None] / len(batch.tokens)
    at_sum = (at_logits @ policy.weights[_HEAD]) * (1.0 - hidden.astype(np.float64) ** 2)
    at_embeddings = np.zeros(policy.weights[_EMBED].shape)
    gradients = {_HEAD: at_logits.T @ hidden, "lm_head.bias": at_logits.sum(axis=0)}
    gradients["model.context.bias"] = at_sum.sum(axis=0)
    for distance, rows_in in enumerate(embedded):
        name = f"model.context.{distance}.weight"
        gradients[name] = rows_in.T @ at_sum
        ids = batch.contexts[:, distance]
        known = ids >= 0
        np.add.at(at_embeddings, ids[known], (at_sum @ policy.weights[name].T)[known])
    gradients[_EMBED] = at_embeddings
    return objective, {name: gradient.astype(np.float32) for name, gradient in gradients.items()}


@attrs.define(kw_only=True)
class Adam:
    """Adam that climbs. Moments are float32, like the master weights."""

    rate: float
    decay: float = 0.8
    decay_squares: float = 0.95
    steps: int = 0
    _mean: dict[str, Array] = attrs.field(factory=dict)
    _squares: dict[str, Array] = attrs.field(factory=dict)

    def climb(self, masters: dict[str, Array], gradients: Mapping[str, Array]) -> None:
        """Move ``masters`` one step up along ``gradients``, in place."""
        self.steps += 1
        for name, gradient in gradients.items():
            mean = self._mean.get(name, np.zeros_like(gradient))
            squares = self._squares.get(name, np.zeros_like(gradient))
            mean = np.float32(self.decay) * mean + np.float32(1 - self.decay) * gradient
            squares = np.float32(self.decay_squares) * squares + np.float32(1 - self.decay_squares) * gradient**2
            self._mean[name], self._squares[name] = mean, squares
            unbiased = mean / np.float32(1 - self.decay**self.steps)
            spread = np.sqrt(squares / np.float32(1 - self.decay_squares**self.steps)) + np.float32(1e-8)
            masters[name] = masters[name] + np.float32(self.rate) * (unbiased / spread)


class Trainer:
    """Master weights, their rounded copy, and how they learn.

    ``rate`` is Adam's. The weights only change in ``learn``; ``policy`` is what has to be served meanwhile.
    """

    def __init__(self, model: Model, *, rate: float = RATE) -> None:
        self._config = model.config
        self._masters: dict[str, Array] = {name: values.copy() for name, values in model.tensors.items()}
        self._adam = Adam(rate=rate)
        self.policy = self._rounded()

    @property
    def vocab_size(self) -> int:
        """How many token ids there are; the last one is the end token."""
        return int(self._config["vocab_size"])

    def learn(self, batch: Batch) -> float:
        """Take one step of policy gradient and return the objective before it."""
        objective, gradients = policy_gradient(self.policy, batch)
        self._adam.climb(self._masters, gradients)
        self.policy = self._rounded()
        return objective

    def tensors(self) -> Iterator[tuple[str, npt.NDArray[Any], str]]:
        """Yield name, values as they are stored, and dtype of each rounded tensor: BF16 as 16-bit words."""
        for name, values in self.policy.weights.items():
            if name in _BIASES:
                yield name, values, "F32"
            else:
                yield name, (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16), "BF16"

    def save(self, directory: str | os.PathLike[str]) -> None:
        """Write the rounded weights into ``directory`` as a checkpoint."""
        save_model(directory, Model(config=self._config, tensors=dict(self.policy.weights)))

    def digests(self) -> dict[str, str]:
        """Return the hex SHA-256 of each tensor's bytes as they are stored: BF16, the biases F32."""
        return {name: hashlib.sha256(_stored(name, values)).hexdigest() for name, values in self.policy.weights.items()}

    def _rounded(self) -> Policy:
        weights = {
            name: values.copy() if name in _BIASES else round_to_bf16(values) for name, values in self._masters.items()
        }
        return Policy(weights, int(self._config["context_size"]))


def _stored(name: str, values: Array) -> bytes:
    if name in _BIASES:
        return values.astype("<f4").tobytes()
    return (values.view(np.uint32) >> np.uint32(16)).astype("<u2").tobytes()


def new_model(directory: str | os.PathLike[str], *, seed: int) -> Model:
    """Write the demo's own model into ``directory``: 26 letters and an end token, weights drawn from ``seed``."""
    model = make_model(directory, vocab_size=LETTERS + 1, hidden_size=128, context=3, seed=seed, max_length=256)
    # Ids are letters, so that the answers can be read.
    path = os.path.join(os.fspath(directory), "tokenizer_config.json")
    with open(path, encoding="utf-8") as file:
        tokenizer: dict[str, Any] = json.load(file)
    with open(path, "w", encoding="utf-8") as file:
        json.dump({**tokenizer, "byte_offset": ord("a")}, file, indent=2)
    return model


def read_model(directory: str | os.PathLike[str]) -> Model:
    """Return the model in ``directory``; raises ``ConfigError`` when it is not one of the numpy engine."""
    try:
        return load_model(directory)
    except (OSError, ValueError, KeyError) as exc:
        raise ConfigError(
            f"{os.fspath(directory)} holds no model of the numpy engine: {exc}",
            hint="Make one with cwtrain_emulator.engine.model_io.make_model, or leave --model out",
        ) from exc
