"""What stands under an identity already, and whether it is ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage.location import Location
from cwtrain.storage.report import ObjectDigest, UploadPlan
from cwtrain.storage.store import ObjectStore

__all__ = ["plan_upload"]


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
) -> UploadPlan:
    """Return what an upload of ``files`` as ``identity`` would do; nothing is written."""
    raise NotImplementedError
