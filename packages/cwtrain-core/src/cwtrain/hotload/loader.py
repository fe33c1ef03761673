"""HotLoader: one deployment's snapshots, from a directory on disk to weights served by every replica."""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from typing import Literal, overload

import attrs

from cwtrain.errors import HotLoadError
from cwtrain.hotload import chain as chains
from cwtrain.hotload._in_bucket import named, previous_as_written, previous_in_bucket, require_objects
from cwtrain.hotload._loader_core import LoaderCore, never_completed
from cwtrain.hotload._mirror_hold import keeping
from cwtrain.hotload._writer_receipts import WrittenSnapshot
from cwtrain.hotload.operations import ServedReport
from cwtrain.hotload.planning import plan_publish
from cwtrain.hotload.progress import OnProgress, ProgressEvent
from cwtrain.hotload.work import Work
from cwtrain.infra._poll import check_seconds
from cwtrain.infra._requests import member
from cwtrain.models.service import HotLoad, HotLoadState, PromptCachePolicy, SnapshotType
from cwtrain.models.snapshot import PublishPlan
from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots.identity import check_identity

__all__ = ["HotLoader", "ServedReport"]

_log = logging.getLogger("cwtrain.hotload")


class HotLoader(LoaderCore):
    """Publishes snapshots to one deployment and follows its hot-loads.

    ``client`` is an ``InferenceClient``; ``s3`` a boto3 client (made from the environment at first use without it);
    ``poll_interval`` and ``timeout`` are seconds. ``timeout`` covers everything after the upload: waiting for another
    hot-load, acceptance, and the hot-load itself; and it bounds how long an outage of the store is waited out.
    An upload has no limit of its own: a store that takes bytes is waited for, however slow it is. ``within(seconds)``
    bounds everything, the upload too. ``plugins`` is the process-wide set unless given.
    ``max_bytes_per_second`` limits the bandwidth of uploads (else ``CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND`` does).

        loader = HotLoader(InferenceClient(), deployment_id="<uuid>")
        loader.publish("/ckpt/step_000100", identity="step_000100")
        loader.publish("/ckpt/delta_000101", identity="step_000101", previous_identity="step_000100")

    It pickles without secrets: the process that unpickles it needs the API's token and the bucket's keys in its
    environment, and asks its own plugins. In a forked process it opens connections of its own.

    The same call made again after a crash goes on where it stopped: objects in the bucket are kept, and a hot-load that
    it began is adopted.
    """

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
        base_version: str | int | None = ...,
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
        base_version: str | int | None = ...,
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
        base_version: str | int | None = None,
        dry_run: bool = False,
    ) -> HotLoad | PublishPlan:
        """Inspect, upload, hot-load ``checkpoint`` as ``identity`` and return the hot-load, COMPLETED if waited for.

        A delta needs its predecessor: ``previous_identity``, or a numeric ``base_version`` N in its index, which means
        ``weight_v{N:06d}``. The whole plan is checked before the first byte is written, by plugins, too;
        ``dry_run=True`` returns it and writes nothing, and raises what a publish would be refused with. ``timeout``
        (seconds) starts when the upload is done; ``within`` limits that, too. ``on_progress`` gets a ProgressEvent at
        each step. ``version`` is the trainer's number, for the manifest and the events.

        The predecessor must hold the version that the delta's own index names as its base: its manifest says which one
        it holds, or else its name. ``base_version`` says so where the caller knows better (versions in between that
        changed nothing, another numbering); it is compared with the delta's index all the same.

        Outages of the store and of the API are waited out: of the store for ``timeout`` of the loader, or for a minute
        where it has never answered. What has arrived is not sent again, nor by the same call made again.

        An open ``WeightMirror`` can be given as ``checkpoint``: the chain is cut. Nothing is copied, and as nobody else
        can write to it, its shards are read once; what would change it waits from the inspection until they are sent.

        Raises SnapshotLayoutError with all problems of the directory, SnapshotChainError for a predecessor that this
        deployment has not completed or that holds another version, or a chain that is too long, SnapshotConflictError
        when the identity holds other content, StorageError naming a refused permission, DeploymentFailedError,
        HotLoadFailedError with the replicas' reasons, HotLoadTimeoutError naming what still runs, WaitTimeoutError
        naming the step in which time ran out.
        """
        limit = self.timeout if timeout is None else check_seconds("timeout", timeout)
        check_identity(identity)
        policy = member(PromptCachePolicy, prompt_cache_policy, "prompt_cache_policy")
        started = self._clock()
        with ExitStack() as kept:
            hold = kept.enter_context(keeping(checkpoint))
            snapshot = inspect_snapshot(checkpoint, previous_identity=previous_identity)
            inspected = self._clock() - started
            if not dry_run:
                self._wait_until_ready(limit)
            else:
                self.require_open()
            listed = self._clock()
            hot_loads = self.hot_loads()
            if not dry_run:
                self.syncs.listed(hot_loads)
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
            self._require_base(snapshot, base_version)
            warnings = self._differences(snapshot, identity, hot_loads)
            for warning in warnings:
                _log.warning("%s", warning)
            plan = attrs.evolve(plan, warnings=(*plan.warnings, *warnings))
            done = self.operations.done(work, hot_loads) if not plan.upload_bytes else None
            plan = attrs.evolve(plan, already_served=done is not None, dry_run=dry_run)
            if done is None:
                self.plugins.before_publish(plan)
            if dry_run:
                return plan
            if done is not None:
                _log.info("%s is served already by hot-load %s: nothing to do", identity, done.id)
                if on_progress is not None:
                    on_progress(ProgressEvent(hot_load=done, already_served=True))
                return done
            try:
                self._tell_started(snapshot, identity, version, began=started)
                report = self._upload(
                    snapshot,
                    identity,
                    workers=workers,
                    on_progress=on_progress,
                    version=version,
                    free=not plan.existing,
                    hold=hold,
                    base_known=base_version is not None,
                )
                kept.close()  # it was sent: what would change the mirror may go on
                self._deadline.check(f"about to ask for the hot-load of {identity}")
                # As old as what any wait goes by, at the most; what the service has begun since, it says itself.
                known = hot_loads if self._clock() - listed < self.poll_interval else None
                hot_load = self.operations.run(
                    work, wait=wait, timeout=self._until(limit), on_progress=on_progress, known=known
                )
                if hot_load.state is HotLoadState.COMPLETED:
                    self.syncs.completed(hot_load, version=version)
            except BaseException as error:
                self.syncs.failed(error, identity=identity, version=version)
                raise
        timings = {
            **hot_load.timings,
            "inspect_seconds": inspected,
            "upload_seconds": report.seconds,
            "bytes": float(snapshot.total_bytes),
            "uploaded_bytes": float(report.uploaded_bytes),
            "tensor_bytes": float(snapshot.tensor_bytes),
        }
        return attrs.evolve(hot_load, timings=timings)

    def plan(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = None,
        prompt_cache_policy: PromptCachePolicy = PromptCachePolicy.UNSPECIFIED,
        base_version: str | int | None = None,
    ) -> PublishPlan:
        """Return what ``publish`` would do; nothing is written."""
        return self.publish(
            checkpoint,
            identity,
            previous_identity=previous_identity,
            prompt_cache_policy=prompt_cache_policy,
            base_version=base_version,
            dry_run=True,
        )

    def upload(
        self,
        checkpoint: str | os.PathLike[str],
        identity: str,
        *,
        previous_identity: str | None = None,
        base_version: str | int | None = None,
        workers: int = 8,
        on_progress: OnProgress | None = None,
    ) -> str:
        """Upload ``checkpoint`` as ``identity`` without a hot-load and return its ``s3://`` URI.

        A delta's predecessor, and ``base_version``, are as for ``publish``.
        """
        with keeping(checkpoint) as hold:
            snapshot = inspect_snapshot(checkpoint, previous_identity=previous_identity)
            self._require_base(snapshot, base_version)
            known = base_version is not None
            report = self._upload(
                snapshot, identity, workers=workers, on_progress=on_progress, hold=hold, base_known=known
            )
            return report.uri

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

        Of an identity, its index in the bucket says whether it is a delta, and on what: ``previous_identity`` must
        agree, and so must the version that it was made on with the one that its predecessor holds. Of what
        ``SnapshotWriter.finalise`` returned all that is known, and nothing is read back: ``previous_identity`` must
        agree, and an empty delta is refused.
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
        self._deadline.check(f"about to ask for the hot-load of {name}")
        return self.operations.run(work, wait=wait, timeout=self._until(limit), on_progress=on_progress)

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
            raise never_completed(identity, self.deployment_id)
        require_objects(self.store, self.location, chains.chain_of(earlier, hot_loads).links)
        work = Work(identity, earlier.spec.type, earlier.previous_identity, policy)
        self._deadline.check(f"about to ask for the hot-load of {identity}")
        return self.operations.run(work, wait=wait, timeout=self._until(limit), on_progress=on_progress)

    def wait(self, hot_load_id: str, *, timeout: float | None = None, on_progress: OnProgress | None = None) -> HotLoad:
        """Wait until a hot-load has ended and return it, COMPLETED.

        Outages of the API are survived until ``timeout`` (seconds). Raises HotLoadFailedError with the hot-load's
        conditions and each replica's reason, HotLoadCanceledError, HotLoadTimeoutError, DeploymentFailedError.
        """
        limit = self.timeout if timeout is None else check_seconds("timeout", timeout)
        self._deadline.check(f"waiting for hot-load {hot_load_id}")
        try:
            hot_load = self.operations.follow(hot_load_id, deadline=self._until(limit), on_progress=on_progress)
        except HotLoadError as error:
            if isinstance(error.hot_load, HotLoad):
                self.syncs.seen(error.hot_load, error=error)
            raise
        self.syncs.seen(hot_load)
        return hot_load
