"""A byte-exact local copy of what the trainer last wrote, which is at any time a full snapshot ready to be published.

    from cwtrain.hotload import WeightMirror

    with WeightMirror.create("/ckpt/base", "/scratch/mirror") as mirror:
        mirror.apply_delta("/ckpt/weight_v000001")      # checks every changed tensor
        loader.publish(mirror, identity="run-7-full")   # the chain is cut here: an upload, with no copy before it

It survives being killed at any instant, at the old or the new version. How, and what it costs in disk, is told in
``docs/explanation/mirror.md``.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from cwtrain.hotload._mirror_core import DeltaReport, MirrorCore, OnProgress
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_make import replacing, settle
from cwtrain.hotload._mirror_slots import SlotWriter
from cwtrain.hotload.delta import DeltaStats, write_delta_between, write_full_snapshot
from cwtrain.snapshots._write import naming_full_disk, staged_directory
from cwtrain.snapshots.changes import open_delta
from cwtrain.snapshots.checkpoint import open_checkpoint
from cwtrain.snapshots.manifest import ObjectSum, build_manifest

if TYPE_CHECKING:
    from cwtrain.storage import Location, ObjectStore

__all__ = ["DeltaReport", "WeightMirror"]


class WeightMirror(MirrorCore):
    """The mirror in the directory ``root``, opened: nobody else can use it until ``close`` (or leaving ``with``).

    ``workers`` threads apply deltas (default: one for each usable core). The next version is written beside the current
    one, which takes the size of the checkpoint twice; where the disk has no room for that, in place.
    ``in_place=True`` or ``False`` asks for one of them.

    What an earlier process left unfinished when it was killed is cleared away first. After a crash of the machine, and
    whenever the machine was started anew, everything is read and compared with its checksums.

    Raises MirrorError where there is no mirror, MirrorLockedError that names the process that has it, and
    MirrorDamagedError where it has to be rebuilt (``from_bucket``, or ``create`` with ``replace=True``).
    """

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
        with naming_full_disk(target), replacing(target, replace) as place, staged_directory(place) as stage:
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
        from cwtrain.storage.patient import waiting_out

        target = os.path.realpath(os.fspath(root))
        store = waiting_out(store)
        chain = resolve_chain(store, location, identity)
        with naming_full_disk(target), replacing(target, True) as place:
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
                            base = mirror._checkpoint()
                            mirror._apply(open_delta(fetched, base=base), base, reached, None)
                    shutil.rmtree(fetched)
            finally:
                shutil.rmtree(work, ignore_errors=True)
        return cls(target, workers=workers, in_place=in_place, disk=disk)

    # -- what it holds ---------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"WeightMirror({self._layout.root!r}, version={self.version!r})"

    def __fspath__(self) -> str:
        """Return ``path``: an open mirror can be given where a checkpoint's directory is asked for."""
        return self._layout.root

    @property
    def path(self) -> Path:
        """The directory of the full snapshot: the mirror's own. Valid until the next but one version is written."""
        return Path(self._layout.root)

    @property
    def snapshot_path(self) -> Path:
        """The same as ``path``, by the name of what it is for: publishing it cuts the chain, and copies nothing."""
        return self.path

    def manifest(self, identity: str, **extra: Any) -> dict[str, Any]:
        """Return a manifest of the full snapshot ``identity`` with this version's checksums.

        ``extra`` keys are added (``run_id``, ``deployment_id``, ``objects`` as an upload reports them, others).
        """
        objects: Mapping[str, ObjectSum] = extra.pop("objects", {})
        values: dict[str, Any] = {"type": "FULL", "version": self.version, **extra}
        return build_manifest(identity=identity, objects=objects, tensors=self.checksums, **values)

    # -- following the trainer -------------------------------------------------------------------------------------

    def apply_delta(self, delta: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> DeltaReport:
        """Bring the mirror to the version of the delta directory ``delta``, and return what that took.

        Each new tensor is compared with the delta's checksum before the new version counts. Deltas in formats that the
        service does not take are applied too (not in place).

        Raises SnapshotChainError for a delta on another version, SnapshotLayoutError for one that is none or has a
        tensor that is not in the mirror, ChecksumError that names all tensors that do not come out right, SnapshotError
        if the disk is full. Then nothing has changed.
        """
        with self._mutex, naming_full_disk(self._layout.root):
            self._check_usable()
            base = self._checkpoint()
            change = open_delta(delta, base=base)
            self._check_base(change)
            return self._apply(change, base, change.version, on_progress)

    def advance(self, version: str) -> None:
        """Say that the mirror's bytes are those of ``version`` too: an empty delta."""
        with self._mutex, naming_full_disk(self._layout.root):
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
        with self._mutex, naming_full_disk(self._layout.root):
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
                self._apply(change, base, change.version, None)
                return stats
            with self._writing(shards, frozenset(base.tensors)) as writer:
                stats = write(writer)
                done = writer.finish(stats.checksums, frozenset(stats.checksums))
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
