"""The field cases about storage, run as they are against our code."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("CWTRAIN_SHARED") or ROOT.parent / "shared")
CASES = SHARED / "field" / "cases"


@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        ("tls_trailer", ["--factory", "helpers.field_storage_targets:factory"]),
        ("mutating_file", ["--target", "helpers.field_storage_targets:upload"]),
    ],
)
def test_field_case(case: str, arguments: list[str]) -> None:
    """B07 and B21, as they were reported."""
    check = CASES / case / "check.py"
    if not check.exists():
        pytest.skip(f"{check} is missing: set CWTRAIN_SHARED to the folder that has field/cases")
    done = subprocess.run(
        [sys.executable, str(check), *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests"), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "target:" in done.stdout
