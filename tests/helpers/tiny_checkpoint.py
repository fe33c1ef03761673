"""Small checkpoints and deltas written by hand, independent of cwtrain's own writers."""

import json
import os
import struct
import zlib

import zstandard


def st_bytes(tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes)."""
    header, offset, data = ({"__metadata__": metadata} if metadata is not None else {}), 0, b""
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, offset + len(raw)]}
        data += raw
        offset += len(raw)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def _write(directory, name, data):
    os.makedirs(directory, exist_ok=True)
    with open(os.path.join(directory, name), "wb") as file:
        file.write(data if isinstance(data, bytes) else json.dumps(data).encode())


def tiny_tensors(step=0):
    """Weights of training step ``step``: the first tensor never changes, the second does at every step."""
    return {
        "embed.weight": ("BF16", (4, 2), bytes(range(16))),
        "layer.weight": ("BF16", (4, 4), bytes((7 * i + 3 * step) % 256 for i in range(32))),
        "norm.weight": ("F32", (2,), struct.pack("<2f", 1.0, 2.0)),
    }


def write_full(directory, tensors=None, shards=2):
    """Write a full checkpoint in ``shards`` shards and return its directory."""
    tensors = tiny_tensors() if tensors is None else tensors
    names = sorted(tensors)
    weight_map = {}
    for number in range(shards):
        file = f"model-{number + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[number::shards]}
        weight_map |= dict.fromkeys(part, file)
        _write(directory, file, st_bytes(part, {"format": "pt"}))
    total = sum(len(raw) for _, _, raw in tensors.values())
    _write(directory, "config.json", {"model_type": "toy"})
    _write(directory, "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map})
    return str(directory)


def write_delta_by_hand(directory, old, new, *, version="000001", base_version="000000"):
    """Write the delta from ``old`` to ``new`` and return its directory."""
    blobs, sums = {}, {}
    for name, (_, _, raw) in new.items():
        before = old[name][2]
        if raw != before:
            frame = zstandard.ZstdCompressor().compress(bytes(a ^ b for a, b in zip(before, raw, strict=True)))
            blobs[name] = ("U8", (len(frame),), frame)
            sums[name] = f"{zlib.adler32(raw):08x}"
    file = "model-00000-of-00001.safetensors"
    _write(directory, file, st_bytes(blobs, sums))
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = {"metadata": metadata, "weight_map": dict.fromkeys(blobs, file)}
    _write(directory, "model.safetensors.index.json", index)
    return str(directory)
