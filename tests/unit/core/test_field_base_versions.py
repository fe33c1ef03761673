"""A delta is put only on the version that it was made from, whoever publishes it and however the two are called.

The kind: what a delta's own index says of its base was overwritten by what the caller said, and compared with nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import SnapshotChainError, SnapshotError
from cwtrain.hotload import HotLoader, upload_snapshot
from cwtrain.plugins import Plugins
from cwtrain.snapshots import inspect_snapshot
from cwtrain.storage import MemoryStore
from helpers.fake_service import Clock, FakeService
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand, write_full


class World:
    """Five versions; v1 changes one tensor, v2 nothing, v3 another one, v4 a third."""

    def __init__(self, root: Path) -> None:
        self.root, self.store, self.service = root, MemoryStore("weights"), FakeService()
        self.versions = [tiny_tensors()]
        for name in ("embed.weight", None, "norm.weight", "layer.weight"):
            after = dict(self.versions[-1])
            if name is not None:
                dtype, shape, raw = after[name]
                after[name] = (dtype, shape, bytes(one ^ 1 for one in raw))
            self.versions.append(after)

    @property
    def loader(self) -> HotLoader:
        """Another process each time."""
        clock = Clock()
        return HotLoader(self.service, "dep", s3=self.store, plugins=Plugins(), clock=clock, sleep=clock.sleep)

    def full(self, number: int) -> str:
        return write_full(self.root / f"full-{number}", self.versions[number])

    def delta(self, base: int | str, number: int | str, *, of: tuple[int, int] | None = None) -> str:
        old, new = of or (int(base), int(number))
        numbers = {
            key: f"{value:06d}" if isinstance(value, int) else value
            for key, value in (("version", number), ("base_version", base))
        }
        return write_delta_by_hand(
            self.root / f"delta-{base}-{number}", self.versions[old], self.versions[new], **numbers
        )

    def refused(self, call: Any, says: str) -> SnapshotChainError:
        """Return the error of ``call``, which wrote nothing and asked for no hot-load."""
        before, asked = dict(self.store.objects), list(self.service.hot_loads)
        with pytest.raises(SnapshotChainError, match=says) as caught:
            call()
        assert self.store.objects == before
        assert self.service.hot_loads == asked
        return caught.value


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_a_version_in_between_that_is_missing_is_told_with_both_numbers(world: World) -> None:
    world.loader.publish(world.full(0), "x-v000000")
    world.loader.publish(world.delta(0, 1), "x-v000001", previous_identity="x-v000000")
    late = world.delta(3, 4)
    for call in (
        lambda: world.loader.publish(late, "x-v000004", previous_identity="x-v000001"),
        lambda: world.loader.publish(late, "x-v000004", previous_identity="x-v000001", dry_run=True),
        lambda: world.loader.plan(late, "x-v000004", previous_identity="x-v000001"),
        lambda: world.loader.upload(late, "x-v000004", previous_identity="x-v000001"),
        lambda: upload_snapshot(
            inspect_snapshot(late, previous_identity="x-v000001"),
            bucket="weights",
            path_prefix="run",
            identity="x-v000004",
            s3=world.store,
        ),
    ):
        error = world.refused(call, "delta-3-4 is a delta on version 000003, and x-v000001 holds version 000001")
        assert "--previous-identity" in (error.hint or "")
        assert "--base-version 000003" in (error.hint or "")


def test_a_full_snapshot_without_a_number_is_known_by_its_name(world: World) -> None:
    world.loader.publish(world.full(0), "x-v000000")
    world.refused(
        lambda: world.loader.publish(world.delta(3, 4), "d", previous_identity="x-v000000"),
        "x-v000000 is another one by its name",
    )
    world.loader.publish(world.full(3), "x-v000003-full")
    world.refused(
        lambda: world.loader.publish(world.delta(0, 1), "d", previous_identity="x-v000003-full"), "by its name"
    )
    served = world.loader.publish(world.delta(3, 4), "x-v000004", previous_identity="x-v000003-full")
    assert served.previous_identity == "x-v000003-full"


def test_where_nothing_says_it_only_the_first_delta_on_a_base_is_taken(world: World) -> None:
    """A base is called anything, and a trainer's first delta applies to version 0."""
    world.loader.publish(world.full(0), "llama-base")
    error = world.refused(
        lambda: world.loader.publish(world.delta(3, 4), "d", previous_identity="llama-base"),
        "nothing says which version llama-base holds",
    )
    assert "say so" in (error.hint or "")
    assert world.loader.publish(world.delta(0, 1), "d1", previous_identity="llama-base").state.name == "COMPLETED"


