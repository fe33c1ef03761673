"""A trainer's delta writer, as slime and miles behave towards a publisher: directories, numbers, restarts.

Written from the format's description alone. Each version changes some bytes of some tensors; what every version holds
is kept, so that what is served can be compared.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import struct
from pathlib import Path

import pytest
import zstandard

from helpers.tiny_checkpoint import st_bytes, write_delta_by_hand, write_full

NAMES = ("embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight")
DTYPES = {"embed.weight": ("BF16", (8, 16)), "norm.weight": ("F32", (16,))}
OTHER = ("BF16", (16, 16))
SIZES = {"BF16": 2, "F32": 4}


def tensors_of(rng):
    """Return random tensors: name -> (dtype, shape, bytes)."""
    found = {}
    for name in NAMES:
        dtype, shape = DTYPES.get(name, OTHER)
        count = SIZES[dtype]
        for length in shape:
            count *= length
        found[name] = (dtype, shape, rng.randbytes(count))
    return found


def changed(tensors, rng):
    """Return the tensors after a training step: a few bytes of one tensor or more are others."""
    found = dict(tensors)
    for name in rng.sample(NAMES, rng.randint(1, len(NAMES))):
        dtype, shape, raw = found[name]
        data = bytearray(raw)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] ^= rng.randint(1, 255)
        found[name] = (dtype, shape, bytes(data))
    return found


def hashes(tensors):
    """Return SHA-256 of each tensor's bytes, as the emulator's replicas show it."""
    return {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in tensors.items()}


class ToyTrainer:
    """``root`` gets ``base`` (the checkpoint) and ``updates`` (the version directories). ``seed`` decides the weights.

    ``at(number)`` is what a version of this life holds; 0 is the base.
    """

    def __init__(self, root, *, seed=0):
        self.root = Path(root)
        self.rng = random.Random(seed)
        self.base = self.root / "base"
        self.updates = self.root / "updates"
        self._base_tensors = tensors_of(random.Random(seed))
        if not self.base.exists():
            write_full(self.base, self._base_tensors)
        self.updates.mkdir(exist_ok=True)
        self.restart()

    def restart(self):
        """Begin anew, as a new process of the trainer does: numbers and base from the start, the directory wiped."""
        self.number = 0
        self.tensors = self._base_tensors
        self._history = {0: self._base_tensors}
        shutil.rmtree(self.updates)
        self.updates.mkdir()

    def at(self, number):
        """Return the tensors of a version."""
        return self._history[number]

    def step(self, kind="delta", *, number=None):
        """Train, write the next version, and return its directory. ``kind``: delta, empty or full."""
        previous, before = self.number, self.tensors
        self.number = previous + 1 if number is None else number
        if kind != "empty":
            self.tensors = changed(self.tensors, self.rng)
        self._history[self.number] = self.tensors
        place = self.updates / f"weight_v{self.number:06d}"
        if kind == "full":
            return write_full(place, self.tensors)
        versions = {"version": f"{self.number:06d}", "base_version": f"{previous:06d}"}
        if kind == "empty":
            return write_empty(place, **versions)
        return write_delta_by_hand(place, before, self.tensors, **versions)


def write_empty(directory, *, version, base_version):
    """Write the delta of a step that changed nothing: an index and no shard."""
    os.makedirs(directory, exist_ok=True)
    metadata = {
        "version": version,
        "base_version": base_version,
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    Path(directory, "model.safetensors.index.json").write_text(json.dumps({"metadata": metadata, "weight_map": {}}))
    return str(directory)


def repeat_tensor(directory, name):
    """Write tensor ``name`` of a delta into a second shard as well, as slime does with pipeline-parallel ranks."""
    place = Path(directory)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    shard = (place / index["weight_map"][name]).read_bytes()
    length = int.from_bytes(shard[:8], "little")
    header = json.loads(shard[8 : 8 + length])
    begin, end = header[name]["data_offsets"]
    blob = shard[8 + length + begin : 8 + length + end]
    copy = st_bytes({name: ("U8", (len(blob),), blob)}, {name: header["__metadata__"][name]})
    (place / "model-00001-of-00002.safetensors").write_bytes(copy)
    index["weight_map"][name] = "model-00001-of-00002.safetensors"
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(place)


def foreign(directory, old, new, dialect):
    """Write a delta anew with a checksum or an encoding that the service does not take.

    Skips the test where the checksum's library, which core alone does not bring, is missing.
    """
    place = Path(directory)
    index = json.loads((place / "model.safetensors.index.json").read_text())
    checksum = "xxh3-128" if dialect == "overwrite" else dialect
    library = pytest.importorskip({"xxh3-128": "xxhash", "blake3": "blake3"}[checksum])
    digest = library.blake3 if checksum == "blake3" else library.xxh3_128
    index["metadata"] |= {
        "checksum_format": checksum,
        "delta_encoding": "overwrite" if dialect == "overwrite" else "xor",
    }
    blobs, sums = {}, {}
    for name in index["weight_map"]:
        before, after = old[name][2], new[name][2]
        if dialect == "overwrite":
            places = [at for at in range(len(after)) if before[at] != after[at]]
            payload = struct.pack(f"<{1 + len(places)}I", len(places), *places) + bytes(after[at] for at in places)
        else:
            payload = bytes(a ^ b for a, b in zip(before, after, strict=True))
        frame = zstandard.ZstdCompressor(level=1).compress(payload)
        blobs[name] = ("U8", (len(frame),), frame)
        sums[name] = digest(after).hexdigest()
    (place / "model-00000-of-00001.safetensors").write_bytes(st_bytes(blobs, sums))
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(place)
