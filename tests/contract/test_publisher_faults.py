"""What goes wrong under a publisher, made by the emulator: what it does about it, and what it says."""

from __future__ import annotations

import logging
import threading

import pytest

from cwtrain.errors import (
    SnapshotConflictError,
    StorageAccessError,
    WaitTimeoutError,
)
from cwtrain.hotload import PublishState
from cwtrain.models.sync import SnapshotChoice
from helpers.publish_scene import Ear, Scene, plugins_with
from helpers.toy_trainer import ToyTrainer


@pytest.fixture
def scene(emulator, deployment, service, tmp_path):
    made = Scene(emulator, deployment, service, tmp_path)
    yield made
    made.close()


def test_a_delta_that_fails_on_one_replica_is_published_in_full_and_the_next_one_is_a_delta(scene, faults):
    """B05: what failed is not acknowledged. The version comes in full, and later deltas apply to that."""
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    victim = scene.replicas()[0]["name"]
    faults.add("replica", "damage", replica=victim, identity="run-v000001", times=1)
    outcome = publisher.publish_directory(trainer.step())
    assert (outcome.identity, outcome.kind) == ("run-v000001-full", SnapshotChoice.FULL)
    assert outcome.metrics["hotload/chain_cut"] == 1
    scene.check_served(trainer.tensors)
    assert scene.hot_loads()[-2:] == [("run-v000001", "FAILED"), ("run-v000001-full", "COMPLETED")]
    outcome = publisher.publish_directory(trainer.step())
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000001-full"
    scene.check_served(trainer.tensors)


@pytest.mark.parametrize("late", [False, True], ids=["failed", "late"])
def test_with_wait_0_the_next_call_looks_at_how_the_last_one_ended(scene, faults, late):
    """B05: a delta that nobody waited for and that failed leads to a full snapshot; one that came late does not."""
    trainer, publisher = scene.trainer, scene.publisher(wait=False)
    publisher.baseline()
    if late:
        faults.add("replica", "slow", identity="run-v000001", seconds=0.3)
    else:
        faults.add("replica", "damage", identity="run-v000001")
    first = publisher.publish_directory(trainer.step())
    assert (first.identity, first.state) == ("run-v000001", PublishState.ACCEPTED)
    assert publisher.state.acknowledged.identity == "run-v000000"
    second = publisher.publish_directory(trainer.step())
    assert second.kind is (SnapshotChoice.DELTA if late else SnapshotChoice.FULL)
    publisher.finish()
    assert publisher.state.acknowledged.identity == "run-v000002"
    scene.check_served(trainer.tensors)


def test_after_a_time_out_the_state_is_read_again_before_anything_is_decided(scene, faults):
    """B05: the client timed out on version 1, which then completed: version 2 is a delta on it."""
    trainer = scene.trainer
    publisher = scene.publisher(timeout=0.4)
    publisher.baseline(wait_seconds=60)
    stuck = faults.add("replica", "stuck", identity="run-v000001")
    with pytest.raises(WaitTimeoutError, match="hot-load") as caught:
        publisher.publish_directory(trainer.step())
    assert caught.value.hint
    assert publisher.state.pending.identity == "run-v000001"
    publisher.close()
    faults.clear(stuck)
    publisher = scene.publisher(timeout=60.0)
    outcome = publisher.publish_directory(trainer.step())
    assert (outcome.kind, scene.hot_load(outcome.identity).previous_identity) == (SnapshotChoice.DELTA, "run-v000001")
    scene.check_served(trainer.tensors)


def test_a_bucket_that_refuses_writes_stops_the_run_with_the_permission(scene, faults):
    trainer, publisher = scene.trainer, scene.publisher()
    publisher.baseline()
    denied = faults.add("store", "denied", permission="s3:PutObject", caller="trainer")
    with pytest.raises(StorageAccessError, match="s3:PutObject") as caught:
        publisher.publish_directory(trainer.step())
    assert caught.value.action == "s3:PutObject"
    faults.clear(denied)
    publisher.publish_directory(trainer.updates / "weight_v000001")
    scene.check_served(trainer.tensors)


