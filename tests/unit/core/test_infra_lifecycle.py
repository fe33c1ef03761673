"""Waits, deletions, endpoints, on a virtual clock."""

from __future__ import annotations

import math

import httpx
import pytest

from cwtrain import errors
from cwtrain.infra import ResourceStatus, lifecycle
from helpers.scripted_api import ScriptedApi, deployment, gateway, not_found

WAITS = {
    "gateway": (lifecycle.wait_for_gateway, gateway, "GET /gateways/x", errors.GatewayFailedError),
    "deployment": (lifecycle.wait_for_deployment, deployment, "GET /deployments/x", errors.DeploymentFailedError),
}
each_wait = pytest.mark.parametrize(("wait", "make", "rule", "failed"), WAITS.values(), ids=WAITS)


@each_wait
def test_b32_every_state_but_the_ends_waits(wait, make, rule, failed):
    """B32: unknown, missing and numeric states, ERROR (it may recover) and outages wait; READY returns."""
    states = ["STATUS_CREATING", "STATUS_UPDATING", "STATUS_ERROR", "STATUS_WHATEVER", "", 6, 5, 3, 0]
    answers = [make("x", state) for state in states]
    answers += [(503, "busy"), (429, {"code": 8}), httpx.ConnectError("reset"), (200, "<html>"), make("x", "ready")]
    api = ScriptedApi({rule: answers})
    seen = []
    found = wait(
        api.client(retry_seconds=0),
        "x",
        poll_interval=2,
        on_progress=lambda resource, spent: seen.append((resource.status.name, spent)),
        **api.waits(),
    )
    assert found.status is ResourceStatus.READY
    assert len(api.calls) == len(answers)
    assert seen[0] == ("CREATING", 0)
    assert seen[-1] == ("READY", pytest.approx(sum(api.clock.slept)))
    assert api.clock.slept == sorted(api.clock.slept), "an eager wait slows down to its interval"


@each_wait
@pytest.mark.parametrize("state", ["STATUS_FAILED", "STATUS_DELETING", "failed"])
def test_b32_the_ends_raise_at_once_with_the_unmet_conditions(wait, make, rule, failed, state):
    """B32: the reason is in the message, what holds is not, and the next step is there."""
    answer = make("x", state)
    key = next(iter(answer))
    answer[key]["status"]["conditions"] = [
        {"type": "Scheduled", "status": "True", "message": "on a node"},
        {
            "type": "Ready",
            "status": "False",
            "reason": "ImagePull",
            "message": "image not found",
            "zone": "US-EAST-04A",
        },
    ]
    api = ScriptedApi({rule: [make("x", "STATUS_CREATING"), answer]})
    with pytest.raises(
        failed, match=r"after \d+\.\d s: Ready is FALSE in US-EAST-04A \(ImagePull: image not found\)"
    ) as caught:
        wait(api.client(), "x", **api.waits())
    assert "on a node" not in str(caught.value)
    assert isinstance(caught.value, lifecycle.LifecycleError)
    assert caught.value.resource.id == "x"
    assert f"{key} delete x" in caught.value.hint
    assert len(api.calls) == 2


@each_wait
def test_b32_failed_without_a_reason(wait, make, rule, failed):
    """B32: also then it is said."""
    api = ScriptedApi({rule: [make("x", "STATUS_FAILED")]})
    with pytest.raises(failed, match="the service gives no reason"):
        wait(api.client(), "x", **api.waits())


@each_wait
def test_b32_not_found_is_waited_out_for_30_seconds_after_a_create(wait, make, rule, failed):
    """B32: GET answers 404 during a create-wait."""
    api = ScriptedApi({rule: [not_found(), not_found(), make("x", "STATUS_READY")]})
    assert wait(api.client(), "x", **api.waits()).id == "x"
    api = ScriptedApi({rule: [not_found()]})
    with pytest.raises(errors.NotFoundError):
        wait(api.client(), "x", poll_interval=5, **api.waits())
    assert 30 <= api.clock.spent <= 35


@each_wait
def test_b32_not_found_raises_at_once_elsewhere(wait, make, rule, failed):
    """B32: once it has been seen, or when it was not just created, NOT_FOUND means gone."""
    api = ScriptedApi({rule: [make("x", "STATUS_CREATING"), not_found()]})
    with pytest.raises(errors.NotFoundError):
        wait(api.client(), "x", **api.waits())
    assert len(api.calls) == 2
    api = ScriptedApi({rule: [not_found()]})
    with pytest.raises(errors.NotFoundError):
        wait(api.client(), "x", just_created=False, **api.waits())
    assert len(api.calls) == 1


