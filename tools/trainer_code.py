"""A trainer's real train actor and delta writer on two CPU ranks, with our hook, against the emulator.

Shared by ``check_against_slime.py`` and ``check_against_miles.py``. The trainer's own ``MegatronTrainRayActor`` is
imported from a checkout and its ``update_weights`` called, as Ray would call it. What cannot run here stands in: Ray,
Megatron, SGLang and other packages that are not installed are empty modules; the model's gather is replaced by tensors
that each rank has (both are sources, as two pipeline stages are), and the reports about GPU memory are left out.
Everything between is the trainer's: actor, updater, baseline, encoding, files, index, barriers, the call of the hook.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
import urllib.request
import uuid
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import needed

with needed.imports():
    from cwtrain_emulator.emulator import Emulator
    from cwtrain_emulator.engine.model_io import make_model

__all__ = ["Actor", "Life", "main", "stand_ins"]

API = "/v1alpha1/inference"
TIED = "model.embed_tokens.weight"
WORLD = 2
LIMIT = 600.0
INDEX = "model.safetensors.index.json"

Tensors = dict[str, Any]


# What is not installed -----------------------------------------------------------------------------------------------


class _Anything:
    """A class, decorator or value of a package that is not here."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if len(args) == 1 and callable(args[0]) else _Anything()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()


