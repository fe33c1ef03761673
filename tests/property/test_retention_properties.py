"""``hotload gc`` against a small model: buckets shared by two deployments and three runs, made at random."""

from __future__ import annotations

import datetime as dt
import json
from typing import Any

import attrs
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cwtrain.hotload.retention import delete_snapshots, plan_retention, sharing
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
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots.manifest import build_manifest, manifest_to_bytes
from cwtrain.storage import Location, MemoryStore
from cwtrain.storage.memory import MemoryObject

NOW = dt.datetime(2026, 11, 29, 12, tzinfo=dt.UTC)
OLD, YOUNG = NOW - dt.timedelta(days=3), NOW - dt.timedelta(hours=2)
PLACE = Location("weights", "rl")
STATES = (HotLoadState.COMPLETED, HotLoadState.COMPLETED, HotLoadState.COMPLETED, HotLoadState.FAILED)


@attrs.define
class Snapshot:
    """What the model knows of one identity."""

    identity: str
    previous: str | None
    young: bool
    whole: bool
    marks: str
    """Which of claim (c) and manifest (m) are there."""
    at: str
    """Which deployments asked for it: some of A and B."""


@attrs.define
class Bucket:
    """A bucket and the hot-loads of its deployments, newest first."""

    snapshots: dict[str, Snapshot]
    hot_loads: dict[str, list[HotLoad]]
    model_path: str
    store: MemoryStore


@st.composite
def buckets(draw: st.DrawFn) -> Bucket:
    store = MemoryStore("weights")
    snapshots: dict[str, Snapshot] = {}
    hot_loads: dict[str, list[HotLoad]] = {"A": [], "B": []}
    order: list[Snapshot] = []
    for run in ("one", "two", "two.2"):
        previous: str | None = None
        for version in range(draw(st.integers(0, 7))):
            full = version == 0 or draw(st.integers(0, 4)) == 0
            whole = draw(st.integers(0, 5)) > 0 or version == 0
            identity = f"{run}-v{version:06d}" + ("-full" if full and version else "")
            marks = draw(st.sampled_from(["cm", "cm", "cm", "m", "c"] if whole else ["c", "cm"]))
            snapshot = Snapshot(
                identity=identity,
                # Without its index and a manifest, one does not say what it would apply to.
                previous=None if full or not (whole or "m" in marks) else previous,
                young=draw(st.booleans()),
                whole=whole,
                marks=marks,
                at=draw(st.sampled_from(["", "A", "B", "AB"])) if whole else "",
            )
            order.append(snapshot)
            if whole:
                previous = identity
    order.sort(key=lambda one: (one.identity.partition("-v")[2], one.identity))
    for snapshot in order:
        snapshots[snapshot.identity] = snapshot
        _put(store, snapshot)
        for deployment in snapshot.at:
            if snapshot.previous is None or any(one.identity == snapshot.previous for one in hot_loads[deployment]):
                state = draw(st.sampled_from(STATES))
                hot_loads[deployment].insert(0, _hot_load(snapshot, state, len(hot_loads[deployment])))
    for deployment in ("A", "B"):
        if hot_loads[deployment] and draw(st.integers(0, 3)) == 0:
            last = snapshots[hot_loads[deployment][0].identity]
            hot_loads[deployment].insert(0, _hot_load(last, HotLoadState.PENDING, 99))
    model_path = draw(
        st.sampled_from(["", "rl/one-v000003", "rl/base", "models/base", *(f"rl/{name}" for name in snapshots)])
    )
    _strangers(store)
    return Bucket(snapshots, hot_loads, model_path, store)


def _put(store: MemoryStore, snapshot: Snapshot) -> None:
    modified = YOUNG if snapshot.young else OLD
    objects = {"model-r00000-00000.safetensors": b"weights", "config.json": b"{}"}
    if snapshot.whole:
        metadata: dict[str, Any] = {"total_size": 7}
        if snapshot.previous:
            metadata = {"delta_encoding": "xor", "version": snapshot.identity, "base_version": snapshot.previous}
        objects[INDEX_NAME] = json.dumps({"metadata": metadata, "weight_map": {}}).encode()
    keys = {PLACE.key(snapshot.identity, name): data for name, data in objects.items()}
    if "c" in snapshot.marks:
        keys[PLACE.claim_key(snapshot.identity)] = b"{}"
    if "m" in snapshot.marks:
        kind = "INCREMENTAL" if snapshot.previous else "FULL"
        manifest = build_manifest(
            identity=snapshot.identity, objects={}, tensors={}, type=kind, previous_identity=snapshot.previous
        )
        keys[PLACE.manifest_key(snapshot.identity)] = manifest_to_bytes(manifest)
    for key, data in keys.items():
        store.objects[key] = MemoryObject(body=data, modified=modified)


