"""The command line with plugins of all sorts: their commands, and that a broken one breaks nothing of core's."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from helpers.run_cli import program, run

GOOD = """
from cwtrain.plugins import hookimpl
@hookimpl
def cwtrain_register_commands(cli):
    import click
    @cli.command()
    @click.option("--code", type=int, default=0)
    def {name}(code):
        "Do what the plugin does."
        click.echo('{{"from": "{name}"}}')
        click.get_current_context().exit(code)
    @cli.command(hidden=True)
    def {name}_kill():
        import os, time
        print("ready", flush=True)
        time.sleep(60)
"""


def install(folder: Path, name: str, source: str) -> None:
    (folder / f"{name}_plugin.py").write_text(source)
    info = folder / f"{name}-1.2.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(f"[cwtrain]\n{name} = {name}_plugin\n")


@pytest.fixture
def env(tmp_path):
    """An environment in which three more plugins are installed: one good, one broken, one with a command of core's."""
    install(tmp_path, "extra", GOOD.format(name="extra"))
    install(tmp_path, "rotten", "import nothing_of_that_name")
    install(tmp_path, "greedy", GOOD.format(name="hotload"))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))}


def test_help_lists_the_commands_of_plugins_and_warns_once_about_a_broken_one(env):
    done = program("--help", env=env)
    assert done.code == 0
    core, _, others = done.out.partition("Commands of plugins:")
    assert "hotload" in core
    assert "extra  " in others
    assert "hotload" not in others
    assert done.err.count("plugin 'rotten'") == 1
    assert "nothing_of_that_name" in done.err
    assert "'hotload' is core's command" in done.err
    assert "Traceback" not in done.err


def test_a_command_of_a_plugin_runs_and_its_exit_code_is_ours(env):
    done = program("extra", env=env)
    assert (done.code, json.loads(done.out)) == (0, {"from": "extra"})
    assert program("extra", "--code", "3", env=env).code == 3
    assert program("extra", "--bogus", env=env).code == 2


def test_core_commands_do_not_load_plugins(env):
    done = program("hotload", "--help", env=env)
    assert (done.code, done.err) == (0, "")
    assert "publish" in done.out


def test_strict_stops_at_the_broken_plugin(env):
    done = program("extra", env={**env, "CWTRAIN_STRICT_PLUGINS": "1"})
    assert (done.code, done.out) == (1, "")
    assert "rotten 1.2" in done.err


def test_disabled_plugins_are_left_alone(env):
    done = program("plugins", "list", env={**env, "CWTRAIN_DISABLED_PLUGINS": "rotten,greedy"})
    rows = {row["name"]: row for row in done.data}
    assert done.err == ""
    assert rows["rotten"]["state"] == rows["greedy"]["state"] == "disabled"
    assert rows["extra"]["state"] == "loaded"
    assert rows["extra"]["provides"] == ["command extra", "command extra-kill"]


def test_plugins_list_shows_what_is_broken_and_doctor_too(env):
    done = program("plugins", "list", env=env)
    assert done.code == 0
    rows = {row["name"]: row for row in done.data}
    assert (rows["rotten"]["state"], rows["rotten"]["distribution"], rows["rotten"]["version"]) == (
        "broken",
        "rotten",
        "1.2",
    )
    assert "nothing_of_that_name" in rows["rotten"]["problems"][0]
    if "slime" in rows:
        assert any(what.startswith("integration slime (") for what in rows["slime"]["provides"])
    names = program("plugins", "list", "-o", "id", env=env).out.split()
    assert names == sorted(rows)
    problems = program("doctor", env={**env, "COREWEAVE_API_URL": "http://127.0.0.1:9"}).data["problems"]
    assert any("rotten" in problem for problem in problems)


SETTINGS = """
from cwtrain.config import Setting, SettingValue
from cwtrain.plugins import hookimpl
@hookimpl
def cwtrain_register_settings():
    size = Setting(field="size", variables=("CWTRAIN_EXTRA_SIZE",), help="how big", default="1")
    return [SettingValue(setting=size, value="1", source="default")]
"""


def test_doctor_shows_the_settings_of_plugins_and_the_variables_that_are_none(tmp_path):
    install(tmp_path, "extra", SETTINGS)
    env = {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])),
        "COREWEAVE_API_URL": "http://127.0.0.1:9",
        "CWTRAIN_EXTRA_COLOUR": "red",
        "CWTRAIN_STRANGER_COLOUR": "red",
    }
    report = program("doctor", env=env).data
    assert {"variables": ["CWTRAIN_EXTRA_SIZE"], "value": "1", "source": "default"} in report["settings"]
    told = [problem for problem in report["problems"] if "COLOUR" in problem]
    assert told == ["CWTRAIN_EXTRA_COLOUR is no setting of what is installed here and has no effect: unset it"]
    broken = program("doctor", env={**env, "CWTRAIN_STRICT_PLUGINS": "maybe"}).data
    assert any("CWTRAIN_STRICT_PLUGINS" in problem for problem in broken["problems"])


def test_traced_calls_are_on_standard_error(env):
    done = program("extra", env={**env, "CWTRAIN_TRACE_PLUGINS": "1"})
    assert "cwtrain_register_commands(cli=Group) -> extra" in done.err
    assert json.loads(done.out) == {"from": "extra"}


def test_a_plugin_command_is_stopped_by_sigterm_with_143(env):
    from helpers.run_cli import start

    process = start("extra-kill", env=env)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert "Traceback" not in err


def complete(words, env):
    environ = {**env, "_CWTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()))}
    done = program(env=environ)
    assert done.err == ""
    return [line.partition(",")[2] for line in done.out.splitlines()]


def test_completion_knows_core_and_the_plugins_whatever_is_wrong_with_one(env):
    offered = complete("cwtrain", env)
    assert offered[:7] == ["deployment", "gateway", "hotload", "snapshot", "plugins", "doctor", "completion"]
    assert "extra" in offered
    assert "publish" in complete("cwtrain hotload", env)


def test_a_foreign_distribution_named_cwtrain_is_reported(tmp_path):
    info = tmp_path / "cwtrain-9.9.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cwtrain\nVersion: 9.9\n")
    env = {"PYTHONPATH": str(tmp_path), "COREWEAVE_API_URL": "http://127.0.0.1:9"}
    report = program("doctor", env=env).data
    assert report["versions"]["cwtrain"] == "9.9"
    assert any("'cwtrain' 9.9" in problem and "pip uninstall cwtrain" in problem for problem in report["problems"])


def test_an_unknown_command_is_wrong_usage():
    assert run("no-such-command").code == 2
