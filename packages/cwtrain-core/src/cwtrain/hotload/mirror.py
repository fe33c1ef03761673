"""A byte-exact local copy of what the trainer last wrote, which is at any time a full snapshot ready to be published.

    from cwtrain.hotload import WeightMirror

    with WeightMirror.create("/ckpt/base", "/scratch/mirror") as mirror:
        mirror.apply_delta("/ckpt/weight_v000001")      # checks every changed tensor
        inspect_snapshot(mirror.path, verify="full")    # the chain can be cut here: publish mirror.path

It survives being killed at any instant, at the old or the new version. How, and what it costs in disk, is told in
``docs/explanation/mirror.md``.
"""

from __future__ import annotations

import errno
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from cwtrain.errors import MirrorDamagedError, MirrorError, SnapshotChainError, SnapshotError
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_files import REBUILD, Layout, Shard, read_shard
from cwtrain.hotload._mirror_lock import MirrorLock
from cwtrain.hotload._mirror_make import delta_checksums, replacing, settle
from cwtrain.hotload._mirror_slots import SlotWriter, missing_bytes
from cwtrain.hotload._mirror_state import State, load_state, save_state
from cwtrain.hotload.delta import DeltaStats, write_delta_between, write_full_snapshot
from cwtrain.snapshots._parallel import worker_count
from cwtrain.snapshots._write import staged_directory
from cwtrain.snapshots.changes import DeltaDirectory, open_delta
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor, open_checkpoint
from cwtrain.snapshots.identity import version_number
from cwtrain.snapshots.manifest import ObjectSum, build_manifest
from cwtrain.snapshots.verify import raise_wrong

if TYPE_CHECKING:
    from cwtrain.storage import Location, ObjectStore

__all__ = ["DeltaReport", "WeightMirror"]

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


