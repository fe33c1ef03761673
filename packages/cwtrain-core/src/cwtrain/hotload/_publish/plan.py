"""How a version that comes as tensors is written: what rank 0 decides and every rank works by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any

import attrs

from cwtrain.hotload.bases import BaseTensors
from cwtrain.hotload.writer import SnapshotWriter
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.storage import Location, ObjectStore

__all__ = ["TensorBase", "TensorPlan", "Tensors"]

Tensors = Mapping[str, Any] | Callable[[], Iterable[tuple[str, Any]]]
"""Named tensors; or what gives them anew each time it is called, one after the other."""


class TensorBase(StrEnum):
    """Where the bytes lie that the next delta applies to."""

    MEMORY = "memory"
    """In this process: as much memory as the tensors have. A restart begins with a full snapshot."""
    DISK = "disk"
    """In a mirror in STATE_DIR, which a restart finds again."""
    NONE = "none"
    """Nowhere: every version is published in full."""


@attrs.frozen(kw_only=True)
class TensorPlan:
    """What all ranks write one version by. Small, and pickles: rank 0 makes it, the caller's collective carries it.

    Each rank makes ``plan.writer(store, location, base=..., rank=..., ranks=...)``, adds its tensors and closes it;
    rank 0 finalises and gives the result to ``Publisher.finish_tensors``.
    """

    identity: str
    kind: SnapshotKind
    number: int
    epoch: int
    upload_id: str
    run_id: str
    deployment_id: str
    previous_identity: str | None = None
    reason: str = ""
    cut: bool = False
    side_files: str | None = None
    deltas: int = 0

    def writer(
        self,
        store: ObjectStore,
        location: Location,
        *,
        base: BaseTensors | None = None,
        rank: int = 0,
        ranks: int = 1,
        **options: Any,
    ) -> SnapshotWriter:
        """Return this rank's writer. ``options`` are those of ``SnapshotWriter`` (memory, workers, names)."""
        return SnapshotWriter(
            store,
            location,
            self.identity,
            kind=self.kind,
            base=base,
            previous_identity=self.previous_identity,
            rank=rank,
            ranks=ranks,
            upload_id=self.upload_id,
            run_id=self.run_id,
            deployment_id=self.deployment_id,
            version=self.number,
            side_files=self.side_files if self.kind is SnapshotKind.FULL else None,
            **options,
        )