def test_an_outage_longer_than_the_budget_of_a_call_is_survived_in_every_wait(scene, faults):
    """Each kind of call fails for a while: readiness, lists, creates, looks at hot-loads and replicas, the store."""
    trainer = scene.trainer
    client = scene.impatient_client()
    publisher = scene.publisher(client=client)
    for path in ("/deployments/", "hotLoads", "/hotLoads/", "/replicas"):
        faults.add("api", "status", status=503, path=path, times=6)
    publisher.baseline()
    for after in range(0, 6, 2):
        for path in ("/deployments/", "hotLoads", "/hotLoads/"):
            faults.add("api", "status", status=503, path=path, after=after, times=5)
        faults.add("store", "status", status=503, caller="trainer", after=after, times=4)
        publisher.publish_directory(trainer.step())
        publisher.finish()
        scene.check_served(trainer.tensors)
        faults.clear()
    client.close()


def test_an_outage_longer_than_the_deadline_is_an_error_that_says_what_to_do(scene, faults):
    trainer, client = scene.trainer, scene.impatient_client()
    publisher = scene.publisher(client=client, deadline=0.3)
    publisher.baseline()
    down = faults.add("api", "status", status=503, path="hotLoads$", method="GET")
    with pytest.raises(Exception, match="503"):
        publisher.publish_directory(trainer.step())
    faults.clear(down)
    publisher.close()
    publisher = scene.publisher()
    publisher.publish_directory(trainer.updates / "weight_v000001")
    scene.check_served(trainer.tensors)
    client.close()


def test_a_deployment_that_refuses_a_chain_through_an_older_snapshot_loads_the_base_again_first(scene, faults):
    trainer = scene.trainer
    with scene.publisher() as publisher:
        publisher.baseline()
        publisher.publish_directory(trainer.step())
    trainer.restart()
    publisher = scene.publisher()
    publisher.baseline()
    faults.add("api", "status", status=412, message="the chain is not served", method="POST", path="hotLoads$", times=1)
    outcome = publisher.publish_directory(trainer.step())
    assert [name for name, _ in scene.hot_loads()] == ["run-v000000", "run-v000001", "run-v000000", "run.2-v000001"]
    assert outcome.kind is SnapshotChoice.DELTA
    scene.check_served(trainer.tensors)


def test_a_second_publisher_of_the_run_takes_it_over_and_the_first_sends_nothing_more(scene, tmp_path):
    """B47: two live instances under one run id. Each epoch has one opener, so no identity is ever written by two."""
    first = scene.publisher()
    first.baseline()
    other = ToyTrainer(tmp_path / "other")
    second = scene.publisher(trainer=other)
    second.baseline()
    before = scene.objects("")
    with pytest.raises(SnapshotConflictError, match="taken over") as caught:
        first.publish_directory(scene.trainer.step())
    assert "CWTRAIN_HOTLOAD_RUN_ID" in caught.value.hint
    assert scene.objects("") == before, "something was sent"
    second.publish_directory(other.step())
    scene.check_served(other.tensors)


def test_another_runs_hot_load_is_waited_for_and_named(scene, faults, tmp_path, caplog):
    trainer = scene.trainer
    ear = Ear()
    publisher = scene.publisher(plugins=plugins_with(ear))
    publisher.baseline()
    other = ToyTrainer(tmp_path / "other", seed=5)
    rival = scene.publisher(trainer=other, run_id="rival", wait=False)
    stuck = faults.add("replica", "stuck", identity="rival-.*")
    rival.baseline(wait_seconds=0.01)
    while not any(name.startswith("rival") for name, _ in scene.hot_loads()):
        pass  # the rival's base is on its way
    result = []
    with caplog.at_level(logging.WARNING, "cwtrain.hotload"):
        thread = threading.Thread(target=lambda: result.append(publisher.publish_directory(trainer.step())))
        thread.start()
        while not any(getattr(event, "waiting_on", None) for event in ear.events):
            thread.join(0.01)
        assert not result
        faults.clear(stuck)
        thread.join(60)
    assert result
    assert result[0].state is PublishState.COMPLETED
    assert any("rival-v000000" in record.message for record in caplog.records)
    scene.check_served(trainer.tensors)


def test_verify_asks_every_replica_again(scene, faults):
    publisher = scene.publisher(verify=True)
    publisher.baseline()
    outcome = publisher.publish_directory(scene.trainer.step())
    assert outcome.metrics["hotload/replicas"] == 2
