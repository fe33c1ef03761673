"""Tensors in, a published snapshot out: each one encoded, hashed and uploaded while the next is being produced.

    from cwtrain.hotload import MemoryBase, SnapshotWriter

    base = MemoryBase()                                  # what the next delta applies to
    with SnapshotWriter(store, location, "run-v000001", kind="full", base=base, side_files="/ckpt/base") as writer:
        for name, tensor in state_dict.items():
            writer.add(name, tensor)                     # numpy, torch, or any buffer
        written = writer.finalise([writer.close()])

    with SnapshotWriter(store, location, "run-v000002", kind="delta", base=base,
                        previous_identity="run-v000001") as writer:
        ...

Nothing touches the disk. Several ranks write one snapshot together: each makes a writer with the same ``upload_id`` and
its own ``rank``, adds its own tensors and ``close``\\ s; the caller's own collective carries the small receipts to
rank 0, whose ``finalise`` writes manifest and index. Until then no reader sees anything.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import attrs

from cwtrain.hotload.bases import BaseTensors
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.storage import Location, ObjectDigest, ObjectStore

__all__ = ["ShardReceipt", "SnapshotWriter", "WrittenSnapshot", "new_upload_id"]

DEFAULT_MEMORY_BYTES = 320 << 20


def new_upload_id() -> str:
    """Return what the ranks of one snapshot have in common: made on one of them and given to all."""
    raise NotImplementedError


@attrs.frozen(kw_only=True)
class ShardReceipt:
    """What one rank wrote. Small, and pickles."""

    identity: str
    upload_id: str
    kind: SnapshotKind
    rank: int
    ranks: int
    objects: Mapping[str, ObjectDigest] = attrs.field(factory=dict, repr=False)
    """Size and SHA-256 of its shards."""
    weight_map: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """The tensors in its shards: for a delta those that changed."""
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Adler-32 of every tensor that was added, changed or not."""
    raw_bytes: int = 0
    changed_bytes: int = 0
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    error: str | None = None
    """Why this rank failed; None where it did not."""


@attrs.frozen(kw_only=True)
class WrittenSnapshot:
    """A snapshot that is in the bucket, manifest and index included; or an empty delta, of which nothing is."""

    identity: str
    kind: SnapshotKind
    uri: str
    previous_identity: str | None
    empty: bool
    """True for a delta in which nothing changed: nothing was uploaded, skip the version."""
    tensors: int
    changed_tensors: int
    raw_bytes: int
    changed_bytes: int
    uploaded_bytes: int
    objects: Mapping[str, ObjectDigest] = attrs.field(factory=dict, repr=False)
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    """``total``; ``encode`` and ``upload``: how long threads were busy with it, all ranks together; ``produce``: between
    calls of ``add``, where the caller made the next tensor; ``blocked``: inside ``add`` and ``close``; ``finalise``."""

    @property
    def density(self) -> float:
        """Which part of all bytes differs, 0 to 1; 1 for a full snapshot."""
        return self.changed_bytes / self.raw_bytes if self.raw_bytes else 0.0

    @property
    def ratio(self) -> float:
        """How many times smaller what was uploaded is than the tensors."""
        return self.raw_bytes / self.uploaded_bytes if self.uploaded_bytes else 0.0


class SnapshotWriter:
    """One rank's part of a snapshot that is uploaded while it is made.

    ``kind`` is ``"full"`` or ``"delta"``. ``base`` is what a delta applies to (and follows it: see ``bases``); given
    with a full snapshot it is filled. ``previous_identity`` of a delta defaults to ``base.identity``. ``side_files`` is
    a directory with ``config.json``, tokenizer and so on, for a full snapshot. With ``ranks`` above 1, ``upload_id``
    must be the same on all (``new_upload_id``). ``names`` says which tensors the snapshot must have in the end.

    Memory beside the base: ``memory_bytes`` at the most (with what the interpreter and its libraries take).

    Raises ConfigError and SnapshotError for arguments that do not fit together; nothing is written before the first
    shard is full, and then the claim comes first.
    """

    def __init__(
        self,
        store: ObjectStore,
        location: Location,
        identity: str,
        *,
        kind: SnapshotKind | str,
        base: BaseTensors | None = None,
        previous_identity: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        upload_id: str | None = None,
        run_id: str | None = None,
        deployment_id: str | None = None,
        version: str | None = None,
        side_files: str | os.PathLike[str] | None = None,
        names: Collection[str] | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        workers: int | None = None,
        upload_workers: int = 4,
        shard_bytes: int | None = None,
        max_bytes_per_second: float | None = None,
    ) -> None:
        raise NotImplementedError

    def add(self, name: str, tensor: Any, *, dtype: str | None = None, shape: Sequence[int] | None = None) -> None:
        """Take a tensor. When this returns its bytes have been read: the caller may change or free it.

        A numpy array, a torch tensor (on any device), or anything with the buffer protocol; scalars and non-contiguous
        ones too. ``dtype`` and ``shape`` say what raw bytes are, or that uint16 words are ``BF16``. Blocks while the
        memory budget is in use. Raises what went wrong meanwhile: SnapshotError for a tensor that does not fit the base
        or comes twice, SnapshotConflictError, StorageError, TransportError. Then ``abort``.
        """
        raise NotImplementedError

    def close(self, *, raises: bool = True) -> ShardReceipt:
        """Wait until everything that was added is in the bucket, and return the receipt for ``finalise``.

        With ``raises=False`` a failure comes as a receipt whose ``error`` says why, for a collective that every rank
        must reach; ``finalise`` raises it then.
        """
        raise NotImplementedError

    def finalise(self, receipts: Sequence[ShardReceipt]) -> WrittenSnapshot:
        """Write side files, manifest and, last, the index, on rank 0 with the receipts of all ranks.

        Nothing is written where one rank failed, a tensor is missing or came from two ranks (SnapshotError), or
        nothing changed. The base holds the new version from then on; other ranks call ``commit``.
        """
        raise NotImplementedError

    def commit(self, written: WrittenSnapshot) -> None:
        """Let this rank's base hold the snapshot that rank 0 finalised."""
        raise NotImplementedError

    def abort(self) -> None:
        """Stop, abort what is open in the bucket, and give the base up. May be called at any time, also twice.

        Shards that arrived stay (without an index nobody reads them, and ``gc`` removes them); the identity is not used
        again: see ``cwtrain.hotload.streamed.free_identity``.
        """
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless the snapshot was finalised (or committed)."""
        raise NotImplementedError
