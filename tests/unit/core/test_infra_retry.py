"""The one retry policy: what is tried again, how long, and what the service's own wishes do. On a virtual clock."""

from __future__ import annotations

import json
import logging
import ssl

import httpx
import pytest
import stamina

from cwtrain import errors
from cwtrain.infra._retry import RetryPolicy, is_retryable
from helpers.scripted_api import ScriptedApi, deployment
from helpers.virtual_clock import VirtualClock

RETRIED = [408, 429, 500, 502, 503, 504, 505, 599]
FINAL = [400, 401, 403, 404, 409, 412, 418, 499, 501, 302]


def no_json(status=200):
    error = errors.UnexpectedAnswerError("x", status=status)
    error.__cause__ = json.JSONDecodeError("x", "x", 0)
    return error


def test_what_is_worth_another_try():
    assert is_retryable(errors.ConnectionFailedError("x"))
    assert is_retryable(errors.RequestTimeoutError("x"))
    assert all(is_retryable(errors.APIError("x", status=status)) for status in RETRIED)
    assert not any(is_retryable(errors.APIError("x", status=status)) for status in FINAL)
    assert is_retryable(no_json())
    assert not is_retryable(errors.UnexpectedAnswerError("no key"))
    assert not is_retryable(errors.ConfigError("x"))
    assert not is_retryable(KeyError("x"))
    untrusted = errors.ConnectionFailedError("x")
    untrusted.__cause__ = httpx.ConnectError("x")
    untrusted.__cause__.__context__ = ssl.SSLCertVerificationError("self-signed")
    assert not is_retryable(untrusted)


class Times:
    """Fails a number of times, then answers."""

    def __init__(self, error, times=10**9):
        self.error, self.times, self.calls = error, times, 0

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            raise self.error() if callable(self.error) else self.error
        return "answer"


def policy(clock, **more):
    return RetryPolicy(clock=clock.now, sleep=clock.sleep, uniform=lambda low, high: high / 2, **more)


def test_pauses_grow_and_are_capped():
    clock = VirtualClock()
    attempt = Times(lambda: errors.UnavailableError("x", status=503), times=9)
    assert policy(clock, seconds=600).call(attempt) == "answer"
    assert clock.slept == [0.375, 0.75, 1.5, 3.0, 6.0, 12.0, 12.0, 12.0, 12.0]


def test_the_budget_is_in_seconds_and_the_last_try_is_at_its_end():
    clock = VirtualClock()
    attempt = Times(lambda: errors.UnavailableError("busy", status=503))
    with pytest.raises(errors.UnavailableError, match=r"busy; gave up after \d+ tries in 60\.0 s"):
        policy(clock).call(attempt)
    assert clock.spent == pytest.approx(60)
    assert attempt.calls > 5


def test_no_budget_means_one_try():
    clock = VirtualClock()
    attempt = Times(lambda: errors.UnavailableError("busy", status=503))
    with pytest.raises(errors.UnavailableError, match=r"^busy$"):
        policy(clock, seconds=0).call(attempt)
    assert (attempt.calls, clock.slept) == (1, [])


def test_time_spent_in_the_tries_counts():
    clock = VirtualClock()

    def slow():
        clock.seconds += 31
        raise errors.RequestTimeoutError("slow")

    with pytest.raises(errors.RequestTimeoutError, match="gave up after 2 tries"):
        policy(clock, seconds=60).call(slow)


def asks_for(seconds):
    detail = {"@type": "x/google.rpc.RetryInfo", "retryDelay": f"{seconds}s"}
    return lambda: errors.ResourceExhaustedError("quota", status=429, details=[detail])


def test_what_the_service_asks_for_is_the_least_pause():
    clock = VirtualClock()
    assert policy(clock).call(Times(asks_for(20), times=2)) == "answer"
    assert clock.slept == [20.125, 20.25]


