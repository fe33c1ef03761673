"""Commands that a signal ends while their answer is held back: what they say, and what the command they name does."""

from __future__ import annotations

import json
import re
import shlex
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cwtrain.hotload.delta import write_delta
from helpers.conformance import idle_deployment_body
from helpers.run_cli import Done, run, start

Fixture = Any
HELD = 600.0
CODES = {signal.SIGINT: (130, "interrupted"), signal.SIGTERM: (143, "terminated")}


def make_models(folder: Path) -> list[str]:
    """Write a checkpoint of the emulator's engine, and a delta on it; return their directories."""
    from cwtrain_emulator.engine.model_io import make_model

    for seed in (0, 1):
        make_model(folder / f"full{seed}", vocab_size=16, hidden_size=4, context=4, seed=seed)
    write_delta(folder / "full0", folder / "full1", folder / "delta", version="1", base_version="0")
    return [str(folder / "full0"), str(folder / "delta")]


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


def hot_loads(api: Any, deployment: Any) -> list[dict[str, Any]]:
    return [
        one for one in api.ok("GET", "/hotLoads")["hotLoads"] if one["spec"]["deploymentId"] == deployment["spec"]["id"]
    ]


def check_hot_loads(
    emulator: Fixture, deployment: Fixture, faults: Fixture, api: Any, models: list[str], number: signal.Signals
) -> None:
    """End publish, rollback, trigger and wait by ``number``; each is followed to its COMPLETED end, done once."""
    here = ("--deployment", deployment["spec"]["id"])
    held = {"target": "api", "kind": "hold", "method": "POST", "path": "hotLoads$"}
    delta = ("--checkpoint", models[1], "--identity", "v1", "--previous-identity", "v0")
    for words in (
        ("hotload", "publish", *here, "--checkpoint", models[0], "--identity", "v0"),
        ("hotload", "publish", *here, *delta),
        ("hotload", "rollback", *here, "--identity", "v0"),
        ("hotload", "trigger", *here, "--identity", "v1"),
    ):
        before = {one["spec"]["id"] for one in hot_loads(api, deployment)}
        if words[1] == "publish" and before:  # the second is only what the others need
            assert run(*words, env=emulator.env).code == 0
            continue
        stopped = interrupt(
            faults,
            number,
            held,
            lambda before=before: len(hot_loads(api, deployment)) > len(before),
            *words,
            env=emulator.env,
        )
        (made,) = {one["spec"]["id"] for one in hot_loads(api, deployment)} - before
        assert (stopped.code, stopped.out) == (CODES[number][0], "")
        assert CODES[number][1] in stopped.err
        assert f"hot-load {made} may go on at the service" in stopped.err
        assert "nothing of it runs" not in stopped.err
        followed = run(*next_command(stopped), env=emulator.env)
        assert (followed.data["spec"]["id"], followed.data["status"]["state"]) == (made, "COMPLETED"), followed.err
        if words[1] == "publish":
            assert run(*words, "-o", "id", env=emulator.env).out.strip() == made
        assert len(hot_loads(api, deployment)) == len(before) + 1

    # A wait: even its first question may have no answer yet.
    count = len(hot_loads(api, deployment))
    held = {"target": "api", "kind": "hold", "method": "GET", "path": f"hotLoads/{made}$"}
    stopped = interrupt(faults, number, held, lambda: True, "hotload", "wait", made, env=emulator.env)
    assert (stopped.code, stopped.out) == (CODES[number][0], "")
    followed = run(*next_command(stopped), env=emulator.env)
    assert (followed.data["spec"]["id"], followed.data["status"]["state"]) == (made, "COMPLETED")
    assert len(hot_loads(api, deployment)) == count


def check_resources(emulator: Fixture, faults: Fixture, api: Any, folder: Path, number: signal.Signals) -> None:
    """End the create, the wait and the delete of a deployment by ``number``; each is gone on with by what is named."""
    body = {
        key: value
        for key, value in idle_deployment_body(api.gateway()["spec"]["id"], emulator.bucket).items()
        if key not in ("id", "organizationId")
    }
    (folder / "spec.json").write_text(json.dumps(body), encoding="utf-8")

    def named() -> list[str]:
        found = api.ok("GET", "/deployments")["items"]
        return [one["spec"]["id"] for one in found if one["spec"]["name"] == body["name"]]

    held = {"target": "api", "kind": "hold", "method": "POST", "path": "deployments$"}
    words: tuple[str, ...] = ("deployment", "create", "--file", str(folder / "spec.json"), "--wait")
    stopped = interrupt(faults, number, held, named, *words, env=emulator.env)
    (made,) = named()
    assert (stopped.code, stopped.out) == (CODES[number][0], "")
    assert made in stopped.err

    held = {"target": "api", "kind": "hold", "method": "GET", "path": f"deployments/{made}$"}
    again = next_command(stopped)
    stopped = interrupt(faults, number, held, lambda: True, *again, env=emulator.env)
    assert (stopped.code, stopped.out) == (CODES[number][0], "")
    assert next_command(stopped) == again
    ready = run(*again, env=emulator.env)
    assert (ready.data["id"], ready.data["status"]) == (made, "READY"), ready.err
    assert named() == [made]

    held = {"target": "api", "kind": "hold", "method": "DELETE", "path": "deployments/"}
    stopped = interrupt(faults, number, held, lambda: True, "deployment", "delete", made, "--wait", env=emulator.env)
    assert (stopped.code, stopped.out) == (CODES[number][0], "")
    assert made in stopped.err
    followed = run(*next_command(stopped), env=emulator.env)
    assert followed.code == 0, followed.err
    assert followed.data["id"] == made
    assert named() == []
