from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cwtrain_emulator.store import Conflict, HotLoadRow, ReplicaRow, Resource, Store, with_state


def _resource(number: int, **changes: object) -> Resource:
    made = Resource(
        "gateway", f"id-{number}", f"name-{number}", {"zones": ["z"]}, "CREATING", 1.0 + number, 1.0 + number
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def _hot_load(number: int, *, state: str = "PENDING", deployment: str = "d") -> HotLoadRow:
    return HotLoadRow(f"h{number}", deployment, f"v{number}", state, {"type": "x"}, [{"identity": "v"}], 1.0, 1.0)


def test_everything_is_there_after_a_restart(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite3")
    store.add_resource(_resource(1, due_at=5.0, extra={"port": 7}, conditions=[{"type": "Ready"}]))
    store.add_hot_load(_hot_load(1), [ReplicaRow("h1", "r0", "z", "PENDING_UPDATE", "", 1.0, 1.0)])
    store.set_meta("port", "99")
    # No close: a killed process does not close either.
    again = Store(tmp_path / "state.sqlite3")
    assert again.resource("gateway", "id-1") == _resource(
        1, due_at=5.0, extra={"port": 7}, conditions=[{"type": "Ready"}]
    )
    assert again.active_hot_load("d") == replace(_hot_load(1), seq=1)
    assert again.replicas("h1")[0].state == "PENDING_UPDATE"
    assert again.get_meta("port") == "99"
    store.close()
    again.close()


def test_ids_and_names_are_unique_within_a_kind() -> None:
    store = Store(":memory:")
    store.add_resource(_resource(1))
    with pytest.raises(Conflict):
        store.add_resource(_resource(1, name="other"))
    with pytest.raises(Conflict):
        store.add_resource(_resource(2, name="name-1"))
    store.add_resource(_resource(1, kind="deployment"))
    store.remove_resource("gateway", "id-1")
    store.add_resource(_resource(1))
    assert [row.id for row in store.resources("gateway")] == ["id-1"]
    store.close()


def test_updated_after() -> None:
    store = Store(":memory:")
    for number in (1, 2, 3):
        store.add_resource(_resource(number))
    assert [row.id for row in store.resources("gateway", updated_after=3.0)] == ["id-3"]
    store.close()


def test_one_hot_load_of_a_deployment_is_active_and_a_refused_one_leaves_nothing() -> None:
    store = Store(":memory:")
    store.add_hot_load(_hot_load(1), [])
    with pytest.raises(Conflict):
        store.add_hot_load(_hot_load(2), [ReplicaRow("h2", "r0", "z", "PENDING_UPDATE", "", 1.0, 1.0)])
    assert store.hot_load("h2") is None
    assert store.replicas("h2") == []
    store.add_hot_load(_hot_load(3, deployment="other"), [])
    store.update_hot_load(with_state(_hot_load(1), "COMPLETED", now=2.0))
    store.add_hot_load(_hot_load(2), [])
    found = store.latest_completed("d")
    assert found is not None
    assert (found.id, found.finished_at) == ("h1", 2.0)
    assert store.latest_completed("d", identity="v2") is None
    store.close()


def test_hot_loads_come_newest_first_and_in_pages() -> None:
    store = Store(":memory:")
    for number in range(5):
        store.add_hot_load(_hot_load(number, state="FAILED"), [])
    newest = store.hot_loads(deployment_id="d", before=None, limit=2)
    assert [row.id for row in newest] == ["h4", "h3"]
    assert [row.id for row in store.hot_loads(deployment_id=None, before=newest[-1].seq, limit=9)] == ["h2", "h1", "h0"]
    assert store.hot_loads(deployment_id="x", before=None, limit=9) == []
    store.close()


def test_replicas_come_by_zone_and_name() -> None:
    store = Store(":memory:")
    for zone, name in (("b", "r1"), ("a", "r2"), ("a", "r1")):
        store.put_replica(ReplicaRow("h", name, zone, "READY", "v", 1.0, 1.0))
    assert [(row.zone, row.name) for row in store.replicas("h")] == [("a", "r1"), ("a", "r2"), ("b", "r1")]
    assert [row.name for row in store.replicas("h", after=("a", "r1"), limit=1)] == ["r2"]
    store.close()


def test_a_state_of_an_unknown_schema_is_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "state.sqlite3")
    store.set_meta("schema_version", "99")
    store.close()
    with pytest.raises(ValueError, match="99"):
        Store(tmp_path / "state.sqlite3")
