"""Which snapshots nothing needs any more, and their removal.

Live is what can be reached, from delta to predecessor, from

- the identity that a deployment serves, the last N that it COMPLETED, and one whose hot-load is not finished yet, for
  each deployment with the same bucket and prefix;
- the baseline of each run (version 0);
- what lies at the ``model.path`` of any deployment.

Live is also what may still be on its way: anything without an index, or with one but without any hot-load so far, whose
newest object is younger than a day. Everything else that bears our marks, a claim or a manifest, or that a hot-load
names, can be removed; other objects in the bucket are never touched. What cannot be read stops everything, for a wrong
guess cannot be taken back.
"""

from __future__ import annotations

import datetime as dt
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import attrs

from cwtrain.errors import CWTrainError, SnapshotChainError, SnapshotError, StorageNotFoundError
from cwtrain.hotload import chain as chains
from cwtrain.hotload._publish.names import is_baseline
from cwtrain.models.service import Deployment, HotLoad, HotLoadState
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._json import parse_json
from cwtrain.snapshots._sidefiles import is_side_file
from cwtrain.snapshots.manifest import parse_manifest
from cwtrain.storage import Location, ObjectInfo, ObjectStore
from cwtrain.storage._crew import each
from cwtrain.storage._open_uploads import abort_quietly

__all__ = ["Doomed", "RetentionPlan", "delete_snapshots", "plan_retention", "sharing"]

_log = logging.getLogger("cwtrain.hotload")

GRACE = dt.timedelta(days=1)
_THREADS = 8
_CANNOT = "nothing was removed: mend or remove what cannot be read, then run it again"


@attrs.frozen(kw_only=True)
class Doomed:
    """A snapshot, or the rest of one, that nothing needs."""

    identity: str
    keys: tuple[str, ...] = attrs.field(repr=False)
    """Its objects in the order of their removal: the index first, manifest and claim last."""
    size_bytes: int
    whole: bool
    """Whether its index is there."""
    run_id: str | None = None


@attrs.frozen(kw_only=True)
class RetentionPlan:
    """What stays, with the reason, and what goes: deltas before what they apply to."""

    live: Mapping[str, str]
    doomed: tuple[Doomed, ...] = ()

    @property
    def size_bytes(self) -> int:
        """Bytes that the removal gives back."""
        return sum(one.size_bytes for one in self.doomed)


@attrs.define
class _Found:
    """What lies in the bucket under one identity."""

    objects: dict[str, ObjectInfo] = attrs.field(factory=dict)
    """By name."""
    manifest: ObjectInfo | None = None
    claim: ObjectInfo | None = None
    nested: bool = False
    """Whether objects lie deeper, as in no snapshot."""

    @property
    def whole(self) -> bool:
        return INDEX_NAME in self.objects

    @property
    def ours(self) -> bool:
        return self.manifest is not None or self.claim is not None

    def newest(self) -> dt.datetime | None:
        beside = [one for one in (self.manifest, self.claim) if one is not None]
        times = [one.modified for one in (*self.objects.values(), *beside)]
        known = [time for time in times if time is not None]
        return max(known) if len(known) == len(times) and known else None


def sharing(deployments: Iterable[Deployment], location: Location) -> list[Deployment]:
    """Return the deployments that take their snapshots from ``location``."""
    return [
        one
        for one in deployments
        if one.hot_load is not None and Location(one.hot_load.bucket, one.hot_load.path_prefix) == location
    ]


def plan_retention(
    store: ObjectStore,
    location: Location,
    *,
    deployments: Sequence[Deployment],
    hot_loads: Mapping[str, Sequence[HotLoad]],
    keep: int,
    now: dt.datetime,
) -> RetentionPlan:
    """Return what stays and what goes at ``location``.

    ``deployments`` are all that there are (their ``model.path`` counts, wherever their snapshots are), ``hot_loads``
    those of each deployment that shares the location, newest first. The hot-loads must have been listed before this is
    called, so that what is published meanwhile is young.

    Raises SnapshotError or SnapshotChainError for a snapshot that is needed and cannot be read, StorageError naming a
    refused permission.
    """
    found = _look(store, location)
    reader = _Reader(store, location, found, [one for several in hot_loads.values() for one in several])
    live: dict[str, str] = {}
    for identity, reason, need in _roots(location, found, deployments, hot_loads, keep):
        reader.follow(identity, reason, live, need)
    named = {one.identity for several in hot_loads.values() for one in several}
    for identity, item in found.items():
        newest = item.newest()
        young = newest is None or now - newest < GRACE
        if identity not in live and young and not (item.whole and identity in named):
            reason = "younger than a day, and no hot-load of it yet" if item.whole else "younger than a day, no index"
            reader.follow(identity, reason, live, _Need.WHATEVER_IS_THERE)
    doomed = [
        _doomed(location, identity, item, reader)
        for identity, item in found.items()
        if identity not in live and not item.nested and (item.ours or identity in named)
    ]
    depth = {one.identity: reader.depth(one.identity) for one in doomed}
    doomed.sort(key=lambda one: (-depth[one.identity], one.identity))
    return RetentionPlan(live=live, doomed=tuple(doomed))


