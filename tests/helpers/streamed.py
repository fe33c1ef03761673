"""Tensors for the streaming writer, and what it wrote, read back by hand: nothing here uses cwtrain's own readers."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from cwtrain.hotload import SnapshotWriter
from cwtrain.hotload.bases import BaseTensors
from cwtrain.hotload.writer import WrittenSnapshot
from cwtrain.storage import Location, ObjectStore
from cwtrain.storage.stream import StreamSizes

INDEX = "model.safetensors.index.json"
TINY = StreamSizes(pool_bytes=256 << 10, block_bytes=4 << 10, part_bytes=16 << 10, single_bytes=64 << 10)
"""For a store in memory, which has no smallest part."""

State = dict[str, Any]


def make_state(seed: int, *, scale: int = 1) -> State:
    """Return tensors of several kinds: large and small, a scalar, an empty one, one that is not contiguous."""
    rng = np.random.default_rng(seed)
    state: State = {
        f"layers.{number}.weight": rng.integers(0, 1 << 16, (40 * scale, 90), dtype=np.uint16) for number in range(6)
    }
    state["embed.weight"] = rng.integers(0, 1 << 16, (300 * scale, 700), dtype=np.uint16)
    state["transposed"] = rng.integers(0, 256, (50, 70), dtype=np.uint8).T
    state["norm.weight"] = rng.random(11, dtype=np.float32)
    state["scalar"] = np.float32(rng.random())
    state["empty"] = np.zeros((0, 4), np.float32)
    return state


def next_state(state: State, seed: int, part: float = 0.02) -> State:
    """Return a version where ``part`` of the elements differ; one tensor in four stays as it was."""
    rng = np.random.default_rng(seed)
    after: State = {}
    for number, (name, tensor) in enumerate(state.items()):
        array = np.array(tensor)
        if number % 4 != 3 and array.size:
            flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8).copy()
            where = rng.random(flat.size) < part
            flat[where] ^= rng.integers(1, 256, int(where.sum()), dtype=np.uint8)
            array = flat.view(array.dtype).reshape(array.shape)
        after[name] = array
    return after


def raw(tensor: Any) -> bytes:
    """Return a tensor's bytes in the order of its elements."""
    return np.ascontiguousarray(tensor).tobytes()


def side_files(directory: Path) -> Path:
    """Make a directory with what a full snapshot needs beside its weights, and something that it does not take."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text('{"model_type": "toy"}')
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    (directory / "optimizer.pt").write_bytes(b"never uploaded")
    return directory


def write(
    store: ObjectStore, location: Location, identity: str, state: Mapping[str, Any], **options: Any
) -> WrittenSnapshot:
    """Write a snapshot with one rank."""
    with SnapshotWriter(store, location, identity, **options) as writer:
        for name, tensor in state.items():
            writer.add(name, tensor)
        return writer.finalise([writer.close()])


def names_in(store: ObjectStore, location: Location, identity: str) -> list[str]:
    """Return the names of a snapshot's objects."""
    prefix = location.prefix(identity)
    return [one.key.removeprefix(prefix) for one in store.list_objects(prefix)]


def tensors_in(
    store: ObjectStore, location: Location, identity: str, base: Mapping[str, Any] | None = None
) -> dict[str, bytes]:
    """Return the bytes of every tensor of a snapshot in the bucket; for a delta those of the new version.

    Headers, checksums and frames are read by hand; everything must fit.
    """
    index = json.loads(store.get(location.key(identity, INDEX)))
    found: dict[str, bytes] = {} if base is None else {name: raw(tensor) for name, tensor in base.items()}
    for shard in sorted(set(index["weight_map"].values())):
        data = store.get(location.key(identity, shard))
        length = int.from_bytes(data[:8], "little")
        assert length % 8 == 0
        header = json.loads(data[8 : 8 + length])
        sums = header.pop("__metadata__")
        assert {name for name, one in index["weight_map"].items() if one == shard} == set(header)
        end = 0
        for name, entry in header.items():
            begin, stop = entry["data_offsets"]
            assert begin == end
            end = stop
            piece = data[8 + length + begin : 8 + length + stop]
            if base is not None:
                assert entry == {"dtype": "U8", "shape": [len(piece)], "data_offsets": [begin, stop]}
                diff = zstandard.ZstdDecompressor().decompress(piece)
                old = np.frombuffer(found[name], np.uint8)
                piece = (np.frombuffer(diff, np.uint8) ^ old).tobytes()
            assert sums[name] == f"{zlib.adler32(piece):08x}"
            found[name] = piece
        assert 8 + length + end == len(data)
    return found


def download(store: ObjectStore, location: Location, identity: str, directory: Path) -> Path:
    """Fetch a snapshot into a directory."""
    directory.mkdir(parents=True)
    for name in names_in(store, location, identity):
        (directory / name).write_bytes(store.get(location.key(identity, name)))
    return directory


def filled(base: BaseTensors, store: ObjectStore, location: Location, state: State, sides: Path) -> BaseTensors:
    """Return the base, filled by writing a full snapshot ``v0`` of ``state``."""
    write(store, location, "v0", state, kind="full", base=base, side_files=sides)
    return base
