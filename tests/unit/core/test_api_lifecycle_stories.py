"""The stories of `field/cases/api_lifecycle`, told in the wire form of the service: one test each."""

from __future__ import annotations

import logging

import httpx
import pytest

from cwtrain.errors import (
    AlreadyExistsError,
    DeploymentFailedError,
    HotLoadInProgressError,
    UnexpectedAnswerError,
    WaitTimeoutError,
)
from cwtrain.infra import HotLoadState, ReplicaState, ResourceStatus, SnapshotType, lifecycle
from cwtrain.infra import _wire as wire
from helpers.scripted_api import ScriptedApi, deployment, exists, gateway, hot_load

SPEC = {"id": "d-1", "name": "toy", "runtime": {"engine": "dynamo-vllm"}, "disabled": False}
STORED = {"runtime": {"engine": "dynamo-vllm", "version": "1.0"}, "organizationId": "org", "traffic": {"weight": 0}}


def lost(*_: object) -> Exception:
    return httpx.RemoteProtocolError("Server disconnected without sending a response.")


def sent_ids(api: ScriptedApi, key: str = "id") -> list[str]:
    return [call.body[key] for call in api.calls if call.method == "POST"]


def test_b28_create_lost_answer():
    """B28: the service has acted and the answer is lost; the second try finds our own earlier one."""
    api = ScriptedApi(
        {
            "POST /deployments": [lost(), exists()],
            "GET /deployments/d-1": [deployment("d-1", "STATUS_CREATING", **STORED)],
        }
    )
    made = api.client().create_deployment(SPEC)
    assert (made.id, made.status) == ("d-1", ResourceStatus.CREATING)
    assert api.log == ["POST /deployments", "POST /deployments", "GET /deployments/d-1"]
    assert sent_ids(api) == ["d-1", "d-1"]


def test_b28_one_id_of_ours_over_all_tries_and_another_for_other_work():
    """B28: also where the caller names no id: one per logical call, kept over resets, 500, 502 and 504."""
    api = ScriptedApi(
        {"POST /deployments": [lost(), (500, "x"), (502, "x"), (504, ""), lambda call: deployment(call.body["id"])]}
    )
    client = api.client()
    first = client.create_deployment({"name": "toy"})
    tries = sent_ids(api)
    assert len(tries) == 5
    assert set(tries) == {first.id}
    second = client.create_deployment({"name": "toy"})
    assert second.id != first.id


def test_b28_create_500_then_exists_failed():
    """B28: our earlier try exists and has FAILED: an error with its reason, and no third create."""
    api = ScriptedApi(
        {
            "POST /deployments": [(500, {"message": "internal"}), exists()],
            "GET /deployments/d-1": [deployment("d-1", "STATUS_FAILED", reason="no capacity", **STORED)],
        }
    )
    with pytest.raises(DeploymentFailedError, match="no capacity") as caught:
        api.client().create_deployment(SPEC)
    assert caught.value.resource.id == "d-1"
    assert "cwtrain deployment delete d-1" in caught.value.hint
    assert len(sent_ids(api)) == 2


def test_b28_create_exists_other_spec():
    """B28: another deployment has our id; it is not returned as ours."""
    api = ScriptedApi(
        {"POST /deployments": [exists()], "GET /deployments/d-1": [deployment("d-1", name="someone-elses")]}
    )
    with pytest.raises(
        AlreadyExistsError, match=r"differs from what was asked for in: name, runtime\.engine"
    ) as caught:
        api.client().create_deployment(SPEC)
    assert caught.value.differences == ("name", "runtime.engine")
    assert len(sent_ids(api)) == 1


def test_b30_completed_but_one_replica_old():
    """B30: COMPLETED is the hot-load's own word; every replica is shown, and who lags can be named."""
    replicas = [
        {"name": "r1", "zone": "z", "state": "READY", "currentSnapshotIdentity": "step_000002"},
        {"name": "r2", "zone": "z", "state": "READY", "currentSnapshotIdentity": "initial"},
        {"name": "r3", "zone": "z", "currentSnapshotIdentity": "step_000002"},
    ]
    api = ScriptedApi({"GET /hotLoads/h-1": [hot_load()], "GET /hotLoads/h-1/replicas": [{"replicas": replicas}]})
    client = api.client()
    done = client.get_hot_load("h-1")
    shown = client.list_hot_load_replicas("h-1")
    assert done.state is HotLoadState.COMPLETED
    assert [one.name for one in shown] == ["r1", "r2", "r3"]
    assert [one.name for one in shown if not one.caught_up(done.identity)] == ["r2", "r3"]
    assert shown[2].state is ReplicaState.UNSPECIFIED
    assert [wire.replica_to_json(one)["state"] for one in shown] == ["READY", "READY", "UNSPECIFIED"]


