"""The demo's run: an emulator, a deployment, and a trainer whose weights are hot-loaded after every step.

Everything goes the way it would against the real service: the API through ``InferenceClient``, weights from memory into
the bucket through ``SnapshotWriter`` and into the replicas through ``HotLoader``, rollouts through the sampler. At the
end the bytes on every replica are compared with the trainer's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from cwtrain.errors import ConfigError, CWTrainError
from cwtrain.hotload import HotLoader, MemoryBase, SnapshotWriter, inspect_snapshot, upload_snapshot
from cwtrain.infra import InferenceClient, lifecycle, s3_client
from cwtrain.models.service import Deployment, HotLoad
from cwtrain_demo.replicas import replica_digests
from cwtrain_demo.result import DemoResult, Step, Version
from cwtrain_demo.task import Alphabet, check_logprobs
from cwtrain_demo.trainer import Trainer, new_model, read_model
from cwtrain_emulator import Emulator, EmulatorError
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.sampler import Sampler

__all__ = ["DemoConfig", "run_demo"]

MODEL_NAME = "cwtrain-demo"
PATH_PREFIX = "demo"
_POLL = 0.05
_PATIENCE = 120.0
"""Seconds for anything that takes a moment on one machine."""


@attrs.frozen(kw_only=True)
class DemoConfig:
    """What is to be run. ``full_every`` is the distance between full snapshots, in versions."""

    steps: int = 20
    replicas: int = 2
    seed: int = 0
    model: str | None = None
    """Directory of a model of the numpy engine; the demo's own without it."""
    state_dir: str | None = None
    """An empty or new directory for everything that is written; a temporary one without it."""
    keep: bool = False

    @property
    def full_every(self) -> int:
        """Every how many versions a full snapshot cuts the chain of deltas."""
        return max(2, min(8, self.steps // 2))


def run_demo(
    config: DemoConfig,
    *,
    on_step: Callable[[Step, Version], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
    hold: Callable[[DemoResult, Emulator], None] | None = None,
) -> DemoResult:
    """Run the demo and return its result. ``hold`` is called with it while the emulator still runs, and may wait.

    ``on_step`` sees each step with the version that it made, ``say`` a line for people now and then.

    Everything that is started is stopped again, whatever happens. Raises ``CWTrainError``.
    """
    result = DemoResult(seed=config.seed, engine="numpy")
    started = time.monotonic()
    with _state_directory(config, say) as root, contextlib.ExitStack() as stack:
        with _phase(result, "start"):
            say(f"starting the emulator with {config.replicas} replicas")
            emulator = stack.enter_context(_emulator(config, root))
            say(f"watch it at {emulator.page_url}")
            stack.enter_context(_environment(emulator.env))
            client, store = stack.enter_context(InferenceClient()), s3_client()
        with _phase(result, "create"):
            base = Path(config.model) if config.model else root / "base"
            model = read_model(base) if config.model else new_model(base, seed=config.seed)
            upload_snapshot(
                inspect_snapshot(base), bucket=emulator.bucket, path_prefix="models", identity="base", s3=store
            )
            deployment, endpoint = _create(client, emulator.bucket, model_path="models/base", replicas=config.replicas)
            say(f"deployment {deployment.name} is {deployment.status} at {endpoint}")
        trainer = Trainer(model)
        loader = HotLoader(client, deployment.id, s3=store, poll_interval=_POLL, timeout=_PATIENCE)
        sampler = Sampler(
            RolloutConfig(
                base_url=endpoint,
                model=deployment.model_name,
                api_key=emulator.admin_token,
                deadline=_PATIENCE,
                replicas=config.replicas,
                deployment_id=deployment.id,
                poll=_POLL,
            ),
            name="dedicated",
            client=client,
        )
        run = _Run(config, result, root, emulator, loader, sampler, trainer, side_files=base)
        run.publish_base()
        for step in range(config.steps):
            run.step(step, on_step)
        with _phase(result, "check"):
            run.check()
        result.sampler = run.sampler.totals
        if config.keep or config.state_dir:
            result.state_dir = str(root)
            trainer.save(root / "trained")
        if hold is not None:
            result.seconds["total"] = time.monotonic() - started
            hold(result, emulator)
            return result
        stopping = time.monotonic()
        stack.close()
        result.seconds["stop"] = time.monotonic() - stopping
    result.seconds["total"] = time.monotonic() - started
    return result


class _Run:
    """The moving parts between two steps."""

    def __init__(
        self,
        config: DemoConfig,
        result: DemoResult,
        root: Path,
        emulator: Emulator,
        loader: HotLoader,
        sampler: Sampler,
        trainer: Trainer,
        *,
        side_files: Path,
    ) -> None:
        self.config, self.result, self.root, self.emulator = config, result, root, emulator
        self.loader, self.sampler = loader, sampler
        self.trainer, self.side_files = trainer, side_files
        self.task = Alphabet(letters=trainer.vocab_size - 1, seed=config.seed)
        self.base = MemoryBase()
        self.served: HotLoad | None = None

    def publish_base(self) -> None:
        """Publish the weights that training starts from, as version 0."""
        self._publish(0)

    def step(self, step: int, on_step: Callable[[Step, Version], None] | None) -> None:
        """Sample from the version that is served, learn, and publish the next one."""
        started = time.monotonic()
        policy, result = self.trainer.policy, self.result
        with _phase(result, "sample"):
            # The salt is the sampler's business: it knows what the deployment serves.
            groups = self.sampler.sample_groups(self.task.prompts(step), self.task.sampling, exact_version=True)
        with _phase(result, "learn"):
            mismatches, difference = check_logprobs(policy, groups)
            result.logprob_difference = max(result.logprob_difference, difference)
            lesson = self.task.lesson(policy, groups)
            self.trainer.learn(lesson.batch)
        version = self._publish(step + 1)
        result.steps.append(
            Step(
                step=step,
                version=step,
                reward=lesson.reward,
                samples=lesson.samples,
                tokens=lesson.tokens,
                logprob_mismatches=mismatches,
                example=" ".join(_spelled(part, self.task.letters) for part in lesson.example),
                seconds=time.monotonic() - started,
            )
        )
        if on_step is not None:
            on_step(result.steps[-1], version)

    def check(self) -> None:
        """Compare what every replica holds with what the trainer holds."""
        last = self.result.versions[-1]
        ours = self.trainer.digests()
        report = self.loader.verify_served(last.identity)
        names = [replica.name for replica in report.replicas]
        theirs = replica_digests(self.emulator.base_url, self.emulator.admin_token, names)
        self.result.replicas = {replica.name: replica.current_snapshot_identity for replica in report.replicas}
        for name, digests in theirs.items():
            differing = [tensor for tensor in ours.keys() | digests.keys() if ours.get(tensor) != digests.get(tensor)]
            if differing:
                self.result.weights_differ[name] = sorted(differing)
        everyone = len(theirs) == self.config.replicas
        self.result.weights_match = report.served and everyone and not self.result.weights_differ

    def _publish(self, number: int) -> Version:
        """Send the weights from memory while they are encoded, and have them hot-loaded."""
        started = time.monotonic()
        identity = f"demo-v{number:06d}"
        full = number % self.config.full_every == 0
        with (
            _phase(self.result, "write"),
            SnapshotWriter(
                self.loader.store,
                self.loader.location,
                identity,
                kind="full" if full else "delta",
                base=self.base,
                side_files=self.side_files if full else None,
                run_id="demo",
                deployment_id=self.loader.deployment_id,
                version=number,
            ) as writer,
        ):
            for name, values, dtype in self.trainer.tensors():
                writer.add(name, values, dtype=dtype)
            written = writer.finalise([writer.close()])
        for phase in ("encode", "upload"):
            self.result.seconds[phase] = self.result.seconds.get(phase, 0.0) + written.seconds[phase]
        with _phase(self.result, "publish"):
            self.served = self.loader.trigger(written)
        version = Version(
            version=number,
            identity=identity,
            kind=str(written.kind),
            hot_load_id=self.served.id,
            bytes=written.uploaded_bytes,
            ratio=1.0 if full else round(written.ratio, 3),
            changed_tensors=written.changed_tensors,
            tensors=written.tensors,
            density=round(written.density, 4),
            write_seconds=round(written.seconds["total"], 6),
            encode_seconds=round(written.seconds["encode"], 6),
            upload_seconds=round(written.seconds["upload"], 6),
            hot_load_seconds=round(self.served.timings.get("last_replica_seconds", 0.0), 4),
            seconds=round(time.monotonic() - started, 4),
        )
        self.result.versions.append(version)
        return version


def _create(client: InferenceClient, bucket: str, *, model_path: str, replicas: int) -> tuple[Deployment, str]:
    """Create gateway and deployment and return the deployment, READY, with the URL for rollouts."""
    zone: str = client.get_gateway_parameters()["zones"][0]
    gateway = client.create_gateway(
        {
            "name": "demo-gateway",
            "zones": [zone],
            "coreWeaveAuth": {},
            "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
        }
    )
    lifecycle.wait_for_gateway(client, gateway.id, timeout=_PATIENCE, poll_interval=_POLL)
    parameters = client.get_deployment_parameters([gateway.id])
    instance_type: str = parameters["resourceParameters"]["instanceTypes"][0]
    deployment = client.create_deployment(
        {
            "name": "demo",
            "gatewayIds": [gateway.id],
            "runtime": {
                "engine": "dynamo-vllm",
                # Rollouts need log-probs of the distribution that is sampled from; the engine's default are raw ones.
                "engineConfig": {"logprobs-mode": "processed_logprobs"},
            },
            "resources": {"instanceType": instance_type, "gpuCount": 1},
            "model": {"name": MODEL_NAME, "bucket": bucket, "path": model_path},
            "autoscaling": {"min": replicas, "max": replicas},
            "hotLoad": {"bucket": bucket, "pathPrefix": PATH_PREFIX, "transitionMode": "TRANSITION_MODE_ASYNC"},
        }
    )
    deployment = lifecycle.wait_for_deployment(client, deployment.id, timeout=_PATIENCE, poll_interval=_POLL)
    (endpoint,) = lifecycle.endpoints(client, deployment)
    return deployment, lifecycle.rollout_base_url(endpoint)


@contextlib.contextmanager
def _emulator(config: DemoConfig, root: Path) -> Iterator[Emulator]:
    emulator = Emulator(root / "emulator", replicas=config.replicas, seed=config.seed)
    try:
        emulator.start()
    except EmulatorError as exc:
        hint = "`cwtrain emulator serve --verbose` shows more; `cwtrain doctor` what is installed"
        raise CWTrainError(f"the emulator does not run: {exc}", hint=hint) from exc
    try:
        yield emulator
    finally:
        emulator.stop()


@contextlib.contextmanager
def _state_directory(config: DemoConfig, say: Callable[[str], None]) -> Iterator[Path]:
    """Give the directory for everything that is written, and remove it at the end unless it is to be kept."""
    if config.state_dir:
        root = Path(config.state_dir).absolute()
        root.mkdir(parents=True, exist_ok=True)
        if any(root.iterdir()):
            raise ConfigError(f"--state-dir {root} is not empty", hint="give a new directory for every run")
        yield root
        return
    root = Path(tempfile.mkdtemp(prefix="cwtrain-demo-"))
    try:
        yield root
    finally:
        if config.keep:
            say(f"everything that was written is in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)


@contextlib.contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables as a user of the emulator does, and put the old ones back."""
    wanted = dict(values)
    for name in ("NO_PROXY", "no_proxy"):
        wanted[name] = f"{os.environ.get(name, '')},127.0.0.1,localhost".lstrip(",")
    dropped = [name for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "CWTRAIN_API_HEADERS") if name not in wanted]
    before = {name: os.environ.get(name) for name in [*wanted, *dropped]}
    for name in dropped:
        os.environ.pop(name, None)
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _phase(result: DemoResult, name: str) -> Iterator[None]:
    started = time.monotonic()
    try:
        yield
    finally:
        result.seconds[name] = result.seconds.get(name, 0.0) + time.monotonic() - started


def _spelled(tokens: Sequence[int], letters: int) -> str:
    """Return tokens as letters, a point for the end token; as numbers where there are more than 26."""
    if letters > 26:
        return ",".join(map(str, tokens))
    return "".join("." if token >= letters else chr(ord("a") + token) for token in tokens)
