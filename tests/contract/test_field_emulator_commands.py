"""The emulator's commands keep the command line's contract, and nobody needs a loop to wait for an emulator."""

from __future__ import annotations

import json
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cwtrain_emulator.faults import KINDS
from helpers.run_cli import Done, program, run

Fixture = Any


def in_shell(exports: str, name: str) -> str:
    """Return a variable as a shell has it that sources ``exports``."""
    done = subprocess.run(
        ["bash", "-c", f'{exports}\nprintf %s "${name}"'], capture_output=True, text=True, timeout=30, check=True
    )
    return done.stdout


def answers(url: str) -> bool:
    host, _, port = url.rpartition("//")[2].partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def test_start_returns_when_everything_answers_and_stop_when_all_has_ended(tmp_path: Path) -> None:
    state = ("--state-dir", str(tmp_path / "state"))
    started = program("emulator", "start", "--env", "--replicas", "1", "--bucket", "another", *state)
    try:
        assert started.code == 0, started.err
        url = in_shell(started.out, "COREWEAVE_API_URL")
        assert answers(url)
        assert run("emulator", "env", *state).out == started.out
        assert f"stop it with: cwtrain emulator stop --state-dir {tmp_path / 'state'}\n" in started.err
        status = run("emulator", "status", *state)
        assert (status.data["emulator"]["bucket"], status.data["emulator"]["replicas"]) == ("another", 1)
        again = program("emulator", "start", *state)
        assert (again.code, again.out) == (1, "")
        assert "another emulator runs" in again.err
    finally:
        env = {name: in_shell(started.out, name) for name in ("COREWEAVE_API_URL", "COREWEAVE_API_TOKEN")}
        stopped = run("emulator", "stop", env=env)
    assert stopped.code == 0, stopped.err
    assert not answers(url)
    assert not answers(in_shell(started.out, "CW_S3_ENDPOINT"))
    for command in ("env", "stop", "status"):
        gone = run("emulator", command, *state)
        assert (gone.code, gone.out) == (1, "")
        assert "start one with: cwtrain emulator" in gone.err


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_what_cannot_start_says_why_and_leaves_nothing(taken: int, tmp_path: Path) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "TMPDIR": str(tmp_path)}
    for words, reason in (
        (("--port", str(taken)), f"port {taken} on 127.0.0.1 is taken"),
        (("--s3-endpoint", "http://127.0.0.1:9"), "cannot be listed"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1"),
    ):
        for command in ("start", "serve"):
            done = program("emulator", command, *words, env=keys)
            assert (done.code, done.out) == (1, ""), words
            assert reason in done.err
            assert "Traceback" not in done.err
        assert list(tmp_path.glob("cwtrain-emulator-*")) == []


def walk(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, item in value.items():
            yield from walk(item, name)
    elif isinstance(value, list):
        for item in value:
            yield from walk(item, key)
    yield key, value


def test_what_commands_print_is_in_snake_case_with_bare_states(
    emulator: Fixture, deployment: Fixture, faults: Fixture, tmp_path: Path
) -> None:
    from cwtrain_emulator.engine.model_io import make_model

    make_model(tmp_path / "m0", vocab_size=16, hidden_size=4, context=4, seed=0)
    here = ("--deployment", deployment["spec"]["id"], "--checkpoint", str(tmp_path / "m0"), "--identity", "STATUS_v0")
    assert run("hotload", "publish", *here, env=emulator.env).code == 0
    added = run("emulator", "faults", "add", "api", "latency", "--seconds", "0", env=emulator.env)
    status = run("emulator", "status", env=emulator.env)
    for done in (added, status, run("emulator", "faults", "list", env=emulator.env)):
        for key, value in walk(done.data):
            assert re.fullmatch(r"[a-z0-9_]*", key), key
            if isinstance(value, str) and key not in ("identity", "name"):
                assert not re.match(r"(HOT_LOAD_STATE|STATUS|SNAPSHOT_TYPE|API_TYPE|TRANSITION_MODE)_", value), (
                    key,
                    value,
                )
    (mine,) = [one for one in status.data["deployments"] if one["id"] == deployment["spec"]["id"]]
    assert (mine["status"], mine["identity"]) == ("READY", "STATUS_v0")
    (hot_load,) = [one for one in status.data["hot_loads"] if one["spec"]["deployment_id"] == mine["id"]]
    assert (hot_load["status"]["state"], hot_load["spec"]["type"]) == ("COMPLETED", "FULL")
    assert hot_load["spec"]["identity"] == "STATUS_v0"


REQUIRED = [
    (target, name, [option for option, about in kind.options.items() if about.required])
    for name, kind in KINDS.items()
    for target in kind.targets
    if any(about.required for about in kind.options.values())
]


def refused(emulator: Fixture, *words: str) -> Done:
    done = run("emulator", "faults", "add", *words, env=emulator.env)
    assert (done.code, done.out) == (2, ""), words
    return done


@pytest.mark.parametrize(("target", "kind", "options"), REQUIRED)
def test_a_fault_without_what_it_needs_is_wrong_usage_with_the_next_step(
    emulator: Fixture, target: str, kind: str, options: list[str]
) -> None:
    done = refused(emulator, target, kind)
    for option in options:
        assert f"{option}: is required" in done.err
        assert f"--{option.replace('_', '-')} " in done.err.partition("next: ")[2]
    error = json.loads(run("--errors", "json", "emulator", "faults", "add", target, kind, env=emulator.env).err)[
        "error"
    ]
    assert error["hint"].startswith(f"cwtrain emulator faults add {target} {kind} ")


def test_options_that_cannot_be_are_wrong_usage(emulator: Fixture) -> None:
    for words in (
        ("api", "slow_down"),
        ("api", "status", "--status", "9"),
        ("api", "status", "--key", "x"),
        ("api", "status", "--path", "("),
        ("store", "latency", "--seconds", "-1"),
    ):
        assert "next: cwtrain emulator faults add" in refused(emulator, *words).err
    assert emulator.control.faults() == []


def test_an_emulator_that_nobody_named_and_a_store_without_keys_are_wrong_usage() -> None:
    for words, env in (
        (("emulator", "status"), {}),
        (("emulator", "stop"), {"COREWEAVE_API_URL": "http://127.0.0.1:9"}),
        (("emulator", "faults", "list"), {}),
        (("emulator", "env"), {}),
        (("emulator", "status", "--url", "127.0.0.1:9"), {"COREWEAVE_API_TOKEN": "x"}),
        (("emulator", "stop"), {"COREWEAVE_API_URL": "nonsense", "COREWEAVE_API_TOKEN": "x"}),
        (("emulator", "serve", "--s3-endpoint", "http://127.0.0.1:9"), {}),
        (("emulator", "start", "--s3-endpoint", "nonsense"), {}),
    ):
        done = run(*words, env=env)
        assert (done.code, done.out) == (2, ""), words
        assert "next: " in done.err
