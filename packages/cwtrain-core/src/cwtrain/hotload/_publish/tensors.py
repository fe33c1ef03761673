"""Versions that come as tensors: no directory is ever written for them.

One call on one rank (``publish``), or two around what several ranks write together: ``begin`` decides and gives the
plan that all ranks write by, ``finish`` takes what rank 0 finalised.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping

import attrs

from cwtrain.errors import ConfigError, HotLoadError, SnapshotError
from cwtrain.events import SnapshotUploaded, SyncSkipped, SyncStarted, WeightsWritten
from cwtrain.hotload import chain as chains
from cwtrain.hotload._publish.arguments import NamedTensors
from cwtrain.hotload._publish.decide import Decision, Rules, Seen, decide, fall_back
from cwtrain.hotload._publish.look import Look
from cwtrain.hotload._publish.numbered import Numbered
from cwtrain.hotload._publish.outcome import PublishOutcome, PublishState
from cwtrain.hotload._publish.plan import TensorBase, TensorPlan
from cwtrain.hotload._publish.report import Measures
from cwtrain.hotload._publish.send import Budget, ended_badly
from cwtrain.hotload._publish.state import Pending, WriteKind, Written
from cwtrain.hotload._writer_tied import check_fits
from cwtrain.hotload.bases import MemoryBase, MirrorBase
from cwtrain.hotload.mirror import WeightMirror
from cwtrain.hotload.writer import WrittenSnapshot, new_upload_id
from cwtrain.models.service import HotLoad, HotLoadState
from cwtrain.models.snapshot import PublishPlan, SnapshotKind
from cwtrain.models.sync import SnapshotChoice, WeightSyncRequest
from cwtrain.snapshots._inputs import TensorInput
from cwtrain.snapshots._model_rules import wrapped_names
from cwtrain.snapshots._write import require_space
from cwtrain.snapshots.identity import version_number

__all__ = ["TensorFeed"]

_log = logging.getLogger("cwtrain.hotload")


@attrs.define
class TensorFeed:
    """What publishes tensors, for one publisher."""

    numbered: Numbered
    where: TensorBase
    _base: MemoryBase | MirrorBase | None = None
    _mirror: WeightMirror | None = None
    _checked: bool = False
    _begun: TensorPlan | None = None
    """What was begun, until it is finished or ends with an error."""

    # -- by several ranks ------------------------------------------------------------------------------------------

    def begin(
        self, number: int, event: WeightsWritten, budget: Budget, *, held: str | None, again: Decision | None = None
    ) -> TensorPlan | PublishOutcome:
        """Decide how version ``number`` is published: in full, or as a delta on ``held``, which all bases hold.

        The outcome comes at once where a plugin chose to skip it. ``again`` is the decision of a second try.
        """
        numbered = self.numbered
        loader, journal = numbered.sender.loader, numbered.journal
        self._give_up(f"version {number} was begun in its place")
        numbered.sender.through_outages(
            lambda: loader.require_open(just_before=True), budget, "looking at the deployment"
        )
        began = loader.syncs.clock()
        named = loader.plugins.name_snapshot(event)
        acknowledged = journal.state.acknowledged
        hot_loads = numbered.sender.hot_loads_to(acknowledged.identity if acknowledged else None, budget)
        deltas = numbered.deltas(hot_loads)
        decision = again
        if decision is None:
            known = journal.state.acknowledged
            fits = known is not None and held == known.identity
            seen = Seen(
                kind=WriteKind.DELTA if fits else WriteKind.FULL,
                number=number,
                base_number=known.through if known is not None and fits else None,
            )
            journal.save(journal.state.wrote(Written(number=number, kind=seen.kind), base=seen.base_number))
            opinion = loader.plugins.choose_snapshot(event, chains.served_chain(hot_loads))
            decision = decide(journal.state, seen, self.rules, deltas=deltas, opinion=opinion)
        if decision.choice is SnapshotChoice.SKIP:
            loader.plugins.notify(SyncSkipped(reason=decision.reason, version=number, run_id=loader.run_id))
            return numbered.outcome(SnapshotChoice.SKIP, number, PublishState.SKIPPED, Measures(), budget)
        full = decision.choice is SnapshotChoice.FULL
        plan = TensorPlan(
            identity=numbered.identity(number, decision, named, budget, streamed=True),
            kind=SnapshotKind.FULL if full else SnapshotKind.DELTA,
            number=number,
            epoch=journal.state.epoch,
            upload_id=new_upload_id(),
            run_id=numbered.journal.state.run_id,
            deployment_id=loader.deployment_id,
            previous_identity=decision.previous_identity,
            reason=decision.reason,
            cut=decision.cut,
            side_files=numbered.base,
            deltas=0 if full else deltas + 1,
        )
        _log.info("version %d: %s as %s, because %s", number, decision.choice.value, plan.identity, decision.reason)
        if decision.warning:
            _log.warning("version %d: %s", number, decision.warning)
        self._ask(plan)
        pending = Pending(
            identity=plan.identity,
            number=number,
            choice=decision.choice,
            previous_identity=plan.previous_identity,
        )
        journal.save(journal.state.began(pending))
        self._begun = plan
        loader.syncs.started(
            SyncStarted(
                identity=plan.identity,
                choice=decision.choice,
                version=number,
                previous_identity=plan.previous_identity,
                run_id=loader.run_id,
            ),
            began=began,
        )
        return plan

    def finish(self, plan: TensorPlan, written: WrittenSnapshot, budget: Budget) -> PublishOutcome:
        """Have what rank 0 finalised loaded by the deployment, and say what was done.

        Raises HotLoadFailedError where the engine did not take it; a second ``begin`` then publishes in full.
        """
        self._begun = None
        with self._ending(plan):
            return self._finish(plan, written, budget)

    def _finish(self, plan: TensorPlan, written: WrittenSnapshot, budget: Budget) -> PublishOutcome:
        numbered = self.numbered
        loader, journal = numbered.sender.loader, numbered.journal
        if written.identity != plan.identity:
            raise SnapshotError(f"{written.identity} is not {plan.identity}, which was planned")
        measures = _measures(plan, written)
        if written.empty:
            journal.save(attrs.evolve(journal.state.same_bytes(plan.number), pending=None))
            reason = f"nothing changed since {plan.previous_identity}"
            loader.syncs.skipped(reason, identity=plan.identity, version=plan.number)
            return numbered.outcome(SnapshotChoice.SKIP, plan.number, PublishState.SKIPPED, measures, budget)
        loader.plugins.notify(
            SnapshotUploaded(
                identity=plan.identity,
                objects=len(written.objects),
                uploaded_bytes=written.uploaded_bytes,
                reused_bytes=0,
                seconds=written.seconds.get("total", 0.0),
                run_id=loader.run_id,
            )
        )
        request = WeightSyncRequest(
            deployment_id=plan.deployment_id,
            path=written.uri,
            identity=plan.identity,
            choice=SnapshotChoice(plan.kind.value),
            previous_identity=plan.previous_identity,
            timeout=budget.at_most(numbered.settings.timeout),
        )
        wait = numbered.settings.wait
        try:
            hot_load = numbered.sender.publish(request, version=plan.number, wait=wait, budget=budget, written=written)
        except HotLoadError as error:
            if ended_badly(error):
                journal.save(journal.state.failed())
            raise
        measures.timings = {**measures.timings, **hot_load.timings}
        return self._done(plan, hot_load, measures, budget)

    # -- by one rank -----------------------------------------------------------------------------------------------

    def publish(self, tensors: NamedTensors, number: int, event: WeightsWritten, budget: Budget) -> PublishOutcome:
        """Encode, upload and hot-load ``tensors`` as version ``number``; a delta that fails comes once more in full."""
        inputs = tensors.inputs()
        if inputs is not None and (wrapped := wrapped_names(inputs)):
            raise SnapshotError(wrapped)
        self._check_room(inputs)
        self.place(number, budget)
        done = self._write(tensors, number, event, budget, again=None)
        if isinstance(done, PublishOutcome):
            return done
        plan, written = done
        try:
            return self.finish(plan, written, budget)
        except HotLoadError as error:
            decision = Decision(choice=SnapshotChoice(plan.kind.value), reason=plan.reason)
            again = fall_back(decision, self.rules) if ended_badly(error) else None
            if again is None:
                raise
            _log.warning("version %d is published in full: %s", number, error)
        done = self._write(tensors, number, event, budget, again=again)
        assert not isinstance(done, PublishOutcome)
        return self.finish(*done, budget)

    def close(self) -> None:
        """Give the base up, and what was begun and not finished."""
        self._give_up("the publisher was closed")
        self._base = None
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    @property
    def rules(self) -> Rules:
        """What the settings say: a full snapshot can be made of the tensors at any time."""
        return Rules(full_every=self.numbered.settings.full_every, full_possible=True)

    # -- inside ----------------------------------------------------------------------------------------------------

    def place(self, number: int, budget: Budget) -> None:
        """Settle what is pending, and open an epoch where the numbers began anew."""
        numbered = self.numbered
        numbered.settle(budget)
        state = numbered.journal.state
        written, known = state.written, state.acknowledged
        new = state.epoch == 0 or (written is not None and number < written.number)
        if written is not None and number == written.number and known is not None and known.holds(number):
            new = True  # it is published: these tensors are another version of that number
        if new:
            kind = WriteKind.DELTA if self.where is TensorBase.DISK else WriteKind.FULL
            numbered.opening.open_epoch(Look(path="", kind=kind, number=number), budget)
        numbered.opening.refuse_if_taken_over(budget)

    def _write(
        self, tensors: NamedTensors, number: int, event: WeightsWritten, budget: Budget, *, again: Decision | None
    ) -> tuple[TensorPlan, WrittenSnapshot] | PublishOutcome:
        """Write the snapshot; after an outage from the beginning, under the next name."""
        sender = self.numbered.sender
        loader = sender.loader

        def attempt() -> tuple[TensorPlan, WrittenSnapshot] | PublishOutcome:
            base = self._open_base()
            plan = self.begin(number, event, budget, held=base.identity if base is not None else None, again=again)
            if isinstance(plan, PublishOutcome):
                return plan
            workers = self.numbered.settings.upload_workers
            with self._ending(plan):
                # What does not fit is refused before the writer begins: afterwards, a base in memory would be lost.
                tied = _tied(tensors, plan, base)
            with (
                self._ending(plan),
                plan.writer(loader.store, loader.location, base=base, upload_workers=workers) as writer,
            ):
                for name, tensor, dtype in tensors:
                    budget.check(f"still writing {plan.identity}")
                    if name not in tied:
                        writer.add(name, tensor, dtype=dtype)
                return plan, writer.finalise([writer.close()])

        return sender.through_outages(attempt, budget, f"writing version {number}")

    @contextlib.contextmanager
    def _ending(self, plan: TensorPlan) -> Iterator[None]:
        """Tell the end of what ``plan`` started where anything is raised."""
        try:
            yield
        except BaseException as error:
            self._begun = None
            self.numbered.sender.loader.syncs.failed(error, identity=plan.identity, version=plan.number)
            raise

    def _give_up(self, why: str) -> None:
        """Tell the end of a publish by several ranks that was begun and never finished."""
        begun, self._begun = self._begun, None
        if begun is not None:
            error = SnapshotError(f"{begun.identity} was not finished: {why}", hint="finish_tensors ends what is begun")
            self.numbered.sender.loader.syncs.failed(error, identity=begun.identity, version=begun.number)

    def _open_base(self) -> MemoryBase | MirrorBase | None:
        """Return where the next delta's base lies; what it holds is its ``identity``, None for nothing."""
        if self.where is TensorBase.NONE or self._base is not None:
            return self._base
        _log.info("the base of the next delta lives %s", _PLACES[self.where])
        numbered = self.numbered
        known = numbered.journal.state.acknowledged
        if self.where is TensorBase.MEMORY:
            base = MemoryBase()
            if known is not None and known.any_base and numbered.base is not None:
                base.load(numbered.base, known.identity)
            self._base = base
            return base
        return self._open_mirror()

    def _open_mirror(self) -> MirrorBase | None:
        """Return the mirror of this run as a base: the one that lies here, or the bucket's; None before the first."""
        numbered = self.numbered
        journal = numbered.journal
        state = journal.state
        known = state.acknowledged
        if known is None:
            return None
        if state.mirror_epoch == state.epoch and os.path.lexists(journal.mirror_path):
            mirror = WeightMirror(journal.mirror_path)
            if known.holds(version_number(mirror.version)):
                return self._hold(mirror, known.identity)
            mirror.close()
        loader = numbered.sender.loader
        require_space(os.path.join(journal.root, ""), 0, "the mirror")
        journal.save(state.mirrored(0))
        mirror = WeightMirror.from_bucket(
            journal.mirror_path,
            store=loader.store,
            location=loader.location,
            identity=known.identity,
            version=str(known.number),
        )
        journal.save(journal.state.mirrored(state.epoch))
        return self._hold(mirror, known.identity)

    def _hold(self, mirror: WeightMirror, identity: str) -> MirrorBase:
        self._mirror = mirror
        self._base = base = MirrorBase(mirror, identity)
        return base

    def _check_room(self, inputs: Mapping[str, TensorInput] | None) -> None:
        """Refuse, at the start, a base for which there is no room."""
        if self._checked or inputs is None:
            return
        size = sum(one.size_bytes for one in inputs.values())
        self._checked = True
        if self.where is TensorBase.MEMORY and (free := _memory_available()) is not None and size > free:
            raise ConfigError(
                f"the base of the next delta takes {size} bytes of memory, {free} are available",
                hint="keep it on the disk (base 'disk'), or publish in full (base 'none')",
            )
        root = self.numbered.journal.root
        if self.where is TensorBase.DISK and not os.path.lexists(self.numbered.journal.mirror_path):
            require_space(os.path.join(root, ""), size, "the base of the next delta")

    def _ask(self, plan: TensorPlan) -> None:
        """Let plugins veto before the first byte is written."""
        loader = self.numbered.sender.loader
        location = loader.location
        loader.plugins.before_publish(
            PublishPlan(
                deployment_id=plan.deployment_id,
                identity=plan.identity,
                kind=plan.kind,
                reason=plan.reason,
                bucket=location.bucket,
                path_prefix=location.path_prefix,
                uri=location.uri(plan.identity),
                files=(),
                total_bytes=0,
                upload_bytes=0,
                previous_identity=plan.previous_identity,
                chain_deltas=plan.deltas,
                prompt_cache_policy=self.numbered.settings.prompt_cache_policy.value,
            )
        )

    def _done(self, plan: TensorPlan, hot_load: HotLoad, measures: Measures, budget: Budget) -> PublishOutcome:
        numbered = self.numbered
        choice = SnapshotChoice(plan.kind.value)
        if hot_load.state is not HotLoadState.COMPLETED:
            numbered.journal.save(numbered.journal.state.accepted(hot_load.id))
            return numbered.outcome(choice, plan.number, PublishState.ACCEPTED, measures, budget)
        numbered.acknowledge(hot_load, told=False)
        numbered.verify(hot_load, measures)
        if self._base is None and self.where is TensorBase.DISK:
            self._open_mirror()
        return numbered.outcome(choice, plan.number, PublishState.COMPLETED, measures, budget)