def test_b30_a_replica_that_joins_late_or_is_odd_is_shown():
    """B30: no version yet, an unknown state, a missing name: shown as they are, never dropped, never caught up."""
    odd = [{"name": "r5"}, {"state": "WARMING_UP"}, {"name": "r7", "state": 3, "currentSnapshotIdentity": "s"}]
    api = ScriptedApi({"GET /hotLoads/h-1/replicas": [{"replicas": odd}]})
    shown = api.client().list_hot_load_replicas("h-1")
    assert len(shown) == 3
    assert not any(one.caught_up("s") or one.caught_up("") for one in shown)
    assert wire.replica_to_json(shown[1])["state_text"] == "WARMING_UP"


def test_b32_delete_wait_failed():
    """B32: only a 404 means gone; FAILED after DELETING is an error with the reason."""
    api = ScriptedApi(
        {
            "DELETE /deployments/d-1": [{}],
            "GET /deployments/d-1": [
                deployment("d-1", "STATUS_DELETING"),
                deployment("d-1", "STATUS_FAILED", reason="stuck finalizer"),
            ],
        }
    )
    with pytest.raises(DeploymentFailedError, match="stuck finalizer") as caught:
        lifecycle.delete_deployment(api.client(), "d-1", **api.waits())
    assert "cwtrain deployment delete d-1" in caught.value.hint
    assert api.log == ["DELETE /deployments/d-1", "GET /deployments/d-1", "GET /deployments/d-1"]


def test_b32_never_ready():
    """B32: the time-out error holds the id, the last state and the time spent."""
    api = ScriptedApi({"GET /deployments/d-1": [deployment("d-1", "STATUS_CREATING")]})
    with pytest.raises(WaitTimeoutError, match=r"d-1 is not READY after 60\.0 s; last seen: CREATING") as caught:
        lifecycle.wait_for_deployment(api.client(), "d-1", timeout=60, **api.waits())
    assert caught.value.last_seen == "CREATING"
    assert api.clock.spent == 60


def test_b32_pending_then_failed():
    """B32: FAILED ends the wait at the second poll, with the service's reason."""
    api = ScriptedApi(
        {
            "GET /deployments/d-1": [
                deployment("d-1", "STATUS_CREATING"),
                deployment("d-1", "STATUS_FAILED", reason="image not found"),
            ]
        }
    )
    with pytest.raises(DeploymentFailedError, match="image not found"):
        lifecycle.wait_for_deployment(api.client(), "d-1", **api.waits())
    assert len(api.calls) == 2


def test_b32_poll_503_in_between():
    """B32: a failed poll does not end the wait."""
    api = ScriptedApi(
        {
            "GET /deployments/d-1": [
                deployment("d-1", "STATUS_CREATING"),
                (503, "busy"),
                lost(),
                deployment("d-1", "STATUS_READY"),
            ]
        }
    )
    assert lifecycle.wait_for_deployment(api.client(), "d-1", **api.waits()).status is ResourceStatus.READY
    assert len(api.calls) == 4


def test_b32_unknown_state_then_ready(caplog):
    """B32: unknown and missing states keep waiting; one log line for the unknown one."""
    unknown = deployment("d-1", "STATUS_FROM_THE_FUTURE_OF_THIS_STORY")
    api = ScriptedApi(
        {
            "GET /deployments/d-1": [
                deployment("d-1", "STATUS_CREATING"),
                unknown,
                unknown,
                {"deployment": {"spec": {"id": "d-1"}}},
                deployment("d-1", "STATUS_READY"),
            ]
        }
    )
    with caplog.at_level(logging.WARNING, "cwtrain"):
        ready = lifecycle.wait_for_deployment(api.client(), "d-1", **api.waits())
    assert ready.status is ResourceStatus.READY
    assert [record.getMessage().count("STATUS_FROM_THE_FUTURE_OF_THIS_STORY") for record in caplog.records] == [1]


