"""What the publisher knows, as plain data, and how it changes. Pure: no clock, no disk, no network.

    written          the trainer's last version. The mirror follows it.
    acknowledged     the last identity whose hot-load COMPLETED, with the written versions whose bytes it has.
    pending          a publish that was begun and whose end is not known yet.

Every change is a function here; ``journal.py`` writes the state down after each.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

import attrs

from cwtrain.models.sync import SnapshotChoice

__all__ = [
    "SCHEMA_VERSION",
    "Acknowledged",
    "Pending",
    "State",
    "WriteKind",
    "Written",
    "from_json",
    "to_json",
]

SCHEMA_VERSION = 1


class WriteKind(StrEnum):
    """What a trainer's call points at."""

    BASELINE = "BASELINE"
    """The parent directory: the base checkpoint is what the next delta applies to."""
    DELTA = "DELTA"
    EMPTY = "EMPTY"
    """A delta without tensors: nothing changed since its base version."""
    FULL = "FULL"


@attrs.frozen(kw_only=True)
class Written:
    """A version of the trainer."""

    number: int
    kind: WriteKind
    content: str = ""
    """Digest of the names and checksums of what was written; empty where it was not known."""


@attrs.frozen(kw_only=True)
class Acknowledged:
    """An identity that is COMPLETED on the deployment, and the written versions of its epoch that have its bytes."""

    identity: str
    number: int
    through: int
    """The last version with the same bytes: empty versions move it."""
    kind: WriteKind = WriteKind.DELTA
    any_base: bool = False
    """Right after a baseline call: the first delta is against these bytes whatever base version it names. (Trainers
    restart their numbers, or begin at an offset.)"""

    def holds(self, number: int | None) -> bool:
        """Return whether version ``number`` of the epoch has these bytes."""
        return number is not None and self.number <= number <= self.through


@attrs.frozen(kw_only=True)
class Pending:
    """A publish that was begun. It was asked for once ``hot_load_id`` is known; it may have been asked for without."""

    identity: str
    number: int
    choice: SnapshotChoice
    previous_identity: str | None = None
    hot_load_id: str | None = None


@attrs.frozen(kw_only=True)
class State:
    """All that must survive the process. Changed by the methods, which return the new state."""

    run_id: str
    deployment_id: str
    owner: str
    """Who this is: made with the journal, written into each epoch that it opens."""
    epoch: int = 0
    """The epoch that is open; 0 before the first."""
    base_identity: str | None = None
    """The identity of the base checkpoint, once it is published and was served."""
    written: Written | None = None
    acknowledged: Acknowledged | None = None
    pending: Pending | None = None
    refused: str | None = None
    """The identity whose hot-load FAILED or was CANCELED, until something is acknowledged after it."""
    mirror_epoch: int = 0
    """The epoch that the mirror belongs to; 0: whatever is there must not be used."""
    full_number: int | None = None
    """The version of the last full snapshot that was acknowledged in this epoch."""
    directories: Mapping[str, int] = attrs.field(factory=dict)
    """The trainer's directories of this epoch, each with its version."""

    # -- epochs ----------------------------------------------------------------------------------------------------

    def opened(self, epoch: int, *, keep: Acknowledged | None = None) -> State:
        """A new epoch begins. Nothing is acknowledged in it, but for ``keep``: what a writer of ours goes on from."""
        return attrs.evolve(
            self,
            epoch=epoch,
            written=None,
            acknowledged=keep,
            pending=None,
            refused=None,
            mirror_epoch=0,
            full_number=None,
            directories={},
        )

    def based(self, identity: str) -> State:
        """The base checkpoint is served, or was: the first delta applies to it, whatever number it names."""
        known = Acknowledged(identity=identity, number=0, through=0, kind=WriteKind.FULL, any_base=True)
        return attrs.evolve(self, base_identity=identity, acknowledged=known, full_number=0)

    # -- one version -----------------------------------------------------------------------------------------------

    def wrote(self, written: Written, *, base: int | None = None, directory: str | None = None) -> State:
        """The trainer wrote a version, and the mirror (where there is one) holds it.

        ``base`` is the version that it applies to: for the first of an epoch, the number that the base's bytes have.
        """
        known, directories = self.acknowledged, dict(self.directories)
        if known is not None and known.any_base:
            first = known.number if base is None else base
            known = attrs.evolve(known, number=first, through=first, any_base=False)
        if directory is not None:
            directories[directory] = written.number
        return attrs.evolve(self, written=written, acknowledged=known, directories=directories)

    def same_bytes(self, number: int) -> State:
        """Version ``number`` has the bytes of what is acknowledged: it is an empty one after that."""
        assert self.acknowledged is not None
        return attrs.evolve(self, acknowledged=attrs.evolve(self.acknowledged, through=number))

    def began(self, pending: Pending) -> State:
        """A publish begins: from here on its identity is taken."""
        return attrs.evolve(self, pending=pending)

    def accepted(self, hot_load_id: str) -> State:
        """The service took the hot-load of what is pending."""
        assert self.pending is not None
        return attrs.evolve(self, pending=attrs.evolve(self.pending, hot_load_id=hot_load_id))

    def completed(self) -> State:
        """The hot-load of what is pending is COMPLETED: it is acknowledged."""
        assert self.pending is not None
        pending = self.pending
        full = pending.choice is SnapshotChoice.FULL
        return attrs.evolve(
            self,
            acknowledged=Acknowledged(
                identity=pending.identity,
                number=pending.number,
                through=pending.number,
                kind=WriteKind.FULL if full else WriteKind.DELTA,
            ),
            pending=None,
            refused=None,
            full_number=pending.number if full else self.full_number,
        )

    def failed(self) -> State:
        """The hot-load of what is pending FAILED or was CANCELED. What was acknowledged before stays so."""
        assert self.pending is not None
        return attrs.evolve(self, pending=None, refused=self.pending.identity)

    def dropped(self) -> State:
        """What was pending was never asked for: it counts as not begun, its identity stays taken."""
        return attrs.evolve(self, pending=None)

    def mirrored(self, epoch: int) -> State:
        """The mirror belongs to ``epoch`` from now on; 0 before it is replaced."""
        return attrs.evolve(self, mirror_epoch=epoch)

    def without(self, directories: Mapping[str, int]) -> State:
        """These directories of the trainer are gone."""
        kept = {path: number for path, number in self.directories.items() if path not in directories}
        return attrs.evolve(self, directories=kept)


def to_json(state: State) -> dict[str, Any]:
    """Return the state as JSON data with its schema version."""
    return {"schema_version": SCHEMA_VERSION, **attrs.asdict(state)}


def from_json(value: Mapping[str, Any]) -> State:
    """Return the state that ``to_json`` made. Raises KeyError, TypeError or ValueError for anything else."""
    written, acknowledged, pending = value["written"], value["acknowledged"], value["pending"]
    fields = {field.name: value[field.name] for field in attrs.fields(State)}
    return State(
        **{
            **fields,
            "written": written and Written(**{**written, "kind": WriteKind(written["kind"])}),
            "acknowledged": acknowledged and Acknowledged(**{**acknowledged, "kind": WriteKind(acknowledged["kind"])}),
            "pending": pending and Pending(**{**pending, "choice": SnapshotChoice(pending["choice"])}),
            "directories": dict(value["directories"]),
        }
    )
