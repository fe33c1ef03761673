"""HotLoader against a service in memory: what is asked for, waited for, adopted, refused, and said."""

import logging

import attrs
import pytest

from cwtrain.errors import (
    ConfigError,
    ConnectionFailedError,
    DeploymentFailedError,
    HotLoadCanceledError,
    HotLoadError,
    HotLoadFailedError,
    HotLoadTimeoutError,
    SnapshotChainError,
    SnapshotConflictError,
    SnapshotError,
)
from cwtrain.events import HotLoadProgressed, HotLoadRequested, SnapshotUploaded, SyncCompleted, SyncFailed, SyncStarted
from cwtrain.hotload import HotLoader
from cwtrain.models.service import (
    Condition,
    ConditionStatus,
    HotLoad,
    HotLoadSpec,
    HotLoadState,
    IncrementalSnapshotMetadata,
    PromptCachePolicy,
    ResourceStatus,
)
from cwtrain.models.service import SnapshotType as Type
from cwtrain.plugins import Plugins, hookimpl
from cwtrain.storage import MemoryStore
from helpers.fake_service import Clock, FakeService
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand, write_full


class Recorder:
    def __init__(self):
        self.events = []
        self.plans = []
        self.veto = None

    @hookimpl
    def cwtrain_weight_sync(self, event):
        self.events.append(event)

    @hookimpl
    def cwtrain_before_publish(self, plan):
        self.plans.append(plan)
        if self.veto:
            raise self.veto

    def kinds(self):
        return [type(event) for event in self.events]


@pytest.fixture
def world(tmp_path):
    class World:
        service = FakeService()
        clock = Clock()
        store = MemoryStore("weights")
        recorder = Recorder()
        full = write_full(tmp_path / "full")
        delta = write_delta_by_hand(tmp_path / "delta", tiny_tensors(0), tiny_tensors(1))

        def __init__(self):
            plugins = Plugins()
            plugins.register(self.recorder, name="recorder")
            self.loader = HotLoader(
                self.service, "dep", s3=self.store, plugins=plugins, clock=self.clock, sleep=self.clock.sleep
            )

        def objects(self):
            return [info.key for info in self.store.list_objects("")]

    return World()


def other_hot_load(identity="somebody-elses"):
    return HotLoad(spec=HotLoadSpec(id="other-1", deployment_id="dep", identity=identity, type=Type.FULL))


def test_a_full_and_a_delta_end_completed_with_events_and_timings(world):
    first = world.loader.publish(world.full, "v0")
    second = world.loader.publish(world.delta, "v1", previous_identity="v0")
    assert [first.state.name, second.state.name] == ["COMPLETED", "COMPLETED"]
    assert world.loader.current_identity() == "v1"
    assert second.previous_identity == "v0"
    assert {"inspect_seconds", "upload_seconds", "accept_seconds", "first_replica_seconds", "bytes"} <= set(
        second.timings
    )
    kinds = world.recorder.kinds()
    for kind in (SyncStarted, SnapshotUploaded, HotLoadRequested, HotLoadProgressed, SyncCompleted):
        assert kind in kinds
    assert "run/v1/model.safetensors.index.json" in world.objects()
    assert "run/_manifests/v1.json" in world.objects()
    assert "run/_claims/v1.json" in world.objects()
    assert world.loader.verify("v0").verified
    assert world.loader.read_manifest("v0")["deployment_id"] == "dep"


def test_a_dry_run_says_what_would_happen_and_writes_nothing(world):
    plan = world.loader.publish(world.full, "v0", dry_run=True)
    assert plan.kind == "FULL"
    assert plan.upload_bytes == plan.total_bytes > 0
    assert plan.uri == "s3://weights/run/v0"
    assert not plan.already_served
    assert world.objects() == []
    assert world.service.count("create_hot_load") == 0
    world.loader.publish(world.full, "v0")
    again = world.loader.plan(world.full, "v0")
    assert again.already_served
    assert again.upload_bytes == 0
    assert set(again.existing) == set(again.files)


def test_what_is_served_already_is_done(world):
    first = world.loader.publish(world.full, "v0")
    again = world.loader.publish(world.full, "v0")
    assert again.id == first.id
    assert world.service.count("create_hot_load") == 1


def test_a_replica_that_lost_the_identity_makes_it_work_again(world):
    first = world.loader.publish(world.full, "v0")
    world.service.replicas["r2"] = "initial"
    again = world.loader.publish(world.full, "v0")
    assert again.id != first.id
    assert world.loader.verify_served("v0").served


def test_a_guard_can_refuse_before_anything_is_written(world):
    world.recorder.veto = RuntimeError("not on Fridays")
    with pytest.raises(RuntimeError, match="Fridays"):
        world.loader.publish(world.full, "v0")
    assert world.objects() == []
    assert world.recorder.plans[0].identity == "v0"


def test_other_content_under_the_identity_is_a_conflict_and_nothing_is_sent(world, tmp_path):
    world.loader.publish(world.full, "v0")
    before = world.objects()
    other = write_full(tmp_path / "other", tiny_tensors(5))
    with pytest.raises(SnapshotConflictError) as caught:
        world.loader.publish(other, "v0")
    assert caught.value.objects
    assert world.objects() == before


