"""What transformers itself makes of a checkpoint, with none of the emulator's code. Import only where torch is."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

logging.disable_progress_bar()


def load(directory: Path) -> Any:
    """Return the model in float32."""
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, local_files_only=True).eval()


def greedy(model: Any, prompt: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """Return what `generate` takes as the likeliest tokens, and their log-probs."""
    ids = torch.tensor([list(prompt)])
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[0, len(prompt) :].tolist()
    logprobs = [
        float(torch.log_softmax(logits[0].double(), dim=-1)[token])
        for logits, token in zip(output.logits, tokens, strict=True)
    ]
    return tokens, logprobs


def score(model: Any, prompt: Sequence[int], answer: Sequence[int]) -> list[float]:
    """Return the log-probs of an answer's tokens with one set of weights, all of it read at once."""
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1].double()
    found = torch.log_softmax(logits, dim=-1)
    return [float(found[row, token]) for row, token in enumerate(answer)]


def template_ids(directory: Path, messages: list[dict[str, str]]) -> list[int]:
    """Return a conversation's prompt by the tokenizer's own means."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    found = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return list(found)


def decode(directory: Path, ids: Sequence[int]) -> str:
    """Return the text of some ids without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    return str(tokenizer.decode(list(ids), skip_special_tokens=True))


def perturb(directory: Path, *, seed: int, scale: float) -> None:
    """Add noise to every tensor of a checkpoint, in place and in its own dtype."""
    generator = torch.Generator().manual_seed(seed)
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator) * scale
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
