"""Kills what writes full snapshots on the disk: the mirror's updates, and `write_full_snapshot`.

`kill_test.py` runs it. Each attempt is a forked process that is killed with SIGKILL: before a call to the disk that a
seed picks (a write is half done by then), or after a time that it picks. Then another process opens what is left and
compares every byte with what it must be. The opening is killed now and then, too.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import needed

with needed.imports():
    import cwtrain.hotload._mirror_in_place
    import cwtrain.snapshots._convert  # noqa: F401 - loaded once, here, and not in each process
    from cwtrain.errors import SnapshotError
    from cwtrain.hotload import WeightMirror, inspect_snapshot
    from cwtrain.hotload.delta import write_full_snapshot
    from helpers import snapshot_files as sf
    from helpers.mirror_cases import CountingDisk, DyingDisk, Model, shards, write_chain

VERSIONS = 3
MODELS = 4
LARGE = 300_000
NEVER = -1


class Chains:
    """The checkpoints and deltas that all seeds work on, made once."""

    def __init__(self, work: Path) -> None:
        self.directories = [work / f"chain{number}" for number in range(MODELS)]
        self.models = [write_chain(path, number, VERSIONS, large=LARGE) for number, path in enumerate(self.directories)]
        for path, models in zip(self.directories, self.models, strict=True):
            for number, model in enumerate(models):
                sf.write_full(path / f"v{number}", *shards(model))


def attempt(work: Callable[[], object], *, seconds: float | None = None) -> bool:
    """Run ``work`` in a process of its own; return whether it got to its end. It may kill itself.

    Without an end by itself within ``seconds`` it is killed. Raises what it raised.
    """
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:  # noqa: BLE001 - shown, and told by the exit code
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    if seconds is not None:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return False
    if os.WEXITSTATUS(status):
        raise AssertionError(f"the process ended with {os.WEXITSTATUS(status)}; see above")
    return True


def check(root: Path, models: list[Model], allowed: set[int]) -> int:
    """Look at the root as it is, then open the mirror; return which version it holds. Runs in a process of its own."""
    reading, writing = os.pipe()

    def look() -> None:
        try:
            inspect_snapshot(root, verify="full")
            shown = sf.read_checkpoint(root)
        except SnapshotError:
            pass  # an update in place was going on: no snapshot at all
        else:
            assert shown in [models[version] for version in allowed], "the root shows a mixture"
        with WeightMirror(root, workers=2, disk=CountingDisk()) as mirror:
            version = int(mirror.version)
            assert version in allowed, f"the mirror is at {version}, not at one of {allowed}"
            assert sf.read_checkpoint(root) == models[version], f"wrong bytes at version {version}"
            assert inspect_snapshot(root, verify="full").checksums == mirror.checksums
            assert not os.path.exists(root / ".cwtrain-mirror" / "pending")
        os.write(writing, str(version).encode())

    try:
        attempt(look)
        return int(os.read(reading, 20))
    finally:
        os.close(reading)
        os.close(writing)


def update(root: Path, chain: Path, version: int, *, in_place: bool | None, one_pass: bool, at: int) -> None:
    """Bring the mirror to ``version``, or die on the way."""
    with WeightMirror(root, workers=2, in_place=in_place, disk=DyingDisk(at)) as mirror:
        out = chain.parent / f"{root.name}-d{version}"
        if one_pass and not out.exists():
            mirror.write_delta(chain / f"v{version}", out, version=version)
        else:
            mirror.apply_delta(out if out.exists() else chain / f"d{version}")


def mirror_seed(seed: int, work: Path, chains: Chains, ends: Counter[str]) -> None:
    """Take a mirror through all versions, killed on the way again and again."""
    chance = random.Random(f"mirror {seed}")
    number = seed % MODELS
    chain, models = chains.directories[number], chains.models[number]
    root = work / f"m{seed}"
    while not root.exists():
        killed = chance.uniform(0, 0.05) if chance.random() < 0.5 else None
        attempt(lambda: WeightMirror.create(chain / "base", root, disk=CountingDisk()).close(), seconds=killed)
        ends["made, or killed while it was made"] += 1
    version = check(root, models, {0})
    kills = 0
    while version < VERSIONS:
        in_place = chance.random() < 0.4
        options = {"in_place": in_place, "one_pass": chance.random() < 0.4}
        by_time = chance.random() < 0.4
        at = NEVER if by_time or kills > 8 else chance.randrange(1, 70)
        seconds = chance.uniform(0, 0.08) if by_time and kills <= 8 else None
        goal = version + 1
        done = attempt(lambda: update(root, chain, goal, at=at, **options), seconds=seconds)  # noqa: B023
        kills += not done
        while chance.random() < 0.3:
            step = chance.randrange(1, 30)
            opened = attempt(lambda: WeightMirror(root, disk=DyingDisk(step)).close())  # noqa: B023
            ends["opened again" if opened else "killed while it was opened"] += 1
        reached = check(root, models, {goal} if done else {version, goal})
        ends["finished" if done else "killed: new" if reached == goal else "killed: old"] += 1
        version = reached
    for path in work.glob(f"*m{seed}*"):
        shutil.rmtree(path)


def every_step(kind: str, work: Path, chains: Chains, ends: Counter[str]) -> None:
    """Kill an update before each call that it makes to the disk, one after the other."""
    start, in_place, one_pass = (KINDS[kind][name] for name in ("start", "in_place", "one_pass"))
    chain, models = chains.directories[0], chains.models[0]
    template = work / "template"

    def make() -> None:
        with WeightMirror.create(chain / "base", template, disk=CountingDisk()) as mirror:
            for number in range(1, start + 1):
                mirror.apply_delta(chain / f"d{number}")

    attempt(make)
    undo = KINDS[kind].get("killed_at", NEVER)
    if undo != NEVER:
        assert not attempt(lambda: update(template, chain, start + 1, in_place=True, one_pass=False, at=undo))
    step, done = 0, False
    while not done:
        step += 1
        root = work / "each"
        shutil.copytree(template, root, symlinks=True)
        at = step
        if undo != NEVER:
            done = attempt(lambda: WeightMirror(root, workers=2, disk=DyingDisk(at)).close())  # noqa: B023
            for again in (at // 2, at // 3, at - 1):
                attempt(lambda: WeightMirror(root, workers=2, disk=DyingDisk(again)).close())  # noqa: B023
        else:
            done = attempt(lambda: update(root, chain, start + 1, in_place=in_place, one_pass=one_pass, at=at))  # noqa: B023
        reached = check(root, models, {start, start + 1})
        ends["finished" if done else "killed: new" if reached > start else "killed: old"] += 1
        for path in work.glob("*each*"):
            shutil.rmtree(path)
    shutil.rmtree(template)


def full_seed(seed: int, work: Path, chains: Chains, ends: Counter[str]) -> None:
    """Write a full snapshot, killed on the way: nothing under its name, or all of it."""
    chance = random.Random(f"full {seed}")
    number = seed % MODELS
    source, model = chains.directories[number] / "base", chains.models[number][0]
    dest = work / f"full{seed}"
    for _ in range(10):
        by_time = chance.random() < 0.5
        seconds = chance.uniform(0, 0.06) if by_time else None
        at = NEVER if by_time else chance.randrange(1, 60)

        def write() -> None:
            _die_at_event(at)  # noqa: B023
            write_full_snapshot(source, dest, workers=2)

        done = attempt(write, seconds=seconds)
        if dest.exists():
            assert sf.read_checkpoint(dest) == model
            snapshot = inspect_snapshot(dest)
            assert len(snapshot.checksums) == len(model)
            ends["whole"] += 1
            break
        assert not done
        ends["killed: nothing there"] += 1
    else:
        attempt(lambda: write_full_snapshot(source, dest, workers=2))
    attempt(lambda: inspect_snapshot(dest, verify="full"))
    for path in work.glob(f"*full{seed}*"):
        shutil.rmtree(path)


def _die_at_event(at: int) -> None:
    """Kill this process at call number ``at`` of those that open, make, rename or remove something."""
    seen = 0

    def hook(event: str, _: object) -> None:
        nonlocal seen
        if event == "open" or event in ("os.mkdir", "os.rename", "os.remove", "os.truncate", "os.listdir"):
            seen += 1
            if seen == at:
                os.kill(os.getpid(), signal.SIGKILL)

    if at != NEVER:
        sys.addaudithook(hook)


KINDS: dict[str, dict[str, Any]] = {
    "first": {"start": 0, "in_place": False, "one_pass": False},
    "next": {"start": 1, "in_place": False, "one_pass": False},
    "in-place": {"start": 1, "in_place": True, "one_pass": False},
    "one-pass": {"start": 1, "in_place": False, "one_pass": True},
    "undo": {"start": 1, "in_place": True, "one_pass": False, "killed_at": 36},
}
"""Kinds of updates: of a new mirror, of one with both slots, without room for them, while the delta is written; and
the opening of a mirror whose update in place was killed."""


Seed = Callable[[int, Path, Chains, "Counter[str]"], None]

COMMANDS: dict[str, Seed] = {"mirror": mirror_seed, "full": full_seed}
