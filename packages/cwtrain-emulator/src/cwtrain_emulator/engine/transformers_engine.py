"""The transformers engine: any Hugging Face causal model on the CPU, with its past key values as KV.

The only module that imports torch and transformers, an extra, and only where it uses them. Weights are widened to
float32 and computed with in float32, so that what a trainer computes can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cwtrain_emulator.engine.base import TextError, Tokenizer
from cwtrain_emulator.engine.safetensors import INDEX_NAME, FormatError

if TYPE_CHECKING:
    import torch
    from transformers import DynamicCache

__all__ = ["HfTokenizer", "KvBatch", "KvMemory", "TransformersEngine", "load_tokenizer", "prepare"]

Array = npt.NDArray[np.float32]
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

_NEIGHBOURS = 5
"""How many ids of the prompt are decoded with the answer's first one: its text may begin with a blank, or not."""

_LONGEST_CHARACTER = 4
"""Ids that may be waited for until their bytes are a character."""

_WEIGHTLESS_CONFIG = ("_name_or_path", "transformers_version", "dtype", "torch_dtype")


@dataclass(frozen=True)
class KvMemory:
    """Keys and values of one sequence, by layer: [1, heads, tokens, head size]."""

    layers: list[tuple[torch.Tensor, torch.Tensor]]

    @property
    def length(self) -> int:
        """Number of tokens."""
        return int(self.layers[0][0].shape[-2])

    @property
    def size_bytes(self) -> int:
        """Bytes of all keys and values."""
        return sum(part.element_size() * part.nelement() for layer in self.layers for part in layer)


@dataclass
class KvBatch:
    """Some sequences: their KV, and the ids that are not in it yet, [sequences, ids]."""

    cache: DynamicCache
    pending: torch.Tensor


@dataclass
class _Shared:
    """One model in memory, whose weights are overwritten at each swap; `shape` says what it is."""

    model: Any
    shape: Hashable


class TransformersEngine:
    """Computes logits with the weights of one identity, once it was activated and until the next one is."""

    in_thread = True
    window: int | None = None

    def __init__(self, shared: _Shared, staged: Mapping[str, torch.Tensor] | None) -> None:
        self._shared = shared
        self._staged = staged
        config = shared.model.config.get_text_config()
        self.vocab_size = int(config.vocab_size)
        self.max_length = int(getattr(config, "max_position_embeddings", None) or 2048)

    @classmethod
    def load(cls, directory: Path, *, previous: object = None) -> TransformersEngine:
        """Return the engine for the checkpoint in `directory`; raise FormatError when it cannot be one.

        When `previous` serves a model of the same kind and size, nothing is made anew: the weights are read, and
        `activate` copies them into the model that is there.
        """
        shape = _shape(directory)
        if isinstance(previous, TransformersEngine) and previous._shared.shape == shape:
            staged = _stage(directory, previous._shared.model)
            if staged is not None:
                return cls(previous._shared, staged)
        return cls(_Shared(_load_model(directory), shape), None)

    @property
    def shape(self) -> Hashable:
        """The model's config, without what says nothing about the tensors."""
        return self._shared.shape

    def activate(self) -> None:
        """Copy the staged weights over those of the identity that was served before."""
        import torch

        staged, self._staged = self._staged, None
        if staged is None:
            return
        with torch.no_grad():
            for name, parameter in self._shared.model.named_parameters():
                parameter.copy_(staged[name])
            for name, buffer in _saved_buffers(self._shared.model):
                buffer.copy_(staged[name])

    def start(self, prompt: Sequence[int], memory: KvMemory | None = None) -> KvBatch:
        """Return a sequence that is to read `prompt` behind what `memory` has of it."""
        import torch
        from transformers import DynamicCache

        cache = DynamicCache()
        known = 0
        if memory is not None:
            known = memory.length
            for number, (keys, values) in enumerate(memory.layers):
                cache.update(keys, values, number)
        return KvBatch(cache, torch.tensor([list(prompt[known:])], dtype=torch.long))

    def read(self, batch: KvBatch) -> Array:
        """Run the model over the pending tokens and return the next token's logits."""
        import torch

        with torch.inference_mode():
            output = self._shared.model(input_ids=batch.pending, cache=batch.cache, use_cache=True, logits_to_keep=1)
            batch.pending = batch.pending[:, :0]
            logits: Array = output.logits[:, -1].float().numpy()
            return logits

    def repeat(self, batch: KvBatch, copies: int) -> None:
        """Turn one sequence into `copies`."""
        if copies > 1:
            batch.cache.batch_repeat_interleave(copies)
        batch.pending = batch.pending.repeat(copies, 1)

    def extend(self, batch: KvBatch, tokens: npt.NDArray[np.int64]) -> None:
        """Append one token to each sequence."""
        import torch

        batch.pending = torch.from_numpy(tokens.astype(np.int64))[:, None]

    def keep(self, batch: KvBatch, which: npt.NDArray[np.bool_]) -> None:
        """Forget the sequences that `which` does not select."""
        import torch

        rows = torch.from_numpy(np.flatnonzero(which))
        batch.cache.batch_select_indices(rows)
        batch.pending = batch.pending[rows]

    def remember(self, batch: KvBatch, row: int) -> KvMemory:
        """Return a copy of one sequence's keys and values."""
        layers = batch.cache.layers
        return KvMemory([(layer.keys[row : row + 1].clone(), layer.values[row : row + 1].clone()) for layer in layers])

    def cut(self, memory: KvMemory, length: int) -> KvMemory:
        """Return the first keys and values."""
        return KvMemory([(keys[:, :, :length], values[:, :, :length]) for keys, values in memory.layers])


