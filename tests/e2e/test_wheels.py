"""The wheels as a user gets them. `tools/check_wheels.py` without `--only` tries more sets, and takes longer."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_wheels_build_and_core_works_alone_in_a_clean_environment() -> None:
    if shutil.which("uv") is None:
        pytest.skip("needs uv: pip install uv")
    command = [sys.executable, str(ROOT / "tools" / "check_wheels.py"), "--only", "core"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
