"""Kill the emulator's processes at seeded moments, start it again on the same state, and look for what was lost.

    python tools/emulator_kills.py --seeds 200

Each seed is one round: work goes on (deployments come and go, snapshots are uploaded, full ones and deltas hot-loaded,
completions sampled), and at a moment that the seed chooses one process is killed with SIGKILL: the service itself, one
of its replicas, or the object store. Then the round checks what must hold:

- every gateway, deployment, hot-load and object whose creation was answered is there, and says what it said;
- no hot-load hangs: each one ends, and a COMPLETED one stays COMPLETED;
- every replica serves, and the bytes of its tensors are those of the identity that it names;
- after a kill of the service, all of its processes end.

A seed always makes the same choices; when the kill hits is real time, so the interleaving is not repeated exactly.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import needed

with needed.imports():
    import boto3
    import requests
    import zstandard
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError

    from cwtrain_emulator.emulator import Emulator
    from cwtrain_emulator.engine.model_io import make_model

API = "/v1alpha1/inference"
INDEX = "model.safetensors.index.json"
VICTIMS = ("service", "replica", "store")
PATIENCE = 60.0
LONGEST_CHAIN = 12

Tensors = dict[str, bytes]
Files = dict[str, bytes]


class Lost(AssertionError):
    """Something that must hold does not."""


class Interrupted(Exception):
    """A call failed as calls do when a process dies; whether it was done is unknown."""


@dataclass
class Deployment:
    """One deployment, and what was published for it: identity -> tensors; `chain` is what the last one stands on."""

    spec: dict[str, Any]
    snapshots: dict[str, Tensors] = field(default_factory=dict)
    objects: dict[str, str] = field(default_factory=dict)
    hot_loads: dict[str, str] = field(default_factory=dict)
    completed: list[str] = field(default_factory=list)
    deltas: int = 0

    @property
    def id(self) -> str:
        """Its id."""
        return str(self.spec["id"])


class Campaign:
    """One emulator on one state directory, and all that it must remember."""

    def __init__(self, state: Path, model: Files) -> None:
        self.emulator = Emulator(state, replicas=2)
        self.model = model
        self.layout, self.base = read_tensors(model)
        self.deployments: list[Deployment] = []
        self.gateways: dict[str, dict[str, Any]] = {}
        self.killed: Counter[str] = Counter()
        self.session = requests.Session()
        self.session.trust_env = False
        self.version = self.hot_loads = self.objects = 0

    def start(self) -> None:
        """Start, or start again on the same state."""
        self.emulator.start()
        self.base_url, self.bucket = self.emulator.base_url, self.emulator.bucket
        self.session.headers["Authorization"] = f"Bearer {self.emulator.admin_token}"
        self.s3 = boto3.client(
            "s3",
            endpoint_url=self.emulator.s3_endpoint,
            aws_access_key_id=self.emulator.access_key_id,
            aws_secret_access_key=self.emulator.secret_access_key,
            region_name=self.emulator.region,
            config=Config(
                s3={"addressing_style": "path"},
                request_checksum_calculation="when_required",
                retries={"total_max_attempts": 1},
                connect_timeout=5,
                read_timeout=20,
            ),
        )

    # Calls

    def call(self, method: str, path: str, body: Any = None) -> requests.Response:
        """Send a call; raise Interrupted when there is no answer, or one that says that a process is away."""
        try:
            answer = self.session.request(method, self.base_url + path, json=body, timeout=30)
        except requests.RequestException as exc:
            raise Interrupted(str(exc)) from None
        if answer.status_code >= 500:
            raise Interrupted(f"{answer.status_code} {answer.text}")
        return answer

    def ok(self, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """Send a call that must not be refused."""
        answer = self.call(method, path, body)
        if answer.status_code != 200:
            raise Lost(f"{method} {path}: {answer.status_code} {answer.text}")
        found: dict[str, Any] = answer.json()
        return found

    # Work

    def work(self, rng: random.Random, stop: threading.Event) -> None:
        """Do things until told to stop, or interrupted by the kill."""
        with contextlib.suppress(Interrupted):
            while not stop.is_set():
                if not self.deployments or (len(self.deployments) < 2 and rng.random() < 0.02):
                    self.create(rng)
                    continue
                deployment = rng.choice(self.deployments)
                draw = rng.random()
                if draw < 0.02 and len(self.deployments) > 1:
                    self.delete(deployment, rng)
                elif draw < 0.6 or not deployment.completed:
                    self.publish(deployment, rng)
                else:
                    self.sample(deployment, rng)

    def create(self, rng: random.Random) -> None:
        """Make a gateway, if there is none, and a deployment."""
        if not self.gateways:
            mark = new_id(rng)
            body = {
                "id": mark,
                "name": f"gw-{mark[:8]}",
                "zones": ["US-EAST-04A"],
                "coreWeaveAuth": {},
                "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
            }
            self.gateways[mark] = self.ok("POST", f"{API}/gateways", body)["gateway"]["spec"]
        mark = new_id(rng)
        bucket = self.bucket
        body = {
            "id": mark,
            "name": f"dep-{mark[:8]}",
            "gatewayIds": list(self.gateways),
            "runtime": {"engine": "dynamo-vllm"},
            "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
            "model": {"name": f"model-{mark[:8]}", "bucket": bucket, "path": f"{mark[:8]}/base"},
            "autoscaling": {"min": 1, "max": 2, "concurrency": 4},
            "traffic": {"weight": 100},
            "hotLoad": {"bucket": bucket, "pathPrefix": mark[:8], "transitionMode": "TRANSITION_MODE_ASYNC"},
        }
        made = Deployment(self.ok("POST", f"{API}/deployments", body)["deployment"]["spec"])
        self.deployments.append(made)
        self.until_ready(made)

    def delete(self, deployment: Deployment, rng: random.Random) -> None:
        """Delete a deployment; from then on nothing is asked of it."""
        self.deployments.remove(deployment)
        self.call("DELETE", f"{API}/deployments/{deployment.id}")

    def publish(self, deployment: Deployment, rng: random.Random) -> None:
        """Upload a full snapshot or a delta and hot-load it."""
        self.version += 1
        identity = f"v{self.version}-{rng.randrange(1 << 16):04x}"
        full = not deployment.completed or deployment.deltas >= LONGEST_CHAIN or rng.random() < 0.2
        previous = "" if full else deployment.completed[-1]
        old = self.base if full else deployment.snapshots[previous]
        new = changed(old, rng)
        files = full_files(self.model, self.layout, new) if full else delta_files(old, new, identity, previous)
        for name in sorted(files, key=lambda name: name == INDEX):
            self.put(deployment, f"{identity}/{name}", files[name])
        deployment.snapshots[identity] = new
        self.hot_load(deployment, identity, previous, rng)

    def put(self, deployment: Deployment, name: str, raw: bytes) -> None:
        """Write an object; what was answered must be there for ever."""
        key = f"{deployment.spec['hotLoad']['pathPrefix']}/{name}"
        try:
            self.s3.put_object(Bucket=self.bucket, Key=key, Body=raw, IfNoneMatch="*")
        except (BotoCoreError, ClientError) as exc:
            raise Interrupted(str(exc)) from None
        self.objects += 1
        deployment.objects[key] = hashlib.sha256(raw).hexdigest()

    def hot_load(self, deployment: Deployment, identity: str, previous: str, rng: random.Random) -> None:
        """Create a hot-load and, most of the time, wait for it."""
        body: dict[str, Any] = {
            "hotLoadId": new_id(rng),
            "deploymentId": deployment.id,
            "identity": identity,
            "type": "SNAPSHOT_TYPE_INCREMENTAL" if previous else "SNAPSHOT_TYPE_FULL",
        }
        if previous:
            body["incrementalSnapshotMetadata"] = {
                "previousSnapshotIdentity": previous,
                "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
                "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
            }
        answer = self.call("POST", f"{API}/hotLoads", body)
        if answer.status_code != 200:
            # It is in progress still, or the deployment comes back just now.
            if answer.status_code in (400, 403, 409):
                return
            raise Lost(f"create of a hot-load: {answer.status_code} {answer.text}")
        deployment.hot_loads[body["hotLoadId"]] = identity
        self.hot_loads += 1
        self.ended(deployment, body["hotLoadId"])

    def ended(self, deployment: Deployment, hot_load_id: str) -> None:
        """Wait until a hot-load has ended, and note what it completed."""
        deadline = time.monotonic() + PATIENCE
        while True:
            found = self.ok("GET", f"{API}/hotLoads/{hot_load_id}")["hotLoad"]
            state = found["status"]["state"].removeprefix("HOT_LOAD_STATE_")
            if state not in ("PENDING", "IN_PROGRESS"):
                break
            if time.monotonic() > deadline:
                raise Lost(f"hot-load {hot_load_id} is {state} after {PATIENCE:g} s")
            time.sleep(0.005)
        identity = found["spec"]["identity"]
        if state == "COMPLETED" and identity not in deployment.completed:
            deployment.completed.append(identity)
            deployment.deltas = len(found["spec"]["snapshotChain"]) - 1

    def sample(self, deployment: Deployment, rng: random.Random) -> None:
        """Ask for a completion."""
        body = {
            "model": deployment.spec["model"]["name"],
            "prompt": [rng.randrange(8)],
            "max_tokens": rng.randrange(1, 12),
            "seed": rng.randrange(1 << 30),
            "logprobs": 0,
        }
        answer = self.call("POST", "/v1/completions", body)
        if answer.status_code != 200:
            raise Lost(f"completion: {answer.status_code} {answer.text}")

    # Kills and checks

    def round(self, seed: int) -> None:
        """Work, kill, restart, check."""
        rng = random.Random(seed)
        victim = VICTIMS[seed % 3] if seed else "service"
        stop = threading.Event()
        failure: list[BaseException] = []

        def run() -> None:
            try:
                self.work(random.Random(f"work {seed}"), stop)
            except Exception as exc:  # noqa: BLE001 - raised again in the main thread
                failure.append(exc)

        worker = threading.Thread(target=run)
        worker.start()
        time.sleep(rng.uniform(0.0, 0.6))
        self.kill(victim, rng)
        stop.set()
        worker.join(PATIENCE)
        if failure:
            raise failure[0]
        if worker.is_alive():
            raise Lost("the work hangs")
        self.killed[victim] += 1
        self.check()

    def kill(self, victim: str, rng: random.Random) -> None:
        """Kill one process; after the service's own death, look for orphans and start again."""
        children = descendants(self.emulator.pid)
        if victim == "service":
            self.emulator.kill()
            until(lambda: not any(alive(pid) for pid in children), "a process outlives the service")
            self.start()
            return
        weeds = [pid for pid in children if "weed" in command_of(pid)]
        chosen = weeds if victim == "store" else [pid for pid in children if "replica.process" in command_of(pid)]
        if chosen:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rng.choice(sorted(chosen)), signal.SIGKILL)

    def check(self) -> None:
        """Look at everything that must have survived."""
        until(self.store_answers, "the store does not come back")
        for gateway_id, spec in self.gateways.items():
            same(self.ok("GET", f"{API}/gateways/{gateway_id}")["gateway"]["spec"], spec, f"gateway {gateway_id}")
        known = {deployment.id for deployment in self.deployments}
        for found in self.ok("GET", f"{API}/deployments")["items"]:
            if found["spec"]["id"] not in known:
                # Its create, or its delete, was interrupted.
                self.call("DELETE", f"{API}/deployments/{found['spec']['id']}")
        for deployment in self.deployments:
            self.until_ready(deployment)
            self.check_hot_loads(deployment)
            self.check_replicas(deployment)
            self.check_objects(deployment)

    def store_answers(self) -> bool:
        """Say whether the store can be listed."""
        try:
            self.s3.list_objects_v2(Bucket=self.bucket, MaxKeys=1)
        except (BotoCoreError, ClientError):
            return False
        return True

    def until_ready(self, deployment: Deployment) -> None:
        """Wait until a deployment is READY; it must be there, as it was made."""

        def ready() -> bool:
            found = self.ok("GET", f"{API}/deployments/{deployment.id}")["deployment"]
            same(found["spec"], deployment.spec, f"deployment {deployment.id}")
            return bool(found["status"]["status"] == "STATUS_READY")

        until(ready, f"deployment {deployment.id} is not READY")

    def check_hot_loads(self, deployment: Deployment) -> None:
        """Every hot-load is there and ends; what was COMPLETED is COMPLETED."""
        path = f"{API}/hotLoads?parentDeploymentId={deployment.id}&maxPageSize=1000"
        rows = self.ok("GET", path)["hotLoads"]
        if rows:
            # Also one whose create was interrupted.
            self.ended(deployment, rows[0]["spec"]["id"])
        found = {row["spec"]["id"]: row for row in self.ok("GET", path)["hotLoads"]}
        for hot_load_id, identity in deployment.hot_loads.items():
            if hot_load_id not in found:
                raise Lost(f"hot-load {hot_load_id} of {identity} is gone")
            same(found[hot_load_id]["spec"]["identity"], identity, f"hot-load {hot_load_id}")
        states = {row["spec"]["identity"]: row["status"]["state"] for row in found.values()}
        for identity in deployment.completed:
            same(states[identity], "HOT_LOAD_STATE_COMPLETED", f"the hot-load of {identity}")
        for hot_load_id, row in found.items():
            deployment.hot_loads[hot_load_id] = row["spec"]["identity"]

    def check_replicas(self, deployment: Deployment) -> None:
        """Every replica serves the identity that was completed last, with its bytes; or one that was published."""
        wanted = deployment.completed[-1] if deployment.completed else ""

        def replicas() -> list[dict[str, Any]]:
            state = self.ok("GET", "/emulator/v1/state")["deployments"]
            (mine,) = [entry for entry in state if entry["id"] == deployment.id]
            found: list[dict[str, Any]] = mine["replicas"]
            return found

        def serve() -> bool:
            found = replicas()
            return len(found) == 2 and all(entry["identity"] for entry in found)

        if not wanted:
            return
        until(serve, f"not every replica of {deployment.id} serves")
        for entry in replicas():
            with contextlib.suppress(Interrupted):
                # Read again if it swapped in between.
                for _ in range(5):
                    identity = self.ok("GET", f"/emulator/v1/replicas/{entry['name']}")["identity"]
                    hashes = self.ok("GET", f"/emulator/v1/replicas/{entry['name']}/tensors")
                    if identity == self.ok("GET", f"/emulator/v1/replicas/{entry['name']}")["identity"]:
                        break
                published = deployment.snapshots.get(identity)
                if published is None:
                    raise Lost(f"{entry['name']} serves {identity!r}, which was never published")
                expected = {name: hashlib.sha256(raw).hexdigest() for name, raw in published.items()}
                same(hashes, expected, f"the tensors of {entry['name']} at {identity}")

    def check_objects(self, deployment: Deployment) -> None:
        """Every object whose write was answered is listed; the newest ones are read."""
        prefix = deployment.spec["hotLoad"]["pathPrefix"] + "/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(Bucket=self.bucket, Prefix=prefix)
        listed = {entry["Key"] for page in pages for entry in page.get("Contents", ())}
        missing = sorted(set(deployment.objects) - listed)
        if missing:
            raise Lost(f"objects are gone: {missing[:5]}")
        for key in list(deployment.objects)[-6:]:
            until(lambda key=key: self.is_whole(key, deployment.objects[key]), f"object {key} cannot be read")

    def is_whole(self, key: str, sha256: str) -> bool:
        """Say whether an object can be read; raise Lost when its bytes are others."""
        try:
            raw = self.s3.get_object(Bucket=self.bucket, Key=key)["Body"].read()
        except (BotoCoreError, ClientError):
            return False
        same(hashlib.sha256(raw).hexdigest(), sha256, key)
        return True


