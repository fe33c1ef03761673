"""The publisher fed with tensors, without a server: bases, restarts, failures."""

from __future__ import annotations

import numpy as np
import pytest

from cwtrain.errors import ConfigError, HotLoadFailedError, SnapshotConflictError
from cwtrain.hotload import PublishState
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import hookimpl
from helpers.memory_scene import MemoryScene
from helpers.publish_scene import plugins_with
from helpers.toy_model import Model


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    made.model = Model(tmp_path)
    made.trainer.base = made.model.base
    yield made
    made.close()


@pytest.fixture
def faults(scene):
    return scene.faults


def test_without_a_base_every_version_is_full(scene):
    publisher = scene.publisher(tensor_base="none")
    kinds = {publisher.publish_tensors(scene.model.train(), number=number).kind for number in (1, 2)}
    assert kinds == {SnapshotChoice.FULL}
    scene.check_served(scene.model.tensors)


def test_a_published_base_is_what_the_first_delta_applies_to(scene):
    publisher = scene.publisher(tensor_base="memory")
    publisher.baseline()
    outcome = publisher.publish_tensors(scene.model.train(), number=1)
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000000"
    scene.check_served(scene.model.tensors)


@pytest.mark.parametrize("lost", [False, True], ids=["same disk", "empty disk"])
def test_with_the_base_on_the_disk_a_restart_goes_on_with_a_delta(scene, lost):
    """B47: on an empty disk the mirror is made again from the bucket, and the delta chains to its identity."""
    model = scene.model
    with scene.publisher(tensor_base="disk") as publisher:
        assert publisher.publish_tensors(model.train(), number=1).kind is SnapshotChoice.FULL
        assert publisher.publish_tensors(model.train(), number=2).kind is SnapshotChoice.DELTA
    publisher = scene.publisher(tensor_base="disk", name="other" if lost else "state")
    outcome = publisher.publish_tensors(model.train(), number=3)
    assert outcome.kind is SnapshotChoice.DELTA
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000002"
    assert outcome.epoch == (2 if lost else 1)
    scene.check_served(model.tensors)


def test_a_restart_with_the_base_in_memory_begins_in_full(scene):
    """B47: the base is gone with the process; nothing is put on bytes that nobody has."""
    model = scene.model
    with scene.publisher(tensor_base="memory") as publisher:
        publisher.publish_tensors(model.train(), number=1)
    publisher = scene.publisher(tensor_base="memory")
    assert publisher.publish_tensors(model.train(), number=2).kind is SnapshotChoice.FULL
    scene.check_served(model.tensors)


def test_with_wait_0_a_failed_delta_leads_to_a_full_snapshot(scene, faults):
    model, publisher = scene.model, scene.publisher(tensor_base="memory", wait=False)
    publisher.publish_tensors(model.train(), number=1)
    faults.add("replica", "damage", identity="run-v000002", times=2)
    assert publisher.publish_tensors(model.train(), number=2).state is PublishState.ACCEPTED
    assert publisher.publish_tensors(model.train(), number=3).kind is SnapshotChoice.FULL
    publisher.finish()
    scene.check_served(model.tensors)


def test_a_producer_that_fails_leaves_nothing_published_and_the_version_can_be_given_again(scene):
    model, publisher = scene.model, scene.publisher(tensor_base="memory")
    publisher.publish_tensors(model.train(), number=1)
    model.train()

    def broken():
        yield from list(model.arrays.items())[:2]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        publisher.publish_tensors(broken, number=2)
    assert len(scene.hot_loads()) == 1
    outcome = publisher.publish_tensors(lambda: model.arrays.items(), number=2)
    assert outcome.state is PublishState.COMPLETED
    scene.check_served(model.tensors)
    lower = publisher.publish_tensors(model.train(), number=1)
    assert lower.identity == "run.2-v000001"
    scene.check_served(model.tensors)


def test_a_base_for_which_there_is_no_room_is_refused_at_the_start(scene, monkeypatch):
    publisher = scene.publisher(tensor_base="memory")
    huge = {"a.weight": np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), (1 << 50,), (0,))}
    with pytest.raises(ConfigError, match="memory") as caught:
        publisher.publish_tensors(huge, number=1)
    assert "disk" in caught.value.hint


def test_a_veto_and_a_takeover_come_before_the_first_byte(scene):
    class Veto:
        @hookimpl
        def cwtrain_before_publish(self, plan):
            if plan.identity == "run-v000002":
                raise RuntimeError(f"no {plan.kind} please")

    publisher = scene.publisher(tensor_base="memory", plugins=plugins_with(Veto()))
    publisher.publish_tensors(scene.model.train(), number=1)
    before = scene.objects("")
    with pytest.raises(RuntimeError, match="no DELTA please"):
        publisher.publish_tensors(scene.model.train(), number=2)
    assert scene.objects("") == before
    scene.publisher(tensor_base="memory", name="second").publish_tensors(scene.model.arrays, number=1)
    with pytest.raises(SnapshotConflictError, match="taken over"):
        publisher.publish_tensors(scene.model.train(), number=3)


def test_what_fails_twice_is_an_error(scene, faults):
    publisher = scene.publisher(tensor_base="memory")
    publisher.publish_tensors(scene.model.train(), number=1)
    faults.add("replica", "damage", identity="run-v000002.*")
    with pytest.raises(HotLoadFailedError):
        publisher.publish_tensors(scene.model.train(), number=2)
    assert publisher.state.acknowledged.identity == "run-v000001"


def test_an_identity_that_replicas_refused_is_not_used_again_though_the_bucket_was_cleaned(scene, faults):
    """B29's kind: gc removed what had failed; other weights under its name would meet what replicas kept of it."""
    publisher = scene.publisher(tensor_base="none")
    faults.add("replica", "damage", identity="run-v000001")
    with pytest.raises(HotLoadFailedError):
        publisher.publish_tensors(scene.model.train(), number=1)
    faults.clear()
    location = publisher.loader.location
    for one in list(scene.store.list_objects(location.prefix("run-v000001"))):
        scene.store.delete(one.key)
    for key in (location.manifest_key("run-v000001"), location.claim_key("run-v000001")):
        scene.store.delete(key)
    assert publisher.publish_tensors(scene.model.train(), number=1).identity != "run-v000001"
    assert scene.objects("run-v000001/") == {}


@pytest.mark.parametrize("by_name", [False, True])
def test_words_of_numpy_are_the_dtype_that_is_said(scene, by_name):
    """numpy has no bfloat16: a trainer that feeds 16-bit words says what they are, for all tensors or by name."""
    model = scene.model
    publisher = scene.publisher(tensor_base="memory")
    words = {name: array.view(np.uint16) for name, array in model.train().items()}
    words["plain.bias"] = np.zeros(4, np.float32)
    dtype = dict.fromkeys(model.arrays, "BF16") if by_name else None
    if not by_name:
        del words["plain.bias"]
        dtype = "BF16"
    publisher.publish_tensors(words, number=1, dtype=dtype)
    publisher.publish_tensors({name: array + 1 for name, array in words.items()}, number=2, dtype=dtype)
    expected = {name: ("BF16", array.shape, (array + 1).tobytes()) for name, array in words.items()}
    if by_name:
        expected["plain.bias"] = ("F32", (4,), np.ones(4, np.float32).tobytes())
    scene.check_served(expected)
