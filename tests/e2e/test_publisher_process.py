"""A publisher's process: its threads do not outlive it, and nothing that it leaves behind is in the way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cwtrain.errors import WaitTimeoutError
from cwtrain.hotload import PublishState
from cwtrain.hotload.status import BaselineState, read_status
from helpers.emulator_api import Api
from helpers.publish_scene import Scene

TESTS = Path(__file__).parents[1]


@pytest.fixture
def scene(emulator, deployment, tmp_path):
    api = Api(emulator.base_url, emulator.admin_token)
    made = Scene(emulator, deployment, api, tmp_path)
    yield made
    made.close()
    api.close()


def start(scene, faults, slow):
    """Start a process whose baseline cannot end, and return it when the upload of weights is on its way."""
    script = TESTS / "helpers" / "baseline_and_leave.py"
    process = subprocess.Popen(
        [sys.executable, str(script), scene.deployment_id, str(scene.trainer.root)],
        env={
            **os.environ,
            **scene.emulator.env,
            "PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        },
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "PUBLISHING\n"
    deadline = time.monotonic() + 60
    while not faults.struck(slow):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return process


@pytest.mark.parametrize("how", ["leave", "SIGTERM", "SIGKILL"])
def test_a_process_ends_while_its_baseline_is_on_its_way_and_the_next_one_goes_on(scene, faults, how):
    """B48: threads end with the main thread, no clean-up code is needed, and the same command goes on."""
    slow = faults.add("store", "latency", method="PUT", path="run-v000000/model-", caller="trainer", seconds=600)
    process = start(scene, faults, slow)
    if how != "leave":
        process.send_signal(getattr(signal, how))
    process.communicate("\n" if how == "leave" else None, timeout=60)
    assert process.returncode == (0 if how == "leave" else -getattr(signal, how))
    faults.clear(slow)
    publisher = scene.publisher()
    status = read_status(publisher.loader.store, publisher.loader.location, scene.deployment_id)
    assert status.state is BaselineState.PUBLISHING
    assert publisher.baseline().identity == "run-v000000"
    scene.check_served(scene.trainer.at(0))


def test_a_long_baseline_returns_in_time_and_the_first_version_waits_for_it(scene, faults):
    """The other ranks stand in a barrier of half an hour: the call returns, the base goes on in its thread."""
    stuck = faults.add("replica", "stuck", identity="run-v000000")
    publisher = scene.publisher(baseline_wait=0.2, deadline=30.0)
    assert publisher.baseline().state is PublishState.PUBLISHING
    assert publisher.baseline_running
    faults.clear(stuck)
    outcome = publisher.publish_directory(scene.trainer.step())
    assert scene.hot_load(outcome.identity).previous_identity == "run-v000000"
    scene.check_served(scene.trainer.tensors)


def test_an_upload_stops_at_the_deadline_and_the_same_call_goes_on(scene, faults):
    publisher = scene.publisher(deadline=None)
    publisher.baseline()
    place = scene.trainer.step()
    slow = faults.add("store", "latency", method="PUT", path="run-v000001/", caller="trainer", seconds=2, times=1)
    with pytest.raises(WaitTimeoutError, match="uploading") as caught:
        publisher.publish_directory(place, deadline=0.5)
    assert "CWTRAIN_HOTLOAD_DEADLINE" in caught.value.hint
    faults.clear(slow)
    assert publisher.publish_directory(place).identity == "run-v000001"
    scene.check_served(scene.trainer.tensors)
