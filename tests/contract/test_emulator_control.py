"""Capacity, late replicas, reset, the command line of a running emulator, and stores of others."""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cwtrain_emulator.control_client import Control, ControlError
from cwtrain_emulator.emulator import Emulator, EmulatorError
from cwtrain_emulator.pytest_plugin import Bucket
from helpers import tiny_delta
from helpers.conformance import bucket_of, put_snapshot
from helpers.emulator_api import Api, deployment_body
from helpers.s3_servers import BUCKET, TRAINER, S3Server
from helpers.tiny_delta import Files, Tensor


def until(done: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (found := done()):
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
    return found


def hashes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in tensors.items()}


class Scene:
    """A deployment on an emulator of its own, and a chain that grows."""

    def __init__(self, emulator: Emulator, model: Files) -> None:
        self.emulator = emulator
        self.api = Api(emulator.base_url, emulator.admin_token)
        self.bucket = bucket_of(emulator)
        self.gateway: str = self.api.gateway()["spec"]["id"]
        self.deployment = self.api.deployment(self.gateway, emulator.bucket)
        self.id: str = self.deployment["spec"]["id"]
        self.name: str = self.deployment["spec"]["model"]["name"]
        self.tensors = tiny_delta.read_tensors(model)
        put_snapshot(self.bucket, self.deployment, "v0", model)
        self.version = 0

    def publish_delta(self) -> None:
        """Put the next delta into the bucket and hot-load it."""
        new = tiny_delta.nudged(self.tensors, seed=self.version, names=["lm_head.bias"])
        old, self.tensors, self.version = self.tensors, new, self.version + 1
        identity, previous = f"v{self.version}", f"v{self.version - 1}"
        files = tiny_delta.delta_snapshot(old, new, version=identity, base_version=previous)
        put_snapshot(self.bucket, self.deployment, identity, files)
        self.api.completed(self.id, identity, previous)

    def replicas(self) -> list[dict[str, Any]]:
        (mine,) = [entry for entry in self.api.own("/state")["deployments"] if entry["id"] == self.id]
        found: list[dict[str, Any]] = mine["replicas"]
        return found

    def until_served(self, count: int) -> list[dict[str, Any]]:
        """Wait until so many replicas serve the newest version, byte by byte."""

        def served() -> list[dict[str, Any]]:
            found = self.replicas()
            ready = [entry["identity"] == f"v{self.version}" for entry in found]
            return found if len(found) == count and all(ready) else []

        found: list[dict[str, Any]] = until(served, f"{count} replicas serve v{self.version}")
        for entry in found:
            assert self.api.own(f"/replicas/{entry['name']}/tensors") == hashes(self.tensors)
        return found

    def ask(self, **changes: Any) -> Any:
        body = {"model": self.name, "prompt": [1], "max_tokens": 4, "ignore_eos": True, **changes}
        return self.api.session.post(f"{self.emulator.base_url}/v1/completions", json=body, timeout=60)


@pytest.fixture(scope="module")
def scene(tiny_model: Files) -> Iterator[Scene]:
    """One replica that makes 20 tokens a second in two slots; one request may wait."""
    with Emulator(replicas=1, slots=2, queue=1, tokens_per_second=20, retry_after="3") as emulator:
        made = Scene(emulator, tiny_model)
        made.api.completed(made.id, "v0")
        yield made
        made.api.close()


# Capacity ------------------------------------------------------------------------------------------------------------


def test_beyond_slots_and_queue_is_429_and_the_timing_says_who_waited(scene: Scene) -> None:
    nvext = {"extra_fields": ["timing"]}
    control = scene.emulator.control
    stuck = control.add_fault("replica", "stuck", on="request", times=1)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        first = pool.submit(scene.ask, n=2, nvext=nvext)
        until(lambda: control.faults()[0]["struck"], "the first one has the slots")
        others = {pool.submit(scene.ask, n=2, nvext=nvext) for _ in range(3)}
        # One of them waits, the others are refused at once.
        until(lambda: sum(call.done() for call in others) == 2, "two are refused")
        refused = [call.result() for call in others if call.done()]
        control.clear_faults(stuck["id"])
        (waited,) = [call.result() for call in others if call.result() not in refused]
    for answer in refused:
        assert (answer.status_code, answer.headers["Retry-After"]) == (429, "3")
        assert answer.json()["error"]["type"] == "RateLimitError"
    timings = [answer.json()["nvext"]["timing"] for answer in (first.result(), waited)]
    # The second one waited for the first one's four tokens.
    assert timings[1]["prefill_wait_time_ms"] > timings[0]["prefill_wait_time_ms"]
    for timing in timings:
        assert timing["total_time_ms"] - timing["prefill_wait_time_ms"] >= 190
        assert timing["ttft_ms"] <= timing["total_time_ms"]
    assert "nvext" not in scene.ask(max_tokens=1).json()
    answer = scene.ask(max_tokens=1, stream=True, stream_options={"include_usage": True}, nvext=nvext)
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert events[-1]["nvext"]["timing"]["ttft_ms"] > 0


