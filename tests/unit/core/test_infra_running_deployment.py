"""running_deployment deletes on every way out. Signals are tried on real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import httpx
import pytest

from cwtrain import errors
from cwtrain.infra import lifecycle
from helpers.scripted_api import ScriptedApi, deployment, exists, not_found

SPEC = {"id": "d-1", "name": "toy"}


def service(**rules):
    """A service where d-1 becomes ready, and is gone once it was deleted."""
    base = {
        "POST /deployments": [deployment("d-1", "STATUS_CREATING")],
        "GET /deployments/d-1": [deployment("d-1", "STATUS_CREATING"), deployment("d-1")],
        "DELETE /deployments/d-1": [deployment("d-1", "STATUS_DELETING")],
    }
    api = ScriptedApi({**base, **rules})

    def deleted(call):
        api.rules["GET /deployments/d-1"] = [deployment("d-1", "STATUS_DELETING"), not_found()]
        return deployment("d-1", "STATUS_DELETING")

    if "DELETE /deployments/d-1" not in rules:
        api.rules["DELETE /deployments/d-1"] = [deleted]
    return api


def deletes(api):
    return api.log.count("DELETE /deployments/d-1")


def test_b13_it_is_deleted_after_the_block():
    """B13: created, ready, used, gone."""
    api = service()
    created = []
    with lifecycle.running_deployment(api.client(), SPEC, on_created=created.append, **api.waits()) as running:
        assert running.status.name == "READY"
        assert created[0].status.name == "CREATING"
        assert deletes(api) == 0
    assert deletes(api) == 1
    assert api.log[-1] == "GET /deployments/d-1"


@pytest.mark.parametrize("error", [KeyError("x"), KeyboardInterrupt(), SystemExit(3), GeneratorExit(), StopIteration()])
def test_b13_it_is_deleted_on_exceptions_and_ctrl_c(error):
    """B13: whatever ends the block, and it comes through."""
    api = service()
    with pytest.raises(type(error)) as caught, lifecycle.running_deployment(api.client(), SPEC, **api.waits()):
        raise error
    assert caught.value is error
    assert deletes(api) == 1


@pytest.mark.parametrize("state", ["STATUS_FAILED", "STATUS_ERROR"])
def test_b13_it_is_deleted_when_it_never_becomes_ready(state):
    """B13: PENDING then FAILED; and a time-out."""
    api = service(**{"GET /deployments/d-1": [deployment("d-1", state, reason="no capacity")]})
    with (
        pytest.raises((errors.DeploymentFailedError, errors.WaitTimeoutError), match="no capacity"),
        lifecycle.running_deployment(api.client(), SPEC, timeout=60, **api.waits()),
    ):
        pytest.fail("not reached")
    assert deletes(api) == 1


def test_b13_it_is_deleted_when_the_callers_own_callback_fails():
    """B13: on_created is on the way too."""
    api = service()
    with (
        pytest.raises(ZeroDivisionError),
        lifecycle.running_deployment(api.client(), SPEC, on_created=lambda found: 1 / 0, **api.waits()),
    ):
        pytest.fail("not reached")
    assert deletes(api) == 1


def test_b13_a_refused_create_deletes_nothing():
    """B13: neither where there is none, nor where the id or the name is someone else's."""
    for rules in (
        {"POST /deployments": [(400, {"code": 3, "message": "bad"})]},
        {"POST /deployments": [exists()], "GET /deployments/d-1": [deployment("d-1", name="someone-elses")]},
        {"POST /deployments": [exists()], "GET /deployments/d-1": [not_found()]},
    ):
        api = service(**rules)
        with pytest.raises(errors.APIError), lifecycle.running_deployment(api.client(), SPEC, **api.waits()):
            pytest.fail("not reached")
        assert deletes(api) == 0


def test_b13_our_own_earlier_try_that_failed_is_deleted():
    """B13, B28: it is ours, so it goes."""
    api = service(
        **{"POST /deployments": [exists()], "GET /deployments/d-1": [deployment("d-1", "STATUS_FAILED", reason="why")]}
    )
    with (
        pytest.raises(errors.DeploymentFailedError, match="why"),
        lifecycle.running_deployment(api.client(), SPEC, **api.waits()),
    ):
        pytest.fail("not reached")
    assert deletes(api) == 1


@pytest.mark.parametrize(
    "lost", [httpx.ReadError("reset"), (500, "x"), KeyboardInterrupt(), (200, {"odd": 1})], ids=repr
)
def test_b13_a_create_without_an_answer_is_looked_for_and_deleted(lost):
    """B13, B28: it may show up a little later."""
    api = service(
        **{
            "POST /deployments": [lost],
            "GET /deployments/d-1": [not_found(), not_found(), deployment("d-1", "STATUS_CREATING")],
        }
    )
    with (
        pytest.raises((errors.CWTrainError, KeyboardInterrupt)),
        lifecycle.running_deployment(api.client(retry_seconds=1), SPEC, **api.waits()),
    ):
        pytest.fail("not reached")
    assert deletes(api) == 1


