"""The mirror, kept at the trainer's last version: reset to the base, brought forward by deltas, made again if lost."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping

import attrs

from cwtrain.errors import ChecksumError, MirrorDamagedError, MirrorMissingError, SnapshotChainError
from cwtrain.hotload._mirror_core import OnProgress
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.look import Look
from cwtrain.hotload._publish.state import Acknowledged, WriteKind
from cwtrain.hotload.delta import convert_delta
from cwtrain.hotload.mirror import WeightMirror
from cwtrain.snapshots.checkpoint import open_checkpoint
from cwtrain.snapshots.identity import version_number
from cwtrain.storage import Location, ObjectStore

__all__ = ["Followed", "Follower"]


@attrs.frozen(kw_only=True)
class Followed:
    """What following a version gave: where to publish from, and what the mirror saw on the way."""

    path: str | None
    """The trainer's directory, or the converted delta in the state directory. None where the delta cannot be published
    any more: its conversion was lost, and the mirror has moved on."""
    total_tensors: int = 0
    total_bytes: int = 0
    changed_bytes: int = 0
    """Bytes of the tensors that the delta holds."""


class Follower:
    """The mirror of one publisher, opened when it is first needed.

    ``where`` gives the store and the place in the bucket from which a lost mirror is made again.
    """

    def __init__(
        self, journal: Journal, *, where: Callable[[], tuple[ObjectStore, Location]], log: Callable[..., None]
    ) -> None:
        self._journal = journal
        self._where = where
        self._log = log
        self._mirror: WeightMirror | None = None
        self._proven = False
        """Whether its bytes are known to be the run's: made here, or a delta came out right on it."""

    @property
    def path(self) -> str:
        """The directory of the mirror, a full snapshot of the trainer's last version."""
        return self._journal.mirror_path

    @property
    def mirror(self) -> WeightMirror | None:
        """The mirror, where it is open."""
        return self._mirror

    @property
    def checksums(self) -> dict[str, str]:
        """Adler-32 of each tensor of the mirror, which must be open."""
        assert self._mirror is not None
        return self._mirror.checksums

    def close(self) -> None:
        """Let others open the mirror."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None

    def reset(
        self,
        source: str | os.PathLike[str],
        number: int,
        *,
        checksums: Mapping[str, str] | None = None,
        on_progress: OnProgress | None = None,
    ) -> WeightMirror:
        """Make the mirror anew from a full checkpoint, as version ``number`` of the open epoch.

        ``checksums`` says which Adler-32 each tensor must have. Until it is there, no mirror counts.
        """
        self.close()
        journal = self._journal
        journal.save(journal.state.mirrored(0))
        self._mirror = WeightMirror.create(
            source,
            self.path,
            version=str(number),
            checksums=checksums,
            replace=os.path.lexists(self.path),
            on_progress=on_progress,
        )
        self._proven = True
        journal.save(journal.state.mirrored(journal.state.epoch))
        return self._mirror

    def holds(self, number: int) -> bool:
        """Return whether the mirror, opened and whole, is at version ``number`` of the open epoch."""
        mirror = self._opened()
        return mirror is not None and version_number(mirror.version) == number

    def follow(self, look: Look, *, on_progress: OnProgress | None = None) -> Followed:
        """Bring the mirror to the version that ``look`` saw, and say from where it is to be published.

        A delta in a format that the service does not take is converted on the way. Doing it again after a kill changes
        nothing. What ``on_progress`` raises ends it, and leaves the mirror at its version. Raises SnapshotChainError
        for a delta on a version that the mirror does not hold and that cannot be fetched, ChecksumError naming tensors
        that do not come out as the trainer recorded.
        """
        assert look.number is not None
        if look.kind is WriteKind.FULL:
            mirror = self.reset(look.path, look.number, on_progress=on_progress)
            size = sum(tensor.size_bytes for tensor in open_checkpoint(mirror.path).tensors.values())
            return Followed(path=look.path, total_tensors=len(mirror.checksums), total_bytes=size, changed_bytes=size)
        mirror = self._at_base_of(look)
        tensors = open_checkpoint(mirror.path).tensors
        followed = Followed(
            path=look.path,
            total_tensors=len(tensors),
            total_bytes=sum(tensor.size_bytes for tensor in tensors.values()),
            changed_bytes=sum(tensors[name].size_bytes for name in look.checksums if name in tensors),
        )
        applied = version_number(mirror.version) == look.number
        if look.kind is WriteKind.EMPTY:
            if not applied:
                mirror.advance(str(look.number))
            return followed
        if look.foreign:
            followed = attrs.evolve(followed, path=self._converted(mirror, look, applied=applied))
        if not applied:
            self._apply(mirror, look, on_progress)
        return followed

    def _apply(self, mirror: WeightMirror, look: Look, on_progress: OnProgress | None) -> None:
        """Apply a delta. A mirror that lay here at the start and does not fit is made again from the bucket, once."""
        try:
            mirror.apply_delta(look.path, on_progress=on_progress)
        except ChecksumError as error:
            known = self._journal.state.acknowledged
            if self._proven or known is None or not (known.any_base or known.holds(look.base_number)):
                raise
            self._log("the mirror that was found does not have the bytes of %s: %s", known.identity, error)
            self._fetch(known, look).apply_delta(look.path, on_progress=on_progress)
        self._proven = True

    def _at_base_of(self, look: Look) -> WeightMirror:
        """Return the mirror, open at what ``look`` applies to, or at ``look`` itself."""
        state = self._journal.state
        mirror = self._opened()
        held = version_number(mirror.version) if mirror is not None else None
        if mirror is not None and held == look.base_number:
            return mirror
        if mirror is not None and held == look.number and self._has(mirror, look):
            return mirror
        known = state.acknowledged
        if mirror is not None and known is not None and known.any_base and held == 0:
            # The numbers of a trainer may begin anywhere: its first delta is against the base all the same.
            mirror.advance(str(look.base_number))
            return mirror
        if known is None or not (known.any_base or known.holds(look.base_number)):
            raise SnapshotChainError(
                f"{look.path}: applies to version {look.base_number}, but the mirror {self.path} "
                f"{'holds ' + repr(mirror.version) if mirror is not None else 'is not there'}, and no snapshot in the "
                "bucket has these bytes",
                hint="a version between them never reached the publisher: start the run again with the same "
                "CWTRAIN_HOTLOAD_RUN_ID, which goes on from its base",
            )
        return self._fetch(known, look)

    def _fetch(self, known: Acknowledged, look: Look) -> WeightMirror:
        """Make the mirror again from the bucket, as what ``look`` applies to."""
        state = self._journal.state
        self._log("the mirror %s is made again from the bucket: %s", self.path, known.identity)
        self.close()
        self._journal.save(state.mirrored(0))
        store, location = self._where()
        self._mirror = WeightMirror.from_bucket(
            self.path, store=store, location=location, identity=known.identity, version=str(look.base_number)
        )
        self._proven = True
        self._journal.save(self._journal.state.mirrored(state.epoch))
        return self._mirror

    def _opened(self) -> WeightMirror | None:
        """Return the mirror of this epoch, None where there is none that can be used."""
        if self._mirror is not None:
            return self._mirror
        state = self._journal.state
        if state.mirror_epoch != state.epoch or not os.path.lexists(self.path):
            return None
        try:
            self._mirror = WeightMirror(self.path)
        except MirrorDamagedError as error:
            self._log("the mirror cannot be used: %s", error)
            return None
        except MirrorMissingError:
            return None
        return self._mirror

    def _converted(self, mirror: WeightMirror, look: Look, *, applied: bool) -> str | None:
        assert look.number is not None
        out = self._journal.staging_path(look.number, look.content)
        if applied:
            return out if os.path.isdir(out) else None
        for old in self._journal.staged(look.number):
            shutil.rmtree(old, ignore_errors=True)
        convert_delta(mirror.path, look.path, out)
        return out

    def _has(self, mirror: WeightMirror, look: Look) -> bool:
        """Return whether the mirror has the delta's new bytes already: it was applied before a kill."""
        if look.foreign:
            # The mirror compared its checksums when it was applied. Which delta that was, its conversion says.
            assert look.number is not None
            staged = self._journal.staged(look.number)
            return not staged or self._journal.staging_path(look.number, look.content) in staged
        held = mirror.checksums
        return all(held.get(name) == value for name, value in look.checksums.items())
