"""The how-to page about testing a loop: its example runs as a user's own test suite does."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from check_docs import Page

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/test-a-training-loop.md"


def test_the_example_runs_as_it_stands(tmp_path: Path) -> None:
    (example,) = [block.text for block in Page(PAGE).blocks if block.language == "python"]
    (tmp_path / "test_loop.py").write_text(example, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text("[pytest]\nfilterwarnings = error\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_loop.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=240, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "3 passed" in done.stdout
