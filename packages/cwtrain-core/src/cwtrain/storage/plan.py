"""What stands under an identity already, and whether it is ours."""

from __future__ import annotations

import json
import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import attrs

from cwtrain.errors import SnapshotConflictError, SnapshotError, StorageNotFoundError
from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.storage._crew import Crew
from cwtrain.storage._learned import learned_of
from cwtrain.storage._source import Source
from cwtrain.storage.claim import Claim, claim_of, read_claim
from cwtrain.storage.location import Location
from cwtrain.storage.report import ObjectDigest, UploadPlan
from cwtrain.storage.store import ObjectInfo, ObjectStore

__all__ = ["SHA256_KEY", "Standing", "claim_name", "claimed_by", "conflict_error", "plan_upload", "stand"]

_log = logging.getLogger("cwtrain.storage")

SHA256_KEY = "cwtrain-sha256"
"""The user metadata with the SHA-256 of an object's bytes in hex: what two objects are compared by."""

_ONE_PART = 1 << 62
_SHOWN = 5


def plan_upload(
    files: Sequence[SnapshotFile],
    *,
    store: ObjectStore,
    location: Location,
    identity: str,
    workers: int = 8,
    run_id: str | None = None,
    directory: str | None = None,
    manifest: Mapping[str, ObjectDigest] | None = None,
    claim_next: bool = False,
) -> UploadPlan:
    """Return what an upload of ``files`` as ``identity`` would do; nothing is written.

    Arguments as for ``upload_objects``, and ``claim_next``: the upload follows. A claim without objects is then left to
    its own PUT, where that is known to meet it. Local files are read where an object of the same size exists. Raises
    SnapshotChangedError when a file changes meanwhile, StorageError naming the refused permission.
    """
    claim = claim_of(files, run_id=run_id, directory=directory)
    standing = stand(
        files,
        store=store,
        location=location,
        identity=identity,
        claim=claim,
        crew=Crew(min(workers, store.max_connections)),
        manifest=manifest,
        claim_next=claim_next and learned_of(store).conditional,
    )
    missing = standing.missing(files)
    return UploadPlan(
        existing=tuple(file.name for file in files if file.name in standing.equal),
        missing=tuple(file.name for file in missing),
        conflicts=tuple(standing.reasons),
        reasons=standing.reasons,
        upload_bytes=sum(file.size_bytes for file in missing),
        existing_bytes=sum(file.size_bytes for file in files if file.name in standing.equal),
    )


@attrs.frozen(kw_only=True)
class Standing:
    """The objects under an identity, compared with local files.

    ``equal`` maps the names that are there and equal to their digests, ``reasons`` names what stands in the way, with
    the reason. ``torn`` maps the names of our own objects that never got their bytes to their ETags: they are missing.
    """

    equal: Mapping[str, ObjectDigest]
    reasons: Mapping[str, str]
    torn: Mapping[str, str]

    def missing(self, files: Sequence[SnapshotFile]) -> list[SnapshotFile]:
        """Return the files that are still to be sent."""
        return [file for file in files if file.name not in self.equal and file.name not in self.reasons]


def conflict_error(location: Location, identity: str, reasons: Mapping[str, str]) -> SnapshotConflictError:
    """Return the error that names everything that stands in the way."""
    shown = [f"{name} ({why})" for name, why in list(reasons.items())[:_SHOWN]]
    more = f", and {len(reasons) - _SHOWN} more" if len(reasons) > _SHOWN else ""
    return SnapshotConflictError(
        f"{location.uri(identity)} is taken; nothing was written: {', '.join(shown)}{more}",
        objects=tuple(reasons),
        hint="a snapshot is never changed: publish under another identity",
    )


def stand(
    files: Sequence[SnapshotFile],
    *,
    store: ObjectStore,
    location: Location,
    identity: str,
    claim: Claim,
    crew: Crew,
    manifest: Mapping[str, ObjectDigest] | None,
    before: Standing | None = None,
    others: Collection[str] = (),
    claim_next: bool = False,
) -> Standing:
    """Compare ``files`` with what stands under ``identity``.

    Equal is what has the size and the SHA-256 of the local file, by the object's own metadata or else by the manifest.
    ETags prove nothing: they depend on how an object was sent. An object that says nothing about itself cannot be
    verified and counts as different. ``crew`` does the requests and the reading;
    what an earlier look (``before``) found equal is not read again. ``others`` may be there as well: other processes
    send them. With ``claim_next`` the caller takes the claim now, by a PUT that shows whose it is: then it is not read
    where nothing else stands.

    Torn is an object of our own claim that says of itself to have the local file's SHA-256 and has another size, while
    the snapshot has no index yet: SeaweedFS keeps an empty object of a PUT whose sender is gone before the first byte
    of the body (seen with 4.48). Nobody can have read it as part of a snapshot.
    """
    names = Counter(file.name for file in files)
    if twice := [name for name, count in names.items() if count > 1]:
        raise SnapshotError(f"two objects would be called {', '.join(twice)}")
    prefix = location.prefix(identity)
    listed = {one.key.removeprefix(prefix): one.size_bytes for one in store.list_objects(prefix)}
    if listed.get("") == 0:
        del listed[""]  # a folder marker, as consoles make them
    reasons: dict[str, str] = {}
    there = [file for file in files if file.name in listed]
    asked = len(there) < len(files) and not (claim_next and not listed)
    held = read_claim(store, location, identity) if asked else None
    foreign = held is not None and not held.covers(claim)
    if held is not None and foreign:
        reasons[claim_name(location, identity)] = claimed_by(held)
    for name in listed:
        if name not in names and name not in others:
            reasons[name or "the object that is the prefix itself"] = "it is no part of this snapshot"
    for file in there:
        if listed[file.name] != file.size_bytes:
            reasons[file.name] = f"it has {listed[file.name]} bytes there and {file.size_bytes} here"
    torn: dict[str, str] = {}
    if held is not None and not foreign and INDEX_NAME not in listed:
        wrong_size = [file for file in there if file.name in reasons]
        torn = _Comparison(store, location, identity, crew, manifest).torn(wrong_size)
        reasons = {name: why for name, why in reasons.items() if name not in torn}
    known = before.equal if before is not None else {}
    comparable = [file for file in there if file.name not in reasons and file.name not in torn]
    equal = {file.name: known[file.name] for file in comparable if file.name in known}
    # Reading whole files would not help against someone else's claim.
    if not foreign:
        same_size = [file for file in comparable if file.name not in equal]
        more, differ = _Comparison(store, location, identity, crew, manifest).of(same_size)
        equal |= more
        reasons |= differ
    return Standing(equal=equal, reasons=reasons, torn=torn)


