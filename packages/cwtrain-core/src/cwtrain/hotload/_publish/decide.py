"""What is done about a version, from what is known alone: the one place that decides. Pure.

A delta is published only where the bytes that it applies to are those of an acknowledged identity; everything else is a
full snapshot of what the trainer has, or an error. What applies to an *older* full snapshot than the one served is a
chain like any other (``chain_through``), until a deployment refuses it.
"""

from __future__ import annotations

from enum import StrEnum

import attrs

from cwtrain.errors import ConfigError, SnapshotChainError
from cwtrain.hotload._publish.names import parse_identity
from cwtrain.hotload._publish.state import State, WriteKind
from cwtrain.hotload.chain import COLD_START_DELTAS, MAX_DELTAS
from cwtrain.models.sync import SnapshotChoice

__all__ = [
    "BaselineStep",
    "Decision",
    "Place",
    "Rules",
    "Seen",
    "baseline_step",
    "decide",
    "fall_back",
    "next_epoch",
    "place",
    "reload_first",
]


class Place(StrEnum):
    """Where a version stands among those that were written."""

    NEXT = "NEXT"
    SAME = "SAME"
    """The version that was written last, again: it is resumed."""
    NEW_EPOCH = "NEW_EPOCH"
    """The numbers began anew, or the number came back with other content."""


class BaselineStep(StrEnum):
    """What the base checkpoint needs."""

    PUBLISH = "PUBLISH"
    """It is not in the bucket, or not whole."""
    HOT_LOAD = "HOT_LOAD"
    """It is in the bucket; the deployment has to load it, nothing is uploaded."""
    NOTHING = "NOTHING"


@attrs.frozen(kw_only=True)
class Seen:
    """A version as its directory shows it."""

    kind: WriteKind
    number: int
    base_number: int | None = None
    content: str = ""


@attrs.frozen(kw_only=True)
class Rules:
    """The settings that decide between full and delta."""

    full_every: int
    full_possible: bool
    """Whether a full snapshot of the trainer's bytes can be made: from a mirror, or from the tensors at hand."""

    @property
    def falls_back(self) -> bool:
        """Whether a full snapshot may stand in for a delta: not where ``full_every`` is 0."""
        return self.full_possible and self.full_every > 0


@attrs.frozen(kw_only=True)
class Decision:
    """What is done about a version, and why."""

    choice: SnapshotChoice
    reason: str
    previous_identity: str | None = None
    cut: bool = False
    """True where a full snapshot takes the place of a delta: the chain is cut."""
    warning: str | None = None


def place(state: State, seen: Seen) -> Place:
    """Return where ``seen`` stands: the next version, the last one again, or the first of a new epoch."""
    if state.epoch == 0:
        return Place.NEW_EPOCH
    if state.written is None or seen.number > state.written.number:
        return Place.NEXT
    if seen.number == state.written.number and seen.content and seen.content == state.written.content:
        return Place.SAME
    return Place.NEW_EPOCH


def next_epoch(known: int, taken: int) -> int:
    """Return the number of a new epoch: above the journal's and above all that the bucket and the service name."""
    return max(known, taken) + 1


def applies_to_acknowledged(state: State, seen: Seen) -> bool:
    """Return whether the bytes that ``seen`` applies to are those of the acknowledged identity."""
    known = state.acknowledged
    return known is not None and (known.any_base or known.holds(seen.base_number))


def decide(state: State, seen: Seen, rules: Rules, *, deltas: int, opinion: SnapshotChoice | None = None) -> Decision:
    """Return what is done about ``seen``, a numbered version.

    ``deltas`` counts those on the full snapshot in the chain of the acknowledged identity, as the service has it.
    ``opinion`` is a plugin's. Raises SnapshotChainError where only a full snapshot would be right and none can be
    made, or where the chain is as long as the service takes; ConfigError for an opinion that cannot be followed.
    """
    if seen.kind is WriteKind.FULL:
        if opinion is SnapshotChoice.DELTA:
            raise ConfigError(
                f"a plugin wants version {seen.number} as a delta, but the trainer wrote a full snapshot",
                hint="let cwtrain_choose_snapshot return None or FULL for it",
            )
        return Decision(choice=opinion or SnapshotChoice.FULL, reason=_said(opinion, "the trainer wrote it in full"))
    applies = applies_to_acknowledged(state, seen)
    if seen.kind is WriteKind.EMPTY and applies and opinion is not SnapshotChoice.FULL:
        return Decision(choice=SnapshotChoice.SKIP, reason=f"nothing changed since version {seen.base_number}")
    if opinion is SnapshotChoice.SKIP:
        return Decision(choice=SnapshotChoice.SKIP, reason="a plugin chose so")
    why = None
    if not applies:
        why = _not_acknowledged(state, seen)
    elif state.refused is not None and _is_delta_of(state, seen):
        why = f"the hot-load of {state.refused} did not end well"
    if why is None and opinion is not SnapshotChoice.FULL:
        assert state.acknowledged is not None
        if rules.full_every and deltas + 1 >= rules.full_every and opinion is not SnapshotChoice.DELTA:
            if not rules.full_possible:
                raise _cannot_cut(rules)
            reason = f"{deltas} deltas stand on the last full snapshot, FULL_EVERY is {rules.full_every}"
            return Decision(choice=SnapshotChoice.FULL, reason=reason, cut=True)
        return _delta(state, deltas, opinion)
    if opinion is SnapshotChoice.DELTA:
        raise ConfigError(
            f"a plugin wants version {seen.number} as a delta, but {why}",
            hint="let cwtrain_choose_snapshot return None or FULL for it",
        )
    if not rules.full_possible or (why is not None and not rules.falls_back):
        raise SnapshotChainError(
            f"version {seen.number} has to be published in full ({why or 'a plugin chose so'}), and nothing here can "
            "make it: there is no mirror, or CWTRAIN_HOTLOAD_FULL_EVERY is 0",
            hint="start the run again with the same CWTRAIN_HOTLOAD_RUN_ID: it goes on from its base. To have this "
            "repaired by itself, set CWTRAIN_HOTLOAD_FULL_EVERY above 0 and leave CWTRAIN_HOTLOAD_MIRROR alone",
        )
    return Decision(choice=SnapshotChoice.FULL, reason=why or "a plugin chose so", cut=True)


