"""What a deployment is, has and serves, and the steps of a publish: ``HotLoader`` below its public face."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self

from cwtrain._waiting import Deadline, Pauses, check_seconds
from cwtrain.errors import ConfigError, CWTrainError, HotLoadError, SnapshotChainError, SnapshotError, StorageError
from cwtrain.events import SnapshotInspected, SnapshotUploaded, SyncStarted
from cwtrain.hotload import chain as chains
from cwtrain.hotload._mirror_hold import Hold
from cwtrain.hotload.operations import HotLoadOperations, ServedReport, warn_about_stragglers
from cwtrain.hotload.planning import differences
from cwtrain.hotload.progress import OnProgress, ProgressEvent, SyncEvents
from cwtrain.hotload.upload import manifest_of, put_manifest, require_base, store_for, upload_with_manifest
from cwtrain.hotload.verify import VerifyReport, verify_snapshot
from cwtrain.infra._retry import is_retryable
from cwtrain.infra.lifecycle import wait_for_deployment
from cwtrain.models.service import Deployment, HotLoad, HotLoadReplica, HotLoadTarget, ResourceStatus
from cwtrain.models.snapshot import LocalSnapshot, SnapshotKind
from cwtrain.models.sync import SnapshotChoice
from cwtrain.snapshots.identity import check_identity
from cwtrain.snapshots.manifest import manifest_to_bytes, parse_manifest
from cwtrain.storage import (
    Location,
    ObjectStore,
    S3Settings,
    S3Store,
    UploadProgress,
    UploadReport,
    s3_client,
    s3_settings,
)
from cwtrain.storage.patient import PatientStore

if TYPE_CHECKING:
    from cwtrain.infra.client import InferenceClient
    from cwtrain.plugins import Plugins

__all__ = ["LoaderCore", "never_completed"]

_log = logging.getLogger("cwtrain.hotload")
_LAST_LOOK_SECONDS = 1.0


class LoaderCore:
    """One deployment, its snapshots in the bucket and its hot-loads; see ``HotLoader``."""

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
        self._s3 = s3.inner if isinstance(s3, PatientStore) else s3  # this loader's own time counts
        self._s3_settings: S3Settings | None = None
        self._plugins = plugins
        self._clock = clock
        self._sleep = sleep
        self._deployment: Deployment | None = None
        self._manifests: dict[str, Mapping[str, Any]] = {}
        """Those of what was uploaded last, and of the full snapshot under it: nobody has to read them back."""
        self._looked: float | None = None
        """When ``require_open(just_before=True)`` looked, until what follows has used it."""
        self.syncs = self._sync_events()
        self._pauses = Pauses(first=min(0.25, poll_interval), longest=min(8.0, poll_interval))
        self._deadline = Deadline(None)
        self._origin: Self | None = None

    def __repr__(self) -> str:
        return f"HotLoader(deployment_id={self.deployment_id!r})"

    def _sync_events(self) -> SyncEvents:
        return SyncEvents(lambda: self.plugins, self.run_id, self._clock)

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.syncs = self._sync_events()

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process makes the same loader of: no secret, no connection, no plugin."""
        state = {**self.__dict__, "_plugins": None, "_deployment": None, "_looked": None, "syncs": None}
        state |= {"_deadline": Deadline(None), "_origin": None}
        if isinstance(self._s3, S3Store):
            state |= {"_s3": None, "_s3_settings": self._s3.settings}
        elif self._s3 is not None and not hasattr(self._s3, "create_upload"):
            state |= {"_s3": None, "_s3_settings": s3_settings(self._s3)}
        return state

    # -- what the deployment is and serves -------------------------------------------------------------------------

    @property
    def deployment(self) -> Deployment:
        """The deployment as last seen; asked for at first use."""
        return self._home._deployment or self.refresh_deployment()

    def refresh_deployment(self) -> Deployment:
        """Ask the service for the deployment again."""
        with self._in_time("looking at the deployment"):
            self._home._deployment = found = self.asking.get_deployment(self.deployment_id)
        return found

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
        """The object store of the deployment's snapshots. Its outages are waited out for ``timeout`` seconds."""
        return self._store(8)

    def within(self, seconds: float | Deadline) -> Self:
        """Return a view of this loader whose calls are over in so many seconds from now, all together.

        Requests under way are cut then, to the API as to the store, and no hot-load is asked for after it. They raise
        WaitTimeoutError, which names the step. ``seconds`` may be a deadline that is shared with other work.
        """
        view = object.__new__(type(self))
        view.__dict__.update(self.__dict__)
        view._deadline = seconds if isinstance(seconds, Deadline) else Deadline(seconds, self._clock, name="seconds")
        view._origin = self._home
        return view

    @property
    def _home(self) -> Self:
        """The loader that a view was made of: what is found out once is kept there."""
        return self._origin or self

    def _until(self, seconds: float) -> Deadline:
        """Return when a wait of ``seconds`` is over: with the deadline where that comes first."""
        return self._deadline if self._deadline.left() <= seconds else Deadline(seconds, self._clock)

    @contextlib.contextmanager
    def _in_time(self, what: str) -> Iterator[None]:
        """Raise WaitTimeoutError, and not an outage of the API, where the time is over."""
        self._deadline.check(what)
        try:
            yield
        except CWTrainError as error:
            if is_retryable(error) and not self._deadline.left():
                raise self._deadline.over(what, error) from error
            raise

    @property
    def asking(self) -> InferenceClient:
        """The client whose calls are over by the deadline."""
        left = self._deadline.left()
        return self.client if left == math.inf else self.client.within(max(left, _LAST_LOOK_SECONDS))

    def _store(self, workers: int) -> ObjectStore:
        home = self._home
        if home._s3 is None:
            # One client for the loader's life: making one costs more than most requests.
            known = home._s3_settings
            home._s3 = s3_client(
                known.endpoint_url if known else None,
                region_name=known.region if known else None,
                max_pool_connections=max(64, workers),
                **({} if known is None else {"config": known.config()}),
            )
        return PatientStore(
            store_for(self.target.bucket, home._s3),
            deadline=self._deadline,
            outage_seconds=self.timeout,
            clock=self._clock,
            sleep=self._sleep,
            pauses=self._pauses,
        )

    def hot_loads(self) -> list[HotLoad]:
        """Return all hot-loads of the deployment, newest first."""
        with self._in_time("listing the hot-loads"):
            return list(self.asking.list_hot_loads(self.deployment_id))

    def active_hot_load(self) -> HotLoad | None:
        """Return the unfinished hot-load, or None."""
        return chains.active(self.asking.list_hot_loads(self.deployment_id))

    def latest_completed(self) -> HotLoad | None:
        """Return the newest COMPLETED hot-load, or None while the deployment serves its base weights."""
        return chains.latest_completed(self.asking.list_hot_loads(self.deployment_id))

    def current_identity(self) -> str | None:
        """Return the identity that the deployment serves, or None while it serves its base weights."""
        latest = self.latest_completed()
        return latest.identity if latest else None

    def completed_hot_load(self, identity: str) -> HotLoad | None:
        """Return the newest COMPLETED hot-load of ``identity``, or None."""
        return chains.completed(self.asking.list_hot_loads(self.deployment_id), identity)

    def status(self, hot_load_id: str) -> tuple[HotLoad, list[HotLoadReplica]]:
        """Return a hot-load and its replicas, and warn about replicas that contradict COMPLETED."""
        hot_load = self.asking.get_hot_load(hot_load_id)
        replicas = list(self.asking.list_hot_load_replicas(hot_load_id))
        warn_about_stragglers(hot_load, replicas)
        return hot_load, replicas

    def verify_served(self, identity: str) -> ServedReport:
        """Ask every replica, by the newest COMPLETED hot-load of ``identity``, what it serves now.

        Raises SnapshotChainError when the deployment never completed a hot-load of it.
        """
        hot_load = self.completed_hot_load(identity)
        if hot_load is None:
            raise never_completed(identity, self.deployment_id)
        return self.operations.served(hot_load)

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
            client=self.asking,
            deployment_id=self.deployment_id,
            plugins=self.plugins,
            poll_interval=self.poll_interval,
            run_id=self.run_id,
            clock=self._clock,
            sleep=self._sleep,
        )

    def require_open(self, *, just_before: bool = False) -> None:
        """Look at the deployment, and raise where a hot-load could not end well: before anything is sent for one.

        HotLoadError for one without a target or that is disabled, DeploymentFailedError for FAILED and going away.
        ``just_before`` what looks again: that need not, where it comes within a poll interval.
        """
        deployment = self.refresh_deployment()
        _ = self.target
        if deployment.disabled:
            raise HotLoadError(
                f"deployment {self.deployment_id} ({deployment.name}) is disabled: nothing can be hot-loaded into it",
                hint=f"enable it: cwtrain deployment update {self.deployment_id} --enable",
            )
        if deployment.status in (ResourceStatus.FAILED, ResourceStatus.DELETING):
            wait_for_deployment(
                self.client, self.deployment_id, timeout=1.0, just_created=False, clock=self._clock, sleep=self._sleep
            )
        self._looked = self._clock() if just_before else None

    def _wait_until_ready(self, timeout: float) -> None:
        """Return once the deployment is READY; one that is disabled, FAILED or going away is an error at once."""
        looked, self._looked = self._looked, None
        if looked is None or self._clock() - looked >= self.poll_interval:
            self.require_open()
        deployment = self.deployment
        if deployment.status is not ResourceStatus.READY:
            self._home._deployment = wait_for_deployment(
                self.asking,
                self.deployment_id,
                timeout=self._deadline.at_most(timeout),
                poll_interval=self.poll_interval,
                just_created=False,
                clock=self._clock,
                sleep=self._sleep,
            )

    def _require_base(self, snapshot: LocalSnapshot, given: str | int | None) -> None:
        """Raise SnapshotChainError for a delta on another version than its predecessor holds: see ``require_base``."""
        require_base(snapshot, store=self.store, location=self.location, given=given, known=self._home._manifests)

    def _remember(self, manifest: Mapping[str, Any]) -> None:
        kept = (
            {}
            if manifest["type"] == "FULL"
            else {k: v for k, v in self._home._manifests.items() if v["type"] == "FULL"}
        )
        self._home._manifests = {**kept, manifest["identity"]: manifest}

    def _differences(self, snapshot: LocalSnapshot, identity: str, hot_loads: Sequence[HotLoad]) -> list[str]:
        """Return how a full snapshot differs from the one under what is served, in all but its weights."""
        chain = chains.served_chain(hot_loads)
        if snapshot.kind is not SnapshotKind.FULL or not chain.links or chain.links[0].identity == identity:
            return []
        first = chain.links[0].identity
        try:
            manifest = self._home._manifests.get(first) or manifest_of(first, self.store, self.location)
            return differences(snapshot, manifest, lambda name: self.store.get(self.location.key(first, name)))
        except (SnapshotError, StorageError) as error:  # what cannot be compared is not wrong
            _log.debug("%s cannot be compared with %s: %s", snapshot.path, first, error)
            return []

    def _tell_started(self, snapshot: LocalSnapshot, identity: str, version: int | None, *, began: float) -> None:
        self.syncs.started(
            SyncStarted(
                identity=identity,
                choice=SnapshotChoice(snapshot.kind.value),
                previous_identity=snapshot.previous_identity,
                version=version,
                run_id=self.run_id,
            ),
            began=began,
        )
        self.plugins.notify(
            SnapshotInspected(
                identity=identity,
                kind=snapshot.kind,
                files=len(snapshot.files),
                size_bytes=snapshot.total_bytes,
                run_id=self.run_id,
            )
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
        hold: Hold | None = None,
        base_known: bool = False,
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
            hold=hold,
            base_known=base_known,
            on_manifest=self._remember,
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


def never_completed(identity: str, deployment_id: str) -> SnapshotChainError:
    """Return the error of an identity that was never served."""
    return SnapshotChainError(
        f"deployment {deployment_id} has never completed a hot-load of {identity}",
        hint=f"`cwtrain hotload list --deployment {deployment_id}` shows what it has",
    )
