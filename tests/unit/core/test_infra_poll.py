"""The wait loop on a virtual clock."""

from __future__ import annotations

import itertools
import math

import pytest

from cwtrain.errors import (
    ConfigError,
    ConnectionFailedError,
    CWTrainError,
    NotFoundError,
    ResourceExhaustedError,
    UnavailableError,
    WaitTimeoutError,
)
from cwtrain.infra._poll import Deadline, poll
from helpers.virtual_clock import VirtualClock


def run(answers, clock, *, timeout=60.0, poll_interval=5.0, **more):
    answers = itertools.chain(answers, itertools.repeat(answers[-1]))

    def fetch():
        answer = next(answers)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    settings = {"done": lambda value: value == "done", "describe": str, "clock": clock.now, "sleep": clock.sleep}
    return poll(fetch, timeout=timeout, poll_interval=poll_interval, **{**settings, **more})


def test_it_returns_the_first_value_that_is_done():
    clock = VirtualClock()
    seen = []
    assert run(["a", "b", "done"], clock, on_progress=lambda value, spent: seen.append((value, spent))) == "done"
    assert seen == [("a", 0), ("b", 5), ("done", 10)]
    assert clock.slept == [5, 5]


@pytest.mark.parametrize("timeout", [0.5, 5, 7, 60])
def test_there_is_a_last_look_at_the_deadline(timeout):
    clock = VirtualClock()
    seen = []
    with pytest.raises(WaitTimeoutError) as caught:
        run(["still"], clock, timeout=timeout, on_progress=lambda value, spent: seen.append(spent))
    assert seen[-1] == timeout == clock.spent
    assert caught.value.last_seen == "still"


def test_done_at_the_very_last_look():
    clock = VirtualClock()
    assert run(["a", "done"], clock, timeout=1, poll_interval=100) == "done"


OUTAGES = [
    ConnectionFailedError("reset"),
    UnavailableError("busy", status=503),
    ResourceExhaustedError("q", status=429),
]


def test_outages_are_ridden_out_until_the_deadline():
    clock = VirtualClock()
    assert run(["a", *OUTAGES * 3, "done"], clock) == "done"
    clock = VirtualClock()
    with pytest.raises(WaitTimeoutError, match="last seen: a; the last look failed: busy") as caught:
        run(["a", OUTAGES[1]], clock)
    assert isinstance(caught.value.__cause__, UnavailableError)
    with pytest.raises(WaitTimeoutError, match="nothing yet; the last look failed: reset"):
        run([OUTAGES[0]], VirtualClock())


def test_the_service_sets_the_least_pause():
    clock = VirtualClock()
    wish = {"@type": "x/google.rpc.RetryInfo", "retryDelay": "17s"}
    busy = ResourceExhaustedError("busy", status=429, details=[wish])
    assert run([busy, "done"], clock) == "done"
    assert clock.slept == [17]


@pytest.mark.parametrize("error", [NotFoundError("x", status=404), CWTrainError("x"), KeyError("x")])
def test_other_errors_end_the_wait(error):
    with pytest.raises(type(error)):
        run(["a", error], VirtualClock())


def test_done_may_raise_and_the_caller_may_say_it_better():
    def done(value):
        raise NotFoundError(f"{value} is bad")

    with pytest.raises(NotFoundError, match="a is bad"):
        run(["a"], VirtualClock(), done=done)
    with pytest.raises(KeyError) as caught:
        run(["a"], VirtualClock(), timeout_error=lambda *what: KeyError(*what))
    assert caught.value.args == ("a", "a", 60.0)


@pytest.mark.parametrize("bad", [0, -1, math.inf, -math.inf, math.nan, "5", None, True])
def test_times_that_are_no_times(bad):
    for name in ("timeout", "poll_interval"):
        with pytest.raises(ConfigError, match=f"{name}="):
            run(["done"], VirtualClock(), **{name: bad})


def test_several_waits_share_one_deadline():
    clock = VirtualClock()
    deadline = Deadline(20, clock.now)
    assert run(["a", "a", "done"], clock, timeout=deadline) == "done"
    assert (deadline.spent(), deadline.left()) == (10, 10)
    with pytest.raises(WaitTimeoutError, match=r"20\.0 s"):
        run(["a"], clock, timeout=deadline)
    assert clock.spent == 20


def test_an_eager_wait_looks_often_at_first_and_then_at_the_interval():
    clock = VirtualClock()
    with pytest.raises(WaitTimeoutError):
        run(["a"], clock, eager=True)
    assert clock.slept[0] == pytest.approx(0.1)
    assert clock.slept[-2] == 5
    assert clock.slept[:-1] == sorted(clock.slept[:-1])
    assert clock.spent == pytest.approx(60)
