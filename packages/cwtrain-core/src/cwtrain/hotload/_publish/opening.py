"""Epochs for versions that come without a baseline call, and the check that nobody took the run over."""

from __future__ import annotations

import logging

import attrs

from cwtrain.errors import CWTrainError
from cwtrain.hotload._publish import epochs
from cwtrain.hotload._publish.decide import next_epoch
from cwtrain.hotload._publish.follow import Follower
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.look import Look
from cwtrain.hotload._publish.names import parse_identity
from cwtrain.hotload._publish.send import Budget, Sender
from cwtrain.hotload._publish.state import Acknowledged, WriteKind
from cwtrain.models.service import HotLoad, HotLoadState
from cwtrain.snapshots.identity import version_number

__all__ = ["Opening", "highest_epoch", "take_epoch"]

_log = logging.getLogger("cwtrain.hotload")


def highest_epoch(sender: Sender, journal: Journal, hot_loads: list[HotLoad], budget: Budget) -> int:
    """Return the highest epoch of the run that the bucket or ``hot_loads`` know of, 0 without any."""
    loader = sender.loader
    return sender.through_outages(
        lambda: epochs.highest_epoch(loader.store, loader.location, journal.state.run_id, hot_loads),
        budget,
        "looking for earlier epochs",
    )


def take_epoch(sender: Sender, journal: Journal, taken: int, budget: Budget) -> int:
    """Open the run's next epoch above the journal's and ``taken``, and return its number; the journal is not told."""
    loader, state = sender.loader, journal.state
    return sender.through_outages(
        lambda: epochs.open_epoch(
            loader.store,
            loader.location,
            state.run_id,
            first=next_epoch(state.epoch, taken),
            owner=state.owner,
            directory=journal.root,
        ),
        budget,
        "opening an epoch",
    )


@attrs.define
class Opening:
    """The epochs of one publisher. ``base`` is the checkpoint that the first delta of an epoch applies to."""

    journal: Journal
    follower: Follower | None
    sender: Sender
    base: str | None

    def open_epoch(self, look: Look, budget: Budget) -> None:
        """Open an epoch for a version that came without a baseline call."""
        journal = self.journal
        state = journal.state
        hot_loads = self.sender.hot_loads(budget)
        taken = highest_epoch(self.sender, journal, hot_loads, budget)
        if state.epoch and taken > state.epoch:
            self.refuse_if_taken_over(budget)
        epoch = take_epoch(self.sender, journal, taken, budget)
        keep = None
        if state.epoch == 0 and look.kind is not WriteKind.FULL:
            keep = self._recovered(hot_loads)
        _log.warning(
            "epoch %d of run %s begins with version %s%s",
            epoch,
            state.run_id,
            look.number,
            f", on {keep.identity}" if keep else "",
        )
        journal.open_epoch(epoch, keep=keep)
        if keep is None and look.kind is not WriteKind.FULL and state.base_identity and self.base:
            if self.follower is not None:
                self.follower.reset(self.base, 0)
            journal.save(journal.state.based(state.base_identity))

    def _recovered(self, hot_loads: list[HotLoad]) -> Acknowledged | None:
        """Return what this run published last, where its journal is lost: what a writer of ours goes on from."""
        loader, run = self.sender.loader, self.journal.state.run_id
        for hot_load in hot_loads:
            if hot_load.state is HotLoadState.COMPLETED and parse_identity(run, hot_load.identity) is not None:
                try:
                    manifest = loader.read_manifest(hot_load.identity)
                except CWTrainError as error:
                    _log.warning("%s cannot be gone on from: %s", hot_load.identity, error)
                    return None
                if manifest.get("run_id") not in (None, run):
                    continue  # another run, whose name reads like an epoch of this one
                number = version_number(str(manifest.get("version")))
                if number is None:
                    return None
                kind = WriteKind.DELTA if hot_load.previous_identity else WriteKind.FULL
                return Acknowledged(identity=hot_load.identity, number=number, through=number, kind=kind)
        return None

    def refuse_if_taken_over(self, budget: Budget) -> None:
        """Raise SnapshotConflictError where another publisher has opened a later epoch of the run."""
        loader, state = self.sender.loader, self.journal.state
        self.sender.through_outages(
            lambda: epochs.refuse_if_taken_over(
                loader.store, loader.location, state.run_id, epoch=state.epoch, owner=state.owner
            ),
            budget,
            "looking whether the run was taken over",
        )
