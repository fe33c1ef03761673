"""What a hot-load that has not ended bars. Its second replica waits for minutes here before it swaps."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cwtrain_emulator.emulator import Emulator
from helpers.conformance import bucket_of, put_snapshot, refused
from helpers.emulator_api import Api, hot_load_body
from helpers.tiny_delta import Files


@pytest.fixture(scope="module")
def slow() -> Iterator[Emulator]:
    with Emulator(extra_args=["--swap-delay=600"]) as running:
        yield running


@pytest.fixture(scope="module")
def api(slow: Emulator) -> Iterator[Api]:
    made = Api(slow.base_url, slow.admin_token)
    yield made
    made.close()


@pytest.fixture(scope="module")
def gateway(api: Api) -> str:
    found: str = api.gateway()["spec"]["id"]
    return found


@pytest.fixture(scope="module")
def deployment(api: Api, slow: Emulator, gateway: str, tiny_model: Files) -> dict[str, Any]:
    made = api.deployment(gateway, slow.bucket)
    for identity in ("v0", "v1"):
        put_snapshot(bucket_of(slow), made, identity, tiny_model)
    return made


@pytest.fixture(scope="module")
def running(api: Api, deployment: dict[str, Any]) -> dict[str, Any]:
    """A hot-load of which one replica is done and the other one is not."""
    found = api.hot_load(deployment["spec"]["id"], "v0")
    deadline = time.monotonic() + 60
    while True:
        assert time.monotonic() < deadline
        replicas = api.ok("GET", f"/hotLoads/{found}/replicas")["replicas"]
        if any(replica["state"] == "READY" for replica in replicas):
            hot_load: dict[str, Any] = api.ok("GET", f"/hotLoads/{found}")["hotLoad"]
            return hot_load


def test_it_is_in_progress_until_all_replicas_have_caught_up(api: Api, running: dict[str, Any]) -> None:
    """A replica has caught up when it is READY on the identity; while one has not, the hot-load is IN_PROGRESS."""
    hot_load = api.ok("GET", f"/hotLoads/{running['spec']['id']}")["hotLoad"]
    assert hot_load["status"]["state"] == "HOT_LOAD_STATE_IN_PROGRESS"
    assert "finishedAt" not in hot_load["status"]
    first, second = api.ok("GET", f"/hotLoads/{running['spec']['id']}/replicas")["replicas"]
    assert (first["state"], first["currentSnapshotIdentity"]) == ("READY", "v0")
    assert second["state"] in ("PENDING_UPDATE", "UPDATING")
    assert second.get("currentSnapshotIdentity", "") != "v0"
    assert "finishedAt" not in second


@pytest.mark.parametrize(("identity", "previous"), [("v0", None), ("v1", None), ("v1", "v0"), ("absent", None)])
def test_a_second_create_is_refused(
    api: Api, deployment: dict[str, Any], running: dict[str, Any], identity: str, previous: str | None
) -> None:
    """One unfinished hot-load per deployment: FAILED_PRECONDITION, `already in progress`, whatever is asked for."""
    body = {**hot_load_body(deployment["spec"]["id"], identity, previous), "hotLoadId": str(uuid.uuid4())}
    answer = refused(api, "POST", "/hotLoads", body)
    assert answer.code == "FAILED_PRECONDITION"
    assert "already in progress" in answer.message
    assert running["spec"]["id"] in answer.message
    assert answer.violations
    assert refused(api, "GET", f"/hotLoads/{body['hotLoadId']}").code == "NOT_FOUND"
    listed = api.ok("GET", f"/hotLoads?parentDeploymentId={deployment['spec']['id']}")["hotLoads"]
    assert [row["spec"]["id"] for row in listed] == [running["spec"]["id"]]


def test_a_create_that_says_too_little_is_told_that_first(api: Api, deployment: dict[str, Any]) -> None:
    """A malformed create is INVALID_ARGUMENT also while a hot-load runs."""
    body = hot_load_body(deployment["spec"]["id"], "a/b")
    assert refused(api, "POST", "/hotLoads", body).code == "INVALID_ARGUMENT"


def test_a_repeat_of_the_same_create_learns_that_it_worked(
    api: Api, deployment: dict[str, Any], running: dict[str, Any]
) -> None:
    """The same id again is ALREADY_EXISTS and not `in progress`: so a client whose answer was lost can adopt it."""
    body = {**hot_load_body(deployment["spec"]["id"], "v0"), "hotLoadId": running["spec"]["id"]}
    assert refused(api, "POST", "/hotLoads", body).code == "ALREADY_EXISTS"


def test_updates_of_the_deployment_are_refused(api: Api, deployment: dict[str, Any], running: dict[str, Any]) -> None:
    """A deployment cannot be updated while a hot-load runs, nor disabled, nor with an unchanged spec."""
    path = f"/deployments/{deployment['spec']['id']}"
    for changes in ({}, {"traffic": {"weight": 5}}, {"disabled": True}):
        answer = refused(api, "PATCH", path, {**deployment["spec"], **changes})
        assert answer.code == "FAILED_PRECONDITION"
        assert "already in progress" in answer.message
        assert running["spec"]["id"] in answer.message
    after = api.ok("GET", path)["deployment"]
    assert after["spec"] == deployment["spec"]
    assert after["status"]["status"] == "STATUS_READY"


def test_it_cannot_be_canceled(api: Api, running: dict[str, Any]) -> None:
    """The service does not implement `:cancel`, for a running hot-load either."""
    path = f"/hotLoads/{running['spec']['id']}"
    answer = api.call("POST", f"{path}:cancel", {"id": running["spec"]["id"]})
    assert (answer.status_code, answer.json()["code"]) == (501, 12)
    assert api.ok("GET", path)["hotLoad"]["status"]["state"] == "HOT_LOAD_STATE_IN_PROGRESS"


def test_other_deployments_are_free(
    api: Api, slow: Emulator, gateway: str, running: dict[str, Any], tiny_model: Files
) -> None:
    """The interlock is a deployment's own; and deleting the deployment ends its hot-load."""
    other = api.deployment(gateway, slow.bucket)
    put_snapshot(bucket_of(slow), other, "v0", tiny_model)
    found = api.hot_load(other["spec"]["id"], "v0")
    states = {row["spec"]["id"]: row["status"]["state"] for row in api.ok("GET", "/hotLoads")["hotLoads"]}
    unfinished = ("HOT_LOAD_STATE_PENDING", "HOT_LOAD_STATE_IN_PROGRESS")
    assert states[found] in unfinished
    assert states[running["spec"]["id"]] in unfinished
    api.ok("DELETE", f"/deployments/{other['spec']['id']}")
    ended = api.ended(found)
    assert ended["status"]["state"] == "HOT_LOAD_STATE_FAILED"
    assert "deleted" in ended["status"]["conditions"][0]["message"]
    api.until_gone(f"/deployments/{other['spec']['id']}")
    assert api.ok("GET", f"/hotLoads/{found}")["hotLoad"] == ended
    assert refused(api, "POST", "/hotLoads", hot_load_body(other["spec"]["id"], "v0")).code == "NOT_FOUND"
