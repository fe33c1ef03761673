"""What the emulator's page is told: counts by the second, problems, hot-loads; all of it bounded."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from cwtrain_emulator.page.activity import KEPT_SECONDS, Activity, LogProblems, Watched


class Clock:
    def __init__(self, now: float) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.5)


@pytest.fixture
def activity(clock: Clock) -> Activity:
    return Activity(clock=clock)


def test_counts_are_by_second_kind_and_outcome_and_old_ones_go(activity: Activity, clock: Clock) -> None:
    activity.answered("endpoint", refused=False)
    activity.answered("endpoint", refused=False)
    activity.answered("api", refused=True)
    clock.now = 1003.0
    activity.answered("endpoint", refused=True)
    assert activity.counts() == {"seconds": [[1000, 2, 0, 0, 1], [1003, 0, 1, 0, 0]], "total": [2, 1, 0, 1]}
    clock.now = 1001.0 + KEPT_SECONDS
    assert activity.counts()["seconds"] == [[1003, 0, 1, 0, 0]]
    for second in range(3 * KEPT_SECONDS):
        clock.now = 2000.0 + second
        activity.answered("api", refused=False)
    assert len(activity.counts()["seconds"]) == KEPT_SECONDS + 1
    assert activity.counts()["total"] == [2, 1, 3 * KEPT_SECONDS, 1]


def test_a_clock_that_is_set_back_loses_nothing(activity: Activity, clock: Clock) -> None:
    activity.answered("api", refused=False)
    clock.now = 990.0
    activity.answered("api", refused=False)
    assert activity.counts()["seconds"] == [[990, 0, 0, 1, 0], [1000, 0, 0, 1, 0]]


def test_problems_alike_are_one_with_a_count_and_the_last_is_first(activity: Activity, clock: Clock) -> None:
    activity.problem("request", "GET /a", status=404, message="no a", request_id="1")
    activity.problem("request", "GET /b", status=404, message="no b", request_id="2")
    clock.now = 1010.0
    activity.problem("request", "GET /a", status=404, message="no a", request_id="3")
    first, second = activity.problems()
    assert (first.what, first.count, first.request_id, first.at) == ("GET /a", 2, "3", 1010.0)
    assert (second.what, second.count) == ("GET /b", 1)
    for number in range(100):
        activity.problem("request", f"GET /{number}", status=404, message="x" * 5000)
    assert len(activity.problems()) == 40
    assert activity.problems()[0].what == "GET /99"
    assert len(activity.problems()[0].message) == 500


def answer(status: int, body: bytes, *, whole: bool = True) -> Any:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": body, "more_body": not whole})

    return app


async def broken(scope: Scope, receive: Receive, send: Send) -> None:
    raise ConnectionResetError


def serve(activity: Activity, app: Any, path: str) -> list[Message]:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    scope = {"type": "http", "method": "POST", "path": path, "request_id": "rid"}
    asyncio.run(Watched(app, activity)(scope, receive, send))
    return sent


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (json.dumps({"code": 9, "message": "already in progress", "details": []}), "already in progress"),
        (json.dumps({"error": {"message": "no such model", "code": 404}}), "no such model"),
        ("<html>Bad Gateway</html>", "Bad Gateway"),
        ("[]", "Bad Gateway"),
        ('{"message": 5}', "Bad Gateway"),
        ("", "Bad Gateway"),
    ],
)
def test_a_refusal_s_own_words_are_kept(activity: Activity, body: str, said: str) -> None:
    sent = serve(activity, answer(502, body.encode()), "/v1/completions")
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    (problem,) = activity.problems()
    assert (problem.what, problem.status, problem.message) == ("POST /v1/completions", 502, said)
    assert problem.request_id == "rid"
    assert activity.counts()["total"] == [0, 1, 0, 0]


def test_answers_are_counted_and_the_page_s_own_are_not(activity: Activity) -> None:
    serve(activity, answer(200, b"{}"), "/v1/models")
    serve(activity, answer(200, b"{}"), "/v1alpha1/inference/gateways")
    for path in ("/", "/emulator/v1/page", "/emulator/v1/state", "/favicon.ico"):
        serve(activity, answer(404, b"{}"), path)
    assert activity.counts()["total"] == [1, 0, 1, 0]
    assert activity.problems() == []


def test_an_answer_that_never_ended_is_a_problem(activity: Activity) -> None:
    serve(activity, answer(200, b"half", whole=False), "/v1/completions")
    with pytest.raises(ConnectionResetError):
        serve(activity, broken, "/v1/completions")
    assert [problem.status for problem in activity.problems()] == [0, 200]
    assert all("connection ended" in problem.message for problem in activity.problems())
    assert activity.counts()["total"] == [0, 2, 0, 0]


def test_warnings_of_the_service_are_problems(activity: Activity) -> None:
    log = logging.getLogger("cwtrain_emulator.some.part")
    log.propagate = False
    handler = LogProblems(activity)
    log.addHandler(handler)
    try:
        log.info("nothing")
        log.warning("replica %s ended", "r0")
        try:
            raise ValueError("why")
        except ValueError:
            log.exception("reconciling failed")
    finally:
        log.removeHandler(handler)
        log.propagate = True
    assert [(problem.what, problem.status, problem.message) for problem in activity.problems()] == [
        ("some.part", None, "reconciling failed: ValueError: why"),
        ("some.part", None, "replica r0 ended"),
    ]
