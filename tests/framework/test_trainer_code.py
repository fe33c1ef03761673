"""The trainers' own code calls our hook: where a checkout is at hand, and what the tools are made of where none is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import trainer_code
from helpers.requirements import require

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_their_own_delta_writers_reach_the_replicas(trainer: str) -> None:
    source = os.environ.get(f"CWTRAIN_TEST_{trainer.upper()}", "")
    require("torch")
    require(
        f"{trainer}-source",
        (Path(source) / trainer).is_dir() if source else False,
        f"clone {trainer} and set CWTRAIN_TEST_{trainer.upper()} to its folder",
    )
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"check_against_{trainer}.py"), source],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["ok"]
    assert all(life["ok"] for life in report["lives"])


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_a_folder_that_is_no_checkout_is_refused(trainer: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "tools" / f"check_against_{trainer}.py"), str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "is no checkout" in done.stderr


def test_packages_that_are_absent_are_stood_in_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of a trainer is imported although packages of it are not here; its own missing module is an error."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    package = tmp_path / "made_up_trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "actor.py").write_text(
        "from absent_gpu.core import mpu\n"
        "import absent_net as net\n"
        "@net.remote\n"
        "def work():\n"
        "    return 5\n"
        "class Actor(net.Base):\n"
        "    pass\n"
    )
    (package / "broken.py").write_text("import made_up_trainer.nowhere\n")
    module, absent = trainer_code.stand_ins("made_up_trainer", tmp_path, "made_up_trainer.actor")
    assert absent == ["absent_gpu", "absent_net"]
    assert module.Actor().anything().at_all is not None
    with pytest.raises(ModuleNotFoundError):
        trainer_code.stand_ins("made_up_trainer", tmp_path, "made_up_trainer.broken")
    for name in [name for name in sys.modules if name.startswith(("made_up_trainer", "absent_"))]:
        del sys.modules[name]


def test_a_handle_answers_at_once() -> None:
    handle = trainer_code.Handle(version=7)
    assert (handle.version.remote(), handle.other.remote(1, a=2)) == (7, None)
    assert handle.asked == ["version", "other"]
    assert trainer_code.Ray.get(trainer_code.Ray.put([1])) == [1]
