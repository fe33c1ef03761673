"""The kind: shards of other nodes show late, wholly or in part, to the rank that publishes; the ranks beat meanwhile.

Ranks are threads that meet at a barrier (``tests/framework`` has gloo ones). The disk is a stand-in that lags.
"""

from __future__ import annotations

import json
import threading
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, SnapshotLayoutError
from cwtrain.hotload.publisher import PublishOutcome, PublishState
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import Plugins
from cwtrain_slime._args import RunArgs
from cwtrain_slime._parts import local_shards, spread_of
from cwtrain_slime._post_write import Adapter
from cwtrain_slime._ranks import Ranks
from helpers.lagging_disk import LaggingDisk
from helpers.tiny_checkpoint import st_bytes
from helpers.virtual_clock import VirtualClock

MINE, THEIRS = "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"


class Meeting:
    """Where threads that are ranks meet; ``beats`` counts their collectives."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Any] = [None] * size
        self.beats = 0

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._given[rank] = value
        self._barrier.wait()
        found = list(self._given)
        if self._barrier.wait() == 0:
            self.beats += 1
        return found


class ThreadRanks(Ranks):
    """Ranks whose group is a ``Meeting``."""

    def _state(self, done: bool, failed: bool, what: str) -> tuple[bool, bool]:
        states = self.group.exchange(self.rank, (done, failed))
        return all(one for one, _ in states), any(one for _, one in states)

    def _gathered(self, value: Any, error: BaseException | None, what: str) -> list[Any]:
        found: list[Any] = self.group.exchange(self.rank, (value, error))
        return found


class Reading:
    """Stands where a publisher stands: what it was given is whole, or it says so."""

    def __init__(self, settings: HotLoadConfig, **given: Any) -> None:
        self.settings, self.run_id = settings, "run"
        self.state_dir = Path(given["disk_dir"]) / "state"
        self.published: dict[str, bytes] = {}

    def publish_directory(self, path: Any, *, deadline: float | None) -> PublishOutcome:
        self.published = {one.name: one.read_bytes() for one in Path(path).iterdir()}
        return PublishOutcome(
            identity="run-v000001",
            kind=SnapshotChoice.DELTA,
            number=1,
            epoch=1,
            state=PublishState.COMPLETED,
            metrics={},
        )

    def close(self) -> None:
        pass


class Node:
    """One node with one rank: what it sees of the disk, and its adapter."""

    def __init__(self, root: Path, rank: int, clock: VirtualClock, sleep: Callable[[float], None]) -> None:
        self.rank = rank
        self.disk_dir = root / f"node-{rank}"
        self.version_dir = self.disk_dir / "weight_v000001"
        self.version_dir.mkdir(parents=True)
        self.made: list[Reading] = []
        self.adapter = Adapter(self.disk_dir, make=self._make, plugins=Plugins())
        self.adapter._clock, self.adapter._sleep = clock.now, sleep

    def _make(self, settings: HotLoadConfig, **given: Any) -> Any:
        self.made.append(Reading(settings, **given))
        return self.made[-1]

    def shard(self, name: str, tensor: str) -> Path:
        path = self.version_dir / name
        path.write_bytes(st_bytes({tensor: ("U8", (64,), bytes(range(64)))}, {tensor: "00000001"}))
        return path

    def run(self, *, mode: str = "delta") -> RunArgs:
        return RunArgs.of(
            Namespace(
                update_weight_mode=mode,
                update_weight_disk_dir=str(self.disk_dir),
                hf_checkpoint="/base",
                rank=self.rank,
                world_size=2,
            )
        )


class Cluster:
    """Two nodes; the second one's shard is whole there, and shows late, or never, on the first."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, **settings: str) -> None:
        monkeypatch.setenv("CWTRAIN_HOTLOAD_DEPLOYMENT_ID", "d")
        for name, value in settings.items():
            monkeypatch.setenv(f"CWTRAIN_HOTLOAD_{name}", value)
        self.clock = VirtualClock()
        self.disk = LaggingDisk(self.clock)
        self.nodes = [Node(root, 0, self.clock, self.disk.sleep), Node(root, 1, self.clock, lambda _: None)]
        self.meeting = Meeting(2)
        self.nodes[0].shard(MINE, "a")
        self.theirs = self.nodes[1].shard(THEIRS, "b").read_bytes()
        index = {"metadata": {}, "weight_map": {"a": MINE, "b": THEIRS}}
        (self.nodes[0].version_dir / INDEX_NAME).write_text(json.dumps(index))

    def late(self, seconds: float, first: str = "absent") -> None:
        self.disk.hide(self.nodes[0].shard(THEIRS, "b"), seconds=seconds, first=first)

    def publish(self, *, mode: str = "delta") -> list[Any]:
        """Let both ranks call the hook, and return what came of it on each."""
        outcomes: list[Any] = [None, None]

        def call(node: Node) -> None:
            ranks = ThreadRanks(rank=node.rank, size=2, group=self.meeting, beat_seconds=0.01)
            try:
                outcomes[node.rank] = node.adapter._numbered(node.run(mode=mode), ranks, str(node.version_dir))
            except BaseException as error:
                outcomes[node.rank] = error

        threads = [threading.Thread(target=call, args=(node,), daemon=True) for node in self.nodes]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return outcomes


