"""Tensors in, a snapshot in the bucket out: each one encoded, hashed and uploaded while the next is being produced.

    from cwtrain.hotload import MemoryBase, SnapshotWriter

    base = MemoryBase()                                  # what the next delta applies to
    with SnapshotWriter(store, location, "run-v000001", kind="full", base=base, side_files="/ckpt/base") as writer:
        for name, tensor in state_dict.items():
            writer.add(name, tensor)                     # numpy, torch, or any buffer
        written = writer.finalise([writer.close()])

    with SnapshotWriter(store, location, "run-v000002", kind="delta", base=base) as writer:
        ...

Nothing touches the disk. Several ranks write one snapshot together: each makes a writer with the same ``upload_id`` and
its own ``rank``, adds its own tensors and closes; the caller's own collective carries the small receipts to rank 0,
whose ``finalise`` writes manifest and index. Until then no reader sees anything.

``store`` and ``location`` are those of the deployment (``HotLoader.store``, ``HotLoader.location``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn, Self

from cwtrain._process import OneProcess
from cwtrain._waiting import Deadline
from cwtrain.config import StorageConfig
from cwtrain.errors import ConfigError, CWTrainError, SnapshotError
from cwtrain.hotload._writer_arguments import (
    check_sending,
    delta_bytes,
    encoders,
    kind_of,
    piece_bytes,
    predecessor,
    side_directory,
    stream_sizes,
)
from cwtrain.hotload._writer_index import streamed_index
from cwtrain.hotload._writer_receipts import ShardReceipt, WrittenSnapshot, check_receipts, written_snapshot
from cwtrain.hotload._writer_shards import ShardSink
from cwtrain.hotload._writer_side import read_config, read_side_files
from cwtrain.hotload._writer_tied import adler32_of, may_be_tied, not_in_base, tied_names
from cwtrain.hotload.bases import BaseTensors, TensorType
from cwtrain.hotload.upload import require_bytes
from cwtrain.models.snapshot import INDEX_NAME, SnapshotKind
from cwtrain.snapshots._inputs import TensorInput, checkpoint_input, tensor_input
from cwtrain.snapshots._model_rules import quantisation_trouble, wrapped_names
from cwtrain.snapshots._pipeline import DeltaPipeline, FullPipeline
from cwtrain.snapshots.checkpoint import open_checkpoint
from cwtrain.snapshots.header import unfit_names
from cwtrain.snapshots.identity import check_identity
from cwtrain.snapshots.manifest import build_manifest, manifest_to_bytes
from cwtrain.storage import Location, ObjectDigest, ObjectStore
from cwtrain.storage._crew import was_interrupted
from cwtrain.storage.patient import patient
from cwtrain.storage.stream import StreamSizes, StreamUpload

__all__ = ["ShardReceipt", "SnapshotWriter", "WrittenSnapshot", "new_upload_id"]

_log = logging.getLogger("cwtrain.hotload")

DEFAULT_MEMORY_BYTES = 320 << 20
_JOBS_A_WORKER = 3


def new_upload_id() -> str:
    """Return what the ranks of one snapshot have in common: made on one of them and given to all."""
    return str(uuid.uuid4())


class SnapshotWriter(OneProcess):
    """One rank's part of a snapshot that is uploaded while it is made.

    ``kind`` is ``"full"`` or ``"delta"``. ``base`` is what a delta applies to, and it follows (see ``bases``); given
    with a full snapshot it is filled. ``previous_identity`` of a delta is ``base.identity`` where that is known.
    ``side_files`` is a directory with ``config.json``, tokenizer and so on: rank 0 of a full snapshot needs it. With
    ``ranks`` above 1, ``upload_id`` must be the same on all (``new_upload_id``). ``names`` says which tensors there
    must be in the end; for a delta those of the base are asked for anyway.

    ``memory_bytes`` bounds what the process needs beside the base, the interpreter and its libraries included.
    ``workers`` threads encode, the caller's among them (without it one for each started GiB of a delta's tensors, up to
    8), and ``upload_workers`` send. ``shard_bytes`` is how large a shard gets before the next one is begun (without it
    they grow to 32 MiB, or more with more memory). ``max_bytes_per_second`` limits the bandwidth (without it
    ``CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND`` does). ``deadline`` is how many seconds all of it may take, from here to the
    end of ``finalise``: requests under way are cut then, and WaitTimeoutError is raised; until then outages of the
    store are waited out. ``sizes`` says how objects are cut, for tests.

    Raises ConfigError and SnapshotError for arguments that do not fit together. Nothing is written before the first
    shard is full, and then the claim comes first. Its methods are for one thread.
    """

    _instead = "make one there: with the same upload_id and a rank of its own it writes a part of the same snapshot"

    def __init__(
        self,
        store: ObjectStore,
        location: Location,
        identity: str,
        *,
        kind: SnapshotKind | str,
        base: BaseTensors | None = None,
        previous_identity: str | None = None,
        rank: int = 0,
        ranks: int = 1,
        upload_id: str | None = None,
        run_id: str | None = None,
        deployment_id: str | None = None,
        version: str | int | None = None,
        side_files: str | os.PathLike[str] | None = None,
        names: Collection[str] | None = None,
        memory_bytes: int = DEFAULT_MEMORY_BYTES,
        workers: int | None = None,
        upload_workers: int = 4,
        shard_bytes: int | None = None,
        max_bytes_per_second: float | None = None,
        deadline: float | None = None,
        sizes: StreamSizes | None = None,
    ) -> None:
        self.identity = check_identity(identity)
        self.kind = kind_of(kind)
        self._full = self.kind is SnapshotKind.FULL
        self._rank, self._ranks = rank, ranks
        if not 0 <= rank < ranks:
            raise ConfigError(f"rank={rank} is not one of ranks={ranks}", hint="ranks are counted from 0")
        if ranks > 1 and upload_id is None:
            raise ConfigError(
                f"{ranks} ranks write {identity} together, but upload_id= is not given",
                hint="make one with new_upload_id() on rank 0 and give it to all ranks",
            )
        self.upload_id = upload_id or new_upload_id()
        self.previous_identity = predecessor(identity, base, previous_identity, full=self._full)
        self._side_files = side_directory(side_files, needed=self._full and rank == 0)
        check_sending(upload_workers=upload_workers, shard_bytes=shard_bytes, max_bytes_per_second=max_bytes_per_second)
        work = delta_bytes(base, ranks) if base is not None and not self._full else None
        count = encoders(workers, memory_bytes, work_bytes=work)
        self._sizes = sizes or stream_sizes(memory_bytes, count)
        self._location, self._base = location, base
        self._names = (names,) if isinstance(names, str) else names
        self._run_id, self._deployment_id, self._version = run_id, deployment_id, version
        self._types: dict[str, TensorType] = {}
        self._added: set[str] = set()
        self._tied: dict[str, tuple[TensorType, str]] = {}
        """Names that the base does not have, with what they hold: an equal tensor of the base stands for each."""
        fixed = base is not None and (not self._full or (base.shared and not base.sparse))
        self._held = base.types() if base is not None and fixed else None
        self._error: BaseException | None = None
        self._receipt: ShardReceipt | None = None
        self._done = False
        self._began = self._last = time.perf_counter()
        self._spent = {"produce": 0.0, "add": 0.0, "close": 0.0}
        if max_bytes_per_second is None:
            max_bytes_per_second = StorageConfig.from_env().max_bytes_per_second
        if base is not None and not self._full:
            self._types.update(base.types())
            if not getattr(base, "written", False) and (sums := getattr(base, "checksums", None)) is not None:
                require_bytes(self.identity, self.previous_identity, sums, store=store, location=location)
        self._store = store
        self._upload = StreamUpload(
            store=store if deadline is None else patient(store, deadline=Deadline(deadline, name="deadline")),
            location=location,
            identity=identity,
            upload_id=self.upload_id,
            run_id=run_id,
            workers=upload_workers,
            sizes=self._sizes,
            max_bytes_per_second=max_bytes_per_second,
        )
        self._sink = ShardSink(
            self._upload,
            rank=rank,
            full=self._full,
            most_bytes=shard_bytes or self._sizes.single_bytes,
            fixed=shard_bytes is not None,
            large_bytes=self._sizes.single_bytes,
            kind_of=self._types.__getitem__,
        )
        self._pipeline: DeltaPipeline | FullPipeline
        if self._full or base is None:
            self._pipeline = FullPipeline(self._sink, base, workers=count)
        else:
            chunk_bytes = piece_bytes(memory_bytes, count)
            waiting = _JOBS_A_WORKER * count
            self._pipeline = DeltaPipeline(self._sink, base, workers=count, waiting=waiting, chunk_bytes=chunk_bytes)
        if base is not None:
            base.begin(fill=self._full)

    def add(self, name: str, tensor: Any, *, dtype: str | None = None, shape: Sequence[int] | None = None) -> None:
        """Take a tensor. When this returns its bytes have been read: the caller may change or free it.

        A numpy array, a torch tensor (on any device), or anything with the buffer protocol; scalars and non-contiguous
        ones too. ``dtype`` and ``shape`` say what raw bytes are, or that integers hold the bits of what numpy lacks
        (16-bit words of ``BF16``); a tensor that says itself what it is keeps that. Blocks while the memory budget is
        in use.

        Raises SnapshotError for a tensor that comes twice, does not fit the base or is said to be of another dtype than
        its own, and whatever went wrong with
        earlier ones meanwhile: SnapshotConflictError where the identity is taken, StorageError naming a refused
        permission, TransportError. Everything is aborted then.
        """
        with self._guarded("add"):
            self._take(name, tensor_input(name, tensor, dtype=dtype, shape=shape))

    def add_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Add every tensor of a full checkpoint on the disk: a directory, one file, or a mirror's ``path``.

        Read in blocks, once (a tensor that is larger than a shard twice, from the page cache); no copy is made on the
        disk. Raises as ``add``, and SnapshotChangedError when a file changes meanwhile.
        """
        with self._guarded("add"):
            for tensor in open_checkpoint(path).tensors.values():
                self._take(tensor.name, checkpoint_input(tensor))

    def _take(self, name: str, found: TensorInput) -> None:
        if self._receipt is not None:
            raise SnapshotError(f"{self.identity}: tensor {name!r} comes after close()")
        self._upload.check()
        kind = TensorType(found.dtype, found.shape, found.size_bytes)
        if (held := self._held) is not None and name not in self._added and may_be_tied(name, kind, held):
            self._tied[name] = (kind, adler32_of(found))
            self._added.add(name)
            return
        self._accept(name, kind)
        self._pipeline.add(name, found.size_bytes, found.pieces)

    def close(self, *, raises: bool = True) -> ShardReceipt:
        """Wait until everything that was added is in the bucket, and return the receipt for ``finalise``.

        With ``raises=False`` a failure, also one of ``add``, comes as a receipt whose ``error`` says why, for a
        collective that every rank must reach; ``finalise`` raises it then.
        """
        try:
            with self._guarded("close"):
                if self._receipt is None:
                    if self._base is not None and not self._base.shared and not self._full:
                        self._check_all_added(self._base.types().keys())
                    self._pipeline.finish()
                    self._settle_tied()
                    self._compare_with_config()
                    self._check_left_out()
                    self._sink.finish()
                    self._upload.wait()
            if self._receipt is None:
                self._receipt = self._make_receipt(self._upload.digests)
            return self._receipt
        except Exception as error:
            if raises:
                raise
            return self.failure(error)

    def failure(self, error: BaseException | str) -> ShardReceipt:
        """Abort, and return a receipt that says that this rank failed: for an error outside of the writer."""
        self._check_process()
        self._fail(error if isinstance(error, BaseException) else SnapshotError(error))
        return ShardReceipt(
            identity=self.identity,
            upload_id=self.upload_id,
            kind=self.kind,
            rank=self._rank,
            ranks=self._ranks,
            previous_identity=self.previous_identity,
            error=f"{type(error).__name__}: {error}" if isinstance(error, BaseException) else error,
        )

    def finalise(self, receipts: Sequence[ShardReceipt]) -> WrittenSnapshot:
        """Write side files, manifest and, last, the index, on rank 0 with the receipts of all ranks.

        Nothing of that is written where one rank failed, a tensor is missing or came from two ranks (SnapshotError), or
        nothing changed. This rank's base holds the new version from then on; other ranks call ``commit``.
        """
        with self._guarded("finalise"):
            if self._rank != 0:
                raise ConfigError(f"rank {self._rank} cannot finalise {self.identity}", hint="rank 0 does")
            began = time.perf_counter()
            receipts = sorted(receipts, key=lambda one: one.rank)
            self._check(receipts)
            weight_map = {name: shard for one in receipts for name, shard in one.weight_map.items()}
            objects: dict[str, ObjectDigest] = {}
            if weight_map or self._full:
                objects = self._publish(receipts, weight_map)
            ended = time.perf_counter()
            written = written_snapshot(
                receipts,
                uri=self._location.uri(self.identity),
                previous_identity=self.previous_identity,
                objects=objects,
                seconds={"finalise": ended - began, "total": ended - self._began},
            )
            self._commit(written)
            return written

    def commit(self, written: WrittenSnapshot) -> None:
        """Let this rank's base hold the snapshot that rank 0 finalised."""
        with self._guarded("commit"):
            if written.identity != self.identity:
                raise SnapshotError(f"{written.identity} is not {self.identity}, which this writer wrote")
            self._commit(written)

    def abort(self) -> None:
        """Stop, abort what is open in the bucket, and give the base up. May be called at any time, also twice.

        Shards that arrived stay (without an index nobody reads them, and ``cwtrain hotload gc`` removes them); the
        identity is not used again: see ``cwtrain.hotload.streamed.free_identity``. Does nothing in a forked process.
        """
        if not self._done and not self._in_fork:
            self._fail(SnapshotError(f"writing {self.identity} was aborted"))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Abort unless the snapshot was finalised, or committed."""
        if error is not None and was_interrupted(error) and not self._done:
            self._fail(error)
        self.abort()

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _guarded(self, what: str) -> Iterator[None]:
        """Time a call, and abort everything if it fails."""
        self._check_process()
        if self._error is not None:
            self._raise_again(self._error)
        if self._done:
            raise SnapshotError(f"{self.identity} is finalised already", hint="make a writer for the next snapshot")
        began = time.perf_counter()
        self._spent["produce"] += began - self._last if what in ("add", "close") else 0.0
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise
        self._last = time.perf_counter()
        self._spent[what] = self._spent.get(what, 0.0) + self._last - began

    def _raise_again(self, error: BaseException) -> NoReturn:
        if isinstance(error, CWTrainError):
            raise error
        raise SnapshotError(f"writing {self.identity} failed before: {error}") from error

    def _fail(self, error: BaseException) -> None:
        if self._error is not None:
            return
        self._error = error
        self._upload.abort(error)
        self._pipeline.stop()
        if self._base is not None and not self._done:
            self._base.abandon()

    def _accept(self, name: str, kind: TensorType) -> None:
        if unfit_names([name]):
            raise SnapshotError(
                f"{name!r} is no name of a tensor: it is blank or has control characters",
                hint="rename the tensor where the state dict is made",
            )
        if name in self._added:
            raise SnapshotError(f"tensor {name!r} comes twice", hint="add each tensor once, on one rank")
        if wrapped := wrapped_names([name]):
            raise SnapshotError(wrapped)
        if self._full:
            self._types[name] = kind
            if self._base is not None:
                self._base.declare(name, kind)
        elif (known := self._types.get(name)) != kind:
            raise not_in_base(name, kind, known, self.previous_identity)
        self._added.add(name)

    def _settle_tied(self) -> None:
        """Leave out names that the base does not have where they are tied to a tensor that is in it, and equal."""
        for name, (kind, checksum) in self._tied.items():
            equal = (
                other
                for other, encoded in self._sink.results.items()
                if encoded.checksum == checksum and self._types[other] == kind and tied_names(name, other)
            )
            if (other := next(equal, None)) is None:
                raise not_in_base(name, kind, None, self.previous_identity)
            _log.info("%s: %s is left out: it is tied to %s, and equal", self.identity, name, other)

    def _check_all_added(self, names: Collection[str]) -> None:
        if missing := sorted(set(names) - self._added):
            raise SnapshotError(
                f"{self.identity}: {len(missing)} tensors of the base were not added, for example {missing[0]!r}",
                hint="add all tensors, changed or not: one that is left out is not 'unchanged'",
            )

    def _compare_with_config(self) -> None:
        """Warn where the config.json that goes up with these tensors says another quantisation than they have."""
        if self._full and self._ranks == 1 and self._side_files is not None:
            dtypes = {name: kind.dtype for name, kind in self._types.items()}
            if trouble := quantisation_trouble(read_config(self._side_files), dtypes):
                _log.warning("%s: %s", self.identity, trouble)

    def _check_left_out(self) -> None:
        """Check that what this delta leaves out is what its predecessor holds, where only the caller says so."""
        if self._full or getattr(self._base, "written", False):
            return
        same = {name: encoded.checksum for name, encoded in self._sink.results.items() if not encoded.frame_bytes}
        require_bytes(self.identity, self.previous_identity, same, store=self._store, location=self._location)

    def _make_receipt(self, objects: Mapping[str, ObjectDigest]) -> ShardReceipt:
        results = self._sink.results
        spent = {
            **self._spent,
            "encode": self._pipeline.busy_seconds,
            "upload": self._upload.busy_seconds,
            "blocked": self._upload.blocked_seconds,
        }
        return ShardReceipt(
            identity=self.identity,
            upload_id=self.upload_id,
            kind=self.kind,
            rank=self._rank,
            ranks=self._ranks,
            previous_identity=self.previous_identity,
            objects=dict(objects),
            weight_map=dict(self._sink.weight_map),
            checksums={name: encoded.checksum for name, encoded in results.items()},
            raw_bytes=sum(self._types[name].size_bytes for name in results),
            changed_bytes=sum(encoded.changed_bytes for encoded in results.values()),
            seconds=spent,
        )

    def _check(self, receipts: Sequence[ShardReceipt]) -> None:
        expected = self._names
        if expected is None and self._base is not None and self._base.shared:
            expected = self._base.types().keys()
        check_receipts(
            receipts,
            identity=self.identity,
            upload_id=self.upload_id,
            kind=self.kind,
            ranks=self._ranks,
            previous_identity=self.previous_identity,
            expected=expected,
        )
        if self._full and not any(one.weight_map for one in receipts):
            raise SnapshotError(f"{self.identity}: a full snapshot without tensors", hint="add the model's tensors")

    def _publish(self, receipts: Sequence[ShardReceipt], weight_map: Mapping[str, str]) -> dict[str, ObjectDigest]:
        """Write everything that is left, the index last, and return all objects."""
        upload = self._upload
        sides = read_side_files(self._side_files) if self._side_files is not None else {}
        for name, data in sides.items():
            upload.begin(name).finish(data)
        upload.wait()
        objects = {name: digest for one in receipts for name, digest in one.objects.items()}
        objects |= {name: upload.digests[name] for name in sides}
        index = streamed_index(
            self.identity, self.previous_identity, weight_map, sum(one.raw_bytes for one in receipts)
        )
        objects[INDEX_NAME] = upload.digest_of(index)
        manifest = build_manifest(
            identity=self.identity,
            objects=objects,
            tensors={name: value for one in receipts for name, value in one.checksums.items()},
            type="FULL" if self._full else "INCREMENTAL",
            previous_identity=self.previous_identity,
            deployment_id=self._deployment_id,
            run_id=self._run_id,
            version=self._version,
            upload_id=self.upload_id,
        )
        upload.put_manifest(manifest_to_bytes(manifest))
        upload.put(INDEX_NAME, index)
        return objects

    def _commit(self, written: WrittenSnapshot) -> None:
        self._upload.close()
        version = None if self._version is None else str(self._version)
        if self._base is not None:
            identity = self.previous_identity if written.empty else self.identity
            checksums = {name: written.checksums[name] for name in self._sink.weight_map}
            self._base.commit(identity or self.identity, version=version, checksums=checksums)
        self._done = True