def _tied(tensors: NamedTensors, plan: TensorPlan, base: MemoryBase | MirrorBase | None) -> set[str]:
    """Return which tensors are left out, where the base says what there are. Raises SnapshotError for what fits not."""
    inputs = tensors.inputs()
    if base is None or inputs is None or (plan.kind is SnapshotKind.FULL and base.sparse):
        return set()
    return check_fits(inputs, base.types(), plan.previous_identity)


_PLACES = {
    TensorBase.MEMORY: "in memory: it takes as much as the tensors, and a restart begins with a full snapshot",
    TensorBase.DISK: "in a mirror on the disk, which a restart finds again",
}


def _measures(plan: TensorPlan, written: WrittenSnapshot) -> Measures:
    return Measures(
        changed_tensors=written.changed_tensors,
        total_tensors=written.tensors,
        changed_bytes=written.changed_bytes,
        total_bytes=written.raw_bytes,
        chain_length=plan.deltas,
        chain_cut=plan.cut,
        timings={
            "encode_seconds": written.seconds.get("encode", 0.0),
            "upload_seconds": written.seconds.get("upload", 0.0),
            "bytes": float(written.uploaded_bytes),
            "uploaded_bytes": float(written.uploaded_bytes),
        },
    )


def _memory_available() -> int | None:
    """Return the bytes of memory that can be had, None where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError, IndexError):
        pass
    return None