def claim_name(location: Location, identity: str) -> str:
    """Return what a claim is called among objects: its key without the location's prefix."""
    return location.claim_key(identity).removeprefix(location.root)


def claimed_by(held: Claim) -> str:
    """Return why someone else's claim stands in the way."""
    return f"the identity was claimed by {held.holder()}"


class _Comparison:
    """Objects against local files of the same size, by SHA-256."""

    def __init__(
        self,
        store: ObjectStore,
        location: Location,
        identity: str,
        crew: Crew,
        manifest: Mapping[str, ObjectDigest] | None,
    ) -> None:
        self._store = store
        self._location = location
        self._identity = identity
        self._crew = crew
        self._manifest = manifest
        self._lock = threading.Lock()
        self._equal: dict[str, ObjectDigest] = {}
        self._differ: dict[str, str] = {}
        self._torn: dict[str, str] = {}

    def torn(self, files: Sequence[SnapshotFile]) -> dict[str, str]:
        """Return the ETags of the objects that say to have the SHA-256 of the local file, by name."""
        self._run(self._look, files)
        return dict(self._torn)

    def of(self, files: Sequence[SnapshotFile]) -> tuple[dict[str, ObjectDigest], dict[str, str]]:
        """Return the digests of those that are equal and why the others are not, by name, in order."""
        self._run(self._compare, files)
        return (
            {file.name: self._equal[file.name] for file in files if file.name in self._equal},
            {file.name: self._differ[file.name] for file in files if file.name in self._differ},
        )

    def _run(self, work: Callable[[SnapshotFile], None], files: Sequence[SnapshotFile]) -> None:
        if files:
            tasks: deque[Callable[[], None]] = deque(partial(work, file) for file in files)
            self._crew.run(lambda: tasks.popleft() if tasks else None, most=len(tasks))

    def _look(self, file: SnapshotFile) -> None:
        info = self._store.head(self._location.key(self._identity, file.name))
        said = (info.metadata or {}).get(SHA256_KEY, "").lower() if info is not None else ""
        if info is not None and info.etag is not None and said and said == self._learn(file).sha256:
            self._torn[file.name] = info.etag

    def _learn(self, file: SnapshotFile) -> ObjectDigest:
        """Return size and SHA-256 of the local file."""
        source = Source(file, part_bytes=_ONE_PART, stopped=self._crew.stopped)
        try:
            return source.learn()
        finally:
            source.close()

    def _compare(self, file: SnapshotFile) -> None:
        info = self._store.head(self._location.key(self._identity, file.name))
        if info is None:
            return  # gone since it was listed, so it is missing
        wanted = self._sha256(file.name, info)
        if wanted is None:
            self._differ[file.name] = f"it has no {SHA256_KEY} metadata, so it cannot be verified"
            return
        digest = self._learn(file)
        if digest.sha256 == wanted:
            self._equal[file.name] = digest
        else:
            self._differ[file.name] = "it has other bytes of the same length"

    def _sha256(self, name: str, info: ObjectInfo) -> str | None:
        if said := (info.metadata or {}).get(SHA256_KEY):
            return said.lower()
        with self._lock:
            if self._manifest is None:
                self._manifest = _read_manifest(self._store, self._location, self._identity)
            known = self._manifest.get(name)
        return known.sha256 if known is not None and known.size_bytes == info.size_bytes else None


def _read_manifest(store: ObjectStore, location: Location, identity: str) -> dict[str, ObjectDigest]:
    """Return what the manifest in the bucket says of the objects; nothing where there is none that can be read."""
    try:
        data = json.loads(store.get(location.manifest_key(identity)))
        return {
            str(name): ObjectDigest(int(one["size"]), str(one["sha256"]).lower())
            for name, one in data["objects"].items()
        }
    except StorageNotFoundError:
        return {}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        _log.warning("the manifest of %s cannot be read: %s", location.uri(identity), error)
        return {}
