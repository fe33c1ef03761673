"""Run the command line: in this process (``run``), or as a program of its own (``program``)."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import attrs

from cwtrain.cli import main


@attrs.frozen
class Done:
    """How a run ended."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        """Standard output as JSON."""
        return json.loads(self.out)


class _Stream(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", write_through=True)

    def text(self) -> str:
        buffer = self.buffer
        assert isinstance(buffer, io.BytesIO)
        return buffer.getvalue().decode("utf-8")


def run(*args: str, env: Mapping[str, str] | None = None, stdin: str = "") -> Done:
    """Run ``cwtrain args`` in this process; signals and the state of plugins are this process's own."""
    out, err = _Stream(), _Stream()
    given = io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8")
    with (
        mock.patch.dict(os.environ, dict(env or {})),
        mock.patch.object(sys, "stdin", given),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = main(list(args))
    return Done(code, out.text(), err.text())


def without_override() -> None:
    """Before an exec: take from root what lets it open files whose permissions forbid it. For others it is nothing."""
    for capability in (1, 2):  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
        ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP


def program(
    *args: str,
    env: Mapping[str, str] | None = None,
    stdin: str = "",
    before: Callable[[], None] | None = None,
) -> Done:
    """Run ``python -m cwtrain args`` and wait for it; ``before`` runs in the new process, before that."""
    done = subprocess.run(
        [sys.executable, "-m", "cwtrain", *args],
        env={**os.environ, **(env or {})},
        input=stdin,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=before,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def start(*args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start ``python -m cwtrain args``; the caller ends it."""
    return _start(["-m", "cwtrain", *args], env)


def start_with_heartbeat(seconds: float, *args: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """Start the command line, which says what it waits for after so many seconds; the caller ends it."""
    code = "import sys; from cwtrain.cli import main; sys.exit(main(sys.argv[2:], heartbeat=float(sys.argv[1])))"
    return _start(["-c", code, str(seconds), *args], env)


def _start(words: list[str], env: Mapping[str, str] | None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        env={**os.environ, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
