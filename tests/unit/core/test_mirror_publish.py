"""A chain cut: the open mirror is published as it lies, and nothing that changes meanwhile is ever published."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from cwtrain.errors import MirrorError, SnapshotChangedError, StorageError
from cwtrain.hotload import HotLoader, WeightMirror, inspect_snapshot
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.plugins import Plugins, hookimpl
from cwtrain.storage import Fault, Location, MemoryStore
from cwtrain.storage._part_bodies import HeldBody
from helpers import snapshot_files as sf
from helpers.fake_service import Clock, FakeService
from helpers.mirror_cases import Model, write_chain

MODES = pytest.mark.parametrize("in_place", [False, True], ids=["slots", "in-place"])


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Model]]:
    directory = tmp_path_factory.mktemp("chain")
    return directory, write_chain(directory, 1, 3, large=1 << 17)


class World:
    def __init__(self, *faults: Fault) -> None:
        self.service, clock = FakeService(), Clock()
        self.store = MemoryStore("weights", faults=faults)
        self.loader = HotLoader(self.service, "dep", s3=self.store, plugins=Plugins(), clock=clock, sleep=clock.sleep)

    def fetch(self, identity: str, directory: Path) -> Path:
        directory.mkdir()
        prefix = Location("weights", "run").prefix(identity)
        for key, one in self.store.objects.items():
            if key.startswith(prefix):
                (directory / key.removeprefix(prefix)).write_bytes(one.body)
        return directory


def mirror_at_two(directory: Path, root: Path, in_place: bool) -> WeightMirror:
    mirror = WeightMirror.create(directory / "base", root, in_place=in_place)
    mirror.apply_delta(directory / "d1")
    mirror.apply_delta(directory / "d2")
    return mirror


@MODES
def test_a_cut_is_the_mirror_byte_for_byte(tmp_path, chain, in_place):
    directory, models = chain
    world = World()
    bodies = []
    put = world.store.put
    world.store.put = lambda key, body, **more: (bodies.append((key, body)), put(key, body, **more))[1]
    with mirror_at_two(directory, tmp_path / "m", in_place) as mirror:
        assert os.fspath(mirror) == str(mirror.path)
        hot_load = world.loader.publish(mirror, "v2-full", version=2)
        assert hot_load.state.name == "COMPLETED"
        assert hot_load.previous_identity is None
        manifest = world.loader.read_manifest("v2-full")
        assert manifest["tensors"] == mirror.checksums
        mirror.apply_delta(directory / "d3")
    fetched = world.fetch("v2-full", tmp_path / "fetched")
    assert sf.read_checkpoint(fetched) == models[2]
    assert inspect_snapshot(fetched, verify="full").verified == "full"
    assert world.loader.verify("v2-full").verified
    shards = [body for key, body in bodies if key.endswith(".safetensors")]
    assert len(shards) == 3
    assert all(isinstance(body, HeldBody) for body in shards), "hashed once"
    assert not any(isinstance(body, HeldBody) for key, body in bodies if key.endswith(".json")), "anyone may edit these"


def test_what_changes_the_mirror_waits_until_it_is_sent(tmp_path, chain):
    directory, models = chain
    seen = []
    with mirror_at_two(directory, tmp_path / "m", False) as mirror:
        trainer = threading.Thread(target=mirror.apply_delta, args=(directory / "d3",))
        world = World(
            Fault(call="put", key="model-00001", action=trainer.start),
            Fault(call="put", key=INDEX_NAME, action=lambda: seen.append((trainer.is_alive(), mirror.version))),
        )
        world.loader.publish(mirror, "v2-full")
        trainer.join(30)
        assert seen == [(True, "000002")]
        assert mirror.version == "000003"
        assert sf.read_checkpoint(mirror.path) == models[3]
    assert sf.read_checkpoint(world.fetch("v2-full", tmp_path / "fetched")) == models[2]


def test_what_changes_the_mirror_waits_from_the_inspection_on(tmp_path, chain):
    """A trainer that writes while the deployment is waited for, or a plugin is asked, does not break the publish."""
    directory, models = chain
    world = World()
    with mirror_at_two(directory, tmp_path / "m", False) as mirror:
        trainer = threading.Thread(target=mirror.apply_delta, args=(directory / "d3",))

        class Slow:
            @hookimpl
            def cwtrain_before_publish(self, plan):
                trainer.start()
                trainer.join(0.3)  # it is done by then, unless it waits

        world.loader.plugins.register(Slow(), name="slow")
        world.loader.publish(mirror, "v2-full")
        trainer.join(30)
        assert mirror.version == "000003"
    assert sf.read_checkpoint(world.fetch("v2-full", tmp_path / "fetched")) == models[2]


@MODES
@pytest.mark.parametrize("moment", ["model-00001", "model-00003", "config.json"])
def test_another_process_that_broke_the_lock_is_an_error(tmp_path, chain, in_place, moment):
    """The lock's file is gone, another process takes the mirror for its own and applies a delta: no index goes up."""
    directory, _ = chain

    def intrude() -> None:
        (tmp_path / "m" / ".cwtrain-mirror" / "lock").unlink()
        with WeightMirror(tmp_path / "m", in_place=in_place) as other:
            other.apply_delta(directory / "d3")

    with mirror_at_two(directory, tmp_path / "m", in_place) as mirror:
        world = World(Fault(call="put", key=moment, action=intrude))
        with pytest.raises(SnapshotChangedError) as changed:
            world.loader.publish(mirror, "v2-full", workers=1)
        assert str(tmp_path / "m") in changed.value.file
        assert changed.value.hint
    names = [key for key in world.store.objects if key.endswith((INDEX_NAME, "_manifests/v2-full.json"))]
    assert names == []
    assert world.service.count("create_hot_load") == 0


def test_a_cut_that_broke_off_goes_on(tmp_path, chain):
    directory, models = chain
    world = World(
        Fault(call="put", key="model-00003", error=StorageError("refused", status=400, code="EntityTooLarge"))
    )
    with mirror_at_two(directory, tmp_path / "m", False) as mirror:
        with pytest.raises(StorageError, match="refused"):
            world.loader.publish(mirror, "v2-full", workers=1)
        left = {key: one for key, one in world.store.objects.items() if key.endswith(".safetensors")}
        assert left
        world.loader.publish(mirror, "v2-full", workers=1)
        assert {key: world.store.objects[key] for key in left} == left, "sent once"
    assert sf.read_checkpoint(world.fetch("v2-full", tmp_path / "fetched")) == models[2]


def test_an_upload_alone_and_a_closed_mirror(tmp_path, chain):
    directory, models = chain
    world = World()
    mirror = mirror_at_two(directory, tmp_path / "m", False)
    assert world.loader.plan(mirror, "v2-full").kind == "FULL"
    assert world.loader.upload(mirror, "v2-full") == "s3://weights/run/v2-full"
    assert sf.read_checkpoint(world.fetch("v2-full", tmp_path / "fetched")) == models[2]
    mirror.close()
    with pytest.raises(MirrorError, match="closed"):
        world.loader.publish(mirror, "v2-again")
    assert not any("v2-again" in key for key in world.store.objects)