def _strangers(store: MemoryStore) -> None:
    """Objects that are no snapshots of ours, or of somewhere else: they must never be touched."""
    for key in (
        "rl/_claims/two/epoch-000002.json",
        "rl/_manifests/A.status",
        "rl/_preflight/x",
        "rl/notes.txt",
        f"rl/imported/{INDEX_NAME}",
        "rl/datasets/part/0.parquet",
        "other/one-v000001/model.safetensors",
        "other/_claims/one-v000001.json",
        "rlx/one-v000001/model.safetensors",
    ):
        store.objects[key] = MemoryObject(body=b"{}", modified=OLD)


def _hot_load(snapshot: Snapshot, state: HotLoadState, number: int) -> HotLoad:
    metadata = IncrementalSnapshotMetadata(previous_snapshot_identity=snapshot.previous) if snapshot.previous else None
    return HotLoad(
        spec=HotLoadSpec(
            id=f"{snapshot.identity}-{number}",
            identity=snapshot.identity,
            type=SnapshotType.INCREMENTAL if snapshot.previous else SnapshotType.FULL,
            incremental_snapshot_metadata=metadata,
        ),
        status=HotLoadStatus(state=state),
    )


def live_by_the_book(bucket: Bucket, keep: int) -> set[str]:
    """Return what has to stay, from what the model knows alone."""
    roots: set[str] = set()
    for several in bucket.hot_loads.values():
        completed: list[str] = []
        for one in several:
            if one.state is HotLoadState.PENDING:
                roots.add(one.identity)
            if one.state is HotLoadState.COMPLETED and one.identity not in completed:
                completed.append(one.identity)
        roots |= set(completed[: max(1, keep)])
    named = {one.identity for several in bucket.hot_loads.values() for one in several}
    for identity, snapshot in bucket.snapshots.items():
        if "-v000000" in identity or bucket.model_path == f"rl/{identity}":
            roots.add(identity)
        if snapshot.young and not (snapshot.whole and identity in named):
            roots.add(identity)
    live: set[str] = set()
    for identity in roots & bucket.snapshots.keys():
        at: str | None = identity
        while at is not None:
            live.add(at)
            at = bucket.snapshots[at].previous
    return live


def deployments(model_path: str) -> list[Deployment]:
    return [
        Deployment(id="A", hot_load=HotLoadTarget(bucket="weights", path_prefix="/rl/")),
        Deployment(id="B", hot_load=HotLoadTarget(bucket="weights", path_prefix="rl")),
        Deployment(id="C", hot_load=HotLoadTarget(bucket="weights", path_prefix="other")),
        Deployment(id="D", model_bucket="weights", model_path=model_path),
    ]


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(bucket=buckets(), keep=st.integers(0, 4))
def test_exactly_what_nothing_needs_goes(bucket: Bucket, keep: int) -> None:
    known = deployments(bucket.model_path)
    assert [one.id for one in sharing(known, PLACE)] == ["A", "B"]
    before = dict(bucket.store.objects)
    plan = plan_retention(bucket.store, PLACE, deployments=known, hot_loads=bucket.hot_loads, keep=keep, now=NOW)
    assert bucket.store.objects == before
    live = live_by_the_book(bucket, keep)
    doomed = {one.identity for one in plan.doomed}
    assert doomed == bucket.snapshots.keys() - live
    _check_order(bucket, plan.doomed)
    bucket.store.calls.clear()
    delete_snapshots(bucket.store, PLACE, plan.doomed)
    gone = before.keys() - bucket.store.objects.keys()
    assert gone == {key for key in before if _owner(key) in doomed}
    _check_calls(bucket.store.calls)
    again = plan_retention(bucket.store, PLACE, deployments=known, hot_loads=bucket.hot_loads, keep=keep, now=NOW)
    assert again.doomed == ()


def _owner(key: str) -> str | None:
    """Return the identity that a key of ours belongs to."""
    parts = key.split("/")
    if parts[0] != "rl" or len(parts) != 3:
        return None
    return parts[2].removesuffix(".json") if parts[1] in ("_claims", "_manifests") else parts[1]


def _check_order(bucket: Bucket, doomed: Any) -> None:
    """No delta outlives what it applies to."""
    order = [one.identity for one in doomed]
    for number, identity in enumerate(order):
        assert bucket.snapshots[identity].previous not in order[:number]


def _check_calls(calls: list[tuple[str, str]]) -> None:
    """Of each snapshot the index goes first, manifest and claim last."""
    deleted: dict[str, list[str]] = {}
    for call, key in calls:
        if call == "delete":
            owner = _owner(key)
            assert owner is not None
            deleted.setdefault(owner, []).append(key.removeprefix("rl/").replace(owner, "ID"))
    for keys in deleted.values():
        marks = [key for key in keys if key.startswith("_")]
        assert keys[len(keys) - len(marks) :] == marks
        if f"ID/{INDEX_NAME}" in keys:
            assert keys[0] == f"ID/{INDEX_NAME}"
