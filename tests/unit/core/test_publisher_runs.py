"""Runs of the publisher without a server: directories in, what is served made again from the bucket and compared."""

from __future__ import annotations

import os
import shutil

import attrs
import pytest

from cwtrain.errors import (
    ChecksumError,
    SnapshotChainError,
    SnapshotLayoutError,
    WaitTimeoutError,
)
from cwtrain.hotload import PublishState, WeightMirror
from cwtrain.hotload._mirror_files import Layout
from cwtrain.hotload.publisher import read_note
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import hookimpl
from helpers.memory_scene import MemoryScene
from helpers.tiny_checkpoint import write_delta_by_hand
from helpers.toy_trainer import ToyTrainer, foreign


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    yield made
    made.close()


@pytest.fixture
def faults(scene):
    return scene.faults


# -- what trainers write ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["xxh3-128", "blake3", "overwrite"])
def test_a_delta_in_a_format_that_the_service_does_not_take_is_converted_with_the_mirror(scene, dialect):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    place = foreign(trainer.step(), trainer.at(0), trainer.at(1), dialect)
    outcome = publisher.publish_directory(place)
    assert (outcome.identity, outcome.kind) == ("run-v000001", SnapshotChoice.DELTA)
    scene.check_served(trainer.tensors)
    assert not list((publisher.state_dir / "staging").iterdir())
    publisher.publish_directory(trainer.step())
    scene.check_served(trainer.tensors)


@pytest.mark.parametrize("same", [True, False])
def test_a_converted_delta_of_before_a_kill_is_published_only_for_the_same_content(scene, same):
    """B05: killed when the mirror had taken the delta and nothing was written down; the trainer writes it anew."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    place = foreign(trainer.step(), trainer.at(0), trainer.at(1), "xxh3-128")
    before = (publisher.state_dir / "journal.json").read_bytes()

    class Killed:
        @hookimpl
        def cwtrain_choose_snapshot(self, written, chain):
            raise KeyboardInterrupt

    publisher.loader.plugins.register(Killed(), name="killed")
    with pytest.raises(KeyboardInterrupt):
        publisher.publish_directory(place)
    publisher.close()
    (publisher.state_dir / "journal.json").write_bytes(before)
    if not same:
        other = ToyTrainer(trainer.root / "again", seed=0)
        other.rng.seed(99)
        place = foreign(other.step(), other.at(0), other.at(1), "xxh3-128")
        trainer = other
    outcome = scene.publisher().publish_directory(place)
    assert (outcome.identity, outcome.kind) == ("run-v000001", SnapshotChoice.DELTA)
    scene.check_served(trainer.tensors)


def test_a_journal_that_is_lost_is_not_made_of_another_runs_versions(scene, tmp_path):
    """B47: a run that is called like an epoch of this one published last."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    (tmp_path / "other").mkdir()
    other = ToyTrainer(tmp_path / "other", seed=5)
    like = scene.publisher(trainer=other, run_id="run.7")
    like.baseline()
    like.publish_directory(other.step())
    outcome = scene.publisher(name="empty").publish_directory(trainer.step())
    assert outcome.kind is SnapshotChoice.DELTA
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000001"
    scene.check_served(trainer.tensors)


def test_without_a_mirror_a_foreign_format_is_refused_with_the_trainers_flag(scene):
    trainer, publisher = scene.trainer, scene.publisher(mirror=False, full_every=0)
    publisher.baseline()
    place = foreign(trainer.step(), trainer.at(0), trainer.at(1), "xxh3-128")
    with pytest.raises(SnapshotLayoutError, match="--update-weight-delta-checksum adler32"):
        publisher.publish_directory(place)


def test_a_tensor_that_is_not_in_the_base_or_has_another_size_is_refused_with_its_name(scene):
    """B27: what the trainer exports is not what the base holds; nothing is published."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    other = {**trainer.tensors, "extra.weight": ("BF16", (2,), bytes(4))}
    place = write_delta_by_hand(
        trainer.updates / "weight_v000001", {**other, "extra.weight": ("BF16", (2,), b"1234")}, other
    )
    with pytest.raises(SnapshotLayoutError, match=r"extra\.weight"):
        publisher.publish_directory(place)
    assert [name for name, _ in scene.hot_loads()] == ["run-v000000"]


def test_a_delta_on_another_base_than_the_one_that_was_published_is_refused(scene):
    """B27: the first delta was made from the trainer's own export, whose bytes are others: the mirror sees it."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    dtype, shape, raw = trainer.tensors["norm.weight"]
    own = {**trainer.tensors, "norm.weight": (dtype, shape, raw[:-1] + bytes([raw[-1] ^ 128]))}
    new = {**own, "norm.weight": (dtype, shape, bytes(len(raw)))}
    place = write_delta_by_hand(trainer.updates / "weight_v000001", own, new)
    with pytest.raises(ChecksumError, match=r"norm\.weight"):
        publisher.publish_directory(place)
    assert [name for name, _ in scene.hot_loads()] == ["run-v000000"]


