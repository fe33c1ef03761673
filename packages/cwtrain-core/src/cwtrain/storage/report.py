"""What an upload would do, does and did, as plain data."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["ObjectDigest", "UploadPlan", "UploadProgress", "UploadReport"]


@attrs.frozen
class ObjectDigest:
    """What identifies an object's content: its size and the SHA-256 of its bytes in lower-case hex."""

    size_bytes: int
    sha256: str


@attrs.frozen(kw_only=True)
class UploadPlan:
    """What an upload would do. Names are object names (relative to the identity), in upload order.

    ``conflicts`` names what stands in the way, ``reasons`` says why, by name. Where there are any, an upload would
    raise SnapshotConflictError and write nothing.
    """

    existing: tuple[str, ...] = ()
    """Objects that are there and equal."""
    missing: tuple[str, ...] = ()
    """Objects that are still to be sent."""
    conflicts: tuple[str, ...] = ()
    reasons: Mapping[str, str] = attrs.field(factory=dict)
    upload_bytes: int = 0
    """Bytes of the missing objects."""
    existing_bytes: int = 0
    """Bytes of the objects that are there and equal."""


@attrs.frozen(kw_only=True)
class UploadProgress:
    """How far an upload is. Bytes are of the objects that have to be sent; what was there already does not count."""

    sent_bytes: int
    total_bytes: int
    seconds: float
    """Since the upload began."""
    objects_done: int
    """Objects that are in the bucket, those included that were there already."""
    objects: int
    bytes_per_second: float = 0.0
    """Over the last seconds, 0 before anything was sent."""

    @property
    def remaining_seconds(self) -> float | None:
        """How long it will still take at this rate; None while there is no rate."""
        if self.sent_bytes >= self.total_bytes:
            return 0.0
        return (self.total_bytes - self.sent_bytes) / self.bytes_per_second if self.bytes_per_second else None


@attrs.frozen(kw_only=True)
class UploadReport:
    """What an upload did. Names are object names (relative to the identity), in upload order."""

    uri: str
    uploaded: tuple[str, ...] = ()
    reused: tuple[str, ...] = ()
    """Objects that were there already and equal."""
    uploaded_bytes: int = 0
    reused_bytes: int = 0
    seconds: float = 0.0
    digests: Mapping[str, ObjectDigest] = attrs.field(factory=dict, repr=False)
    """Size and SHA-256 of every object, by name."""
