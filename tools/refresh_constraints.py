"""Fix the versions of the workspace without a lock file.

    python tools/refresh_constraints.py              # resolve anew (up to `exclude-newer`) and write the pins
    python tools/refresh_constraints.py --check      # exit 1 when `uv.lock` of this checkout differs from the pins
    python tools/refresh_constraints.py --date 2026-12-15   # move `exclude-newer` first

A lock file names package hosts, and no committed file may. So `uv.lock` stays out of git, and `[tool.uv]` of the root
`pyproject.toml` carries exact constraints for every package of every member, extra and group. `uv sync` in a fresh
clone then resolves to exactly this set and writes its own `uv.lock`.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import needed

ROOT = Path(__file__).resolve().parent.parent
BEGIN = "# >>> constraints (written by tools/refresh_constraints.py)"
END = "# <<< constraints"
BLOCK = re.compile(re.escape(BEGIN) + r"\n.*?" + re.escape(END), re.DOTALL)
EXCLUDE_NEWER = re.compile(r'^exclude-newer = "([^"]+)"$', re.MULTILINE)
UNPINNED = re.compile(r"(torch|triton|nvidia-[a-z0-9-]+|cuda-[a-z0-9-]+)==")
EXPORT = ["uv", "export", "-q", "--all-packages", "--all-extras", "--all-groups", "--no-hashes"]
EXPORT += ["--no-emit-workspace", "--no-header", "--no-annotate"]


def uv(command: list[str], folder: Path, stdin: str | None = None) -> str:
    """Return what a uv command prints; its complaints go to stderr and stop this tool."""
    done = subprocess.run(command, cwd=folder, input=stdin, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` ended with {done.returncode}")
    return done.stdout


def requirements(text: str) -> list[str]:
    """Return the requirement lines of an export, in their order, without torch and what its CUDA builds bring.

    Which build of torch there is depends on the machine: whoever wants an extra that needs it chooses one.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [line for line in lines if not UNPINNED.match(line)]


def block(pins: list[str], build_pins: list[str]) -> str:
    """Return the generated part of `pyproject.toml`."""
    lines = [BEGIN, "constraint-dependencies = ["]
    lines += [f'    "{pin}",' for pin in pins]
    lines += ["]", "build-constraint-dependencies = ["]
    lines += [f'    "{pin}",' for pin in build_pins]
    return "\n".join([*lines, "]", END])


def pinned(text: str) -> list[str]:
    """Return the constraints that `pyproject.toml` holds now."""
    import tomllib

    return list(tomllib.loads(text)["tool"]["uv"].get("constraint-dependencies", []))


def resolve(text: str) -> tuple[list[str], list[str]]:
    """Return fresh pins for the members and for their builds, resolved in a copy that has no pins and no lock."""
    newest = EXCLUDE_NEWER.search(text)
    if newest is None:
        sys.exit('pyproject.toml has no line `exclude-newer = "..."`')
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        (copy / "pyproject.toml").write_text(BLOCK.sub("", text), encoding="utf-8")
        for member in sorted(ROOT.glob("packages/*/pyproject.toml")):
            target = copy / member.relative_to(ROOT)
            target.parent.mkdir(parents=True)
            shutil.copy(member, target)
        pins = requirements(uv(EXPORT, copy))
    build = ["uv", "pip", "compile", "-", "-q", "--no-header", "--no-annotate", "--universal", "--no-config"]
    build += ["--python-version", "3.11", "--exclude-newer", newest.group(1)]
    return pins, requirements(uv(build, ROOT, stdin="hatchling>=1.26\n"))


def main() -> None:
    """Write or check the block."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare with this checkout's uv.lock; change nothing")
    parser.add_argument("--date", metavar="YYYY-MM-DD", help="set exclude-newer to this day")
    options = parser.parse_args()
    needed.need(programs=("uv",))
    path = ROOT / "pyproject.toml"
    text = path.read_text(encoding="utf-8")
    if options.check:
        found, expected = set(requirements(uv(EXPORT, ROOT))), set(pinned(text))
        for line in sorted(found ^ expected):
            print(f"{'resolved but not pinned' if line in found else 'pinned but not resolved'}: {line}")
        if found != expected:
            sys.exit("the constraints are stale; run: python tools/refresh_constraints.py")
        return
    if options.date:
        text = EXCLUDE_NEWER.sub(f'exclude-newer = "{options.date}T00:00:00Z"', text)
    if not BLOCK.search(text):
        sys.exit(f"pyproject.toml has no block between {BEGIN!r} and {END!r}")
    new = block(*resolve(text))
    path.write_text(BLOCK.sub(lambda _: new, text), encoding="utf-8")
    print(f"{len(pinned(path.read_text(encoding='utf-8')))} pins written")


if __name__ == "__main__":
    main()
