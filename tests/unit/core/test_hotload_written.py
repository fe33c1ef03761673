"""HotLoader.trigger with what a writer returned: everything is known, and nothing is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from cwtrain.errors import SnapshotConflictError, SnapshotError
from cwtrain.hotload import HotLoader, MemoryBase
from cwtrain.models.service import HotLoad, HotLoadSpec, HotLoadState, SnapshotType
from cwtrain.plugins import Plugins, hookimpl
from cwtrain.storage import MemoryStore
from cwtrain.storage._learned import Learned
from cwtrain.storage.claim import stream_claim, take_claim
from helpers.fake_service import Clock, FakeService
from helpers.streamed import INDEX, State, make_state, next_state, side_files, write
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand, write_full


@attrs.define
class World:
    """A deployment, and a run that streams into its bucket. ``service`` has no types of its own."""

    sides: Path
    service: Any = attrs.field(factory=FakeService)
    clock: Any = attrs.field(factory=Clock)
    store: MemoryStore = attrs.field(factory=lambda: MemoryStore("weights"))
    base: MemoryBase = attrs.field(factory=MemoryBase)
    state: State = attrs.field(factory=lambda: make_state(1))
    loader: HotLoader = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.loader = HotLoader(
            self.service, "dep", s3=self.store, plugins=Plugins(), clock=self.clock, sleep=self.clock.sleep
        )

    def full(self, identity: str) -> Any:
        options: dict[str, Any] = {"kind": "full", "base": self.base, "side_files": self.sides}
        return write(self.store, self.loader.location, identity, self.state, **options)

    def delta(self, identity: str, *, changed: bool = True) -> Any:
        self.state = next_state(self.state, 2) if changed else self.state
        return write(self.store, self.loader.location, identity, self.state, kind="delta", base=self.base)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(sides=side_files(tmp_path / "sides"))


def test_a_full_and_a_delta_are_loaded_as_they_were_written(world: World) -> None:
    full = world.loader.trigger(world.full("v0"))
    assert (full.identity, full.spec.type, full.previous_identity) == ("v0", SnapshotType.FULL, None)
    delta = world.loader.trigger(world.delta("v1"), previous_identity="v0")
    assert (delta.identity, delta.spec.type, delta.previous_identity) == ("v1", SnapshotType.INCREMENTAL, "v0")
    assert delta.state is HotLoadState.COMPLETED
    assert not any(call == "stream" for call, _ in world.store.calls), "no index was read back"
    again = world.loader.trigger("v1")
    assert again.id == delta.id, "the same work as by its name"
    assert ("stream", world.loader.location.key("v1", INDEX)) in world.store.calls


def test_an_empty_delta_is_refused_with_what_to_do(world: World) -> None:
    world.loader.trigger(world.full("v0"))
    empty = world.delta("v1", changed=False)
    asked = len(world.service.calls)
    with pytest.raises(SnapshotError, match="v1 is an empty delta on v0") as caught:
        world.loader.trigger(empty)
    assert "skip this version" in (caught.value.hint or "")
    assert len(world.service.calls) == asked, "nothing was asked"


def test_a_predecessor_that_is_given_must_agree(world: World) -> None:
    full = world.full("v0")
    with pytest.raises(SnapshotError, match="is a full snapshot"):
        world.loader.trigger(full, previous_identity="v9")
    world.loader.trigger(full)
    delta = world.delta("v1")
    with pytest.raises(SnapshotError, match="was written as a delta on v0, not on v9") as caught:
        world.loader.trigger(delta, previous_identity="v9")
    assert "leave previous_identity out" in (caught.value.hint or "")
    assert [one.identity for one in world.service.hot_loads] == ["v0"]


def test_what_was_written_elsewhere_is_refused(world: World) -> None:
    """The deployment would look for it in its own bucket, and find nothing or something else."""
    elsewhere = attrs.evolve(world.full("v0"), uri="s3://other/run/v0")
    with pytest.raises(SnapshotError, match="s3://other/run/v0 was written, and the deployment loads s3://weights"):
        world.loader.trigger(elsewhere)
    assert world.service.hot_loads == []


def test_the_requests_of_a_publish(world: World, tmp_path: Path) -> None:
    """What a run's second streamed delta, and a delta from a directory after it, ask the bucket and the service."""
    world.loader.trigger(world.full("v0"))
    world.loader.trigger(world.delta("v1"))
    store, service, location = world.store, world.service, world.loader.location
    service.polls = 0  # a hot-load ends at once
    in_bucket, in_service = len(store.calls), len(service.calls)
    world.loader.trigger(world.delta("v2"))
    assert store.calls[in_bucket:] == [
        ("list_objects", location.prefix("v2")),
        ("put", location.claim_key("v2")),
        ("put", location.key("v2", "model-r00000-00000.safetensors")),
        ("put", location.manifest_key("v2")),
        ("put", location.key("v2", INDEX)),
    ]
    asked = ["get_deployment", "list_hot_loads", "create_hot_load", "get_hot_load", "list_hot_load_replicas"]
    assert [call[0] for call in service.calls[in_service:]] == asked

    full = write_full(tmp_path / "full", tiny_tensors(0))
    world.loader.publish(full, "v3")
    delta = write_delta_by_hand(tmp_path / "delta", tiny_tensors(0), tiny_tensors(1))
    in_bucket, in_service = len(store.calls), len(service.calls)
    world.loader.publish(delta, "v4", previous_identity="v3")
    made = store.calls[in_bucket:]
    assert made[:2] == [("list_objects", location.prefix("v4")), ("put", location.claim_key("v4"))]
    assert [call for call, _ in made[2:]] == ["put"] * 3
    assert made[-2:] == [("put", location.manifest_key("v4")), ("put", location.key("v4", INDEX))]
    assert [call[0] for call in service.calls[in_service:]] == asked


