"""What a call of the publisher says that it did."""

from __future__ import annotations

from enum import StrEnum

import attrs

from cwtrain.models.sync import SnapshotChoice

__all__ = ["PublishOutcome", "PublishState"]


class PublishState(StrEnum):
    """What became of a version."""

    COMPLETED = "COMPLETED"
    """Every replica serves it."""
    ACCEPTED = "ACCEPTED"
    """The service took the hot-load (WAIT=0); the next call looks at how it ended."""
    SKIPPED = "SKIPPED"
    """Nothing was published: an empty version, or a plugin's choice."""
    PUBLISHING = "PUBLISHING"
    """The base checkpoint is still on its way; the first numbered version waits for it."""


@attrs.frozen(kw_only=True)
class PublishOutcome:
    """What a call of the publisher did.

    ``identity`` is what holds the version's weights: for a skipped one what was acknowledged before. ``metrics`` are
    numbers under ``hotload/`` (see ``cwtrain.hotload.publisher``).
    """

    identity: str | None
    kind: SnapshotChoice
    number: int
    epoch: int
    state: PublishState
    metrics: dict[str, float] = attrs.field(factory=dict)