# Snapshots -----------------------------------------------------------------------------------------------------------


def read_tensors(files: Files) -> tuple[dict[str, tuple[str, dict[str, Any]]], Tensors]:
    """Return where each tensor of a full snapshot is (file, header entry), and its bytes."""
    layout: dict[str, tuple[str, dict[str, Any]]] = {}
    found: Tensors = {}
    for file, raw in files.items():
        if file.endswith(".safetensors"):
            start = 8 + struct.unpack("<Q", raw[:8])[0]
            header = json.loads(raw[8:start])
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                layout[name] = (file, entry)
                found[name] = raw[start + begin : start + end]
    return layout, found


def changed(old: Tensors, rng: random.Random) -> Tensors:
    """Return the tensors with the low bits of some values flipped, in at least one of them."""
    names = rng.sample(sorted(old), rng.randrange(1, len(old) + 1))
    new = dict(old)
    for name in names:
        raw = bytearray(old[name])
        for position in range(2 * rng.randrange(2), len(raw), 2 * rng.randrange(1, 5)):
            raw[position] ^= 1 + 2 * rng.randrange(2)
        new[name] = bytes(raw)
    return new


def full_files(model: Files, layout: dict[str, tuple[str, dict[str, Any]]], tensors: Tensors) -> Files:
    """Return the model's files with other tensors in them."""
    files = {name: bytearray(raw) for name, raw in model.items()}
    for name, (file, entry) in layout.items():
        start = 8 + struct.unpack("<Q", files[file][:8])[0]
        begin, end = entry["data_offsets"]
        files[file][start + begin : start + end] = tensors[name]
    return {name: bytes(raw) for name, raw in files.items()}


