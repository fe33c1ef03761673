"""The documentation's examples, run as a reader runs them: page by page, in order, in one shell.

- Every ```bash and ```python block of `docs/tutorial/*.md` runs, against the emulator that the page itself starts;
  so do those of the how-to pages that need nothing else.
- README's commands run too, the installs and the test command aside (the former is how we got here, the latter is us).
- `<!-- not run: reason -->` on the line before a block leaves it out.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from check_docs import Page

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = sorted(ROOT.glob("docs/tutorial/*.md"))
HOW_TOS = [
    ROOT / "docs/how-to" / name
    for name in ("work-with-snapshots.md", "publish-from-memory.md", "rollouts.md", "your-own-trainer.md")
]
LIMIT = 240.0
"""Seconds that one page may take."""


def left_out(page: Page, line: int) -> bool:
    """Say whether the line before a block's fence tells not to run it."""
    before = page.text.splitlines()[: line - 2]
    return bool(before) and before[-1].strip().startswith("<!-- not run:")


def script(page: Page) -> str:
    """Return one shell script with every block of a page, each announced by its place."""
    # A page that ends in the middle leaves no emulator behind: one that was started runs on by itself.
    parts = ["set -euo pipefail", "trap 'cwtrain emulator stop >stop.log 2>&1 || true' EXIT"]
    for block in page.blocks:
        if block.language not in ("bash", "python") or left_out(page, block.line):
            continue
        parts.append(f"echo '### {page.name}:{block.line}' >&2")
        parts.append(
            block.text if block.language == "bash" else f"python - <<'END_OF_EXAMPLE'\n{block.text}END_OF_EXAMPLE\n"
        )
    return "\n".join(parts)


def run(text: str, folder: Path) -> None:
    """Run a script in a folder; nothing that it started is left behind."""
    environ = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    output = folder / "output.txt"
    with output.open("w", encoding="utf-8") as sink:
        process = subprocess.Popen(
            ["bash", "-c", text],
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            for number in (signal.SIGTERM, signal.SIGKILL):
                try:
                    os.killpg(process.pid, number)
                    process.wait(timeout=20)
                except (ProcessLookupError, subprocess.TimeoutExpired):
                    pass
    shown = "\n".join(output.read_text(encoding="utf-8", errors="replace").splitlines()[-60:])
    assert code is not None, f"not done after {LIMIT:.0f} s:\n{shown}"
    assert code == 0, f"ended with {code}:\n{shown}"


@pytest.mark.slow
@pytest.mark.parametrize("path", [*TUTORIALS, *HOW_TOS], ids=lambda path: path.stem)
def test_a_page_runs_as_written(path: Path, tmp_path: Path) -> None:
    text = script(Page(path))
    assert "### " in text, "a page without examples"
    run(text, tmp_path)


def readme_commands() -> list[str]:
    """Return the lines of README's bash blocks that start with `pip install -q uv &&`, without that."""
    blocks = [block.text for block in Page(ROOT / "README.md").blocks if block.language == "bash"]
    return re.findall(r"^pip install -q uv && uv run (.+)$", "\n".join(blocks), re.MULTILINE)


def test_readme_has_two_lines_that_do_all_the_set_up() -> None:
    demo, tests = readme_commands()
    assert demo == "cwtrain demo"
    assert tests.startswith("pytest")


@pytest.mark.slow
def test_readme_s_first_line_runs(tmp_path: Path) -> None:
    run(f"set -euo pipefail\n{readme_commands()[0]}\n", tmp_path)


def test_readme_s_python_example_compiles_and_names_what_exists() -> None:
    (example,) = [block.text for block in Page(ROOT / "README.md").blocks if block.language == "python"]
    compile(example, "README.md", "exec")
    import_line = example.splitlines()[0]
    assert subprocess.run([sys.executable, "-c", import_line], check=False).returncode == 0
