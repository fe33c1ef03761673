"""Build every wheel and source archive, and try them as a user gets them: with pip, in clean environments.

    python tools/check_wheels.py                 # build into a temporary folder
    python tools/check_wheels.py --dist dist     # keep what was built
    python tools/check_wheels.py --only core     # one set: core, fast, slime or all

What must hold: metadata, licence and `py.typed` in each wheel; no file in two wheels; each set installs, passes
`pip check`, runs `cwtrain --help` and imports every documented name that it brings; a name whose distribution is absent
says which one to install.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path
from tarfile import open as open_tar

import needed
from public_names import LATER, LATER_SAYS, NAMES, brought_by

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))

# What each set is asked for on pip's command line; siblings come from the folder of built wheels.
SETS = {
    "core": "cwtrain-core",
    "fast": "cwtrain-core[fast]",
    "slime": "cwtrain-core[slime]",
    "all": "cwtrain-core[all]",
}
BROUGHT = {
    "core": {"cwtrain-core"},
    "fast": {"cwtrain-core", "cwtrain-native"},
    "slime": {"cwtrain-core", "cwtrain-rollout", "cwtrain-slime"},
    "all": set(MEMBERS),
}

# Runs inside a clean environment: prints one JSON object {name: None or the error's text}.
PROBE = """
import importlib, json, sys
answers = {}
for name in json.load(sys.stdin):
    module, _, attribute = name.partition(":")
    try:
        getattr(importlib.import_module(module), attribute)
        answers[name] = None
    except Exception as error:
        answers[name] = f"{type(error).__name__}: {error} {getattr(error, 'hint', None) or ''}"
print(json.dumps(answers))
"""

# Whether core finds and trusts the compiled library of cwtrain-native.
COMPILED = "from cwtrain.snapshots._native import native_function; print(native_function() is not None)"


class Report:
    """Collects problems, so that one run shows all of them."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def expect(self, holds: object, problem: str) -> None:
        """Note `problem` unless `holds`."""
        if not holds:
            self.problems.append(problem)
            print(f"  PROBLEM {problem}", flush=True)


def run(command: list[str], *, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
    """Run a command away from the checkout, so that nothing is imported from it by accident."""
    environ = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        command, cwd=tempfile.gettempdir(), env=environ, input=stdin, capture_output=True, text=True, check=False
    )


def build(dist: Path) -> None:
    """Build all members into `dist`: a source archive each, and the wheel from it."""
    command = ["uv", "build", "--all-packages", "--quiet", "--out-dir", str(dist)]
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode:
        sys.exit(f"`{' '.join(command)}` ended with {done.returncode}")


def project(member: str) -> dict[str, str]:
    """Return the `[project]` table of a member."""
    table = tomllib.loads((ROOT / "packages" / member / "pyproject.toml").read_text(encoding="utf-8"))
    return dict(table["project"])


def wheel_of(dist: Path, member: str) -> Path:
    """Return the one wheel of a member."""
    found = list(dist.glob(f"{member.replace('-', '_')}-*.whl"))
    if len(found) != 1:
        sys.exit(f"{dist} holds {len(found)} wheels of {member}; give an empty folder")
    return found[0]


def is_compiled(dist: Path) -> bool:
    """Return whether there was a C compiler for cwtrain-native."""
    return not wheel_of(dist, "cwtrain-native").name.endswith("-any.whl")


def check_contents(dist: Path, report: Report) -> None:
    """Look into the archives."""
    owners: dict[str, str] = {}
    for member in MEMBERS:
        table = project(member)
        wheel = wheel_of(dist, member)
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
            metadata_name = next(name for name in names if name.endswith(".dist-info/METADATA"))
            metadata = HeaderParser().parsestr(archive.read(metadata_name).decode())
        for name in names:
            report.expect(name not in owners, f"{name} is in {wheel.name} and in {owners.get(name)}")
            owners[name] = wheel.name
        package = "cwtrain" if member == "cwtrain-core" else member.replace("-", "_")
        tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
        tops -= {f"{package}.libs"}  # compiled libraries, beside the package as is usual
        report.expect(tops == {package}, f"{wheel.name} holds {sorted(tops)}, not only {package}")
        report.expect(f"{package}/py.typed" in names, f"{wheel.name} has no {package}/py.typed")
        report.expect(
            any(name.endswith(".dist-info/licenses/LICENSE") for name in names), f"{wheel.name} carries no LICENSE"
        )
        stray = [name for name in names if re.search(r"(^|/)(tests?|__pycache__|conftest\.py)(/|$)|\.pyc$", name)]
        report.expect(not stray, f"{wheel.name} holds {stray}")
        for key, wanted in {
            "Name": member,
            "Version": table["version"],
            "License-Expression": "Apache-2.0",
            "Requires-Python": ">=3.11",
            "Summary": table["description"],
        }.items():
            report.expect(metadata[key] == wanted, f"{wheel.name}: {key} is {metadata[key]!r}, not {wanted!r}")
        report.expect(metadata.get_payload(), f"{wheel.name} has no long description")
        report.expect(metadata.get_all("Project-URL"), f"{wheel.name} names no project URL")
        needs = metadata.get_all("Requires-Dist") or []
        report.expect(not [line for line in needs if "@" in line or "://" in line], f"{wheel.name} needs a URL")
        with open_tar(next(dist.glob(f"{member.replace('-', '_')}-*.tar.gz"))) as source:
            inside = {name.partition("/")[2] for name in source.getnames()}
        wanted_files = {"pyproject.toml", "README.md", "CHANGELOG.md", "LICENSE", f"src/{package}/py.typed"}
        report.expect(wanted_files <= inside, f"source archive of {member} lacks {sorted(wanted_files - inside)}")
    # Compiled, and without Python's own interface: for one platform, and for every Python.
    native = wheel_of(dist, "cwtrain-native").name
    report.expect("-py3-none-" in native, f"{native} is for one Python only")
    compiled = is_compiled(dist) or not os.environ.get("CWTRAIN_NATIVE_REQUIRED")
    report.expect(compiled, f"{native} is of no platform: it was built without its library")
    print(f"contents: {len(owners)} files in {len(MEMBERS)} wheels", flush=True)


