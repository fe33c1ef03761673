"""Which weights made a sample: a span of hot-loads, from what was known before and what was seen after. Pure.

- The oldest end is the newest COMPLETED hot-load known when the request was sent: all replicas served it, or newer.
- The newest end is the newest hot-load that was created, whatever its state, in a list read after the answer ended:
  no replica can have begun to serve a newer one before that.

Equal ends mean exact. Hot-loads are told apart by their ids: an identity may be served twice, after a rollback.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

__all__ = ["History", "Load", "WeightSpan", "version_number"]

_VERSION = re.compile(r"-v(\d+)(?:-full)?$")
_ENDED_BADLY = ("FAILED", "CANCELED")


def version_number(identity: str) -> int | None:
    """Return the trainer's number in an identity such as ``run-v000012`` or ``run-v000012-full``; None without one."""
    found = _VERSION.search(identity)
    return int(found[1]) if found else None


@attrs.frozen(kw_only=True)
class Load:
    """One hot-load: its id, the identity that it brings, and how far it is (``COMPLETED``, ...)."""

    id: str
    identity: str
    state: str = "COMPLETED"

    @property
    def completed(self) -> bool:
        """Whether all replicas serve it."""
        return self.state == "COMPLETED"

    @property
    def failed(self) -> bool:
        """Whether it ended without being served by all."""
        return self.state in _ENDED_BADLY


@attrs.frozen
class WeightSpan:
    """The oldest and the newest hot-load that may have made a sample; None is what was served before the first one."""

    oldest: Load | None
    newest: Load | None
    number: Callable[[str], int | None] = attrs.field(default=version_number, repr=False, eq=False, kw_only=True)

    @property
    def exact(self) -> bool:
        """Whether one weight version alone made the sample."""
        return (self.oldest and self.oldest.id) == (self.newest and self.newest.id)

    @property
    def oldest_version(self) -> int | None:
        """The trainer's number of the oldest end."""
        return self.number(self.oldest.identity) if self.oldest else None

    @property
    def newest_version(self) -> int | None:
        """The trainer's number of the newest end."""
        return self.number(self.newest.identity) if self.newest else None

    @property
    def identities(self) -> tuple[str, ...]:
        """The identities of both ends; one where the span is exact."""
        ends = (self.oldest,) if self.exact else (self.oldest, self.newest)
        return tuple(load.identity if load else "" for load in ends)

    def is_only(self, wanted: int | str) -> bool:
        """Whether exactly the wanted version (a trainer's number, an identity or a hot-load's id) made the sample."""
        return self.exact and self.oldest is not None and is_version(self.oldest, wanted, self.number)


def is_version(load: Load, wanted: int | str, number: Callable[[str], int | None] = version_number) -> bool:
    """Whether a hot-load brings the wanted version: a trainer's number, an identity, or the hot-load's own id."""
    if isinstance(wanted, int):
        return number(load.identity) == wanted
    return wanted in (load.identity, load.id)


@attrs.frozen
class History:
    """A deployment's hot-loads, newest first, at least down to the newest COMPLETED one."""

    loads: tuple[Load, ...] = ()

    @property
    def newest(self) -> Load | None:
        """The newest that was created, whatever its state."""
        return self.loads[0] if self.loads else None

    @property
    def served(self) -> Load | None:
        """The newest COMPLETED: what all replicas serve, or something newer."""
        return next((load for load in self.loads if load.completed), None)

    @property
    def settled(self) -> bool:
        """Whether the newest one is COMPLETED, so that what is sampled now is exact as long as nothing new comes."""
        return self.newest is None or self.newest.completed

    def find(self, wanted: int | str, number: Callable[[str], int | None] = version_number) -> Load | None:
        """Return the newest hot-load of the wanted version."""
        return next((load for load in self.loads if is_version(load, wanted, number)), None)

    def serves_at_least(self, wanted: int | str, number: Callable[[str], int | None] = version_number) -> bool:
        """Whether all replicas serve the wanted version or something that was made after it."""
        served = self.served
        if served is None:
            return False
        if isinstance(wanted, int):
            found = number(served.identity)
            return found is not None and found >= wanted
        if (ours := _numbered(served.identity)) and (theirs := _numbered(wanted)) and ours[0] == theirs[0]:
            # Numbers of one run: a rollback is no newer version.
            return ours[1] >= theirs[1]
        # Everything from the served one down was made before it, or is it.
        place = self.loads.index(served)
        return any(is_version(load, wanted, number) and load.completed for load in self.loads[place:])


def _numbered(identity: str) -> tuple[str, int] | None:
    found = _VERSION.search(identity)
    return (identity[: found.start()], int(found[1])) if found else None
