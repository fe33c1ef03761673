"""A trainer whose nodes share a disk that lags: the publishing rank sees another node's shards seconds late.

The ranks are real gloo ranks in processes of their own. The disk is a stand-in (the emulator's fault ``directory
late``): no network file system is mounted, each rank has a directory, and rank 1's files are copied late to rank 0's.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.engine.model_io import make_model
from helpers.emulator_api import Api
from helpers.requirements import KNOWN
from scenarios import case
from scenarios.parts import Stopwatch

TRAINER = Path(__file__).parents[1] / "helpers" / "rank_trainer.py"
LIMIT = 400.0


def late_ranks(root, emulator, deployment, *, seconds, steps, group_seconds, first="absent", **settings):
    """Run a trainer of two ranks on a disk that lags by ``seconds``, and return what each rank saw."""
    torch = KNOWN["torch"]
    if not torch.present():
        raise RuntimeError(f"gloo ranks need torch: {torch.install}")
    base = Path(root) / "base"
    if not base.exists():
        make_model(base, vocab_size=64, hidden_size=8, context=2, seed=0)
    directories = [str(Path(root) / f"node-{rank}" / "updates") for rank in (0, 1)]
    fault = emulator.control.add_fault(
        "directory", "late", source=directories[1], view=directories[0], seconds=seconds, first=first
    )
    plan = {
        "dialect": "slime",
        "world": 2,
        "seed": 1,
        "group_seconds": group_seconds,
        "root": str(root),
        "base": str(base),
        "node_local": True,
        "lives": [steps],
    }
    (Path(root) / "plan.json").write_text(json.dumps(plan))
    environ = {
        **os.environ,
        **emulator.env,
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"],
        "CWTRAIN_HOTLOAD_RUN_ID": "run",
        **{f"CWTRAIN_HOTLOAD_{name}": str(value) for name, value in settings.items()},
    }
    log = Path(root) / "log"
    with log.open("wb") as stream:
        launcher = subprocess.Popen(
            [sys.executable, str(TRAINER), str(Path(root) / "plan.json")],
            env=environ,
            stderr=stream,
            start_new_session=True,
        )
    try:
        code = launcher.wait(timeout=LIMIT)
    finally:
        # The ranks are forks in its session: none outlives this.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
        emulator.control.clear_faults(fault["id"])
    assert code == 0, log.read_text(errors="replace")[-4000:]
    return [json.loads((Path(root) / f"seen-0-{rank}.json").read_text())["seen"] for rank in (0, 1)]


def replicas_hold_the_truth(emulator, deployment, root):
    """Every replica has the trainer's bytes."""
    truth = json.loads((Path(root) / "truth.json").read_text())
    deployments = emulator.control.call("GET", "/state")["deployments"]
    (state,) = [one for one in deployments if one["id"] == deployment["spec"]["id"]]
    assert state["replicas"]
    for replica in state["replicas"]:
        assert emulator.control.call("GET", f"/replicas/{replica['name']}/tensors") == truth, replica["name"]


@contextlib.contextmanager
def _deployed():
    with Emulator(replicas=1) as emulator, tempfile.TemporaryDirectory(prefix="cwtrain-field-") as root:
        api = Api(emulator.base_url, emulator.admin_token)
        try:
            target = {"bucket": emulator.bucket, "pathPrefix": "field", "transitionMode": "TRANSITION_MODE_ASYNC"}
            deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket, hotLoad=target)
            yield root, emulator, deployment
        finally:
            api.close()


@case(
    "lagging-shard", shows="a shard of another node that shows late is waited for, gloo ranks beat", seconds=(5, 30, 60)
)
def shard(seconds):
    with _deployed() as (root, emulator, deployment):
        watch = Stopwatch()
        steps = ["baseline", "delta", "delta"]
        # The group gives up after 4 s without a collective: less than any of the waits.
        seen = late_ranks(root, emulator, deployment, seconds=seconds, steps=steps, group_seconds=4)
        assert seen == [steps, steps], seen
        replicas_hold_the_truth(emulator, deployment, root)
        assert watch.seconds > 2 * seconds
        return {"took": watch.seconds, "versions": 2, "ranks": 2}


@case("lagging-shard-short", shows="a shard that shows with half of its bytes first is waited for", seconds=(30,))
def short(seconds):
    with _deployed() as (root, emulator, deployment):
        watch = Stopwatch()
        steps = ["baseline", "delta"]
        seen = late_ranks(root, emulator, deployment, seconds=seconds, steps=steps, group_seconds=4, first="short")
        assert seen == [steps, steps], seen
        replicas_hold_the_truth(emulator, deployment, root)
        return {"took": watch.seconds}


@case("lagging-shard-never", shows="after 90 s all ranks end with both explanations", seconds=(3600,))
def never(seconds):
    with _deployed() as (root, emulator, deployment):
        watch = Stopwatch()
        seen = late_ranks(root, emulator, deployment, seconds=seconds, steps=["baseline", "delta"], group_seconds=4)
        ends = [one[-1] for one in seen]
        assert [one["error"] for one in ends] == ["ConfigError"] * 2, ends
        for one in ends:
            assert "share no disk" in one["text"], one
            assert "the shared disk shows the files of other nodes later" in one["text"], one
        assert 90 <= watch.seconds < 150
        return {"took": watch.seconds, "error": ends[0]["text"]}