class WeightMirror:
    """The mirror in the directory ``root``, opened: nobody else can use it until ``close`` (or leaving ``with``).

    ``workers`` threads apply deltas (default: one for each usable core). The next version is written beside the current
    one, which takes the size of the checkpoint twice; where the disk has no room for that, in place.
    ``in_place=True`` or ``False`` asks for one of them.

    What an earlier process left unfinished when it was killed is cleared away first. After a crash of the machine, and
    whenever the machine was started anew, everything is read and compared with its checksums.

    Raises MirrorError where there is no mirror, MirrorLockedError that names the process that has it, and
    MirrorDamagedError where it has to be rebuilt (``from_bucket``, or ``create`` with ``replace=True``).
    """

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
        self._broken: str | None = None
        if not os.path.exists(self._layout.state):
            raise MirrorError(
                f"{self._layout.root}: there is no mirror here",
                hint="make it: WeightMirror.create(base, root), or WeightMirror.from_bucket(...)",
            )
        self._lock = MirrorLock(self._layout.root, self._layout.hidden)
        try:
            self._state, self._shards = self._recover()
        except BaseException:
            self._lock.release()
            raise

    # -- making one ------------------------------------------------------------------------------------------------

    @classmethod
    def create(
        cls,
        base: str | os.PathLike[str],
        root: str | os.PathLike[str],
        *,
        version: str = "0",
        checksums: Mapping[str, str] | None = None,
        workers: int | None = None,
        in_place: bool | None = None,
        replace: bool = False,
        on_progress: OnProgress | None = None,
        disk: Disk | None = None,
    ) -> WeightMirror:
        """Make a mirror of the full checkpoint ``base`` in the new directory ``root``, and return it, open.

        ``checksums`` says which Adler-32 each tensor must have. With ``replace`` a mirror that is there already is
        replaced when the new one is complete.

        Raises what ``write_full_snapshot`` raises for ``base``; MirrorError if there is a mirror, or SnapshotError if
        there is anything else. Then nothing is left behind.
        """
        disk = disk or Disk()
        target = os.path.realpath(os.fspath(root))
        with replacing(target, replace) as place, staged_directory(place) as stage:
            write_full_snapshot(base, os.path.join(stage, "full"), checksums, workers=workers, on_progress=on_progress)
            settle(disk, stage, str(version))
        return cls(target, workers=workers, in_place=in_place, disk=disk)

    @classmethod
    def from_bucket(
        cls,
        root: str | os.PathLike[str],
        *,
        store: ObjectStore,
        location: Location,
        identity: str,
        version: str | None = None,
        workers: int | None = None,
        in_place: bool | None = None,
        disk: Disk | None = None,
    ) -> WeightMirror:
        """Make the mirror at ``root`` from what was published up to ``identity``, and return it, open.

        The chain is followed to its full snapshot by the manifests; every object is compared with the size and SHA-256
        of its manifest, every tensor with its Adler-32. A mirror that is there already (a damaged one) is replaced.
        ``version`` is the trainer's version that ``identity`` holds, where the manifest does not say it.

        Raises SnapshotChainError where the chain has a gap or a loop, SnapshotError for objects that are not what the
        manifest says, StorageError naming a refused permission.
        """
        from cwtrain.hotload._mirror_bucket import download, resolve_chain

        target = os.path.realpath(os.fspath(root))
        chain = resolve_chain(store, location, identity)
        with replacing(target, True) as place:
            work = f"{place}.download"
            try:
                for number, link in enumerate(chain):
                    fetched = os.path.join(work, str(number))
                    download(store, location, link, fetched)
                    reached = version if number == len(chain) - 1 and version is not None else link.version
                    if number == 0:
                        sums = link.tensors or None
                        cls.create(fetched, place, version=reached, checksums=sums, workers=workers, disk=disk).close()
                    else:
                        with cls(place, workers=workers, in_place=in_place, disk=disk) as mirror:
                            mirror._apply(open_delta(fetched, base=mirror._checkpoint()), reached, None)
                    shutil.rmtree(fetched)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return cls(target, workers=workers, in_place=in_place, disk=disk)

    # -- what it holds ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"WeightMirror({self._layout.root!r}, version={self.version!r})"

    @property
    def path(self) -> Path:
        """The directory of the full snapshot: the mirror's own. Valid until the next but one version is written."""
        return Path(self._layout.root)

    @property
    def snapshot_path(self) -> Path:
        """The same as ``path``, by the name of what it is for: publishing it cuts the chain, and copies nothing."""
        return self.path

    @property
    def version(self) -> str:
        """The version that it holds, as its delta wrote it."""
        return self._state.version

    @property
    def checksums(self) -> dict[str, str]:
        """Adler-32 of each tensor, 8 hex digits."""
        return {name: value for shard in self._shards.values() for name, value in shard.checksums.items()}

    def manifest(self, identity: str, **extra: Any) -> dict[str, Any]:
        """Return a manifest of the full snapshot ``identity`` with this version's checksums.

        ``extra`` keys are added (``run_id``, ``deployment_id``, ``objects`` as an upload reports them, others).
        """
        objects: Mapping[str, ObjectSum] = extra.pop("objects", {})
        values: dict[str, Any] = {"type": "FULL", "version": self.version, **extra}
        return build_manifest(identity=identity, objects=objects, tensors=self.checksums, **values)

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

    # -- following the trainer -------------------------------------------------------------------------------------

    def apply_delta(self, delta: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> DeltaReport:
        """Bring the mirror to the version of the delta directory ``delta``, and return what that took.

        Each new tensor is compared with the delta's checksum before the new version counts. Deltas in formats that the
        service does not take are applied too (not in place).

        Raises SnapshotChainError for a delta on another version, SnapshotLayoutError for one that is none or has a
        tensor that is not in the mirror, ChecksumError that names all tensors that do not come out right, SnapshotError
        if the disk is full. Then nothing has changed.
        """
        with self._mutex:
            self._check_usable()
            change = open_delta(delta, base=self._checkpoint())
            self._check_base(change)
            return self._apply(change, change.version, on_progress)

    def advance(self, version: str) -> None:
        """Say that the mirror's bytes are those of ``version`` too: an empty delta."""
        with self._mutex:
            self._check_usable()
            self._switch(str(version), {})

    def write_delta(
        self,
        new: str | os.PathLike[str],
        out: str | os.PathLike[str],
        *,
        version: int | str,
        memory_bytes: int | None = None,
        on_progress: OnProgress | None = None,
    ) -> DeltaStats:
        """Write the delta ``out`` from the mirror's version to the checkpoint ``new``, and advance to that: one pass.

        The delta is complete, under its name, before the mirror's new version counts; killed in between, the delta can
        be applied. Raises what ``cwtrain.hotload.delta.write_delta`` raises; then nothing has changed. Where the disk
        has no room for second files it takes two passes.
        """
        with self._mutex:
            self._check_usable()
            current = open_checkpoint(new)
            base = self._checkpoint()
            shards = list(self._shards.values())

            def write(target: SlotWriter | None) -> DeltaStats:
                return write_delta_between(
                    lambda: (base, current),
                    out,
                    version=version,
                    base_version=self.version,
                    workers=self._workers,
                    memory_bytes=memory_bytes,
                    on_progress=on_progress,
                    target=target,
                )

            if self._works_in_place(shards):
                stats = write(None)
                change = open_delta(out, base=base)
                self._apply(change, change.version, None)
                return stats
            with self._writing(shards, frozenset(base.tensors)) as writer:
                stats = write(writer)
                checksums = delta_checksums(out)
                done = writer.finish(checksums, frozenset(checksums))
            self._switch(stats.version, done)
            return stats

    def write_full_snapshot(self, dest: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> Path:
        """Copy the full snapshot to the new directory ``dest``, comparing each tensor with its checksum.

        Only for a copy that must outlive the next versions: to publish, ``path`` will do.
        """
        with self._mutex:
            self._check_usable()
            return write_full_snapshot(self.path, dest, self.checksums, workers=self._workers, on_progress=on_progress)

    # -- its life --------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let others open the mirror. Can be called twice."""
        with self._mutex:
            self._broken = self._broken or "it was closed"
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside ----------------------------------------------------------------------------------------------------

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

    def _apply(self, change: DeltaDirectory, version: str, on_progress: OnProgress | None) -> DeltaReport:
        started = time.monotonic()
        changed = frozenset(change.changes)
        touched = [shard for shard in self._shards.values() if not changed.isdisjoint(shard.header.tensors)]
        in_place = bool(touched) and self._works_in_place(touched)
        base_version = self.version
        checksums: dict[str, str] = {}
        tensors = [tensor for shard in touched for tensor in shard.tensors() if tensor.name in changed]
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
            raise SnapshotError(
                f"{self._layout.root}: the next version needs {missing} bytes more, {free} are free",
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
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SnapshotError(
                    f"{self._layout.root}: the disk is full; the mirror still holds version {self.version}",
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
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise SnapshotError(
                    f"{self._layout.root}: the disk is full; the mirror still holds version {self.version}",
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
