"""A chain of published snapshots, fetched back from the bucket, each byte compared with its manifest."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

import attrs

from cwtrain.errors import ChecksumError, SnapshotChainError, SnapshotError, StorageNotFoundError
from cwtrain.hotload.chain import MAX_DELTAS
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._sidefiles import is_side_file
from cwtrain.snapshots._write import require_space
from cwtrain.snapshots.index import shard_name_trouble
from cwtrain.snapshots.manifest import parse_manifest
from cwtrain.storage import Location, ObjectStore

__all__ = ["Link", "download", "resolve_chain"]


@attrs.frozen(kw_only=True)
class Link:
    """One snapshot of a chain, as its manifest describes it."""

    identity: str
    version: str
    """The trainer's version where the manifest has it, else the identity."""
    objects: Mapping[str, Mapping[str, Any]] = attrs.field(repr=False)
    tensors: Mapping[str, str] = attrs.field(repr=False)


def resolve_chain(store: ObjectStore, location: Location, identity: str) -> list[Link]:
    """Return the full snapshot and the deltas on it up to ``identity``, oldest first.

    Raises SnapshotChainError where one is missing or unfinished, where they go in a circle, or where there are more
    deltas than the service takes.
    """
    chain: list[Link] = []
    seen: set[str] = set()
    at: str | None = identity
    while at is not None:
        if at in seen:
            raise SnapshotChainError(
                f"{location.uri(identity)}: its predecessors go in a circle at {at}",
                hint="name an identity whose chain is sound, or make the mirror from a checkpoint",
            )
        if len(chain) > MAX_DELTAS:
            raise SnapshotChainError(f"{location.uri(identity)}: has more than {MAX_DELTAS} predecessors")
        seen.add(at)
        manifest = _manifest(store, location, at, wanted_by=identity)
        version = manifest.get("version")
        chain.append(
            Link(
                identity=at,
                version=at if version is None else str(version),
                objects=manifest["objects"],
                tensors=manifest["tensors"],
            )
        )
        at = manifest.get("previous_identity") if manifest.get("type") == "INCREMENTAL" else None
        if at is None and manifest.get("type") == "INCREMENTAL":
            raise SnapshotChainError(f"{location.uri(chain[-1].identity)}: its manifest names no predecessor")
    chain.reverse()
    return chain


def _manifest(store: ObjectStore, location: Location, identity: str, *, wanted_by: str) -> dict[str, Any]:
    key = location.manifest_key(identity)
    try:
        manifest = parse_manifest(store.get(key))
    except StorageNotFoundError as error:
        what = "it" if identity == wanted_by else f"{identity}, which {wanted_by} stands on,"
        raise SnapshotChainError(
            f"{location.uri(wanted_by)} cannot be fetched: {what} has no manifest (s3://{location.bucket}/{key})",
            hint="it was never published to the end, or was removed: name a later full snapshot of the run, or make "
            "the mirror from a checkpoint",
        ) from error
    missing = [name for name in manifest["objects"] if store.head(location.key(identity, name)) is None] or (
        [INDEX_NAME] if INDEX_NAME not in manifest["objects"] else []
    )
    if missing:
        raise SnapshotChainError(
            f"{location.uri(identity)} is not whole: {', '.join(sorted(missing)[:5])} is not there",
            hint="its upload never ended, or objects were removed: name a later full snapshot of the run",
        )
    return manifest


def download(store: ObjectStore, location: Location, link: Link, directory: str) -> None:
    """Fetch a snapshot's objects into the new directory ``directory``.

    Raises ChecksumError for an object that has not the size and SHA-256 of the manifest.
    """
    os.makedirs(directory)
    size = sum(item["size"] for item in link.objects.values())
    require_space(os.path.join(directory, ""), size, f"the snapshot {link.identity}")
    for name, item in link.objects.items():
        if (
            ("/" in name and not is_side_file(name))
            or name in (".", "..")
            or (name.endswith(".safetensors") and shard_name_trouble(name))
        ):
            raise SnapshotError(f"{location.uri(link.identity)}: its manifest names an object {name!r}")
        key = location.key(link.identity, name)
        digest, length = hashlib.sha256(), 0
        os.makedirs(os.path.dirname(os.path.join(directory, name)), exist_ok=True)
        with open(os.path.join(directory, name), "xb") as file:
            for block in store.stream(key):
                digest.update(block)
                length += len(block)
                if length > item["size"]:
                    break
                file.write(block)
        if length != item["size"] or digest.hexdigest() != item["sha256"]:
            raise ChecksumError(
                f"s3://{location.bucket}/{key}: has not the bytes that were published (size or SHA-256 differ)",
                hint="the object was changed or damaged: name an identity before it",
            )
    with open(os.path.join(directory, INDEX_NAME), "rb") as file:
        metadata = json.loads(file.read()).get("metadata") or {}
    previous = metadata.get("base_version") if "delta_encoding" in metadata else None
    if previous is not None and metadata.get("version") != link.identity:
        raise SnapshotChainError(f"{location.uri(link.identity)}: its index is that of {metadata.get('version')!r}")
