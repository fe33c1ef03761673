"""Checkpoints of the numpy engine's model: make one, read one, write one.

The model is a log-bilinear language model with HF-style tensors; its maths stands in docs/reference/numpy-model.md.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cwtrain_emulator.engine.safetensors import INDEX_NAME, FormatError, read_header, write_file

__all__ = [
    "MODEL_TYPE",
    "Model",
    "bf16_to_f32",
    "f32_to_bf16",
    "load_model",
    "make_model",
    "save_model",
    "stored_dtype",
    "tensor_shapes",
]

MODEL_TYPE = "cwtrain_log_bilinear"
"""``model_type`` in ``config.json``."""

F32_TENSORS = frozenset({"model.context.bias", "lm_head.bias"})
"""The tensors kept in F32; every other one is BF16."""

Array = npt.NDArray[np.float32]


@dataclass
class Model:
    """A checkpoint in memory: ``config.json`` as it is, and every tensor widened to float32."""

    config: dict[str, Any]
    tensors: dict[str, Array] = field(default_factory=dict)


def tensor_shapes(*, vocab_size: int, hidden_size: int, context: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a model, in the order in which checkpoints store them."""
    shapes: dict[str, tuple[int, ...]] = {
        "lm_head.bias": (vocab_size,),
        "lm_head.weight": (vocab_size, hidden_size),
        "model.context.bias": (hidden_size,),
    }
    for distance in range(context):
        shapes[f"model.context.{distance}.weight"] = (hidden_size, hidden_size)
    shapes["model.embed_tokens.weight"] = (vocab_size, hidden_size)
    return shapes


def stored_dtype(name: str) -> str:
    """Return the safetensors dtype in which the tensor `name` is stored: F32 for the two biases, BF16 for the rest."""
    return "F32" if name in F32_TENSORS else "BF16"


def f32_to_bf16(values: npt.ArrayLike) -> npt.NDArray[np.uint16]:
    """Return `values` (float32) rounded to bfloat16, to nearest and ties to even, as the 16-bit patterns."""
    floats = np.asarray(values, dtype="<f4", order="C")
    bits = floats.view("<u4")
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))
    patterns: npt.NDArray[np.uint16] = (rounded >> np.uint32(16)).astype("<u2")
    return np.where(np.isnan(floats), np.uint16(0x7FC0), patterns)


def bf16_to_f32(patterns: npt.NDArray[np.uint16]) -> Array:
    """Return the float32 values of bfloat16 bit patterns; exact."""
    widened = patterns.astype("<u4") << np.uint32(16)
    result: Array = widened.view("<f4")
    return result


def make_model(
    directory: str | os.PathLike[str],
    *,
    vocab_size: int,
    hidden_size: int,
    context: int,
    seed: int,
    shards: int = 2,
    max_length: int = 2048,
) -> Model:
    """Write a fresh random model into `directory` (made if need be) and return it.

    `context` is the number of preceding tokens that the next token depends on, `max_length` the longest sequence
    (prompt and answer) that a server takes. The same arguments give the same bytes. Raises ValueError for sizes that
    make no model.
    """
    if vocab_size < 2 or hidden_size < 1 or context < 1 or max_length < 2:
        raise ValueError("vocab_size and max_length must be at least 2, hidden_size and context at least 1")
    rng = np.random.default_rng(seed)
    scales = {"lm_head.weight": 0.5 / np.sqrt(hidden_size), "model.embed_tokens.weight": 1.0}
    context_scale = 1.0 / np.sqrt(hidden_size * context)
    tensors: dict[str, Array] = {}
    for name, shape in tensor_shapes(vocab_size=vocab_size, hidden_size=hidden_size, context=context).items():
        scale = 0.0 if name in F32_TENSORS else scales.get(name, context_scale)
        values = (rng.standard_normal(shape) * scale).astype(np.float32)
        tensors[name] = values if name in F32_TENSORS else bf16_to_f32(f32_to_bf16(values))
    eos = vocab_size - 1
    config = {
        "architectures": ["CwtrainLogBilinearForCausalLM"],
        "model_type": MODEL_TYPE,
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "context_size": context,
        "max_position_embeddings": max_length,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    model = Model(config=config, tensors=tensors)
    save_model(directory, model, shards=shards)
    out = Path(directory)
    _write_json(out / "generation_config.json", {"eos_token_id": eos})
    _write_json(out / "tokenizer_config.json", _tokenizer_config(vocab_size))
    return model


def save_model(directory: str | os.PathLike[str], model: Model, *, shards: int = 2) -> Path:
    """Write `model` into `directory` as config, index and `shards` safetensors files; values are rounded to BF16.

    A weight written here and read back by `load_model` is what a replica computes with, so a trainer that keeps
    float32 masters compares with those.
    """
    if shards < 1:
        raise ValueError("shards must be at least 1")
    out = Path(directory)
    out.mkdir(parents=True, exist_ok=True)
    stored: dict[str, tuple[str, tuple[int, ...], bytes]] = {}
    for name in sorted(model.tensors):
        values = model.tensors[name]
        data = values.astype("<f4").tobytes() if name in F32_TENSORS else f32_to_bf16(values).tobytes()
        stored[name] = (stored_dtype(name), values.shape, data)
    groups = _split(stored, shards)
    weight_map: dict[str, str] = {}
    for number, names in enumerate(groups, start=1):
        file_name = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        write_file(out / file_name, {name: stored[name] for name in names}, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(names, file_name))
    total = sum(len(data) for _, _, data in stored.values())
    _write_json(out / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})
    _write_json(out / "config.json", model.config)
    return out


