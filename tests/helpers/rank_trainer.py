"""A stand-in trainer on real gloo ranks, which calls the hook as slime's and miles' delta writers do.

    python rank_trainer.py PLAN.json

The plan says the dialect, where things lie, and one list of steps for each life of the trainer. Each life is two (or
more) forked processes: so torch is imported once. What each rank saw is written to ``<root>/seen-<life>-<rank>.json``,
the weights at the end to ``<root>/truth.json``. Written from the description of the trainers' behaviour alone.

Steps: ``baseline``, ``delta``, ``empty``, ``full``; ``killed`` (rank 0 is killed between upload and hot-load of a
delta), ``lost`` (the last rank dies instead of calling the hook). The first error ends a life, as it ends a run.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import types
import zlib
from argparse import Namespace
from datetime import timedelta
from pathlib import Path

import zstandard

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from helpers.tiny_checkpoint import st_bytes, write_full
from helpers.tiny_delta import read_tensors

INDEX = "model.safetensors.index.json"
TIED = "model.embed_tokens.weight"


def read_checkpoint(directory):
    """Return name -> (dtype, shape, bytes) of a checkpoint."""
    files = {path.name: path.read_bytes() for path in Path(directory).glob("*.safetensors")}
    return read_tensors(files)


def trained(tensors, seed):
    """Return the tensors after a step: the low bit of some values of some tensors, the tied one among them."""
    rng = random.Random(seed)
    found = dict(tensors)
    for name in {TIED, *rng.sample(sorted(tensors), 2)}:
        dtype, shape, raw = found[name]
        width, data = {"BF16": 2, "F32": 4}[dtype], bytearray(raw)
        for _ in range(6):
            data[rng.randrange(len(data) // width) * width] ^= 1
        found[name] = (dtype, shape, bytes(data))
    return found


class Rank:
    """One rank of one life: the sequence of calls of the trainers' writers, with the hook in it."""

    def __init__(self, plan, life, rank, dist, group):
        self.plan, self.life, self.rank, self.world = plan, life, rank, plan["world"]
        self.dist, self.group = dist, group
        self.root = Path(plan["root"])
        node = f"node-{rank}" if plan.get("node_local") else "shared"
        self.disk_dir = Path(plan["disk_dir"]) if "disk_dir" in plan else self.root / node / "updates"
        self.base = Path(plan["base"])
        self.weights = self.root / "weights"
        self.number = 0
        self.encoding, self.checksum = plan.get("encoding", "xor"), plan.get("checksum", "adler32")
        self.snapshot = read_checkpoint(self.base)
        # A resumed trainer has its own checkpoint's weights, while its first delta is against the base.
        self.tensors = read_checkpoint(self.weights) if self.weights.is_dir() else self.snapshot
        self.args = self.namespace()

    def namespace(self):
        common = {
            "update_weight_disk_dir": str(self.disk_dir),
            "hf_checkpoint": str(self.base),
            "rank": self.rank,
            "world_size": self.world,
            "use_wandb": False,
            "use_tensorboard": True,
        }
        if self.plan["dialect"] == "miles":
            return Namespace(update_weight_transfer_mode="disk-delta", **common)
        return Namespace(update_weight_mode="delta", update_weight_transport="disk", **common)

    def barrier(self):
        self.dist.barrier(group=self.group)

    def step(self, kind, count):
        if kind == "baseline":
            return self.baseline()
        if kind not in ("empty",):
            self.tensors = trained(self.tensors, f"{self.plan['seed']}-{self.life}-{count}")
        self.number += 1
        version_dir = self.disk_dir / f"weight_v{self.number:06d}"
        if kind == "full":
            self.write_full(version_dir)
        else:
            self.write_delta(version_dir)
        # The writers move on before the hook is called.
        self.snapshot = self.tensors
        if self.rank == 0:
            shutil.rmtree(self.weights, ignore_errors=True)
            write_full(self.weights, self.tensors)
        self.barrier()
        if kind == "killed" and self.rank == 0:
            die_after_upload()
        if kind == "lost" and self.rank == self.world - 1:
            os._exit(7)
        self.hook(self.args, str(version_dir), [])
        self.barrier()
        return None

    def baseline(self):
        if self.rank == 0:
            shutil.rmtree(self.disk_dir, ignore_errors=True)
            self.disk_dir.mkdir(parents=True)
            self.hook(self.args, str(self.disk_dir), [])
        # No beat is possible here, so only the numbered calls have the plan's short limit.
        self.dist.barrier()

    def mine(self):
        """Return the names that this rank gathers: a pipeline stage's, and the tied one on the last stage as well."""
        names = sorted(self.tensors)[self.rank :: self.world]
        if self.rank == self.world - 1 and TIED not in names and self.plan["dialect"] == "slime":
            names.append(TIED)
        return names

    def write_delta(self, version_dir):
        blobs, sums = {}, {}
        for name in self.mine():
            new, old = self.tensors[name][2], self.snapshot[name][2]
            if new != old:
                frame = zstandard.ZstdCompressor(level=1).compress(bytes(a ^ b for a, b in zip(new, old, strict=True)))
                blobs[name] = ("U8", (len(frame),), frame)
                sums[name] = f"{zlib.adler32(new):08x}" if self.checksum == "adler32" else xxh3(new)
        version_dir.mkdir(parents=True, exist_ok=True)
        flags = [None] * self.world
        self.dist.all_gather_object(flags, bool(blobs), group=self.group)
        file = f"model-{sum(flags[: self.rank]):05d}-of-{sum(flags):05d}.safetensors"
        if blobs:
            (version_dir / file).write_bytes(st_bytes(blobs, sums))
        maps = [None] * self.world
        self.dist.all_gather_object(maps, dict.fromkeys(blobs, file), group=self.group)
        if self.rank == 0:
            index = {
                "metadata": {
                    "version": f"{self.number:06d}",
                    "base_version": f"{self.number - 1:06d}",
                    "delta_encoding": self.encoding,
                    "compression_format": "zstd",
                    "checksum_format": self.checksum,
                },
                "weight_map": {name: file for part in maps for name, file in part.items()},
            }
            (version_dir / INDEX).write_text(json.dumps(index))
        self.barrier()

    def write_full(self, version_dir):
        if self.rank == 0:
            write_full(version_dir, self.tensors)
            for path in self.base.glob("*.json"):
                if path.name != INDEX:
                    shutil.copyfile(path, version_dir / path.name)
        self.barrier()

    def hook(self, *args):
        import importlib

        # As the trainers look a path up: import all but the last part, take that from the module.
        path = self.plan.get("hook", f"cwtrain.integrations.{self.plan['dialect']}.hook")
        module, _, name = path.rpartition(".")
        getattr(importlib.import_module(module), name)(*args)


