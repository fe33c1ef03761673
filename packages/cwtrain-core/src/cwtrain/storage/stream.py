"""Objects that are sent while they are being made, whose first bytes are known last: shards with their header.

    upload = StreamUpload(store=store, location=location, identity="run-v000007", upload_id=new_id, run_id="run")
    shard = upload.begin("model-r00000-00000.safetensors")
    shard.write(frame)                  # copied into a block of a bounded pool; waits while the pool is in use
    shard.finish(header)                # goes on in the background
    upload.wait()                       # upload.digests has size and SHA-256 of all

A small object is one PUT when it is finished. A larger one goes in parts as it grows; its first part, which the header
belongs to, is held back and sent last, so no room has to be reserved for the header. SHA-256 needs the header before
everything else: blocks that were sent are kept until then, as far as half the pool goes; of an object beyond that (one
huge frame) what the store has is read back. Whoever knows the header before says so (``begin``), and nothing is kept.

The claim is taken before the first byte is sent. Every object carries the upload's id as metadata, by which a write
whose answer was lost is known again.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections.abc import Sequence
from functools import partial

from cwtrain.errors import SnapshotConflictError, StorageError
from cwtrain.storage._buffers import fresh
from cwtrain.storage._crew import INTERRUPTED_SECONDS, run_all, was_interrupted
from cwtrain.storage._hands import Hands
from cwtrain.storage._learned import PARTS, PUT, learned_of
from cwtrain.storage._memory_body import MemoryBody
from cwtrain.storage._meter import Meter
from cwtrain.storage._once import Once
from cwtrain.storage._open_uploads import UploadRecord, abort_left_open, abort_quietly
from cwtrain.storage._streamed_object import StreamedObject, StreamSizes, sha256_of
from cwtrain.storage.claim import Claim, read_claim, stream_claim, take_claim
from cwtrain.storage.location import Location
from cwtrain.storage.patient import deadline_of, stopping_at, waiting_out
from cwtrain.storage.plan import SHA256_KEY, claim_name, claimed_by, conflict_error
from cwtrain.storage.report import ObjectDigest
from cwtrain.storage.store import ObjectInfo, ObjectStore

__all__ = ["UPLOAD_KEY", "StreamSizes", "StreamUpload", "StreamedObject"]

UPLOAD_KEY = "cwtrain-upload"
"""The user metadata with the id of the streamed upload that an object belongs to."""

_FIRST_BLOCKS = 8
_IN_FLIGHT = 3
"""The pool may have so many times the size of the object that is being made."""
_GRACE_SECONDS = 5.0
_ABORT_SECONDS = 10.0
_LATE_SECONDS = 1.0


class StreamUpload:
    """The streamed objects of one rank under one identity. Its methods are for one thread; the sending has its own.

    ``workers`` threads send. Claims are equal for all that have the same ``upload_id``. Errors of the background are
    raised by the next call: SnapshotConflictError where the identity is taken, StorageError naming the refused
    permission, TransportError, WaitTimeoutError. Outages of the store are waited out (see ``PatientStore``).
    """

    def __init__(
        self,
        *,
        store: ObjectStore,
        location: Location,
        identity: str,
        upload_id: str,
        run_id: str | None = None,
        workers: int = 4,
        sizes: StreamSizes = StreamSizes(),  # noqa: B008  (frozen)
        max_bytes_per_second: float | None = None,
        record_directory: str | None = None,
    ) -> None:
        self._hands = Hands(max(1, min(workers, store.max_connections)), name="cwtrain-stream")
        self.store = stopping_at(waiting_out(store), self._hands.stopped)
        self._deadline = deadline_of(self.store)
        self.digests: dict[str, ObjectDigest] = {}
        self.blocked_seconds = 0.0
        """How long ``write`` waited for memory."""
        self._location = location
        self._identity = identity
        self._upload_id = upload_id
        self._claim = stream_claim(upload_id, run_id=run_id)
        self._sizes = sizes
        self._meter = Meter(stopped=self._hands.stopped, max_bytes_per_second=max_bytes_per_second)
        self._record = UploadRecord(store, location, identity, directory=record_directory)
        self._learned = learned_of(store)
        self._once: Once | None = None
        self._begin_lock = threading.Lock()
        self._free: list[memoryview] = []
        self._made_bytes = 0
        self._objects: list[StreamedObject] = []

    @property
    def sent_bytes(self) -> int:
        """Bytes that went out."""
        return self._meter.sent_bytes

    @property
    def busy_seconds(self) -> float:
        """How long threads were hashing and sending, all together."""
        return self._hands.busy_seconds

    def begin(self, name: str, *, head: bytes | None = None) -> StreamedObject:
        """Return a new object; nothing is sent yet.

        ``head`` is what ``finish`` will be given, where that is known already and the object is too large for one PUT:
        then it is hashed as it is sent, and nothing of it is kept.
        """
        made = StreamedObject(self, name, self._location.key(self._identity, name), self._sizes, self._hands, head)
        self._objects = [one for one in self._objects if one.open]
        self._objects.append(made)
        return made

    def put(self, name: str, data: bytes) -> ObjectDigest:
        """Write a whole object and wait for it."""
        self.wait()
        made = self.begin(name)
        made.finish(data)
        self.wait()
        return self.digests[name]

    def digest_of(self, data: bytes) -> ObjectDigest:
        """Return size and SHA-256 of an object that is written later."""
        return ObjectDigest(len(data), sha256_of([data]))

    def put_manifest(self, data: bytes) -> None:
        """Write the manifest of the identity and wait for it. One that is there must be the same."""
        self.wait()
        key = self._location.manifest_key(self._identity)

        def equal() -> bool:
            if self.store.head(key) is None:
                return False
            if self.store.get(key) == data:
                return True
            raise conflict_error(self._location, self._identity, {key: "it is the manifest of something else"})

        def write() -> None:
            self._begun().write(key, lambda if_absent: self.store.put(key, data, if_absent=if_absent), equal)

        self._hands.submit(write)
        self.wait()

    def claim(self) -> None:
        """Take the claim, if that was not done yet."""
        self._hands.submit(self._claimed)
        self.wait()

    def wait(self) -> None:
        """Wait until everything that was finished is in the bucket. Raises the first error."""
        if not self._hands.wait(self._patience()):
            self._too_late()

    def check(self) -> None:
        """Raise the first error of the background, if there was one, and WaitTimeoutError where the time is over."""
        self._hands.check()
        self._deadline.check(f"writing {self._identity}")

    def close(self) -> None:
        """End the threads."""
        self._hands.close(_GRACE_SECONDS)
        self._record.close()
        self._free.clear()

    def abort(self, error: BaseException) -> None:
        """Stop, and abort the multipart uploads that are open. What cannot be aborted is recorded for the next one."""
        self._hands.fail(error)
        for one in self._objects:
            one.given_up = True
        grace, most = _GRACE_SECONDS, _ABORT_SECONDS
        if was_interrupted(error):
            grace = most = INTERRUPTED_SECONDS
        self._hands.close(grace)
        left = [one for one in self._objects if one.upload_id is not None]
        run_all([partial(self._abort, one) for one in left], threads=4, seconds=most)
        self._record.close()
        self._free.clear()

    def _patience(self) -> float | None:
        """Return how long to wait for the threads: one that meets the end says more, if anything wakes it."""
        left = self._deadline.left()
        return None if left == math.inf else left + _LATE_SECONDS

    def _too_late(self) -> None:
        self._hands.fail(self._deadline.over(f"sending {self._identity}"))
        self._hands.check()

    # -- for the objects, in background threads --------------------------------------------------------------------

    def _begun(self) -> Once:
        """Return how to write, once the claim is ours."""
        with self._begin_lock:
            if self._once is None:
                self._once = Once(self.store, stopped=self._hands.stopped, conditional=self._take_claim())
            return self._once

    def _claimed(self) -> None:
        self._begun()

    def _take_claim(self) -> bool:
        """Take the claim of all ranks, and return whether the store takes conditions."""
        if found := self._listed():
            # Another rank may have begun; whoever else it was, nothing is written.
            claimed = read_claim(self.store, self._location, self._identity)
            if claimed is None:
                reasons = dict.fromkeys(found, "it stands there without a claim")
                raise conflict_error(self._location, self._identity, reasons)
            if claimed.uuid != self._upload_id:
                raise self._taken(claimed)
        held, conditional = take_claim(self.store, self._location, self._identity, self._claim)
        if held.uuid != self._upload_id:
            raise self._taken(held)
        abort_left_open(self._record, self.store, self._location, self._identity, new=not found)
        return conditional

    def _listed(self) -> list[str]:
        prefix = self._location.prefix(self._identity)
        found = [(one.key.removeprefix(prefix), one.size_bytes) for one in self.store.list_objects(prefix)]
        return [name for name, size in found if name or size]  # but not a folder marker

    def _taken(self, held: Claim) -> SnapshotConflictError:
        return conflict_error(
            self._location, self._identity, {claim_name(self._location, self._identity): claimed_by(held)}
        )

    def _take_block(self, asking: StreamedObject) -> memoryview:
        """Return a free block; wait for one while the pool is in use.

        The pool grows with the objects: memory that is touched for the first time costs more than what is in it.
        """
        size = self._sizes.block_bytes
        with self._hands.changed:
            self.check()
            kept = asking.kept_bytes
            if kept * 2 >= self._sizes.pool_bytes:
                asking.keep_no_more()
            grown = kept if asking.keeps else min(kept, self._sizes.single_bytes)
            most = min(self._sizes.pool_bytes, max(_FIRST_BLOCKS * size, _IN_FLIGHT * grown))
            if not self._free and self._made_bytes + size <= most:
                self._made_bytes += size
                return memoryview(fresh(size))
            if not self._free:
                began = time.perf_counter()
                free = self._hands.changed.wait_for(
                    lambda: self._free or self._hands.error is not None, timeout=self._patience()
                )
                self.blocked_seconds += time.perf_counter() - began
                if not free:
                    self._too_late()
                self.check()
            return self._free.pop()

    def _give_back(self, blocks: Sequence[memoryview]) -> None:
        with self._hands.changed:
            self._free.extend(blocks)
            self._hands.changed.notify_all()

    def _body(self, pieces: Sequence[bytes | memoryview], sha256: str | None = None) -> MemoryBody:
        return MemoryBody(
            pieces,
            on_bytes=self._meter.add,
            block=self._meter.block_bytes,
            stopped=self._hands.stopped,
            sha256=sha256,
        )

    def _metadata(self, sha256: str | None) -> dict[str, str]:
        return {UPLOAD_KEY: self._upload_id, **({SHA256_KEY: sha256} if sha256 else {})}

    def _ours(self, one: StreamedObject, sha256: str | None) -> bool:
        """Return whether the object is there, from an attempt of ours; SnapshotConflictError when it is another."""
        info = self.store.head(one.key)
        if info is None:
            return False
        if info.size_bytes == one.size_bytes and self._is_mine(info, sha256):
            return True
        raise SnapshotConflictError(
            f"s3://{self.store.bucket}/{one.key} was written by someone else meanwhile",
            objects=(one.name,),
            hint="a snapshot is never changed: publish under another identity",
        )

    def _is_mine(self, info: ObjectInfo, sha256: str | None) -> bool:
        said = (info.metadata or {}).get(UPLOAD_KEY)
        if said is not None:
            return said == self._upload_id
        return sha256 is not None and self._read_sha256(info.key) == sha256

    def _arrived(self, one: StreamedObject, sha256: str | None, *, looked: bool) -> None:
        """Note the object's digest. What the store kept is compared with what was sent, once for each way of sending.

        Some stores keep a request's framing inside the object: then they do so with every object. So what was right
        once is remembered for the store, also for the uploads after this one. ``looked``: it was compared already.
        """
        way = PARTS if one.in_parts else PUT
        if not looked and (sha256 is None or not self._learned.keeps(way)):
            self._compare(one)
            self._learned.kept(way, one.size_bytes)
        digest = ObjectDigest(one.size_bytes, sha256 or self._read_sha256(one.key))
        with self._hands.changed:
            self.digests[one.name] = digest
            one.open = False

    def _compare(self, one: StreamedObject) -> None:
        info = self.store.head(one.key)
        if info is None or info.size_bytes != one.size_bytes:
            kept = "nothing" if info is None else f"{info.size_bytes} bytes"
            raise StorageError(
                f"s3://{self.store.bucket}/{one.key}: {one.size_bytes} bytes were sent and the store kept {kept}",
                bucket=self.store.bucket,
                key=one.key,
                hint="make the client with cwtrain.storage.s3_client(), which adds no checksum trailers to bodies",
            )

    def _read_sha256(self, key: str) -> str:
        state = hashlib.sha256()
        for block in self.store.stream(key):
            state.update(block)
        return state.hexdigest()

    def _abort(self, one: StreamedObject) -> None:
        upload_id = one.upload_id
        if upload_id is not None and abort_quietly(self.store, one.key, upload_id):
            self._record.closed(upload_id)
