"""What is told to people never fails the work: standard error closed, full or with nobody reading, in every command.

The commands are those that the command line really has, plugins' among them, so that a new one cannot be left out. And
standard output that takes nothing is an error with its documented code, never a traceback.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import click
import pytest

from cwtrain.cli import main
from cwtrain.cli._context import GlobalOptions, offer_output
from cwtrain.cli._root import root
from helpers.trainer_lines import flags

GATEWAY = {
    "name": "broken-stderr",
    "zones": ["US-EAST-04A"],
    "coreWeaveAuth": {},
    "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
}
APART = {"cwtrain emulator serve", "cwtrain emulator start", "cwtrain emulator stop", "cwtrain emulator env"}
"""Commands that a test of their own runs, as processes."""


def leaves(command: click.Command, ctx: click.Context) -> Iterator[str]:
    """Yield the path of each command below ``command``."""
    if not isinstance(command, click.Group):
        yield ctx.command_path
        return
    for name in command.list_commands(ctx):
        inner = command.get_command(ctx, name)
        assert inner is not None
        yield from leaves(inner, click.Context(inner, info_name=name, parent=ctx))


@contextlib.contextmanager
def full() -> Iterator[Any]:
    # Unbuffered below, so that nothing is left to be written when it is closed.
    with io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True) as file:
        yield file


@contextlib.contextmanager
def gone() -> Iterator[Any]:
    reader, writer = os.pipe()
    os.close(reader)
    with io.TextIOWrapper(open(writer, "wb", buffering=0), write_through=True) as file:
        yield file


@contextlib.contextmanager
def closed() -> Iterator[Any]:
    file = open(os.devnull, "w")  # noqa: SIM115
    file.close()
    yield file


@contextlib.contextmanager
def none() -> Iterator[Any]:
    yield None


@pytest.fixture(scope="module")
def own_emulator() -> Iterator[Any]:
    """An emulator of this module's own: one of the commands forgets everything that it has."""
    from cwtrain_emulator.emulator import Emulator

    with Emulator() as running:
        yield running


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cwtrain_emulator.engine.model_io import make_model

    folder = tmp_path_factory.mktemp("models")
    for seed in (0, 1):
        make_model(folder / f"full{seed}", vocab_size=16, hidden_size=4, context=4, seed=seed)
    return folder