def test_a_delta_needs_a_predecessor_that_this_deployment_completed(world):
    with pytest.raises(SnapshotChainError, match="v0") as caught:
        world.loader.publish(world.delta, "v1", previous_identity="v0")
    assert "full snapshot" in caught.value.hint
    with pytest.raises(SnapshotChainError, match="weight_v000000"):
        world.loader.publish(world.delta, "v1")
    assert world.objects() == []


def test_the_129th_delta_is_refused_before_the_upload(world, tmp_path):
    world.loader.publish(world.full, "v0")
    world.service.polls = 1
    for n in range(1, 129):
        world.service.add(
            HotLoad(
                spec=attrs.evolve(
                    world.service.hot_loads[0].spec,
                    id=f"h{n}",
                    identity=f"v{n}",
                    type=Type.INCREMENTAL,
                    incremental_snapshot_metadata=IncrementalSnapshotMetadata(previous_snapshot_identity=f"v{n - 1}"),
                ),
                status=world.service.hot_loads[0].status,
            )
        )
    with pytest.raises(SnapshotChainError, match="at most 128"):
        world.loader.publish(world.delta, "v129", previous_identity="v128")
    assert not any("v129" in key for key in world.objects())
    plan = world.loader.plan(world.delta, "branch", previous_identity="v100")
    assert plan.chain_deltas == 101
    assert any("63" in warning for warning in plan.warnings)


def test_b58_another_hot_load_is_waited_for_and_named_within_one_timeout(world):
    """B58: time spent waiting for another hot-load counts against the same timeout; the caller sees which one."""
    world.service.add(other_hot_load(), polls=4)
    seen = []
    hot_load = world.loader.publish(world.full, "v0", on_progress=seen.append)
    assert hot_load.state is HotLoadState.COMPLETED
    waits = [event for event in seen if event.waiting_on is not None]
    assert waits[0].waiting_on.id == "other-1"
    assert "other-1" in waits[0].summary()
    assert world.service.count("create_hot_load") == 1

    world.service.add(attrs.evolve(other_hot_load(), spec=attrs.evolve(other_hot_load().spec, id="other-2")), polls=99)
    began = world.clock.now
    with pytest.raises(HotLoadTimeoutError, match="other-2") as caught:
        world.loader.trigger("v0", timeout=30.0)
    assert world.clock.now - began <= 31
    assert "cwtrain hotload wait other-2" in caught.value.hint


def test_b58_a_timeout_names_what_goes_on_and_the_next_publish_waits_for_it(world):
    world.service.polls = 50
    with pytest.raises(HotLoadTimeoutError) as caught:
        world.loader.publish(world.full, "v0", timeout=1.0)
    hot_load_id = world.service.hot_loads[0].id
    assert hot_load_id in str(caught.value)
    assert f"cwtrain hotload wait {hot_load_id}" in caught.value.hint
    assert caught.value.hot_load.id == hot_load_id
    done = world.loader.publish(world.full, "v0", timeout=1000.0)
    assert done.id == hot_load_id, "the same work is adopted, not asked for again"
    assert world.service.count("create_hot_load") == 1


def test_b58_a_failure_carries_the_conditions_and_each_replica_s_reason(world):
    world.service.outcome = HotLoadState.FAILED
    world.service.conditions = (Condition(type="Ready", reason="ReplicaFailed", message="1 of 2 replicas failed"),)
    world.service.replica_errors = {"r2": "CUDA out of memory"}
    with pytest.raises(HotLoadFailedError, match=r"1 of 2 replicas failed.*r2: CUDA out of memory") as caught:
        world.loader.publish(world.full, "v0")
    assert caught.value.hot_load.state is HotLoadState.FAILED
    assert world.recorder.kinds()[-1] is SyncFailed
    failed = world.service.hot_loads[0].id
    world.service.outcome, world.service.replica_errors = HotLoadState.COMPLETED, {}
    assert world.loader.publish(world.full, "v0").id != failed, "a new try is a new hot-load"


def test_a_canceled_hot_load_is_its_own_error(world):
    world.service.outcome = HotLoadState.CANCELED
    with pytest.raises(HotLoadCanceledError):
        world.loader.publish(world.full, "v0")


def test_b30_completed_with_a_straggler_is_warned_about_by_name(world, caplog):
    """B30: COMPLETED comes from the hot-load alone, but a replica that contradicts it is named."""
    world.service.stuck = {"r2"}
    with caplog.at_level(logging.WARNING, logger="cwtrain.hotload"):
        hot_load = world.loader.publish(world.full, "v0")
    assert hot_load.state is HotLoadState.COMPLETED
    assert "r2" in caplog.text
    assert "initial" in caplog.text
    report = world.loader.verify_served("v0")
    assert not report.served
    assert [replica.name for replica in report.behind] == ["r2"]


