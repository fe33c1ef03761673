"""The kind: a tool that fails from inside for want of a package or a program, instead of saying what to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"
MODULES = {"faults_reference", "needed", "public_names", "kill_mirror", "kill_publisher", "kill_upload", "interop_peer"}
"""What others import, or run elsewhere."""
ARGUMENTS = {
    "check_against_slime": ["SRC"],
    "check_against_miles": ["SRC"],
    "trainer_code": [],
    "kill_test": ["steps"],
    "make_smollm2": ["model.gguf", "OUT"],
    "make_tiny_model": ["OUT"],
}
NAMES = sorted(path.stem for path in TOOLS.glob("*.py") if path.stem not in MODULES)


def run(name: str, *words: str, flags: tuple[str, ...] = (), **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *flags, str(TOOLS / f"{name}.py"), *words],
        env={"PATH": "/nowhere", **environ},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", NAMES)
def test_without_packages_and_programs_a_tool_says_what_to_install(name: str, tmp_path: Path) -> None:
    """No site-packages and an empty PATH: nothing but Python itself."""
    words = [str(tmp_path / word) if word == "OUT" else word for word in ARGUMENTS.get(name, [])]
    done = run(name, *words, flags=("-S",))
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith(f"{name}.py needs ")
    assert "not installed here: " in line
    assert "uv " in line or "pip install" in line, "how to install it"


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_a_trainers_code_without_torch_is_told_as_that(trainer: str, tmp_path: Path) -> None:
    """Torch was stood in for by an empty module; the ranks died, and their logs were not there to be read."""
    source = tmp_path / "checkout"
    (source / trainer / "utils").mkdir(parents=True)
    (source / trainer / "utils" / "disk_delta.py").write_text("")
    (tmp_path / "hidden").mkdir()
    (tmp_path / "hidden" / "sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    done = run(f"check_against_{trainer}", str(source), PYTHONPATH=str(tmp_path / "hidden"))
    assert "Traceback" not in done.stderr
    assert done.returncode == 2
    assert done.stderr.startswith(f"check_against_{trainer}.py needs torch")
    assert "uv pip install 'torch" in done.stderr
