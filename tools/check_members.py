"""Try each member alone: a shared environment hides a dependency that somebody else declares.

    python tools/check_members.py                    # every member
    python tools/check_members.py cwtrain-core ...   # some of them

Each gets an environment with its own declared dependencies and nothing else; there every module of it is imported.
Then, with pytest added, its unit tests run (`tests/unit/<short name>`); core's do in the environments of
`check_core.py`, where it is the only member, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import needed

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
# What unit tests need beside the member; none of these brings a module that a member could use by accident.
TEST_TOOLS = ["hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "safetensors"]

TESTED_BY_CHECK_CORE = "cwtrain-core"

# An alias of an absent distribution must say what to install; everything else must import.
IMPORT_ALL = """
import importlib, pkgutil, sys
count, failures = 0, []
def visit(name):
    global count
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if not (name.startswith("cwtrain.integrations.") and "pip install cwtrain-" in str(error)):
            failures.append(f"{name}: {type(error).__name__}: {error}")
        return
    count += 1
    for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
        if info.name not in ("__main__", "pytest_plugin"):  # the one would run, the other is for pytest alone
            visit(f"{name}.{info.name}")
visit(sys.argv[1])
print(f"{count} modules of {sys.argv[1]} import", *failures, sep="\\n")
sys.exit(bool(failures))
"""


def pins() -> dict[str, str]:
    """Return name -> pinned requirement, from the root `pyproject.toml`."""
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    return {pin.partition("==")[0]: pin for pin in uv["constraint-dependencies"]}


def alone(member: str, command: list[str], *, extra: list[str]) -> bool:
    """Run a command in a fresh environment that holds one member and its declared dependencies."""
    tool = ["uv", "run", "--quiet", "--isolated", "--exact", "--no-default-groups", "--package", member]
    for requirement in extra:
        tool += ["--with", pins()[requirement]]
    environ = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    return subprocess.run([*tool, *command], cwd=ROOT, env=environ, check=False).returncode == 0


def check(member: str) -> bool:
    """Return whether a member works alone."""
    package = "cwtrain" if member == "cwtrain-core" else member.replace("-", "_")
    print(f"--- {member}", flush=True)
    if not alone(member, ["python", "-W", "error", "-c", IMPORT_ALL, package], extra=[]):
        return False
    if member == TESTED_BY_CHECK_CORE:
        return True
    tests = ROOT / "tests" / "unit" / member.removeprefix("cwtrain-").replace("-", "_")
    if not tests.is_dir():
        return True
    return alone(
        member, ["python", "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", str(tests)], extra=TEST_TOOLS
    )


def main() -> None:
    """Check the members that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("members", nargs="*", metavar="MEMBER", help=", ".join(MEMBERS))
    chosen = parser.parse_args().members or MEMBERS
    needed.need(programs=("uv",))
    if unknown := sorted(set(chosen) - set(MEMBERS)):
        sys.exit(f"no such member: {', '.join(unknown)}; there are {', '.join(MEMBERS)}")
    if failed := [member for member in chosen if not check(member)]:
        sys.exit(f"not alone: {', '.join(failed)}")
    print(f"{len(chosen)} member(s) work alone")


if __name__ == "__main__":
    main()