def _look(store: ObjectStore, location: Location) -> dict[str, _Found]:
    """Return what lies at the location, by identity."""
    found: dict[str, _Found] = {}
    root = location.root
    for info in store.list_objects(root):
        identity, slash, name = info.key.removeprefix(root).partition("/")
        if not slash:
            continue
        if identity in ("_claims", "_manifests"):
            if name.endswith(".json") and "/" not in name:
                item = found.setdefault(name.removesuffix(".json"), _Found())
                setattr(item, "claim" if identity == "_claims" else "manifest", info)
            continue
        if identity == "_preflight":
            continue
        item = found.setdefault(identity, _Found())
        item.nested = item.nested or ("/" in name and not is_side_file(name))
        item.objects[name] = info
    return found


class _Need(Enum):
    """What follows from an identity's being a root."""

    SERVED = "it must be there, and all that it stands on"
    WHOLE = "where it is there with its index, so must be all that it stands on"
    WHATEVER_IS_THERE = "what is there of it stays, and what it stands on"


def _roots(
    location: Location,
    found: Mapping[str, _Found],
    deployments: Sequence[Deployment],
    hot_loads: Mapping[str, Sequence[HotLoad]],
    keep: int,
) -> Iterable[tuple[str, str, _Need]]:
    """Yield identity, reason and need of everything that is live by itself."""
    for deployment_id, several in hot_loads.items():
        served = chains.latest_completed(several)
        if served is not None:
            yield served.identity, f"served by {deployment_id}", _Need.SERVED
        for one in several:
            if not one.state.terminal:
                yield one.identity, f"hot-load {one.id} of {deployment_id} is not finished", _Need.WHOLE
        done = list(dict.fromkeys(one.identity for one in several if one.state is HotLoadState.COMPLETED))
        for identity in done[:keep]:
            yield identity, f"among the last {keep} of {deployment_id}", _Need.WHOLE
    for deployment in deployments:
        if model := _at_model_path(location, deployment):
            yield model, f"model.path of {deployment.id}", _Need.WHATEVER_IS_THERE
    for identity in found:
        if is_baseline(identity):
            yield identity, "a run's baseline", _Need.WHOLE


def _at_model_path(location: Location, deployment: Deployment) -> str | None:
    """Return under which identity a deployment's model lies, if it lies at this location."""
    path = deployment.model_path.strip("/")
    if path.startswith("s3://"):
        bucket, _, path = path.removeprefix("s3://").partition("/")
    else:
        bucket = deployment.model_bucket
    if bucket != location.bucket or not path.startswith(location.root):
        return None
    return path.removeprefix(location.root).partition("/")[0] or None