@each_wait
@pytest.mark.parametrize("bad", [0, -1, math.inf, math.nan, "60"])
def test_b32_times_that_are_no_times(wait, make, rule, failed, bad):
    """B32: refused before any call."""
    api = ScriptedApi({})
    for name in ("timeout", "poll_interval"):
        with pytest.raises(errors.ConfigError, match=f"{name}="):
            wait(api.client(), "x", **{name: bad}, **api.waits())
    for delete in (lifecycle.delete_gateway, lifecycle.delete_deployment):
        with pytest.raises(errors.ConfigError, match="timeout="):
            delete(api.client(), "x", timeout=bad, **api.waits())
    assert api.calls == []


@each_wait
def test_b32_a_time_out_tells_id_last_state_and_time(wait, make, rule, failed):
    """B32: also where the API has been silent since; and one call cannot outlast the wait."""
    api = ScriptedApi({rule: [make("x", "STATUS_NEW_IN_2027"), (503, "busy")]})
    with pytest.raises(errors.WaitTimeoutError) as caught:
        wait(api.client(retry_seconds=3600), "x", timeout=45, poll_interval=5, **api.waits())
    text = str(caught.value)
    assert (
        "x is not READY after 45.0 s; last seen: UNSPECIFIED (STATUS_NEW_IN_2027); the last look failed: busy" in text
    )
    assert api.clock.spent == pytest.approx(45)
    assert "wait x" in caught.value.hint
    assert "delete x" in caught.value.hint


@each_wait
def test_other_refusals_end_the_wait(wait, make, rule, failed):
    api = ScriptedApi({rule: [make("x", "STATUS_CREATING"), (403, {"code": 7, "message": "no"})]})
    with pytest.raises(errors.PermissionDeniedError):
        wait(api.client(), "x", **api.waits())


# Deletions -----------------------------------------------------------------------------------------------------------

DELETES = {
    "gateway": (lifecycle.delete_gateway, gateway, "gateways", errors.GatewayFailedError),
    "deployment": (lifecycle.delete_deployment, deployment, "deployments", errors.DeploymentFailedError),
}
LOST = [(500, ""), (502, "x"), httpx.ReadError("reset"), (429, "slow"), (200, "<html>")]
each_delete = pytest.mark.parametrize(("delete", "make", "path", "failed"), DELETES.values(), ids=DELETES)


@each_delete
def test_b13_delete_returns_when_get_says_not_found(delete, make, path, failed):
    """B13: deleted means that a GET says so; the states before it may be anything."""
    states = ["STATUS_FAILED", "STATUS_READY", "STATUS_DELETING", "STATUS_DELETING"]
    api = ScriptedApi(
        {
            f"DELETE /{path}/x": [make("x", "STATUS_FAILED")],
            f"GET /{path}/x": [*[make("x", state) for state in states], (503, ""), not_found()],
        }
    )
    assert delete(api.client(), "x", **api.waits()) is True
    assert api.log.count(f"DELETE /{path}/x") == 1


@each_delete
def test_nothing_to_delete(delete, make, path, failed):
    api = ScriptedApi({f"DELETE /{path}/x": [not_found()]})
    assert delete(api.client(), "x", **api.waits()) is False
    assert len(api.calls) == 1


@each_delete
@pytest.mark.parametrize(
    "lost", [(500, ""), (502, "x"), httpx.ReadError("reset"), (429, "slow"), (200, "<html>")], ids=repr
)
def test_b13_a_delete_without_an_answer_is_asked_again(delete, make, path, failed, lost):
    """B13: 500 to the delete once; and where the lost one has worked, gone is True: there was something."""
    api = ScriptedApi({f"DELETE /{path}/x": [lost, make("x", "STATUS_DELETING")], f"GET /{path}/x": [not_found()]})
    assert delete(api.client(), "x", **api.waits()) is True
    api = ScriptedApi({f"DELETE /{path}/x": [lost, not_found()]})
    assert delete(api.client(), "x", **api.waits()) is True
    assert len(api.calls) == 2