def test_a_hot_load_that_has_ended_is_not_asked_for_again(world: World) -> None:
    written = world.full("v0")
    world.loader.trigger(written)
    asked = world.service.count("get_hot_load")
    assert world.loader.trigger(written).state is HotLoadState.COMPLETED
    assert world.service.count("get_hot_load") == asked


def test_what_began_since_the_plan_is_waited_for(world: World, tmp_path: Path) -> None:
    """The hot-loads are listed once for a publish that is quick; the service says what has begun meanwhile."""

    class Rival:
        @hookimpl
        def cwtrain_before_publish(self, plan: Any) -> None:
            other = HotLoadSpec(id="other-1", deployment_id="dep", identity="theirs", type=SnapshotType.FULL)
            world.service.add(HotLoad(spec=other))

    world.loader.plugins.register(Rival(), name="rival")
    hot_load = world.loader.publish(write_full(tmp_path / "full"), "v0")
    assert hot_load.state is HotLoadState.COMPLETED
    assert [(one.identity, one.state.name) for one in world.service.hot_loads] == [
        ("v0", "COMPLETED"),
        ("theirs", "COMPLETED"),
    ]
    assert world.service.count("list_hot_loads") == 2


def test_a_list_that_is_old_is_made_again(world: World, tmp_path: Path) -> None:
    """An upload that took as long as a poll: what others did meanwhile counts."""

    class Slow:
        @hookimpl
        def cwtrain_before_publish(self, plan: Any) -> None:
            world.clock.sleep(world.loader.poll_interval)

    world.loader.plugins.register(Slow(), name="slow")
    world.loader.publish(write_full(tmp_path / "full"), "v0")
    assert world.service.count("list_hot_loads") == 2


def test_a_claim_of_another_run_stops_a_publish_before_a_byte(world: World, tmp_path: Path) -> None:
    """A later publish of a run meets it with its own claim, a dry run by a look; the first publish looks as well."""
    full = write_full(tmp_path / "full")
    claim = stream_claim("theirs", run_id="theirs")
    store, location = world.store, world.loader.location
    for identity in ("v1", "v3"):
        take_claim(store, location, identity, claim)
        store.learned = Learned() if identity == "v1" else store.learned
        for dry_run in (True, False):
            since = len(store.calls)
            with pytest.raises(SnapshotConflictError, match=f"_claims/{identity}.json"):
                world.loader.publish(full, identity, dry_run=dry_run)
            written = [key for call, key in store.calls[since:] if call == "put"]
            assert set(written) <= {location.claim_key(identity)}
            assert store.get(location.claim_key(identity)) == claim.to_bytes()
        world.loader.publish(full, "v2")
    assert store.learned.conditional
