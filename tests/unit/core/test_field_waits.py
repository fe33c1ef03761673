"""Nothing that is waited for is silent: there is a word at least every 30 s, with what it is and until when.

The kind: a wait of which nothing is said, because who waits does not know that a person looks on.
"""

from __future__ import annotations

import itertools
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cwtrain.errors import WaitTimeoutError
from cwtrain.infra import lifecycle
from helpers.run_cli import run
from helpers.scripted_api import ScriptedApi
from helpers.scripted_s3 import ScriptedS3, scripted_s3
from helpers.tiny_api import TinyApi
from helpers.upload_files import contents, write
from helpers.virtual_clock import VirtualClock


def deployment(status):
    return {"deployment": {"spec": {"id": "d-1", "name": "d"}, "status": {"status": status}}}


class Sleeper:
    """A clock whose sleepers are looked at every second, as the thread of the command line does."""

    def __init__(self, clock, look):
        self.clock, self.look = clock, look

    def sleep(self, seconds):
        while seconds > 0:
            step = min(1.0, seconds)
            self.clock.sleep(step)
            seconds -= step
            self.look()


def heart_of(clock, **more):
    from cwtrain.cli._output import Heart

    return Heart(clock=clock.now, **more)


def test_a_wait_for_a_deployment_is_told_with_its_state_and_its_end(capfd):
    from cwtrain.models.text import duration

    api = ScriptedApi({"GET /deployments/d-1": [deployment("STATUS_CREATING")]})
    heart, told = heart_of(api.clock), []

    def look():
        heart.beat()
        if text := capfd.readouterr().err.strip():
            told.append((api.clock.spent, text))

    sleeper = Sleeper(api.clock, look)
    with pytest.raises(WaitTimeoutError):
        lifecycle.wait_for_deployment(api.client(), "d-1", timeout=200, clock=api.clock.now, sleep=sleeper.sleep)
    times = [0.0, *(at for at, _ in told), 200.0]
    assert max(later - earlier for earlier, later in itertools.pairwise(times)) <= 30
    for at, text in told:
        assert "waiting for deployment d-1 to be READY: CREATING" in text
        assert f"{duration(round(200 - at))} left (until " in text


def test_an_outage_of_the_api_is_told_with_what_fails(capfd):
    api = ScriptedApi({"GET /deployments/d-1": [(503, {"message": "overloaded"})]})
    heart, told = heart_of(api.clock), []

    def look():
        heart.beat()
        told.append(capfd.readouterr().err)

    with pytest.raises(WaitTimeoutError):
        lifecycle.wait_for_deployment(
            api.client(), "d-1", timeout=200, clock=api.clock.now, sleep=Sleeper(api.clock, look).sleep
        )
    text = "".join(told)
    assert "waiting for deployment d-1 to be READY" in text
    assert "the last look failed" in text
    assert "overloaded" in text


def test_the_library_logs_its_waits_too(caplog):
    api = ScriptedApi({"GET /deployments/d-1": [deployment("STATUS_CREATING")]})
    with caplog.at_level(logging.INFO, "cwtrain"), pytest.raises(WaitTimeoutError):
        lifecycle.wait_for_deployment(api.client(), "d-1", timeout=200, **api.waits())
    told = [record for record in caplog.records if record.name == "cwtrain.waits"]
    assert len(told) >= 200 // 30
    assert all("d-1" in record.message and "left (until " in record.message for record in told)


def test_the_innermost_wait_and_the_slow_request_are_named_and_the_first_end_counts():
    from cwtrain.waits import current, waiting

    clock = VirtualClock()
    assert current() is None
    with waiting("the whole", clock=clock.now):
        assert current() == "the whole; 0 s so far, no time limit"
        with waiting("the step", seconds=600, clock=clock.now):
            with waiting("GET /a", seconds=90, part=True, clock=clock.now):
                clock.sleep(5)
                assert current().startswith("the step; 5 s so far, 9 min 55 s left (until ")
                assert "GET" not in current()
                clock.sleep(15)
                assert "GET /a; 20 s so far, 1 min 10 s left (until " in current()
            assert "GET" not in current()
    assert current() is None


@pytest.mark.parametrize("seconds", [None, float("inf"), 1e300, lambda: None, lambda: float("inf")])
def test_a_wait_without_an_end_says_so(seconds):
    from cwtrain.waits import current, waiting

    with waiting("it", seconds=seconds):
        assert current() == "it; 0 s so far, no time limit"


