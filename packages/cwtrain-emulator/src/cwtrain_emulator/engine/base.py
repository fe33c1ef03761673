"""What a replica wants of an engine and of a tokenizer. Nothing here knows which ones there are.

Sequences are read lazily: a token becomes part of what a batch remembers (its KV) at the next `read`, computed with the
weights of that moment. So a token that was sampled just before a swap is read with the new weights, as in real engines.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Detokenizer", "Engine", "EngineOf", "Memory", "TextError", "Tokenizer"]

Array = npt.NDArray[np.float32]


class TextError(ValueError):
    """A text, or a conversation, cannot be turned into ids by this model's tokenizer; the message says why."""


class Memory(Protocol):
    """A copy of what an engine remembers of one sequence: its KV. Never changed after it was made."""

    @property
    def length(self) -> int:
        """Number of tokens that it remembers."""
        ...

    @property
    def size_bytes(self) -> int:
        """What it takes in memory."""
        ...


MemoryT = TypeVar("MemoryT", bound=Memory)
BatchT = TypeVar("BatchT")


class EngineOf(Protocol[BatchT, MemoryT]):
    """Computes logits with the weights of one identity.

    A batch is its own affair: sequences of equal length that are extended together, with what was read of them and what
    is still to be read.
    """

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        ...

    @property
    def max_length(self) -> int:
        """The longest sequence, prompt and answer together."""
        ...

    @property
    def shape(self) -> Hashable:
        """Equal for two engines exactly when one can go on with what the other one remembers."""
        ...

    @property
    def window(self) -> int | None:
        """How many tokens back a token's logits depend on what is remembered; None: all of them."""
        ...

    @property
    def in_thread(self) -> bool:
        """True when `read` takes long enough to be kept off the event loop."""
        ...

    def activate(self) -> None:
        """Take over from the engine that served before; called once, when nothing is being read."""
        ...

    def start(self, prompt: Sequence[int], memory: MemoryT | None = None) -> BatchT:
        """Return one sequence that is to read `prompt`, of which the first tokens may be remembered already."""
        ...

    def read(self, batch: BatchT) -> Array:
        """Read what has not been read and return the logits of each sequence's next token, [sequences, vocabulary]."""
        ...

    def repeat(self, batch: BatchT, copies: int) -> None:
        """Turn a batch of one sequence into `copies` equal ones."""
        ...

    def extend(self, batch: BatchT, tokens: npt.NDArray[np.int64]) -> None:
        """Append one token to each sequence, to be read next."""
        ...

    def keep(self, batch: BatchT, which: npt.NDArray[np.bool_]) -> None:
        """Forget the sequences that `which` does not select."""
        ...

    def remember(self, batch: BatchT, row: int) -> MemoryT:
        """Return a copy of what was read of one sequence."""
        ...

    def cut(self, memory: MemoryT, length: int) -> MemoryT:
        """Return the part of a memory that belongs to its first `length` tokens."""
        ...


Engine: TypeAlias = EngineOf[Any, Any]
"""Any engine, for those who only hand its batches and memories back to it."""


class Detokenizer(Protocol):
    """Turns ids into text as they come."""

    def push(self, token: int) -> str:
        """Return the text that is certain with this id; what may still change waits."""
        ...

    def finish(self) -> str:
        """Return what was still waiting."""
        ...


class Tokenizer(Protocol):
    """Text to ids and back."""

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return a text's ids; raise TextError."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, special ones included."""
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the bytes of some ids, where the tokenizer knows them; else those of `decode`."""
        ...

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool) -> Detokenizer:
        """Return one for an answer to `prompt`; `skip_special` leaves special tokens out of the text."""
        ...

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the prompt of a conversation by the model's chat template; raise TextError.

        `options` are the template's further arguments, ``add_generation_prompt`` and ``continue_final_message``
        among them.
        """
        ...
