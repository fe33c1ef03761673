"""The command line without a service: usage, exit codes, output formats, errors, specs, inspection."""

from __future__ import annotations

import errno
import json
import os
import re

import click
import pytest

from cwtrain.cli._errors import report
from cwtrain.cli._output import Output
from cwtrain.cli._root import root
from cwtrain.errors import APIError, ConfigError, SnapshotError, StorageRegionError
from helpers.run_cli import program, run, without_override
from helpers.snapshot_files import DELTA_METADATA, write_delta, write_full

TENSORS = {"a": ("BF16", [2], b"\x01\x02\x03\x04"), "b": ("F32", [1], b"\x05\x06\x07\x08")}
CHANGED = {"a": ("BF16", [2], b"\x01\x02\x03\x09"), "b": TENSORS["b"]}
UUID = "2f3c0000-0000-4000-8000-000000000001"

# The issue's table: command -> {option: default}. Required options have `...`.
TABLE = {
    "deployment create": {"--file": ..., "--wait": False, "--timeout": 3600.0},
    "deployment get": {},
    "deployment wait": {"--timeout": 3600.0},
    "deployment list": {},
    "deployment update": {"--file": None, "--disable": None},
    "deployment delete": {"--wait": False, "--timeout": 600.0, "--ignore-not-found": False},
    "deployment parameters": {"--gateway": ()},
    "gateway create": {"--file": ..., "--wait": False, "--timeout": 600.0},
    "gateway get": {},
    "gateway wait": {"--timeout": 600.0},
    "gateway list": {},
    "gateway delete": {"--wait": False, "--timeout": 600.0, "--ignore-not-found": False},
    "gateway parameters": {},
    "hotload inspect": {"--previous-identity": None, "--verify": False, "--base": None},
    "hotload publish": {
        "--deployment": ...,
        "--checkpoint": ...,
        "--identity": ...,
        "--previous-identity": None,
        "--base-version": None,
        "--reset-prompt-cache": False,
        "--no-wait": True,
        "--timeout": 1800.0,
        "--deadline": None,
        "--workers": 8,
        "--dry-run": False,
    },
    "hotload trigger": {
        "--deployment": ...,
        "--identity": ...,
        "--previous-identity": None,
        "--reset-prompt-cache": False,
        "--no-wait": True,
        "--timeout": 1800.0,
    },
    "hotload wait": {"--deployment": None, "--timeout": 1800.0},
    "hotload status": {"--deployment": None},
    "hotload cancel": {"--deployment": None},
    "hotload list": {"--deployment": None, "--limit": 20},
    "hotload rollback": {"--deployment": ..., "--identity": ..., "--no-wait": True, "--timeout": 1800.0},
    "hotload verify": {"--deployment": ..., "--identity": ...},
    "hotload chain": {"--deployment": ...},
    "hotload gc": {"--deployment": ..., "--keep": ..., "--yes": False},
    "hotload resume-info": {"--deployment": None, "--run": ...},
    "hotload check": {"--deployment": ...},
    "snapshot diff": {"--version": None, "--base-version": None, "--workers": None},
    "snapshot apply": {"--workers": None},
    "snapshot full": {"--workers": None},
    "snapshot convert": {"--workers": None},
    "snapshot verify": {"--base": None},
    "snapshot show": {"--workers": None},
    "plugins list": {},
    "doctor": {"--strict": False},
    "completion": {},
}


def leaves(command, ctx, path=()):
    if isinstance(command, click.Group):
        for name in command.list_commands(ctx):
            if path or name in root._lazy:
                yield from leaves(command.get_command(ctx, name), ctx, (*path, name))
    else:
        yield " ".join(path), command


def default(option):
    value = option.to_info_dict()["default"]
    return () if option.multiple and value is None else value


def test_commands_options_and_defaults_are_those_of_the_table():
    ctx = click.Context(root, resilient_parsing=True)
    found = {}
    for name, command in leaves(root, ctx):
        options = [param for param in command.params if isinstance(param, click.Option)]
        found[name] = {option.opts[0]: ... if option.required else default(option) for option in options}
    assert found == TABLE


def test_global_options_are_accepted_before_the_group_and_after_the_command():
    assert run("--output", "id", "plugins", "list").out == run("plugins", "list", "--output", "id").out
    assert run("--output", "table", "plugins", "list", "-o", "id").out == run("plugins", "list", "-o", "id").out


