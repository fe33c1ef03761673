"""The publisher's decisions against a model: whatever happens in which order, no delta is ever put on other bytes."""

from __future__ import annotations

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain.errors import SnapshotChainError
from cwtrain.hotload._publish.decide import Place, Rules, Seen, decide, fall_back, next_epoch, place
from cwtrain.hotload._publish.names import identity_of, parse_identity
from cwtrain.hotload._publish.state import Pending, State, WriteKind, Written, from_json, to_json
from cwtrain.models.sync import SnapshotChoice

BASE = "run-v000000"

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["delta", "delta", "delta", "empty", "full", "restart", "lower", "again", "skip", "offset"]),
        st.sampled_from(["completed", "completed", "failed", "lost", "late", "late-failed"]),
        st.sampled_from(["completed", "failed"]),
        st.booleans(),
    ),
    max_size=25,
)


class World:
    """A trainer, a mirror and a service, as far as the decisions see them. Bytes are numbers."""

    def __init__(self, rules):
        self.rules = rules
        self.state = State(run_id="run", deployment_id="d", owner="o")
        self.held = {BASE: 0}  # what each identity that was sent holds
        self.deltas = {BASE: 0}  # deltas in the chain of each COMPLETED one
        self.next_bytes = 1
        self.unknown = None  # the end of what is pending, as the service has it
        self.baseline()

    def baseline(self):
        self.state = self.state.opened(next_epoch(self.state.epoch, 0)).based(BASE)
        self.number, self.bytes = 0, 0
        self.written = {0: 0}
        self.mirror = 0

    def train(self, kind, number):
        base, before = self.number, self.bytes
        if kind != "empty":
            self.bytes, self.next_bytes = self.next_bytes, self.next_bytes + 1
        self.number = number
        self.written[number] = self.bytes
        self.written.setdefault(base, before)
        return Seen(
            kind={"empty": WriteKind.EMPTY, "full": WriteKind.FULL}.get(kind, WriteKind.DELTA),
            number=number,
            base_number=None if kind == "full" else base,
            content=f"{self.bytes}",
        ), before

    def settle(self):
        if self.state.pending is not None and self.unknown is not None:
            self.state = self.state.completed() if self.unknown == "completed" else self.state.failed()
        self.unknown = None

    def publish(self, seen, applies_to, outcome, second, opinion):
        self.settle()
        where = place(self.state, seen)
        assert where is not Place.NEW_EPOCH
        known = self.state.acknowledged
        if where is Place.SAME and known is not None and known.holds(seen.number):
            assert self.held[known.identity] == self.bytes
            return
        self.mirror = self.bytes
        self.state = self.state.wrote(
            Written(number=seen.number, kind=seen.kind, content=seen.content), base=seen.base_number
        )
        deltas = self.deltas[self.state.acknowledged.identity] if self.state.acknowledged else 0
        decision = decide(self.state, seen, self.rules, deltas=deltas, opinion=opinion)
        if decision.choice is SnapshotChoice.SKIP:
            if seen.kind is WriteKind.EMPTY:
                self.state = self.state.same_bytes(seen.number)
            return
        end = self.attempt(seen, decision, applies_to, deltas, outcome)
        if end == "failed" and (again := fall_back(decision, self.rules)) is not None:
            assert decision.choice is SnapshotChoice.DELTA
            self.attempt(seen, again, applies_to, deltas, second)

    def attempt(self, seen, decision, applies_to, deltas, outcome):
        identity = identity_of("run", self.state.epoch, seen.number, "full" if decision.cut else "")
        if decision.choice is SnapshotChoice.DELTA:
            assert self.held[decision.previous_identity] == applies_to, "a delta on other bytes"
            assert decision.previous_identity in self.deltas, "its predecessor was never COMPLETED"
            if self.rules.full_every:
                assert deltas + 1 < max(2, self.rules.full_every), "the chain is longer than FULL_EVERY"
        else:
            assert self.mirror == self.bytes
        assert self.held.setdefault(identity, self.bytes) == self.bytes, f"{identity} was used for other bytes"
        self.state = self.state.began(
            Pending(
                identity=identity,
                number=seen.number,
                choice=decision.choice,
                previous_identity=decision.previous_identity,
            )
        )
        if outcome == "lost":
            return outcome  # killed, or an error, before the service was asked
        ends_well = outcome in ("completed", "late")
        if ends_well:
            self.deltas[identity] = deltas + 1 if decision.choice is SnapshotChoice.DELTA else 0
        if outcome in ("late", "late-failed"):
            self.state = self.state.accepted("h")
            self.unknown = "completed" if ends_well else "failed"
        else:
            self.state = self.state.completed() if ends_well else self.state.failed()
        return outcome

    def check(self):
        known = self.state.acknowledged
        assert known is not None
        assert known.identity in self.deltas, "an identity that was never COMPLETED counts"
        for number, held in self.written.items():
            if known.holds(number) and not known.any_base:
                assert self.held[known.identity] == held, f"version {number} is not what {known.identity} holds"
        assert from_json(json.loads(json.dumps(to_json(self.state)))) == self.state


@settings(max_examples=300, deadline=None)
@given(STEPS, st.sampled_from([1, 2, 3, 20]))
def test_no_delta_is_ever_put_on_other_bytes_and_nothing_unpublished_counts(steps, full_every):
    """B05, B29: failures, lost answers and restarts in any order."""
    world = World(Rules(full_every=full_every, full_possible=True))
    last = None
    for kind, outcome, second, kill in steps:
        if kill:  # all that a process knows is its journal
            world.state = from_json(json.loads(json.dumps(to_json(world.state))))
        if kind in ("restart", "lower"):
            world.settle()
            world.baseline()
            last = None
            continue
        if kind == "again" and last is not None:
            world.publish(*last, outcome, second, None)
        else:
            number = world.number + (5 if kind == "offset" else 1)
            if kind == "offset" and world.number == 0:
                world.number = 40  # the numbers begin anywhere
                number = 41
            last = world.train(kind, number)
            world.publish(*last, outcome, second, SnapshotChoice.SKIP if kind == "skip" else None)
        world.check()
    world.settle()
    world.check()


@settings(max_examples=100, deadline=None)
@given(STEPS)
def test_without_a_mirror_what_cannot_be_a_delta_is_an_error_and_never_a_wrong_delta(steps):
    world = World(Rules(full_every=0, full_possible=False))
    for kind, outcome, second, _ in steps:
        if kind in ("restart", "lower"):
            world.settle()
            world.baseline()
            continue
        seen, applies_to = world.train("delta" if kind in ("again", "offset", "skip") else kind, world.number + 1)
        try:
            world.publish(seen, applies_to, outcome, second, None)
        except SnapshotChainError:
            refused = world.state.refused is not None
            assert refused or not world.state.acknowledged.holds(seen.base_number)
        world.check()


@given(st.from_regex(r"[A-Za-z0-9._-]{1,40}", fullmatch=True), st.integers(1, 10**6), st.integers(0, 10**12))
def test_an_identity_says_which_epoch_and_version_it_is(run, epoch, version):
    for suffix in ("", "full", "r2"):
        found = parse_identity(run, identity_of(run, epoch, version, suffix))
        assert found is not None
        assert (found.epoch, found.version, found.suffix) == (epoch, version, suffix)