def story(models: Path, tmp: Path, bucket: str) -> list[tuple[str, Callable[[dict[str, str]], list[str]], int, str]]:
    """Return what is run, in turn: command, its arguments from the ids so far, exit code, the name of its id."""
    gateway, spec = tmp / "gateway.json", tmp / "deployment.json"
    gateway.write_text(json.dumps(GATEWAY), encoding="utf-8")

    def deployment(ids: dict[str, str]) -> list[str]:
        body = {
            "name": "broken-stderr",
            "gatewayIds": [ids["gateway"]],
            "runtime": {"engine": "dynamo-vllm"},
            "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
            "model": {"name": "broken-stderr", "bucket": bucket, "path": "broken-stderr/base"},
            "autoscaling": {"min": 1, "max": 1, "concurrency": 4},
            "traffic": {"weight": 100},
            "hotLoad": {"bucket": bucket, "pathPrefix": "broken-stderr", "transitionMode": "TRANSITION_MODE_ASYNC"},
        }
        spec.write_text(json.dumps(body), encoding="utf-8")
        return ["--file", str(spec), "--wait"]

    full0, full1, delta = (str(models / "full0"), str(models / "full1"), str(tmp / "delta"))

    def here(*words: str) -> Callable[[dict[str, str]], list[str]]:
        return lambda ids: ["--deployment", ids["deployment"], *words]

    def of(name: str, *words: str) -> Callable[[dict[str, str]], list[str]]:
        return lambda ids: [ids[name], *words]

    def just(*words: str) -> Callable[[dict[str, str]], list[str]]:
        return lambda ids: list(words)

    return [
        ("plugins list", just(), 0, ""),
        ("completion", just("bash"), 0, ""),
        ("gateway parameters", just(), 0, ""),
        ("gateway create", just("--file", str(gateway), "--wait"), 0, "gateway"),
        ("gateway get", of("gateway"), 0, ""),
        ("gateway wait", of("gateway"), 0, ""),
        ("gateway list", just(), 0, ""),
        ("deployment parameters", just(), 0, ""),
        ("deployment create", deployment, 0, "deployment"),
        ("deployment get", of("deployment"), 0, ""),
        ("deployment wait", of("deployment"), 0, ""),
        ("deployment list", just(), 0, ""),
        ("snapshot diff", just(full0, full1, delta), 0, ""),
        ("snapshot apply", just(full0, delta, str(tmp / "applied")), 0, ""),
        ("snapshot full", just(full0, str(tmp / "whole")), 0, ""),
        ("snapshot convert", just(full0, delta, str(tmp / "converted")), 0, ""),
        ("snapshot verify", just(delta, "--base", full0), 0, ""),
        ("snapshot show", just(delta), 0, ""),
        ("hotload inspect", just(full0), 0, ""),
        ("hotload check", here(), 0, ""),
        ("hotload publish", here("--checkpoint", full0, "--identity", "v0"), 0, "first"),
        (
            "hotload publish",
            here("--checkpoint", delta, "--identity", "v1", "--previous-identity", "v0"),
            0,
            "second",
        ),
        ("hotload wait", of("second"), 0, ""),
        ("hotload status", of("second"), 0, ""),
        ("hotload cancel", of("second"), 1, ""),  # the service does not offer it
        ("hotload list", here(), 0, ""),
        ("hotload rollback", here("--identity", "v0"), 0, ""),
        ("hotload trigger", here("--identity", "v1"), 0, ""),
        ("hotload verify", here("--identity", "v0"), 0, ""),
        ("hotload chain", here(), 0, ""),
        ("hotload gc", here("--keep", "1"), 0, ""),
        ("hotload resume-info", here("--run", "run"), 0, ""),
        ("doctor", just(), 0, ""),
        ("rollout sample", here("--prompt-ids", "1,2,3", "--max-tokens", "2"), 0, ""),
        ("rollout bench", here("--seconds", "0.2", "--max-tokens", "2"), 0, ""),
        ("slime check", lambda ids: flags("slime", tmp, models / "full0"), 1, ""),  # no deployment is named
        ("miles check", lambda ids: flags("miles", tmp, models / "full0"), 1, ""),
        ("demo", just("--steps", "2", "--replicas", "1", "--state-dir", str(tmp / "demo")), 0, ""),
        ("emulator status", just(), 0, ""),
        ("emulator faults add", just("api", "latency", "--seconds", "0"), 0, ""),
        ("emulator faults list", just(), 0, ""),
        ("emulator faults clear", just(), 0, ""),
        ("deployment update", of("deployment", "--enable"), 0, ""),
        ("deployment delete", of("deployment", "--wait"), 0, ""),
        ("gateway delete", of("gateway", "--wait"), 0, ""),
        ("emulator reset", just(), 0, ""),
    ]


def test_every_command_does_its_work_whatever_becomes_of_standard_error(
    own_emulator: Any, models: Path, tmp_path: Path
) -> None:
    steps = story(models, tmp_path, own_emulator.bucket)
    ctx = click.Context(root, info_name="cwtrain", obj=GlobalOptions(), **root.context_settings)
    offer_output(ctx)
    assert {f"cwtrain {name}" for name, *_ in steps} == set(leaves(root, ctx)) - APART

    ids: dict[str, str] = {}
    for (name, words, code, kept), broken in zip(steps, itertools.cycle((closed, full, gone, none)), strict=False):
        out = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with (
            mock.patch.dict(os.environ, own_emulator.env),
            contextlib.redirect_stdout(out),
            broken() as err,
            contextlib.redirect_stderr(err),
        ):
            found = main([*name.split(), *words(ids), "--verbose"] if name != "completion" else ["completion", "bash"])
        printed = out.buffer.getvalue().decode()  # type: ignore[attr-defined]
        assert (name, broken.__name__, found) == (name, broken.__name__, code)
        if name == "completion":
            assert "_CWTRAIN_COMPLETE" in printed
        elif name != "hotload cancel":
            data = json.loads(printed)
            if kept:
                ids[kept] = data["spec"]["id"] if "spec" in data else data["id"]
    assert ids.keys() == {"gateway", "deployment", "first", "second"}