def test_numbers_that_begin_anywhere_that_jump_and_that_come_back(scene):
    """A start offset; a gap; the same version again; a lower number without a baseline call."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    trainer.number = 41
    first = publisher.publish_directory(trainer.step())
    assert (first.identity, scene.hot_load(first.identity).previous_identity) == ("run-v000042", "run-v000000")
    again = publisher.publish_directory(trainer.updates / "weight_v000042")
    assert (again.state, again.identity) == (PublishState.COMPLETED, "run-v000042")
    jump = publisher.publish_directory(trainer.step(number=50))
    assert (jump.identity, jump.kind) == ("run-v000050", SnapshotChoice.DELTA)
    trainer.restart()
    lower = publisher.publish_directory(trainer.step())
    assert (lower.identity, lower.epoch) == ("run.2-v000001", 2)
    assert scene.hot_load(lower.identity).previous_identity == "run-v000000"
    scene.check_served(trainer.tensors)
    assert len(scene.hot_loads()) == 4


def test_a_second_baseline_call_opens_an_epoch_in_the_same_process(scene):
    """miles repeats its baseline when it goes on with another writer in the middle of a run."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    trainer.restart()
    publisher.baseline()
    outcome = publisher.publish_directory(trainer.step())
    assert (outcome.identity, scene.hot_load(outcome.identity).previous_identity) == ("run.2-v000001", "run-v000000")
    scene.check_served(trainer.tensors)


def test_an_equal_number_with_other_content_is_another_version(scene):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    trainer.restart()
    outcome = publisher.publish_directory(trainer.step())
    assert outcome.identity == "run.2-v000001"
    scene.check_served(trainer.tensors)


def test_a_trainer_in_full_mode_needs_no_baseline_and_its_directories_may_vanish(scene):
    """slime's full mode: every version is a checkpoint, the first one at start-up; no baseline call, no deltas."""
    trainer = scene.trainer
    for life, expected in enumerate((["run-v000001", "run-v000002"], ["run.2-v000001", "run.2-v000002"])):
        with scene.publisher(mirror=bool(life)) as publisher:
            for identity in expected:
                place = trainer.step("full")
                outcome = publisher.publish_directory(place)
                assert (outcome.identity, outcome.kind) == (identity, SnapshotChoice.FULL)
                shutil.rmtree(place)
                scene.check_served(trainer.tensors)
        trainer.restart()


def test_directories_are_deleted_when_they_are_acknowledged_and_behind_a_full_snapshot(scene):
    trainer, publisher = scene.trainer, scene.publisher(cleanup=True, full_every=3)
    publisher.baseline()
    for _ in range(4):
        publisher.publish_directory(trainer.step())
    assert sorted(path.name for path in trainer.updates.iterdir()) == ["weight_v000003", "weight_v000004"]
    trainer.restart()
    publisher.close()
    publisher = scene.publisher(full_every=2)
    publisher.baseline()
    for _ in range(3):
        publisher.publish_directory(trainer.step())
    assert len(list(trainer.updates.iterdir())) == 3


# -- resuming ---------------------------------------------------------------------------------------------------------


def lose(publisher, what):
    """Do to the state directory what happens to it between two lives."""
    root = publisher.state_dir
    publisher.close()
    if what == "mirror":
        shutil.rmtree(root / "mirror")
    elif what == "all":
        shutil.rmtree(root)
    elif what == "another run's mirror":
        other = ToyTrainer(root.parent / "other", seed=9)
        WeightMirror.create(other.base, root / "mirror", version="2", replace=True).close()
    elif what == "another run":
        journal = root / "journal.json"
        journal.write_text(journal.read_text().replace('"run_id": "run"', '"run_id": "gone"'))