def delta_files(old: Tensors, new: Tensors, identity: str, previous: str) -> Files:
    """Return a delta's files: a shard of zstd frames of XORs, and its index."""
    names = [name for name in sorted(new) if old[name] != new[name]]
    header: dict[str, Any] = {"__metadata__": {name: f"{zlib.adler32(new[name]):08x}" for name in names}}
    data = b""
    compressor = zstandard.ZstdCompressor(level=1)
    for name in names:
        frame = compressor.compress(bytes(a ^ b for a, b in zip(old[name], new[name], strict=True)))
        header[name] = {"dtype": "U8", "shape": [len(frame)], "data_offsets": [len(data), len(data) + len(frame)]}
        data += frame
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    shard = "model-00000-of-00001.safetensors"
    metadata = {
        "version": identity,
        "base_version": previous,
        "delta_encoding": "xor",
        "compression_format": "zstd",
        "checksum_format": "adler32",
    }
    index = json.dumps({"metadata": metadata, "weight_map": dict.fromkeys(names, shard)}).encode()
    return {shard: struct.pack("<Q", len(text)) + text + data, INDEX: index}


# Processes -----------------------------------------------------------------------------------------------------------


def new_id(rng: random.Random) -> str:
    """Return a UUID from the seed."""
    return str(uuid.UUID(int=rng.getrandbits(128), version=4))


