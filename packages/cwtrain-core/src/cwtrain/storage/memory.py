"""A bucket in memory, for tests and dry runs: conditional writes, multipart, metadata, and faults on demand."""

from __future__ import annotations

import datetime as dt
import hashlib
import re
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Any

import attrs

from cwtrain._process import NotPickled, renew_locks_after_fork
from cwtrain.errors import StorageAccessError, StorageConflictError, StorageError, StorageNotFoundError
from cwtrain.storage._learned import Learned
from cwtrain.storage.store import Body, ObjectInfo, OpenUpload

__all__ = ["Conditions", "Fault", "MemoryObject", "MemoryStore"]

_BLOCK = 1 << 20
_ACTIONS = {
    "head": "s3:GetObject",
    "list_objects": "s3:ListBucket",
    "stream": "s3:GetObject",
    "put": "s3:PutObject",
    "delete": "s3:DeleteObject",
    "create_upload": "s3:PutObject",
    "upload_part": "s3:PutObject",
    "complete_upload": "s3:PutObject",
    "abort_upload": "s3:AbortMultipartUpload",
    "list_uploads": "s3:ListBucketMultipartUploads",
}


class Conditions(StrEnum):
    """What a store makes of ``If-None-Match: *``."""

    HONOURED = "honoured"
    REFUSED = "refused"
    """The request is answered 501."""
    IGNORED = "ignored"


@attrs.frozen(kw_only=True)
class Fault:
    """Something that goes wrong: the ``nth`` call of the method ``call`` on a key that matches, ``times`` in a row.

    ``action`` is run first, if there is one; then ``error`` is raised, if there is one. With ``after`` both happen
    when the call has done its work: its answer is lost.
    """

    call: str
    key: str = ""
    """A regular expression that is searched in the key."""
    error: BaseException | None = None
    action: Callable[[], None] | None = None
    nth: int = 1
    times: int = 1
    """-1: for ever."""
    after: bool = False


@attrs.frozen(kw_only=True)
class MemoryObject:
    """An object: its bytes, its user metadata and when it was written."""

    body: bytes = attrs.field(repr=False)
    metadata: Mapping[str, str] = attrs.field(factory=dict)
    modified: dt.datetime


@attrs.define
class _Upload:
    key: str
    metadata: Mapping[str, str]
    started: dt.datetime
    parts: dict[int, bytes] = attrs.field(factory=dict)


def _now() -> dt.datetime:
    return dt.datetime.now(dt.UTC)