def fall_back(decision: Decision, rules: Rules) -> Decision | None:
    """Return what is done once where the engine did not take a delta, or None where the run has to stop."""
    if decision.choice is not SnapshotChoice.DELTA or not rules.falls_back:
        return None
    return Decision(choice=SnapshotChoice.FULL, reason="the engine did not take the delta", cut=True)


def baseline_step(run_id: str, *, published: bool, completed: bool, served: str | None) -> BaselineStep:
    """Return what the base checkpoint needs at the start of an epoch.

    ``published``: it stands in the bucket, equal. ``completed``: this deployment has completed a hot-load of it.
    ``served``: the identity that is served. What this run served when it stopped goes on being served: the first delta
    chains to the base through its older full snapshot, which every replica can resolve.
    """
    if not published:
        return BaselineStep.PUBLISH
    if not completed:
        return BaselineStep.HOT_LOAD
    ours = served is not None and parse_identity(run_id, served) is not None
    return BaselineStep.NOTHING if ours else BaselineStep.HOT_LOAD


def reload_first(previous_identity: str | None, served: str | None, *, refused: bool) -> bool:
    """Return whether the predecessor has to be hot-loaded again before a delta on it.

    Only where the deployment refused a chain through an older snapshot than the one it serves. With ``baseline_step``
    this is all that is ever decided about such chains.
    """
    return refused and previous_identity is not None and previous_identity != served


def _delta(state: State, deltas: int, opinion: SnapshotChoice | None) -> Decision:
    assert state.acknowledged is not None
    known = state.acknowledged
    if deltas + 1 > MAX_DELTAS:
        raise SnapshotChainError(
            f"this would be delta number {deltas + 1} on one full snapshot; the service takes at most {MAX_DELTAS}",
            hint="start the run again with CWTRAIN_HOTLOAD_FULL_EVERY above 0 (default 20)",
        )
    warning = None
    if deltas + 1 > COLD_START_DELTAS:
        warning = (
            f"the chain has {deltas + 1} deltas: a replica that starts with no peer replays at most "
            f"{COLD_START_DELTAS}. Set CWTRAIN_HOTLOAD_FULL_EVERY above 0"
        )
    return Decision(
        choice=SnapshotChoice.DELTA,
        reason=_said(opinion, f"its base has the bytes of {known.identity}"),
        previous_identity=known.identity,
        warning=warning,
    )


def _is_delta_of(state: State, seen: Seen) -> bool:
    """Return whether what was refused is this very version, as a delta."""
    name = parse_identity(state.run_id, state.refused or "")
    return name is None or name.version == seen.number


def _not_acknowledged(state: State, seen: Seen) -> str:
    known = state.acknowledged
    what = f"version {seen.base_number}, which it applies to," if seen.base_number is not None else "its base"
    if known is None:
        return f"{what} was never acknowledged: nothing is"
    numbers = f"version {known.number}" if known.number == known.through else f"versions {known.number}-{known.through}"
    return f"{what} is not what {known.identity} holds ({numbers})"


def _cannot_cut(rules: Rules) -> ConfigError:
    return ConfigError(
        f"CWTRAIN_HOTLOAD_FULL_EVERY={rules.full_every} cuts the chain, and CWTRAIN_HOTLOAD_MIRROR=0 leaves nothing to "
        "make a full snapshot from",
        hint="leave CWTRAIN_HOTLOAD_MIRROR unset, or set CWTRAIN_HOTLOAD_FULL_EVERY=0",
    )


def _said(opinion: SnapshotChoice | None, reason: str) -> str:
    return f"{reason}; a plugin chose so too" if opinion is not None else reason
