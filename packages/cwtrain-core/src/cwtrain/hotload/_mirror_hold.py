"""A mirror that is kept as it is while it is uploaded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext

import attrs

from cwtrain.models.snapshot import SnapshotFile

__all__ = ["Hold", "keeping"]


@attrs.frozen
class Hold:
    """The word of a snapshot's owner: nobody writes to ``shards`` now. ``check`` raises where somebody did."""

    shards: Collection[str]
    check: Callable[[], None]

    def files(self, files: Iterable[SnapshotFile]) -> tuple[SnapshotFile, ...]:
        """Return the files with the owner's word for its own."""
        return tuple(attrs.evolve(file, held=True) if file.name in self.shards else file for file in files)


def keeping(checkpoint: object) -> AbstractContextManager[Hold | None]:
    """Keep a checkpoint as it is until the end, where its owner is given (an open ``WeightMirror``) and not a path."""
    hold: Callable[[], AbstractContextManager[Hold]] | None = getattr(checkpoint, "hold", None)
    return nullcontext() if hold is None else hold()
