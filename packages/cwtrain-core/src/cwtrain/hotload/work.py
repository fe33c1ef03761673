"""A piece of work for the service: which snapshot, on what, with which prompt cache policy."""

from __future__ import annotations

import attrs

from cwtrain.models.service import HotLoad, IncrementalSnapshotMetadata, PromptCachePolicy, SnapshotType
from cwtrain.models.snapshot import LocalSnapshot, SnapshotKind

__all__ = ["Work"]

_PRESERVING = (PromptCachePolicy.UNSPECIFIED, PromptCachePolicy.PRESERVE)
"""The server fills an unset policy in with PRESERVE, so the two ask for the same."""


@attrs.frozen
class Work:
    """What is asked of the service: the parts of a hot-load that make it this one."""

    identity: str
    type: SnapshotType
    previous_identity: str | None
    policy: PromptCachePolicy

    @classmethod
    def of(cls, snapshot: LocalSnapshot, identity: str, policy: PromptCachePolicy) -> Work:
        """Return the work of hot-loading ``snapshot`` as ``identity``."""
        if snapshot.kind is SnapshotKind.FULL:
            return cls(identity, SnapshotType.FULL, None, policy)
        return cls(identity, SnapshotType.INCREMENTAL, snapshot.previous_identity, policy)

    @property
    def metadata(self) -> IncrementalSnapshotMetadata | None:
        """What a delta's hot-load says of it; None for a full snapshot."""
        if self.previous_identity is None:
            return None
        return IncrementalSnapshotMetadata(previous_snapshot_identity=self.previous_identity)

    def same_as(self, hot_load: HotLoad) -> bool:
        """Return whether ``hot_load`` is this work."""
        policy = hot_load.spec.prompt_cache_policy
        return (
            hot_load.spec.identity == self.identity
            and hot_load.spec.type is self.type
            and hot_load.previous_identity == self.previous_identity
            and (policy is self.policy or (policy in _PRESERVING and self.policy in _PRESERVING))
        )
