"""A stand-in trainer on real gloo ranks, against the emulator: replicas end with its bytes, whatever happens."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from helpers.requirements import require

HELPER = Path(__file__).parents[1] / "helpers" / "rank_trainer.py"
LIMIT = 200.0


def run(plan: dict[str, Any], emulator: Any, deployment: dict[str, Any], root: Path, **settings: str) -> None:
    """Run a plan to its end."""
    require("torch")
    plan = {"world": 2, "seed": 1, "group_seconds": 30, "root": str(root), **plan}
    (root / "plan.json").write_text(json.dumps(plan))
    environ = {
        **os.environ,
        **emulator.env,
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"],
        "CWTRAIN_HOTLOAD_RUN_ID": "run",
        **settings,
    }
    with (root / "log").open("wb") as log:
        launcher = subprocess.Popen(
            [sys.executable, str(HELPER), str(root / "plan.json")], env=environ, stderr=log, start_new_session=True
        )
    try:
        code = launcher.wait(timeout=LIMIT)
    finally:
        # The ranks are forks in its session: none outlives the test.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    assert code == 0, (root / "log").read_text(errors="replace")[-4000:]


def seen(root: Path, life: int, rank: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / f"seen-{life}-{rank}.json").read_text())
    return found


def replicas_hold_the_truth(emulator: Any, deployment: dict[str, Any], root: Path) -> None:
    truth = json.loads((root / "truth.json").read_text())
    (state,) = [
        one for one in emulator.control.call("GET", "/state")["deployments"] if one["id"] == deployment["spec"]["id"]
    ]
    assert state["replicas"]
    for replica in state["replicas"]:
        held = emulator.control.call("GET", f"/replicas/{replica['name']}/tensors")
        assert held == truth, replica["name"]


@pytest.mark.parametrize("dialect", ["slime", "miles"])
def test_thirty_versions_and_everything_that_happens_to_a_run(
    dialect: str, emulator: Any, deployment: dict[str, Any], faults: Any, model: Path, tmp_path: Path
) -> None:
    """B05, B12, B29: full cuts, an empty version, restarts, a killed hook, a lost rank, a failed and a long publish."""
    # The group gives up after 4 s, as gloo does after 30 min; version 4 takes longer than that.
    faults.add("replica", "slow", on="load", seconds=5, identity="run-v000004", times=1)
    # Both the delta and the full snapshot in its place fail to load: the run stops on all ranks.
    faults.add("replica", "damage", identity=r"run\.3-v000003.*")
    lives = [
        ["baseline", *["delta"] * 5, "empty", *["delta"] * 4, "killed"],
        ["baseline", *["delta"] * 7, "lost"],
        ["baseline", *["delta"] * 3],
        ["baseline", *["delta"] * 6, "full", "delta"],
    ]
    plan = {"dialect": dialect, "base": str(model), "lives": lives, "group_seconds": 4}
    run(plan, emulator, deployment, tmp_path, CWTRAIN_HOTLOAD_FULL_EVERY="5")

    assert seen(tmp_path, 0, 1)["seen"][-1]["error"] == "IntegrationError", "the rank beside the killed one is told"
    assert not (tmp_path / "seen-0-0.json").exists(), "rank 0 was killed"
    assert "lost the other ranks" in seen(tmp_path, 1, 0)["seen"][-1]["text"]
    stopped = [seen(tmp_path, 2, rank)["seen"][-1] for rank in (0, 1)]
    assert {one["error"] for one in stopped} == {"HotLoadFailedError"}
    assert stopped[0]["text"] == stopped[1]["text"]
    assert stopped[1]["notes"][-1] == "rank 0 of 2 failed, so all ranks stop"
    for rank in (0, 1):
        assert seen(tmp_path, 3, rank)["seen"] == lives[3]
    replicas_hold_the_truth(emulator, deployment, tmp_path)
    # The trainer's tracker runs on the last rank alone; rank 0, which published, has none.
    assert seen(tmp_path, 3, 0)["tracked"] == []
    tracked = seen(tmp_path, 3, 1)["tracked"]
    assert [one["version"] for one in tracked] == list(range(1, 9))
    assert {"hotload/total_seconds", "hotload/uploaded_bytes", "hotload/chain_length"} <= set(tracked[0]["names"])


def test_nodes_that_share_no_disk(
    emulator: Any, deployment: dict[str, Any], faults: Any, model: Path, tmp_path: Path
) -> None:
    """Each rank sends its own shards, rank 0 the index; one that fails to send stops all. miles, with slime's path."""
    faults.add("store", "denied", permission="s3:PutObject", path="run-v000002/model-00001-of-00002")
    lives = [["baseline", "delta", "delta"], ["baseline", "delta", "empty", "delta"]]
    path = "cwtrain.integrations.slime.hook"
    plan = {"dialect": "miles", "hook": path, "base": str(model), "lives": lives, "node_local": True}
    run(plan, emulator, deployment, tmp_path, CWTRAIN_HOTLOAD_FULL_EVERY="0", CWTRAIN_HOTLOAD_MIRROR="0")
    stopped = [seen(tmp_path, 0, rank)["seen"] for rank in (0, 1)]
    assert [len(one) for one in stopped] == [3, 3]
    assert [one[-1]["error"] for one in stopped] == ["StorageAccessError"] * 2
    assert stopped[0][-1]["notes"][-1] == "rank 1 of 2 failed, so all ranks stop"
    for rank in (0, 1):
        assert seen(tmp_path, 1, rank)["seen"] == lives[1]
    replicas_hold_the_truth(emulator, deployment, tmp_path)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base checkpoint that the emulator can serve."""
    from cwtrain_emulator.engine.model_io import make_model

    folder = tmp_path_factory.mktemp("model") / "base"
    make_model(folder, vocab_size=64, hidden_size=8, context=2, seed=0)
    return folder
