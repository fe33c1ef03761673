"""Upload a snapshot's objects: claimed first, immutable, resumable, the index last."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from cwtrain.errors import ConfigError
from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.models.text import duration, printable, size
from cwtrain.storage._crew import Crew
from cwtrain.storage._learned import learned_of
from cwtrain.storage._meter import Meter
from cwtrain.storage._open_uploads import KeptParts, UploadRecord, abort_left_open
from cwtrain.storage._send import PartsGone, PartSizes, Sender
from cwtrain.storage.claim import Claim, claim_of, take_claim
from cwtrain.storage.location import Location
from cwtrain.storage.patient import deadline_of, stopping_at, waiting_out
from cwtrain.storage.plan import Standing, claim_name, claimed_by, conflict_error, stand
from cwtrain.storage.report import ObjectDigest, UploadProgress, UploadReport
from cwtrain.storage.store import ObjectStore
from cwtrain.waits import Wait, waiting

__all__ = ["PartSizes", "upload_objects"]

_log = logging.getLogger("cwtrain.storage")
_STILL_SECONDS = 5.0
"""Bytes that have not moved for so long are worth a word."""
_LATE_SECONDS = 1.0


def upload_objects(
    files: Sequence[SnapshotFile],
    *,
    store: ObjectStore,
    location: Location,
    identity: str,
    workers: int = 8,
    on_progress: Callable[[UploadProgress], None] | None = None,
    before_index: Callable[[Mapping[str, ObjectDigest]], None] | None = None,
    run_id: str | None = None,
    directory: str | None = None,
    manifest: Mapping[str, ObjectDigest] | None = None,
    max_bytes_per_second: float | None = None,
    sizes: PartSizes = PartSizes(),  # noqa: B008  (frozen)
    record_directory: str | None = None,
    others: Collection[str] = (),
    free: bool = False,
) -> UploadReport:
    """Upload ``files`` as the snapshot ``identity`` and return what was sent and what was there already.

    1. What stands under the identity is compared, by size and SHA-256: equal objects are kept, so that an interrupted
       upload goes on where it stopped. Anything else there raises SnapshotConflictError and nothing is written.
    2. A claim is written by one conditional PUT. Who loses it stops before any byte is sent; the same ``run_id``, and a
       repeat with the same directory, sizes and modification times, goes on under it.
    3. The missing objects are sent by at most ``workers`` threads, each hashed in one read while earlier ones are sent,
       and checked again over the bytes that are sent (a file that is ``held`` is not). What the store made of them is
       looked at, until one upload has shown that it keeps exactly what is sent; of objects in parts always.
    4. ``before_index`` is called with size and SHA-256 of every object, the index included: a manifest is written here.
    5. The index goes last, so no reader ever sees half a snapshot.

    ``on_progress`` is called a few times a second in the caller's thread. ``manifest`` stands in for objects without
    our metadata; without it the one in the bucket does. ``directory`` names the snapshot's directory for the claim
    (found from the paths without it). ``max_bytes_per_second`` limits the bandwidth, ``sizes`` says what goes in parts.
    ``record_directory`` is where open multipart uploads are noted for the next run (the temporary directory).
    ``others`` names objects of the snapshot that other processes of the same ``run_id`` send: they may be there or not.
    ``free``: the caller has just looked (``plan_upload``), and no object stands under the identity. Where the claim's
    PUT is known to tell who was first, nobody looks again then.

    Outages of the store are waited out (see ``PatientStore``, which may have a deadline); what arrived stays.
    The first refusal stops the rest: open multipart uploads are aborted and that error is raised; Ctrl-C, and whatever
    ``on_progress`` raises, do the same. Where the time was over, or the outage did not end, they are kept: the next
    upload from this machine goes on with their parts. Raises SnapshotChangedError when a file changes after inspection,
    SnapshotConflictError, StorageError naming the refused permission, TransportError when the store does not answer,
    WaitTimeoutError when the time is over.
    """
    store = waiting_out(store)
    if workers < 1:
        raise ConfigError(f"workers is {workers}", hint="give at least one")
    if max_bytes_per_second is not None and not max_bytes_per_second > 0:
        raise ConfigError(f"max_bytes_per_second is {max_bytes_per_second}", hint="give more than zero, or None")
    if workers > store.max_connections:
        _log.warning(
            "%d workers and %d connections: only so many are used; make the client with max_pool_connections=%d",
            workers,
            store.max_connections,
            workers,
        )
        workers = store.max_connections
    claim = claim_of(files, run_id=run_id, directory=directory)
    for go_on in (True, False):
        upload = _Upload(files, store, location, identity, workers, on_progress, max_bytes_per_second, others)
        try:
            return upload.run(
                claim,
                manifest=manifest,
                before_index=before_index,
                sizes=sizes,
                record_directory=record_directory,
                free=free and go_on,
                go_on=go_on,
            )
        except PartsGone as error:
            _log.warning("parts that an earlier upload sent are gone, so these objects are sent anew: %s", error)
    raise AssertionError("parts of an earlier upload were used twice")


class _Upload:
    def __init__(
        self,
        files: Sequence[SnapshotFile],
        store: ObjectStore,
        location: Location,
        identity: str,
        workers: int,
        on_progress: Callable[[UploadProgress], None] | None,
        max_bytes_per_second: float | None,
        others: Collection[str],
    ) -> None:
        self._files = files
        self._others = others
        self._location = location
        self._identity = identity
        self._on_progress = on_progress
        self._crew = Crew(workers, on_tick=self._tick)
        self._store = stopping_at(store, self._crew.stopped)
        self._deadline = deadline_of(store)
        self._meter = Meter(stopped=self._crew.stopped, max_bytes_per_second=max_bytes_per_second)
        self._total = 0
        self._reused = 0
        self._sender: Sender | None = None
        self._wait: Wait | None = None

    def run(
        self,
        claim: Claim,
        *,
        manifest: Mapping[str, ObjectDigest] | None,
        before_index: Callable[[Mapping[str, ObjectDigest]], None] | None,
        sizes: PartSizes,
        record_directory: str | None,
        free: bool,
        go_on: bool,
    ) -> UploadReport:
        """Do the whole of ``upload_objects``."""
        with waiting(self._in_words, seconds=self._deadline.left) as self._wait:
            return self._run(
                claim,
                manifest=manifest,
                before_index=before_index,
                sizes=sizes,
                record_directory=record_directory,
                free=free,
                go_on=go_on,
            )

    def _run(
        self,
        claim: Claim,
        *,
        manifest: Mapping[str, ObjectDigest] | None,
        before_index: Callable[[Mapping[str, ObjectDigest]], None] | None,
        sizes: PartSizes,
        record_directory: str | None,
        free: bool,
        go_on: bool,
    ) -> UploadReport:
        decides = learned_of(self._store).conditional
        if free and decides:
            standing = Standing(equal={}, reasons={}, torn={})
        else:
            standing = self._stand(claim, manifest, claim_next=decides)
        conditional = new = True
        if standing.missing(self._files):
            held, conditional = take_claim(self._store, self._location, self._identity, claim)
            if held.uuid != claim.uuid:
                new = False
                if not held.covers(claim):
                    reasons = {claim_name(self._location, self._identity): claimed_by(held)}
                    raise conflict_error(self._location, self._identity, reasons)
                # Its earlier holder may have gone on since we looked.
                standing = self._stand(claim, manifest, before=standing)
        missing = standing.missing(self._files)
        self._total = sum(file.size_bytes for file in missing)
        self._reused = len(self._files) - len(missing)
        digests = dict(standing.equal)
        kept: dict[str, KeptParts] = {}
        record = UploadRecord(self._store, self._location, self._identity, directory=record_directory)
        try:
            if missing:
                new = new and len(missing) == len(self._files) and not standing.torn
                wanted = {self._location.key(self._identity, file.name) for file in missing} if go_on else ()
                kept = abort_left_open(record, self._store, self._location, self._identity, new=new, wanted=wanted)
            sender = self._sender = Sender(
                self._store,
                crew=self._crew,
                meter=self._meter,
                record=record,
                sizes=sizes,
                conditional=conditional,
                kept=kept,
            )
            last = [file for file in missing if file.name == INDEX_NAME]
            self._send(sender, [file for file in missing if file.name != INDEX_NAME], standing.torn)
            digests |= sender.digests
            for file in last:
                digests[file.name] = sender.digest(file)
            ordered = {file.name: digests[file.name] for file in self._files}
            if before_index is not None:
                before_index(ordered)
            self._send(sender, last, {})
        finally:
            record.close()
        sent = {file.name for file in missing}
        return UploadReport(
            uri=self._location.uri(self._identity),
            uploaded=tuple(file.name for file in self._files if file.name in sent),
            reused=tuple(file.name for file in self._files if file.name not in sent),
            uploaded_bytes=self._total - sender.resumed_bytes,
            reused_bytes=sum(file.size_bytes for file in self._files if file.name not in sent) + sender.resumed_bytes,
            seconds=self._meter.seconds,
            digests=ordered,
        )

    def _stand(
        self,
        claim: Claim,
        manifest: Mapping[str, ObjectDigest] | None,
        *,
        before: Standing | None = None,
        claim_next: bool = False,
    ) -> Standing:
        standing = stand(
            self._files,
            store=self._store,
            location=self._location,
            identity=self._identity,
            claim=claim,
            crew=self._crew,
            manifest=manifest,
            before=before,
            others=self._others,
            claim_next=claim_next,
        )
        if standing.reasons:
            raise conflict_error(self._location, self._identity, standing.reasons)
        return standing

    def _send(self, sender: Sender, files: Sequence[SnapshotFile], torn: Mapping[str, str]) -> None:
        if files:
            sender.send([(file, self._location.key(self._identity, file.name)) for file in files], torn=torn)

    def _in_words(self) -> str:
        what = f"uploading {printable(self._identity)}"
        if not self._total:
            return f"{what}: comparing with what is in the bucket"
        still = self._meter.still_seconds
        moves = f", nothing has moved for {duration(round(still))}" if still >= _STILL_SECONDS else ""
        return f"{what}: {size(self._meter.sent_bytes)} of {size(self._total)} sent{moves}"

    def _tick(self) -> None:
        # The thread that meets the end says more; it may stand where nothing wakes it.
        if self._deadline.late(_LATE_SECONDS):
            self._deadline.check(f"sending {self._identity}")
        if self._wait is not None:
            self._wait.beat()
        if self._on_progress is None:
            return
        self._on_progress(
            UploadProgress(
                sent_bytes=self._meter.sent_bytes + (self._sender.resumed_bytes if self._sender else 0),
                total_bytes=self._total,
                seconds=self._meter.seconds,
                objects_done=self._reused + (self._sender.done if self._sender else 0),
                objects=len(self._files),
                bytes_per_second=self._meter.bytes_per_second(),
            )
        )
