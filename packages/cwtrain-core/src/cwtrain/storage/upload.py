"""Upload a snapshot's objects: immutable, resumable, the index last."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage.location import Location
from cwtrain.storage.report import ObjectDigest, UploadProgress, UploadReport
from cwtrain.storage.store import ObjectStore

__all__ = ["upload_objects"]


def upload_objects(
    files: Sequence[SnapshotFile],
    *,
    store: ObjectStore,
    location: Location,
    identity: str,
    workers: int = 8,
    on_progress: Callable[[UploadProgress], None] | None = None,
    before_index: Callable[[Mapping[str, ObjectDigest]], None] | None = None,
    run_id: str | None = None,
    directory: str | None = None,
    manifest: Mapping[str, ObjectDigest] | None = None,
    max_bytes_per_second: float | None = None,
) -> UploadReport:
    """Upload ``files`` as ``identity``."""
    raise NotImplementedError
