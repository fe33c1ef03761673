"""What a person is told is what is so: a publish that had nothing to do, replicas that serve nothing.

The kind: an answer that is right for a program, and leaves out what a person would call the news.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cwtrain_emulator.engine.model_io import make_model
from helpers.emulator_api import Api
from helpers.run_cli import run


def test_a_repeated_publish_says_that_it_was_served_already(
    emulator: Any, deployment: dict[str, Any], tmp_path: Path
) -> None:
    make_model(tmp_path / "base", vocab_size=64, hidden_size=8, context=2, seed=0)
    words = ["hotload", "publish", "--deployment", deployment["spec"]["name"], "--checkpoint", str(tmp_path / "base")]
    first = run(*words, "--identity", "one", env=emulator.env)
    assert first.code == 0, first.err
    assert "already" not in first.err
    again = run(*words, "--identity", "one", env=emulator.env)
    assert again.code == 0
    assert again.data["spec"]["id"] == first.data["spec"]["id"]
    assert "one is served already" in again.err
    trigger = ["hotload", "trigger", "--deployment", deployment["spec"]["name"], "--identity", "one"]
    assert "one is served already" in run(*trigger, env=emulator.env).err
    assert "already" not in run(*words, "--identity", "two", env=emulator.env).err


def test_the_page_says_error_while_the_replicas_are(
    emulator: Any, service: Api, deployment: dict[str, Any], tmp_path: Path
) -> None:
    name = deployment["spec"]["name"]
    make_model(tmp_path / "base", vocab_size=64, hidden_size=8, context=2, seed=0)

    def shown() -> dict[str, Any]:
        return next(one for one in service.own("/page")["deployments"] if one["name"] == name)

    assert shown()["status"] == "READY"
    emulator.control.add_fault("replica", "damage", identity="broken")
    words = ["hotload", "publish", "--deployment", name, "--checkpoint", str(tmp_path / "base")]
    assert run(*words, "--identity", "broken", env=emulator.env).code == 1
    page = shown()
    assert {replica["state"] for replica in page["replicas"]} == {"ERROR"}
    assert page["status"] == "ERROR"
    assert page["reason"]
    assert run(*words, "--identity", "whole", env=emulator.env).code == 0
    assert shown()["status"] == "READY"
