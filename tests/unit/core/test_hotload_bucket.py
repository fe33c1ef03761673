"""What of a bucket is needed, what is served, what comes next: where gc stops, and what chain and resume-info say."""

from __future__ import annotations

import datetime as dt
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import SnapshotChainError, SnapshotError, StorageAccessError
from cwtrain.hotload import IdentityStanding, MemoryBase, SnapshotWriter
from cwtrain.hotload._publish.epochs import open_epoch
from cwtrain.hotload.resume import resume_info
from cwtrain.hotload.retention import RetentionPlan, delete_snapshots, plan_retention
from cwtrain.hotload.served_chain import chain_report, draw_chain
from cwtrain.models.service import (
    Deployment,
    HotLoad,
    HotLoadSpec,
    HotLoadState,
    HotLoadStatus,
    HotLoadTarget,
    IncrementalSnapshotMetadata,
    SnapshotType,
)
from cwtrain.storage import Location, MemoryStore
from helpers.streamed import INDEX, make_state, names_in, next_state, side_files
from helpers.streamed import write as write_with

PLACE = Location("memory", "rl")
LATER = dt.datetime.now(dt.UTC) + dt.timedelta(days=2)
DEPLOYMENTS = [Deployment(id="D", hot_load=HotLoadTarget(bucket="memory", path_prefix="rl"))]


def hot_load(identity: str, previous: str | None = None, state: HotLoadState = HotLoadState.COMPLETED) -> HotLoad:
    metadata = IncrementalSnapshotMetadata(previous_snapshot_identity=previous) if previous else None
    kind = SnapshotType.INCREMENTAL if previous else SnapshotType.FULL
    spec = HotLoadSpec(id=f"h-{identity}", identity=identity, type=kind, incremental_snapshot_metadata=metadata)
    return HotLoad(spec=spec, status=HotLoadStatus(state=state))


@pytest.fixture
def store(tmp_path: Path) -> MemoryStore:
    """A run with a baseline, two deltas, a full snapshot that cut the chain, and a delta on it."""
    store, base, state = MemoryStore(), MemoryBase(), make_state(1)
    sides = side_files(tmp_path / "sides")
    for version in range(5):
        options: dict[str, Any] = {"kind": "full", "side_files": sides} if version in (0, 3) else {"kind": "delta"}
        identity = f"run-v{version:06d}" + ("-full" if version == 3 else "")
        write_with(store, PLACE, identity, state, base=base, run_id="run", version=version, **options)
        state = next_state(state, version)
    return store


HOT_LOADS = [
    hot_load("run-v000004", "run-v000003-full"),
    hot_load("run-v000003-full"),
    hot_load("run-v000002", "run-v000001", HotLoadState.FAILED),
    hot_load("run-v000001", "run-v000000"),
    hot_load("run-v000000"),
]


def plan(store: MemoryStore, keep: int = 1, hot_loads: list[HotLoad] | None = None) -> RetentionPlan:
    asked = {"D": HOT_LOADS if hot_loads is None else hot_loads}
    return plan_retention(store, PLACE, deployments=DEPLOYMENTS, hot_loads=asked, keep=keep, now=LATER)


def test_what_goes_and_why_the_rest_stays(store: MemoryStore) -> None:
    found = plan(store)
    assert [one.identity for one in found.doomed] == ["run-v000002", "run-v000001"]
    assert found.live == {
        "run-v000004": "served by D",
        "run-v000003-full": "run-v000004 stands on it (served by D)",
        "run-v000000": "a run's baseline",
    }
    assert all(one.whole and one.run_id == "run" for one in found.doomed)
    assert [one.identity for one in plan(store, keep=3).doomed] == ["run-v000002"]
    before = sum(len(stored.body) for stored in store.objects.values())
    delete_snapshots(store, PLACE, found.doomed)
    assert before - sum(len(stored.body) for stored in store.objects.values()) == found.size_bytes
    assert names_in(store, PLACE, "run-v000001") == []
    assert PLACE.claim_key("run-v000001") not in store.objects
    assert plan(store).doomed == ()


def test_a_removal_that_is_interrupted_is_gone_on_with(store: MemoryStore) -> None:
    store.denied = {"s3:DeleteObject"}
    with pytest.raises(StorageAccessError, match="s3:DeleteObject"):
        delete_snapshots(store, PLACE, plan(store).doomed)
    store.denied = set()
    first = plan(store).doomed[0]
    store.delete(first.keys[0])
    assert first.keys[0].endswith(INDEX)
    again = plan(store).doomed
    assert [(one.identity, one.whole) for one in again] == [("run-v000002", False), ("run-v000001", True)]


