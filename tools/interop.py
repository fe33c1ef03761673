"""Drive the emulator with the published `cwtrain` client, and compare what it sees with what ours sees.

    python tools/interop.py                          # install `cwtrain==1.0.*` into an environment of its own
    python tools/interop.py --peer PYTHON            # use an environment that has it
    python tools/interop.py --version 1.0.2

The published client is a black box here: its command line and its documented names, nothing else. Prints JSON: each
step and whether it held, and every difference between the two clients' views. Ends with 0 when all steps hold, 1 when
one does not, 3 when there is no Python 3.12 or the client cannot be had.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import needed

with needed.imports():
    from check_core import find
    from cwtrain_emulator.control_client import Control
    from cwtrain_emulator.emulator import Emulator
    from cwtrain_emulator.engine.model_io import make_model

HERE = Path(__file__).resolve().parent
SWAP_SECONDS = 2.0
API = "/v1alpha1/inference"

# Where the two clients may differ, by the view and the key, and why that is right.
KNOWN = {
    ("hotload inspect", "path"): "ours is absolute",
    ("hotload inspect", "files[]"): "ours are names within the directory, in the order of the upload",
}


class MissingError(Exception):
    """The published client cannot be had here."""


class StepError(Exception):
    """A step saw something else than it should."""


def expect(holds: bool, what: str, saw: object) -> None:
    if not holds:
        raise StepError(f"{what}; saw {saw!r:.1500}")


# The published client ------------------------------------------------------------------------------------------------


def install(folder: Path, version: str) -> Path:
    """Return the interpreter of a new environment that has the published client."""
    python = find("3.12")
    if python is None:
        raise MissingError("there is no Python 3.12 here and none could be fetched")
    inside = folder / "bin" / "python"
    environ = {key: value for key, value in os.environ.items() if key not in ("VIRTUAL_ENV", "PYTHONPATH")}
    for attempt in range(4):
        # In a folder of its own, so that the workspace's pins are not read.
        for command in (
            ["uv", "venv", "--quiet", "--allow-existing", "--python", python, str(folder)],
            ["uv", "pip", "install", "--quiet", "--python", str(inside), f"cwtrain=={version}"],
        ):
            done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, check=False)
            if done.returncode:
                break
        else:
            return inside
        time.sleep(3 * attempt)
    raise MissingError(f"`{' '.join(command)}` failed: {done.stderr.strip()[-500:]}")


class Client:
    """A command line, run in a folder and an environment that know nothing but the emulator."""

    def __init__(self, program: Path, folder: Path, environ: Mapping[str, str]) -> None:
        self._program = program
        self._folder = folder
        self._environ = {"PATH": os.environ["PATH"], "HOME": str(folder), "NO_PROXY": "127.0.0.1", **environ}
        self._origin = environ["COREWEAVE_API_URL"]

    def run(self, *words: str, stdin: str = "", token: str | None = None) -> subprocess.CompletedProcess[str]:
        """Run a command and return how it ended."""
        chosen = ["--token", token] if token is not None else []
        command = [str(self._program), "--base-url", self._origin, *chosen, *words]
        return subprocess.run(
            command,
            cwd=self._folder,
            env=self._environ,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=180,
            check=False,
        )

    def json(self, *words: str, stdin: str = "") -> Any:
        """Run a command that must work, and return what it printed."""
        done = self.run(*words, stdin=stdin)
        expect(done.returncode == 0, f"`{' '.join(words)}` ends with 0", (done.returncode, done.stderr[-800:]))
        return json.loads(done.stdout)

    def refused(self, *words: str, token: str | None = None) -> str:
        """Run a command that must fail, and return what it said on standard error."""
        done = self.run(*words, token=token)
        expect(done.returncode == 1, f"`{' '.join(words)}` ends with 1", (done.returncode, done.stderr[-800:]))
        expect(not done.stdout.strip(), "a failed command prints nothing on standard output", done.stdout)
        return done.stderr


class Library:
    """The published client's documented names, through `interop_peer.py` in its own environment."""

    def __init__(self, python: Path, folder: Path, environ: Mapping[str, str]) -> None:
        clean = {"PATH": os.environ["PATH"], "HOME": str(folder), "NO_PROXY": "127.0.0.1", **environ}
        self._process = subprocess.Popen(
            [str(python), "-I", str(HERE / "interop_peer.py")],
            cwd=folder,
            env=clean,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def call(self, name: str, **values: Any) -> Any:
        """Make a call that must work and return its value."""
        answer = self._ask(name, values)
        if "error" in answer:
            raise StepError(f"{name}: {answer['error']['classes'][0]}: {answer['error']['message']:.800}")
        return answer["value"]

    def refused(self, name: str, **values: Any) -> list[str]:
        """Make a call that must raise, and return the names of the error's classes, its own first."""
        answer = self._ask(name, values)
        expect("error" in answer, f"{name} raises", answer)
        classes: list[str] = answer["error"]["classes"]
        return classes

    def _ask(self, name: str, values: Mapping[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"call": name, **values}) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise StepError(f"the published client's process ended during {name}")
        found: dict[str, Any] = json.loads(line)
        return found


# Two views of one thing ----------------------------------------------------------------------------------------------


def flat(value: Any, path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Give each leaf of a JSON value: its path, the path without list positions, and the leaf."""
    plain = re.sub(r"\[\d+\]", "[]", path)
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and value:
        for number, inner in enumerate(value):
            yield from flat(inner, f"{path}[{number}]")
    else:
        yield path, plain, value


def moment(value: Any) -> Any:
    """Return a time as such, so that two ways to write it are equal; anything else as it is."""
    if isinstance(value, str) and re.match(r"\d{4}-\d\d-\d\dT", value):
        with contextlib.suppress(ValueError):
            return dt.datetime.fromisoformat(value)
    return value


def compare(view: str, theirs: Any, ours: Any) -> dict[str, Any]:
    """Return how our client's output differs from the published one's: keys of one alone, and values."""
    their_leaves = {path: (plain, value) for path, plain, value in flat(theirs)}
    our_leaves = {path: (plain, value) for path, plain, value in flat(ours)}
    command = view.partition(",")[0]
    found: dict[str, Any] = {"only_theirs": set(), "only_ours": set(), "known": {}, "values": {}, "spelling": set()}
    for path in their_leaves.keys() | our_leaves.keys():
        plain = (their_leaves.get(path) or our_leaves[path])[0]
        if (command, plain) in KNOWN:
            found["known"][plain] = KNOWN[command, plain]
        elif path not in our_leaves:
            found["only_theirs"].add(plain)
        elif path not in their_leaves:
            found["only_ours"].add(plain)
        else:
            left, right = their_leaves[path][1], our_leaves[path][1]
            if moment(left) != moment(right):
                found["values"][path] = [left, right]
            elif left != right:
                found["spelling"].add(plain)
    return {key: sorted(value) if isinstance(value, set) else value for key, value in found.items() if value}


# The run -------------------------------------------------------------------------------------------------------------


class Run:
    """What was done, and what came of it."""

    def __init__(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.differences: dict[str, Any] = {}

    @contextlib.contextmanager
    def step(self, name: str, through: str = "cli") -> Iterator[None]:
        """Note whether what happens inside holds; later steps go on in either case."""
        begin = time.monotonic()
        entry: dict[str, Any] = {"step": name, "through": through, "ok": True}
        try:
            yield
        except (StepError, KeyError, IndexError, TypeError, ValueError, OSError, subprocess.SubprocessError) as error:
            entry |= {"ok": False, "problem": f"{type(error).__name__}: {error}"}
        entry["seconds"] = round(time.monotonic() - begin, 2)
        self.steps.append(entry)
        print(f"{'ok    ' if entry['ok'] else 'FAILED'} {name} {entry.get('problem', '')}", file=sys.stderr)

    def same(self, view: str, theirs: Any, ours: Any) -> None:
        """Compare two outputs; what the published client shows must be there in ours, and equal."""
        found = compare(view, theirs, ours)
        self.differences[view] = found
        expect(not found.get("only_theirs"), f"{view}: our output has every key of theirs", found.get("only_theirs"))
        expect(not found.get("values"), f"{view}: both say the same", found.get("values"))


def gateway_spec() -> dict[str, Any]:
    return {
        "name": f"interop-{uuid.uuid4().hex[:8]}",
        "zones": ["US-EAST-04A"],
        "coreWeaveAuth": {},
        "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
    }


def deployment_spec(gateway: str, bucket: str) -> dict[str, Any]:
    mark = uuid.uuid4().hex[:8]
    return {
        "name": f"interop-{mark}",
        "gatewayIds": [gateway],
        "runtime": {"engine": "dynamo-vllm", "engineConfig": {"max-model-len": "128"}},
        "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
        "model": {"name": f"model-{mark}", "bucket": bucket, "path": f"{mark}/base"},
        "autoscaling": {"min": 1, "max": 1, "concurrency": 4},
        "traffic": {"weight": 100},
        "hotLoad": {"bucket": bucket, "pathPrefix": mark, "transitionMode": "TRANSITION_MODE_ASYNC"},
    }


def tensor_hashes(checkpoint: Path) -> dict[str, str]:
    """Return the SHA-256 of every tensor of a checkpoint, read here and not by either client."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        raw = path.read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        for name, info in json.loads(raw[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in info["data_offsets"])
                found[name] = hashlib.sha256(raw[begin:end]).hexdigest()
    return found


def with_wrong_checksum(delta: Path, out: Path) -> Path:
    """Copy a delta with one of its checksums changed, which nobody can see without the bytes that it applies to."""
    out.mkdir()
    for path in delta.iterdir():
        raw = path.read_bytes()
        if path.suffix == ".safetensors":
            (length,) = struct.unpack("<Q", raw[:8])
            header = json.loads(raw[8 : 8 + length])
            checksums = header["__metadata__"]
            name = min(name for name in checksums if name in header)
            checksums[name] = "00000001"
            text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
            expect(len(text) == length, "the changed header fits", len(text) - length)
            raw = raw[:8] + text + raw[8 + length :]
        (out / path.name).write_bytes(raw)
    return out


class Emulated:
    """The emulator's own routes and its endpoint, for what only the service's side can tell."""

    def __init__(self, emulator: Emulator) -> None:
        self._emulator = emulator

    def get(self, url: str) -> Any:
        """GET with the admin's token; `url` may be a path on the API's origin."""
        full = url if url.startswith("http") else self._emulator.base_url + url
        request = urllib.request.Request(full, headers={"Authorization": f"Bearer {self._emulator.admin_token}"})
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
            return json.loads(answer.read())

    def served_bytes(self, deployment: str) -> list[dict[str, str]]:
        """Return the SHA-256 of every tensor, for each replica."""
        state = self.get("/emulator/v1/state")
        (mine,) = [entry for entry in state["deployments"] if entry["id"] == deployment]
        return [self.get(f"/emulator/v1/replicas/{replica['name']}/tensors") for replica in mine["replicas"]]


def drive(run: Run, emulator: Emulator, theirs: Client, ours: Client, library: Library, folder: Path) -> None:
    """Go through all steps."""
    own = Emulated(emulator)
    for seed in range(3):
        make_model(folder / f"full{seed}", vocab_size=16, hidden_size=4, context=2, seed=seed, max_length=128)
    full, newer, delta, wrong = (str(folder / name) for name in ("full0", "full1", "delta", "wrong"))

    gateway = library.call("create_gateway", spec=gateway_spec())
    spec = deployment_spec(gateway["id"], emulator.bucket)
    with run.step("gateway create, with wait", "api"):
        expect(gateway["status"] == "READY", "the gateway is READY", gateway)
        expect(library.call("gateways") == [gateway["id"]], "it is listed", gateway)
    created = theirs.json("deployment", "create", "-f", "-", "--wait", "--timeout", "60", stdin=json.dumps(spec))
    deployment, here = created["id"], ("--deployment", created["id"])
    with run.step("deployment create, with wait"):
        expect(created["status"] == "READY", "the deployment is READY", created)
        served = own.get(created["rollout_base_url"] + "/models")["data"]
        expect([entry["id"] for entry in served] == [spec["model"]["name"]], "its endpoint serves the model", served)
    with run.step("deployment get, and lists", "cli and api"):
        run.same(
            "deployment get", theirs.json("deployment", "get", deployment), ours.json("deployment", "get", deployment)
        )
        expect(library.call("deployments") == [deployment], "it is listed", deployment)
        found = library.call("deployment", deployment=deployment)
        expect(found["rollouts"] == created["rollout_base_url"], "both ways give one base URL", found)
        expect(found["raw"] == own.get(f"{API}/deployments/{deployment}")["deployment"], "raw is the answer", found)
    with run.step("deployment parameters"):
        parameters = ("deployment", "parameters")
        run.same("deployment parameters", theirs.json(*parameters), ours.json(*parameters))
    with run.step("hotload check"):
        run.same("hotload check", theirs.json("hotload", "check", *here), ours.json("hotload", "check", *here))

    publish = ("hotload", "publish", *here, "--timeout", "60")
    with run.step("publish of a full snapshot"):
        run.same("hotload inspect", theirs.json("hotload", "inspect", full), ours.json("hotload", "inspect", full))
        done = theirs.json(*publish, "--checkpoint", full, "--identity", "v0")
        expect(done["status"]["state"] == "COMPLETED", "it is COMPLETED", done)
        expect(own.served_bytes(deployment) == [tensor_hashes(Path(full))] * 2, "both replicas have its bytes", done)
    with run.step("publish of a delta that it wrote"):
        library.call("write_delta", base=full, new=newer, out=delta, version="1", base_version="0")
        inspect = ("hotload", "inspect", delta, "--previous-identity", "v0")
        run.same("hotload inspect, of a delta", theirs.json(*inspect), ours.json(*inspect))
        done = theirs.json(*publish, "--checkpoint", delta, "--identity", "v1", "--previous-identity", "v0")
        expect(done["status"]["state"] == "COMPLETED", "it is COMPLETED", done)
        chain = [entry["identity"] for entry in done["spec"]["snapshot_chain"]]
        expect(chain == ["v0", "v1"], "its chain is resolved", chain)
        expect(
            own.served_bytes(deployment) == [tensor_hashes(Path(newer))] * 2, "both replicas have the new bytes", done
        )
    with run.step("list, status and wait"):
        run.same("hotload list", theirs.json("hotload", "list", *here), ours.json("hotload", "list", *here))
        newest = theirs.json("hotload", "list", *here, "--limit", "1")[0]["spec"]["id"]
        status = theirs.json("hotload", "status", newest)
        run.same("hotload status", status, ours.json("hotload", "status", newest))
        states = [(replica["state"], replica["current_snapshot_identity"]) for replica in status["replicas"]]
        expect(states == [("READY", "v1")] * 2, "replicas are READY on v1", states)
        run.same("hotload wait", theirs.json("hotload", "wait", newest), ours.json("hotload", "wait", newest))
    with run.step("trigger with --reset-prompt-cache and --no-wait, then wait"):
        trigger = ("hotload", "trigger", *here, "--identity", "v0", "--reset-prompt-cache", "--no-wait")
        asked = theirs.json(*trigger)
        expect(asked["spec"]["prompt_cache_policy"] == "RESET_ALL", "the policy is taken", asked)
        done = theirs.json("hotload", "wait", asked["spec"]["id"], "--timeout", "60")
        expect(done["status"]["state"] == "COMPLETED", "it is COMPLETED", done)
    with run.step("rollback to a delta and to a full one", "api"):
        for identity, checkpoint in (("v1", newer), ("v0", full)):
            done = library.call("rollback", deployment=deployment, identity=identity)
            expect(done["state"] == "COMPLETED", "it is COMPLETED", done)
            expect(own.served_bytes(deployment) == [tensor_hashes(Path(checkpoint))] * 2, f"{identity} is served", done)
    interlock(run, library, theirs, deployment)
    failures(run, library, theirs, ours, own, deployment, Path(delta), Path(wrong), str(folder / "full2"))
    under_faults(run, library, emulator, own, deployment, (full, newer))
    refusals(run, library, theirs, emulator, deployment)
    behaviours(run, library, emulator, deployment)

    with run.step("a gateway in use is not deleted", "api"):
        expect(
            "LifecycleError" in library.refused("delete_gateway", gateway=gateway["id"], timeout=1.0), "it says so", 0
        )
    with run.step("deployment delete, with wait"):
        gone = theirs.json("deployment", "delete", deployment, "--wait", "--timeout", "60")
        expect(gone == {"id": deployment, "result": "deleted"}, "it says deleted", gone)
        again = ("deployment", "delete", deployment, "--ignore-not-found")
        run.same("deployment delete, of none", theirs.json(*again), ours.json(*again))
        expect("not_found" in theirs.refused("deployment", "get", deployment), "it is NOT_FOUND", deployment)
    with run.step("deployment create and delete, with wait", "api"):
        made = library.call("create_deployment", spec=deployment_spec(gateway["id"], emulator.bucket))
        expect(made["status"] == "READY", "it is READY", made)
        expect(library.call("delete_deployment", deployment=made["id"]) is True, "it was there", made)
        expect(library.call("delete_deployment", deployment=made["id"]) is False, "it is gone", made)
    with run.step("gateway delete, with wait", "api"):
        library.call("delete_gateway", gateway=gateway["id"])
        expect(library.call("gateways") == [], "none is left", gateway)


def interlock(run: Run, library: Library, theirs: Client, deployment: str) -> None:
    """A second hot-load while one runs."""
    with run.step("interlock: a second create is HotLoadInProgressError", "api"):
        first, second = str(uuid.uuid4()), str(uuid.uuid4())
        library.call("create_hot_load", deployment=deployment, identity="v0", hot_load=first)
        classes = library.refused("create_hot_load", deployment=deployment, identity="v0", hot_load=second)
        expect(classes[:2] == ["HotLoadInProgressError", "FailedPreconditionError"], "it is known as such", classes)
        expect(library.call("state", hot_load=first) in ("PENDING", "IN_PROGRESS"), "the first goes on", first)
    with run.step("interlock: a trigger waits until the deployment is free", "api"):
        done = library.call("trigger", deployment=deployment, identity="v0")
        expect((done["before"], done["state"]) == ("COMPLETED", "COMPLETED"), "one after the other", done)
    with run.step("interlock: a publish while one runs"):
        begun = theirs.json("hotload", "trigger", "--deployment", deployment, "--identity", "v0", "--no-wait")
        words = ("hotload", "trigger", "--deployment", deployment, "--identity", "v0", "--timeout", "60")
        done = theirs.json(*words)
        expect(done["status"]["state"] == "COMPLETED", "it is COMPLETED in the end", done)
        expect(library.call("state", hot_load=begun["spec"]["id"]) == "COMPLETED", "the first one, too", begun)
    with run.step("a create that is repeated is adopted", "api"):
        mine = str(uuid.uuid4())
        for _ in range(2):
            made = library.call("create_hot_load", deployment=deployment, identity="v0", hot_load=mine)
            expect(made == mine, "it has the caller's id", made)
        expect(library.call("hot_loads", deployment=deployment).count(mine) == 1, "there is one of it", mine)
        theirs.json("hotload", "wait", mine, "--timeout", "60")


def failures(
    run: Run,
    library: Library,
    theirs: Client,
    ours: Client,
    own: Emulated,
    deployment: str,
    delta: Path,
    wrong: Path,
    last: str,
) -> None:
    """A replica that fails, and what mends it."""
    publish = ("hotload", "publish", "--deployment", deployment, "--timeout", "60")
    with run.step("a delta with a wrong checksum fails on the replicas"):
        with_wrong_checksum(delta, wrong)
        before = own.served_bytes(deployment)
        said = theirs.refused(*publish, "--checkpoint", str(wrong), "--identity", "bad", "--previous-identity", "v0")
        expect("Adler-32" in said or "adler" in said.lower(), "it tells the replica's reason", said)
        expect(own.served_bytes(deployment) == before, "the old weights are still served", said)
    with run.step("the failure is seen alike"):
        newest = theirs.json("hotload", "list", "--deployment", deployment, "--limit", "1")[0]
        expect(newest["status"]["state"] == "FAILED", "it is FAILED", newest)
        status = theirs.json("hotload", "status", newest["spec"]["id"])
        run.same("hotload status, of a failed one", status, ours.json("hotload", "status", newest["spec"]["id"]))
        states = {(replica["state"], bool(replica["error_reason"])) for replica in status["replicas"]}
        expect(states == {("ERROR", True)}, "replicas are in ERROR with a reason", states)
        theirs.refused("hotload", "wait", newest["spec"]["id"])
        ours.refused("hotload", "wait", newest["spec"]["id"])
    with run.step("a delta on a failed one is refused"):
        words = (*publish, "--checkpoint", str(delta), "--identity", "next", "--previous-identity", "bad")
        said = theirs.refused(*words)
        expect("bad" in said, "it names the predecessor", said)
    with run.step("a full snapshot mends it", "api"):
        done = library.call("publish", deployment=deployment, checkpoint=last, identity="v2")
        expect(done["state"] == "COMPLETED", "it is COMPLETED", done)
        expect("COMPLETED" in done["progress"], "progress was told", done)
        expect(own.served_bytes(deployment) == [tensor_hashes(Path(last))] * 2, "both replicas have its bytes", done)


def under_faults(
    run: Run, library: Library, emulator: Emulator, own: Emulated, deployment: str, checkpoints: tuple[str, str]
) -> None:
    """What the published client makes of a service that has a bad moment."""
    control = Control(emulator.base_url, emulator.admin_token)

    @contextlib.contextmanager
    def fault(target: str, kind: str, **values: Any) -> Iterator[None]:
        rule = control.add_fault(target, kind, **values)
        try:
            yield
            (counted,) = [found for found in control.faults() if found["id"] == rule["id"]]
            expect(counted["struck"] > 0, f"the fault {kind} struck", counted)
        finally:
            control.clear_faults(rule["id"])

    def publish(checkpoint: str, identity: str) -> dict[str, Any]:
        done: dict[str, Any] = library.call("publish", deployment=deployment, checkpoint=checkpoint, identity=identity)
        expect(done["state"] == "COMPLETED", "it is COMPLETED", done)
        expect(own.served_bytes(deployment) == [tensor_hashes(Path(checkpoint))] * 2, "both replicas serve it", done)
        return done

    one, other = checkpoints
    with run.step("one replica fails, the other does not; the next publish mends it", "api"):
        with fault("replica", "damage", replica="-01$", times=1):
            values = {"deployment": deployment, "checkpoint": one, "identity": "half"}
            classes = library.refused("publish", **values)
            expect("CWTrainError" in classes, "the publish says so", classes)
            newest = library.call("hot_loads", deployment=deployment)[0]
            states = {replica["state"] for replica in library.call("replicas", hot_load=newest)}
            expect(states == {"READY", "ERROR"}, "one is READY, one in ERROR", states)
        publish(other, "whole")
    with (
        run.step("a replica dies in the middle of a load, and its successor finishes it", "api"),
        fault("replica", "die", replica="-00$", times=1),
    ):
        publish(one, "after-a-death")
    with (
        run.step("503 of the service and SlowDown of the bucket are retried", "api"),
        fault("api", "status", status=503, retry_after="1", times=2),
        fault("store", "slow_down", times=1),
    ):
        publish(other, "after-503")
    with run.step("a create whose answer is lost is made once", "api"):
        before = len(library.call("hot_loads", deployment=deployment))
        with fault("api", "cut", method="POST", path="hotLoads$", times=1):
            publish(one, "answer-lost")
        after = len(library.call("hot_loads", deployment=deployment))
        expect(after == before + 1, "there is one hot-load more", (before, after))


def behaviours(run: Run, library: Library, emulator: Emulator, deployment: str) -> None:
    """Where the clients do different things; told, and not judged."""
    from cwtrain.errors import CWTrainError
    from cwtrain.infra import InferenceClient, SnapshotType

    with run.step("what each does about a taken id that is another hot-load's", "api"):
        taken = library.call("hot_loads", deployment=deployment)[-1]
        values = {"deployment": deployment, "identity": "another", "hot_load": taken}
        try:
            library.call("create_hot_load", **values)
            theirs = "adopts it"
        except StepError as error:
            theirs = str(error)
        with InferenceClient(emulator.admin_token, base_url=emulator.base_url) as client:
            try:
                client.create_hot_load(deployment, "another", snapshot_type=SnapshotType.FULL, hot_load_id=taken)
                ours = "adopts it"
            except CWTrainError as error:
                ours = f"refuses: {type(error).__name__}"
        if theirs != ours:
            run.differences["create_hot_load, of a taken id"] = {"theirs": theirs, "ours": ours}


def refusals(run: Run, library: Library, theirs: Client, emulator: Emulator, deployment: str) -> None:
    """Refusals, as the published client reads them."""
    here = ("--deployment", deployment)
    nobody = str(uuid.UUID(int=0))
    with run.step("roles and tokens"):
        viewer = emulator.viewer_token
        expect(theirs.run("hotload", "list", *here, token=viewer).returncode == 0, "a viewer reads", here)
        said = theirs.refused("hotload", "trigger", *here, "--identity", "v0", token=viewer)
        expect("permission_denied" in said, "a viewer does not write", said)
        said = theirs.refused("hotload", "list", *here, token="wrong")
        expect("unauthenticated" in said, "a wrong token is told", said)
        expect("wrong" not in said.replace("wrong token", ""), "and not printed", said)
    with run.step("reserved, unknown and taken identities"):
        said = theirs.refused("hotload", "trigger", *here, "--identity", "initial")
        expect("reserved" in said, "initial is reserved", said)
        said = theirs.refused("hotload", "trigger", *here, "--identity", "never-uploaded")
        expect("does not exist" in said or "not found" in said, "objects that are not there", said)
    with run.step("errors by their class", "api"):
        classes = library.refused("deployment", deployment=nobody)
        expect(classes[0] == "NotFoundError", "an unknown deployment", classes)
        newest = library.call("hot_loads", deployment=deployment)[0]
        classes = library.refused("cancel", hot_load=newest)
        expect(classes[0] == "UnimplementedError", "cancel", classes)
        classes = library.refused("create_hot_load", deployment=nobody, identity="v0", hot_load=str(uuid.uuid4()))
        expect(classes[0] == "NotFoundError", "a hot-load of an unknown deployment", classes)
        classes = library.refused("create_gateway", spec={"name": "-"})
        expect(classes[0] == "InvalidArgumentError", "a gateway without a spec", classes)
        names = {replica["name"] for replica in library.call("replicas", hot_load=newest)}
        expect(len(names) == 2, "two replicas", names)


def main() -> None:
    """Install, start, drive, tell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--version", default="1.0.*", help="of the published client (default: 1.0.*)")
    parser.add_argument(
        "--peer",
        metavar="PYTHON",
        default=os.environ.get("CWTRAIN_TEST_PEER"),
        help="an interpreter that has it (default: $CWTRAIN_TEST_PEER, else a new environment)",
    )
    options = parser.parse_args()
    if options.peer is None:
        needed.need(programs=("uv",))
    run = Run()
    with tempfile.TemporaryDirectory(prefix="cwtrain-interop-") as name:
        folder = Path(name)
        (folder / "home").mkdir()
        try:
            # Not resolved: an environment's interpreter is a link, and what it is a link to has no such packages.
            python = Path(options.peer) if options.peer else install(made(folder / "peer"), options.version)
        except MissingError as error:
            print(f"interop: {error}", file=sys.stderr)
            sys.exit(3)
        with Emulator(extra_args=[f"--swap-delay={SWAP_SECONDS}"]) as emulator:
            home = folder / "home"
            library = Library(python, home, emulator.env)
            try:
                theirs = Client(python.parent / "cwtrain", home, emulator.env)
                ours = Client(Path(sys.executable).parent / "cwtrain", home, emulator.env)
                version = library.call("version")
                with run.step("all steps"):
                    drive(run, emulator, theirs, ours, library, folder)
            finally:
                library.close()
    held = all(entry["ok"] for entry in run.steps)
    print(
        json.dumps(
            {"client": f"cwtrain {version}", "ok": held, "steps": run.steps, "differences": run.differences}, indent=2
        )
    )
    sys.exit(0 if held else 1)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    main()
