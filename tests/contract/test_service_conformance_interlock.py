"""What a hot-load that has not ended bars. Its second replica waits for minutes here before it swaps."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests

from cwtrain_emulator.emulator import Emulator
from helpers.conformance import bucket_of, gateway_body, put_snapshot, refusal, refused
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


@pytest.mark.parametrize("same_id", [True, False])
def test_of_creates_at_the_same_moment_one_wins(
    api: Api, slow: Emulator, gateway: str, tiny_model: Files, same_id: bool
) -> None:
    """The interlock and the ids hold for calls that race: one is accepted, the others are told so."""
    deployment = api.deployment(gateway, slow.bucket)
    put_snapshot(bucket_of(slow), deployment, "v0", tiny_model)
    body, mine = hot_load_body(deployment["spec"]["id"], "v0"), str(uuid.uuid4())
    bodies = [{**body, "hotLoadId": mine if same_id else str(uuid.uuid4())} for _ in range(6)]
    answers = at_once(slow, "/hotLoads", bodies)
    assert sum(answer.status_code == 200 for answer in answers) == 1
    codes = {refusal(answer).code for answer in answers if answer.status_code != 200}
    assert codes == {"ALREADY_EXISTS" if same_id else "FAILED_PRECONDITION"}
    listed = api.ok("GET", f"/hotLoads?parentDeploymentId={deployment['spec']['id']}")["hotLoads"]
    assert len(listed) == 1
    api.ok("DELETE", f"/deployments/{deployment['spec']['id']}")


@pytest.mark.parametrize("shared", ["id", "name"])
def test_of_resources_made_at_the_same_moment_one_stays(api: Api, slow: Emulator, shared: str) -> None:
    """Ids and names are one resource's, for creates that race, too."""
    value = str(uuid.uuid4())
    answers = at_once(slow, "/gateways", [gateway_body(**{shared: value}) for _ in range(6)])
    assert sum(answer.status_code == 200 for answer in answers) == 1
    assert {refusal(answer).code for answer in answers if answer.status_code != 200} == {"ALREADY_EXISTS"}
    made = [item["spec"]["id"] for item in api.ok("GET", "/gateways")["items"] if item["spec"][shared] == value]
    assert len(made) == 1
    api.ok("DELETE", f"/gateways/{made[0]}")


def at_once(emulator: Emulator, path: str, bodies: list[dict[str, Any]]) -> list[requests.Response]:
    """Send creates from as many threads as there are bodies, at one moment."""
    barrier = threading.Barrier(len(bodies))

    def send(body: dict[str, Any]) -> requests.Response:
        caller = Api(emulator.base_url, emulator.admin_token)
        try:
            barrier.wait(30)
            return caller.call("POST", path, body)
        finally:
            caller.close()

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(send, bodies))
