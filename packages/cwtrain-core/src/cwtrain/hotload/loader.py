"""HotLoader: one deployment's snapshots, from a directory on disk to weights served by every replica."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, overload

import attrs

from cwtrain.errors import (
    ConfigError,
    CWTrainError,
    HotLoadError,
    SnapshotChainError,
)
from cwtrain.events import (
    SnapshotInspected,
    SnapshotUploaded,
    SyncCompleted,
    SyncFailed,
    SyncStarted,
)
from cwtrain.hotload import chain as chains
from cwtrain.hotload._in_bucket import named, previous_as_written, previous_in_bucket, require_objects
from cwtrain.hotload._mirror_hold import Owner, keeping, owner_of
from cwtrain.hotload._writer_receipts import WrittenSnapshot
from cwtrain.hotload.operations import HotLoadOperations, ServedReport, warn_about_stragglers
from cwtrain.hotload.planning import plan_publish
from cwtrain.hotload.progress import OnProgress, ProgressEvent
from cwtrain.hotload.upload import put_manifest, store_for, upload_with_manifest
from cwtrain.hotload.verify import VerifyReport, verify_snapshot
from cwtrain.hotload.work import Work
from cwtrain.infra._poll import Deadline, check_seconds
from cwtrain.infra._requests import member
from cwtrain.infra.lifecycle import wait_for_deployment
from cwtrain.models.service import (
    Deployment,
    HotLoad,
    HotLoadReplica,
    HotLoadState,
    HotLoadTarget,
    PromptCachePolicy,
    ResourceStatus,
    SnapshotType,
)
from cwtrain.models.snapshot import LocalSnapshot, PublishPlan
from cwtrain.models.sync import SnapshotChoice
from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots.identity import check_identity
from cwtrain.snapshots.manifest import manifest_to_bytes, parse_manifest
from cwtrain.storage import Location, ObjectStore, UploadProgress, UploadReport, s3_client

if TYPE_CHECKING:
    from cwtrain.infra.client import InferenceClient
    from cwtrain.plugins import Plugins

__all__ = ["HotLoader", "ServedReport"]

_log = logging.getLogger("cwtrain.hotload")


class HotLoader:
    """Publishes snapshots to one deployment and follows its hot-loads.

    ``client`` is an ``InferenceClient``; ``s3`` a boto3 client (made from the environment at first use without it);
    ``poll_interval`` and ``timeout`` are seconds. ``timeout`` covers everything after the upload: waiting for another
    hot-load, acceptance, and the hot-load itself. ``plugins`` is the process-wide set unless given.
    ``max_bytes_per_second`` limits the bandwidth of uploads (else ``CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND`` does).

        loader = HotLoader(InferenceClient(), deployment_id="<uuid>")
        loader.publish("/ckpt/step_000100", identity="step_000100")
        loader.publish("/ckpt/delta_000101", identity="step_000101", previous_identity="step_000100")

    The same call made again after a crash goes on where it stopped: objects in the bucket are kept, and a hot-load that
    it began is adopted.
    """

    def __init__(
        self,
        client: InferenceClient,
        deployment_id: str,
        *,
        s3: Any = None,
        poll_interval: float = 5.0,
        timeout: float = 1800.0,
        plugins: Plugins | None = None,
        run_id: str | None = None,
        max_bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        if not deployment_id:
            raise ConfigError(
                "deployment_id is empty", hint="give the deployment's UUID; `cwtrain deployment list` shows it"
            )
        self.client = client
        self.deployment_id = deployment_id
        self.poll_interval = check_seconds("poll_interval", poll_interval)
        self.timeout = check_seconds("timeout", timeout)
        self.run_id = run_id
        self.max_bytes_per_second = max_bytes_per_second
        self._s3 = s3
        self._plugins = plugins
        self._clock = clock
        self._sleep = sleep
        self._deployment: Deployment | None = None

    def __repr__(self) -> str:
        return f"HotLoader(deployment_id={self.deployment_id!r})"

    # -- what the deployment is and serves -------------------------------------------------------------------------

    @property
    def deployment(self) -> Deployment:
        """The deployment as last seen; asked for at first use."""
        return self._deployment or self.refresh_deployment()

    def refresh_deployment(self) -> Deployment:
        """Ask the service for the deployment again."""
        self._deployment = self.client.get_deployment(self.deployment_id)
        return self._deployment

    @property
    def target(self) -> HotLoadTarget:
        """Where the deployment takes snapshots from. Raises HotLoadError when it cannot be hot-loaded."""
        target = self.deployment.hot_load
        if target is None or not target.bucket:
            raise HotLoadError(
                f"deployment {self.deployment_id} ({self.deployment.name}) was created without hotLoad",
                hint="hotLoad {bucket, pathPrefix, transitionMode} can be set at creation only: create a deployment "
                "with it (engine dynamo-vllm, gateways of one zone)",
            )
        return target

    @property
    def location(self) -> Location:
        """The bucket and prefix of the deployment's snapshots."""
        return Location(bucket=self.target.bucket, path_prefix=self.target.path_prefix)

    @property
    def store(self) -> ObjectStore:
        """The object store of the deployment's snapshots."""
        return self._store(8)

    def _store(self, workers: int) -> ObjectStore:
        if self._s3 is None:
            # One client for the loader's life: making one costs more than most requests.
            self._s3 = s3_client(max_pool_connections=max(64, workers))
        return store_for(self.target.bucket, self._s3)

    def hot_loads(self) -> list[HotLoad]:
        """Return all hot-loads of the deployment, newest first."""
        return list(self.client.list_hot_loads(self.deployment_id))

    def active_hot_load(self) -> HotLoad | None:
        """Return the unfinished hot-load, or None."""
        return chains.active(self.client.list_hot_loads(self.deployment_id))

    def latest_completed(self) -> HotLoad | None:
        """Return the newest COMPLETED hot-load, or None while the deployment serves its base weights."""
        return chains.latest_completed(self.client.list_hot_loads(self.deployment_id))

    def current_identity(self) -> str | None:
        """Return the identity that the deployment serves, or None while it serves its base weights."""
        latest = self.latest_completed()
        return latest.identity if latest else None

    def completed_hot_load(self, identity: str) -> HotLoad | None:
        """Return the newest COMPLETED hot-load of ``identity``, or None."""
        return chains.completed(self.client.list_hot_loads(self.deployment_id), identity)

    def status(self, hot_load_id: str) -> tuple[HotLoad, list[HotLoadReplica]]:
        """Return a hot-load and its replicas, and warn about replicas that contradict COMPLETED."""
        hot_load = self.client.get_hot_load(hot_load_id)
        replicas = list(self.client.list_hot_load_replicas(hot_load_id))
        warn_about_stragglers(hot_load, replicas)
        return hot_load, replicas

    def verify_served(self, identity: str) -> ServedReport:
        """Ask every replica, by the newest COMPLETED hot-load of ``identity``, what it serves now.

        Raises SnapshotChainError when the deployment never completed a hot-load of it.
        """
        hot_load = self.completed_hot_load(identity)
        if hot_load is None:
            raise _never_completed(identity, self.deployment_id)
        return self.operations.served(hot_load)

    # -- publish ---------------------------------------------------------------------------------------------------

    @overload
    def publish(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = ...,
        prompt_cache_policy: PromptCachePolicy = ...,
        wait: bool = ...,
        timeout: float | None = ...,
        on_progress: OnProgress | None = ...,
        workers: int = ...,
        version: int | None = ...,
        dry_run: Literal[False] = ...,
    ) -> HotLoad: ...

    @overload
    def publish(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = ...,
        prompt_cache_policy: PromptCachePolicy = ...,
        wait: bool = ...,
        timeout: float | None = ...,
        on_progress: OnProgress | None = ...,
        workers: int = ...,
        version: int | None = ...,
        dry_run: Literal[True],
    ) -> PublishPlan: ...

    def publish(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = None,
        prompt_cache_policy: PromptCachePolicy = PromptCachePolicy.UNSPECIFIED,
        wait: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
        workers: int = 8,
        version: int | None = None,
        dry_run: bool = False,
    ) -> HotLoad | PublishPlan:
        """Inspect, upload, hot-load ``checkpoint`` as ``identity`` and return the hot-load, COMPLETED if waited for.

        A delta needs its predecessor: ``previous_identity``, or a numeric ``base_version`` N in its index, which means
        ``weight_v{N:06d}``. The whole plan is checked before the first byte is written; ``dry_run=True`` returns it and
        writes nothing. ``timeout`` (seconds) starts when the upload is done. ``on_progress`` gets a ProgressEvent at
        each step. ``version`` is the trainer's number, for the manifest and the events.

        An open ``WeightMirror`` can be given as ``checkpoint``: the chain is cut. Nothing is copied, and as nobody else
        can write to it, its shards are read once; what would change it waits until they are sent.

        Raises SnapshotLayoutError with all problems of the directory, SnapshotChainError for a predecessor that this
        deployment has not completed or a chain that is too long, SnapshotConflictError when the identity holds other
        content, StorageError naming a refused permission, DeploymentFailedError, HotLoadFailedError with the replicas'
        reasons, HotLoadTimeoutError naming what still runs.
        """
        limit = self.timeout if timeout is None else check_seconds("timeout", timeout)
        check_identity(identity)
        policy = member(PromptCachePolicy, prompt_cache_policy, "prompt_cache_policy")
        started = self._clock()
        owner = owner_of(checkpoint)
        with keeping(owner):
            snapshot = inspect_snapshot(checkpoint, previous_identity=previous_identity)
        inspected = self._clock() - started
        if not dry_run:
            self._wait_until_ready(limit)
        else:
            self.refresh_deployment()
        listed = self._clock()
        hot_loads = self.hot_loads()
        work = Work.of(snapshot, identity, policy)
        plan = plan_publish(
            snapshot,
            work,
            deployment=self.deployment,
            location=self.location,
            store=self.store,
            hot_loads=hot_loads,
            run_id=self.run_id,
            upload_next=not dry_run,
        )
        done = self.operations.done(work, hot_loads) if not plan.upload_bytes else None
        plan = attrs.evolve(plan, already_served=done is not None)
        if dry_run:
            return plan
        if done is not None:
            _log.info("%s is served already by hot-load %s: nothing to do", identity, done.id)
            return done
        self.plugins.before_publish(plan)
        self.plugins.notify(
            SyncStarted(
                identity=identity,
                choice=SnapshotChoice(snapshot.kind.value),
                previous_identity=snapshot.previous_identity,
                version=version,
                run_id=self.run_id,
            )
        )
        try:
            self.plugins.notify(
                SnapshotInspected(
                    identity=identity,
                    kind=snapshot.kind,
                    files=len(snapshot.files),
                    size_bytes=snapshot.total_bytes,
                    run_id=self.run_id,
                )
            )
            report = self._upload(
                snapshot,
                identity,
                workers=workers,
                on_progress=on_progress,
                version=version,
                free=not plan.existing,
                owner=owner,
            )
            # As old as what any wait goes by, at the most; what the service has begun since, it says itself.
            known = hot_loads if self._clock() - listed < self.poll_interval else None
            hot_load = self.operations.run(work, wait=wait, timeout=limit, on_progress=on_progress, known=known)
        except CWTrainError as error:
            self.plugins.notify(SyncFailed(error=error, identity=identity, version=version, run_id=self.run_id))
            raise
        timings = {
            **hot_load.timings,
            "inspect_seconds": inspected,
            "upload_seconds": report.seconds,
            "bytes": float(snapshot.total_bytes),
            "uploaded_bytes": float(report.uploaded_bytes),
            "tensor_bytes": float(snapshot.tensor_bytes),
        }
        if hot_load.state is HotLoadState.COMPLETED:
            self.plugins.notify(
                SyncCompleted(
                    identity=identity,
                    hot_load_id=hot_load.id,
                    seconds=self._clock() - started,
                    version=version,
                    run_id=self.run_id,
                )
            )
        return attrs.evolve(hot_load, timings=timings)

    def plan(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = None,
        prompt_cache_policy: PromptCachePolicy = PromptCachePolicy.UNSPECIFIED,
    ) -> PublishPlan:
        """Return what ``publish`` would do; nothing is written."""
        return self.publish(
            checkpoint,
            identity,
            previous_identity=previous_identity,
            prompt_cache_policy=prompt_cache_policy,
            dry_run=True,
        )

    def upload(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = None,
        workers: int = 8,
        on_progress: OnProgress | None = None,
    ) -> str:
        """Upload ``checkpoint`` as ``identity`` without a hot-load and return its ``s3://`` URI."""
        owner = owner_of(checkpoint)
        with keeping(owner):
            snapshot = inspect_snapshot(checkpoint, previous_identity=previous_identity)
        return self._upload(snapshot, identity, workers=workers, on_progress=on_progress, owner=owner).uri

    def trigger(
        self,
        identity: str | WrittenSnapshot,
        *,
        previous_identity: str | None = None,
        prompt_cache_policy: PromptCachePolicy = PromptCachePolicy.UNSPECIFIED,
        wait: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> HotLoad:
        """Hot-load a snapshot that is in the bucket and return the hot-load, COMPLETED if waited for.

        Of an identity, its index in the bucket says whether it is a delta, and on what; ``previous_identity`` names
        another predecessor, and is refused for a full snapshot. Of what ``SnapshotWriter.finalise`` returned all that
        is known, and nothing is read back: ``previous_identity`` must agree, and an empty delta is refused.
        An unfinished hot-load of the deployment is waited for first. Raises as ``publish`` does.
        """
        limit = self.timeout if timeout is None else check_seconds("timeout", timeout)
        name, written = named(identity)
        policy = member(PromptCachePolicy, prompt_cache_policy, "prompt_cache_policy")
        self._wait_until_ready(limit)
        if written is not None:
            previous = previous_as_written(written, self.location, given=previous_identity)
        else:
            previous = previous_in_bucket(lambda: self.store, self.location, name, given=previous_identity)
        work = Work(name, SnapshotType.INCREMENTAL if previous else SnapshotType.FULL, previous, policy)
        return self.operations.run(work, wait=wait, timeout=limit, on_progress=on_progress)

    def rollback(
        self,
        identity: str,
        *,
        prompt_cache_policy: PromptCachePolicy = PromptCachePolicy.UNSPECIFIED,
        wait: bool = True,
        timeout: float | None = None,
        on_progress: OnProgress | None = None,
    ) -> HotLoad:
        """Serve an earlier ``identity`` again: a new hot-load of the same type on the same predecessor.

        Raises SnapshotChainError when the deployment never completed it, SnapshotError naming objects of its chain that
        are gone from the bucket.
        """
        limit = self.timeout if timeout is None else check_seconds("timeout", timeout)
        policy = member(PromptCachePolicy, prompt_cache_policy, "prompt_cache_policy")
        self._wait_until_ready(limit)
        hot_loads = self.hot_loads()
        earlier = chains.completed(hot_loads, identity)
        if earlier is None:
            raise _never_completed(identity, self.deployment_id)
        require_objects(self.store, self.location, chains.chain_of(earlier, hot_loads).links)
        work = Work(identity, earlier.spec.type, earlier.previous_identity, policy)
        return self.operations.run(work, wait=wait, timeout=limit, on_progress=on_progress)

    def wait(self, hot_load_id: str, *, timeout: float | None = None, on_progress: OnProgress | None = None) -> HotLoad:
        """Wait until a hot-load has ended and return it, COMPLETED.

        Outages of the API are survived until ``timeout`` (seconds). Raises HotLoadFailedError with the hot-load's
        conditions and each replica's reason, HotLoadCanceledError, HotLoadTimeoutError, DeploymentFailedError.
        """
        limit = self.timeout if timeout is None else check_seconds("timeout", timeout)
        return self.operations.follow(hot_load_id, deadline=Deadline(limit, self._clock), on_progress=on_progress)

    # -- manifests -------------------------------------------------------------------------------------------------

    def manifest_key(self, identity: str) -> str:
        """Return the key of the manifest of ``identity`` in the deployment's bucket."""
        return self.location.manifest_key(identity)

    def upload_manifest(self, identity: str, manifest: Mapping[str, Any]) -> str:
        """Write the manifest of ``identity`` once and return its key; an existing one is kept."""
        return put_manifest(self.store, self.location, check_identity(identity), manifest_to_bytes(manifest))

    def read_manifest(self, identity: str) -> dict[str, Any]:
        """Return the manifest of ``identity``. Raises StorageNotFoundError where there is none."""
        return parse_manifest(self.store.get(self.manifest_key(identity)))

    def verify(
        self, identity: str, *, workers: int = 4, on_progress: Callable[[int], None] | None = None
    ) -> VerifyReport:
        """Read a snapshot back from the bucket and compare it with its manifest. See ``verify_snapshot``."""
        return verify_snapshot(self.store, self.location, identity, workers=workers, on_progress=on_progress)

    # -- steps -----------------------------------------------------------------------------------------------------

    @property
    def plugins(self) -> Plugins:
        """The plugins that are asked and told."""
        if self._plugins is None:
            from cwtrain.plugins import get_plugins

            self._plugins = get_plugins()
        return self._plugins

    @property
    def operations(self) -> HotLoadOperations:
        """What asks for this deployment's hot-loads and follows them."""
        return HotLoadOperations(
            client=self.client,
            deployment_id=self.deployment_id,
            plugins=self.plugins,
            poll_interval=self.poll_interval,
            run_id=self.run_id,
            clock=self._clock,
            sleep=self._sleep,
        )

    def _wait_until_ready(self, timeout: float) -> None:
        """Return once the deployment is READY; one that is FAILED or going away is an error at once."""
        deployment = self.refresh_deployment()
        _ = self.target
        if deployment.status is not ResourceStatus.READY:
            self._deployment = wait_for_deployment(
                self.client,
                self.deployment_id,
                timeout=timeout,
                poll_interval=self.poll_interval,
                just_created=False,
                clock=self._clock,
                sleep=self._sleep,
            )

    def _upload(
        self,
        snapshot: LocalSnapshot,
        identity: str,
        *,
        workers: int,
        on_progress: OnProgress | None,
        version: int | None = None,
        free: bool = False,
        owner: Owner | None = None,
    ) -> UploadReport:
        def tell(progress: UploadProgress) -> None:
            if on_progress is not None:
                on_progress(ProgressEvent(upload=progress, elapsed=progress.seconds))

        report = upload_with_manifest(
            snapshot,
            store=self._store(workers),
            location=self.location,
            identity=identity,
            workers=workers,
            on_progress=tell,
            deployment_id=self.deployment_id,
            run_id=self.run_id,
            version=version,
            max_bytes_per_second=self.max_bytes_per_second,
            free=free,
            owner=owner,
        )
        self.plugins.notify(
            SnapshotUploaded(
                identity=identity,
                objects=len(report.uploaded) + len(report.reused),
                uploaded_bytes=report.uploaded_bytes,
                reused_bytes=report.reused_bytes,
                seconds=report.seconds,
                run_id=self.run_id,
            )
        )
        return report


def _never_completed(identity: str, deployment_id: str) -> SnapshotChainError:
    return SnapshotChainError(
        f"deployment {deployment_id} has never completed a hot-load of {identity}",
        hint=f"`cwtrain hotload list --deployment {deployment_id}` shows what it has",
    )
