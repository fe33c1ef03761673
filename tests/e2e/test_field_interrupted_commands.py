"""Ctrl-C and SIGTERM while the service works and its answer is held back: what goes on is named, with how to follow it.

Real programs against the emulator, whose fault "hold" does what was asked and keeps the answer. The command that
standard error names is run then, and completes the work without doing it twice.
"""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cwtrain.hotload.delta import write_delta
from helpers.conformance import idle_deployment_body
from helpers.emulator_api import Api
from helpers.run_cli import Done, run, start

Fixture = Any
HELD = 600.0
CODES = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


@pytest.fixture
def api(emulator: Fixture) -> Any:
    made = Api(emulator.base_url, emulator.admin_token)
    yield made
    made.close()


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """A checkpoint of the emulator's engine, and a delta on it."""
    from cwtrain_emulator.engine.model_io import make_model

    for seed in (0, 1):
        make_model(tmp_path / f"full{seed}", vocab_size=16, hidden_size=4, context=4, seed=seed)
    write_delta(tmp_path / "full0", tmp_path / "full1", tmp_path / "delta", version="1", base_version="0")
    return [str(tmp_path / "full0"), str(tmp_path / "delta")]


def until(true: Callable[[], Any]) -> Any:
    """Return what ``true`` returns once it is true."""
    deadline = time.monotonic() + 60
    while not (found := true()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return found


def interrupt(
    faults: Fixture, number: signal.Signals, held: dict[str, Any], done: Callable[[], Any], *words: str, env: Any
) -> Done:
    """Run a command until its answer is held back and ``done`` says that the service has acted; end it by a signal."""
    fault = faults.add(seconds=HELD, **held)
    process = start(*words, env=env)
    try:
        until(lambda: process.poll() is not None or (faults.struck(fault) and done()))
        assert process.poll() is None, process.communicate()
        process.send_signal(number)
        out, err = process.communicate(timeout=30)  # the answer would come much later
    finally:
        process.kill()
        faults.clear()
    return Done(process.returncode, out, err)


def next_command(stopped: Done) -> list[str]:
    """Return the first command that standard error names, as a person copies it."""
    found = re.search(r": cwtrain (.*)$", stopped.err, re.MULTILINE)
    assert found, stopped.err
    return shlex.split(found[1])


def hot_loads(api: Api, deployment: Any) -> list[dict[str, Any]]:
    return [
        one for one in api.ok("GET", "/hotLoads")["hotLoads"] if one["spec"]["deploymentId"] == deployment["spec"]["id"]
    ]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_publish(
    emulator: Fixture, deployment: Fixture, faults: Fixture, api: Api, models: list[str], number: signal.Signals
) -> None:
    words = ("hotload", "publish", "--deployment", deployment["spec"]["id"], "--identity", "v0")
    held = {"target": "api", "kind": "hold", "method": "POST", "path": "hotLoads$"}
    stopped = interrupt(
        faults, number, held, lambda: hot_loads(api, deployment), *words, "--checkpoint", models[0], env=emulator.env
    )
    (made,) = hot_loads(api, deployment)
    assert (stopped.code, stopped.out) == (CODES[number][0], "")
    assert CODES[number][1] in stopped.err
    assert f"hot-load {made['spec']['id']} may go on at the service" in stopped.err
    assert "nothing of it runs" not in stopped.err
    followed = run(*next_command(stopped), env=emulator.env)
    assert followed.data["status"]["state"] == "COMPLETED", followed.err
    again = run(*words, "--checkpoint", models[0], "-o", "id", env=emulator.env)
    assert again.out.strip() == made["spec"]["id"]
    assert len(hot_loads(api, deployment)) == 1


def test_trigger_rollback_and_wait(
    emulator: Fixture, deployment: Fixture, faults: Fixture, api: Api, models: list[str]
) -> None:
    here = ("--deployment", deployment["spec"]["id"])
    for identity, checkpoint in (("v0", models[0]), ("v1", models[1])):
        previous = ("--previous-identity", "v0") if identity == "v1" else ()
        published = run(
            *("hotload", "publish", *here, "--checkpoint", checkpoint, "--identity", identity, *previous),
            env=emulator.env,
        )
        assert published.code == 0, published.err
    held = {"target": "api", "kind": "hold", "method": "POST", "path": "hotLoads$"}
    for count, number, words in (
        (3, signal.SIGTERM, ("hotload", "rollback", *here, "--identity", "v0")),
        (4, signal.SIGINT, ("hotload", "trigger", *here, "--identity", "v1")),
    ):
        before = {one["spec"]["id"] for one in hot_loads(api, deployment)}
        stopped = interrupt(
            faults,
            number,
            held,
            lambda count=count: len(hot_loads(api, deployment)) == count,
            *words,
            env=emulator.env,
        )
        (made,) = {one["spec"]["id"] for one in hot_loads(api, deployment)} - before
        assert (stopped.code, stopped.out) == (CODES[number][0], "")
        assert f"hot-load {made} may go on at the service" in stopped.err
        followed = run(*next_command(stopped), env=emulator.env)
        assert (followed.data["spec"]["id"], followed.data["status"]["state"]) == (made, "COMPLETED")
        assert len(hot_loads(api, deployment)) == count

    # A wait: even its first question may have no answer yet.
    held = {"target": "api", "kind": "hold", "method": "GET", "path": f"hotLoads/{made}$"}
    stopped = interrupt(faults, signal.SIGINT, held, lambda: True, "hotload", "wait", made, env=emulator.env)
    assert (stopped.code, stopped.out) == (130, "")
    followed = run(*next_command(stopped), env=emulator.env)
    assert (followed.data["spec"]["id"], followed.data["status"]["state"]) == (made, "COMPLETED")


def test_create_and_delete(emulator: Fixture, faults: Fixture, api: Api, tmp_path: Path) -> None:
    gateway = api.gateway()["spec"]["id"]
    body = {
        key: value
        for key, value in idle_deployment_body(gateway, emulator.bucket).items()
        if key not in ("id", "organizationId")
    }
    (tmp_path / "spec.json").write_text(json.dumps(body), encoding="utf-8")

    def named() -> list[str]:
        found = api.ok("GET", "/deployments")["items"]
        return [one["spec"]["id"] for one in found if one["spec"]["name"] == body["name"]]

    held = {"target": "api", "kind": "hold", "method": "POST", "path": "deployments$"}
    create = ("deployment", "create", "--file", str(tmp_path / "spec.json"), "--wait")
    stopped = interrupt(faults, signal.SIGINT, held, named, *create, env=emulator.env)
    (made,) = named()
    assert (stopped.code, stopped.out) == (130, "")
    ready = run(*next_command(stopped), env=emulator.env)
    assert (ready.data["id"], ready.data["status"]) == (made, "READY"), ready.err
    assert named() == [made]

    held = {"target": "api", "kind": "hold", "method": "DELETE", "path": "deployments/"}
    stopped = interrupt(
        faults, signal.SIGTERM, held, lambda: True, "deployment", "delete", made, "--wait", env=emulator.env
    )
    assert (stopped.code, stopped.out) == (143, "")
    assert made in stopped.err
    followed = run(*next_command(stopped), env=emulator.env)
    assert followed.code == 0, followed.err
    assert followed.data["id"] == made
    assert named() == []


def test_an_upload_to_a_store_that_does_not_answer(
    emulator: Fixture, deployment: Fixture, faults: Fixture, api: Api, models: list[str]
) -> None:
    words = ("hotload", "publish", "--deployment", deployment["spec"]["id"], "--identity", "v0")
    words = (*words, "--checkpoint", models[0])
    held = {"target": "store", "kind": "hold", "method": "PUT", "path": "safetensors$", "caller": "trainer"}
    stopped = interrupt(faults, signal.SIGINT, held, lambda: True, *words, env=emulator.env)
    assert (stopped.code, stopped.out) == (130, "")
    assert "nothing of it runs at the service; the same command goes on" in stopped.err
    assert "Traceback" not in stopped.err
    assert hot_loads(api, deployment) == []
    done = run(*words, env=emulator.env)
    assert done.data["status"]["state"] == "COMPLETED", done.err


def test_sampling_while_the_service_does_not_say_what_is_served(
    emulator: Fixture, deployment: Fixture, faults: Fixture, models: list[str]
) -> None:
    """The list of hot-loads is asked for in a thread, which the end of the program does not wait for."""
    here = ("--deployment", deployment["spec"]["id"])
    publish = ("hotload", "publish", *here, "--identity", "v0", "--checkpoint", models[0])
    assert run(*publish, env=emulator.env).code == 0
    held = {"target": "api", "kind": "hold", "method": "GET", "path": "hotLoads$"}
    words = ("rollout", "sample", *here, "--prompt-ids", "1,2,3", "--max-tokens", "2")
    stopped = interrupt(faults, signal.SIGINT, held, lambda: True, *words, env=emulator.env)
    assert (stopped.code, stopped.out) == (130, "")
    assert "interrupted" in stopped.err
    assert "Traceback" not in stopped.err


def test_reading_back_from_a_store_that_does_not_answer(
    emulator: Fixture, deployment: Fixture, faults: Fixture, models: list[str]
) -> None:
    here = ("--deployment", deployment["spec"]["id"], "--identity", "v0")
    assert run("hotload", "publish", *here, "--checkpoint", models[0], env=emulator.env).code == 0
    held = {"target": "store", "kind": "hold", "method": "GET", "path": "safetensors$", "caller": "trainer"}
    stopped = interrupt(faults, signal.SIGINT, held, lambda: True, "hotload", "verify", *here, env=emulator.env)
    assert (stopped.code, stopped.out) == (130, "")
    assert "Traceback" not in stopped.err