class MemoryStore(NotPickled):
    """An ``ObjectStore`` in memory.

    ``conditions`` and ``complete_conditions`` say what ``if_absent`` does on a put and on completing a multipart
    upload, ``keep_metadata=False`` drops user metadata as some gateways do, ``denied`` names S3 permissions that are
    refused, ``faults`` go wrong when they are met. ``objects`` is what is stored, by key, ``uploads`` the multipart
    uploads still open, by id, ``calls`` every call so far as (method, key).
    """

    _instead = "its objects are in memory; take a bucket that both can reach, with S3Store(s3_client(), name) there"

    def __init__(
        self,
        bucket: str = "memory",
        *,
        conditions: Conditions = Conditions.HONOURED,
        complete_conditions: Conditions | None = None,
        keep_metadata: bool = True,
        denied: Collection[str] = (),
        faults: Sequence[Fault] = (),
        max_connections: int = 64,
        clock: Callable[[], dt.datetime] = _now,
    ) -> None:
        self.objects: dict[str, MemoryObject] = {}
        self.uploads: dict[str, _Upload] = {}
        self.calls: list[tuple[str, str]] = []
        self.denied = set(denied)
        self.learned = Learned()
        self._bucket = bucket
        self._conditions = conditions
        self._complete_conditions = complete_conditions or conditions
        self._keep_metadata = keep_metadata
        self._faults = tuple(faults)
        self._met = [0] * len(self._faults)
        self._max_connections = max_connections
        self._clock = clock
        self._lock = threading.RLock()
        renew_locks_after_fork(self, "_lock")
        self._made = 0

    def __repr__(self) -> str:
        return f"MemoryStore({self._bucket!r}, {len(self.objects)} objects)"

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self._bucket

    @property
    def endpoint(self) -> str:
        """A name that no other store in this process has."""
        return f"memory:{id(self)}"

    @property
    def max_connections(self) -> int:
        """How many calls can run at the same time."""
        return self._max_connections

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, None when it is not there."""
        with self._calling("head", key):
            stored = self.objects.get(key)
            if stored is None:
                return None
            return ObjectInfo(
                key=key,
                size_bytes=len(stored.body),
                modified=stored.modified,
                metadata=dict(stored.metadata),
                etag=_etag(stored.body),
            )

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return all objects whose keys begin with ``prefix``, in the order of their keys."""
        with self._calling("list_objects", prefix):
            found = [
                ObjectInfo(key=key, size_bytes=len(stored.body), modified=stored.modified)
                for key, stored in sorted(self.objects.items())
                if key.startswith(prefix)
            ]
        return iter(found)

    def get(self, key: str) -> bytes:
        """Return an object's bytes. Raises StorageNotFoundError."""
        return b"".join(self.stream(key))

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return an object's bytes in blocks, from ``offset`` on. Raises StorageNotFoundError."""
        with self._calling("stream", key):
            stored = self.objects.get(key)
            if stored is None:
                raise self._absent("stream", key, "NoSuchKey")
        end = len(stored.body) if length is None else min(len(stored.body), offset + length)
        for start in range(offset, end, _BLOCK):
            yield stored.body[start : min(end, start + _BLOCK)]

    def put(
        self,
        key: str,
        body: Body,
        *,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Write an object.

        Raises StorageConflictError with ``if_absent`` when there is one, with ``if_match`` when there is another one
        than that of this ETag.
        """
        with self._calling("put", key):
            self._check_condition("put", key, if_absent, if_match, self._conditions)
        # As over a network: the body is read with the lock free, and the condition is decided when it has arrived.
        data = _read(body)
        with self._lock:
            self._check_condition("put", key, if_absent, if_match, self._conditions)
            self._write(key, data, metadata)
        self._fail("put", key, after=True)

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        with self._calling("delete", key):
            self.objects.pop(key, None)

    def create_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Begin a multipart upload and return its id."""
        with self._calling("create_upload", key):
            self._made += 1
            upload_id = f"upload-{self._made}"
            self.uploads[upload_id] = _Upload(key=key, metadata=dict(metadata or {}), started=self._clock())
        self._fail("create_upload", key, after=True)
        return upload_id

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Send part ``number`` (from 1) and return its ETag."""
        with self._calling("upload_part", key):
            self._upload("upload_part", key, upload_id)
        data = _read(body)
        with self._lock:
            self._upload("upload_part", key, upload_id).parts[number] = data
        self._fail("upload_part", key, after=True)
        return _etag(data)

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        etags: Sequence[str],
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Make the object of its parts. Raises StorageNotFoundError when the upload is gone, else as ``put``."""
        with self._calling("complete_upload", key):
            upload = self._upload("complete_upload", key, upload_id)
            self._check_condition("complete_upload", key, if_absent, if_match, self._complete_conditions)
            parts = [upload.parts.get(number) for number in range(1, len(etags) + 1)]
            if [part if part is None else _etag(part) for part in parts] != list(etags):
                raise StorageError(
                    f"a part of s3://{self._bucket}/{key} is not there", code="InvalidPart", status=400, key=key
                )
            self._write(key, b"".join(part for part in parts if part is not None), upload.metadata)
            del self.uploads[upload_id]
        self._fail("complete_upload", key, after=True)

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. Raises StorageNotFoundError when it is gone."""
        with self._calling("abort_upload", key):
            self._upload("abort_upload", key, upload_id)
            del self.uploads[upload_id]

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Return the open uploads whose keys begin with ``prefix``."""
        with self._calling("list_uploads", prefix):
            found = [
                OpenUpload(key=upload.key, upload_id=upload_id, started=upload.started)
                for upload_id, upload in self.uploads.items()
                if upload.key.startswith(prefix)
            ]
        return iter(found)

    def _calling(self, call: str, key: str) -> threading.RLock:
        """Note the call, let it fail if it shall, and return the lock to do its work under."""
        with self._lock:
            self.calls.append((call, key))
        action = _ACTIONS[call]
        if action in self.denied:
            raise StorageAccessError(
                f"{action} is refused on s3://{self._bucket}/{key} (403 AccessDenied)",
                code="AccessDenied",
                status=403,
                action=action,
                bucket=self._bucket,
                key=key,
            )
        self._fail(call, key, after=False)
        return self._lock

    def _fail(self, call: str, key: str, *, after: bool) -> None:
        for number, fault in enumerate(self._faults):
            if fault.call != call or fault.after != after or not re.search(fault.key, key):
                continue
            with self._lock:
                self._met[number] += 1
                met = self._met[number]
            if met < fault.nth or (fault.times >= 0 and met >= fault.nth + fault.times):
                continue
            if fault.action is not None:
                fault.action()
            if fault.error is not None:
                raise fault.error

    def _check_condition(
        self, call: str, key: str, if_absent: bool, if_match: str | None, conditions: Conditions
    ) -> None:
        if (not if_absent and if_match is None) or conditions is Conditions.IGNORED:
            return
        place: dict[str, Any] = {"action": _ACTIONS[call], "bucket": self._bucket, "key": key}
        if conditions is Conditions.REFUSED:
            raise StorageError("conditional writes are not implemented", code="NotImplemented", status=501, **place)
        stored = self.objects.get(key)
        if stored is not None if if_absent else stored is None or _etag(stored.body) != if_match:
            how = "is there already" if if_absent else "is not the one that was seen"
            raise StorageConflictError(
                f"s3://{self._bucket}/{key} {how}", code="PreconditionFailed", status=412, **place
            )

    def _upload(self, call: str, key: str, upload_id: str) -> _Upload:
        upload = self.uploads.get(upload_id)
        if upload is None or upload.key != key:
            raise self._absent(call, key, "NoSuchUpload")
        return upload

    def _absent(self, call: str, key: str, code: str) -> StorageNotFoundError:
        return StorageNotFoundError(
            f"s3://{self._bucket}/{key} is not there ({code})",
            code=code,
            status=404,
            action=_ACTIONS[call],
            bucket=self._bucket,
            key=key,
        )

    def _write(self, key: str, body: bytes, metadata: Mapping[str, str] | None) -> None:
        kept = {name.lower(): value for name, value in (metadata or {}).items()} if self._keep_metadata else {}
        self.objects[key] = MemoryObject(body=body, metadata=kept, modified=self._clock())


def _read(body: Body) -> bytes:
    if isinstance(body, bytes):
        return body
    body.seek(0)
    return b"".join(iter(lambda: body.read(_BLOCK), b""))


def _etag(data: bytes) -> str:
    return '"' + hashlib.md5(data, usedforsecurity=False).hexdigest() + '"'
