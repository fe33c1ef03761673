"""What became of a streamed upload: which identity is free for the next one, and one that only lacks its index.

A streamed upload that died before its manifest is abandoned, never completed: what it sent was in memory. Its version
is published under ``<identity>-r2`` then (``-r3``, ...). One that died after its manifest lacks only the index, which
can be made from what is there.
"""

from __future__ import annotations

import hashlib
import json
from enum import StrEnum
from typing import Any

from cwtrain.errors import SnapshotConflictError, SnapshotError, StorageNotFoundError
from cwtrain.hotload._writer_index import streamed_index
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots.identity import check_identity
from cwtrain.snapshots.manifest import parse_manifest
from cwtrain.storage import Location, ObjectStore
from cwtrain.storage._open_uploads import UploadRecord, abort_left_open
from cwtrain.storage.claim import read_claim
from cwtrain.storage.plan import claim_name, claimed_by, conflict_error
from cwtrain.storage.stream import StreamUpload

__all__ = ["IdentityStanding", "complete_streamed", "free_identity", "identity_standing"]

_MOST_ATTEMPTS = 1000
_MOST_HEADER_BYTES = 256 << 20


class IdentityStanding(StrEnum):
    """What stands under an identity."""

    FREE = "FREE"
    """Nothing: no claim, no object."""
    ABANDONED = "ABANDONED"
    """A claim or objects, neither manifest nor index: somebody writes it now, or nobody can complete it any more."""
    COMPLETABLE = "COMPLETABLE"
    """A streamed snapshot that lacks nothing but its index: ``complete_streamed`` writes it."""
    PUBLISHED = "PUBLISHED"
    """The index is there."""
    REMOVED = "REMOVED"
    """Nothing is there any more, but a hot-load knows it: never to be used again. Only ``resume_info`` can tell."""


def identity_standing(store: ObjectStore, location: Location, identity: str) -> IdentityStanding:
    """Return what stands under ``identity``. Raises StorageError naming a refused permission."""
    prefix = location.prefix(identity)
    names = {
        name
        for one in store.list_objects(prefix)
        if (name := one.key.removeprefix(prefix)) or one.size_bytes  # a folder marker is nothing
    }
    if INDEX_NAME in names:
        return IdentityStanding.PUBLISHED
    if _streamed_manifest(store, location, identity) is not None:
        return IdentityStanding.COMPLETABLE
    if names or read_claim(store, location, identity) is not None:
        return IdentityStanding.ABANDONED
    return IdentityStanding.FREE


def free_identity(store: ObjectStore, location: Location, identity: str, *, run_id: str | None = None) -> str:
    """Return the first of ``identity``, ``<identity>-r2``, ``-r3``, ... that is free, past abandoned ones of this run.

    Only where no other process of the run writes it now: a claim does not tell a dead writer from a live one. Multipart
    uploads that a dead process of this machine left open are aborted.

    Raises SnapshotConflictError when one of them is published, lacks only its index, or was claimed by another run.
    """
    check_identity(identity)
    for attempt in range(1, _MOST_ATTEMPTS):
        name = identity if attempt == 1 else f"{identity}-r{attempt}"
        check_identity(name)
        standing = identity_standing(store, location, name)
        if standing is IdentityStanding.FREE:
            return name
        if standing is not IdentityStanding.ABANDONED:
            why = {
                IdentityStanding.PUBLISHED: "it is published",
                IdentityStanding.COMPLETABLE: "it lacks only its index: complete_streamed() writes it",
            }[standing]
            raise conflict_error(location, name, {INDEX_NAME: why})
        held = read_claim(store, location, name)
        if held is not None and (run_id is None or held.run_id != run_id):
            raise conflict_error(location, name, {claim_name(location, name): claimed_by(held)})
        record = UploadRecord(store, location, name)
        abort_left_open(record, store, location, name)
        record.close()
    raise SnapshotConflictError(
        f"{identity} was abandoned {_MOST_ATTEMPTS - 1} times", hint="find out why every upload of it dies"
    )


def complete_streamed(store: ObjectStore, location: Location, identity: str) -> str:
    """Write the index that a streamed upload did not get to write, and return the snapshot's URI.

    It is made from the headers of the shards and must come to the SHA-256 in the manifest. Raises SnapshotError where
    there is nothing to complete.
    """
    manifest = _streamed_manifest(store, location, identity)
    if manifest is None:
        raise SnapshotError(
            f"{location.uri(identity)} cannot be completed: it has no manifest of a streamed upload",
            hint="publish the version under another identity (free_identity gives one)",
        )
    prefix = location.prefix(identity)
    there = {one.key.removeprefix(prefix): one.size_bytes for one in store.list_objects(prefix)}
    for name, item in manifest["objects"].items():
        if name != INDEX_NAME and there.get(name) != item["size"]:
            raise SnapshotError(
                f"{location.uri(identity)} cannot be completed: {name} is not as its manifest says",
                hint="publish the version under another identity (free_identity gives one)",
            )
    weight_map: dict[str, str] = {}
    raw_bytes = 0
    for name in sorted(manifest["objects"]):
        if not name.endswith(".safetensors"):
            continue
        header = _header(store, location.key(identity, name))
        weight_map.update(dict.fromkeys(header, name))
        raw_bytes += sum(end - begin for begin, end in header.values())
    index = streamed_index(identity, manifest["previous_identity"], weight_map, raw_bytes)
    if hashlib.sha256(index).hexdigest() != manifest["objects"].get(INDEX_NAME, {}).get("sha256"):
        raise SnapshotError(
            f"{location.uri(identity)} cannot be completed: its shards are not what its manifest says",
            hint="publish the version under another identity (free_identity gives one)",
        )
    upload = StreamUpload(
        store=store,
        location=location,
        identity=identity,
        upload_id=manifest["upload_id"],
        run_id=manifest["run_id"],
        workers=1,
    )
    try:
        upload.put(INDEX_NAME, index)
    finally:
        upload.close()
    return location.uri(identity)


def _streamed_manifest(store: ObjectStore, location: Location, identity: str) -> dict[str, Any] | None:
    try:
        manifest = parse_manifest(store.get(location.manifest_key(identity)))
    except StorageNotFoundError as error:
        if error.code == "NoSuchBucket":
            raise
        return None
    return manifest if isinstance(manifest.get("upload_id"), str) else None


def _header(store: ObjectStore, key: str) -> dict[str, tuple[int, int]]:
    """Return where each tensor of a shard in the bucket lies."""
    length = int.from_bytes(b"".join(store.stream(key, length=8)), "little")
    if length > _MOST_HEADER_BYTES:
        raise SnapshotError(f"s3://{store.bucket}/{key} claims a header of {length} bytes")
    try:
        value = json.loads(b"".join(store.stream(key, offset=8, length=length)))
        value.pop("__metadata__", None)
        return {name: (int(item["data_offsets"][0]), int(item["data_offsets"][1])) for name, item in value.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(f"s3://{store.bucket}/{key} has no readable safetensors header: {error}") from error
