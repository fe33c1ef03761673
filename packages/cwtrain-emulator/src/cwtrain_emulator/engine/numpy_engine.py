"""The numpy engine: the model of docs/reference/numpy-model.md, in batches, with the rows it remembers as its KV."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cwtrain_emulator.engine.model_io import Model, load_model

__all__ = ["NumpyBatch", "NumpyEngine", "NumpyMemory"]

Array = npt.NDArray[np.float32]


@dataclass(frozen=True)
class NumpyMemory:
    """The embedding rows of a sequence's tokens, oldest first, each with the weights that read it: [tokens, hidden]."""

    rows: Array

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.rows)

    @property
    def size_bytes(self) -> int:
        """Bytes of the rows."""
        return self.rows.nbytes


@dataclass
class NumpyBatch:
    """Rows of some sequences, oldest first, behind `context` rows of zeros: [sequences, room, hidden].

    `end` is where the next row goes; `pending` are the ids that have no row yet, [sequences, ids].
    """

    rows: Array
    end: int
    pending: npt.NDArray[np.int64]


class NumpyEngine:
    """Computes logits with the weights of one checkpoint. Holds no state of any request."""

    in_thread = False

    def __init__(self, model: Model) -> None:
        config, tensors = model.config, model.tensors
        self.vocab_size = int(config["vocab_size"])
        self.max_length = int(config.get("max_position_embeddings", 2048))
        self._hidden, self._context = int(config["hidden_size"]), int(config["context_size"])
        self._embed = tensors["model.embed_tokens.weight"]
        self._bias = tensors["model.context.bias"]
        # The K_i stacked, the oldest token's first, as the rows stand: one product of the flattened rows with them is
        # the sum over all i.
        self._mix = np.concatenate([tensors[f"model.context.{i}.weight"] for i in reversed(range(self._context))])
        self._head = np.ascontiguousarray(tensors["lm_head.weight"].T)
        self._head_bias = tensors["lm_head.bias"]

    @classmethod
    def load(cls, directory: Path) -> NumpyEngine:
        """Return the engine for the checkpoint in `directory`; raise FormatError when it is no model of this engine."""
        return cls(load_model(directory))

    @property
    def shape(self) -> Hashable:
        """What must be equal for one engine to go on with another one's rows."""
        return ("numpy", self.vocab_size, self._hidden, self._context)

    @property
    def window(self) -> int | None:
        """The model's context."""
        return self._context

    def activate(self) -> None:
        """Do nothing: each identity has arrays of its own."""

    def start(self, prompt: Sequence[int], memory: NumpyMemory | None = None) -> NumpyBatch:
        """Return a sequence that is to read `prompt` behind what `memory` has of it."""
        known = 0 if memory is None else memory.length
        rows = np.zeros((1, self._context + len(prompt), self._hidden), np.float32)
        if memory is not None:
            rows[0, self._context : self._context + known] = memory.rows
        return NumpyBatch(rows, self._context + known, np.asarray(prompt[known:], np.int64)[None])

    def read(self, batch: NumpyBatch) -> Array:
        """Give the pending tokens their rows and return the next token's logits."""
        end = batch.end + batch.pending.shape[1]
        if end > batch.rows.shape[1]:
            grown = np.zeros((len(batch.rows), max(end, 2 * batch.rows.shape[1]), self._hidden), np.float32)
            grown[:, : batch.end] = batch.rows[:, : batch.end]
            batch.rows = grown
        batch.rows[:, batch.end : end] = self._embed[batch.pending]
        batch.end, batch.pending = end, batch.pending[:, :0]
        flat = batch.rows[:, end - self._context : end].reshape(len(batch.rows), -1)
        hidden = np.tanh(self._bias + flat @ self._mix)
        result: Array = hidden @ self._head + self._head_bias
        return result

    def repeat(self, batch: NumpyBatch, copies: int) -> None:
        """Turn one sequence into `copies`."""
        batch.rows = np.repeat(batch.rows, copies, axis=0)
        batch.pending = np.repeat(batch.pending, copies, axis=0)

    def extend(self, batch: NumpyBatch, tokens: npt.NDArray[np.int64]) -> None:
        """Append one token to each sequence."""
        batch.pending = tokens[:, None]

    def keep(self, batch: NumpyBatch, which: npt.NDArray[np.bool_]) -> None:
        """Forget the sequences that `which` does not select."""
        batch.rows, batch.pending = batch.rows[which], batch.pending[which]

    def remember(self, batch: NumpyBatch, row: int) -> NumpyMemory:
        """Return a copy of one sequence's rows."""
        return NumpyMemory(batch.rows[row, self._context : batch.end].copy())

    def cut(self, memory: NumpyMemory, length: int) -> NumpyMemory:
        """Return the first rows."""
        return NumpyMemory(memory.rows[:length])
