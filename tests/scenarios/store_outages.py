"""A store that is away, stands still or trickles in a step of a publish.

An outage that ends is waited for, and nothing that arrived is sent again; a time that is over ends the call near it,
and nothing is hot-loaded afterwards.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

from cwtrain.errors import WaitTimeoutError
from cwtrain.hotload import HotLoader
from helpers.tiny_checkpoint import write_full
from scenarios import case
from scenarios.parts import Outage, Stopwatch, emulated_scene

LATE_SECONDS = 5.0


def large_checkpoint(root, mib=160):
    """Write a checkpoint with a tensor that goes in parts, and one that does not; return its directory."""
    raw = random.Random(5).randbytes(1 << 20) * mib
    return write_full(
        root / "large", {"embed.weight": ("U8", (len(raw),), raw), "norm.weight": ("U8", (64,), raw[:64])}
    )


def publish_through(seconds, kind, step, **values):
    """Publish a shard of three parts while the store is away in ``step``; return what was seen."""
    with emulated_scene() as scene:
        directory = large_checkpoint(scene.trainer.root)
        loader = HotLoader(scene.client, scene.deployment_id, s3=scene.s3, timeout=60.0)
        sent = PartsSent(scene.s3)
        outage = Outage(scene, seconds, kind, **step, **values)
        watch = Stopwatch()
        done = loader.publish(directory, "large")
        outage.end()
        assert outage.struck, "the outage met no request"
        assert done.state.value == "COMPLETED"
        assert watch.seconds < seconds + 60.0
        assert not sent.twice, f"parts that had arrived were sent again: {sent.twice}"
        return {"took": watch.seconds, "struck": outage.struck, "parts": len(sent.arrived)}


class PartsSent:
    """Which parts arrived, and which of them were sent again after that, as the client's events tell."""

    def __init__(self, s3):
        self.arrived, self.twice = set(), []
        self._lock = threading.Lock()
        s3.meta.events.register("before-call.s3.UploadPart", self._before)
        s3.meta.events.register("after-call.s3.UploadPart", self._after)

    def _before(self, params, context, **_):
        context["part"] = params["url_path"] + str(params["query_string"].get("partNumber"))
        with self._lock:
            if context["part"] in self.arrived:
                self.twice.append(context["part"])

    def _after(self, http_response, context, **_):
        if http_response.status_code == 200:
            with self._lock:
                self.arrived.add(context["part"])


STEPS = {
    "claim": {"method": "PUT", "path": "/_claims/"},
    "part": {"method": "PUT", "path": r"/large/.*\.safetensors", "after": 1},
    "complete": {"method": "POST", "path": r"/large/.*\.safetensors", "after": 1},
    "manifest": {"method": "PUT", "path": "/_manifests/"},
    "index": {"method": "PUT", "path": r"/large/.*index\.json"},
}

for _step, _rule in STEPS.items():
    for _kind, _values in (("status", {"status": 503}), ("slow_down", {})):

        def _run(seconds, kind=_kind, rule=_rule, values=_values):
            return publish_through(seconds, kind, rule, **values)

        _name = {"status": "503", "slow_down": "slow-down"}[_kind]
        case(
            f"store-{_name}-{_step}",
            shows=f"{_name} at the {_step} of a publish is waited out, and no part that arrived is sent again",
            seconds=(5, 20, 45) if _kind == "status" else (5, 45),
        )(_run)


def ends_in_time(scene, deadline, call):
    """Let ``call`` run out of time; return what was seen. Nothing may be hot-loaded, then or later."""
    before = scene.hot_loads()
    watch = Stopwatch()
    with pytest.raises(WaitTimeoutError) as late:
        call()
    took = watch.seconds
    assert took < deadline + LATE_SECONDS, f"took {took} s: {late.value}"
    assert "0.001" not in str(late.value)
    assert scene.hot_loads() == before
    return {"took": took, "said": str(late.value)[:200]}


@case("stall-directory", shows="with latency of 300 s, publish_directory ends at its deadline", seconds=(15,))
def stalled_directory(seconds):
    with emulated_scene() as scene:
        publisher = scene.publisher(deadline=float(seconds), timeout=1800.0)
        publisher.baseline()
        fault = scene.emulator.control.add_fault("store", "latency", seconds=300, method="PUT", caller="trainer")
        path = scene.trainer.step()
        found = ends_in_time(scene, seconds, lambda: publisher.publish_directory(path))
        scene.emulator.control.clear_faults(fault["id"])
        outcome = publisher.publish_directory(path)
        scene.check_served(scene.trainer.tensors)
        return {**found, "afterwards": outcome.state.value}


@case("stall-tensors", shows="with latency of 300 s, publish_tensors ends at its deadline", seconds=(15,))
def stalled_tensors(seconds):
    with emulated_scene() as scene:
        publisher = scene.publisher(deadline=float(seconds), timeout=1800.0, tensor_base="memory")
        scene.emulator.control.add_fault("store", "latency", seconds=300, method="PUT", caller="trainer")
        tensors = {"embed.weight": np.ones((64, 64), np.float32)}
        return ends_in_time(scene, seconds, lambda: publisher.publish_tensors(tensors, number=1))


@case("throttle-directory", shows="at 60 bytes a second, publish_directory ends at its deadline", seconds=(10,))
def throttled_directory(seconds):
    with emulated_scene() as scene:
        publisher = scene.publisher(deadline=float(seconds), timeout=1800.0)
        publisher.baseline()
        scene.emulator.control.add_fault("store", "throttle", bytes_per_second=60, caller="trainer")
        path = scene.trainer.step()
        return ends_in_time(scene, seconds, lambda: publisher.publish_directory(path))


@case("throttle-tensors", shows="at 60 bytes a second, publish_tensors ends at its deadline", seconds=(10,))
def throttled_tensors(seconds):
    with emulated_scene() as scene:
        publisher = scene.publisher(deadline=float(seconds), timeout=1800.0, tensor_base="memory")
        scene.emulator.control.add_fault("store", "throttle", bytes_per_second=60, caller="trainer")
        tensors = {"embed.weight": np.ones((64, 64), np.float32)}
        return ends_in_time(scene, seconds, lambda: publisher.publish_tensors(tensors, number=1))


@case("stall-command", shows="with latency of 300 s, `hotload publish` ends with rc 1 at the deadline", seconds=(15,))
def stalled_command(seconds):
    with emulated_scene() as scene:
        scene.emulator.control.add_fault("store", "latency", seconds=300, method="PUT", caller="trainer")
        watch = Stopwatch()
        ended = subprocess.run(
            [
                *(sys.executable, "-m", "cwtrain", "hotload", "publish", "--deployment", scene.deployment_id),
                *("--checkpoint", str(scene.trainer.base), "--identity", "late"),
            ],
            env={**os.environ, **scene.emulator.env, "CWTRAIN_HOTLOAD_DEADLINE": f"{seconds}"},
            capture_output=True,
            text=True,
            timeout=seconds + 60.0,
            check=False,
        )
        took = watch.seconds
        assert ended.returncode == 1, ended
        assert ended.stdout == ""
        assert took < seconds + LATE_SECONDS + 10.0, f"took {took} s, the start of the program included"
        assert scene.hot_loads() == []
        return {"took": took, "said": ended.stderr.strip().splitlines()[-1][:200]}
