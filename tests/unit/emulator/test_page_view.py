"""The object that the emulator's page polls: what it says of deployments and hot-loads, and how little it reads."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from cwtrain_emulator.page.activity import Activity
from cwtrain_emulator.page.view import PageView
from cwtrain_emulator.store import HotLoadRow, ReplicaRow, Resource, Store


class CountingStore(Store):
    """A store that says which hot-loads were read."""

    def __init__(self) -> None:
        super().__init__(":memory:")
        self.read: list[str] = []

    def hot_load(self, hot_load_id: str) -> HotLoadRow | None:
        self.read.append(hot_load_id)
        return super().hot_load(hot_load_id)


@pytest.fixture
def store() -> Any:
    made = CountingStore()
    yield made
    made.close()


def view_of(store: Store) -> PageView:
    settings = SimpleNamespace(bucket="b", replicas=2, seed=0)
    pool = SimpleNamespace(of_deployment=lambda deployment_id: [])
    service: Any = SimpleNamespace(
        store=store, settings=settings, pool=pool, clock=lambda: 50.0, base_url="http://a", s3_endpoint="http://s"
    )
    return PageView(service, Activity(clock=lambda: 10.0))


def add_deployment(store: Store, number: int) -> None:
    spec = {"model": {"name": f"m{number}"}, "gatewayIds": ["gone"], "hotLoad": {}}
    store.add_resource(Resource("deployment", f"d{number}", f"name-{number}", spec, "READY", number, number))


def hot_load(number: int, *, deployment: str = "d0", deltas: int = 0, state: str = "COMPLETED") -> HotLoadRow:
    chain = [{"identity": f"v{number - deltas + step}"} for step in range(deltas + 1)]
    conditions = [{"type": "Ready", "message": "because"}] if state == "FAILED" else []
    return HotLoadRow(
        f"h{number}", deployment, f"v{number}", state, {}, chain, 1.0 + number, 2.0 + number, 2.5 + number, conditions
    )


def test_a_delta_names_what_it_is_on_and_a_failure_its_reason(store: CountingStore) -> None:
    add_deployment(store, 0)
    store.add_hot_load(hot_load(2), [ReplicaRow("h2", "r0", "z", "READY", "v2", 1.0, 1.0)])
    store.add_hot_load(hot_load(5, deltas=3), [])
    store.add_hot_load(hot_load(6, deltas=4, state="FAILED"), [])
    shown = view_of(store).now()
    failed, delta, full = shown["hot_loads"]
    assert (failed["state"], failed["reason"], failed["deployment"]) == ("FAILED", "because", "name-0")
    assert (delta["type"], delta["previous"], delta["full"], delta["deltas"]) == ("DELTA", "v4", "v2", 3)
    assert (full["type"], full["previous"], full["replicas"][0]["name"]) == ("FULL", "", "r0")
    (deployment,) = shown["deployments"]
    assert (deployment["identity"], deployment["full_identity"], deployment["deltas"]) == ("v5", "v2", 3)
    assert deployment["endpoints"] == []


def test_ended_hot_loads_are_read_once_and_running_ones_each_time(store: CountingStore) -> None:
    store.add_hot_load(hot_load(1), [])
    store.add_hot_load(hot_load(2, state="IN_PROGRESS"), [])
    view = view_of(store)
    first = view.now()
    assert [one["state"] for one in view.now()["hot_loads"]] == ["IN_PROGRESS", "COMPLETED"]
    assert store.read == ["h2", "h1", "h2"]
    store.update_hot_load(replace(hot_load(2), state="COMPLETED"))
    assert view.now()["hot_loads"][0]["state"] == "COMPLETED"
    assert first["hot_loads"][0]["deployment"] == ""


def test_what_is_shown_is_bounded_and_an_identity_from_long_ago_is_found(store: CountingStore) -> None:
    for number in range(30):
        add_deployment(store, number)
    store.add_hot_load(hot_load(0, deployment="d29"), [])
    for number in range(1, 100):
        rows = [ReplicaRow(f"h{number}", f"r{one:02}", "z", "READY", "", 1.0, 1.0) for one in range(20)]
        store.add_hot_load(hot_load(number), rows)
    shown = view_of(store).now()
    assert len(shown["deployments"]) == 24
    assert shown["more_deployments"] == 6
    assert len(shown["hot_loads"]) == 60
    assert {len(one["replicas"]) for one in shown["hot_loads"]} == {8}
    assert shown["deployments"][-1]["identity"] == "v0"
