"""The recipes, run as a user runs them, with a stand-in for the trainer's `train.py` and for Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cwtrain.cli._options import load_spec
from cwtrain_emulator.engine.model_io import make_model
from helpers.emulator_api import Api
from helpers.requirements import require

ROOT = Path(__file__).resolve().parents[2]
TRAIN = """\
import sys
sys.path.insert(0, {tests!r})
from helpers.rank_trainer import train_py
sys.exit(train_py(sys.argv[1:]))
"""


def run_recipe(trainer: str, word: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(ROOT / "recipes" / trainer / "run.sh"), word],
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


@pytest.fixture
def environ(
    request: pytest.FixtureRequest, emulator: Any, deployment: dict[str, Any], tmp_path: Path
) -> dict[str, str]:
    """What `env.sh` asks for: a trainer's folder, a base, and a program named ray in front of the PATH."""
    trainer: str = request.getfixturevalue("trainer")
    home, programs = tmp_path / trainer, tmp_path / "bin"
    (home / "scripts" / "models").mkdir(parents=True)
    (home / "scripts" / "models" / "tiny.sh").write_text("MODEL_ARGS=(--num-layers 1)\n")
    (home / "train.py").write_text(TRAIN.format(tests=str(ROOT / "tests")))
    programs.mkdir()
    (programs / "ray").write_text("#!/bin/sh\nexit 0\n")
    (programs / "ray").chmod(0o755)
    make_model(tmp_path / "base", vocab_size=64, hidden_size=8, context=2, seed=0)
    (tmp_path / "root").mkdir()
    return {
        **os.environ,
        **emulator.env,
        "PATH": f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"],
        f"{trainer.upper()}_DIR": str(home),
        "MODEL": "tiny",
        "HF_CHECKPOINT": str(tmp_path / "base"),
        "REF_LOAD": str(tmp_path / "ref"),
        "SAVE_DIR": str(tmp_path / "saved"),
        "SYNC_DIR": str(tmp_path / "updates"),
        "PROMPT_DATA": "prompts.jsonl",
        "ROLLOUT_FUNCTION": "my.rollouts.generate",
        "STAND_IN_ROOT": str(tmp_path / "root"),
        "STAND_IN_STEPS": "baseline delta",
    }


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_check_base_and_a_run(
    trainer: str, environ: dict[str, str], emulator: Any, deployment: dict[str, Any], tmp_path: Path
) -> None:
    require("torch")
    base = run_recipe(trainer, "base", environ)
    assert base.returncode == 0, base.stderr
    report = json.loads(base.stdout)
    assert [found["level"] for found in report["findings"]] == ["warning"] * len(report["findings"])
    assert report["base"]["identity"] == f"{trainer}-run-1-v000000"
    trained = run_recipe(trainer, "train", environ)
    assert trained.returncode == 0, trained.stderr[-3000:]
    truth = json.loads((tmp_path / "root" / "truth.json").read_text())
    api = Api(emulator.base_url, emulator.admin_token)
    hot_loads = api.ok("GET", "/hotLoads", params={"parentDeploymentId": deployment["spec"]["id"]})["hotLoads"]
    # The base was published ahead, as the first epoch's; the run is the second.
    identities = [one["spec"]["identity"] for one in reversed(hot_loads)]
    assert identities == [f"{trainer}-run-1{end}" for end in ("-v000000", ".2-v000001")]
    for replica in api.ok("GET", f"/hotLoads/{hot_loads[0]['spec']['id']}/replicas")["replicas"]:
        assert emulator.control.call("GET", f"/replicas/{replica['name']}/tensors") == truth
    api.close()


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_a_variable_that_is_not_set_is_named(trainer: str, environ: dict[str, str]) -> None:
    del environ["HF_CHECKPOINT"]
    done = run_recipe(trainer, "check", environ)
    assert done.returncode != 0
    assert "HF_CHECKPOINT" in done.stderr
    assert run_recipe(trainer, "else", {**environ, "HF_CHECKPOINT": "x"}).returncode == 2


@pytest.mark.parametrize("trainer", ["slime", "miles"])
def test_the_deployment_file(trainer: str, emulator: Any, deployment: dict[str, Any], tmp_path: Path) -> None:
    """Filled in, the service takes it, and it reports processed log-probs."""
    text = (ROOT / "recipes" / trainer / "deployment.json").read_text()
    with pytest.raises(Exception, match="placeholders"):
        load_spec(str(ROOT / "recipes" / trainer / "deployment.json"))
    for placeholder, value in {
        "<gateway id>": deployment["spec"]["gatewayIds"][0],
        "<instance type>": deployment["spec"]["resources"]["instanceType"],
        "<bucket>": emulator.bucket,
        "<path of the base checkpoint>": f"{trainer}/base",
    }.items():
        text = text.replace(placeholder, value)
    (tmp_path / "deployment.json").write_text(text)
    spec = load_spec(str(tmp_path / "deployment.json"))
    assert spec["runtime"]["engineConfig"] == {"logprobs-mode": "processed_logprobs"}
    api = Api(emulator.base_url, emulator.admin_token)
    made = api.ok("POST", "/deployments", spec)["deployment"]["spec"]
    assert made["hotLoad"]["pathPrefix"] == f"{trainer}-run"
    api.ok("DELETE", f"/deployments/{made['id']}")
    api.close()