@pytest.mark.parametrize(
    "args",
    [
        ["bogus"],
        ["hotload"],
        ["hotload", "bogus"],
        ["hotload", "publish"],
        ["--output", "yaml", "plugins", "list"],
        ["hotload", "list", "--limit", "0"],
        ["hotload", "list", "--limit", "-3"],
        ["hotload", "list", "--limit", "2.5"],
        ["hotload", "wait", "x", "--timeout", "0"],
        ["hotload", "wait", "x", "--timeout", "-1"],
        ["hotload", "wait", "x", "--timeout", "nan"],
        ["hotload", "wait", "x", "--timeout", "inf"],
        ["hotload", "wait", "x", "--timeout", "soon"],
        ["hotload", "check", "--deployment", " "],
        ["hotload", "inspect", "/no/such/directory"],
        ["deployment", "create", "--file", "/no/such/file"],
        ["deployment", "update", UUID],
        ["completion", "powershell"],
    ],
)
def test_wrong_usage_is_exit_2_with_nothing_on_standard_output(args):
    done = run(*args)
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert "next: cwtrain" in done.err
    assert "Traceback" not in done.err


@pytest.mark.parametrize("workers", ["0", "-1", "1.5", "many"])
def test_workers_is_a_positive_whole_number(workers, tmp_path):
    write_full(tmp_path, TENSORS)
    done = run(
        *("hotload", "publish", "--deployment", UUID, "--checkpoint", str(tmp_path), "--identity", "v1"),
        *("--workers", workers),
    )
    assert (done.code, done.out) == (2, "")
    assert "--workers" in done.err


@pytest.mark.parametrize("identity", ["initial", "..", "a/b", "", "x" * 129, "_manifests"])
def test_an_identity_that_cannot_be_published_is_wrong_usage(identity, tmp_path):
    write_full(tmp_path, TENSORS)
    done = run("hotload", "publish", "--deployment", UUID, "--checkpoint", str(tmp_path), "--identity", identity)
    assert (done.code, done.out) == (2, "")
    assert "--identity" in done.err


def test_a_misspelt_command_is_told_the_nearest():
    assert "did you mean 'publish'" in run("hotload", "publsh").err


def test_help_and_version_are_exit_0():
    for args in ([], ["--help"], ["-h"], ["hotload", "publish", "--help"]):
        done = run(*args)
        assert (done.code, done.err) == (0, "")
        assert done.out.startswith("Usage: cwtrain")
    assert set(run("--version").data) == {"cwtrain-core"}


def test_every_command_has_help_that_begins_with_a_verb_and_an_example():
    ctx = click.Context(root, resilient_parsing=True)
    for name, command in leaves(root, ctx):
        assert re.match(r"[A-Z][a-z-]+ .*\.", command.help or ""), name
        assert f"cwtrain {name}" in command.example.replace("--output table ", ""), name


def test_errors_can_be_json_also_when_the_rest_cannot_be_parsed():
    done = run("--errors", "json", "hotload", "publish")
    error = json.loads(done.err)["error"]
    assert done.code == 2
    assert set(error) == {"type", "code", "message", "hint", "request_id"}
    assert error["type"] == "MissingParameter"
    assert json.loads(run("hotload", "wait", "x", "--timeout", "0", "--errors=json").err)["error"]["hint"]


def test_a_missing_token_is_a_matter_of_configuration():
    done = run("deployment", "list")
    assert (done.code, done.out) == (2, "")
    assert "COREWEAVE_API_TOKEN" in done.err


def test_a_token_on_the_command_line_is_warned_about_and_never_shown():
    done = run("--token", "s3cret s3cret", "deployment", "list")
    assert done.code == 2
    assert "warning: " in done.err
    assert "s3cret" not in done.err


def test_verbose_adds_the_traceback_and_quiet_takes_everything_but_errors():
    assert "Traceback" in run("--verbose", "deployment", "list").err
    assert "Traceback" in run("deployment", "list", "--verbose").err
    assert "warning" not in run("--quiet", "--token", "a b", "deployment", "list").err
    assert "error: " in run("--quiet", "deployment", "list").err


def test_the_root_says_of_each_group_what_the_group_says_of_itself():
    about = root._about
    with click.Context(root, resilient_parsing=True) as ctx:
        commands = {name: root.get_command(ctx, name) for name in root._lazy}
    assert about == {name: command.get_short_help_str(1000) for name, command in commands.items()}


# -- specs ------------------------------------------------------------------------------------------------------------


