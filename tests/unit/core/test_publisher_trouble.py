"""What goes wrong in a publisher's run, and what settings and plugins change, without a server."""

from __future__ import annotations

import pytest

from cwtrain.errors import (
    ConfigError,
    HotLoadError,
    HotLoadFailedError,
    SnapshotChainError,
    SnapshotConflictError,
    SnapshotLayoutError,
    StorageAccessError,
)
from cwtrain.hotload import PublishState, WeightMirror
from cwtrain.hotload.status import BaselineState, read_status
from cwtrain.models.sync import SnapshotChoice, WeightSyncResult
from cwtrain.plugins import hookimpl
from helpers.memory_scene import MemoryScene
from helpers.publish_scene import Ear, plugins_with
from helpers.toy_trainer import ToyTrainer


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def faults(scene):
    return scene.faults


# -- the engine -------------------------------------------------------------------------------------------------------


def test_where_the_chain_is_never_cut_a_failed_delta_stops_the_run_and_nothing_moves_on(scene, faults):
    """B05: the hook does not return normally, the acknowledged identity stays, and the next version is no delta."""
    trainer, publisher = scene.trainer, scene.publisher(full_every=0)
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    faults.add("replica", "damage", identity="run-v000002", times=2)
    with pytest.raises(HotLoadFailedError, match="run-v000002"):
        publisher.publish_directory(trainer.step())
    assert publisher.state.acknowledged.identity == "run-v000001"
    assert publisher.state.refused == "run-v000002"
    with pytest.raises(SnapshotChainError, match="CWTRAIN_HOTLOAD_FULL_EVERY is 0") as caught:
        publisher.publish_directory(trainer.step())
    assert "CWTRAIN_HOTLOAD_RUN_ID" in caught.value.hint
    assert [name for name, _ in scene.hot_loads()] == ["run-v000000", "run-v000001", "run-v000002"]


def test_a_full_snapshot_that_fails_as_well_stops_the_run(scene, faults):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    faults.add("replica", "damage", identity="run-v000001.*")
    with pytest.raises(HotLoadFailedError, match="run-v000001-full"):
        publisher.publish_directory(trainer.step())
    faults.clear()
    # The trainer is asked again, or goes on: both come in full from what was written.
    assert publisher.publish_directory(trainer.step()).kind is SnapshotChoice.FULL
    scene.check_served(trainer.tensors)


def test_with_wait_0_the_end_of_the_run_brings_the_last_version_in_full_where_it_failed(scene, faults):
    trainer, publisher = scene.trainer, scene.publisher(wait=False)
    publisher.baseline()
    faults.add("replica", "damage", identity="run-v000001")
    publisher.publish_directory(trainer.step())
    publisher.finish()
    assert publisher.state.acknowledged.identity == "run-v000001-full"
    scene.check_served(trainer.tensors)


@pytest.mark.parametrize("full_every", [0, 20])
def test_the_end_of_the_run_brings_a_version_that_was_never_asked_for_or_says_that_it_is_missing(scene, full_every):
    """A call raised, the trainer went on to the end: that must not look as if its last weights were served."""
    trainer, publisher = scene.trainer, scene.publisher(full_every=full_every)
    publisher.baseline()
    place = trainer.step()
    scene.store.denied.add("s3:PutObject")
    with pytest.raises(StorageAccessError):
        publisher.publish_directory(place)
    scene.store.denied.clear()
    if full_every:
        publisher.finish()
    else:
        with pytest.raises(HotLoadError, match="version 1 is not served"):
            publisher.finish()
        publisher.publish_directory(place)
        publisher.finish()
    scene.check_served(trainer.tensors)


def test_the_end_of_the_run_does_not_publish_a_mirror_that_has_moved_on(scene, faults):
    """B05: killed after the mirror took a version and before that was written down; the next process only ends."""
    trainer, publisher = scene.trainer, scene.publisher(wait=False)
    publisher.baseline()
    faults.add("replica", "damage", identity="run-v000001")
    publisher.publish_directory(trainer.step())
    publisher.close()
    with WeightMirror(publisher.state_dir / "mirror") as mirror:
        mirror.apply_delta(trainer.step())
    again = scene.publisher(wait=False)
    with pytest.raises(HotLoadError, match="version 1 is not served"):
        again.finish()
    assert not any("full" in name for name, _ in scene.hot_loads())
    again.publish_directory(trainer.updates / "weight_v000002")
    again.finish()
    scene.check_served(trainer.tensors)


# -- the bucket -------------------------------------------------------------------------------------------------------


