"""The reference pages say what the code says, and the example plugin of the documentation works."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path

import pytest

from helpers.run_cli import program

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

for module in ("cwtrain_demo", "cwtrain_emulator", "cwtrain_rollout"):
    pytest.importorskip(module)


@pytest.fixture
def gen_reference(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    import gen_reference

    return gen_reference


def test_pages_made_from_the_code_are_current(gen_reference):
    assert gen_reference.stale() == [], "run: python tools/gen_reference.py"


def test_every_error_has_its_row_with_when_and_next_step():
    from cwtrain import errors
    from cwtrain_rollout import errors as rollout_errors

    text = (DOCS / "reference/errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| \*?`(\w+)`\*?[^|]*\| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE)
    assert sorted(name for name, _, _ in rows) == sorted([*errors.__all__, *rollout_errors.__all__])
    assert all(when.strip() and step.strip() for _, when, step in rows)


def test_a_built_in_that_an_error_also_is_stands_in_its_row():
    from cwtrain import errors

    text = (DOCS / "reference/errors.md").read_text(encoding="utf-8")
    for name, other in re.findall(r"\| `(\w+)` \(also a `(\w+)`\)", text):
        assert other in [base.__name__ for base in getattr(errors, name).__mro__]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def example(tmp_path):
    """The plugin of the page, installed; gives the environment in which it is."""
    page = DOCS / "how-to/write-a-plugin.md"
    package = tmp_path / "my_plugin"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "_plugin.py").write_text(blocks(page, "python")[0])
    project = tomllib.loads(blocks(page, "toml")[0])["project"]
    info = tmp_path / "my_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
    lines = [f"{name} = {value}" for name, value in project["entry-points"]["cwtrain"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[cwtrain]", *lines, ""]))
    return {"PYTHONPATH": str(tmp_path), "MY_PLUGIN_LOG": str(tmp_path / "publishes.jsonl")}


def test_the_example_plugin_is_loaded_and_its_command_works(example):
    rows = {row["name"]: row for row in program("plugins", "list", env=example).data}
    assert rows["my_plugin"]["state"] == "loaded"
    assert rows["my_plugin"]["problems"] == []
    assert rows["my_plugin"]["provides"] == ["command publishes"]
    use = blocks(DOCS / "how-to/write-a-plugin.md", "python")[1]
    code = f"import os, sys\nos.environ.update({example!r})\nsys.path.insert(0, {example['PYTHONPATH']!r})\n{use}"
    import subprocess

    done = subprocess.run([sys.executable, "-c", code], env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert program("publishes", env=example).data == ["step_000100"]
    event = json.loads(Path(example["MY_PLUGIN_LOG"]).read_text())
    assert (event["kind"], event["seconds"]) == ("SyncCompleted", 4.2)


def test_the_example_plugin_vetoes(example, monkeypatch):
    monkeypatch.syspath_prepend(example["PYTHONPATH"])
    import importlib

    from cwtrain.errors import PluginError
    from cwtrain.models.snapshot import PublishPlan, SnapshotKind
    from cwtrain.plugins import Plugins

    plugins = Plugins()
    plugins.register(importlib.import_module("my_plugin._plugin"), name="my_plugin")
    plan = dict.fromkeys(("deployment_id", "reason", "bucket", "path_prefix", "uri"), "x")
    for size, vetoed in ((10, False), (10**12, True)):
        made = PublishPlan(
            **plan, identity="big", kind=SnapshotKind.FULL, files=(), total_bytes=size, upload_bytes=size
        )
        if vetoed:
            with pytest.raises(PluginError, match="big has 1,000,000,000,000 bytes"):
                plugins.before_publish(made)
        else:
            plugins.before_publish(made)
    sys.modules.pop("my_plugin._plugin")
    sys.modules.pop("my_plugin")
