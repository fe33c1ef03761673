"""Snapshots as plain data: what lies in a directory, what is to be published, how versions hang together."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

__all__ = [
    "INDEX_NAME",
    "Chain",
    "ChainLink",
    "LocalSnapshot",
    "PublishPlan",
    "SnapshotFile",
    "SnapshotKind",
]

INDEX_NAME = "model.safetensors.index.json"
"""The index of a snapshot; it is written last, so its presence means that the snapshot is complete."""


class SnapshotKind(StrEnum):
    """The two kinds of snapshot. The wire calls a delta INCREMENTAL."""

    FULL = "FULL"
    DELTA = "DELTA"


@attrs.frozen(kw_only=True)
class SnapshotFile:
    """One object of a snapshot: some bytes of ours, then ranges of one file.

    A plain file is one range (the whole file) and no ``head``. A generated index is ``head`` alone (``path`` is None).
    A shard from which a duplicate tensor is left out is a new header as ``head`` and the ranges that stay.
    ``mtime_ns`` and ``inode`` are of the file that links lead to, as seen at inspection.
    """

    name: str
    size_bytes: int
    path: str | None = None
    head: bytes = attrs.field(default=b"", repr=False)
    ranges: tuple[tuple[int, int], ...] = ()
    """(offset, length) in the file at ``path``, in the order in which they follow ``head``."""
    file_bytes: int = 0
    """Size of the whole file at ``path``, 0 without one."""
    mtime_ns: int = 0
    inode: int = 0
    device: int = 0
    sha256: str | None = None
    """SHA-256 of the object's bytes in lower-case hex, where its writer recorded it for the file as described here
    (same size, ``mtime_ns`` and ``inode``). It saves a read; the bytes that are sent must still come to it."""
    held: bool = False
    """The file's owner sees to it that nobody writes to it until it is sent: then it need not be hashed twice."""


@attrs.frozen(kw_only=True)
class LocalSnapshot:
    """A directory that passed inspection, ready to be uploaded.

    ``files`` are the objects in upload order, the index last. ``checksums`` maps each tensor to the 8-digit Adler-32
    of its (new) raw bytes where the writer recorded it: all tensors of a delta, none or all of a full snapshot.
    ``left_out`` names what lies in the directory and is not uploaded. ``duplicates`` names tensors that stood in two
    shards and of which one copy is kept.
    """

    path: str
    kind: SnapshotKind
    files: tuple[SnapshotFile, ...]
    total_bytes: int
    tensors: int
    tensor_bytes: int
    index: Mapping[str, Any] = attrs.field(repr=False)
    """The index to be uploaded, as JSON data, before identities are written into it."""
    index_generated: bool = False
    empty_delta: bool = False
    version: str | None = None
    """A delta's ``version`` as its index says."""
    base_version: str | None = None
    previous_identity: str | None = None
    """The identity that a delta applies to; None for a full snapshot, or where none is given and none follows."""
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    duplicates: tuple[str, ...] = ()
    verified: str = "headers"
    """What was checked: ``headers``; ``frames`` of a delta, decoded without its base, so that no checksum was compared;
    or ``full``: every checksum was."""

    @property
    def index_metadata(self) -> Mapping[str, Any]:
        """The ``metadata`` object of the index."""
        metadata = self.index.get("metadata")
        return metadata if isinstance(metadata, Mapping) else {}


@attrs.frozen(kw_only=True)
class ChainLink:
    """One COMPLETED snapshot of a deployment."""

    identity: str
    kind: SnapshotKind
    hot_load_id: str
    previous_identity: str | None = None


@attrs.frozen(kw_only=True)
class Chain:
    """What a deployment serves: a full snapshot and the deltas on it, oldest first."""

    links: tuple[ChainLink, ...] = ()

    @property
    def deltas(self) -> int:
        """How many deltas stand on the full snapshot."""
        return max(0, len(self.links) - 1)

    @property
    def head(self) -> ChainLink | None:
        """The newest snapshot, or None for a deployment that still serves its base."""
        return self.links[-1] if self.links else None


@attrs.frozen(kw_only=True)
class PublishPlan:
    """What a publish would do, found out before the first byte is written."""

    deployment_id: str
    identity: str
    kind: SnapshotKind
    reason: str
    """Why it is this kind, in words."""
    bucket: str
    path_prefix: str
    uri: str
    files: tuple[str, ...]
    total_bytes: int
    upload_bytes: int
    """Bytes that are still to be sent."""
    existing: tuple[str, ...] = ()
    """Objects that are there already and equal."""
    previous_identity: str | None = None
    chain_deltas: int = 0
    """Deltas in the chain after this publish."""
    prompt_cache_policy: str = "UNSPECIFIED"
    already_served: bool = False
    """True when the identity is COMPLETED and served by all replicas: there is nothing to do."""
    waiting_on: str | None = None
    """Id of another hot-load that is unfinished and would be waited for."""
    dry_run: bool = False
    """True where only the plan is asked for: a plugin may veto it, and has nothing to prepare."""
    warnings: tuple[str, ...] = ()