def program(redirections: str, *words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """Run the command line under a shell's redirections; return its exit code, standard output and standard error."""
    line = f'"$@" {redirections}'
    done = subprocess.run(
        ["bash", "-c", line, "bash", sys.executable, "-m", "cwtrain", *words],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


BROKEN = {"closed": "2>&-", "full": "2>/dev/full", "reader gone": "2> >(exec 0<&-; exec true)"}


@pytest.mark.parametrize("how", BROKEN)
def test_a_program_whose_standard_error_is_broken(how: str, models: Path, tmp_path: Path) -> None:
    words = ("snapshot", "diff", str(models / "full0"), str(models / "full1"), str(tmp_path / "delta"))
    code, out, _ = program(BROKEN[how], *words)
    assert code == 0
    assert json.loads(out)["path"] == str(tmp_path / "delta")
    # What cannot be told is still in the exit code, which Python must not change at its end.
    assert program(BROKEN[how], *words)[:2] == (1, "")


def test_standard_error_that_is_closed_is_nobody_elses_file(models: Path, tmp_path: Path) -> None:
    """The first file that is opened would get the number 2, and whatever anybody writes there."""
    (tmp_path / "sitecustomize.py").write_text(
        "import atexit, os\n"
        "def told():\n"
        "    os.write(2, b'a library in C complains')\n"
        "    os.write(int(os.environ['SEEN']), os.readlink('/proc/self/fd/2').encode())\n"
        "atexit.register(told)\n",
        encoding="utf-8",
    )
    seen = tmp_path / "seen"
    code, out, _ = program(
        f"2>&- 9>{seen}",
        *("hotload", "inspect", str(models / "full0")),
        env={"PYTHONPATH": str(tmp_path), "SEEN": "9"},
    )
    assert (code, json.loads(out)["type"]) == (0, "FULL")
    assert seen.read_text() == "/dev/null"


def test_a_terminal_that_has_gone(models: Path, tmp_path: Path) -> None:
    """A session that hung up, under nohup: every write to the terminal fails, the redrawn line's too."""
    keeper, terminal = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "cwtrain", "snapshot", "show", str(models / "full0")],
        stdout=subprocess.PIPE,
        stderr=terminal,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm"},
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),
    )
    os.close(keeper)
    os.close(terminal)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert json.loads(out)["tensors"]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("1>&-", "plugins list"),
        ("1>&-", "--version"),
        ("1>&-", "--help"),
        ("1>&-", "completion bash"),
        ("1>/dev/full", "plugins list"),
        ("1>/dev/full", "--help"),
    ],
)
def test_standard_output_that_takes_nothing_is_exit_1(how: str, words: str) -> None:
    """In a program, which has Python's own flush at its end, too."""
    code, out, err = program(how, *words.split())
    assert (code, out) == (1, "")
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert "Exception ignored" not in err


@pytest.mark.parametrize("words", ["--version", "completion bash", "plugins list -o table", "plugins list -o id"])
def test_each_way_to_write_says_that_standard_output_is_full(words: str) -> None:
    err = io.StringIO()
    with full() as out, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        assert main(words.split()) == 1
    assert err.getvalue().startswith("error: ")


def test_work_that_is_done_is_not_advised_again_when_its_output_is_lost(models: Path, tmp_path: Path) -> None:
    words = ("snapshot", "diff", str(models / "full0"), str(models / "full1"), str(tmp_path / "delta"))
    code, _, err = program("1>/dev/full", *words)
    assert code == 1
    assert "standard output: No space left on device" in err
    assert "is done" in err
    assert (tmp_path / "delta").is_dir()
    assert program("1> >(exec 0<&-; exec true)", "plugins", "list")[0] in (0, 1)


@pytest.mark.parametrize("how", ["2>&-", "2>/dev/full"])
def test_serve_announces_itself_on_standard_output_alone(how: str, tmp_path: Path) -> None:
    line = f'exec "$@" {how}'
    process = subprocess.Popen(
        ["bash", "-c", line, "bash", sys.executable, "-m", "cwtrain_emulator", "serve", "--replicas", "1"],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    try:
        assert json.loads(process.stdout.readline())["env"]["COREWEAVE_API_URL"]
    finally:
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (0, "")