def test_b13_a_create_without_an_answer_that_made_nothing():
    """B13: it is looked for 10 s; another one under that id is not touched; an API that is away is named."""
    for found, note in ((not_found(), None), (deployment("d-1", name="other"), None), ((503, ""), "may still run")):
        api = service(**{"POST /deployments": [httpx.ReadError("reset")], "GET /deployments/d-1": [found]})
        with (
            pytest.raises(errors.ConnectionFailedError) as caught,
            lifecycle.running_deployment(api.client(retry_seconds=1), SPEC, **api.waits()),
        ):
            pytest.fail("not reached")
        assert deletes(api) == 0
        assert api.clock.spent < 30
        assert (note or "") in "".join(getattr(caught.value, "__notes__", []))


def test_b13_a_delete_that_fails_is_said():
    """B13: as the error, or as a note on the error that ended the block; always with id and command."""
    refused = {"DELETE /deployments/d-1": [(403, {"code": 7, "message": "no"})]}
    api = service(**refused)
    with (
        pytest.raises(errors.PermissionDeniedError) as caught,
        lifecycle.running_deployment(api.client(), SPEC, **api.waits()),
    ):
        pass
    assert "cwtrain deployment delete d-1" in caught.value.__notes__[0]
    api = service(**refused)
    with pytest.raises(KeyError) as caught, lifecycle.running_deployment(api.client(), SPEC, **api.waits()):
        raise KeyError("the real trouble")
    assert "cwtrain deployment delete d-1" in caught.value.__notes__[0]


def test_times_and_specs_are_checked_before_anything_is_created():
    for settings in ({"timeout": 0}, {"poll_interval": -1}, {"delete_timeout": float("inf")}):
        api = service()
        with pytest.raises(errors.ConfigError):
            lifecycle.running_deployment(api.client(), SPEC, **settings, **api.waits())
        assert api.calls == []


def test_an_id_is_chosen_where_there_is_none():
    api = service()
    with lifecycle.running_deployment(api.client(), {"name": "toy"}, **api.waits()):
        pass
    assert len(api.calls[0].body["id"]) == 36


def test_in_another_thread_no_handler_is_touched():
    api = service()
    before = signal.getsignal(signal.SIGTERM)
    seen = []

    def work():
        with lifecycle.running_deployment(api.client(), SPEC, **api.waits()):
            seen.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [before]
    assert deletes(api) == 1


# Real processes ------------------------------------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys, time
sys.path.insert(0, {tests!r})
from helpers.scripted_api import ScriptedApi, deployment, not_found
from cwtrain.infra import lifecycle

def say(text):
    print(text, flush=True)

gone = []

def get(call):
    return not_found() if gone else deployment("d-1")

def delete(call):
    say("delete")
    {on_delete}
    gone.append(1)
    return deployment("d-1", "STATUS_DELETING")

api = ScriptedApi({{
    "POST /deployments": [deployment("d-1")], "GET /deployments/d-1": [get], "DELETE /deployments/d-1": [delete],
}})
{before}
signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job of a shell would ignore it
before = signal.getsignal(signal.SIGTERM)
try:
    with lifecycle.running_deployment(api.client(), {{"id": "d-1"}}, **api.waits()):
        say("ready")
        {block}
finally:
    say("restored" if signal.getsignal(signal.SIGTERM) == before else "not restored")
say("after")
"""


def run(*, before="", block="time.sleep(60)", on_delete="pass", send=signal.SIGTERM):
    tests = str(Path(__file__).resolve().parents[2])
    code = textwrap.dedent(PROGRAM).format(tests=tests, before=before, block=block, on_delete=on_delete)
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ.copy()
    )
    try:
        line = process.stdout.readline()
        assert line == "ready\n", line + process.stderr.read()
        if send is not None:
            process.send_signal(send)
        out, err = process.stdout.read(), process.stderr.read()  # until it ends; it sleeps 60 s at most
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    return process.returncode, out.split(), err


def test_b13_sigterm_deletes_and_exits_143():
    """B13: kill -TERM in the middle."""
    assert run()[:2] == (143, ["delete", "restored"])


def test_b13_ctrl_c_deletes():
    """B13: Ctrl-C in the middle."""
    code, out, err = run(send=signal.SIGINT)
    assert out == ["delete", "restored"]
    assert code in (-signal.SIGINT, 130)
    assert "KeyboardInterrupt" in err


def test_b13_the_handler_from_before_is_chained_and_restored():
    """B13: it is called after the deletion; what it raises goes on."""
    handler = "signal.signal(signal.SIGTERM, lambda *what: say('chained'))"
    assert run(before=handler)[:2] == (143, ["delete", "chained", "restored"])
    handler = "signal.signal(signal.SIGTERM, lambda *what: sys.exit(77))"
    assert run(before=handler)[:2] == (77, ["delete", "restored"])


def test_b13_sigterm_during_the_deletion_waits_for_its_end():
    """B13: a second signal, or a late first one, does not break the deletion off."""
    again = "os.kill(os.getpid(), signal.SIGTERM)"
    assert run(on_delete=again)[:2] == (143, ["delete", "restored"])
    assert run(on_delete=again, block="pass", send=None)[:2] == (143, ["delete", "restored"])


def test_an_ignored_sigterm_stays_ignored():
    handler = "signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    block = "os.kill(os.getpid(), signal.SIGTERM)"
    assert run(before=handler, block=block, send=None)[:2] == (0, ["delete", "restored", "after"])