class _Absent(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (_Anything,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes empty modules for packages that could not be imported."""

    def __init__(self) -> None:
        self.packages: set[str] = set()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name.partition(".")[0] in self.packages:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Absent(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def stand_ins(trainer: str, source: Path, module: str) -> tuple[types.ModuleType, list[str]]:
    """Import ``module`` of a trainer's checkout and return it, and the packages that had to be stood in for."""
    sys.path.insert(0, str(source))
    finder = _Finder()
    sys.meta_path.append(finder)
    while True:
        try:
            return importlib.import_module(module), sorted(finder.packages)
        except ModuleNotFoundError as exc:
            package = (exc.name or "").partition(".")[0]
            if not package or package == trainer or package in finder.packages:
                raise
            finder.packages.add(package)
            for name in [name for name in sys.modules if name.partition(".")[0].startswith(trainer)]:
                del sys.modules[name]


class Ray:
    """The little of Ray that is called on the way: objects are their own references."""

    @staticmethod
    def get(value: Any) -> Any:
        return value

    @staticmethod
    def put(value: Any) -> Any:
        return value


class Handle:
    """An actor's handle: ``handle.method.remote(...)`` answers at once, with what was given for the method."""

    def __init__(self, **answers: Any) -> None:
        self._answers = answers
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        def remote(*args: Any, **kwargs: Any) -> Any:
            self.asked.append(name)
            return self._answers.get(name)

        return types.SimpleNamespace(remote=remote)


# One life of the trainer ---------------------------------------------------------------------------------------------

Actor = Callable[[Any, Namespace, "Life"], Callable[[], None]]
"""From the actor's module, arguments and a life to what one call of the actor's ``update_weights`` is."""


class Life:
    """One process of the trainer on one rank: tensors that change from step to step, and what became of each call."""

    def __init__(self, plan: Mapping[str, Any], number: int, rank: int) -> None:
        import torch

        self.torch = torch
        self.plan, self.number, self.rank = plan, number, rank
        self.spec: Mapping[str, Any] = plan["lives"][number]
        self.root = Path(plan["root"])
        self.tensors = self._loaded()
        self.stand_ins: list[str] = []
        self.connected = 0
        """How often the actor connected the writer to its engines."""
        self.tracked: list[int] = []
        """Versions whose metrics reached the trainer's tracker."""

    def _loaded(self) -> Tensors:
        """Return the weights of the trainer's own checkpoint, or of the base at its first start."""
        from safetensors.torch import load_file

        kept = self.root / "trained.safetensors"
        if kept.exists():
            return dict(load_file(kept))
        found: Tensors = {}
        for path in sorted(Path(self.plan["base"]).glob("*.safetensors")):
            found |= load_file(path)
        return found

    def step(self, seed: str) -> None:
        """Train: other low bits in some values of some tensors."""
        rng = random.Random(seed)
        chosen = sorted({TIED, *rng.sample(sorted(self.tensors), 3)})
        for name in chosen:
            raw = self.tensors[name].contiguous().view(self.torch.uint8).reshape(-1).clone()
            width = self.tensors[name].element_size()
            for _ in range(8):
                raw[rng.randrange(raw.numel() // width) * width] ^= 1
            self.tensors[name] = raw.view(self.tensors[name].dtype).reshape(self.tensors[name].shape)

    def gathered(self) -> list[tuple[str, Any]]:
        """Return what this rank gathers: a pipeline stage's tensors; the tied one is on the last stage as well."""
        names = sorted(self.tensors)[self.rank :: WORLD]
        if self.rank == WORLD - 1 and TIED not in names:
            names.append(TIED)
        return [(name, self.tensors[name]) for name in names]

    def args(self, common: Mapping[str, Any]) -> Namespace:
        """Return the trainer's namespace."""
        return Namespace(
            **{
                "hf_checkpoint": self.plan["base"],
                "update_weight_disk_dir": str(self.root / "updates"),
                "update_weight_local_checkpoint_dir": str(self.root / "local"),
                "update_weight_delta_encoding": "xor",
                "update_weight_delta_checksum": "adler32",
                "custom_update_weight_post_write_path": self.spec["hook"],
                "rank": self.rank,
                "world_size": WORLD,
                "colocate": False,
                "debug_rollout_only": False,
                "debug_train_only": False,
                "keep_old_actor": False,
                "offload_train": False,
                "use_critic": False,
                "use_fault_tolerance": False,
                "use_tensorboard": True,
                "use_wandb": False,
                **common,
                **self.spec.get("args", {}),
            }
        )

    def run(self, make: Callable[[Namespace, Life], Callable[[], None]], common: Mapping[str, Any]) -> None:
        """Call ``update_weights`` once for the baseline and once for each step, and write down what was seen."""
        seen: dict[str, Any] = {"steps": 0, "error": None, "stand_ins": []}
        try:
            update_weights = make(self.args(common), self)
            update_weights()
            for count, kind in enumerate(self.spec["steps"]):
                if kind != "empty":
                    self.step(f"{self.number}-{count}")
                update_weights()
                seen["steps"] += 1
        except BaseException as exc:  # noqa: BLE001 - told by the parent
            seen["error"] = f"{type(exc).__name__}: {exc}"
        if self.rank == 0:
            from safetensors.torch import save_file

            save_file(
                {name: tensor.contiguous() for name, tensor in self.tensors.items()}, self.root / "trained.safetensors"
            )
            updates = sorted(path.name for path in (self.root / "updates").glob("weight_v*"))
            seen["written"] = updates
            seen["truth"] = {
                name: hashlib.sha256(tensor.contiguous().view(self.torch.uint8).numpy().tobytes()).hexdigest()
                for name, tensor in self.tensors.items()
            }
        seen |= {"stand_ins": self.stand_ins, "connected": self.connected, "tracked": self.tracked}
        (self.root / f"seen-{self.number}-{self.rank}.json").write_text(json.dumps(seen))


# The parent ----------------------------------------------------------------------------------------------------------


def main(trainer: str, make: Actor, common: Mapping[str, Any], lives: Sequence[Mapping[str, Any]]) -> int:
    """Run the check of one trainer and return 0 when everything arrived and is served, else 1."""
    parser = argparse.ArgumentParser(description=f"{trainer}'s own delta writer calls our hook, against the emulator.")
    parser.add_argument("source", type=Path, metavar="SRC", help=f"a checkout of {trainer}")
    parser.add_argument("--lives", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.lives:
        return _lives(trainer, make, common, json.loads(given.lives.read_text()))
    if not (given.source / trainer / "utils" / "disk_delta.py").is_file():
        parser.error(f"{given.source} is no checkout of {trainer} with disk deltas")
    # What is absent is stood in for, but not these: the trainer's own code needs them.
    needed.need("torch", "safetensors", "numpy", "zstandard", "httpx", "xxhash", programs=("git",))
    with tempfile.TemporaryDirectory(prefix=f"cwtrain-{trainer}-") as folder, Emulator() as emulator:
        report = _check(trainer, given.source.absolute(), Path(folder), emulator, lives)
    print(json.dumps(report, indent=2))
    return 0 if report["ok"] else 1


def _lives(trainer: str, make: Actor, common: Mapping[str, Any], plan: Mapping[str, Any]) -> int:
    """Live one life for each number on standard input, each rank a fork, so that the trainer is imported once."""
    module, absent = stand_ins(trainer, Path(plan["source"]), f"{trainer}.backends.megatron_utils.actor")
    for line in sys.stdin:
        number = int(line)
        children = []
        for rank in range(WORLD):
            child = os.fork()
            if child == 0:
                _rank(module, absent, make, common, plan, number, rank)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(json.dumps(codes), flush=True)
    return 0


def _rank(
    module: types.ModuleType,
    absent: list[str],
    make: Actor,
    common: Mapping[str, Any],
    plan: Mapping[str, Any],
    number: int,
    rank: int,
) -> None:
    """Be one rank of one life; does not return."""
    try:
        import torch.distributed as dist

        with (Path(plan["root"]) / f"log-{rank}").open("ab", buffering=0) as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        store = dist.FileStore(str(Path(plan["root"]) / f"store-{number}"), WORLD)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
        life = Life(plan, number, rank)
        life.stand_ins = absent
        life.run(lambda args, one: make(module, args, one), common)
    finally:
        os._exit(0)


def _check(
    trainer: str, source: Path, root: Path, emulator: Emulator, lives: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    base = root / "base"
    make_model(base, vocab_size=128, hidden_size=16, context=2, seed=0)
    deployment_id = _deployment(emulator)
    plan = {"root": str(root), "base": str(base), "source": str(source), "lives": list(lives)}
    (root / "plan.json").write_text(json.dumps(plan))
    environ = {
        **{
            name: value for name, value in os.environ.items() if not name.startswith(("CWTRAIN_", "COREWEAVE_", "AWS_"))
        },
        **emulator.env,
        "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment_id,
        "CWTRAIN_HOTLOAD_RUN_ID": trainer,
        "CWTRAIN_HOTLOAD_FULL_EVERY": "3",
    }
    report: dict[str, Any] = {"trainer": trainer, "version": _version(trainer, source), "lives": []}
    command = [sys.executable, sys.argv[0], str(source), "--lives", str(root / "plan.json")]
    with (
        (root / "log").open("wb") as log,
        subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        ) as child,
    ):
        assert child.stdin is not None
        assert child.stdout is not None
        alarm = threading.Timer(LIMIT, _end, args=[child])
        alarm.start()
        try:
            for number, life in enumerate(lives):
                with contextlib.suppress(BrokenPipeError):  # it has ended: the log says why
                    child.stdin.write(f"{number}\n")
                    child.stdin.flush()
                codes = json.loads(child.stdout.readline() or "[]")
                report["lives"].append(_judged(root, number, life, codes, emulator, deployment_id))
        finally:
            alarm.cancel()
            with contextlib.suppress(BrokenPipeError):
                child.stdin.close()
            _end(child)
    report["stand_ins"] = report["lives"][0].pop("stand_ins", [])
    for life in report["lives"]:
        life.pop("stand_ins", None)
    hot_loads = emulator.control.call("GET", "/state")["hot_loads"]
    told = [f"{one['spec']['identity']} {one['status']['state']}" for one in reversed(hot_loads)]
    report["hot_loads"] = [line.replace("HOT_LOAD_STATE_", "") for line in told]
    report["ok"] = all(life["ok"] for life in report["lives"])
    return report


def _end(child: subprocess.Popen[str]) -> None:
    """End a child and its ranks, which are forks in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def _judged(
    root: Path, number: int, life: Mapping[str, Any], codes: Sequence[int], emulator: Emulator, deployment_id: str
) -> dict[str, Any]:
    """Return what one life did, and whether the replicas hold its weights."""
    found: dict[str, Any] = {"what": life["what"], "codes": list(codes)}
    try:
        ranks = [json.loads((root / f"seen-{number}-{rank}.json").read_text()) for rank in range(WORLD)]
    except OSError:
        logs = [root / "log", *(root / f"log-{rank}" for rank in range(WORLD))]
        tail = [log.read_text(errors="replace")[-2000:] for log in logs if log.is_file()]
        return {**found, "ok": False, "log": tail}
    found["steps"] = [one["steps"] for one in ranks]
    found["errors"] = [one["error"] for one in ranks]
    found["connected"] = [one["connected"] for one in ranks]
    found["tracked"] = [one["tracked"] for one in ranks]
    found["written"] = ranks[0].get("written", [])
    found["stand_ins"] = ranks[0]["stand_ins"]
    state = emulator.control.call("GET", "/state")
    (deployment,) = [one for one in state["deployments"] if one["id"] == deployment_id]
    held = (
        [emulator.control.call("GET", f"/replicas/{replica['name']}/tensors") for replica in deployment["replicas"]]
        if life.get("publishes", True)
        else []
    )
    found["replicas_equal"] = [one == ranks[0].get("truth") for one in held]
    expected = len(life["steps"]) if life.get("publishes", True) else 0
    found["ok"] = (
        not any(found["errors"])
        and all(found["replicas_equal"])
        and len(found["written"]) == expected
        and found["steps"] == [len(life["steps"])] * WORLD
        and found["connected"] == [1 if expected else 0] * WORLD
        and found["tracked"] == [[], list(range(1, expected + 1))]
    )
    return found


def _deployment(emulator: Emulator) -> str:
    mark = uuid.uuid4().hex[:8]
    gateway = _call(
        emulator,
        "POST",
        "/gateways",
        {
            "name": f"gateway-{mark}",
            "zones": ["US-EAST-04A"],
            "coreWeaveAuth": {},
            "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
        },
    )["gateway"]["spec"]["id"]
    spec = {
        "name": f"deployment-{mark}",
        "gatewayIds": [gateway],
        "runtime": {"engine": "dynamo-vllm", "engineConfig": {"logprobs-mode": "processed_logprobs"}},
        "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
        "model": {"name": f"model-{mark}", "bucket": emulator.bucket, "path": f"run-{mark}/base"},
        "autoscaling": {"min": 1, "max": 1, "concurrency": 4},
        "traffic": {"weight": 100},
        "hotLoad": {
            "bucket": emulator.bucket,
            "pathPrefix": f"run-{mark}",
            "transitionMode": "TRANSITION_MODE_ASYNC",
        },
    }
    made: str = _call(emulator, "POST", "/deployments", spec)["deployment"]["spec"]["id"]
    deadline = time.monotonic() + LIMIT
    while _call(emulator, "GET", f"/deployments/{made}")["deployment"]["status"]["status"] != "STATUS_READY":
        if time.monotonic() > deadline:
            raise TimeoutError("the emulator's deployment does not become READY")
        time.sleep(0.05)
    return made


def _call(emulator: Emulator, method: str, path: str, body: Any = None) -> Any:
    request = urllib.request.Request(
        f"{emulator.base_url}{API}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {emulator.admin_token}", "Content-Type": "application/json"},
    )
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=30) as answer:
        return json.loads(answer.read())


def _version(trainer: str, source: Path) -> str:
    """Return what the checkout says of itself: its version, and its commit where git knows one."""
    version = ""
    for name in ("pyproject.toml", "setup.py"):
        path = source / name
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            key, equals, value = line.strip().partition("=")
            if key.strip() == "version" and equals and not version:
                version = value.strip().strip("\",'")
    git = subprocess.run(
        ["git", "-C", str(source), "log", "-1", "--format=%h %cs"], capture_output=True, text=True, check=False
    )
    return f"{trainer} {version} {git.stdout.strip()}".strip()
