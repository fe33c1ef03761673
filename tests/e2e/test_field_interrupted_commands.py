"""Ctrl-C and SIGTERM while the service works and its answer is held back: what goes on is named, with how to follow it.

Real programs against the emulator, whose fault "hold" does what was asked and keeps the answer. The command that
standard error names is run then, and completes the work without doing it twice. Here each is ended by one of the two
signals; the case "held-answers" of ``tools/field_outages.py`` ends each by both.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from helpers.emulator_api import Api
from helpers.interrupted_commands import check_hot_loads, check_resources, hot_loads, interrupt, make_models
from helpers.run_cli import run

Fixture = Any


@pytest.fixture
def api(emulator: Fixture) -> Any:
    made = Api(emulator.base_url, emulator.admin_token)
    yield made
    made.close()


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    return make_models(tmp_path)


def test_publish_rollback_trigger_and_wait(
    emulator: Fixture, deployment: Fixture, faults: Fixture, api: Api, models: list[str]
) -> None:
    check_hot_loads(emulator, deployment, faults, api, models, signal.SIGTERM)


def test_create_wait_and_delete(emulator: Fixture, faults: Fixture, api: Api, tmp_path: Path) -> None:
    check_resources(emulator, faults, api, tmp_path, signal.SIGINT)


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