def test_b58_active_when_publishing():
    """B58: the client names the hot-load in the way; when that one has ended, the same create goes through."""
    api = ScriptedApi(
        {
            "POST /hotLoads": [
                (400, {"code": 9, "message": "a hot-load is already in progress", "status": "FAILED_PRECONDITION"}),
                lambda call: hot_load(call.body["hotLoadId"], "HOT_LOAD_STATE_PENDING"),
            ],
            "GET /hotLoads": [{"hotLoads": [hot_load("h-1", "HOT_LOAD_STATE_IN_PROGRESS")["hotLoad"]]}],
            "GET /hotLoads/h-1": [hot_load("h-1", "HOT_LOAD_STATE_IN_PROGRESS"), hot_load("h-1")],
        }
    )
    client = api.client()
    ask = {"snapshot_type": SnapshotType.FULL, "hot_load_id": "h-2"}
    with pytest.raises(HotLoadInProgressError, match="h-1") as caught:
        client.create_hot_load("d-1", "step_000002", **ask)
    assert caught.value.hot_load_id == "h-1"
    assert "cwtrain hotload wait h-1" in caught.value.hint
    while not client.get_hot_load(caught.value.hot_load_id).state.terminal:
        pass
    assert client.create_hot_load("d-1", "step_000002", **ask).id == "h-2"
    assert sent_ids(api, "hotLoadId") == ["h-2", "h-2"]


def test_b58_failed_with_replica_text():
    """B58: both texts reach the caller: the hot-load's conditions and the replica's reason."""
    api = ScriptedApi(
        {
            "GET /hotLoads/h-1": [hot_load("h-1", "HOT_LOAD_STATE_FAILED", message="1 of 2 replicas failed")],
            "GET /hotLoads/h-1/replicas": [
                {
                    "replicas": [
                        {"name": "r1", "state": "READY", "currentSnapshotIdentity": "step_000002"},
                        {"name": "r2", "state": "ERROR", "errorReason": "CUDA out of memory"},
                    ]
                }
            ],
        }
    )
    client = api.client()
    failed = client.get_hot_load("h-1")
    assert failed.state is HotLoadState.FAILED
    assert failed.status.conditions[0].message == "1 of 2 replicas failed"
    assert [one.error_reason for one in client.list_hot_load_replicas("h-1")] == ["", "CUDA out of memory"]


def test_b60_three_pages_one_empty():
    """B60: all pages are followed, and an empty one is no end."""
    pages = {
        None: {"hotLoads": [hot_load("h-1")["hotLoad"], hot_load("h-2")["hotLoad"]], "nextPageToken": "t1"},
        "t1": {"hotLoads": [], "nextPageToken": "t2"},
        "t2": {"hotLoads": [hot_load("h-3")["hotLoad"]], "nextPageToken": ""},
    }
    api = ScriptedApi({"GET /hotLoads": [lambda call: pages[(call.query.get("pageToken") or [None])[0]]]})
    assert [one.id for one in api.client().list_hot_loads("d-1")] == ["h-1", "h-2", "h-3"]
    assert all(call.query["parentDeploymentId"] == ["d-1"] for call in api.calls)


def test_b60_token_repeats():
    """B60: a page token that comes twice is an error, not an endless loop."""
    api = ScriptedApi({"GET /hotLoads": [{"hotLoads": [hot_load("h-1")["hotLoad"]], "nextPageToken": "t1"}]})
    with pytest.raises(UnexpectedAnswerError, match="page token"):
        list(api.client().list_hot_loads())
    assert len(api.calls) == 2


def test_b60_pages_are_fetched_as_needed_and_other_lists_page_too():
    """B60: a limit stops paging early; lists that do not page today follow a token if one comes; same token rules."""
    api = ScriptedApi(
        {
            "GET /hotLoads": [{"hotLoads": [hot_load("h-1")["hotLoad"]] * 2, "nextPageToken": "more"}],
            "GET /gateways": [
                {"items": [gateway("g-1")["gateway"]], "nextPageToken": "x"},
                {"items": [], "nextPageToken": "y"},
                {"items": [gateway("g-2")["gateway"]]},
            ],
            "GET /deployments": [{"items": [], "nextPageToken": "x"}],
            "GET /hotLoads/h-1/replicas": [{"replicas": [], "nextPageToken": "x"}],
        }
    )
    client = api.client()
    newest = client.list_hot_loads()
    assert [next(newest).id, next(newest).id] == ["h-1", "h-1"]
    assert len(api.calls) == 1
    assert [one.id for one in client.list_gateways()] == ["g-1", "g-2"]
    with pytest.raises(UnexpectedAnswerError):
        client.list_deployments()
    with pytest.raises(UnexpectedAnswerError):
        client.list_hot_load_replicas("h-1")
