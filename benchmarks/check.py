"""Says whether outputs are right, with none of the code that made them: numpy, zstandard and zlib only.

python check.py delta BASE NEW DELTA   # DELTA on BASE gives NEW, every checksum is right
python check.py same ONE OTHER         # the tensors are equal
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import zstandard

INDEX = "model.safetensors.index.json"


class Directory:
    """The tensors of a directory, as its index says, mapped."""

    def __init__(self, path: Path) -> None:
        index = json.loads((path / INDEX).read_text())
        self.metadata = index.get("metadata", {})
        self.where: dict[str, tuple[np.ndarray, int, int]] = {}
        self.checksums: dict[str, str] = {}
        for shard in sorted(set(index["weight_map"].values())):
            data = np.memmap(path / shard, dtype=np.uint8, mode="r")
            (length,) = struct.unpack("<Q", data[:8].tobytes())
            header = json.loads(data[8 : 8 + length].tobytes())
            self.checksums.update(header.pop("__metadata__", {}))
            for name, info in header.items():
                if index["weight_map"][name] == shard:
                    begin, end = info["data_offsets"]
                    self.where[name] = (data, 8 + length + begin, 8 + length + end)

    def __getitem__(self, name: str) -> np.ndarray:
        data, begin, end = self.where[name]
        return data[begin:end]


def delta(base: Path, new: Path, made: Path) -> None:
    """Decode a delta."""
    old, current, changes = Directory(base), Directory(new), Directory(made)
    formats = [changes.metadata[key] for key in ("delta_encoding", "compression_format", "checksum_format")]
    assert formats == ["xor", "zstd", "adler32"], formats
    assert old.where.keys() == current.where.keys()
    decompressor = zstandard.ZstdDecompressor()
    for name in current.where:
        wanted = current[name]
        if name not in changes.where:
            assert np.array_equal(old[name], wanted), f"{name} changed, but is not in the delta"
            continue
        difference = np.frombuffer(decompressor.decompress(changes[name].tobytes(), allow_extra_data=False), np.uint8)
        assert np.array_equal(old[name] ^ difference, wanted), f"{name} does not come out right"
        assert changes.checksums[name] == f"{zlib.adler32(wanted):08x}", f"{name} has a wrong checksum"


def same(one: Path, other: Path) -> None:
    """Compare two full checkpoints, and the checksums of the second where it has some."""
    left, right = Directory(one), Directory(other)
    assert left.where.keys() == right.where.keys()
    for name in left.where:
        assert np.array_equal(left[name], right[name]), f"{name} differs"
        if right.metadata.get("checksum_format") == "adler32":
            assert right.checksums[name] == f"{zlib.adler32(right[name]):08x}", f"{name} has a wrong checksum"


if __name__ == "__main__":
    {"delta": delta, "same": same}[sys.argv[1]](*map(Path, sys.argv[2:]))
