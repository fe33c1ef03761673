"""The check program of a recorded bug report about tokens, run against our command line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("CWTRAIN_SHARED") or Path(__file__).parents[3] / "shared")
CASE = SHARED / "field" / "cases" / "token_env" / "check.py"

pytestmark = pytest.mark.skipif(not CASE.is_file(), reason=f"no {CASE}; set CWTRAIN_SHARED to the folder that has it")

UUID = "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize("command", [f"deployment get {UUID}", f"hotload wait {UUID}"])
def test_tokens_as_people_really_set_them(command: str) -> None:
    cli = f"{sys.executable} -m cwtrain --base-url {{url}} {command}"
    done = subprocess.run(
        [sys.executable, str(CASE), "--cli", cli],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok  ") == 7
