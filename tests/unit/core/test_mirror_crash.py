"""A crash of the machine at every call that a mirror makes to its disk: old, new, or rebuilt from the bucket."""

import os
import shutil
from collections import Counter

import pytest

from cwtrain.errors import MirrorDamagedError, MirrorError
from cwtrain.hotload import WeightMirror, inspect_snapshot
from cwtrain.hotload.upload import upload_with_manifest
from cwtrain.storage import Location, MemoryStore
from helpers import snapshot_files as sf
from helpers.mirror_cases import CountingDisk, write_chain
from helpers.mirror_crash import RecordingDisk

LOCATION = Location("memory", "rl/run")
SEEDS = 3


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    models = write_chain(directory, 5, 3, large=20_000)
    store = MemoryStore()
    identities = ["run-v0", "run-v1", "run-v2", "run-v3"]
    for number, name in enumerate(("base", "d1", "d2", "d3")):
        previous = identities[number - 1] if number else None
        snapshot = inspect_snapshot(directory / name, previous_identity=previous)
        upload_with_manifest(snapshot, store=store, location=LOCATION, identity=identities[number])
    return directory, models, store


def record(chain, root, *, start, in_place, last):
    """Return the disk of a mirror that was brought from version ``start`` to the next one (or ``last``)."""
    directory, models, _ = chain
    with WeightMirror.create(directory / "base", root, disk=CountingDisk()) as mirror:
        for number in range(1, start + 1):
            mirror.apply_delta(directory / f"d{number}")
    disk = RecordingDisk(root)
    with WeightMirror(root, disk=disk, in_place=in_place, workers=1) as mirror:
        if last == "one pass":
            sf.write_full(root.parent / "new", models[start + 1])
            mirror.write_delta(root.parent / "new", root.parent / "delta", version=start + 1)
        else:
            mirror.apply_delta(directory / f"d{start + 1}")
    return disk


@pytest.mark.parametrize(
    ("start", "in_place", "last"),
    [(0, False, "apply"), (1, False, "apply"), (2, False, "apply"), (1, False, "one pass"), (1, True, "apply")],
    ids=["first", "second", "third", "one-pass", "in-place"],
)
def test_every_instant(tmp_path, chain, start, in_place, last):
    _, models, store = chain
    disk = record(chain, tmp_path / "m", start=start, in_place=in_place, last=last)
    ends: Counter[str] = Counter()
    for cut in range(len(disk.calls_made) + 1):
        for seed in range(SEEDS - in_place):
            root = tmp_path / "crashed"
            disk.after_crash(cut, seed, root)
            try:
                mirror = WeightMirror(root, disk=CountingDisk(boot="boot-2"), workers=1)
            except MirrorDamagedError:
                assert in_place, f"two slots never need the bucket: cut {cut}, seed {seed}"
                ends["rebuilt"] += 1
                mirror = WeightMirror.from_bucket(
                    root, store=store, location=LOCATION, identity=f"run-v{start + 1}", workers=1
                )
            with mirror:
                reached = int(mirror.version)
                assert reached in (start, start + 1)
                ends["new" if reached > start else "old"] += 1
                assert sf.read_checkpoint(root) == models[reached], f"cut {cut}, seed {seed}"
                if cut % 7 == 0:  # and it goes on from there
                    for number in range(reached + 1, 4):
                        mirror.apply_delta(chain[0] / f"d{number}")
                        assert sf.read_checkpoint(root) == models[number]
    assert ends["old"]
    assert ends["new"]
    assert bool(ends["rebuilt"]) is in_place


def test_after_the_crash_of_a_machine_nothing_of_the_spare_slots_is_trusted(tmp_path, chain):
    directory, models, _ = chain
    with WeightMirror.create(directory / "base", tmp_path / "m", disk=CountingDisk(boot="one")) as mirror:
        mirror.apply_delta(directory / "d1")
    for name in ("a", "b"):
        for path in (tmp_path / "m/.cwtrain-mirror" / name).iterdir():
            if path.name not in {os.path.basename(p) for p in current(tmp_path / "m") if f"/{name}/" in p}:
                path.write_bytes(os.urandom(path.stat().st_size))
    with WeightMirror(tmp_path / "m", disk=CountingDisk(boot="two")) as mirror:
        mirror.apply_delta(directory / "d2")
        assert sf.read_checkpoint(mirror.path) == models[2]


def current(root):
    return [os.path.realpath(path) for path in root.glob("*.safetensors")]


def test_what_is_no_mirror_is_not_replaced(tmp_path, chain):
    _, _, store = chain
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("x")
    with pytest.raises(ValueError, match="not an empty directory"):
        WeightMirror.from_bucket(tmp_path / "mine", store=store, location=LOCATION, identity="run-v1")
    assert os.listdir(tmp_path) == ["mine"]
    shutil.rmtree(tmp_path / "mine")
    with pytest.raises(MirrorError):
        WeightMirror(tmp_path / "mine")
