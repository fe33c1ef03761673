"""The numpy engine's model, recomputed from docs/reference/numpy-model.md with none of the engine's own code."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np


def read_tensors(directory: Path) -> dict[str, Any]:
    """Return every tensor of a checkpoint as float32."""
    weight_map = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    return decode({name: (directory / name).read_bytes() for name in set(weight_map.values())})


def decode(files: Mapping[str, bytes]) -> dict[str, Any]:
    """Return every tensor of some safetensors files, BF16 or F32, as float32."""
    found = {}
    for raw in files.values():
        length = struct.unpack("<Q", raw[:8])[0]
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__", None)
        for name, info in header.items():
            begin, end = info["data_offsets"]
            data = raw[8 + length + begin : 8 + length + end]
            if info["dtype"] == "BF16":
                # A bfloat16 is the upper half of a float32.
                padded = b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))
                values = np.frombuffer(padded, "<f4")
            else:
                assert info["dtype"] == "F32"
                values = np.frombuffer(data, "<f4")
            found[name] = values.reshape(info["shape"])
    return found


def next_token_logprobs(tensors: Mapping[str, Any], ids: Sequence[int], context_size: int) -> Any:
    """Return the raw log-probs of the token after `ids`."""
    z = tensors["model.context.bias"].astype(np.float32)
    for i in range(min(context_size, len(ids))):
        z = z + tensors["model.embed_tokens.weight"][ids[-1 - i]] @ tensors[f"model.context.{i}.weight"]
    logits = tensors["lm_head.weight"] @ np.tanh(z) + tensors["lm_head.bias"]
    logits = logits.astype(np.float64)
    logits -= logits.max()
    return logits - np.log(np.exp(logits).sum())