@pytest.mark.parametrize(
    ("key", "body", "says"),
    [
        (PLACE.manifest_key("run-v000001"), b"{", "the manifest"),
        (PLACE.manifest_key("run-v000004"), b'{"schema_version": 99}', "schema_version 99"),
        (PLACE.key("run-v000004", INDEX), b"not json", "cannot be read"),
        (
            PLACE.key("run-v000004", INDEX),
            b'{"metadata": {"delta_encoding": "xor", "base_version": 3}}',
            "base_version 3",
        ),
    ],
)
def test_it_stops_where_it_cannot_read(store: MemoryStore, key: str, body: bytes, says: str) -> None:
    """A wrong guess cannot be taken back, so there is none."""
    if INDEX in key:
        del store.objects[PLACE.manifest_key("run-v000004")]
    store.put(key, body)
    with pytest.raises(SnapshotError, match=says) as caught:
        plan(store)
    assert caught.value.hint is not None
    assert "nothing was removed" in caught.value.hint


@pytest.mark.parametrize("version", ["", ', "base_version": "3"'])
def test_what_another_uploader_left_stands_on_what_the_service_was_told(store: MemoryStore, version: str) -> None:
    """B29's kind: a delta without a manifest whose index names no identity is no full snapshot that stands alone."""
    del store.objects[PLACE.manifest_key("run-v000004")]
    store.put(PLACE.key("run-v000004", INDEX), b'{"metadata": {"delta_encoding": "xor"%s}}' % version.encode())
    assert plan(store).live["run-v000003-full"] == "run-v000004 stands on it (served by D)"
    alone = [hot_load("run-v000004"), *HOT_LOADS[1:]]
    with pytest.raises((SnapshotError, SnapshotChainError), match=r"nothing says what it applies to|3 is not there"):
        plan(store, hot_loads=alone)


def test_it_stops_where_something_needed_is_gone(store: MemoryStore) -> None:
    """B29's kind: a chain that is broken already is said, and nothing else of it is taken away."""
    for name in names_in(store, PLACE, "run-v000003-full"):
        store.delete(PLACE.key("run-v000003-full", name))
    with pytest.raises(SnapshotChainError, match="run-v000003-full is not there, but run-v000004 needs it"):
        plan(store)
    store.delete(PLACE.key("run-v000004", INDEX))
    with pytest.raises(SnapshotChainError, match="run-v000004 is not there, but run-v000004 needs it"):
        plan(store)


@pytest.mark.parametrize("permission", ["s3:ListBucket", "s3:GetObject"])
def test_it_stops_without_a_permission(store: MemoryStore, permission: str) -> None:
    store.denied = {permission}
    with pytest.raises(StorageAccessError, match=permission):
        plan(store)


def test_what_is_being_written_stays(store: MemoryStore, tmp_path: Path) -> None:
    """A stream without an index, and a snapshot that waits for another hot-load before it gets its own."""
    now = dt.datetime.now(dt.UTC)
    sides = side_files(tmp_path / "sides")
    write_with(store, PLACE, "waiting", make_state(1), kind="full", side_files=sides, run_id="two")
    writer = SnapshotWriter(store, PLACE, "streaming", kind="full", side_files=sides, run_id="two", shard_bytes=1)
    writer.add("a", bytes(100))
    writer.close()
    asked = {"D": HOT_LOADS}
    found = plan_retention(store, PLACE, deployments=DEPLOYMENTS, hot_loads=asked, keep=1, now=now)
    assert found.live["waiting"] == "younger than a day, and no hot-load of it yet"
    assert found.live["streaming"] == "younger than a day, no index"
    writer.abort()
    assert {"waiting", "streaming"} < {one.identity for one in plan(store).doomed}


def test_the_chain_that_is_served(store: MemoryStore) -> None:
    report = chain_report(store, PLACE, "D", HOT_LOADS)
    data = report.to_json()
    assert (data["served"], data["deltas"], data["max_deltas"]) == ("run-v000004", 1, 128)
    assert [(link["identity"], link["kind"], link["version"]) for link in data["links"]] == [
        ("run-v000003-full", "FULL", 3),
        ("run-v000004", "DELTA", 4),
    ]
    sizes = [
        sum(one.size_bytes for one in store.list_objects(PLACE.prefix(link["identity"]))) for link in data["links"]
    ]
    assert [link["size_bytes"] for link in data["links"]] == sizes
    assert (data["full_bytes"], data["delta_bytes"]) == (sizes[0], sizes[1])
    assert report.warnings == ()
    drawn = draw_chain(report)
    assert drawn[0].startswith("● run-v000003-full  full ")
    assert drawn[0].endswith("█" * 24)
    assert drawn[1].startswith("└ run-v000004       delta")
    assert drawn[2].startswith("1 deltas of 128")