def test_waits_of_many_threads_do_not_disturb_each_other():
    from cwtrain.waits import current, waiting

    ready = threading.Barrier(9, timeout=60)

    def work(number):
        for _ in range(50):
            with waiting(f"work {number}"):
                assert current() is not None
        ready.wait()

    with ThreadPoolExecutor(8) as pool:
        done = [pool.submit(work, number) for number in range(8)]
        ready.wait()
    assert [one.result() for one in done] == [None] * 8
    assert current() is None


def test_nothing_is_repeated_while_there_is_news(capfd):
    from cwtrain.cli._output import say
    from cwtrain.waits import waiting

    clock = VirtualClock()
    with heart_of(clock) as heart, waiting("something", clock=clock.now):
        for _ in range(20):
            clock.sleep(20)
            say("news")
            heart.beat()
    assert "something" not in capfd.readouterr().err


@pytest.mark.parametrize("quiet", [False, True])
def test_quiet_stays_quiet(capfd, quiet):
    from cwtrain.waits import waiting

    clock = VirtualClock()
    heart = heart_of(clock, quiet=lambda: quiet)
    with waiting("something", clock=clock.now):
        clock.sleep(31)
        heart.beat()
    assert ("something" in capfd.readouterr().err) is not quiet


def test_what_serves_until_it_is_ended_is_no_wait(capfd):
    from cwtrain.waits import current, serving, waiting

    clock = VirtualClock()
    heart = heart_of(clock)
    with waiting("demo is at work", clock=clock.now):
        with serving():
            clock.sleep(3600)
            heart.beat()
            assert current() is None
            with waiting("a request"):  # of something that goes on beside
                assert "a request" in current()
        assert capfd.readouterr().err == ""
        clock.sleep(31)
        heart.beat()
    assert "demo is at work" in capfd.readouterr().err


def test_a_command_that_nobody_thought_of_is_told_by_its_name():
    import click

    from cwtrain.cli._context import Command
    from cwtrain.waits import current

    @click.command(cls=Command)
    def work():
        click.echo(current())

    from click.testing import CliRunner

    assert "work is at work" in CliRunner().invoke(work).output


def test_sampling_has_a_time_limit_and_says_what_it_waited_for():
    pytest.importorskip("cwtrain_rollout")
    done = run(
        "rollout", "sample", "--endpoint", "http://127.0.0.1:1/v1", "--model", "m", "--prompt-ids", "1,2",
        "--timeout", "0.5",
    )  # fmt: skip
    assert done.code == 1
    assert "127.0.0.1:1" in done.err


def test_a_server_that_holds_its_answer_is_told_while_it_does():
    """The line comes before the answer: the server answers when it has been told."""
    from helpers.run_cli import start_with_heartbeat

    released = threading.Event()
    with TinyApi() as api:
        api.hot_load("h", statuses=["COMPLETED"])
        inner = api.answer

        def answer(method, target, body):
            assert released.wait(60)
            return inner(method, target, body)

        api.answer = answer
        process = start_with_heartbeat(0.2, "hotload", "status", "h", env=api.env)
        try:
            assert process.stderr is not None
            line = process.stderr.readline()
            assert "cwtrain hotload status is at work" in line
            released.set()
            out, _ = process.communicate(timeout=60)
        finally:
            released.set()
            process.kill()
    assert process.returncode == 0
    assert '"id": "h"' in out


def test_a_store_that_holds_a_write_is_named_with_the_end_of_the_try(tmp_path, monkeypatch):
    """The upload's words are read while the store has a PUT in its hands, and lets go of it afterwards."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")
    held, released = threading.Event(), threading.Event()

    def script(request, before):
        if request.operation == "PutObject" and request.key.endswith(".safetensors"):
            held.set()
            released.wait(60)

    from cwtrain.storage import Location, S3Store, s3_client, upload_objects
    from cwtrain.waits import current

    files = write(tmp_path, contents(1, 100))
    with scripted_s3(ScriptedS3(script=script)) as server, ThreadPoolExecutor(1) as pool:
        store = S3Store(s3_client(endpoint_url=server.url), "weights")
        here = Location("weights", "rl/run")
        done = pool.submit(upload_objects, files, store=store, location=here, identity="v1")
        try:
            assert held.wait(60)
            words = current()
        finally:
            released.set()
        assert done.result(timeout=60).uploaded
    assert "uploading v1: " in words
    assert " of " in words
    assert current() is None
