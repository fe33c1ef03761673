"""The publisher fed with tensors, against the emulator: bases in memory, on the disk and none; one rank and several."""

from __future__ import annotations

import pickle

import pytest

from cwtrain.hotload import MemoryBase, PublishState
from cwtrain.models.sync import SnapshotChoice
from helpers.publish_scene import Ear, Scene, plugins_with
from helpers.toy_model import Model


@pytest.fixture
def scene(emulator, deployment, service, tmp_path):
    made = Scene(emulator, deployment, service, tmp_path)
    made.model = Model(tmp_path)
    made.trainer.base = made.model.base
    yield made
    made.close()


def test_with_the_base_in_memory_the_first_is_full_the_next_are_deltas_and_the_chain_is_cut(scene):
    ear = Ear()
    publisher = scene.publisher(tensor_base="memory", full_every=3, plugins=plugins_with(ear))
    model, found = scene.model, []
    for number in range(1, 6):
        outcome = publisher.publish_tensors(model.train(), number=number)
        found.append((outcome.identity, outcome.kind.value))
        scene.check_served(model.tensors)
    assert found == [
        ("run-v000001", "FULL"),
        ("run-v000002", "DELTA"),
        ("run-v000003", "DELTA"),
        ("run-v000004", "FULL"),
        ("run-v000005", "DELTA"),
    ]
    assert outcome.metrics["hotload/changed_tensors"] == 2
    assert outcome.metrics["hotload/total_tensors"] == 3
    assert 0 < outcome.metrics["hotload/density"] < 1
    assert not (publisher.state_dir / "mirror").exists(), "nothing is written to the disk"
    empty = publisher.publish_tensors(model.arrays, number=6)
    assert (empty.state, empty.identity) == (PublishState.SKIPPED, "run-v000005")
    outcome = publisher.publish_tensors(model.train(), number=7)
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000005"
    scene.check_served(model.tensors)
    assert ear.kinds(but=("HotLoadProgressed",))[:4] == [
        "SyncStarted",
        "SnapshotUploaded",
        "HotLoadRequested",
        "SyncCompleted",
    ]


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_delta_that_the_engine_refuses_comes_once_more_in_full(scene, faults, where):
    """B05: and the next one is a delta on that."""
    model, publisher = scene.model, scene.publisher(tensor_base=where)
    publisher.publish_tensors(model.train(), number=1)
    faults.add("replica", "damage", identity="run-v000002", times=1)
    outcome = publisher.publish_tensors(model.train(), number=2)
    assert (outcome.identity, outcome.kind) == ("run-v000002-full", SnapshotChoice.FULL)
    scene.check_served(model.tensors)
    outcome = publisher.publish_tensors(model.train(), number=3)
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000002-full"
    scene.check_served(model.tensors)


def test_ranks_write_one_version_by_one_plan(scene):
    model, publisher = scene.model, scene.publisher(tensor_base="none")
    store, location = publisher.loader.store, publisher.loader.location
    bases = [MemoryBase(), MemoryBase()]
    for number in (1, 2, 3):
        model.train()
        held = {base.identity for base in bases}
        plan = publisher.begin_tensors(number=number, base_identity=held.pop() if len(held) == 1 else None)
        plan = pickle.loads(pickle.dumps(plan))
        writers = [plan.writer(store, location, base=base, rank=rank, ranks=2) for rank, base in enumerate(bases)]
        for at, (name, array) in enumerate(model.arrays.items()):
            writers[at % 2].add(name, array)
        written = writers[0].finalise([writer.close() for writer in writers])
        writers[1].commit(written)
        outcome = publisher.finish_tensors(plan, written)
        assert outcome.kind.value == ("FULL" if number == 1 else "DELTA")
        scene.check_served(model.tensors)


def test_an_outage_of_the_store_is_ridden_out_under_another_name(scene, faults):
    model, publisher = scene.model, scene.publisher(tensor_base="memory")
    publisher.publish_tensors(model.train(), number=1)
    faults.add("store", "status", status=503, method="PUT", path="run-v000002/", caller="trainer", times=20)
    outcome = publisher.publish_tensors(model.train(), number=2)
    assert outcome.state is PublishState.COMPLETED
    scene.check_served(model.tensors)