@each_delete
def test_a_refusal_for_its_state_is_asked_again_until_the_timeout(delete, make, path, failed):
    used = (400, {"code": 9, "message": "deployments use it"})
    api = ScriptedApi({f"DELETE /{path}/x": [used, used, make("x")], f"GET /{path}/x": [not_found()]})
    assert delete(api.client(), "x", **api.waits()) is True
    assert len(api.clock.slept) == 2
    api = ScriptedApi({f"DELETE /{path}/x": [used]})
    with pytest.raises(
        errors.WaitTimeoutError, match=r"not gone after 60\.0 s; last seen: not deleted: deployments use it"
    ):
        delete(api.client(), "x", timeout=60, **api.waits())


@each_delete
def test_b13_a_delete_that_does_not_take_effect_is_an_error(delete, make, path, failed):
    """B13: with the last state, and the command to try again."""
    api = ScriptedApi({f"DELETE /{path}/x": [make("x")], f"GET /{path}/x": [make("x", "STATUS_READY")]})
    with pytest.raises(errors.WaitTimeoutError, match="last seen: READY") as caught:
        delete(api.client(), "x", timeout=30, **api.waits())
    assert "may still run" in caught.value.hint
    assert "delete x" in caught.value.hint


@each_delete
def test_b32_failed_after_deleting(delete, make, path, failed):
    """B32: FAILED counts as gone nowhere; seen after DELETING (in the answer to DELETE too) it is an error."""
    stuck = make("x", "STATUS_FAILED")
    for first in ({f"DELETE /{path}/x": [make("x", "STATUS_DELETING")]}, {f"DELETE /{path}/x": [make("x")]}):
        answers = [stuck] if "DELETING" in str(first) else [stuck, make("x", "STATUS_DELETING"), stuck]
        api = ScriptedApi({**first, f"GET /{path}/x": answers})
        with pytest.raises(failed, match="has FAILED") as caught:
            delete(api.client(), "x", **api.waits())
        assert caught.value.resource.status is ResourceStatus.FAILED
        assert "delete x" in caught.value.hint


@each_delete
def test_who_may_not_delete_is_told_at_once(delete, make, path, failed):
    api = ScriptedApi({f"DELETE /{path}/x": [(403, {"code": 7, "message": "no"})]})
    with pytest.raises(errors.PermissionDeniedError):
        delete(api.client(), "x", **api.waits())


# Endpoints -----------------------------------------------------------------------------------------------------------


def test_endpoints_of_all_gateways_in_order_without_duplicates():
    api = ScriptedApi(
        {
            "GET /deployments/d-1": [deployment("d-1", gatewayIds=["g-2", "g-1", "g-3"])],
            "GET /gateways/g-1": [gateway("g-1", endpoints=["c", "a"])],
            "GET /gateways/g-2": [gateway("g-2", endpoints=["a", "b", "a"])],
            "GET /gateways/g-3": [gateway("g-3", "STATUS_CREATING")],
        }
    )
    client = api.client()
    assert lifecycle.endpoints(client, client.get_deployment("d-1")) == ["a", "b", "c"]
    assert lifecycle.endpoints(client, "d-1") == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("gw.example.com", "https://gw.example.com/v1"),
        ("gw.example.com:8443/", "https://gw.example.com:8443/v1"),
        ("https://gw.example.com", "https://gw.example.com/v1"),
        ("https://gw.example.com/", "https://gw.example.com/v1"),
        ("https://gw.example.com/v1", "https://gw.example.com/v1"),
        ("https://gw.example.com/v1/", "https://gw.example.com/v1"),
        ("http://127.0.0.1:8000/my/path//", "http://127.0.0.1:8000/my/path/v1"),
        (" gw/v1beta ", "https://gw/v1beta/v1"),
    ],
)
def test_rollout_base_url(endpoint, url):
    assert lifecycle.rollout_base_url(endpoint) == url
    assert lifecycle.rollout_base_url(url) == url


def test_no_endpoint_yet():
    with pytest.raises(errors.ConfigError):
        lifecycle.rollout_base_url("  ")


def test_public_names():
    assert {"wait_for_gateway", "wait_for_deployment", "delete_gateway", "delete_deployment"} <= set(lifecycle.__all__)
    assert lifecycle.LifecycleError is errors.LifecycleError
