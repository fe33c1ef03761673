"""What is known of a snapshot in the bucket that is hot-loaded: delta or full, and whether its chain is there."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress

from cwtrain.errors import SnapshotError, StorageNotFoundError, StorageRegionError
from cwtrain.hotload._writer_receipts import WrittenSnapshot
from cwtrain.hotload.planning import some
from cwtrain.hotload.upload import manifest_of, require_version
from cwtrain.models.snapshot import INDEX_NAME, ChainLink, SnapshotKind
from cwtrain.snapshots.identity import check_identity
from cwtrain.snapshots.manifest import BASE_VERSION
from cwtrain.storage import Location, ObjectStore

__all__ = ["named", "previous_as_written", "previous_in_bucket", "require_objects"]

_log = logging.getLogger("cwtrain.hotload")


def named(snapshot: str | WrittenSnapshot) -> tuple[str, WrittenSnapshot | None]:
    """Return the identity, and what was written under it where the caller has that. Raises SnapshotError."""
    if not isinstance(snapshot, WrittenSnapshot):
        return check_identity(snapshot), None
    if snapshot.empty:
        raise SnapshotError(
            f"{snapshot.identity} is an empty delta on {snapshot.previous_identity}: nothing was uploaded for it, so "
            "there is nothing to load",
            hint="skip this version (WrittenSnapshot.empty): the deployment already serves these weights",
        )
    return check_identity(snapshot.identity), snapshot


def previous_in_bucket(
    store: Callable[[], ObjectStore], location: Location, identity: str, *, given: str | None
) -> str | None:
    """Return the identity that ``identity`` applies to, None for a full snapshot.

    ``store`` makes the store at its first use: without a region or credentials there is none, and the service looks
    instead. ``given`` is what the caller says: the snapshot itself must say the same. Raises SnapshotError where there
    is no such snapshot, or where a predecessor is given for a full one; SnapshotChainError where it was made on other
    weights than those of its predecessor.
    """
    try:
        index = json.loads(store().get(location.key(identity, INDEX_NAME)))
        metadata = index.get("metadata") or {}
    except StorageNotFoundError as error:
        raise SnapshotError(
            f"there is no snapshot {location.uri(identity)}: it has no {INDEX_NAME}",
            hint="publish it (cwtrain hotload publish), or check the identity",
        ) from error
    except StorageRegionError as error:
        kind = f"a delta on {given}" if given else "a full snapshot"
        _log.warning("%s cannot be looked at (%s): it is taken for %s", location.uri(identity), error, kind)
        return given
    except (ValueError, AttributeError) as error:
        raise SnapshotError(
            f"the index of {location.uri(identity)} is not readable: {error}",
            hint="publish the snapshot under another identity",
        ) from error
    if not metadata.get("delta_encoding"):
        if given:
            raise _applies_to_none(location.uri(identity), given)
        return None
    base = str(metadata.get("base_version") or "")
    previous = given or base or None
    if previous is None:
        return None
    where = location.uri(identity)
    if given and base and given != base:
        # Our uploads name the identity here. Another tool may have left the trainer's own number.
        require_version(where, base, previous, manifest_of(previous, store(), location).get("version"))
    if (recorded := manifest_of(identity, store(), location).get(BASE_VERSION)) is not None:
        require_version(where, str(recorded), previous, manifest_of(previous, store(), location).get("version"))
    return previous


def previous_as_written(written: WrittenSnapshot, location: Location, *, given: str | None) -> str | None:
    """Return the identity that ``written`` applies to, None for a full snapshot; nothing is asked.

    Raises SnapshotError where it was written to another place than ``location``, or applies to another than ``given``.
    """
    if (uri := location.uri(written.identity)) != written.uri:
        raise SnapshotError(
            f"{written.uri} was written, and the deployment loads {uri}",
            hint="give the writer store and location of the loader that triggers (HotLoader.store, HotLoader.location)",
        )
    if written.kind is SnapshotKind.FULL:
        if given:
            raise _applies_to_none(uri, given)
        return None
    if given and given != written.previous_identity:
        raise SnapshotError(
            f"{uri} was written as a delta on {written.previous_identity}, not on {given}",
            hint="leave previous_identity out: what was written says it",
        )
    return written.previous_identity


def _applies_to_none(uri: str, given: str) -> SnapshotError:
    return SnapshotError(
        f"{uri} is a full snapshot, it applies to no other: not to {given}",
        hint="leave the predecessor out (--previous-identity)",
    )


def require_objects(store: ObjectStore, location: Location, links: Iterable[ChainLink]) -> None:
    """Raise SnapshotError naming the objects of a chain that are gone from the bucket."""
    missing: list[str] = []
    last = ""
    for link in links:
        last = link.identity
        names = [INDEX_NAME]
        with suppress(StorageNotFoundError):
            index = json.loads(store.get(location.key(link.identity, INDEX_NAME)))
            names += sorted(set((index.get("weight_map") or {}).values()))
        missing += [key for key in (location.key(link.identity, name) for name in names) if store.head(key) is None]
    if missing:
        raise SnapshotError(
            f"{len(missing)} objects that {last} needs are gone from bucket {location.bucket}: {some(missing)}",
            hint="choose an identity whose chain is still there (cwtrain hotload list), or publish a full snapshot",
        )