def constraints(folder: Path) -> Path:
    """Write pip's constraints: our own versions, third parties as `pyproject.toml` pins them."""
    lines = [f"{member}=={project(member)['version']}" for member in MEMBERS]
    lines += tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"][
        "constraint-dependencies"
    ]
    path = folder / "constraints.txt"
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")
    return path


def check_origin(name: str, site: Path, dist: Path, report: Report) -> None:
    """Compare what pip recorded with our wheels: the same names and versions could come from elsewhere."""
    for member in sorted(BROUGHT[name]):
        with zipfile.ZipFile(wheel_of(dist, member)) as archive:
            record = next(item for item in archive.namelist() if item.endswith(".dist-info/RECORD"))
            ours = {line for line in archive.read(record).decode().splitlines() if ".dist-info/" not in line}
        installed = (site / record).read_text(encoding="utf-8").splitlines() if (site / record).exists() else []
        report.expect(ours <= set(installed), f"[{name}] {member} was not installed from {dist}")


def check_set(name: str, dist: Path, report: Report) -> None:
    """Install one set with pip into a clean environment and use it."""
    with tempfile.TemporaryDirectory(prefix="cwtrain-wheels-") as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        python = str(folder / "venv" / "bin" / "python")
        asked = SETS[name]
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries", "5"]
        install += ["--no-compile"]
        install += ["--constraint", str(constraints(folder)), "--find-links", str(dist), asked]
        done = run(install)
        report.expect(done.returncode == 0, f"[{name}] pip install {asked}: {done.stderr.strip()[-2000:]}")
        if done.returncode:
            return
        done = run([python, "-m", "pip", "check"])
        report.expect(done.returncode == 0, f"[{name}] pip check: {done.stdout.strip()}")
        done = run([python, "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"])
        installed = {item["name"] for item in json.loads(done.stdout)} & set(MEMBERS)
        report.expect(
            installed == BROUGHT[name], f"[{name}] installed {sorted(installed)}, not {sorted(BROUGHT[name])}"
        )
        check_origin(name, next((folder / "venv" / "lib").glob("python3*/site-packages")), dist, report)
        check_names(name, python, report)
        check_commands(name, folder / "venv" / "bin", report)
        done = run([python, "-c", COMPILED])
        wanted = str("cwtrain-native" in BROUGHT[name] and is_compiled(dist))
        report.expect(done.stdout.strip() == wanted, f"[{name}] compiled code in use: {done.stdout or done.stderr}")
        print(f"[{name}] {asked}: {', '.join(sorted(installed))}", flush=True)


def check_names(name: str, python: str, report: Report) -> None:
    """Import every documented name: here, announced, or absent with the command that brings it."""
    here = [f"{module}:{item}" for module, items in NAMES.items() for item in items]
    later = [f"{module}:{item}" for module, items in LATER.items() for item in items]
    done = run([python, "-c", PROBE], stdin=json.dumps(here + later))
    report.expect(done.returncode == 0, f"[{name}] importing the documented names: {done.stderr.strip()[-2000:]}")
    if done.returncode:
        return
    for item, answer in json.loads(done.stdout).items():
        member = brought_by(item.partition(":")[0])
        if member not in BROUGHT[name]:
            # Only core's aliases can name the distribution; elsewhere Python's own message is the answer.
            says = f"pip install {member}" if item.startswith("cwtrain.") else "No module named"
            report.expect(answer and says in answer, f"[{name}] {item} without {member} says: {answer}")
        elif item in later:
            report.expect(answer and re.search(LATER_SAYS, answer), f"[{name}] {item} says: {answer}")
        else:
            report.expect(answer is None, f"[{name}] {item}: {answer}")


def check_commands(name: str, scripts: Path, report: Report) -> None:
    """Run the command line as installed."""
    tool = str(scripts / "cwtrain")
    for arguments in (["--help"], ["--version"], ["hotload", "publish", "--help"], ["plugins", "list"]):
        done = run([tool, *arguments])
        said = (done.stderr or done.stdout).strip()[-1000:]
        report.expect(done.returncode == 0 and done.stdout, f"[{name}] cwtrain {' '.join(arguments)}: {said}")
    shown = run([tool, "--help"]).stdout
    for command, member in (("demo", "cwtrain-demo"), ("emulator", "cwtrain-emulator")):
        there = re.search(rf"^\s+{command}\b", shown, re.MULTILINE) is not None
        report.expect(
            there == (member in BROUGHT[name]), f"[{name}] cwtrain --help {'shows' if there else 'lacks'} {command}"
        )


def main() -> None:
    """Build, look, install, use."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dist", type=Path, help="build into this empty folder and keep it")
    parser.add_argument("--only", choices=sorted(SETS), help="try one set")
    options = parser.parse_args()
    needed.need(programs=("uv",))
    report = Report()
    with tempfile.TemporaryDirectory(prefix="cwtrain-dist-") as temporary:
        dist = (options.dist or Path(temporary)).resolve()
        build(dist)
        check_contents(dist, report)
        for name in [options.only] if options.only else SETS:
            check_set(name, dist, report)
    if report.problems:
        sys.exit(f"{len(report.problems)} problem(s)")
    print("wheels: all good")


if __name__ == "__main__":
    main()
