"""What became of a streamed upload: which identity is free for the next one, and one that only lacks its index.

A streamed upload that died before its manifest is abandoned, never completed: what it sent was in memory. Its version
is published under ``<identity>-r2`` then (``-r3``, ...). One that died after its manifest lacks only the index, which
can be made from what is there.
"""

from __future__ import annotations

from enum import StrEnum

from cwtrain.storage import Location, ObjectStore

__all__ = ["Standing", "complete_streamed", "free_identity", "identity_standing"]


class Standing(StrEnum):
    """What stands under an identity."""

    FREE = "FREE"
    """Nothing: no claim, no object."""
    ABANDONED = "ABANDONED"
    """A claim or objects, neither manifest nor index: nobody can complete it."""
    COMPLETABLE = "COMPLETABLE"
    """All but the index: ``complete_streamed`` writes it."""
    PUBLISHED = "PUBLISHED"
    """The index is there."""


def identity_standing(store: ObjectStore, location: Location, identity: str) -> Standing:
    """Return what stands under ``identity``."""
    raise NotImplementedError


def free_identity(store: ObjectStore, location: Location, identity: str, *, run_id: str | None = None) -> str:
    """Return the first of ``identity``, ``<identity>-r2``, ``-r3``, ... that is free, past abandoned ones of this run.

    Multipart uploads that a dead process of this machine left open are aborted. Raises SnapshotConflictError when one
    is published, only lacks its index, or was claimed by another run.
    """
    raise NotImplementedError


def complete_streamed(store: ObjectStore, location: Location, identity: str) -> str:
    """Write the index that a streamed upload did not get to write, and return the snapshot's URI.

    It is made from the headers of the shards and must come to the SHA-256 in the manifest. Raises SnapshotError.
    """
    raise NotImplementedError