def create(text):
    return run("deployment", "create", "--file", "-", stdin=text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"a": NaN}', "NaN is no number of JSON"),
        ('{"a": ' * 100_000, "not JSON that can be sent"),
        ('{"a": "\\ud800"}', "not UTF-8 text"),
        ('{"a": 1,\n "b"}', "line 2"),
        ("[1]", "must hold a JSON object, not an array"),
        ('"x"', "not a string"),
        ("null", "not null"),
        ("3", "not a number"),
    ],
)
def test_a_spec_that_is_no_json_object_is_refused(text, words):
    done = create(text)
    assert (done.code, done.out) == (2, "")
    assert words in done.err


def test_placeholders_are_refused_naming_each_path_outside_the_free_parts():
    spec = {
        "name": "<name>",
        "gatewayIds": ["ok", "<gateway-id>"],
        "runtime": {
            "engine": "dynamo-vllm",
            "version": "<version>",
            "engineConfig": {"chat-template": "<|im_start|>"},
            "engineEnv": {"X": "<free>"},
        },
        "model": {"bucket": "weights-<zone>", "path": "a < b", "odd key": {"x": "<y>"}},
        "autoscaling": {"min": 1},
    }
    done = create(json.dumps(spec))
    assert (done.code, done.out) == (2, "")
    for path in (
        "$.name (<name>)",
        "$.gatewayIds[1] (<gateway-id>)",
        "$.runtime.version (<version>)",
        "$.model.bucket (weights-<zone>)",
        '$.model["odd key"].x (<y>)',
    ):
        assert path in done.err
    assert "im_start" not in done.err
    assert "<free>" not in done.err
    assert "$.model.path" not in done.err


def test_a_spec_without_placeholders_gets_as_far_as_the_token(tmp_path):
    file = tmp_path / "spec.json"
    file.write_text("\ufeff" + json.dumps({"runtime": {"engineConfig": {"a": "<b>"}}}), encoding="utf-8")
    done = run("deployment", "create", "--file", str(file))
    assert done.code == 2
    assert "COREWEAVE_API_TOKEN" in done.err
    assert "creating" not in done.err


# -- inspect ----------------------------------------------------------------------------------------------------------


def test_inspect_prints_what_a_full_snapshot_is(tmp_path):
    write_full(tmp_path, TENSORS)
    done = run("hotload", "inspect", str(tmp_path))
    assert done.code == 0, done.err
    assert {
        "path",
        "type",
        "files",
        "total_bytes",
        "empty_delta",
        "incremental",
        "index_metadata",
        "index_generated",
    } <= (set(done.data))
    assert done.data["type"] == "FULL"
    assert run("hotload", "inspect", str(tmp_path), "-o", "id").out == f"{tmp_path}\n"