def test_a_wish_beyond_the_budget_fails_at_once_with_the_reason():
    clock = VirtualClock()
    with pytest.raises(errors.ResourceExhaustedError, match="asks to wait 86400 s, which is more than the 60 s left"):
        policy(clock).call(Times(asks_for(86400)))
    assert clock.slept == []


def test_a_wish_at_the_end_of_the_budget_is_no_reason_of_its_own():
    clock = VirtualClock()

    def busy():
        clock.seconds += 0.25  # so that the last try ends after the budget
        raise errors.UnavailableError("busy", status=503)

    with pytest.raises(errors.UnavailableError) as caught:
        policy(clock).call(busy)
    assert "asks to wait" not in str(caught.value)


def test_who_waits_is_told_once_after_a_while(caplog):
    clock = VirtualClock()
    with caplog.at_level(logging.WARNING), pytest.raises(errors.UnavailableError):
        policy(clock).call(Times(lambda: errors.UnavailableError("busy", status=503)))
    assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
        "still failing after 6 s, tried for 54 s more"
    ]


@pytest.mark.parametrize("error", [errors.NotFoundError("x", status=404), KeyError("x"), KeyboardInterrupt()])
def test_the_rest_is_raised_as_it_is(error):
    clock = VirtualClock()
    attempt = Times(error)
    with pytest.raises(type(error)) as caught:
        policy(clock).call(attempt)
    assert caught.value is error
    assert attempt.calls == 1


def test_without_a_seam_stamina_sleeps_and_our_log_replaces_its(caplog):
    attempt = Times(lambda: errors.UnavailableError("busy", status=503), times=2)
    with caplog.at_level(logging.DEBUG):
        assert RetryPolicy(first_pause=0.001, seconds=5).call(attempt) == "answer"
    assert [record.name for record in caplog.records] == ["cwtrain.infra"] * 2
    assert "try 1 failed" in caplog.text


def test_stamina_in_test_mode_makes_one_try():
    attempt = Times(lambda: errors.UnavailableError("busy", status=503))
    with stamina.set_testing(True), pytest.raises(errors.UnavailableError):
        RetryPolicy().call(attempt)
    assert attempt.calls == 1


@pytest.mark.parametrize("method", ["GET", "POST", "PATCH", "DELETE"])
@pytest.mark.parametrize(
    "failure",
    [
        httpx.ConnectError("refused"),
        httpx.ReadError("reset"),
        httpx.ReadTimeout("slow"),
        httpx.ConnectTimeout("slow"),
        httpx.RemoteProtocolError("disconnected"),
        httpx.DecodingError("broken gzip"),
        *[(status, "x") for status in RETRIED],
        (200, "<html>maintenance</html>"),
        (200, '{"deployment": {"spec": {"id": "d-'),
        httpx.Response(200, content=b"\xff\xfe"),
    ],
    ids=repr,
)
def test_every_verb_is_tried_again(method, failure):
    paths = {"POST": "/deployments"}
    rule = f"{method} {paths.get(method, '/deployments/d-1')}"
    api = ScriptedApi({rule: [failure, failure, deployment("d-1")]})
    client = api.client()
    spec = {"id": "d-1", "name": "toy", "hotLoad": {"bucket": "b"}}
    call = {
        "GET": lambda: client.get_deployment("d-1"),
        "POST": lambda: client.create_deployment(spec),
        "PATCH": lambda: client.update_deployment("d-1", spec),
        "DELETE": lambda: client.delete_deployment("d-1"),
    }[method]
    assert call().id == "d-1"
    assert api.log == [rule] * 3
    assert len({json.dumps(request.body) for request in api.calls}) == 1


@pytest.mark.parametrize("status", FINAL)
def test_every_verb_stops_at_a_real_refusal(status):
    api = ScriptedApi({"GET /deployments/d-1": [(status, "no")]})
    with pytest.raises(errors.APIError):
        api.client().get_deployment("d-1")
    assert len(api.calls) == 1
