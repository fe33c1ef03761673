"""A small model in two shards and its versions, as directories; and disks that watch what a mirror does to them."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from cwtrain.hotload._mirror_disk import Disk
from helpers import snapshot_files as sf

Model = dict[str, tuple[str, list[int], bytes]]


def model(seed: int, version: int, *, large: int = 1 << 20) -> Model:
    """Return a model of all kinds of tensors; ``large`` bytes and a bit is its largest, more than a chunk."""
    tensors: Model = {
        "embed.weight": ("BF16", [large // 2 + 7], _bytes(seed, "embed", large + 14)),
        "frozen.weight": ("BF16", [999], _bytes(seed, "frozen", 1998)),
        "a.weight": ("BF16", [40, 50], _bytes(seed, "a", 4000)),
        "a.scale": ("F32", [], _bytes(seed, "scale", 4)),
        "a.empty": ("BF16", [0, 7], b""),
        "b.weight": ("U8", [4097], _bytes(seed, "b", 4097)),
        "c.weight": ("F16", [3, 3], _bytes(seed, "c", 18)),
    }
    for step in range(1, version + 1):
        chance = random.Random(f"{seed} {step}")
        for name in list(tensors):
            moves = name == "embed.weight" or (name != "frozen.weight" and chance.random() < 0.7)
            dtype, shape, raw = tensors[name]
            if moves and raw:
                new = bytearray(raw)
                for _ in range(max(1, len(raw) // 200)):
                    new[chance.randrange(len(raw))] ^= chance.randrange(1, 256)
                tensors[name] = (dtype, shape, bytes(new))
    return tensors


def _bytes(seed: int, name: str, count: int) -> bytes:
    return random.Random(f"{seed} {name}").randbytes(count)


def shards(tensors: Model) -> list[Model]:
    """Return the model as it is split: the second shard changes less often."""
    names = list(tensors)
    return [{name: tensors[name] for name in part} for part in (names[:3], names[3:6], names[6:])]


def write_chain(directory: Path, seed: int, versions: int, *, large: int = 1 << 20) -> list[Model]:
    """Write ``base`` and ``d1`` to ``dN`` and return the model at each version."""
    models = [model(seed, version, large=large) for version in range(versions + 1)]
    sf.write_full(directory / "base", *shards(models[0]))
    for number in range(1, versions + 1):
        numbers = {"version": f"{number:06d}", "base_version": f"{number - 1:06d}"}
        sf.write_delta(directory / f"d{number}", models[number - 1], models[number], metadata=numbers)
    return models


class CountingDisk(Disk):
    """Counts calls by name, and what was synced."""

    def __init__(self, *, free: int | None = None, boot: str = "boot-1") -> None:
        self.calls: Counter[str] = Counter()
        self.written = 0
        self.free = free
        self.boot = boot
        self._lock = threading.Lock()

    def step(self, name: str) -> None:
        with self._lock:
            self.calls[name] += 1

    def open(self, path: str, *, create: bool = False) -> int:
        self.step("open")
        return super().open(path, create=create)

    def write(self, fd: int, views: Sequence[bytes | memoryview], offset: int) -> None:
        self.step("write")
        with self._lock:
            self.written += sum(map(len, views))
        super().write(fd, views, offset)

    def truncate(self, fd: int, size: int) -> None:
        self.step("truncate")
        super().truncate(fd, size)

    def allocate(self, fd: int, size: int) -> None:
        self.step("allocate")
        super().allocate(fd, size)

    def clone(self, source: int, target: int) -> bool:
        self.step("clone")
        return super().clone(source, target)

    def copy_range(self, source: int, target: int, offset: int, length: int) -> None:
        self.step("copy_range")
        super().copy_range(source, target, offset, length)

    def fsync(self, fd: int) -> None:
        self.step("fsync")
        super().fsync(fd)

    def fsync_directory(self, path: str) -> None:
        self.step("fsync_directory")
        super().fsync_directory(path)

    def rename(self, source: str, target: str) -> None:
        self.step("rename")
        super().rename(source, target)

    def mkdir(self, path: str) -> None:
        self.step("mkdir")
        super().mkdir(path)

    def symlink(self, leads_to: str, path: str) -> None:
        self.step("symlink")
        super().symlink(leads_to, path)

    def link(self, source: str, path: str) -> None:
        self.step("link")
        super().link(source, path)

    def remove(self, path: str) -> None:
        self.step("remove")
        super().remove(path)

    def remove_tree(self, path: str) -> None:
        self.step("remove_tree")
        super().remove_tree(path)

    def free_bytes(self, path: str) -> int:
        return super().free_bytes(path) if self.free is None else self.free

    def boot_id(self) -> str:
        return self.boot


class DyingDisk(CountingDisk):
    """Kills its own process just before call number ``at``; a write is half done by then."""

    def __init__(self, at: int, *, boot: str = "boot-1") -> None:
        super().__init__(boot=boot)
        self._at = at

    def step(self, name: str) -> None:
        super().step(name)
        if name != "write" and self.calls.total() == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd: int, views: Sequence[bytes | memoryview], offset: int) -> None:
        self.step("write")
        if self.calls.total() == self._at:
            data = b"".join(views)
            super(CountingDisk, self).write(fd, [data[: len(data) // 2]], offset)
            os.kill(os.getpid(), signal.SIGKILL)
        super(CountingDisk, self).write(fd, views, offset)