def prepare() -> None:
    """Import what the engine needs, which takes seconds the first time; nothing is ever looked up on the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    assert AutoModelForCausalLM, AutoTokenizer
    logging.disable_progress_bar()


def _shape(directory: Path) -> Hashable:
    config = json.loads((directory / "config.json").read_text())
    return json.dumps({key: value for key, value in config.items() if key not in _WEIGHTLESS_CONFIG}, sort_keys=True)


def _load_model(directory: Path) -> Any:
    """Return the model in float32, by transformers' own loader."""
    prepare()
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

    try:
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        loaded, about = AutoModelForCausalLM.from_pretrained(
            directory, config=config, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except Exception as exc:
        # Whatever a model's own code raises: the checkpoint cannot be served, and the reason is the operator's.
        raise FormatError(f"transformers cannot load it: {type(exc).__name__}: {exc}") from exc
    missing = sorted(about["missing_keys"])
    if missing:
        raise FormatError(f"the checkpoint lacks tensors of its model: {', '.join(missing[:5])}")
    model: Any = loaded
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with torch.inference_mode():
        cache = DynamicCache()
        model(input_ids=torch.zeros((1, 1), dtype=torch.long), cache=cache, use_cache=True)
    if not all(getattr(layer, "keys", None) is not None for layer in cache.layers) or not cache.layers:
        raise FormatError("the model remembers something else than keys and values, which this engine does not serve")
    return model


def _stage(directory: Path, model: Any) -> dict[str, torch.Tensor] | None:
    """Return the checkpoint's tensor for each parameter of the model, or None when the names do not say which is which.

    A tied parameter has several names, of which the checkpoint may have one or all; if all, they must be equal, else
    they are not tied in this checkpoint.
    """
    import torch

    found: dict[str, torch.Tensor] = {}
    for name, tensor in _tensors(directory):
        found[name] = tensor
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    staged: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        given = [found.pop(alias) for alias in aliases[id(parameter)] if alias in found]
        if not given or any(tensor.shape != parameter.shape for tensor in given):
            return None
        if any(not torch.equal(given[0], other) for other in given[1:]):
            return None
        staged[name] = given[0]
    for name, buffer in _saved_buffers(model):
        if name not in found or found[name].shape != buffer.shape:
            return None
        staged[name] = found.pop(name)
    return None if found else staged


def _saved_buffers(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the buffers that checkpoints have."""
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers():
        if name in saved:
            yield name, buffer


def _tensors(directory: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    index = json.loads((directory / INDEX_NAME).read_text())
    for file_name in sorted(set(index["weight_map"].values())):
        with safe_open(directory / file_name, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a mapping
                yield name, file.get_tensor(name)


# Text ----------------------------------------------------------------------------------------------------------------


def load_tokenizer(directory: Path) -> Tokenizer:
    """Return the checkpoint's tokenizer; where it has none, one that refuses texts and shows none."""
    if not any((directory / name).exists() for name in _TOKENIZER_FILES):
        # Asked without them, transformers makes an empty one.
        return HfTokenizer(None, why_not=f"none of {', '.join(_TOKENIZER_FILES)} is there")
    prepare()
    from transformers import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    except Exception as exc:  # noqa: BLE001 - there are many ways to be without a tokenizer
        return HfTokenizer(None, why_not=f"{type(exc).__name__}: {exc}")
    return HfTokenizer(found)


class HfTokenizer:
    """A tokenizer of transformers; with None, requests come and go in token ids alone."""

    def __init__(self, tokenizer: Any, *, why_not: str = "") -> None:
        self._tokenizer = tokenizer
        self._why_not = why_not

    @property
    def eos_id(self) -> int | None:
        """The tokenizer's own end token."""
        value = getattr(self._tokenizer, "eos_token_id", None)
        return value if isinstance(value, int) else None

    def encode(self, text: str) -> list[int]:
        """Return a text's ids, with the special ones that the tokenizer adds."""
        self._needed()
        ids: list[int] = self._tokenizer(text)["input_ids"]
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of some ids, special ones included."""
        return self._decode(list(ids), skip_special=False)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """Return the text's bytes; half a character is shown as U+FFFD."""
        return self.decode(ids).encode()

    def detokenizer(self, prompt: Sequence[int], *, skip_special: bool) -> _HfDetokenizer:
        """Return a new detokenizer."""
        return _HfDetokenizer(lambda ids: self._decode(ids, skip_special=skip_special), list(prompt[-_NEIGHBOURS:]))

    def chat(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> list[int]:
        """Return the prompt of a conversation by the model's own template."""
        self._needed()
        if not self._tokenizer.chat_template:
            raise TextError("the model's tokenizer has no chat template")
        try:
            text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **options)
            ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as exc:
            # A template may raise what it likes; it is the conversation, or an argument, that does not suit it.
            raise TextError(f"the chat template cannot be applied: {exc}") from exc
        return ids

    def _needed(self) -> None:
        if self._tokenizer is None:
            raise TextError(f"the model has no tokenizer, send token ids ({self._why_not})")

    def _decode(self, ids: list[int], *, skip_special: bool) -> str:
        if self._tokenizer is None:
            return ""
        with contextlib.suppress(IndexError, OverflowError, TypeError):
            return str(
                self._tokenizer.decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False)
            )
        return ""


class _HfDetokenizer:
    """Decodes a short window of ids again and again, as a token's text may depend on its neighbours."""

    def __init__(self, decode: Callable[[list[int]], str], before: list[int]) -> None:
        self._decode = decode
        self._ids = before
        self._shown = decode(before)
        self._waiting = 0

    def push(self, token: int) -> str:
        self._ids.append(token)
        self._waiting += 1
        text = self._decode(self._ids)
        half = text.endswith("\ufffd")
        if half and self._waiting < _LONGEST_CHARACTER:
            return ""
        new = text[len(self._shown) :]
        # The last id stays, as the neighbour of the next one, unless it is what will never be a character.
        self._ids = [] if half else self._ids[-1:]
        self._shown = self._decode(self._ids)
        self._waiting = 0
        return new

    def finish(self) -> str:
        new = self._decode(self._ids)[len(self._shown) :]
        self._ids, self._shown = [], ""
        return new