def test_numbers_of_directories_are_found_in_identities(world: World) -> None:
    """As `cwtrain snapshot diff` numbers deltas: by what the names of the checkpoints end in."""
    world.loader.publish(world.full(0), "step_000100")
    delta = world.delta(100, 101, of=(0, 1))
    assert world.loader.publish(delta, "step_000101", previous_identity="step_000100").state.name == "COMPLETED"
    world.refused(
        lambda: world.loader.publish(world.delta(103, 104, of=(3, 4)), "d", previous_identity="step_000101"), "000101"
    )


def test_who_knows_better_says_so_and_is_compared_with_the_index(world: World) -> None:
    """Version 2 changed nothing, so it was never published: version 1 has its bytes."""
    world.loader.publish(world.full(0), "a")
    world.loader.publish(world.delta(0, 1), "b", previous_identity="a")
    after_empty = world.delta(2, 3)
    world.refused(lambda: world.loader.publish(after_empty, "c", previous_identity="b"), "b holds version 000001")
    world.refused(
        lambda: world.loader.publish(after_empty, "c", previous_identity="b", base_version=4), "b holds version 4"
    )
    world.loader.publish(after_empty, "c", previous_identity="b", base_version=2)
    world.loader.publish(world.delta(3, 4), "d", previous_identity="c")
    assert world.loader.trigger("c").previous_identity == "b", "what was said once is not asked again"


def test_the_number_of_a_full_snapshot_counts_where_it_was_given(world: World) -> None:
    world.loader.publish(world.full(3), "again", version=3)
    world.refused(lambda: world.loader.publish(world.delta(0, 1), "d", previous_identity="again"), "version 3")
    assert world.loader.publish(world.delta(3, 4), "d", previous_identity="again").state.name == "COMPLETED"


def test_deltas_that_name_identities_are_compared_by_them(world: World) -> None:
    """Read back from a bucket, a delta names the identity that it applies to; other epochs have the same numbers."""
    world.loader.publish(world.full(0), "run-v000000")
    world.loader.publish(world.delta(0, 1), "run-v000001", previous_identity="run-v000000")
    back = world.delta("run.2-v000001", "run.2-v000003", of=(2, 3))
    world.refused(lambda: world.loader.publish(back, "d", previous_identity="run-v000001"), "on version run.2-v000001")
    mine = world.delta("run-v000001", "run-v000003", of=(2, 3))
    assert world.loader.publish(mine, "run-v000003", previous_identity="run-v000001").state.name == "COMPLETED"


def test_a_trigger_on_another_predecessor_than_the_index_names_is_refused(world: World) -> None:
    world.loader.publish(world.full(0), "x0")
    world.loader.publish(world.delta(0, 1), "x1", previous_identity="x0")
    world.loader.upload(world.delta(1, 3), "x3", previous_identity="x1")
    world.refused(lambda: world.loader.trigger("x3", previous_identity="x0"), "delta on version x1, and")
    assert world.loader.trigger("x3", previous_identity="x1").previous_identity == "x1"


def test_a_trigger_looks_at_what_came_under_the_predecessors_name_since(world: World) -> None:
    """It was uploaded before its predecessor, and that turned out to hold another version."""
    world.loader.publish(world.full(0), "x0")
    world.loader.upload(world.delta(3, 4), "x4", previous_identity="before_3")
    world.loader.publish(world.delta(0, 1), "before_3", previous_identity="x0")
    world.refused(lambda: world.loader.trigger("x4"), "on version 000003, and before_3 holds version 000001")


def test_what_another_tool_left_with_numbers_is_compared_too(world: World) -> None:
    world.loader.publish(world.full(0), "x0")
    world.loader.publish(world.delta(0, 1), "x1", previous_identity="x0")
    for file in Path(world.delta(3, 4)).iterdir():
        world.store.put(f"run/raw/{file.name}", file.read_bytes())
    world.refused(lambda: world.loader.trigger("raw", previous_identity="x1"), "on version 000003")


def test_what_the_index_said_is_kept_in_the_manifest(world: World) -> None:
    world.loader.publish(world.full(0), "x0")
    world.loader.publish(world.delta(0, 1), "x1", previous_identity="x0")
    manifest = json.loads(world.store.get("run/_manifests/x1.json"))
    assert (manifest["version"], manifest["base_version"]) == ("000001", "000000")
    assert "base_version" not in json.loads(world.store.get("run/_manifests/x0.json"))


def test_a_manifest_that_cannot_be_read_is_no_word_for_it(world: World) -> None:
    world.loader.publish(world.full(0), "x0")
    world.store.objects.pop("run/_manifests/x0.json")
    world.store.put("run/_manifests/x0.json", b"{")
    with pytest.raises(SnapshotError, match="manifest"):
        world.loader.publish(world.delta(0, 1), "x1", previous_identity="x0")