class _Reader:
    """What manifests and indexes say; each is read once."""

    def __init__(
        self, store: ObjectStore, location: Location, found: Mapping[str, _Found], hot_loads: Iterable[HotLoad]
    ) -> None:
        self._store, self._location, self._found = store, location, found
        self._applied_to = {one.identity: one.previous_identity for one in hot_loads if one.previous_identity}
        """What the service was told that a delta applies to."""
        self._manifests: dict[str, dict[str, Any] | None] = {}
        self._previous: dict[str, str | None] = {}

    def follow(self, identity: str, reason: str, live: dict[str, str], need: _Need) -> None:
        """Add an identity and all that it stands on."""
        root = self._found.get(identity)
        if need is _Need.WHOLE and (root is None or not root.whole):
            return  # it was removed, or never became whole: nothing can load it
        seen: set[str] = set()
        at: str | None = identity
        while at is not None:
            if at in seen:
                raise SnapshotChainError(
                    f"{self._location.uri(identity)} stands on itself, by way of {at}", hint=_CANNOT
                )
            item = self._found.get(at)
            if item is None or not item.objects or (not item.whole and need is _Need.SERVED):
                if need is _Need.WHATEVER_IS_THERE:
                    if item is not None:
                        live.setdefault(at, reason)
                    return
                raise SnapshotChainError(
                    f"{self._location.uri(at)} is not there, but {identity} needs it ({reason})", hint=_CANNOT
                )
            live.setdefault(at, f"{identity} stands on it ({reason})" if seen else reason)
            seen.add(at)
            at = self.previous(at)

    def previous(self, identity: str) -> str | None:
        """Return what a snapshot applies to; None for a full one, and for one that has neither manifest nor index."""
        if identity not in self._previous:
            self._previous[identity] = self._read_previous(identity)
        return self._previous[identity]

    def depth(self, identity: str) -> int:
        """Return on how many snapshots this one stands, as far as they are there."""
        at: str | None = identity
        seen: set[str] = set()
        while at is not None and at not in seen and at in self._found:
            seen.add(at)
            at = self.previous(at)
        return len(seen)

    def run_of(self, identity: str) -> str | None:
        """Return the run that published it, where its manifest says so."""
        manifest = self._manifest(identity)
        return manifest.get("run_id") if manifest else None

    def _manifest(self, identity: str) -> dict[str, Any] | None:
        if identity not in self._manifests:
            item = self._found[identity]
            self._manifests[identity] = None
            if item.manifest is not None:
                try:
                    self._manifests[identity] = parse_manifest(self._store.get(item.manifest.key))
                except StorageNotFoundError:
                    pass
                except SnapshotError as error:
                    raise SnapshotError(
                        f"s3://{self._location.bucket}/{item.manifest.key}: {error}", hint=_CANNOT
                    ) from error
        return self._manifests[identity]

    def _read_previous(self, identity: str) -> str | None:
        manifest = self._manifest(identity)
        if manifest is not None:
            said = manifest.get("previous_identity") if manifest.get("type") == "INCREMENTAL" else None
            return said or self._applied_to.get(identity)
        item = self._found[identity]
        if not item.whole:
            return None
        key = item.objects[INDEX_NAME].key
        try:
            metadata = parse_json(self._store.get(key)).get("metadata") or {}
            if "delta_encoding" not in metadata:
                return self._applied_to.get(identity)
            previous = metadata.get("base_version")
            if not isinstance(previous, str | None):
                raise ValueError(f"has the base_version {previous!r}")
            # Other uploaders leave the trainer's number here, or nothing.
            previous = self._applied_to.get(identity) or previous
            if previous is None:
                raise ValueError("is a delta, and nothing says what it applies to")
        except (ValueError, AttributeError, StorageNotFoundError) as error:
            raise SnapshotError(f"s3://{self._location.bucket}/{key} cannot be read: {error}", hint=_CANNOT) from error
        return previous


def _doomed(location: Location, identity: str, item: _Found, reader: _Reader) -> Doomed:
    index = [one.key for name, one in item.objects.items() if name == INDEX_NAME]
    others = [one.key for name, one in item.objects.items() if name != INDEX_NAME]
    beside = [one for one in (item.manifest, item.claim) if one is not None]
    return Doomed(
        identity=identity,
        keys=(*index, *others, *(one.key for one in beside)),
        size_bytes=sum(one.size_bytes for one in (*item.objects.values(), *beside)),
        whole=item.whole,
        run_id=reader.run_of(identity),
    )


def delete_snapshots(
    store: ObjectStore,
    location: Location,
    doomed: Sequence[Doomed],
    *,
    on_deleted: Callable[[Doomed], None] | None = None,
) -> None:
    """Remove snapshots one after the other, each index first, so that none is ever there in part.

    What was interrupted is gone on with by the next run. Raises StorageAccessError naming s3:DeleteObject.
    """
    threads = max(1, min(_THREADS, store.max_connections))
    for one in doomed:
        last = {location.manifest_key(one.identity), location.claim_key(one.identity)}
        index = location.key(one.identity, INDEX_NAME)
        if index in one.keys:
            store.delete(index)
        _abort_uploads(store, location, one.identity)
        each(store.delete, [key for key in one.keys if key != index and key not in last], threads=threads)
        for key in one.keys:
            if key in last:
                store.delete(key)
        if on_deleted is not None:
            on_deleted(one)


def _abort_uploads(store: ObjectStore, location: Location, identity: str) -> None:
    try:
        for upload in store.list_uploads(location.prefix(identity)):
            abort_quietly(store, upload.key, upload.upload_id)
    except CWTrainError as error:
        _log.debug("open multipart uploads cannot be listed: %s", error)
