"""The checkpoints that the benchmarks work on: made up, but with the statistics of reinforcement learning in bf16.

    python benchmarks/data.py OUT [--model dense|moe] [--size small|full] [--density 0.012 0.03 ...] [--chain]

`--model layers:N` and `--model tensors:N` are models of N layers, for seeing how cost grows: with the bytes, or with
the number of (small) tensors.

OUT gets a directory `base` and one for each density, `d1.2`, `d3`, ...: the same model after an update that changes
about this part of its elements. With `--chain` each version is made from the one before, not from the base.

Master weights are float32, normal with deviation 0.02 (norm weights: near 1). An update moves each by a normal step, as
Adam does at a constant rate; the bf16 element changes where the step crosses a rounding border. The step's size is
searched so that the wanted part changes. Only a quarter of the embedding's rows move, as in a batch of prompts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import struct
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

PIECE = 1 << 20  # elements made at once


class Model(NamedTuple):
    """Names and shapes, and in how many shards they are saved."""

    tensors: dict[str, tuple[int, ...]]
    shards: int


def dense(*, hidden: int, inner: int, kv: int, layers: int, vocabulary: int) -> Model:
    """A transformer shaped like Qwen2.5-0.5B at full size (290 tensors, 988 MB in bf16)."""
    tensors: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(layers):
        block = {
            "self_attn.q_proj.weight": (hidden, hidden),
            "self_attn.q_proj.bias": (hidden,),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.k_proj.bias": (kv,),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.v_proj.bias": (kv,),
            "self_attn.o_proj.weight": (hidden, hidden),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        tensors |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    tensors["model.norm.weight"] = (hidden,)
    return Model(tensors, 2)


def experts(*, hidden: int, inner: int, layers: int = 48, count: int = 64) -> Model:
    """Nothing but the experts of a mixture: 48 layers of 64 with 3 small matrices each, 9,216 tensors."""
    tensors = {
        f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight": shape
        for layer in range(layers)
        for expert in range(count)
        for kind, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        )
    }
    return Model(tensors, 4)


MODELS = {
    ("dense", "small"): dense(hidden=512, inner=1536, kv=128, layers=8, vocabulary=32000),
    ("dense", "full"): dense(hidden=896, inner=4864, kv=128, layers=24, vocabulary=151936),
    ("moe", "small"): experts(hidden=128, inner=64),
    ("moe", "full"): experts(hidden=512, inner=64),
}


def model(name: str, size: str) -> Model:
    """Return the model of that name: `dense`, `moe`, `layers:8`, `tensors:12`."""
    kind, _, layers = name.partition(":")
    if kind == "layers":
        hidden, inner = (512, 1536) if size == "small" else (896, 4864)
        return dense(hidden=hidden, inner=inner, kv=128, layers=int(layers), vocabulary=4000)
    if kind == "tensors":
        return experts(hidden=64 if size == "small" else 512, inner=16, layers=int(layers))
    return MODELS[kind, size]


def to_bf16(values: np.ndarray) -> np.ndarray:
    """Round float32 to bf16, ties to even; the result has dtype uint16."""
    bits = values.view(np.uint32)
    return ((bits + (((bits >> 16) & 1) + np.uint32(0x7FFF))) >> 16).astype(np.uint16)


def step_size(density: float) -> float:
    """Return the deviation of the step that changes this part of bf16 weights of deviation 0.02."""
    random = np.random.default_rng(1)
    weights, noise = (random.standard_normal(1 << 18, dtype=np.float32) for _ in range(2))
    weights *= np.float32(0.02)
    before = to_bf16(weights)
    low, high = 1e-9, 1.0
    for _ in range(40):
        middle = math.sqrt(low * high)
        if np.mean(to_bf16(weights + noise * np.float32(middle)) != before) < density:
            low = middle
        else:
            high = middle
    return high


def pieces(name: str, shape: tuple[int, ...], seed: int, steps: Sequence[float], *, chain: bool) -> Iterator[tuple]:
    """Yield (first element, [base, version, ...]) of a tensor in pieces of whole rows."""
    row = shape[-1]
    rows = math.prod(shape) // row
    at_once = max(1, PIECE // row)
    for start in range(0, rows, at_once):
        count = min(at_once, rows - start)
        random = np.random.default_rng([seed, start])
        weights = random.standard_normal((count, row), dtype=np.float32) * np.float32(0.02)
        if "norm" in name:
            weights = weights * np.float32(5) + np.float32(1)
        made = [to_bf16(weights)]
        for deviation in steps:
            move = random.standard_normal((count, row), dtype=np.float32) * np.float32(deviation)
            if "embed" in name:
                move *= (random.random(count) < 0.25)[:, None]
            moved = weights + move
            made.append(to_bf16(moved))
            if chain:
                weights = moved
        yield start * row, made


def layout(model: Model) -> dict[str, list[str]]:
    """Return which tensors go to which shard: all shards about equally large."""
    total = sum(map(math.prod, model.tensors.values()))
    shards: dict[str, list[str]] = {}
    seen = 0
    for name, shape in model.tensors.items():
        number = min(model.shards - 1, seen * model.shards // total)
        shards.setdefault(f"model-{number + 1:05d}-of-{model.shards:05d}.safetensors", []).append(name)
        seen += math.prod(shape)
    return shards


def make(out: Path, model: Model, densities: Sequence[float], *, chain: bool = False, threads: int = 2) -> list[Path]:
    """Write the base and one version for each density below ``out``, and return their directories."""
    names = ["base", *(f"d{density * 100:g}" for density in densities)]
    if chain:
        names = ["base", *(f"v{number}" for number in range(1, len(densities) + 1))]
    steps = [step_size(density) for density in densities]
    places: dict[str, tuple[str, int]] = {}
    heads: dict[str, bytes] = {}
    sizes: dict[str, int] = {}
    for shard, members in layout(model).items():
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name in members:
            size = 2 * math.prod(model.tensors[name])
            places[name] = (shard, offset)
            header[name] = {
                "dtype": "BF16", "shape": list(model.tensors[name]), "data_offsets": [offset, offset + size],
            }  # fmt: skip
            offset += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        heads[shard] = struct.pack("<Q", len(text)) + text
        sizes[shard] = offset
    files: dict[tuple[str, str], int] = {}
    for version in names:
        directory = out / version
        directory.mkdir(parents=True, exist_ok=True)
        total = {"metadata": {"total_size": sum(sizes.values())}}
        index = {**total, "weight_map": {name: shard for name, (shard, _) in places.items()}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        (directory / "config.json").write_text(json.dumps({"model_type": "qwen2", "torch_dtype": "bfloat16"}))
        for shard, head in heads.items():
            files[version, shard] = os.open(directory / shard, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644)
            os.pwrite(files[version, shard], head, 0)

    def fill(numbered: tuple[int, str]) -> list[int]:
        number, name = numbered
        shard, offset = places[name]
        changed = [0] * len(densities)
        for first, made in pieces(name, model.tensors[name], number, steps, chain=chain):
            for version, values in zip(names, made, strict=True):
                os.pwrite(files[version, shard], values, len(heads[shard]) + offset + 2 * first)
            for which in range(len(densities)):
                changed[which] += int((made[which + 1] != made[which if chain else 0]).sum())
        return changed

    with ThreadPoolExecutor(threads) as pool:
        counts = [sum(column) for column in zip(*pool.map(fill, enumerate(model.tensors)), strict=True)]
    for handle in files.values():
        os.close(handle)
    elements = sum(map(math.prod, model.tensors.values()))
    for version, count in zip(names[1:], counts, strict=True):
        print(f"{version}: {count / elements:.3%} of {elements} elements changed", flush=True)
    return [out / version for version in names]


def main() -> None:
    """Make the data of one model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--model", default="dense", help="dense, moe, layers:N or tensors:N")
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--density", type=float, nargs="+", default=[0.012, 0.03, 0.08, 0.4])
    parser.add_argument("--chain", action="store_true", help="each version from the one before, not from the base")
    options = parser.parse_args()
    make(options.out, model(options.model, options.size), options.density, chain=options.chain)


if __name__ == "__main__":
    main()