def test_an_outage_in_the_wait_costs_time_only(world):
    down = ConnectionFailedError("connection refused")
    world.service.fail["get_hot_load"] = [None, *[down] * 40, None]
    seen = []
    hot_load = world.loader.publish(world.full, "v0", on_progress=seen.append)
    assert hot_load.state is HotLoadState.COMPLETED
    assert any(event.problem and "refused" in event.summary() for event in seen)


def test_b28_an_answer_that_was_lost_is_asked_for_again_under_the_same_id(world):
    """B28: the service took the hot-load and the answer was lost: no second one is made."""
    world.service.fail["create_hot_load"] = [ConnectionFailedError("reset")]
    hot_load = world.loader.publish(world.full, "v0")
    assert hot_load.state is HotLoadState.COMPLETED
    assert len(world.service.hot_loads) == 1


def test_a_failed_deployment_never_costs_a_whole_timeout(world):
    world.service.deployment = attrs.evolve(
        world.service.deployment,
        status=ResourceStatus.FAILED,
        conditions=(Condition(type="Ready", status=ConditionStatus.FALSE, message="no capacity"),),
    )
    with pytest.raises(DeploymentFailedError, match="no capacity"):
        world.loader.publish(world.full, "v0")
    assert world.clock.now == 0
    assert world.objects() == []


def test_a_deployment_that_fails_during_the_wait_ends_it(world):
    world.service.polls = 1000

    def fail(event):
        if event.hot_load is not None:
            world.service.deployment = attrs.evolve(world.service.deployment, status=ResourceStatus.FAILED)

    with pytest.raises(DeploymentFailedError):
        world.loader.publish(world.full, "v0", on_progress=fail)
    assert world.clock.now < 60


def test_a_deployment_without_hot_load_says_how_it_gets_one(world):
    world.service.deployment = attrs.evolve(world.service.deployment, hot_load=None)
    with pytest.raises(HotLoadError, match="without hotLoad") as caught:
        world.loader.publish(world.full, "v0")
    assert "creation" in caught.value.hint


def test_trigger_reads_from_the_bucket_what_a_snapshot_is(world):
    world.loader.publish(world.full, "v0")
    world.loader.upload(world.delta, "v1", previous_identity="v0")
    hot_load = world.loader.trigger("v1")
    assert hot_load.spec.type is Type.INCREMENTAL
    assert hot_load.previous_identity == "v0"
    with pytest.raises(SnapshotError, match="s3://weights/run/v7"):
        world.loader.trigger("v7")


def test_trigger_refuses_a_predecessor_for_a_full_snapshot(world):
    world.loader.upload(world.full, "v0")
    with pytest.raises(SnapshotError, match="is a full snapshot") as caught:
        world.loader.trigger("v0", previous_identity="v9")
    assert "--previous-identity" in caught.value.hint
    assert world.service.hot_loads == []


def test_another_policy_is_other_work(world):
    first = world.loader.publish(world.full, "v0")
    same = world.loader.trigger("v0", prompt_cache_policy=PromptCachePolicy.PRESERVE)
    assert same.id == first.id, "PRESERVE is what the server does by itself"
    reset = world.loader.trigger("v0", prompt_cache_policy="RESET_ALL")
    assert reset.id != first.id


def test_a_policy_that_does_not_exist_is_refused_before_anything_is_asked(world):
    """B02: an unknown policy string is refused locally, by every way in."""
    for call in (
        lambda: world.loader.publish(world.full, "v0", prompt_cache_policy="RESET"),
        lambda: world.loader.trigger("v0", prompt_cache_policy="RESET"),
        lambda: world.loader.rollback("v0", prompt_cache_policy="RESET"),
    ):
        with pytest.raises(ConfigError, match="RESET"):
            call()
    assert world.service.hot_loads == []


def test_rollback_repeats_type_and_predecessor_and_names_what_is_gone(world):
    world.loader.publish(world.full, "v0")
    world.loader.publish(world.delta, "v1", previous_identity="v0")
    world.loader.rollback("v0")
    assert world.loader.current_identity() == "v0"
    back = world.loader.rollback("v1")
    assert back.previous_identity == "v0"
    assert back.spec.type is Type.INCREMENTAL
    with pytest.raises(SnapshotChainError, match="never completed"):
        world.loader.rollback("v9")
    del world.store.objects["run/v0/model-00001-of-00002.safetensors"]
    with pytest.raises(SnapshotError, match=r"run/v0/model-00001-of-00002.safetensors"):
        world.loader.rollback("v1")


def test_verify_names_every_object_that_is_not_what_was_published(world):
    world.loader.publish(world.full, "v0")
    shard = "run/v0/model-00001-of-00002.safetensors"
    raw = bytearray(world.store.get(shard))
    raw[-1] ^= 1
    del world.store.objects[shard]
    world.store.put(shard, bytes(raw))
    del world.store.objects["run/v0/config.json"]
    report = world.loader.verify("v0")
    assert not report.verified
    text = "\n".join(report.problems)
    assert f"{shard}: its SHA-256" in text
    assert "checksum" in text
    assert "run/v0/config.json: is gone" in text
