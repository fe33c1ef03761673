"""What a mirror holds, and how it gets from one version to the next: ``WeightMirror`` below its public face."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import attrs

from cwtrain._process import OneProcess, renew_locks_after_fork
from cwtrain.errors import (
    MirrorDamagedError,
    MirrorError,
    MirrorMissingError,
    SnapshotChainError,
    SnapshotChangedError,
)
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_files import REBUILD, Layout, Shard, read_shard
from cwtrain.hotload._mirror_hold import Hold
from cwtrain.hotload._mirror_lock import MirrorLock
from cwtrain.hotload._mirror_slots import SlotWriter, missing_bytes
from cwtrain.hotload._mirror_state import State, load_state, save_state
from cwtrain.snapshots._parallel import worker_count
from cwtrain.snapshots._write import NoRoomError, is_full, naming_full_disk
from cwtrain.snapshots.changes import DeltaDirectory
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor
from cwtrain.snapshots.identity import version_number
from cwtrain.snapshots.verify import raise_wrong

__all__ = ["DeltaReport", "MirrorCore", "OnProgress"]

OnProgress = Callable[[int, int], object]
"""Called with the bytes that are done, and of all: by several threads, one at a time."""

_ROOM_BYTES = 64 << 20
"""What is left free of a disk beside the second files."""

_EXAMPLES = 5


@attrs.frozen(kw_only=True)
class DeltaReport:
    """What ``apply_delta`` did."""

    version: str
    base_version: str
    changed: tuple[str, ...] = attrs.field(repr=False)
    """Names of the tensors that the delta holds."""
    checksums: Mapping[str, str] = attrs.field(repr=False)
    """Adler-32 of their new bytes."""
    raw_bytes: int
    """Bytes of these tensors."""
    delta_bytes: int
    """Bytes of their frames."""
    shards: int
    """Shards that were written."""
    in_place: bool
    """True where the disk had no room for second files."""
    workers: int
    seconds: float

    @property
    def changed_tensors(self) -> int:
        """How many tensors the delta holds."""
        return len(self.changed)


class MirrorCore(OneProcess):
    """The mirror in the directory ``root``, opened; see ``WeightMirror``."""

    _instead = "close it here and open it there: WeightMirror(root)"

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        workers: int | None = None,
        in_place: bool | None = None,
        disk: Disk | None = None,
    ) -> None:
        self._layout = Layout(os.path.realpath(os.fspath(root)))
        self._disk = disk or Disk()
        worker_count(workers)  # wrong arguments come first
        self._workers = workers
        self._in_place = in_place
        self._mutex = threading.RLock()
        renew_locks_after_fork(self, "_mutex")
        self._broken: str | None = None
        if not os.path.exists(self._layout.state):
            raise MirrorMissingError(
                f"{self._layout.root}: there is no mirror here",
                hint="make it: WeightMirror.create(base, root), or WeightMirror.from_bucket(...)",
            )
        self._lock = MirrorLock(self._layout.root, self._layout.hidden)
        try:
            with naming_full_disk(self._layout.root):
                self._state, self._shards = self._recover()
        except BaseException:
            self._lock.release()
            raise

    @property
    def version(self) -> str:
        """The version that it holds, as its delta wrote it."""
        return self._state.version

    @property
    def checksums(self) -> dict[str, str]:
        """Adler-32 of each tensor, 8 hex digits."""
        return {name: value for shard in self._shards.values() for name, value in shard.checksums.items()}

    def verify(self, *, on_progress: OnProgress | None = None) -> None:
        """Read everything and compare it with its checksums. Raises MirrorDamagedError that names wrong tensors."""
        from cwtrain.snapshots._sweep import sweep

        with self._mutex:
            self._check_usable()
            checkpoint = self._checkpoint()
            count = worker_count(self._workers, work_bytes=checkpoint.tensor_bytes)
            found = sweep(list(checkpoint.tensors.values()), workers=count, on_progress=on_progress).checksums
            recorded = self.checksums
        wrong = [name for name, value in found.items() if value != recorded[name]]
        if wrong:
            shown = ", ".join(map(repr, wrong[:_EXAMPLES])) + (", ..." if len(wrong) > _EXAMPLES else "")
            raise MirrorDamagedError(
                f"{self._layout.root}: the mirror is damaged: {len(wrong)} tensors have not the bytes of version "
                f"{self.version} ({shown})",
                hint=REBUILD,
            )

    @contextmanager
    def hold(self) -> Iterator[Hold]:
        """Keep the mirror at its version until the end: what would change it, in other threads, waits.

        ``HotLoader.publish(mirror, ...)`` does so by itself.
        """
        with self._mutex:
            self._check_usable()
            yield Hold(frozenset(self._shards), partial(self._check_held, self._state))

    def _check_held(self, state: State) -> None:
        """Raise SnapshotChangedError unless ``state`` is what the mirror holds, here and on the disk."""
        self._check_usable()
        if self._state != state or load_state(self._layout.state) != state:
            raise SnapshotChangedError(
                f"{self._layout.root}: the mirror changed while it was uploaded, although it was locked",
                file=self._layout.root,
                hint="see that only one process works with it, and that its file system keeps locks; then publish "
                "again under a new identity",
            )

    def _recover(self) -> tuple[State, dict[str, Shard]]:
        """Return what the mirror holds, after clearing away what a killed process left; see ``_mirror_state``."""
        layout, disk = self._layout, self._disk
        state = load_state(layout.state)
        boot_id = disk.boot_id()
        rebooted = not boot_id or boot_id != state.boot_id
        if os.path.exists(layout.pending):
            from cwtrain.hotload import _mirror_in_place as in_place

            if not rebooted and in_place.is_pending(layout, state.serial):
                in_place.undo(disk, layout)
            self._drop_pending()
        disk.remove_tree(f"{layout.pending}.new")
        if rebooted or os.path.exists(layout.mark):
            state = state.distrust_spares()
        shards = {name: read_shard(layout, name, item) for name, item in state.shards.items()}
        if rebooted:
            # The last process, or the machine, ended with the machine: whatever was not synced may be lost.
            self._state, self._shards = state, shards
            self.verify()
            self._switch(state.version, {})
            return self._state, self._shards
        layout.show(disk, state)
        return state, shards

    def _drop_pending(self) -> None:
        self._disk.remove_tree(f"{self._layout.pending}.new")
        self._disk.rename(self._layout.pending, f"{self._layout.pending}.new")
        self._disk.remove_tree(f"{self._layout.pending}.new")

    def _check_usable(self) -> None:
        self._check_process()
        if self._broken is not None:
            raise MirrorError(
                f"{self._layout.root}: this mirror cannot be used any more: {self._broken}",
                hint="open it again: WeightMirror(root)",
            )

    def _checkpoint(self, kind: type[Tensor] = Tensor) -> Checkpoint:
        tensors = {tensor.name: tensor for shard in self._shards.values() for tensor in shard.tensors(kind)}
        return Checkpoint(path=self._layout.root, tensors=tensors)

    def _check_base(self, change: DeltaDirectory) -> None:
        if _same_version(change.base_version, self.version):
            return
        if _same_version(change.version, self.version):
            hint = "the mirror is at the delta's own version: it seems to be applied already"
        else:
            hint = "apply the deltas between them first, or make the mirror again from a full snapshot"
        raise SnapshotChainError(
            f"{change.path}: the delta applies to version {change.base_version!r}, but the mirror {self._layout.root} "
            f"holds {self.version!r}",
            hint=hint,
        )

    def _apply(
        self, change: DeltaDirectory, base: Checkpoint, version: str, on_progress: OnProgress | None
    ) -> DeltaReport:
        """Go on to ``version`` by ``change``; ``base`` is what ``_checkpoint`` returned."""
        started = time.monotonic()
        changed = frozenset(change.changes)
        touched = [shard for shard in self._shards.values() if not changed.isdisjoint(shard.header.tensors)]
        in_place = bool(touched) and self._works_in_place(touched)
        base_version = self.version
        checksums: dict[str, str] = {}
        tensors = [tensor for name, tensor in base.tensors.items() if name in changed]
        if not touched:
            self._switch(version, {})
        elif in_place:
            checksums = self._apply_in_place(change, version, touched, changed, on_progress)
        else:
            with self._writing(touched, changed) as writer:
                checksums = self._sweep(change, tensors, writer, on_progress)
                done = writer.finish(checksums, changed)
            self._switch(version, done)
        return DeltaReport(
            version=version,
            base_version=base_version,
            changed=tuple(tensor.name for tensor in tensors),
            checksums=checksums,
            raw_bytes=sum(tensor.size_bytes for tensor in tensors),
            delta_bytes=sum(item.blob.size_bytes for item in change.changes.values()),
            shards=len(touched),
            in_place=in_place,
            workers=self._workers_for(tensors),
            seconds=time.monotonic() - started,
        )

    def _sweep(
        self, change: DeltaDirectory, tensors: list[Tensor], target: Any, on_progress: OnProgress | None
    ) -> dict[str, str]:
        from cwtrain.snapshots._sweep import sweep

        count = self._workers_for(tensors)
        swept = sweep(tensors, changes=change.changes, target=target, workers=count, on_progress=on_progress)
        raise_wrong(change.path, swept.wrong, base=self._layout.root)
        return swept.checksums

    def _workers_for(self, tensors: list[Tensor]) -> int:
        return worker_count(self._workers, work_bytes=sum(tensor.size_bytes for tensor in tensors))

    def _works_in_place(self, shards: list[Shard]) -> bool:
        if self._in_place is not None:
            return self._in_place
        missing = missing_bytes(self._layout, shards)
        return missing > 0 and self._disk.free_bytes(self._layout.hidden) < missing + _ROOM_BYTES

    @contextmanager
    def _writing(self, shards: list[Shard], written: frozenset[str]) -> Iterator[SlotWriter]:
        """Give what takes new bytes for the other slots, and see that they are not trusted if it goes wrong."""
        writer = SlotWriter(self._disk, self._layout, shards, written)
        missing = missing_bytes(self._layout, shards)
        if missing and (free := self._disk.free_bytes(self._layout.hidden)) < missing:
            raise NoRoomError(
                f"{self._layout.root}: the next version needs {missing} bytes more, {free} are free",
                place=self._layout.root,
                hint="make room, or let the mirror work in place (in_place=None or True)",
            )
        self._disk.close([self._disk.open(self._layout.mark, create=True)])
        known, self._state = self._state, self._state.distrust_spares()
        try:
            writer.prepare()
            self._shards = self._with_state(known)
            yield writer
        except BaseException as error:
            self._shards = self._with_state(self._state)
            if is_full(error):
                raise NoRoomError(
                    f"{self._layout.root}: the disk is full; the mirror still holds version {self.version}",
                    place=self._layout.root,
                    hint="make room, or let the mirror work in place (in_place=True)",
                ) from error
            raise
        finally:
            writer.close()
        self._state = known

    def _with_state(self, state: State) -> dict[str, Shard]:
        return {name: attrs.evolve(shard, state=state.shards[name]) for name, shard in self._shards.items()}

    def _apply_in_place(
        self,
        change: DeltaDirectory,
        version: str,
        touched: list[Shard],
        changed: frozenset[str],
        on_progress: OnProgress | None,
    ) -> dict[str, str]:
        from cwtrain.hotload import _mirror_in_place as in_place

        if any(item.encoding != "xor" for item in change.changes.values()):
            raise MirrorError(
                f"{change.path}: only xor deltas can be applied in place, for only they can be undone",
                hint="convert it first (cwtrain snapshot convert), or make room for a second copy of the mirror",
            )
        tensors = [item for shard in touched for item in shard.tensors(in_place.HeldTensor) if item.name in changed]
        writer = in_place.InPlaceWriter(self._disk, self._layout, touched)
        try:
            writer.prepare(change, self._state.serial + 1)
            checksums = self._sweep(change, tensors, writer, on_progress)
            done = writer.finish(checksums, changed)
        except BaseException as error:
            self._broken = "an update in place was cut short"
            writer.close()
            if os.path.exists(self._layout.pending):
                in_place.undo(self._disk, self._layout)
                self._drop_pending()
            self._shards = {name: read_shard(self._layout, name, item) for name, item in self._state.shards.items()}
            self._layout.show(self._disk, self._state)
            self._broken = None
            if is_full(error):
                raise NoRoomError(
                    f"{self._layout.root}: the disk is full; the mirror still holds version {self.version}",
                    place=self._layout.root,
                    hint="make room: an update in place needs little more than the delta's size",
                ) from error
            raise
        writer.close()
        self._switch(version, done)
        self._drop_pending()
        return checksums

    def _switch(self, version: str, done: Mapping[str, Shard]) -> None:
        """Let ``version`` count, with the shards ``done`` as they are now: two syncs."""
        shards = {**self._shards, **done}
        state = State(
            version=version,
            serial=self._state.serial + 1,
            boot_id=self._disk.boot_id(),
            shards={name: shard.state for name, shard in shards.items()},
        )
        try:
            save_state(self._disk, self._layout.state, state)
            self._layout.show(self._disk, state)
            self._disk.fsync_directory(self._layout.hidden)
            self._disk.remove(self._layout.mark)
        except BaseException:
            self._broken = "writing its state failed"
            raise
        self._state, self._shards = state, shards


def _same_version(one: str, two: str) -> bool:
    numbers = version_number(one), version_number(two)
    return one == two or (numbers[0] is not None and numbers[0] == numbers[1])
