"""A store whose calls wait out outages and end in time: the one place where a request to a store is made again.

    store = PatientStore(S3Store(client, "weights"), deadline=Deadline(300.0))
    store.put(key, body)                # through a 503 of 45 s; WaitTimeoutError when the 300 s are over

What passes by itself (see ``cwtrain._waiting``) is tried again with growing pauses, Retry-After being the least, for
``outage_seconds`` from the first failure of a call and until ``deadline``; a clock that the store calls skewed, once. A
store that has never answered is given up after a minute, as the API is: most often its address is wrong.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TypeVar

from cwtrain._process import NotPickled
from cwtrain._waiting import CLOCK_SKEW, Deadline, Outage, Pauses, passes
from cwtrain.errors import CWTrainError, StorageConflictError, StorageError, WaitTimeoutError
from cwtrain.storage._buffers import SendingStopped
from cwtrain.storage._learned import Learned, learned_of
from cwtrain.storage._limits import limited
from cwtrain.storage.store import Body, ObjectInfo, ObjectStore, OpenUpload

__all__ = ["OUTAGE_SECONDS", "PatientStore", "deadline_of", "patient", "stopping_at", "waiting_out"]

T = TypeVar("T")

OUTAGE_SECONDS = 1800.0
"""How long an outage of the store may last where nobody says how long a publish may take."""
_FIRST_ANSWER_SECONDS = 60.0
_ABORT_SECONDS = 2.0
_PAGE = 1000

_log = logging.getLogger("cwtrain.storage")


class PatientStore(NotPickled):
    """An ``ObjectStore`` around another one. ``stopped`` ends pauses, and no request is begun once it is set.

    ``clock`` and ``sleep`` are there for tests.
    """

    _instead = "make one there around a store of that process (HotLoader pickles, and has one)"

    def __init__(
        self,
        store: ObjectStore,
        *,
        deadline: Deadline | None = None,
        outage_seconds: float = OUTAGE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        pauses: Pauses = Pauses(),  # noqa: B008  (frozen)
        stopped: threading.Event | None = None,
    ) -> None:
        self.deadline = deadline or Deadline(None)
        self._store = store
        self._outage_seconds = outage_seconds
        self._clock = clock
        self._sleep = sleep
        self._stopped = stopped
        self._pauses = pauses

    def __repr__(self) -> str:
        return f"PatientStore({self._store!r})"

    def stopping_at(self, stopped: threading.Event) -> PatientStore:
        """Return a view whose calls raise SendingStopped, instead of trying again, once ``stopped`` is set."""
        return PatientStore(
            self._store,
            deadline=self.deadline,
            outage_seconds=self._outage_seconds,
            clock=self._clock,
            sleep=self._sleep,
            pauses=self._pauses,
            stopped=stopped,
        )

    def within(self, deadline: Deadline) -> PatientStore:
        """Return a view whose calls are over by ``deadline``."""
        return PatientStore(
            self._store,
            deadline=deadline,
            outage_seconds=self._outage_seconds,
            clock=self._clock,
            sleep=self._sleep,
            pauses=self._pauses,
            stopped=self._stopped,
        )

    @property
    def inner(self) -> ObjectStore:
        """The store that is asked."""
        return self._store

    @property
    def learned(self) -> Learned:
        """What was found out about the store by uploads before."""
        return learned_of(self._store)

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self._store.bucket

    @property
    def endpoint(self) -> str:
        """Where it is, for messages and to tell two stores apart."""
        return self._store.endpoint

    @property
    def max_connections(self) -> int:
        """How many calls can run at the same time."""
        return self._store.max_connections

    # -- the one loop ----------------------------------------------------------------------------------------------

    def _call(self, what: str, call: Callable[[], T], *, before_again: Callable[[], None] | None = None) -> T:
        """Return what ``call`` returns, made again through an outage."""
        outage: Outage | None = None
        reason: CWTrainError | None = None
        skewed = False
        while True:
            self._check(what, reason)
            try:
                with limited(self.deadline.left(), silence=self._silence(outage)):
                    if outage is not None and before_again is not None:
                        before_again()
                    found = call()
            except CWTrainError as error:
                skew = isinstance(error, StorageError) and error.code == CLOCK_SKEW and not skewed
                skewed = skewed or skew
                if not (skew or passes(error)):
                    self.learned.answered = self.learned.answered or isinstance(error, StorageError)
                    raise
                if self.deadline.left() or isinstance(error, StorageError):
                    reason = error  # else it was cut because the time is over, which says nothing of the store
                outage = outage or Outage(self.deadline, seconds=self._most(), clock=self._clock, pauses=self._pauses)
                self._pause(outage, error, what, reason)
            else:
                self.learned.answered = True
                return found

    def _most(self) -> float:
        return self._outage_seconds if self.learned.answered else min(self._outage_seconds, _FIRST_ANSWER_SECONDS)

    def _silence(self, outage: Outage | None) -> float:
        """Return how long a request may stand still. A last try has a moment all the same."""
        return self._most() if outage is None else max(1.0, outage.left())

    def _check(self, what: str, reason: CWTrainError | None) -> None:
        if self._stopped is not None and self._stopped.is_set():
            raise SendingStopped
        if not self.deadline.left():
            raise self.deadline.over(what, reason) from reason

    def _pause(self, outage: Outage, error: CWTrainError, what: str, reason: CWTrainError | None) -> None:
        """Sleep until the next try, or raise where there is none."""
        if self._stopped is not None and self._stopped.is_set():
            raise SendingStopped from error
        floor = (error.retry_after or 0.0) if isinstance(error, StorageError) else 0.0
        pause = outage.pause(error, what, _log, floor=floor)
        if pause is None:
            raise self._given_up(outage, error, what, reason) from error
        if self._stopped is not None and self._sleep is time.sleep:
            self._stopped.wait(pause)
        else:
            self._sleep(pause)

    def _given_up(self, outage: Outage, error: CWTrainError, what: str, reason: CWTrainError | None) -> CWTrainError:
        floor = (error.retry_after or 0.0) if isinstance(error, StorageError) else 0.0
        left = outage.left()
        if 0 < left < floor:
            return WaitTimeoutError(
                f"{what}: {error}; the store asks to wait {floor:g} s, which is more than the {left:.3g} s left",
                last_seen=str(error),
                hint="run it again later: what is in the bucket is not sent again",
            )
        if outage.ends_with_the_call():
            return self.deadline.over(what, reason)
        tries = f"gave up after {outage.tries} tries in {outage.spent():.1f} s"
        if not self.learned.answered:
            error.message = f"{error.message}; {tries}"
            error.args = (error.message,)
            return error
        return WaitTimeoutError(
            f"{what}: {error}; {tries}",
            last_seen=str(error),
            hint=error.hint or "run it again when the store answers: what is in the bucket is not sent again",
        )

    # -- the calls -------------------------------------------------------------------------------------------------

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, None when it is not there."""
        return self._call(self._at("looking at", key), lambda: self._store.head(key))

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return all objects whose keys begin with ``prefix``, in the order of their keys."""
        what = self._at("listing", prefix)
        last = ""
        found: Iterator[ObjectInfo] | None = None

        def following() -> list[ObjectInfo]:
            nonlocal found
            if found is None:  # also after a failure: past what was given already
                found = (one for one in self._store.list_objects(prefix) if not last or one.key > last)
            try:
                return list(islice(found, _PAGE))
            except CWTrainError:
                found = None
                raise

        while page := self._call(what, following):
            last = page[-1].key
            yield from page

    def get(self, key: str) -> bytes:
        """Return a small object's bytes. Raises StorageNotFoundError."""
        return self._call(self._at("reading", key), lambda: self._store.get(key))

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return an object's bytes in blocks, from ``offset`` on. Raises StorageNotFoundError."""
        if length == 0:
            return
        what = self._at("reading", key)
        end = None if length is None else offset + length
        at = offset
        blocks: Iterator[bytes] | None = None

        def following() -> bytes | None:
            nonlocal blocks
            if blocks is None:
                if end is not None and at >= end:
                    return None
                blocks = self._store.stream(key, offset=at, length=None if end is None else end - at)
            try:
                return next(blocks, None)
            except CWTrainError:
                blocks = None
                raise

        while (block := self._call(what, following)) is not None:
            at += len(block)
            yield block

    def put(
        self,
        key: str,
        body: Body,
        *,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Write an object; raises StorageConflictError as the store does, also where an answer of it was lost."""
        self._call(
            self._at("uploading", key),
            lambda: self._store.put(key, body, metadata=metadata, if_absent=if_absent, if_match=if_match),
        )

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._call(self._at("deleting", key), lambda: self._store.delete(key))

    def create_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Begin a multipart upload and return its id."""
        return self._call(
            self._at("beginning the parts of", key), lambda: self._store.create_upload(key, metadata=metadata)
        )

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Send part ``number`` (from 1) and return its ETag."""
        return self._call(
            self._at(f"uploading part {number} of", key),
            lambda: self._store.upload_part(key, upload_id, number, body),
        )

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        etags: Sequence[str],
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Make the object of its parts. Raises as the store does.

        Ceph answers 500 to a Complete that is repeated because the first answer was lost, for ever: so before it is
        made again, the object is looked for, and one that is there is a StorageConflictError.
        """

        def look() -> None:
            info = self._store.head(key)
            if info is not None and (if_match is None or info.etag != if_match):
                raise StorageConflictError(
                    f"s3://{self.bucket}/{key} is there already",
                    action="s3:PutObject",
                    bucket=self.bucket,
                    key=key,
                    code="PreconditionFailed",
                    status=412,
                )

        self._call(
            self._at("completing", key),
            lambda: self._store.complete_upload(key, upload_id, etags, if_absent=if_absent, if_match=if_match),
            before_again=look,
        )

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts, in one short try: it is cleaning up, also after the time is over."""
        with limited(_ABORT_SECONDS):
            self._store.abort_upload(key, upload_id)

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Return the open uploads whose keys begin with ``prefix``."""
        what = self._at("listing the open uploads of", prefix)
        return iter(self._call(what, lambda: list(self._store.list_uploads(prefix))))

    def _at(self, doing: str, key: str) -> str:
        return f"{doing} s3://{self.bucket}/{key}"


def waiting_out(store: ObjectStore) -> ObjectStore:
    """Return ``store`` as one that waits out outages, where it is on the other side of a network."""
    return PatientStore(store) if getattr(store, "remote", False) else store


def patient(
    store: ObjectStore,
    *,
    deadline: Deadline | None = None,
    outage_seconds: float = OUTAGE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> PatientStore:
    """Return ``store`` as one that waits out outages; one that does already goes on with ``deadline``, if given."""
    if isinstance(store, PatientStore):
        return store if deadline is None else store.within(deadline)
    return PatientStore(store, deadline=deadline, outage_seconds=outage_seconds, clock=clock, sleep=sleep)


def stopping_at(store: ObjectStore, stopped: threading.Event) -> ObjectStore:
    """Return ``store`` as one that does not try again once ``stopped`` is set, where it would."""
    return store.stopping_at(stopped) if isinstance(store, PatientStore) else store


def deadline_of(store: ObjectStore) -> Deadline:
    """Return when the calls of ``store`` are over; never, of one that does not say it."""
    return store.deadline if isinstance(store, PatientStore) else Deadline(None)