def load_model(directory: str | os.PathLike[str]) -> Model:
    """Read the checkpoint in `directory`; raise FormatError when it is not a model of this engine."""
    root = Path(directory)
    config = json.loads((root / "config.json").read_text())
    if not isinstance(config, dict) or config.get("model_type") != MODEL_TYPE:
        raise FormatError(f"config.json: model_type is not {MODEL_TYPE!r}")
    sizes = [config.get(key) for key in ("vocab_size", "hidden_size", "context_size")]
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise FormatError("config.json: vocab_size, hidden_size and context_size must be positive integers")
    vocab_size, hidden_size, context = (int(size) for size in sizes if size is not None)
    expected = tensor_shapes(vocab_size=vocab_size, hidden_size=hidden_size, context=context)
    tensors: dict[str, Array] = {}
    for file_name in sorted(set(_weight_map(root).values())):
        tensors.update(_read_tensors(root / file_name))
    shapes = {name: values.shape for name, values in tensors.items()}
    if shapes != expected:
        wrong = sorted(name for name in shapes.keys() | expected.keys() if shapes.get(name) != expected.get(name))
        raise FormatError(f"the checkpoint's tensors do not fit its config.json: {', '.join(wrong[:5])}")
    return Model(config=config, tensors=tensors)


def _weight_map(root: Path) -> Mapping[str, str]:
    index = json.loads((root / INDEX_NAME).read_text())
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise FormatError(f"{INDEX_NAME}: no weight_map of file names")
    return weight_map


def _read_tensors(path: Path) -> dict[str, Array]:
    header = read_header(path)
    data = memoryview(path.read_bytes())[header.data_start :]
    tensors: dict[str, Array] = {}
    for name, info in header.tensors.items():
        raw = data[info.begin : info.end]
        if info.dtype == "BF16":
            values = bf16_to_f32(np.frombuffer(raw, dtype="<u2"))
        elif info.dtype == "F32":
            values = np.frombuffer(raw, dtype="<f4").astype(np.float32)
        else:
            raise FormatError(f"{path.name}: {name!r} is {info.dtype}; this engine takes BF16 and F32")
        tensors[name] = values.reshape(info.shape)
    return tensors


def _split(stored: Mapping[str, tuple[str, tuple[int, ...], bytes]], shards: int) -> list[list[str]]:
    """Return the tensors' names in order, cut into at most `shards` runs of about equal bytes, none of them empty."""
    names = list(stored)
    shards = min(shards, len(names))
    total = sum(len(data) for _, _, data in stored.values())
    groups: list[list[str]] = [[]]
    written = 0
    for position, name in enumerate(names):
        left, open_groups = len(names) - position, shards - len(groups)
        full = written * shards >= total * len(groups)
        if groups[-1] and open_groups and (full or left <= open_groups):
            groups.append([])
        groups[-1].append(name)
        written += len(stored[name][2])
    return groups


def _tokenizer_config(vocab_size: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "CwtrainByteTokenizer",
        "vocab_size": vocab_size,
        "byte_offset": 0 if vocab_size > 256 else 32,
        "eos_token_id": vocab_size - 1,
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
