"""Upload a snapshot under its identity: the facade over inspection, storage and manifest."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any, cast

from cwtrain._waiting import Deadline
from cwtrain.config import StorageConfig
from cwtrain.errors import SnapshotChainError, SnapshotError, StorageConflictError, StorageError, StorageNotFoundError
from cwtrain.hotload._mirror_hold import Hold
from cwtrain.models.snapshot import LocalSnapshot, SnapshotFile, SnapshotKind
from cwtrain.snapshots import index as snapshots_index
from cwtrain.snapshots.identity import holds_version
from cwtrain.snapshots.manifest import BASE_VERSION, build_manifest, manifest_to_bytes, parse_manifest
from cwtrain.storage import (
    Location,
    ObjectDigest,
    ObjectStore,
    S3Store,
    UploadProgress,
    UploadReport,
    s3_client,
    upload_objects,
)
from cwtrain.storage.claim import refuses_condition
from cwtrain.storage.patient import deadline_of, waiting_out

__all__ = [
    "files_for_upload",
    "manifest_of",
    "require_base",
    "require_bytes",
    "require_version",
    "store_for",
    "upload_snapshot",
    "upload_with_manifest",
]


def upload_snapshot(
    snapshot: LocalSnapshot,
    *,
    bucket: str,
    identity: str,
    path_prefix: str = "",
    s3: Any = None,
    workers: int = 8,
    on_progress: Callable[[UploadProgress], None] | None = None,
    max_bytes_per_second: float | None = None,
) -> str:
    """Upload ``snapshot`` as ``identity`` and return its ``s3://`` URI.

    The upload is immutable and resumable: objects that are there and equal are kept, anything else under the identity
    raises SnapshotConflictError before a byte is written, and the index goes last, so no reader sees half a snapshot.
    ``s3`` is a boto3 client (one is made from the environment without it), ``on_progress`` gets byte counts,
    ``workers`` bounds the parallel requests, ``max_bytes_per_second`` the bandwidth (without it
    ``CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND`` does).

    Raises SnapshotError for an identity or snapshot that cannot be published, SnapshotChainError for a delta on another
    version than its predecessor holds, SnapshotConflictError, SnapshotChangedError when a file changes meanwhile, and
    StorageError naming the refused permission.
    """
    store, location = store_for(bucket, s3, workers=workers), Location(bucket=bucket, path_prefix=path_prefix)
    require_base(snapshot, store=store, location=location)
    report = upload_with_manifest(
        snapshot,
        store=store,
        location=location,
        identity=identity,
        workers=workers,
        on_progress=on_progress,
        max_bytes_per_second=max_bytes_per_second,
    )
    return report.uri


def upload_with_manifest(
    snapshot: LocalSnapshot,
    *,
    store: ObjectStore,
    location: Location,
    identity: str,
    workers: int = 8,
    on_progress: Callable[[UploadProgress], None] | None = None,
    deployment_id: str | None = None,
    run_id: str | None = None,
    version: int | None = None,
    max_bytes_per_second: float | None = None,
    hold: Hold | None = None,
    free: bool = False,
    base_known: bool = False,
    on_manifest: Callable[[Mapping[str, Any]], None] | None = None,
) -> UploadReport:
    """Upload ``snapshot`` with its manifest (written before the index) and say what was sent and what was there.

    ``version`` is the trainer's number for the manifest; a delta's own index has one too. ``hold`` is the word of
    the mirror whose snapshot this is, which the caller keeps as it is: its shards are read for their SHA-256 only.
    ``free`` as for ``upload_objects``. Unless ``base_known``, where the caller knows better than any number what a
    delta applies to, the manifest keeps the delta's own base_version: the uploaded index names identities.
    ``on_manifest`` gets the manifest that is written.

    Without ``max_bytes_per_second``, ``CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND`` limits the bandwidth.
    """
    store = waiting_out(store)
    if max_bytes_per_second is None:
        max_bytes_per_second = StorageConfig.from_env().max_bytes_per_second
    files = files_for_upload(snapshot, identity)
    # Full checkpoints of a trainer carry no checksums. Theirs are computed while the files are being sent.
    checksums = _begin(lambda: _checksums(snapshot))

    recorded = {} if base_known or snapshot.base_version is None else {BASE_VERSION: snapshot.base_version}

    def write_manifest(digests: Mapping[str, ObjectDigest]) -> None:
        if hold is not None:
            hold.check()
        manifest = build_manifest(
            identity=identity,
            objects=digests,
            tensors=_in_time(checksums, deadline_of(store)),
            type="FULL" if snapshot.kind is SnapshotKind.FULL else "INCREMENTAL",
            previous_identity=snapshot.previous_identity,
            deployment_id=deployment_id,
            run_id=run_id,
            version=snapshot.version if version is None else version,
            **recorded,
        )
        put_manifest(store, location, identity, manifest_to_bytes(manifest))
        if on_manifest is not None:
            on_manifest(manifest)

    return upload_objects(
        files if hold is None else hold.files(files),
        store=store,
        location=location,
        identity=identity,
        workers=workers,
        on_progress=on_progress,
        run_id=run_id,
        before_index=write_manifest,
        max_bytes_per_second=max_bytes_per_second,
        free=free,
    )


def put_manifest(store: ObjectStore, location: Location, identity: str, body: bytes) -> str:
    """Write the manifest of ``identity`` once and return its key; one that is there already is kept."""
    key = location.manifest_key(identity)
    try:
        store.put(key, body, if_absent=True)
    except StorageConflictError:
        # Written by an earlier attempt whose objects this upload just found equal, so it says the same.
        pass
    except StorageError as error:
        if not refuses_condition(error):
            raise
        if store.head(key) is None:
            store.put(key, body)
    return key


def require_base(
    snapshot: LocalSnapshot,
    *,
    store: ObjectStore,
    location: Location,
    given: str | int | None = None,
    known: Mapping[str, Mapping[str, Any]] | None = None,
) -> None:
    """Raise SnapshotChainError unless the predecessor of a delta holds the version that the delta was made on.

    The delta's own index names that version. ``given`` is the one that the caller says the predecessor holds; without
    it the predecessor's manifest says so, in the bucket or among the ``known`` ones, which this process wrote.
    """
    previous, base = snapshot.previous_identity, snapshot.base_version
    if snapshot.kind is not SnapshotKind.DELTA or previous is None or base is None:
        return
    version = given
    if version is None:
        version = ((known or {}).get(previous) or manifest_of(previous, store, location)).get("version")
    require_version(snapshot.path, base, previous, version, hint=_SAY_SO)


_SAY_SO = "; where {previous} does hold these bytes, say so: base_version={base} (--base-version {base})"


def require_version(what: str, base: str, previous: str, version: str | int | None, *, hint: str = "") -> None:
    """Raise SnapshotChainError unless ``previous``, of which ``version`` is known, holds version ``base``.

    What nobody says counts as another version: weights that changed in between would be missing on every replica, and
    no checksum would tell, for a delta has checksums of what it changes only.
    """
    holds = holds_version(previous, base, version=version)
    if holds:
        return
    if holds is None:
        says = f"and nothing says which version {previous} holds"
    elif version is None:
        says = f"and {previous} is another one by its name"
    else:
        says = f"and {previous} holds version {version}"
    raise SnapshotChainError(
        f"{what} is a delta on version {base}, {says}: what changed in between would be missing",
        hint="name the snapshot that it was made on (--previous-identity), publish the versions in between first, or "
        f"publish a full snapshot{hint.format(previous=previous, base=base)}",
    )


def require_bytes(
    identity: str, previous: str | None, checksums: Mapping[str, str], *, store: ObjectStore, location: Location
) -> None:
    """Raise SnapshotChainError where tensors that a delta was made from are not those of ``previous``.

    ``checksums`` has the Adler-32 of what it was made from. They are compared with the manifests of the chain, as far
    as there are any.
    """
    missing, link, seen = dict(checksums), previous, set[str]()
    while missing and link is not None and link not in seen:
        seen.add(link)
        manifest = manifest_of(link, store, location)
        held = manifest.get("tensors") or {}
        wrong = sorted(name for name, value in missing.items() if held.get(name, value) != value)
        if wrong:
            raise SnapshotChainError(
                f"{identity}: its base does not have the bytes of {previous}: {len(wrong)} tensors are others there, "
                f"for example {wrong[0]!r}",
                hint="give the base that was published under that identity, or write a full snapshot",
            )
        missing = {name: value for name, value in missing.items() if name not in held}
        link = manifest.get("previous_identity")


def manifest_of(identity: str, store: ObjectStore, location: Location) -> Mapping[str, Any]:
    """Return the manifest of ``identity``, an empty one where there is none: other tools write none."""
    try:
        return parse_manifest(store.get(location.manifest_key(identity)))
    except StorageNotFoundError:
        return {}


def files_for_upload(snapshot: LocalSnapshot, identity: str) -> tuple[SnapshotFile, ...]:
    """Return the objects of ``snapshot`` as they go up under ``identity``: a delta's index names identities.

    Raises SnapshotError for an identity that cannot be published, an empty delta, or a delta without predecessor.
    """
    if snapshot.empty_delta:
        raise SnapshotError(
            f"{snapshot.path} is an empty delta: nothing changed since {snapshot.base_version}",
            hint="skip this version; the deployment already serves these weights",
        )
    return snapshots_index.files_for_upload(snapshot, identity)


def _begin(call: Callable[[], Mapping[str, str]]) -> Future[Mapping[str, str]]:
    """Begin ``call`` in a thread that keeps neither an error nor the end of the process waiting."""
    future: Future[Mapping[str, str]] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 - raised by whoever asks for the result
            future.set_exception(error)

    threading.Thread(target=run, name="cwtrain-checksums", daemon=True).start()
    return future


def _in_time(checksums: Future[Mapping[str, str]], deadline: Deadline) -> Mapping[str, str]:
    """Return the checksums when they are known. Raises WaitTimeoutError where that is too late."""
    left = deadline.left()
    try:
        return checksums.result(None if left == math.inf else left)
    except TimeoutError:
        if checksums.done():
            raise
        raise deadline.over("counting the checksums of the tensors") from None


def _checksums(snapshot: LocalSnapshot) -> Mapping[str, str]:
    if len(snapshot.checksums) == snapshot.tensors:
        return snapshot.checksums
    from cwtrain.hotload.delta import checkpoint_checksums

    return checkpoint_checksums(snapshot.path)


def store_for(bucket: str, s3: Any = None, *, workers: int = 8) -> ObjectStore:
    """Return the object store of ``bucket``.

    ``s3`` is a boto3 client, or an ObjectStore that is taken as it is (``MemoryStore`` in tests); without it a client
    is made from the environment.
    """
    if s3 is None:
        s3 = s3_client(max_pool_connections=max(16, 2 * workers))
    if hasattr(s3, "create_upload"):
        return cast("ObjectStore", s3)
    return S3Store(s3, bucket)