@pytest.mark.parametrize("what", ["nothing", "mirror", "another run's mirror", "all", "another run"])
def test_a_writer_that_goes_on_finds_again_what_was_published(scene, what):
    """B47: a restarted actor reads from service, bucket and disk what it published; its deltas go on from there."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    publisher.publish_directory(trainer.step())
    lose(publisher, what)
    publisher = scene.publisher()
    outcome = publisher.publish_directory(trainer.step())
    scene.check_served(trainer.tensors)
    assert outcome.kind is SnapshotChoice.DELTA
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000002"
    assert outcome.identity == ("run-v000003" if "all" != what != "another run" else "run.2-v000003")
    outcome = publisher.publish_directory(trainer.step())
    scene.check_served(trainer.tensors)


def test_the_length_of_a_chain_is_counted_from_the_service_after_a_resume(scene):
    """B29: the full snapshot comes before the limit, whatever this process has counted."""
    trainer = scene.trainer
    kinds = []
    for life in range(4):
        with scene.publisher(full_every=3) as publisher:
            if not life:
                publisher.baseline()
            kinds.append(publisher.publish_directory(trainer.step()).kind.value)
    assert kinds == ["DELTA", "DELTA", "FULL", "DELTA"]


@pytest.mark.parametrize("full_every", [0, 20])
def test_a_predecessor_that_the_deployment_does_not_know_is_no_predecessor(scene, full_every):
    """B29: the journal says acknowledged, the deployment has no such hot-load: it does not count."""
    trainer, publisher = scene.trainer, scene.publisher(full_every=full_every, mirror=None)
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    known = attrs.evolve(publisher.state.acknowledged, identity="run-v000009")
    publisher._journal.save(attrs.evolve(publisher.state, acknowledged=known))
    if full_every:
        assert publisher.publish_directory(trainer.step()).kind is SnapshotChoice.FULL
        scene.check_served(trainer.tensors)
    else:
        with pytest.raises(SnapshotChainError, match="has to be published in full"):
            publisher.publish_directory(trainer.step())


def test_what_was_published_is_noted_beside_the_trainers_checkpoint(scene, tmp_path):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    publisher.publish_directory(trainer.step("empty"))
    publisher.note_checkpoint(tmp_path, step=17)
    note = read_note(tmp_path)
    assert (note.step, note.version, note.identity, note.acknowledged) == (17, 2, "run-v000001", True)


def test_a_run_without_an_id_gets_one_and_is_warned(scene, caplog):
    publisher = scene.publisher(run_id=None)
    assert publisher.run_id.startswith("updates-20")
    assert "CWTRAIN_HOTLOAD_RUN_ID" in caplog.text


def test_another_deployment_on_the_same_bucket_gets_the_base_without_an_upload(scene):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    publisher.close()
    before = scene.objects("run-v000000/")
    scene.replace_deployment()
    trainer.restart()
    publisher = scene.publisher()
    publisher.baseline()
    outcome = publisher.publish_directory(trainer.step())
    assert scene.hot_loads() == [("run-v000000", "COMPLETED"), ("run.2-v000001", "COMPLETED")]
    assert outcome.kind is SnapshotChoice.DELTA
    assert scene.objects("run-v000000/") == before
    scene.check_served(trainer.tensors)


def test_after_a_rollback_the_next_version_is_served_again(scene):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    publisher.publish_directory(trainer.step())
    publisher.loader.rollback("run-v000001")
    scene.check_served(trainer.at(1))
    outcome = publisher.publish_directory(trainer.step())
    assert outcome.kind is SnapshotChoice.DELTA
    scene.check_served(trainer.tensors)


def test_a_time_that_is_over_while_the_mirror_is_written_stops_there_and_the_next_call_goes_on(scene):
    """The disk may be slow: the trainer's call ends when it said, and the mirror still holds the version before."""
    trainer, slow = scene.trainer, {"seconds": 0.0}
    mark = Layout(str(trainer.root / "state" / "mirror")).mark

    def clock():
        return scene.clock() + (slow["seconds"] if os.path.exists(mark) else 0.0)

    scene.clock_for_publishers = clock
    publisher = scene.publisher()
    publisher.baseline()
    publisher.publish_directory(trainer.step())
    place = trainer.step()
    slow["seconds"] = 100.0
    with pytest.raises(WaitTimeoutError, match=r"still bringing the mirror to version 2 \(\d+ of \d+ bytes\)"):
        publisher.publish_directory(place, deadline=30.0)
    slow["seconds"] = 0.0
    assert publisher.publish_directory(place).kind is SnapshotChoice.DELTA
    scene.check_served(trainer.tensors)