def descendants(pid: int) -> list[int]:
    """Return the process ids of all descendants."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in listing.splitlines()}
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def command_of(pid: int) -> str:
    """Return a process's command line, or nothing when it is gone."""
    return subprocess.run(["ps", "-p", str(pid), "-o", "args="], capture_output=True, text=True, check=False).stdout


def alive(pid: int) -> bool:
    """Say whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-p", str(pid), "-o", "stat="], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.strip().startswith("Z")


def until(done: Any, problem: str) -> None:
    """Wait until `done` says so; calls that are interrupted do not count. Raises Lost with the problem."""
    deadline = time.monotonic() + PATIENCE
    while True:
        with contextlib.suppress(Interrupted):
            if done():
                return
        if time.monotonic() > deadline:
            raise Lost(problem)
        time.sleep(0.01)


def same(found: object, expected: object, what: str) -> None:
    """Raise Lost unless two things are equal."""
    if found != expected:
        raise Lost(f"{what} is not what it was: {found} instead of {expected}")


@contextlib.contextmanager
def campaign(state: Path) -> Iterator[Campaign]:
    """Run an emulator with a very small model on a state directory."""
    with tempfile.TemporaryDirectory() as directory:
        make_model(Path(directory), vocab_size=8, hidden_size=2, context=1, seed=1, max_length=32)
        model = {path.name: path.read_bytes() for path in Path(directory).iterdir()}
    made = Campaign(state, model)
    made.start()
    try:
        yield made
    finally:
        made.emulator.stop()


def main(arguments: list[str] | None = None) -> int:
    """Run the rounds; exit 1 at the first one that loses something."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, default=20, help="how many rounds")
    parser.add_argument("--first", type=int, default=0, help="seed of the first one")
    parser.add_argument("--state-dir", type=Path, help="where the state is kept; without it a temporary directory")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        state = options.state_dir or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="emulator-kills-")))
        made = stack.enter_context(campaign(state / "state"))
        for seed in range(options.first, options.first + options.seeds):
            try:
                made.round(seed)
            except (Lost, Interrupted) as exc:
                print(f"seed {seed}: {exc}", file=sys.stderr)
                return 1
            if (seed + 1 - options.first) % 20 == 0:
                print(f"{seed + 1 - options.first} kills, {time.monotonic() - began:.0f} s", file=sys.stderr)
        kinds = ", ".join(f"{count} of the {name}" for name, count in sorted(made.killed.items()))
        left = f"{len(made.deployments)} deployments, {made.hot_loads} hot-loads and {made.objects} objects made"
        print(f"{sum(made.killed.values())} kills ({kinds}) in {time.monotonic() - began:.0f} s; {left}")
        print("nothing lost, nothing half applied, no orphan")
    return 0


if __name__ == "__main__":
    sys.exit(main())
