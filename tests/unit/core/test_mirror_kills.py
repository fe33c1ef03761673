"""The mirror and the full writer killed: a dozen fixed seeds, and before every call to the disk."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "kill_test.py"


@pytest.mark.parametrize(
    "arguments",
    [
        ["mirror", "--seeds", "12"],
        ["mirror", "--seeds", "1", "--first", "66"],  # half a head of a slot, before another one's bytes
        ["full", "--seeds", "12"],
        ["steps", "--kind", "next"],
        ["steps", "--kind", "in-place"],
        ["steps", "--kind", "one-pass"],
        ["steps", "--kind", "undo"],
    ],
    ids=["mirror", "torn-slot", "full", "every-step", "every-step-in-place", "every-step-one-pass", "every-step-undo"],
)
def test_nothing_is_wrong_whenever_it_is_killed(tmp_path, arguments):
    told = subprocess.run(
        [sys.executable, TOOL, *arguments],
        capture_output=True, text=True, check=False, env={"TMPDIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
    )  # fmt: skip
    assert told.returncode == 0, told.stdout + told.stderr
    assert ", 0 wrong, " in told.stdout
    assert "killed" in told.stdout
