"""The check programs of recorded bug reports, run against our inspection and verification."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
SHARED = Path(os.environ.get("CWTRAIN_SHARED") or TESTS.parents[1] / "shared")
CASES = SHARED / "field" / "cases"

pytestmark = pytest.mark.skipif(
    not CASES.is_dir(), reason=f"no recorded cases in {CASES}; set CWTRAIN_SHARED to their folder"
)


@pytest.mark.parametrize(
    ("case", "target"),
    [
        ("ckpt_dirs", "inspect_directory"),
        ("st_files", "open_file"),
        ("delta_chain", "verify_on_base"),
        ("delta_chain", "mirror_on_base"),
    ],
)
def test_field_case(tmp_path, case, target):
    keep = [] if case == "st_files" else ["--keep", str(tmp_path)]
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, str(CASES / case / "check.py"), "--target", f"helpers.field_targets:{target}", *keep],
        env={**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "BAD" not in result.stdout