def test_chains_that_one_should_look_at(store: MemoryStore) -> None:
    assert chain_report(store, PLACE, "D", []).served is None
    assert draw_chain(chain_report(store, PLACE, "D", [])) == [
        "D serves the model that it was made with: no hot-load has COMPLETED"
    ]
    for name in names_in(store, PLACE, "run-v000003-full"):
        store.delete(PLACE.key("run-v000003-full", name))
    (said,) = chain_report(store, PLACE, "D", HOT_LOADS).warnings
    assert said == "run-v000003-full is not in the bucket any more: no replica can start from this chain"
    long = [hot_load(f"v{number}", f"v{number - 1}" if number else None) for number in reversed(range(66))]
    assert any("65 deltas: a replica" in said for said in chain_report(store, PLACE, "D", long).warnings)


def test_what_comes_next(store: MemoryStore) -> None:
    info = resume_info(store, PLACE, "run", "D", HOT_LOADS)
    assert [(one.identity, one.hot_load, one.served) for one in info.versions] == [
        ("run-v000000", "COMPLETED", False),
        ("run-v000001", "COMPLETED", False),
        ("run-v000002", "FAILED", False),
        ("run-v000003-full", "COMPLETED", False),
        ("run-v000004", "COMPLETED", True),
    ]
    assert {one.standing for one in info.versions} == {IdentityStanding.PUBLISHED}
    assert (info.epochs, info.next_epoch) == (1, 2)
    assert (info.next_identity, info.next_predecessor) == ("run.2-v000001", "run-v000000")
    assert "is compared and not uploaded again" in info.advice
    assert "CWTRAIN_HOTLOAD_RUN_ID=run" in info.advice
    data = info.to_json()
    assert data["versions"][0]["standing"] == data["baseline_standing"] == "PUBLISHED"


def test_what_was_removed_does_not_look_free(store: MemoryStore) -> None:
    """An identity that a deployment has loaded is never to be used again, whatever is left in the bucket."""
    delete_snapshots(store, PLACE, plan(store).doomed)
    standing = {one.identity: one.standing for one in resume_info(store, PLACE, "run", "D", HOT_LOADS).versions}
    assert standing["run-v000001"] is standing["run-v000002"] is IdentityStanding.REMOVED
    assert standing["run-v000004"] is IdentityStanding.PUBLISHED


def identities(store: MemoryStore, run: str, hot_loads: Sequence[HotLoad] = ()) -> list[str]:
    return [one.identity for one in resume_info(store, PLACE, run, "D", hot_loads).versions]


def test_a_run_with_the_name_of_an_epoch_is_another_run(store: MemoryStore, tmp_path: Path) -> None:
    """What run ``run.2`` published was listed as the second epoch of ``run``, and the other way round."""
    sides, state = side_files(tmp_path / "more"), make_state(2)

    def publish(identity: str, run_id: str | None) -> None:
        write_with(
            store, PLACE, identity, state, base=MemoryBase(), run_id=run_id, version=1, kind="full", side_files=sides
        )

    own = identities(store, "run")
    publish("run.2-v000001", "run.2")
    publish("run.3-v000001", "run")
    publish("run.4-v000001", None)
    assert identities(store, "run") == [*own, "run.3-v000001", "run.4-v000001"]
    assert identities(store, "run.2") == ["run.2-v000001"]
    assert identities(store, "run.3") == []
    # The publisher goes above all that reads like an epoch, so that is what comes next.
    info = resume_info(store, PLACE, "run", "D", HOT_LOADS)
    assert (info.epochs, info.next_epoch, info.next_identity) == (4, 5, "run.5-v000001")


def test_a_run_that_has_nothing_does_not_get_the_epochs_of_its_namesake(store: MemoryStore) -> None:
    for epoch in (1, 2):
        assert open_epoch(store, PLACE, "new.7", first=epoch, owner=f"o{epoch}", directory="/state") == epoch
    loads = [hot_load("new.7-v000000"), hot_load("new.7.2-v000001", "new.7-v000000")]
    info = resume_info(store, PLACE, "new", "D", loads)
    assert (info.versions, info.epochs, info.next_epoch) == ((), 0, 8)
    assert identities(store, "new.7", loads) == ["new.7-v000000", "new.7.2-v000001"]
    # Our own seventh epoch, opened by a publisher of ours.
    assert open_epoch(store, PLACE, "new", first=7, owner="o", directory="/state") == 7
    assert identities(store, "new", loads) == ["new.7-v000000"]


def test_what_comes_next_for_a_run_that_has_nothing(store: MemoryStore) -> None:
    info = resume_info(store, PLACE, "another", "D", HOT_LOADS)
    assert (info.versions, info.epochs, info.next_identity) == ((), 0, "another-v000001")
    assert info.advice == "nothing is published: another-v000000 comes first, then another-v000001 on it"