def xxh3(raw):
    import xxhash

    return xxhash.xxh3_128(raw).hexdigest()


def die_after_upload():
    """Have this process killed as a plugin hears that all objects are in the bucket."""
    from cwtrain.events import SnapshotUploaded
    from cwtrain.plugins import get_plugins, hookimpl

    class Killer:
        @hookimpl
        def cwtrain_weight_sync(self, event):
            if isinstance(event, SnapshotUploaded):
                os.kill(os.getpid(), signal.SIGKILL)

    get_plugins().register(Killer(), name="killer")


def trainer_modules(dialect, group, rank, world, tracked):
    """Put what the hook looks up in the trainer's own modules into ``sys.modules``."""

    def module(name, **values):
        made = types.ModuleType(name)
        made.__dict__.update(values)
        sys.modules[name] = made

    def log(args, metrics, step_key):
        tracked.append({"version": metrics[step_key], "names": sorted(metrics)})

    main = rank == world - 1
    module(f"{dialect}.utils.distributed_utils", get_gloo_group=lambda: group)
    if dialect == "slime":
        module("slime.backends.megatron_utils.initialize", is_megatron_main_rank=lambda: main)
        module("slime.observability.logging_utils", log=log)
    else:
        manager = types.SimpleNamespace(_backends=["tensorboard"] if main else [])
        module("miles.utils.tracking_utils.tracking", log=log, _manager=manager)


def notes_of(error):
    """Return an error's notes but the hint, which is one of them in ours."""
    return list(getattr(error, "notes", getattr(error, "__notes__", ())))


def run_rank(plan, life, rank, steps):
    """Run one rank of one life and leave what it saw."""
    import torch.distributed as dist

    root = Path(plan["root"])
    store = dist.FileStore(str(root / f"store-{life}"), plan["world"])
    dist.init_process_group("gloo", store=store, rank=rank, world_size=plan["world"])
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=plan["group_seconds"]))
    tracked, seen = [], []
    trainer_modules(plan["dialect"], group, rank, plan["world"], tracked)
    trainer = Rank(plan, life, rank, dist, group)
    try:
        for count, kind in enumerate(steps):
            trainer.step(kind, count)
            seen.append(kind)
    except BaseException as exc:
        seen.append({"error": type(exc).__name__, "text": str(exc), "notes": notes_of(exc)})
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in trainer.tensors.items()}
    (root / f"seen-{life}-{rank}.json").write_text(json.dumps({"seen": seen, "tracked": tracked}))
    if rank == 0:
        (root / "truth.json").write_text(json.dumps(hashes))
    # Nothing is torn down: the group's other members may be dead.
    os._exit(0)


def main():
    live(json.loads(Path(sys.argv[1]).read_text()))


def train_py(words):
    """Be the trainer's ``train.py``: flags in, one life of the steps in STAND_IN_STEPS; the exit code is a run's."""
    flags = {word: value for word, value in zip(words, [*words[1:], ""], strict=True) if word.startswith("--")}
    root = os.environ["STAND_IN_ROOT"]
    plan = {
        "dialect": "miles" if "--update-weight-transfer-mode" in flags else "slime",
        "world": 2,
        "seed": 1,
        "group_seconds": 30,
        "root": root,
        "base": flags["--hf-checkpoint"],
        "disk_dir": flags["--update-weight-disk-dir"],
        "hook": flags["--custom-update-weight-post-write-path"],
        "encoding": flags["--update-weight-delta-encoding"],
        "checksum": flags["--update-weight-delta-checksum"],
        "lives": [os.environ["STAND_IN_STEPS"].split()],
    }
    live(plan)
    seen = [json.loads(Path(root, f"seen-0-{rank}.json").read_text())["seen"] for rank in (0, 1)]
    return 0 if seen == [plan["lives"][0]] * 2 else str(seen)


def live(plan):
    """Live the plan's lives, one after the other."""
    import torch
    import torch.distributed  # noqa: F401

    import cwtrain.hotload.publisher
    import cwtrain.infra.client
    import cwtrain.storage  # noqa: F401

    for life, steps in enumerate(plan["lives"]):
        children = []
        for rank in range(plan["world"]):
            child = os.fork()
            if child == 0:
                try:
                    run_rank(plan, life, rank, steps)
                finally:
                    os._exit(9)
            children.append(child)
        for child in children:
            os.waitpid(child, 0)


if __name__ == "__main__":
    main()
