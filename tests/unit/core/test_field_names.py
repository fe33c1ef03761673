"""A deployment, a gateway, a hot-load are named as people name them, and the command line helps with the rest.

The kind: friction that a person meets at every command: an id to be looked up, a variable that some commands do not
read, an option that works and is in no help, a command that nobody tells how to get.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest

from helpers.run_cli import Done, program, run
from helpers.tiny_api import TinyApi

ONE = "11111111-0000-4000-8000-000000000001"
TWO = "22222222-0000-4000-8000-000000000002"
LOAD = "33333333-0000-4000-8000-000000000003"
AGAIN = "44444444-0000-4000-8000-000000000004"


@pytest.fixture
def api():
    with TinyApi() as server:
        server.gateway("55555555-0000-4000-8000-000000000005", name="gw")
        server.deployment(ONE, name="policy")
        server.hot_load(LOAD, statuses=["COMPLETED"], deployment_id=ONE, identity="step_000001")
        yield server


def call(api, *words, **environ) -> Done:
    return run(*words, env={**api.env, **environ})


@pytest.mark.parametrize("name", ["policy", ONE])
@pytest.mark.parametrize(
    "words",
    [
        "deployment get {}",
        "deployment update {} --disable",
        "deployment delete {}",
        "deployment delete {} --wait",
        "deployment parameters --gateway gw",
        "gateway delete gw",
        "hotload list --deployment {}",
        "hotload status step_000001 --deployment {}",
        "hotload wait step_000001 --deployment {}",
        "hotload wait step_000001",
    ],
)
def test_names_and_ids_are_taken_alike(api, words, name):
    done = call(api, *words.format(name).split())
    assert done.code == 0, done.err
    by_id = {"deployment": ONE, "gateway": "55555555-0000-4000-8000-000000000005", "hotload": LOAD}[words.split()[0]]
    if "parameters" not in words:
        assert by_id in done.out


@pytest.mark.parametrize(
    "words",
    [
        "publish --checkpoint {dir} --identity x",
        "trigger --identity x",
        "rollback --identity x",
        "verify --identity x",
        "check",
        "chain",
        "gc --keep 1",
    ],
)
def test_every_command_of_a_deployment_takes_its_name_also_from_the_environment(api, tmp_path, words):
    """The store refuses at once, without credentials: that the deployment was found is what matters."""
    store = {"CW_S3_ENDPOINT": "http://127.0.0.1:1", "AWS_REGION": "US-EAST-04A"}
    words = ["hotload", *words.format(dir=tmp_path).split()]
    for given, environ in ((["--deployment", "policy"], {}), ([], {"CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "policy"})):
        api.log.clear()
        done = call(api, *words, *given, **store, **environ)
        assert "no deployment" not in done.err
        assert done.code != 2, done.err
        if "publish" not in words:  # which looks at the directory first
            assert f"/deployments/{ONE}" in [path.partition("?")[0] for path in api.paths()]
    refused = call(api, *words, **store)
    assert refused.code == 2
    assert "--deployment" in refused.err


def test_what_names_several_is_refused_with_their_ids(api):
    api.deployment(TWO, name="policy")
    api.hot_load(AGAIN, statuses=["COMPLETED"], deployment_id=ONE, identity="step_000001")
    for words in (
        "deployment delete policy --ignore-not-found",
        "deployment get policy",
        "hotload chain --deployment policy",
    ):
        done = call(api, *words.split())
        assert done.code == 1
        assert ONE in done.err
        assert TWO in done.err
    assert {ONE, TWO} <= set(api.deployments)
    done = call(api, "hotload", "status", "step_000001")
    assert done.code == 1
    assert LOAD in done.err
    assert AGAIN in done.err


def test_what_names_nothing_says_where_to_look(api):
    for words, command in (
        ("deployment delete nobody", "cwtrain deployment list"),
        ("hotload check --deployment nobody", "cwtrain deployment list"),
        ("hotload status nobody", "cwtrain hotload list"),
        ("gateway delete nobody", "cwtrain gateway list"),
    ):
        done = call(api, *words.split())
        assert done.code == 1
        assert "'nobody'" in done.err
        assert command in done.err
    assert json.loads(call(api, "deployment", "delete", "nobody", "--ignore-not-found").out) == {
        "id": "nobody",
        "result": "not_found",
    }


@pytest.mark.parametrize("words", ["hotload publish", "deployment list", "doctor", "plugins list", "snapshot diff"])
def test_help_of_every_command_has_the_global_options(words):
    text = run(*words.split(), "--help").out
    for option in ("--base-url", "--token", "--verbose", "--quiet", "-o, --output", "--errors"):
        assert option in text
    assert text.index("Global options") < text.index("--base-url")


def test_an_argument_is_no_option():
    _, _, options = run("hotload", "status", "--help").out.partition("\nOptions:\n")
    assert options.lstrip().startswith("--deployment")


def test_commands_of_plugins_are_completed():
    for package in ("cwtrain_demo", "cwtrain_emulator", "cwtrain_rollout"):
        pytest.importorskip(package)

    def completed(words, number):
        done = program(env={"_CWTRAIN_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(number)})
        assert done.err == ""
        return [line.partition(",")[2] for line in done.out.splitlines()]

    assert {"deployment", "emulator", "rollout", "demo"} <= set(completed("cwtrain ", 1))
    assert completed("cwtrain emu", 1) == ["emulator"]
    assert "sample" in completed("cwtrain rollout ", 2)
    assert "--prompt-ids" in completed("cwtrain rollout sample --", 3)


def test_a_command_that_is_not_installed_names_its_extra():
    import click

    from cwtrain.cli._group import RootGroup

    group = RootGroup("cwtrain", elsewhere={"demo": "demo"})
    group._plugins_loaded = True  # of an environment without any
    with pytest.raises(click.UsageError, match=r"pip install 'cwtrain-core\[demo\]'"):
        group.resolve_command(click.Context(group), ["demo"])
    with pytest.raises(click.UsageError, match="no command 'demi'"):
        group.resolve_command(click.Context(group), ["demi"])


def test_an_http_request_is_no_line_of_a_trainers_log_unless_it_is_asked_for(api):
    code = (
        "import logging, sys\n"
        "{before}logging.basicConfig(level=logging.INFO, stream=sys.stderr)\n"
        "from cwtrain.infra import InferenceClient\n"
        "with InferenceClient() as client: print(len(client.list_deployments()))\n"
    )

    def said(before):
        import os

        done = subprocess.run(
            [sys.executable, "-c", code.format(before=before)],
            env={**os.environ, **api.env},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout == "1\n"
        return done.stderr

    assert "HTTP Request" not in said("")
    assert "HTTP Request" in said("logging.getLogger('httpx').setLevel(logging.INFO)\n")
    assert logging.getLogger("httpx").level in (logging.NOTSET, logging.WARNING)
