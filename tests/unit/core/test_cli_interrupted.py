"""Ctrl-C ends a command quietly, however early it comes."""

from __future__ import annotations

import importlib.metadata
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

INTERRUPT = """
import os, signal
os.kill(os.getpid(), signal.SIGINT)
while True:
    pass
"""


def as_script() -> list[str]:
    """Return the words that do what the installed console script does."""
    (entry,) = (
        one
        for one in importlib.metadata.distribution("cwtrain-core").entry_points
        if (one.group, one.name) == ("console_scripts", "cwtrain")
    )
    return ["-c", f"import sys; from {entry.module} import {entry.attr}; sys.exit({entry.attr}())"]


@pytest.mark.parametrize("module", ["click", "cwtrain.cli._root", "cwtrain.plugins"])
@pytest.mark.parametrize("way", ["script", "module"])
def test_ctrl_c_during_the_imports_is_one_line_and_130(tmp_path: Path, module: str, way: str) -> None:
    # A real signal in the middle of an import: a finder gives the module a body that sends it.
    site = tmp_path / "sitecustomize.py"
    site.write_text(
        f"""
import importlib.abc, importlib.util, sys

class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.util.spec_from_loader(name, self) if name == {module!r} else None

    def exec_module(self, module):
        exec(CODE, {{}})

# Compiled beforehand: Python would remember an interrupt of a text's execution, and die of it at its end.
CODE = compile({INTERRUPT!r}, "interrupt", "exec")
sys.meta_path.insert(0, Finder())
""",
        encoding="utf-8",
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    words = as_script() if way == "script" else ["-m", "cwtrain"]
    done = subprocess.run(
        [sys.executable, *words, "--help"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        # A shell's background jobs ignore Ctrl-C, and children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "\ninterrupted\n")
