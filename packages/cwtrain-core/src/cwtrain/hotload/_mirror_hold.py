"""A mirror that is kept as it is while it is uploaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, cast

import attrs

from cwtrain.models.snapshot import SnapshotFile

__all__ = ["Hold", "Owner", "keeping", "owner_of"]


@attrs.frozen
class Hold:
    """The word of a snapshot's owner: nobody writes to ``shards`` now. ``check`` raises where somebody did."""

    shards: Collection[str]
    check: Callable[[], None]

    def files(self, files: Iterable[SnapshotFile]) -> tuple[SnapshotFile, ...]:
        """Return the files with the owner's word for its own."""
        return tuple(attrs.evolve(file, held=True) if file.name in self.shards else file for file in files)


class Owner(Protocol):
    """What has a snapshot to itself: an open ``WeightMirror``."""

    def hold(self) -> AbstractContextManager[Hold]:
        """Keep the snapshot as it is until the end."""
        ...


def owner_of(checkpoint: object) -> Owner | None:
    """Return the owner of a checkpoint that is given as one; None for a path."""
    return cast("Owner", checkpoint) if hasattr(checkpoint, "hold") else None


def keeping(owner: Owner | None) -> AbstractContextManager[Hold | None]:
    """Keep the owner's snapshot as it is, where there is one."""
    return nullcontext() if owner is None else owner.hold()