def test_a_baseline_that_the_bucket_refuses_is_known_to_those_who_wait_for_it(scene, faults):
    publisher = scene.publisher()
    scene.store.denied.add("s3:PutObject")
    with pytest.raises(StorageAccessError, match="s3:PutObject"):
        publisher.baseline()
    with pytest.raises(StorageAccessError):
        publisher.publish_directory(scene.trainer.step())
    scene.store.denied.clear()
    publisher.baseline()
    status = read_status(publisher.loader.store, publisher.loader.location, scene.deployment_id)
    assert (status.state, status.identity, status.run_id) == (BaselineState.SERVED, "run-v000000", "run")


def test_after_the_permission_is_granted_the_same_call_brings_the_base_too(scene):
    """B05's kind: what failed in the base's thread is raised, and not for ever."""
    trainer, publisher = scene.trainer, scene.publisher()
    place = trainer.step()
    scene.store.denied.add("s3:PutObject")
    for call in (publisher.baseline, lambda: publisher.publish_directory(place), publisher.finish):
        with pytest.raises(StorageAccessError, match="s3:PutObject"):
            call()
    scene.store.denied.clear()
    with pytest.raises(StorageAccessError):
        publisher.finish()  # an end brings no base
    assert publisher.publish_directory(place).kind is SnapshotChoice.DELTA
    scene.check_served(trainer.tensors)