def test_a_request_with_more_sequences_than_slots_runs_alone(scene: Scene) -> None:
    assert len(scene.ask(n=5, max_tokens=1).json()["choices"]) == 5


def test_a_client_that_hangs_up_in_the_line_leaves_it(scene: Scene) -> None:
    import requests

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(scene.ask, n=2, max_tokens=12)
        time.sleep(0.1)
        with pytest.raises(requests.Timeout):
            scene.api.session.post(
                f"{scene.emulator.base_url}/v1/completions", json={"model": scene.name, "prompt": [1]}, timeout=0.1
            )
        assert until(lambda: scene.ask(max_tokens=1).status_code == 200, "the place in the line is free")
        assert first.result().status_code == 200


# Replicas that come and go -------------------------------------------------------------------------------------------


def test_a_late_replica_copies_the_chain_from_a_peer_and_hot_loads_wait_for_it(scene: Scene) -> None:
    scene.publish_delta()
    control = scene.emulator.control
    control.add_fault("store", "denied", caller="service", permission="s3:GetObject")
    assert control.scale(scene.id, 2) == [f"{scene.deployment['spec']['name']}-{number:02d}" for number in (0, 1)]
    # It cannot have read the bucket.
    scene.until_served(2)
    control.clear_faults()

    # A third one joins in the middle of a hot-load, which then needs three.
    stuck = control.add_fault("replica", "stuck", identity="v2", replica="-00$")
    new = tiny_delta.nudged(scene.tensors, seed=99, names=["lm_head.bias"])
    files = tiny_delta.delta_snapshot(scene.tensors, new, version="v2", base_version="v1")
    put_snapshot(scene.bucket, scene.deployment, "v2", files)
    mine = scene.api.hot_load(scene.id, "v2", "v1")
    control.scale(scene.id, 3)

    def states() -> list[str]:
        return [entry["state"] for entry in scene.api.ok("GET", f"/hotLoads/{mine}/replicas")["replicas"]]

    assert len(states()) == 3
    until(lambda: states() == ["UPDATING", "READY", "READY"], "the late one has caught up")
    assert scene.api.ok("GET", f"/hotLoads/{mine}")["hotLoad"]["status"]["state"] == "HOT_LOAD_STATE_IN_PROGRESS"
    control.clear_faults(stuck["id"])
    assert scene.api.ended(mine)["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
    scene.tensors, scene.version = new, 2
    pids = [entry["pid"] for entry in scene.until_served(3)]

    # An update of the bounds moves the number into them, and those that go are gone with their files.
    spec = scene.api.ok("GET", f"/deployments/{scene.id}")["deployment"]["spec"]
    scene.api.ok("PATCH", f"/deployments/{scene.id}", {**spec, "autoscaling": {"min": 1, "max": 1, "concurrency": 4}})
    assert len(scene.until_served(3)) == 3  # as before: the bounds are what they were
    bounds = {"min": 1, "max": 2, "concurrency": 4}
    scene.api.until_status(f"/deployments/{scene.id}", "deployment")
    scene.api.ok("PATCH", f"/deployments/{scene.id}", {**spec, "autoscaling": bounds})
    scene.until_served(2)
    until(
        lambda: not os.path.exists(f"/proc/{pids[2]}") if sys.platform == "linux" else True, "the third one has ended"
    )
    scene.api.until_status(f"/deployments/{scene.id}", "deployment")
    control.scale(scene.id, 1)
    scene.until_served(1)


def test_a_replica_without_a_peer_replays_63_deltas_and_no_more(scene: Scene) -> None:
    control = scene.emulator.control
    while scene.version < 63:
        scene.publish_delta()
    disk = scene.emulator.state_dir / "replicas" / scene.id

    def lose_the_disk() -> dict[str, Any]:
        (victim,) = scene.replicas()
        os.kill(victim["pid"], signal.SIGSTOP)
        for file in disk.rglob("generation.json"):
            file.unlink()
        os.kill(victim["pid"], signal.SIGKILL)

        def back() -> Any:
            (found,) = scene.replicas()
            return found if found["pid"] not in (0, victim["pid"]) and found["state"] in ("READY", "ERROR") else None

        found: dict[str, Any] = until(back, "the replica is back")
        return found

    assert lose_the_disk()["identity"] == "v63"
    scene.until_served(1)
    scene.publish_delta()
    lost = lose_the_disk()
    assert (lost["state"], lost["identity"]) == ("ERROR", "")
    assert "64 deltas would have to be replayed from the bucket; the limit is 63" in lost["error"]
    assert "no other replica" in lost["error"]
    newest = scene.api.ok("GET", f"/hotLoads?parentDeploymentId={scene.id}&maxPageSize=1")["hotLoads"][0]
    (shown,) = scene.api.ok("GET", f"/hotLoads/{newest['spec']['id']}/replicas")["replicas"]
    assert shown["state"] == "ERROR"
    assert "limit is 63" in shown["errorReason"]
    assert scene.ask().status_code == 503
    assert control.status()["deployments"][0]["replicas"][0]["error"] == lost["error"]

    # A full one mends it; then a chain through the older full one is made again from the bucket.
    files = tiny_delta.full_snapshot(scene.tensors, config=json.loads(_config(scene)))
    put_snapshot(scene.bucket, scene.deployment, "f65", files)
    scene.api.completed(scene.id, "f65")
    v1 = tiny_delta.nudged(_base(scene), seed=0, names=["lm_head.bias"])
    other = tiny_delta.nudged(v1, seed=5)
    files = tiny_delta.delta_snapshot(v1, other, version="side", base_version="v1")
    put_snapshot(scene.bucket, scene.deployment, "side", files)
    done = scene.api.completed(scene.id, "side", "v1")
    assert [entry["identity"] for entry in done["spec"]["snapshotChain"]] == ["v0", "v1", "side"]
    (replica,) = scene.replicas()
    assert scene.api.own(f"/replicas/{replica['name']}/tensors") == hashes(other)


def _object(scene: Scene, identity: str, name: str) -> bytes:
    key = f"{scene.deployment['spec']['hotLoad']['pathPrefix']}/{identity}/{name}"
    raw: bytes = scene.bucket.client.get_object(Bucket=scene.bucket.name, Key=key)["Body"].read()
    return raw


def _config(scene: Scene) -> bytes:
    return _object(scene, "v0", "config.json")


def _base(scene: Scene) -> dict[str, Tensor]:
    index = json.loads(_object(scene, "v0", tiny_delta.INDEX))
    return tiny_delta.read_tensors({name: _object(scene, "v0", name) for name in set(index["weight_map"].values())})


# Back to the start ---------------------------------------------------------------------------------------------------


def run_cli(*arguments: str, environ: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cwtrain_emulator", *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, env={**os.environ, **(environ or {})}, check=False
    )


@pytest.mark.parametrize("name", ["Upper", "two.labels", "-dash", "ab", "a" * 64, ""])
def test_a_bucket_that_the_store_would_never_make_is_refused_at_once(name: str) -> None:
    done = run_cli("serve", "--bucket", name)
    assert (done.returncode, done.stdout) == (2, "")
    assert "lower-case letters, digits and inner dashes" in done.stderr


def test_status_faults_and_reset_from_the_command_line(tmp_path: Path, tiny_model: Files) -> None:
    state = str(tmp_path / "state")
    with Emulator(state, replicas=1) as emulator:
        scene = Scene(emulator, tiny_model)
        scene.api.completed(scene.id, "v0")
        before = scene.ask(return_token_ids=True, max_tokens=8).json()["choices"][0]["token_ids"]
        scene.bucket.client.create_multipart_upload(Bucket=emulator.bucket, Key="begun")
        environ = emulator.env

        added = run_cli("faults", "add", "api", "status", "--status", "503", "--path", "gateways", environ=environ)
        assert json.loads(added.stdout)["id"] == "fault-1"
        assert scene.api.call("GET", "/gateways").status_code == 503
        listed = json.loads(run_cli("faults", "list", "--state-dir", state).stdout)
        assert [(rule["id"], rule["struck"]) for rule in listed] == [("fault-1", 1)]
        assert json.loads(run_cli("faults", "clear", "fault-1", environ=environ).stdout) == []
        wrong = run_cli("faults", "add", "api", "throttle", environ=environ)
        assert (wrong.returncode, wrong.stdout) == (2, "")
        assert "kind: must be one of" in wrong.stderr
        emulator.control.add_fault("endpoint", "drop")
        status = json.loads(run_cli("status", "--state-dir", state).stdout)
        assert status["deployments"][0]["identity"] == "v0"
        assert status["faults"][0]["kind"] == "drop"

        done = json.loads(run_cli("reset", "--state-dir", state).stdout)
        expected = {"gateways": 1, "deployments": 1, "capacity_claims": 0, "faults": 1, "objects": len(tiny_model)}
        assert done == expected
        status = emulator.control.status()
        assert [status[name] for name in ("gateways", "deployments", "hot_loads", "faults")] == [[], [], [], []]
        assert "Contents" not in scene.bucket.client.list_objects_v2(Bucket=emulator.bucket)
        assert "Uploads" not in scene.bucket.client.list_multipart_uploads(Bucket=emulator.bucket)
        assert list((tmp_path / "state" / "replicas").iterdir()) == []

        # The same once more, under the same names; and unseeded draws begin anew.
        gateway = scene.api.gateway()["spec"]["id"]
        body = {name: value for name, value in scene.deployment["spec"].items() if name != "organizationId"}
        scene.api.ok(
            "POST", "/deployments", {**deployment_body(gateway, emulator.bucket), **body, "gatewayIds": [gateway]}
        )
        scene.api.until_status(f"/deployments/{scene.id}", "deployment")
        put_snapshot(scene.bucket, scene.deployment, "v0", tiny_model)
        scene.api.completed(scene.id, "v0")
        assert scene.ask(return_token_ids=True, max_tokens=8).json()["choices"][0]["token_ids"] == before
        scene.api.close()
    gone = run_cli("status", "--state-dir", state)
    assert gone.returncode == 1
    assert "no emulator runs on the state directory" in gone.stderr
    assert "cwtrain emulator start --state-dir" in gone.stderr


def test_which_emulator_is_asked_for() -> None:
    with pytest.raises(ControlError, match="give --state-dir or --url"):
        Control.find(environ={})
    with pytest.raises(ControlError, match="COREWEAVE_API_TOKEN is not set"):
        Control.find(url="http://127.0.0.1:1", environ={})
    with pytest.raises(ControlError, match=r"no emulator answers at http://127\.0\.0\.1:1"):
        Control.find(url="http://127.0.0.1:1", environ={"COREWEAVE_API_TOKEN": "x"}).status()


# The store -----------------------------------------------------------------------------------------------------------


def test_a_killed_store_comes_back_with_what_it_had(scene: Scene) -> None:
    key = f"k-{uuid.uuid4()}"
    scene.bucket.client.put_object(Bucket=scene.bucket.name, Key=key, Body=b"kept")
    listing = subprocess.run(["ps", "-eo", "pid=,ppid=,comm="], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listing.splitlines()]
    (weed,) = [int(pid) for pid, parent, name in rows if int(parent) == scene.emulator.pid and "weed" in name]
    os.kill(weed, signal.SIGKILL)

    def read() -> Any:
        try:
            return scene.bucket.client.get_object(Bucket=scene.bucket.name, Key=key)["Body"].read()
        except Exception:  # not back yet, whatever way it says so
            return b""

    assert until(read, "the store is back") == b"kept"


def test_a_store_of_others(seaweedfs_server: S3Server, tiny_model: Files) -> None:
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": TRAINER[0], "AWS_SECRET_ACCESS_KEY": TRAINER[1]}
    with Emulator(replicas=1, s3_endpoint=seaweedfs_server.endpoint, bucket=BUCKET, environ=environ) as emulator:
        assert (emulator.s3_endpoint, emulator.bucket) == (seaweedfs_server.endpoint, BUCKET)
        api = Api(emulator.base_url, emulator.admin_token)
        made = api.deployment(api.gateway()["spec"]["id"], BUCKET)
        store = Bucket(BUCKET, seaweedfs_server.client(TRAINER))
        put_snapshot(store, made, "v0", tiny_model)
        api.completed(made["spec"]["id"], "v0")
        old = tiny_delta.read_tensors(tiny_model)
        new = tiny_delta.nudged(old, seed=1)
        put_snapshot(store, made, "v1", tiny_delta.delta_snapshot(old, new, version="v1", base_version="v0"))
        api.completed(made["spec"]["id"], "v1", "v0")
        (replica,) = api.own("/state")["deployments"][0]["replicas"]
        assert api.own(f"/replicas/{replica['name']}/tensors") == hashes(new)
        with pytest.raises(ControlError, match="the store is not the emulator's own"):
            emulator.control.add_fault("store", "slow_down")
        with pytest.raises(ControlError, match="has no keys to give out"):
            emulator.control.credentials()
        # What is in it belongs to others.
        assert emulator.control.reset()["objects"] is None
        prefix = made["spec"]["hotLoad"]["pathPrefix"]
        assert store.client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)["KeyCount"] == len(tiny_model) + 2
        api.close()


def test_a_start_that_fails_says_why() -> None:
    """Also with temporary state, which is gone by the time the log is asked for."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(EmulatorError, match=f"port {port} on 127.0.0.1 is taken"):
            Emulator(port=port).start()