def test_inspect_says_everything_that_is_wrong_and_prints_nothing(tmp_path):
    write_full(tmp_path, TENSORS)
    (tmp_path / "config.json").unlink()
    (tmp_path / "model-00001-of-00001.safetensors").write_bytes(b"<html>")
    done = run("hotload", "inspect", str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert "config.json" in done.err
    assert "model-00001-of-00001.safetensors" in done.err


def test_inspect_verifies_a_delta_against_its_base(tmp_path):
    write_full(tmp_path / "base", TENSORS)
    write_full(tmp_path / "other", CHANGED)
    write_delta(tmp_path / "delta", TENSORS, CHANGED)
    good = run("hotload", "inspect", str(tmp_path / "delta"), "--verify", "--base", str(tmp_path / "base"))
    assert good.code == 0, good.err
    assert (
        good.data["incremental"]["previous_snapshot_identity"] == "weight_v000000" if good.data["incremental"] else True
    )
    bad = run("hotload", "inspect", str(tmp_path / "delta"), "--verify", "--base", str(tmp_path / "other"))
    assert (bad.code, bad.out) == (1, "")
    assert run("hotload", "inspect", str(tmp_path / "delta"), "--base", str(tmp_path / "base")).code == 2


def test_a_delta_whose_predecessor_is_unknown_is_wrong_usage_that_says_how(tmp_path):
    write_delta(tmp_path, TENSORS, CHANGED, metadata={**DELTA_METADATA, "base_version": "step_7"})
    done = run("hotload", "publish", "--deployment", UUID, "--checkpoint", str(tmp_path), "--identity", "v2")
    assert (done.code, done.out) == (2, "")
    assert "--previous-identity" in done.err
    assert f"cwtrain hotload list --deployment {UUID}" in done.err
    assert run("hotload", "inspect", str(tmp_path)).code == 2
    given = run("hotload", "inspect", str(tmp_path), "--previous-identity", "step_7")
    assert given.data["incremental"]["previous_snapshot_identity"] == "step_7"


def test_an_index_that_is_a_pipe_is_refused_and_not_waited_for(tmp_path):
    write_full(tmp_path, TENSORS)
    os.unlink(tmp_path / "model.safetensors.index.json")
    os.mkfifo(tmp_path / "model.safetensors.index.json")
    done = program("hotload", "inspect", str(tmp_path))
    assert (done.code, done.out) == (1, "")
    assert "model.safetensors.index.json: is a named pipe" in done.err


def test_a_directory_that_this_user_may_not_read_is_named(tmp_path):
    write_full(tmp_path, TENSORS)
    (tmp_path / "config.json").chmod(0)
    done = program("snapshot", "verify", str(tmp_path), before=without_override)
    assert (done.code, done.out) == (1, "")
    assert "config.json: cannot be read: Permission denied" in done.err


# -- output -----------------------------------------------------------------------------------------------------------


def test_formats(capfdbinary):
    rows = [{"id": "a", "spec": {"x": 1, "y": None}}, {"id": "bé\udc80", "tags": ["p", "q"], "more": [{"z": True}]}]

    def written(output, value, **more):
        Output(output).data(value, **more)
        return capfdbinary.readouterr().out.decode("utf-8")

    assert json.loads(written("json", rows)) == rows
    assert written("json", {"a": "é"}) == '{\n  "a": "é"\n}\n'
    assert [json.loads(line) for line in written("jsonl", rows).splitlines()] == rows
    assert written("jsonl", {"a": 1}) == '{"a": 1}\n'
    assert written("id", rows, ids=["a", "b"]) == "a\nb\n"
    assert written("id", [], ids=[]) == ""
    table = written("table", [{"id": "a", "spec": {"x": 1}}, {"id": "b", "tags": ["p", "q"]}])
    assert table.split() == [*("id", "x", "tags"), "─" * len(table.split()[3]), *("a", "1", "b", "p,", "q")]
    assert "x" not in written("table", [{"id": "a", "spec": {"x": 1}}], columns=("id",))
    assert written("table", {"id": "a"}) == "id  a\n"
    long = "x" * 300
    assert long in written("table", {"id": long})
    assert "\x1b" not in table
    with pytest.raises(click.UsageError, match="no ids"):
        Output("id").data({})


def test_reports_name_code_and_request_once():
    told = report(APIError("no such thing", code="not_found", request_id="7c1f", hint="look again"))
    assert told.text() == "error: no such thing (NOT_FOUND, request 7c1f)\n  next: look again"
    told = report(APIError("no such thing (NOT_FOUND, request 7c1f)", code="not_found", request_id="7c1f"))
    assert told.text() == "error: no such thing (NOT_FOUND, request 7c1f)"


def test_exit_codes_of_errors():
    assert report(ConfigError("x")).exit_code == 2
    assert report(SnapshotError("x")).exit_code == 1
    assert (
        report(FileNotFoundError(2, "No such file", "/x")).text() == "error: /x: No such file\n  next: check the path"
    )
    assert report(StorageRegionError("no region is set")).exit_code == 2
    assert report(StorageRegionError("the store does not accept the region", status=400)).exit_code == 1
    codes = (errno.ENOSPC, errno.EROFS, errno.EMFILE, errno.EIO)
    assert all(report(OSError(code, os.strerror(code), "/x")).hint for code in codes)
    internal = report(KeyError("x"))
    assert internal.exit_code == 1
    assert "--verbose" in (internal.hint or "")


def test_notes_of_an_error_are_told():
    error = SnapshotError("vetoed", hint="wait")
    error.add_note("raised by plugin 'x'")
    assert report(error).text() == "error: vetoed\n  raised by plugin 'x'\n  next: wait"
    assert json.loads(report(error).json())["error"]["notes"] == ["raised by plugin 'x'"]


def test_completion_prints_the_script_of_each_shell():
    for shell, word in (("bash", "complete -o nosort"), ("zsh", "#compdef cwtrain"), ("fish", "complete --no-files")):
        done = run("completion", shell)
        assert done.code == 0
        assert word in done.out
