"""Users get the types that the documentation promises: mypy, strict, over a program of theirs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def mypy(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run mypy without this repository's own settings: a consumer does not have them."""
    pytest.importorskip("mypy", reason="needs mypy: uv sync")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-error-summary", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_consumer_gets_the_documented_types(tmp_path: Path) -> None:
    done = mypy("--cache-dir", str(tmp_path), str(ROOT / "tests" / "typing" / "consumer.py"))
    assert done.returncode == 0, done.stdout + done.stderr