@pytest.mark.parametrize("seconds", [5, 30, 60])
@pytest.mark.parametrize("first", ["absent", "empty", "short"])
def test_a_shard_that_shows_late_is_waited_for_while_the_ranks_beat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: float, first: str
) -> None:
    cluster = Cluster(tmp_path, monkeypatch)
    cluster.late(seconds, first)
    outcomes = cluster.publish()
    assert outcomes[0].state is PublishState.COMPLETED
    assert outcomes[1].state is PublishState.COMPLETED
    assert cluster.nodes[0].made[0].published[THEIRS] == cluster.theirs, "all of it, from rank 0's own disk"
    assert seconds <= cluster.clock.spent <= seconds + 2
    assert cluster.meeting.beats > seconds, "never longer than a second between two looks, and each is a beat"


@pytest.mark.parametrize("mode", ["delta", "full"])
def test_a_shard_that_never_shows_ends_all_ranks_with_both_explanations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    cluster = Cluster(tmp_path, monkeypatch)
    outcomes = cluster.publish(mode=mode)
    assert cluster.clock.spent == pytest.approx(90.0), "as long as attribute caches last"
    for error in outcomes:
        assert isinstance(error, ConfigError)
        assert THEIRS in str(error)
        assert "the nodes share no disk, or the shared disk shows the files of other nodes later" in str(error)
        assert "CWTRAIN_HOTLOAD_FILES_WAIT" in str(error.hint)


def test_an_index_that_only_another_rank_sees_ends_all_ranks_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, monkeypatch, MIRROR="0", FULL_EVERY="0")
    (cluster.nodes[0].version_dir / INDEX_NAME).rename(cluster.nodes[1].version_dir / INDEX_NAME)
    for error in cluster.publish():
        assert isinstance(error, SnapshotLayoutError)
        assert "share no disk" in str(error)
    assert cluster.clock.spent == pytest.approx(90.0), "once, not twice"


def test_how_long_is_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = Cluster(tmp_path, monkeypatch, FILES_WAIT="7")
    assert {type(one) for one in cluster.publish()} == {ConfigError}
    assert cluster.clock.spent == pytest.approx(7.0)


def test_nodes_that_may_share_no_disk_do_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sends its own shards there, so nothing has to show on rank 0's disk."""
    cluster = Cluster(tmp_path, monkeypatch, MIRROR="0", FULL_EVERY="0")
    seen = [local_shards(node.version_dir) for node in cluster.nodes]
    assert cluster.nodes[0].adapter._patience(cluster.nodes[0].run(), seen) == 0.0
    # Where another rank sees rank 0's index the disk is shared, and a rank's own sending is not needed.
    shared = [seen[0], {"shards": {**seen[1]["shards"], INDEX_NAME: 5}, "named": None}]
    assert cluster.nodes[0].adapter._patience(cluster.nodes[0].run(), shared) == 90.0


def test_a_disk_that_is_shared_is_waited_for_without_a_mirror_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Cluster(tmp_path, monkeypatch, MIRROR="0", FULL_EVERY="0")
    (cluster.nodes[1].version_dir / INDEX_NAME).write_bytes((cluster.nodes[0].version_dir / INDEX_NAME).read_bytes())
    cluster.late(30)
    assert cluster.publish()[0].state is PublishState.COMPLETED
    assert cluster.nodes[0].made[0].published[THEIRS] == cluster.theirs


def test_who_sees_all_of_a_shard_is_its_owner() -> None:
    from cwtrain_slime._parts import late_for_rank_0

    def seen(sizes: dict[str, int], named: list[str] | None = None) -> dict[str, Any]:
        return {"shards": sizes, "named": named}

    short = [seen({"a": 9, "b": 4}, ["a", "b"]), seen({"b": 0}), seen({"b": 9})]
    assert late_for_rank_0(short) == ["b"]
    spread = spread_of(short)
    assert spread is not None
    assert dict(spread.owners) == {"a": 0, "b": 2}
    # A shard that the index does not name, and one that another rank has not seen whole yet, are no matter for rank 0.
    assert late_for_rank_0([seen({"a.safetensors": 9}, ["a.safetensors"]), seen({"z.safetensors": 9})]) == []
    assert late_for_rank_0([seen({"a.safetensors": 9}, ["a.safetensors"]), seen({"a.safetensors": 3})]) == []
    assert late_for_rank_0([seen({}), seen({INDEX_NAME: 3})]) == [INDEX_NAME]
