"""The publisher against the emulator: directories of a trainer in, weights that every replica serves out."""

from __future__ import annotations

import json

import pytest

from cwtrain.errors import SnapshotChangedError
from cwtrain.hotload import PublishState, WeightMirror
from cwtrain.models.snapshot import INDEX_NAME, SnapshotKind
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import hookimpl
from helpers.publish_scene import Scene, plugins_with
from helpers.toy_trainer import repeat_tensor


@pytest.fixture
def scene(emulator, deployment, service, tmp_path):
    made = Scene(emulator, deployment, service, tmp_path)
    yield made
    made.close()


def test_base_deltas_an_empty_version_a_full_one_and_a_cut_are_all_served(scene):
    trainer = scene.trainer
    publisher = scene.publisher(full_every=3)
    assert publisher.publish_directory(trainer.updates).state is PublishState.COMPLETED
    scene.check_served(trainer.at(0))
    kinds = []
    for kind in ("delta", "empty", "delta", "delta", "full", "delta"):
        outcome = publisher.publish_directory(trainer.step(kind))
        kinds.append((outcome.identity, outcome.kind, outcome.state))
        scene.check_served(trainer.tensors)
    full, delta, skip = SnapshotChoice.FULL, SnapshotChoice.DELTA, SnapshotChoice.SKIP
    done, skipped = PublishState.COMPLETED, PublishState.SKIPPED
    assert kinds == [
        ("run-v000001", delta, done),
        ("run-v000001", skip, skipped),
        ("run-v000003", delta, done),
        ("run-v000004", full, done),
        ("run-v000005", full, done),
        ("run-v000006", delta, done),
    ]
    assert outcome.metrics["hotload/chain_length"] == 1
    assert 0 < outcome.metrics["hotload/density"] <= 1
    assert scene.hot_load("run-v000006").previous_identity == "run-v000005"


def test_a_restart_opens_an_epoch_uploads_no_base_and_chains_to_it(scene):
    trainer = scene.trainer
    with scene.publisher() as publisher:
        publisher.baseline()
        publisher.publish_directory(trainer.step())
        publisher.publish_directory(trainer.step())
    before = scene.objects("run-v000000/")
    for name in ("state", "empty-disk"):
        trainer.restart()
        with scene.publisher(name=name) as publisher:
            publisher.publish_directory(trainer.updates)
            outcome = publisher.publish_directory(trainer.step())
        scene.check_served(trainer.tensors)
        assert scene.hot_load(outcome.identity).previous_identity == "run-v000000"
    assert outcome.identity == "run.3-v000001"
    assert scene.objects("run-v000000/") == before
    assert [name for name, _ in scene.hot_loads()].count("run-v000000") == 1


def test_a_cut_keeps_the_mirror_as_it_is_and_finds_out_who_breaks_its_lock(scene):
    """Another process takes the mirror, by deleting the lock's file, and moves it on: nothing is hot-loaded."""
    trainer = scene.trainer

    class Intruder:
        @hookimpl
        def cwtrain_before_publish(self, plan):
            if plan.identity == "run-v000001" and plan.kind is SnapshotKind.FULL:
                mirror = trainer.root / "state" / "mirror"
                (mirror / ".cwtrain-mirror" / "lock").unlink()
                with WeightMirror(mirror) as other:
                    other.advance("2")

    publisher = scene.publisher(full_every=1, plugins=plugins_with(Intruder()))
    publisher.baseline()
    with pytest.raises(SnapshotChangedError, match="the mirror changed while it was uploaded"):
        publisher.publish_directory(trainer.step())
    assert [identity for identity, _ in scene.hot_loads()] == ["run-v000000"]
    assert not [key for key in scene.objects("run-v000001") if key.endswith(INDEX_NAME)]


def test_a_tensor_in_two_shards_is_published_once(scene):
    """slime writes replicated parameters from two ranks."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    place = trainer.step()
    name = next(name for name in trainer.tensors if trainer.at(0)[name] != trainer.at(1)[name])
    publisher.publish_directory(repeat_tensor(place, name))
    scene.check_served(trainer.tensors)


def test_a_damaged_mirror_is_made_again_from_the_bucket_after_a_crash_of_the_machine(scene):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    publisher.close()
    mirror = publisher.state_dir / "mirror"
    for shard in mirror.glob("*.safetensors"):
        real = shard.resolve()
        real.write_bytes(real.read_bytes()[:-1] + b"?")
    state = mirror / ".cwtrain-mirror" / "state.json"
    value = json.loads(state.read_text())
    state.write_text(json.dumps({**value, "boot_id": "another boot"}))
    publisher = scene.publisher()
    outcome = publisher.publish_directory(trainer.step())
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000001"
    scene.check_served(trainer.tensors)
