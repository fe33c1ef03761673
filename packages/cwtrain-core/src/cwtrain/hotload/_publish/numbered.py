"""One numbered version, from the trainer's call to the acknowledgement."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial

import attrs

from cwtrain.config import HotLoadConfig
from cwtrain.errors import CWTrainError, HotLoadError, SnapshotConflictError
from cwtrain.events import SyncSkipped, WeightsWritten
from cwtrain.hotload import chain as chains
from cwtrain.hotload._publish.decide import Decision, Place, Rules, decide, fall_back, place
from cwtrain.hotload._publish.follow import Followed, Follower
from cwtrain.hotload._publish.housekeeping import removable, remove_directories
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.look import Look, content_of
from cwtrain.hotload._publish.names import identity_of
from cwtrain.hotload._publish.opening import Opening
from cwtrain.hotload._publish.outcome import PublishOutcome, PublishState
from cwtrain.hotload._publish.report import Measures, metrics
from cwtrain.hotload._publish.send import Budget, Sender, ended_badly
from cwtrain.hotload._publish.state import Pending, WriteKind, Written
from cwtrain.hotload.delta import checkpoint_checksums
from cwtrain.models.service import HotLoad, HotLoadState
from cwtrain.models.sync import SnapshotChoice, WeightSyncRequest
from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots.identity import check_identity

__all__ = ["Numbered"]

_log = logging.getLogger("cwtrain.hotload")
_TRIES = 9


@attrs.define
class Numbered:
    """What handles numbered versions, for one publisher."""

    settings: HotLoadConfig
    journal: Journal
    follower: Follower | None
    sender: Sender
    disk_dir: str
    base: str | None
    clock: Callable[[], float]
    opening: Opening

    @property
    def rules(self) -> Rules:
        """What the settings say about full and delta."""
        return Rules(full_every=self.settings.full_every, full_possible=self.follower is not None)

    # -- one version -----------------------------------------------------------------------------------------------

    def run(self, look: Look, event: WeightsWritten, budget: Budget) -> PublishOutcome:
        """Publish the version that ``look`` saw, or skip it, and say what was done."""
        plugins = self.sender.loader.plugins
        named = plugins.name_snapshot(event)
        if named is not None:
            check_identity(named)
        self.settle(budget)
        measures = Measures(changed_tensors=look.tensors)
        seen = look.seen(self._content(look))
        where = place(self.journal.state, seen)
        if where is Place.NEW_EPOCH:
            self.opening.open_epoch(look, budget)
        self.opening.refuse_if_taken_over(budget)
        state = self.journal.state
        if where is Place.SAME and state.acknowledged is not None and state.acknowledged.holds(seen.number):
            _log.info("version %d is published already as %s", seen.number, state.acknowledged.identity)
            return self.outcome(SnapshotChoice.SKIP, seen.number, PublishState.COMPLETED, measures, budget)
        hot_loads = self.sender.hot_loads_to(state.acknowledged.identity if state.acknowledged else None, budget)
        deltas = self.deltas(hot_loads)
        followed = self._follow(look, measures, budget)
        written = Written(number=seen.number, kind=look.kind, content=seen.content or self._content_now(look))
        directory = look.path if self.settings.cleanup else None  # kept only for what deletes them
        state = self.journal.save(self.journal.state.wrote(written, base=look.base_number, directory=directory))
        opinion = plugins.choose_snapshot(event, chains.served_chain(hot_loads))
        if followed.path is None and opinion is not SnapshotChoice.SKIP:
            opinion = SnapshotChoice.FULL
        decision = decide(state, seen, self.rules, deltas=deltas, opinion=opinion)
        _log.info("version %d: %s, because %s", seen.number, decision.choice.value, decision.reason)
        if decision.warning:
            _log.warning("version %d: %s", seen.number, decision.warning)
        if decision.choice is SnapshotChoice.SKIP:
            return self._skip(look, decision, measures, budget)
        return self._publish(look, followed, decision, named, deltas, measures, budget)

    def settle(self, budget: Budget) -> None:
        """Find out how what is pending ended: COMPLETED acknowledges it, anything else does not.

        One that is still running is waited for within TIMEOUT. Raises HotLoadTimeoutError where that is not enough.
        """
        state = self.journal.state
        pending = state.pending
        if pending is None:
            return
        listed = self.sender.hot_loads(budget, until=lambda one: one.identity == pending.identity)
        found = next((one for one in listed if one.identity == pending.identity), None)
        if found is None:
            return  # it was never asked for; the version is published again, or in full
        if pending.hot_load_id != found.id:
            self.journal.save(state.accepted(found.id))
        try:
            if found.state is not HotLoadState.COMPLETED:
                found = self.sender.wait(found.id, budget)
        except HotLoadError as error:
            if not ended_badly(error):
                raise
            _log.warning("%s was not acknowledged: %s", pending.identity, error)
            self.journal.save(self.journal.state.failed())
            self.sender.loader.syncs.failed(error, identity=pending.identity, version=pending.number)
            return
        self.acknowledge(found, told=False)

    def finish(self, budget: Budget) -> None:
        """Wait for the last hot-load; publish in full what it did not bring, where that is possible.

        Raises HotLoadError where what the trainer wrote last is not served and cannot be.
        """
        self.settle(budget)
        state = self.journal.state
        written = state.written
        missing = state.refused or (state.pending and state.pending.identity)
        if written is None or missing is None:
            return
        if state.acknowledged is not None and state.acknowledged.holds(written.number):
            return
        # A process that was killed may have brought the mirror further than what was written down.
        if not self.rules.falls_back or self.follower is None or not self.follower.holds(written.number):
            raise HotLoadError(
                f"version {written.number} is not served: the hot-load of {missing} "
                f"{'did not end well' if state.refused else 'was never asked for'}",
                hint="give the publisher the same version again where it is still at hand, or start the run again with "
                "the same CWTRAIN_HOTLOAD_RUN_ID: it goes on from its base",
            )
        look = Look(path=self.follower.path, kind=WriteKind.FULL, number=written.number)
        decision = Decision(choice=SnapshotChoice.FULL, reason="the last publish did not end well", cut=True)
        followed = Followed(path=None)
        self._publish(look, followed, decision, None, 0, Measures(), budget, wait=True)

    # -- what is known ---------------------------------------------------------------------------------------------

    def _content(self, look: Look) -> str:
        """Return the digest of what ``look`` saw, of a full snapshot only where its number is not a new one."""
        written = self.journal.state.written
        if look.kind is not WriteKind.FULL or written is None or written.number != look.number:
            return look.content
        return content_of(checkpoint_checksums(look.path))

    def _content_now(self, look: Look) -> str:
        """Return the digest of a full snapshot that was just mirrored; without a mirror its manifest has it later."""
        if look.kind is WriteKind.FULL and self.follower is not None:
            return content_of(self.follower.checksums)
        return ""

    def deltas(self, hot_loads: list[HotLoad]) -> int:
        """Return how many deltas the acknowledged identity's chain has, as the service says.

        What the service does not know as COMPLETED is not acknowledged, whatever the journal says.
        """
        state = self.journal.state
        if state.acknowledged is None:
            return 0
        found = chains.completed(hot_loads, state.acknowledged.identity)
        if found is None:
            _log.warning(
                "the deployment has no completed hot-load of %s: it does not count as acknowledged",
                state.acknowledged.identity,
            )
            self.journal.save(attrs.evolve(state, acknowledged=None))
            return 0
        return chains.chain_of(found, hot_loads).deltas

    def _follow(self, look: Look, measures: Measures, budget: Budget) -> Followed:
        if self.follower is None:
            if look.kind is WriteKind.DELTA and look.foreign:
                inspect_snapshot(look.path, previous_identity="-")  # its refusal names the trainer's flag
            return Followed(path=look.path)
        started = self.clock()

        def still(done: int, total: int) -> None:
            budget.check(f"still bringing the mirror to version {look.number} ({done} of {total} bytes)")

        followed = self.follower.follow(look, on_progress=still)
        measures.mirror_seconds = self.clock() - started
        measures.total_tensors, measures.total_bytes = followed.total_tensors, followed.total_bytes
        measures.changed_bytes = followed.changed_bytes
        return followed

    # -- what is done ----------------------------------------------------------------------------------------------

    def _skip(self, look: Look, decision: Decision, measures: Measures, budget: Budget) -> PublishOutcome:
        assert look.number is not None
        state = self.journal.state
        if look.kind is WriteKind.EMPTY:
            self.journal.save(state.same_bytes(look.number))
        loader = self.sender.loader
        loader.plugins.notify(SyncSkipped(reason=decision.reason, version=look.number, run_id=loader.run_id))
        return self.outcome(SnapshotChoice.SKIP, look.number, PublishState.SKIPPED, measures, budget)

    def _publish(
        self,
        look: Look,
        followed: Followed,
        decision: Decision,
        named: str | None,
        deltas: int,
        measures: Measures,
        budget: Budget,
        *,
        wait: bool | None = None,
    ) -> PublishOutcome:
        assert look.number is not None
        wait = self.settings.wait if wait is None else wait
        try:
            hot_load = self._attempt(look, followed, decision, named, wait, budget)
        except HotLoadError as error:
            again = fall_back(decision, self.rules) if ended_badly(error) else None
            if again is None:
                raise
            _log.warning("version %d is published in full: %s", look.number, error)
            decision = again
            hot_load = self._attempt(look, followed, decision, named, wait, budget)
        measures.timings = hot_load.timings
        measures.chain_cut = decision.cut
        measures.chain_length = 0 if decision.choice is SnapshotChoice.FULL else deltas + 1
        if hot_load.state is not HotLoadState.COMPLETED:
            return self.outcome(decision.choice, look.number, PublishState.ACCEPTED, measures, budget)
        self.verify(hot_load, measures)
        self._remember_content(look, hot_load)
        return self.outcome(decision.choice, look.number, PublishState.COMPLETED, measures, budget)

    def _attempt(
        self, look: Look, followed: Followed, decision: Decision, named: str | None, wait: bool, budget: Budget
    ) -> HotLoad:
        """Bring the version into the deployment as decided, and write down how far it got."""
        assert look.number is not None
        path, mirror = followed.path or look.path, None
        if decision.choice is SnapshotChoice.FULL and self.follower is not None:
            path, mirror = self.follower.path, self.follower.mirror
        identity = self.identity(look.number, decision, named, budget)
        self.journal.save(
            self.journal.state.began(
                Pending(
                    identity=identity,
                    number=look.number,
                    choice=decision.choice,
                    previous_identity=decision.previous_identity,
                )
            )
        )
        request = WeightSyncRequest(
            deployment_id=self.settings.deployment_id,
            path=path,
            identity=identity,
            choice=decision.choice,
            previous_identity=decision.previous_identity,
            timeout=budget.at_most(self.settings.timeout),
            # Versions that changed nothing, and numbers that begin anywhere, are in the journal, not in the bucket.
            settings={"base_version": look.base_number} if decision.choice is SnapshotChoice.DELTA else {},
        )
        try:
            hot_load = self.sender.publish(request, version=look.number, wait=wait, budget=budget, mirror=mirror)
        except HotLoadError as error:
            if ended_badly(error):
                self.journal.save(self.journal.state.failed())
            raise
        if hot_load.state is HotLoadState.COMPLETED:
            self.acknowledge(hot_load, told=True)
        else:
            self.journal.save(self.journal.state.accepted(hot_load.id))
        return hot_load

    def identity(
        self, number: int, decision: Decision, named: str | None, budget: Budget, *, streamed: bool = False
    ) -> str:
        """Return the first name of the version that is free, or that this very publish began to use.

        What was ``streamed`` under a name cannot be gone on with: its bytes were in memory.
        """
        state, loader = self.journal.state, self.sender.loader
        suffixes = [""]
        if decision.choice is SnapshotChoice.FULL and decision.cut:
            suffixes.append("full")
        suffixes += [f"r{count}" for count in range(2, _TRIES)]
        mine = state.pending
        for suffix in suffixes:
            if named is None:
                identity = identity_of(state.run_id, state.epoch, number, suffix)
            else:
                identity = f"{named}-{suffix}" if suffix else named
            check_identity(identity)
            if (
                not streamed
                and mine is not None
                and (mine.identity, mine.number, mine.choice) == (identity, number, decision.choice)
            ):
                return identity
            if identity == state.refused:
                continue  # replicas may have its bytes, also where it was removed from the bucket since
            key = loader.location.claim_key(identity)
            taken = self.sender.through_outages(
                partial(loader.store.head, key), budget, f"looking whether {identity} is free"
            )
            if taken is None:
                return identity
            if named is not None and not decision.cut and not streamed:
                return identity  # somebody's name: whether it is ours is for the upload to find out
        raise SnapshotConflictError(
            f"every name of version {number} is taken, up to {identity}",
            objects=(identity,),
            hint="start the run again with the same CWTRAIN_HOTLOAD_RUN_ID: it opens a new epoch",
        )

    def acknowledge(self, hot_load: HotLoad, *, told: bool) -> None:
        """What is pending is COMPLETED. ``told``: plugins have heard of it."""
        state = self.journal.state
        assert state.pending is not None
        number = state.pending.number
        state = self.journal.save(state.completed())
        loader = self.sender.loader
        if not told:
            loader.syncs.completed(hot_load, version=number)
        if self.settings.cleanup and (found := removable(state)):
            gone = remove_directories(found, self.disk_dir)
            self.journal.save(self.journal.state.without(gone))
        for staged in self.journal.staged(number):
            remove_directories({staged: number}, os.path.dirname(staged))

    def verify(self, hot_load: HotLoad, measures: Measures) -> None:
        """With VERIFY=1 ask every replica again what it serves."""
        if not self.settings.verify:
            return
        started = self.clock()
        report = self.sender.loader.operations.served(hot_load)
        measures.verify_seconds = self.clock() - started
        if not report.served:
            behind = [f"{one.name} ({one.current_snapshot_identity or 'unknown'})" for one in report.behind]
            raise HotLoadError(
                f"hot-load {hot_load.id} of {hot_load.identity} is COMPLETED, and "
                f"{', '.join(behind) or 'no replica'} does not serve it",
                hot_load=hot_load,
                hint=f"look again with `cwtrain hotload status {hot_load.id}`",
            )

    def _remember_content(self, look: Look, hot_load: HotLoad) -> None:
        """Write down what a full snapshot held, from its manifest, where no mirror said it."""
        written = self.journal.state.written
        if written is None or written.content or look.kind is not WriteKind.FULL:
            return
        try:
            tensors = self.sender.loader.read_manifest(hot_load.identity)["tensors"]
        except CWTrainError as error:
            _log.info("the manifest of %s cannot be read: %s", hot_load.identity, error)
            return
        known = attrs.evolve(written, content=content_of(tensors))
        self.journal.save(attrs.evolve(self.journal.state, written=known))

    def outcome(
        self, choice: SnapshotChoice, number: int, state: PublishState, measures: Measures, budget: Budget
    ) -> PublishOutcome:
        """Return what is told of a call."""
        now = self.journal.state
        identity = now.pending.identity if state is PublishState.ACCEPTED and now.pending else None
        if identity is None and now.acknowledged is not None:
            identity = now.acknowledged.identity
        measures.total_seconds = budget.spent()
        if state is PublishState.COMPLETED and measures.timings:
            measures.replicas = self.sender.replicas
        return PublishOutcome(
            identity=identity, kind=choice, number=number, epoch=now.epoch, state=state, metrics=metrics(measures)
        )
