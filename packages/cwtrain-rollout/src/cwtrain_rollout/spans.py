"""Which weights made a sample: a span of hot-loads, from what was known before and what was seen after. Pure.

- The oldest end is the newest COMPLETED hot-load known when the request was sent: all replicas served it, or newer.
- The newest end is the newest hot-load that was created, whatever its state, in a list read after the answer ended:
  no replica can have begun to serve a newer one before that.

Equal ends mean exact. Hot-loads are told apart by their ids: an identity may be served twice, after a rollback.

A trainer that starts again counts from the beginning, under identities of another epoch (``run.2-v000001``). So a bare
number is a version of the run's newest epoch, and nothing of another epoch, or of another run, meets it.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import attrs

__all__ = ["History", "Load", "WeightSpan", "number_in", "version_number"]

_VERSION = re.compile(r"-v(\d+)(?:-(?:full|r\d+))*$")
_EPOCH = re.compile(r"(.+)\.([1-9]\d{0,8})")
_ENDED_BADLY = ("FAILED", "CANCELED")


def version_number(identity: str) -> int | None:
    """Return the trainer's number in an identity such as ``run-v000012`` or ``run-v000012-full``; None without one."""
    found = _VERSION.search(identity)
    return int(found[1]) if found else None


def _epoch_of(identity: str) -> str:
    """Return what all identities of an epoch begin with; nothing for those that no run of ours has."""
    found = _VERSION.search(identity)
    return identity[: found.start()] if found else ""


def _run_and_number(epoch: str) -> tuple[str, int]:
    found = _EPOCH.fullmatch(epoch)
    return (found[1], int(found[2])) if found else (epoch, 1)


def _follows(one: str, other: str) -> bool:
    """Whether ``other`` is a later epoch of the run of ``one``."""
    run, number = _run_and_number(other)
    mine, begun = _run_and_number(one)
    return run == one or (run == mine and number > begun)


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
    epoch: str | None = attrs.field(default=None, repr=False, eq=False, kw_only=True)
    """The run's newest epoch, whose versions bare numbers are; None where only the two ends are known."""

    @property
    def exact(self) -> bool:
        """Whether one weight version alone made the sample."""
        return (self.oldest and self.oldest.id) == (self.newest and self.newest.id)

    @property
    def oldest_version(self) -> int | None:
        """The trainer's number of the oldest end; None where that is of an older epoch than the newest one."""
        return self._number_of(self.oldest)

    @property
    def newest_version(self) -> int | None:
        """The trainer's number of the newest end; None where that is of an older epoch than the newest one."""
        return self._number_of(self.newest)

    @property
    def identities(self) -> tuple[str, ...]:
        """The identities of both ends; one where the span is exact."""
        ends = (self.oldest,) if self.exact else (self.oldest, self.newest)
        return tuple(load.identity if load else "" for load in ends)

    def is_only(self, wanted: int | str) -> bool:
        """Whether exactly the wanted version made the sample: a number of the newest epoch, an identity, an id."""
        if not self.exact or self.oldest is None:
            return False
        if isinstance(wanted, int):
            return self.oldest_version == wanted
        return wanted in (self.oldest.identity, self.oldest.id)

    def _number_of(self, end: Load | None) -> int | None:
        epoch = self.epoch
        if epoch is None:
            epoch = History(tuple(load for load in (self.newest, self.oldest) if load)).epoch
        return number_in(epoch, end.identity, self.number) if end else None


def number_in(epoch: str, identity: str, number: Callable[[str], int | None] = version_number) -> int | None:
    """Return the number that an identity has in an epoch; None where it is of another one.

    The base that a run began with is the version 0 of all its epochs.
    """
    found = number(identity)
    own = _epoch_of(identity)
    return found if own == epoch or (found == 0 and own == _run_and_number(epoch)[0]) else None


@attrs.frozen
class History:
    """A deployment's hot-loads, newest first, at least down to the newest COMPLETED one."""

    loads: tuple[Load, ...] = ()
    begun: str | None = attrs.field(default=None, kw_only=True)
    """An epoch that the run's publisher has begun, of which there may be no hot-load yet."""
    epoch: str = attrs.field(
        init=False, eq=False, repr=False, default=attrs.Factory(lambda self: self._newest_epoch(), takes_self=True)
    )
    """What the identities of the run's newest epoch begin with; the run is that of the newest hot-load."""

    def _newest_epoch(self) -> str:
        known = [epoch for load in self.loads if (epoch := _epoch_of(load.identity))]
        begun = self.begun or ""
        newest = known[0] if known else begun
        for other in (*known, begun):
            # A rollback to an older epoch makes that no newer.
            if _follows(newest, other):
                newest = other
        return newest

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
        """Return the newest hot-load of the wanted version: a number of the newest epoch, an identity, an id."""
        if isinstance(wanted, int):
            epoch = self.epoch
            return next((load for load in self.loads if number_in(epoch, load.identity, number) == wanted), None)
        return next((load for load in self.loads if wanted in (load.identity, load.id)), None)

    def serves_at_least(self, wanted: int | str, number: Callable[[str], int | None] = version_number) -> bool:
        """Whether all replicas serve the wanted version or something that was made after it.

        A number is one of the run's newest epoch, and only that epoch's versions are at least it.
        """
        served = self.served
        if served is None:
            return False
        if isinstance(wanted, int):
            found = number_in(self.epoch, served.identity, number)
            return found is not None and found >= wanted
        ours, theirs = version_number(served.identity), version_number(wanted)
        if ours is not None and theirs is not None and _epoch_of(served.identity) == _epoch_of(wanted):
            # Numbers of one run: a rollback is no newer version.
            return ours >= theirs
        # Everything from the served one down was made before it, or is it.
        place = self.loads.index(served)
        return any(wanted in (load.identity, load.id) and load.completed for load in self.loads[place:])