def test_a_directory_that_is_cleaned_up_while_it_is_read_is_an_error_that_a_retry_mends(scene, faults):
    """B18: the trainer keeps the last versions only, and deletes one that is still being uploaded."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    place = trainer.step()
    shard = trainer.updates / "weight_v000001" / "model-00000-of-00001.safetensors"
    kept = shard.read_bytes()

    class Cleaner:
        @hookimpl
        def cwtrain_before_publish(self, plan):
            shard.unlink(missing_ok=True)

    cleaner = Cleaner()
    publisher.loader.plugins.register(cleaner, name="cleaner")
    with pytest.raises(Exception, match="model-00000-of-00001"):
        publisher.publish_directory(place)
    assert [name for name, _ in scene.hot_loads()] == ["run-v000000"], "half a snapshot was hot-loaded"
    publisher.loader.plugins.unregister("cleaner")
    shard.write_bytes(kept)
    assert publisher.publish_directory(place).identity == "run-v000001"
    scene.check_served(trainer.tensors)


# -- others -----------------------------------------------------------------------------------------------------------


def test_an_identity_of_somebody_else_is_refused_before_weights_are_sent(scene, tmp_path):
    """Two runs whose plugins give the same name: who comes second is told whose it is."""

    class Same:
        @hookimpl
        def cwtrain_name_snapshot(self, written):
            return "the-best" if written.version == 1 else None

    first = scene.publisher(plugins=plugins_with(Same()))
    first.baseline()
    first.publish_directory(scene.trainer.step())
    other = ToyTrainer(tmp_path / "other", seed=5)
    second = scene.publisher(trainer=other, run_id="rival", plugins=plugins_with(Same()))
    second.baseline()
    before = scene.objects("the-best/")
    with pytest.raises(SnapshotConflictError, match="the-best"):
        second.publish_directory(other.step())
    assert scene.objects("the-best/") == before


def test_a_run_that_was_taken_over_is_refused_however_far_the_other_one_jumped(scene):
    """Identities of a run that is called like a later epoch make a second publisher jump over numbers."""
    first = scene.publisher(name="first")
    first.baseline()
    with scene.publisher(run_id="run.7", name="like-epoch-7") as like:
        like.baseline()
    second = scene.publisher(name="second")
    second.baseline()
    assert second.state.epoch == 8
    before = scene.objects("run")
    with pytest.raises(SnapshotConflictError, match="was taken over: its epoch 8"):
        first.publish_directory(scene.trainer.step())
    assert scene.objects("run") == before


def test_one_process_at_a_time_works_with_a_state_directory(scene):
    scene.publisher()
    with pytest.raises(Exception, match="in use by process"):
        scene.publisher()


# -- settings and plugins ---------------------------------------------------------------------------------------------


def test_without_a_mirror_the_chain_must_not_be_cut(scene):
    publisher = scene.publisher(mirror=False, full_every=2)
    publisher.baseline()
    publisher.publish_directory(scene.trainer.step())
    with pytest.raises(ConfigError, match="CWTRAIN_HOTLOAD_MIRROR=0"):
        publisher.publish_directory(scene.trainer.step())


def test_a_base_that_is_said_to_be_there_has_to_be_there_and_equal(scene, tmp_path):
    """B27: the root of a chain is the very checkpoint that was published, compared by bytes."""
    with pytest.raises(SnapshotConflictError, match="CWTRAIN_HOTLOAD_PUBLISH_BASELINE=0"):
        scene.publisher(publish_baseline=False, name="a").baseline()
    with scene.publisher(name="b") as publisher:
        publisher.baseline()
    with scene.publisher(publish_baseline=False, name="c") as publisher:
        assert publisher.baseline().identity == "run-v000000"
    other = ToyTrainer(tmp_path / "other", seed=5)
    with pytest.raises(SnapshotConflictError, match="does not hold"):
        scene.publisher(trainer=other, publish_baseline=False).baseline()


def test_another_base_under_the_same_run_id_gets_a_name_of_its_own(scene, tmp_path):
    """B27: the first delta of the new life applies to the new base."""
    with scene.publisher() as publisher:
        publisher.baseline()
    other = ToyTrainer(tmp_path / "other", seed=5)
    publisher = scene.publisher(trainer=other)
    assert publisher.baseline().identity == "run.2-v000000"
    outcome = publisher.publish_directory(other.step())
    assert scene.hot_load(outcome.identity).previous_identity == "run.2-v000000"
    scene.check_served(other.tensors)


def test_a_base_that_was_changed_is_found_again_under_its_own_name(scene, tmp_path):
    """B47: started again with the second base, also on an empty disk, a run uploads nothing."""
    with scene.publisher() as publisher:
        publisher.baseline()
    other = ToyTrainer(tmp_path / "other", seed=5)
    with scene.publisher(trainer=other) as publisher:
        publisher.baseline()
    before = scene.objects("run")
    for name in ("state", "empty"):
        with scene.publisher(trainer=other, name=name) as publisher:
            assert publisher.baseline().identity == "run.2-v000000"
            other.restart()
            outcome = publisher.publish_directory(other.step())
            assert scene.hot_load(outcome.identity).previous_identity == "run.2-v000000"
        scene.check_served(other.tensors)
    assert {key for key in scene.objects("run") if "v000000" in key} == {key for key in before if "v000000" in key}


def test_a_plugin_chooses_names_and_stands_in_for_the_publish(scene):
    trainer = scene.trainer

    class Opinions:
        def __init__(self):
            self.choice = None
            self.asked = []

        @hookimpl
        def cwtrain_choose_snapshot(self, written, chain):
            self.asked.append((written.version, chain.head.identity))
            return self.choice

        @hookimpl
        def cwtrain_name_snapshot(self, written):
            return f"mine-{written.version}"

        @hookimpl(wrapper=True)
        def cwtrain_sync_weights(self, request):
            result = yield
            self.asked.append(result.identity)
            return result

    opinions, ear = Opinions(), Ear()
    publisher = scene.publisher(plugins=plugins_with(opinions, ear))
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    opinions.choice = SnapshotChoice.SKIP
    assert publisher.publish_directory(trainer.step()).state is PublishState.SKIPPED
    opinions.choice = None
    outcome = publisher.publish_directory(trainer.step())
    assert (outcome.identity, outcome.kind) == ("mine-3", SnapshotChoice.FULL)
    opinions.choice = SnapshotChoice.FULL
    assert publisher.publish_directory(trainer.step()).kind is SnapshotChoice.FULL
    scene.check_served(trainer.tensors)
    assert opinions.asked[:4] == ["run-v000000", (1, "run-v000000"), "mine-1", (2, "mine-1")]
    assert [event.version for event in ear.written] == [None, 1, 2, 3, 4]
    assert ear.kinds(but=("HotLoadProgressed",))[5:10] == [
        "SyncStarted",
        "SnapshotInspected",
        "SnapshotUploaded",
        "HotLoadRequested",
        "SyncCompleted",
    ]
    assert {event.version for event in ear.events if hasattr(event, "version")} == {0, 1, 2, 3, 4}


def test_a_plugin_that_only_says_it_published_is_not_believed(scene):
    class Liar:
        @hookimpl
        def cwtrain_sync_weights(self, request):
            return WeightSyncResult(identity=request.identity, hot_load_id="no-such", seconds=0.0)

    ear = Ear()
    publisher = scene.publisher(plugins=plugins_with(ear))
    publisher.baseline()
    publisher.loader.plugins.register(Liar(), name="liar")
    with pytest.raises(HotLoadError, match="no such hot-load"):
        publisher.publish_directory(scene.trainer.step())
    assert publisher.state.acknowledged.identity == "run-v000000"
    assert ear.kinds()[-1] == "SyncFailed"


def test_what_is_no_version_is_refused_by_what_was_found(scene, tmp_path):
    publisher = scene.publisher()
    publisher.baseline()
    empty = tmp_path / "updates" / "weight_v000009"
    empty.mkdir()
    with pytest.raises(SnapshotLayoutError):
        publisher.publish_directory(empty)
    full = scene.trainer.step("full")
    moved = tmp_path / "updates" / "latest"
    (tmp_path / "updates" / "weight_v000001").rename(moved)
    with pytest.raises(SnapshotLayoutError, match="nothing says which version") as caught:
        publisher.publish_directory(moved)
    assert "number=" in caught.value.hint
    assert publisher.publish_directory(moved, number=1).identity == "run-v000001"
    assert full
