"""A page's commands can work as written, and what the packages say of themselves is so."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

import check_docs

ROOT = Path(__file__).resolve().parents[2]


def project(member: str) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "packages" / member / "pyproject.toml").read_text(encoding="utf-8"))
    return found["project"]


@pytest.mark.parametrize(
    ("shell", "problem"),
    [
        ("pip install 'cwtrain-emulator[s3]'\ncwtrain emulator start", "brings `cwtrain`"),
        ("pip install 'cwtrain-core[slime]'\ncwtrain rollout bench", "brings that command"),
        ("pip install 'cwtrain-core[emulator]' 'cwtrain-emulator[transformers]'\ncwtrain emulator start", None),
        ("pip install 'cwtrain-core[all]'\ncwtrain rollout bench\ncwtrain slime check x", None),
        ("pip install cwtrain-demo\ncwtrain emulator status", None),
        ('cwtrain hotload list --deployment "$DEPLOYMENT"', "sets $DEPLOYMENT"),
        ('DEPLOYMENT=$(cwtrain deployment get x)\ncwtrain hotload list --deployment "$DEPLOYMENT"', None),
        ("for name in a b; do echo $name; done", None),
        ("echo '$NOT' && cat > x <<'JSON'\n$NOR_THIS\nJSON", None),
        ('echo "$CWTRAIN_HOTLOAD_RUN_ID"', None),
        ("""curl -d '{"model": "my-model"}'""", "asks the model 'my-model'"),
        ("""echo '{"model": {"name": "my-model"}}' > d.json\ncurl -d '{"model": "my-model"}'""", None),
        ("python tools/no_such_tool.py", "no tools/no_such_tool.py"),
        ("until grep -q X file; do sleep 1; done", "waits in a loop"),
    ],
)
def test_commands_that_cannot_work_are_found(shell: str, problem: str | None, tmp_path: Path) -> None:
    path = tmp_path / "page.md"
    path.write_text(f"# Page\n\n```bash\n{shell}\n```\n", encoding="utf-8")
    found = list(check_docs.runnable(check_docs.Page(path), given=frozenset({"CWTRAIN_HOTLOAD_RUN_ID"})))
    assert len(found) == (problem is not None), found
    assert problem is None or problem in found[0]


def test_all_brings_everything_that_an_extra_brings() -> None:
    extras = project("cwtrain-core")["optional-dependencies"]

    def names(requirements: list[str]) -> set[str]:
        return {re.split(r"[\[<>=!~; ]", one)[0] for one in requirements}

    everything = set().union(*(names(one) for one in extras.values()))
    assert everything - names(extras["all"]) == set()


def test_nobody_promises_an_adapter_that_is_not_there() -> None:
    from cwtrain_nemo_rl._plugin import cwtrain_register_integration

    assert "not in this version" in cwtrain_register_integration().status
    described = [project("cwtrain-nemo-rl")["description"]]
    for name in ("README.md", "packages/cwtrain-nemo-rl/README.md"):
        lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
        described += [line for line in lines if re.search(r"nemo.rl", line, re.IGNORECASE) and "adapter" in line]
    assert [line for line in described if "not in this version" not in line] == []
