"""Commands that plugins bring honour ``--output`` as core's own do."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from cwtrain.cli._context import GlobalOptions, offer_output
from cwtrain.cli._root import root
from helpers.run_cli import Done, run, start


def leaves(command: click.Command, ctx: click.Context) -> Iterator[tuple[str, list[str]]]:
    """Yield (path, option names) of each command below ``command``."""
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            inner = command.get_command(ctx, name)
            assert inner is not None
            yield from leaves(inner, click.Context(inner, info_name=name, parent=ctx))
    else:
        yield ctx.command_path, [name for param in command.get_params(ctx) for name in param.opts]


def test_every_command_takes_output_after_its_name() -> None:
    ctx = click.Context(root, info_name="cwtrain", obj=GlobalOptions(), **root.context_settings)
    offer_output(ctx)
    found = dict(leaves(root, ctx))
    assert {"cwtrain emulator status", "cwtrain slime check", "cwtrain rollout bench", "cwtrain demo"} <= set(found)
    assert [path for path, names in found.items() if "--output" not in names] == []


def test_commands_to_an_emulator_print_what_is_asked_for(emulator: Any, deployment: Any) -> None:
    deployment_id = deployment["spec"]["id"]

    def call(*words: str) -> Done:
        done = run(*words, env=emulator.env)
        assert done.code == 0, done.err
        return done

    # The emulator is that of other tests, too: what they made may be listed beside.
    assert deployment_id in call("-o", "id", "emulator", "status").out.split()
    assert "deployments" in call("--output", "table", "emulator", "status").out.split("\n", 1)[1]
    (line,) = call("emulator", "status", "--output", "jsonl").out.splitlines()
    assert deployment_id in [one["id"] for one in json.loads(line)["deployments"]]
    assert deployment_id in [one["id"] for one in call("emulator", "status").data["deployments"]]
    fault = call("--output", "id", "emulator", "faults", "add", "api", "latency", "--seconds", "0").out.strip()
    listed = call("emulator", "faults", "list", "-o", "jsonl").out.splitlines()
    assert fault in [json.loads(one)["id"] for one in listed]
    head, _, *rows = call("emulator", "faults", "list", "-o", "table").out.strip().splitlines()
    assert head.split()[0] == "id"
    assert fault in [row.split()[0] for row in rows]
    assert call("--output", "jsonl", "emulator", "faults", "clear").out == ""


def test_a_command_without_ids_says_so_before_it_does_anything(emulator: Any, deployment: Any) -> None:
    for words in (
        ("emulator", "reset"),
        ("emulator", "serve"),
        ("rollout", "bench", "--deployment", deployment["spec"]["id"]),
        ("doctor",),
    ):
        refused = run("--output", "id", *words, env=emulator.env)
        assert (refused.code, refused.out) == (2, "")
        assert "this command has no ids to print" in refused.err
    assert emulator.control.status()["deployments"]


def test_serve_prints_a_table_where_one_is_asked_for(tmp_path: Path) -> None:
    process = start("--output", "table", "emulator", "serve", "--state-dir", str(tmp_path / "state"))
    assert process.stdout is not None
    rows: dict[str, str] = {}
    base_url = ""
    try:
        for line in process.stdout:
            words = line.split()
            if words[:2] == ["base", "URL"]:
                base_url = words[2]
            if len(words) == 2:
                rows[words[0]] = words[1]
            if "AWS_REGION" in rows:
                break
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert rows["COREWEAVE_API_URL"] == base_url


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_findings_are_rows_of_a_table_and_their_names_are_ids(tmp_path: Path, trainer: str) -> None:
    words = (trainer, "check", "--hf-checkpoint", str(tmp_path / "nowhere"))
    report = run(*words)
    names = [finding["name"] for finding in report.data["findings"]]
    assert "base-missing" in names
    assert run("--output", "id", *words).out.split() == names
    (line,) = run(*words, "-o", "jsonl").out.splitlines()
    assert json.loads(line) == report.data
    table = run(*words, "--output", "table")
    head, _, *rows = table.out.strip().splitlines()
    assert (table.code, head.split()) == (report.code, ["level", "name", "message", "fix"])
    assert [row.split()[1] for row in rows] == names
