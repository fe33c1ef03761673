"""Send objects: hash, then one PUT or parts, then look at what the store kept where that may be wrong.

Nothing here decides what is sent.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TypedDict

import attrs

from cwtrain._waiting import passes
from cwtrain.errors import SnapshotConflictError, StorageError, StorageNotFoundError, WaitTimeoutError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage._buffers import Buffers
from cwtrain.storage._crew import INTERRUPTED_SECONDS, Crew, run_all, was_interrupted
from cwtrain.storage._learned import PUT, learned_of
from cwtrain.storage._meter import Meter
from cwtrain.storage._once import Once
from cwtrain.storage._open_uploads import KeptParts, UploadRecord, abort_quietly
from cwtrain.storage._source import PartBody, Source
from cwtrain.storage.plan import SHA256_KEY
from cwtrain.storage.report import ObjectDigest
from cwtrain.storage.store import ObjectStore

__all__ = ["PartSizes", "PartsGone", "Sender"]

_log = logging.getLogger("cwtrain.storage")

_MIB = 1 << 20
_MOST_PARTS = 10_000
_ABORT_SECONDS = 10.0


@attrs.frozen(kw_only=True)
class PartSizes:
    """Files above ``multipart_above_bytes`` go in parts of ``part_bytes``, or larger ones to stay under 10,000."""

    multipart_above_bytes: int = 128 * _MIB
    part_bytes: int = 64 * _MIB

    def of(self, size_bytes: int) -> int:
        """Return the part size for an object of that size; the size itself, at least 1, for a single PUT."""
        if size_bytes <= self.multipart_above_bytes:
            return max(1, size_bytes)
        least = -(-size_bytes // _MOST_PARTS)
        return max(self.part_bytes, -(-least // _MIB) * _MIB if least > self.part_bytes else 0)


class PartsGone(Exception):
    """The parts that an earlier upload left are not in the store any more: the object is to be sent from the start."""


@attrs.define(eq=False)
class _Transfer:
    file: SnapshotFile
    key: str
    source: Source
    upload_id: str | None = None
    etags: list[str] = attrs.field(factory=list)
    left: int = 0
    """Parts that are still to be sent, or to be read where an earlier upload sent them."""
    given_up: bool = False
    resumed: bool = False
    """Whether an earlier upload sent some of its parts."""
    torn: str | None = None
    """The ETag of an object of ours that never got its bytes, which this one takes the place of."""


class Sender:
    """Sends files with the threads of ``crew``. ``digests`` and ``done`` grow as objects arrive."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        crew: Crew,
        meter: Meter,
        record: UploadRecord,
        sizes: PartSizes,
        conditional: bool,
        kept: MutableMapping[str, KeptParts] | None = None,
    ) -> None:
        self._kept = {} if kept is None else kept
        self._store = store
        self._crew = crew
        self._meter = meter
        self._record = record
        self._sizes = sizes
        self._once = Once(store, stopped=crew.stopped, conditional=conditional)
        self._learned = learned_of(store)
        self._sure = self._learned.conditional and self._learned.keeps(PUT)
        self._waiting: deque[_Transfer] = deque()
        self._ready: deque[Callable[[], None]] = deque()
        self._hashing = 0
        self._buffers = Buffers()
        self.digests: dict[str, ObjectDigest] = {}
        self.done = 0
        self.resumed_bytes = 0
        """Bytes of parts that an earlier upload sent."""

    def digest(self, file: SnapshotFile) -> ObjectDigest:
        """Return size and SHA-256 of a file that is sent later. Raises SnapshotChangedError."""
        source = Source(file, part_bytes=max(1, file.size_bytes), stopped=self._crew.stopped)
        try:
            self.digests[file.name] = source.learn()
        finally:
            source.close()
        return self.digests[file.name]

    def send(self, files: Sequence[tuple[SnapshotFile, str]], *, torn: Mapping[str, str]) -> None:
        """Send each file to its key. On any error everything stops, open uploads are aborted, the first one is raised.

        They are kept where the store did not answer in time. ``torn`` has the ETags of the objects that are replaced,
        by name (see ``Standing``). ``kept`` uploads, by key, are gone on with where they are of the same bytes.

        Raises PartsGone where they are there no more, SnapshotChangedError, SnapshotConflictError when someone else
        wrote a key, StorageError, TransportError, WaitTimeoutError.
        """
        transfers = []
        for file, key in files:
            part_bytes = self._sizes.of(file.size_bytes)
            source = Source(file, part_bytes=part_bytes, stopped=self._crew.stopped)
            transfers.append(_Transfer(file, key, source, torn=torn.get(file.name)))
        self._waiting.extend(transfers)
        try:
            self._crew.run(self._pick, most=sum(transfer.source.parts for transfer in transfers))
        except BaseException as error:
            if not (isinstance(error, WaitTimeoutError) or passes(error)):
                self._give_up(transfers, INTERRUPTED_SECONDS if was_interrupted(error) else _ABORT_SECONDS)
            raise
        finally:
            for transfer in transfers:
                transfer.source.close()

    def _pick(self) -> Callable[[], None] | None:
        """Return the next task: hash ahead just enough to keep every thread sending."""
        enough = len(self._ready) >= self._crew.workers or self._hashing >= max(1, self._crew.workers // 2)
        if self._waiting and not enough:
            self._hashing += 1
            return partial(self._prepare, self._waiting.popleft())
        return self._ready.popleft() if self._ready else None

    def _prepare(self, transfer: _Transfer) -> None:
        try:
            digest = transfer.source.learn()
        finally:
            with self._crew.changed:
                self._hashing -= 1
        if self.digests.setdefault(transfer.file.name, digest) != digest:
            raise transfer.source.changed("it has other bytes than a moment ago")
        parts = transfer.source.parts
        if transfer.file.size_bytes <= self._sizes.multipart_above_bytes:
            tasks = [partial(self._put, transfer)]
        else:
            transfer.etags = [""] * parts
            if not self._go_on(transfer):
                self._open(transfer)
            transfer.left = parts
            send, skip = self._send_part, self._skip_part
            tasks = [partial(skip if etag else send, transfer, part) for part, etag in enumerate(transfer.etags)]
        with self._crew.changed:
            self._ready.extend(tasks)
            self._crew.changed.notify_all()

    def _open(self, transfer: _Transfer) -> None:
        with self._record.opening(transfer.key) as asked:
            transfer.upload_id = self._store.create_upload(transfer.key, metadata=self._metadata(transfer))
            self._record.opened(transfer.key, transfer.upload_id, asked)
        sha256 = self.digests[transfer.file.name].sha256
        self._record.keeps(KeptParts(transfer.key, transfer.upload_id, sha256, transfer.source.part_bytes))
        if transfer.given_up:  # it took so long that the upload ended meanwhile
            self._abort(transfer)

    def _go_on(self, transfer: _Transfer) -> bool:
        """Go on with the parts that an earlier upload sent of the same bytes, and return whether there are some."""
        kept = self._kept.pop(transfer.key, None)
        if kept is None:
            return False
        transfer.upload_id = kept.upload_id
        same = (kept.sha256, kept.part_bytes) == (self.digests[transfer.file.name].sha256, transfer.source.part_bytes)
        if not same or transfer.torn is not None:
            self._abort(transfer)
            return False
        transfer.resumed = True
        for part, etag in kept.etags.items():
            if part < len(transfer.etags):
                transfer.etags[part] = etag
                begin, end = transfer.source.span(part)
                self.resumed_bytes += end - begin
        _log.info("%s: %d of %d parts are there already", transfer.key, len(kept.etags), len(transfer.etags))
        return True

    def _skip_part(self, transfer: _Transfer, part: int) -> None:
        transfer.source.skip(part)
        self._end_part(transfer)

    def _put(self, transfer: _Transfer) -> None:
        def write(if_absent: bool) -> None:
            with self._body(transfer, 0) as body:
                self._store.put(
                    transfer.key, body, metadata=self._metadata(transfer), **_condition(transfer, if_absent)
                )

        written = self._write(transfer, write)
        self._arrived(transfer, looked=not written)

    def _send_part(self, transfer: _Transfer, part: int) -> None:
        assert transfer.upload_id is not None
        with self._body(transfer, part) as body:
            try:
                etag = self._store.upload_part(transfer.key, transfer.upload_id, part + 1, body)
            except StorageNotFoundError as error:
                raise self._gone(transfer, error) from error
        self._record.arrived(transfer.upload_id, part, etag)
        transfer.etags[part] = etag
        self._end_part(transfer)

    def _end_part(self, transfer: _Transfer) -> None:
        with self._crew.changed:
            transfer.left -= 1
            complete = not transfer.left
        if transfer.given_up:
            self._abort(transfer)  # this part arrived after the abort, and would be kept
        elif complete:
            self._complete(transfer)

    def _body(self, transfer: _Transfer, part: int) -> AbstractContextManager[PartBody]:
        return transfer.source.body(
            part, on_bytes=self._meter.add, block=self._meter.block_bytes, buffers=self._buffers
        )

    def _complete(self, transfer: _Transfer) -> None:
        upload_id = transfer.upload_id
        assert upload_id is not None

        def write(if_absent: bool) -> None:
            self._store.complete_upload(transfer.key, upload_id, transfer.etags, **_condition(transfer, if_absent))

        try:
            written = self._write(transfer, write, multipart=True)
        except StorageError as error:
            if error.code not in ("InvalidPart", "NoSuchUpload"):
                raise
            raise self._gone(transfer, error) from error
        if written:
            self._record.closed(upload_id)
        else:
            self._abort(transfer)  # the object is there; a refused Complete leaves the upload open
        transfer.upload_id = None
        self._arrived(transfer, looked=not written)

    def _gone(self, transfer: _Transfer, error: StorageError) -> Exception:
        """Return what to raise of an upload that is not there, or whose parts are not."""
        if not transfer.resumed:
            return error
        assert transfer.upload_id is not None
        self._record.closed(transfer.upload_id)
        return PartsGone(str(error))

    def _write(self, transfer: _Transfer, write: Callable[[bool], None], *, multipart: bool = False) -> bool:
        """Write an object if there is none, and return whether it was this call that did."""
        return self._once.write(transfer.key, write, lambda: self._equal(transfer), multipart=multipart)

    def _equal(self, transfer: _Transfer) -> bool:
        """Return whether the object is there and equal; raises SnapshotConflictError when it is other content."""
        info = self._store.head(transfer.key)
        if info is None:
            return False
        digest = self.digests[transfer.file.name]
        sha256 = (info.metadata or {}).get(SHA256_KEY, "").lower()
        if (info.size_bytes, sha256) == (digest.size_bytes, digest.sha256):
            return True
        raise SnapshotConflictError(
            f"s3://{self._store.bucket}/{transfer.key} was written by someone else meanwhile, with other content",
            objects=(transfer.file.name,),
            hint="a snapshot is never changed: publish under another identity",
        )

    def _arrived(self, transfer: _Transfer, *, looked: bool) -> None:
        """Note that an object is there; where something may still be wrong, compare what the store kept with it.

        Some stores keep a request's framing inside the object: then they do so with every object that is sent in the
        same way, so an upload whose PUTs were right speaks for the later ones to this store. Where a PUT may replace
        another object unseen, each is looked at; and so is an object in parts, whose Complete Ceph does without the
        condition. ``looked``: it was compared already.
        """
        whole = transfer.torn is None and transfer.file.size_bytes <= self._sizes.multipart_above_bytes
        if not (looked or (whole and self._sure and self._once.conditional)):
            self._look(transfer)
            if whole:
                self._learned.kept(PUT, transfer.file.size_bytes)
        transfer.source.close()
        with self._crew.changed:
            self.done += 1

    def _look(self, transfer: _Transfer) -> None:
        digest = self.digests[transfer.file.name]
        info = self._store.head(transfer.key)
        where = f"s3://{self._store.bucket}/{transfer.key}"
        if info is None or info.size_bytes != digest.size_bytes:
            kept = "nothing" if info is None else f"{info.size_bytes} bytes"
            raise StorageError(
                f"{where}: {digest.size_bytes} bytes were sent and the store kept {kept}",
                bucket=self._store.bucket,
                key=transfer.key,
                hint="make the client with cwtrain.storage.s3_client(), which adds no checksum trailers to bodies",
            )
        sha256 = (info.metadata or {}).get(SHA256_KEY)
        if sha256 is not None and sha256.lower() != digest.sha256:
            self._equal(transfer)
        if sha256 is None and self._learned.tell("keeps no metadata"):
            _log.warning(
                "%s keeps no user metadata: objects can be compared by the manifest only", self._store.endpoint
            )

    def _metadata(self, transfer: _Transfer) -> dict[str, str]:
        return {SHA256_KEY: self.digests[transfer.file.name].sha256}

    def _give_up(self, transfers: Sequence[_Transfer], seconds: float) -> None:
        """Abort whatever is open. What cannot be aborted in time is logged, and recorded for the next upload."""
        with self._crew.changed:
            self._waiting.clear()
            self._ready.clear()
            for transfer in transfers:
                transfer.given_up = True
            left = [transfer for transfer in transfers if transfer.upload_id is not None]
        tasks = [partial(self._abort, transfer) for transfer in left]
        if not run_all(tasks, threads=self._crew.workers, seconds=seconds):
            _log.warning(
                "not all open multipart uploads could be aborted in %g s, the next upload does it: %s",
                seconds,
                ", ".join(f"{transfer.upload_id} of {transfer.key}" for transfer in left),
            )

    def _abort(self, transfer: _Transfer) -> None:
        upload_id = transfer.upload_id
        if upload_id is not None and abort_quietly(self._store, transfer.key, upload_id):
            self._record.closed(upload_id)


class _Condition(TypedDict, total=False):
    if_absent: bool
    if_match: str | None


def _condition(transfer: _Transfer, conditional: bool) -> _Condition:
    """Return when an object may be written: where there is none, or in the place of the torn one that was seen."""
    if transfer.torn is None:
        return {"if_absent": conditional}
    return {"if_match": transfer.torn if conditional else None}
