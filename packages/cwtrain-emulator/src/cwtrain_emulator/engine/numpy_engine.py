"""The numpy engine: the model of docs/reference/numpy-model.md, in batches, with the rows it remembers as its KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cwtrain_emulator.engine.model_io import Model, load_model

__all__ = ["Batch", "NumpyEngine"]

Array = npt.NDArray[np.float32]


@dataclass
class Batch:
    """What the engine remembers of some sequences: the embedding rows of each one's last tokens, the newest first.

    Shape [sequences, context, hidden]; zero where a sequence has fewer tokens than the context.
    """

    rows: Array


class NumpyEngine:
    """Computes logits with the weights of one checkpoint. Holds no state of any request."""

    def __init__(self, model: Model) -> None:
        config, tensors = model.config, model.tensors
        self.vocab_size = int(config["vocab_size"])
        self.max_length = int(config.get("max_position_embeddings", 2048))
        self._hidden, self._context = int(config["hidden_size"]), int(config["context_size"])
        self._embed = tensors["model.embed_tokens.weight"]
        self._bias = tensors["model.context.bias"]
        # The K_i stacked: one product of the flattened rows with them is the sum over all i.
        self._mix = np.concatenate([tensors[f"model.context.{i}.weight"] for i in range(self._context)])
        self._head = np.ascontiguousarray(tensors["lm_head.weight"].T)
        self._head_bias = tensors["lm_head.bias"]

    @classmethod
    def load(cls, directory: Path) -> NumpyEngine:
        """Return the engine for the checkpoint in `directory`; raise FormatError when it is no model of this engine."""
        return cls(load_model(directory))

    def start(self, prompt: Sequence[int], copies: int) -> Batch:
        """Return a batch of `copies` equal sequences that have read `prompt`."""
        rows = np.zeros((self._context, self._hidden), np.float32)
        newest_first = list(prompt[-self._context :])[::-1]
        rows[: len(newest_first)] = self._embed[newest_first]
        return Batch(np.repeat(rows[None], copies, axis=0))

    def logits(self, batch: Batch) -> Array:
        """Return the logits of each sequence's next token, shape [sequences, vocabulary]."""
        flat = batch.rows.reshape(len(batch.rows), -1)
        hidden = np.tanh(self._bias + flat @ self._mix)
        result: Array = hidden @ self._head + self._head_bias
        return result

    def extend(self, batch: Batch, tokens: npt.NDArray[np.int64]) -> None:
        """Let each sequence read one token more."""
        rows = np.empty_like(batch.rows)
        rows[:, 0] = self._embed[tokens]
        rows[:, 1:] = batch.rows[:, :-1]
        batch.rows = rows

    def keep(self, batch: Batch, which: npt.NDArray[np.bool_]) -> None:
        """Forget the sequences that `which` does not select."""
        batch.rows = batch.rows[which]

    def accepts(self, batch: Batch) -> bool:
        """Return True when this engine can go on with what another one remembered."""
        return batch.rows.shape[1:] == (self._context, self._hidden)
