"""A bucket behind boto3."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from cwtrain._process import NotPickled, renew_after_fork
from cwtrain.errors import CWTrainError, StorageAccessError, StorageNotFoundError, StorageRegionError, TransportError
from cwtrain.models.text import printable
from cwtrain.storage._learned import Learned
from cwtrain.storage._limits import current_socket, unlimited, watched
from cwtrain.storage._signing import credentials_of
from cwtrain.storage._translate import expired, quotes_a_header, translate
from cwtrain.storage._wire import hang_up_in_time, leave_connections
from cwtrain.storage.s3 import check_bucket, s3_settings
from cwtrain.storage.store import Body, ObjectInfo, OpenUpload
from cwtrain.waits import waiting

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

__all__ = ["S3Store"]

_log = logging.getLogger("cwtrain.storage")
_BLOCK = 1 << 20
_RESUMES = 3

T = TypeVar("T")

_LEARNED: weakref.WeakKeyDictionary[Any, dict[str, Learned]] = weakref.WeakKeyDictionary()
"""By client, then by bucket: stores of one bucket that share a client share what they find out."""


class S3Store(NotPickled):
    """A bucket behind a boto3 client (see ``s3_client``). In a forked process the client opens connections of its own.

    Raises ConfigError at once when the client's endpoint needs the bucket in its host name and it cannot be there.
    Each call is botocore's, with its few attempts; ``PatientStore`` waits out outages.
    """

    remote = True
    """Whether it is on the other side of a network, where outages are waited out."""
    _instead = "give it the bucket's name, and make S3Store(s3_client(), name) there"

    def __init__(self, client: S3Client, bucket: str) -> None:
        self.settings = s3_settings(client)
        check_bucket(bucket, self.settings)
        if client not in _LEARNED:
            hang_up_in_time(client)
        self._client = client
        self._bucket = bucket
        self._longest = _longest(client.meta.config)
        self.learned = _LEARNED.setdefault(client, {}).setdefault(bucket, Learned())
        """What was found out about the store by uploads before."""
        renew_after_fork(client, leave_connections)

    def __repr__(self) -> str:
        return f"S3Store({self._bucket!r} at {self.endpoint})"

    @property
    def bucket(self) -> str:
        """The bucket's name."""
        return self._bucket

    @property
    def endpoint(self) -> str:
        """The endpoint's URL."""
        return self.settings.endpoint_url

    @property
    def max_connections(self) -> int:
        """The size of the client's connection pool."""
        return self.settings.max_pool_connections

    def _call(self, action: str, key: str | None, call: Callable[[], T]) -> T:
        where = f"s3://{self._bucket}/{printable(key or '')}"
        what = f"waiting for {self.endpoint} to answer {action} of {where}"
        with waiting(what, seconds=self._longest, part=True):
            return self._ask(action, key, call)

    def _ask(self, action: str, key: str | None, call: Callable[[], T]) -> T:
        credentials = credentials_of(self._client)
        used = credentials.snapshot() if credentials is not None else None
        try:
            try:
                return call()
            except ClientError as error:
                if credentials is None or not expired(error) or not credentials.renew(used):
                    raise
                _log.info("the store's credentials had expired; others were found (%s)", credentials.source)
            return call()
        except (ClientError, BotoCoreError, ResponseParserError) as error:
            raise translate(
                error,
                action=action,
                bucket=self._bucket,
                key=key,
                settings=self.settings,
                credentials=credentials.source if credentials is not None else None,
                secrets=(used.secret_key, used.token) if used is not None else (),
            ) from (None if quotes_a_header(error) else error)

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, None when it is not there."""
        try:
            try:
                answer = self._head(key)
            except (StorageAccessError, StorageRegionError):
                if not self._may_read(key):
                    raise
                answer = self._head(key)  # what refused it is over: a clock that was called skewed once, for example
        except StorageNotFoundError as error:
            if error.code == "NoSuchBucket":
                raise
            return None
        return ObjectInfo(
            key=key,
            size_bytes=answer["ContentLength"],
            modified=answer.get("LastModified"),
            metadata={name.lower(): value for name, value in answer.get("Metadata", {}).items()},
            etag=answer.get("ETag"),
        )

    def _head(self, key: str) -> Any:
        return self._call("s3:GetObject", key, lambda: self._client.head_object(Bucket=self._bucket, Key=key))

    def _may_read(self, key: str) -> bool:
        """Return whether an object may be looked at after all; raise why not, where a GET says so: a HEAD does not."""

        def ask() -> None:
            self._client.get_object(Bucket=self._bucket, Key=key, Range="bytes=0-0")["Body"].close()

        try:
            self._call("s3:GetObject", key, ask)
        except (StorageAccessError, StorageRegionError):
            raise
        except StorageNotFoundError:
            return True
        except CWTrainError as error:
            _log.debug("asking why a HEAD was refused failed: %s", error)
            return False
        return True

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return all objects whose keys begin with ``prefix``, in the order of their keys."""
        pages = iter(self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket, Prefix=prefix))
        while (page := self._call("s3:ListBucket", prefix, lambda: next(pages, None))) is not None:
            for one in page.get("Contents", ()):
                yield ObjectInfo(key=one["Key"], size_bytes=one["Size"], modified=one.get("LastModified"))

    def get(self, key: str) -> bytes:
        """Return a small object's bytes. Raises StorageNotFoundError."""
        return b"".join(self.stream(key))

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return an object's bytes in blocks, from ``offset`` on. Raises StorageNotFoundError.

        A connection that breaks in the middle is taken up again where it broke, a few times.
        """
        if length == 0:
            return
        end = None if length is None else offset + length
        resumes = _RESUMES
        while True:
            blocks = self._blocks(key, offset, end)
            try:
                for block in blocks:
                    offset += len(block)
                    yield block
                return
            except TransportError:
                if not (resumes and unlimited()):  # else whoever set the limit goes on
                    raise
                resumes -= 1

    def _blocks(self, key: str, offset: int, end: int | None) -> Iterator[bytes]:
        wanted: dict[str, Any] = {}
        if offset or end is not None:
            wanted["Range"] = f"bytes={offset}-{'' if end is None else end - 1}"
        answer = self._call(
            "s3:GetObject", key, lambda: self._client.get_object(Bucket=self._bucket, Key=key, **wanted)
        )
        line = current_socket()
        # Not `with answer["Body"]`: that gives the stream below, which checks no length and raises urllib3's errors.
        with contextlib.closing(answer["Body"]) as body:
            while block := self._call("s3:GetObject", key, lambda: body.read(_BLOCK)):
                yield block
                watched(line)

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
        condition = _condition(if_absent, if_match)
        self._call(
            "s3:PutObject",
            key,
            lambda: self._client.put_object(
                Bucket=self._bucket, Key=key, Body=_boto(body), Metadata=dict(metadata or {}), **condition
            ),
        )

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""
        self._call("s3:DeleteObject", key, lambda: self._client.delete_object(Bucket=self._bucket, Key=key))

    def create_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Begin a multipart upload and return its id."""
        answer = self._call(
            "s3:PutObject",
            key,
            lambda: self._client.create_multipart_upload(Bucket=self._bucket, Key=key, Metadata=dict(metadata or {})),
        )
        return answer["UploadId"]

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Send part ``number`` (from 1) and return its ETag."""
        answer = self._call(
            "s3:PutObject",
            key,
            lambda: self._client.upload_part(
                Bucket=self._bucket, Key=key, UploadId=upload_id, PartNumber=number, Body=_boto(body)
            ),
        )
        return answer["ETag"]

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
        condition = _condition(if_absent, if_match)
        self._call(
            "s3:PutObject",
            key,
            lambda: self._client.complete_multipart_upload(
                Bucket=self._bucket,
                Key=key,
                UploadId=upload_id,
                MultipartUpload={
                    "Parts": [{"PartNumber": number, "ETag": etag} for number, etag in enumerate(etags, 1)]
                },
                **condition,
            ),
        )

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. Raises StorageNotFoundError when it is gone."""
        self._call(
            "s3:AbortMultipartUpload",
            key,
            lambda: self._client.abort_multipart_upload(Bucket=self._bucket, Key=key, UploadId=upload_id),
        )

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Return the open uploads whose keys begin with ``prefix``."""
        pages = iter(self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self._bucket, Prefix=prefix))
        while (page := self._call("s3:ListBucketMultipartUploads", prefix, lambda: next(pages, None))) is not None:
            for one in page.get("Uploads", ()):
                yield OpenUpload(key=one["Key"], upload_id=one["UploadId"], started=one.get("Initiated"))


def _longest(config: Any) -> float | None:
    """Return how long a request may go without a sign of life, all tries together; None where that has no end."""
    tries = (config.retries or {}).get("total_max_attempts") or 1
    return float(tries * config.read_timeout) if config.read_timeout else None


def _condition(if_absent: bool, if_match: str | None) -> dict[str, Any]:
    return {"IfNoneMatch": "*"} if if_absent else {"IfMatch": if_match} if if_match is not None else {}


def _boto(body: Body) -> Any:
    # boto3's annotation asks for a whole IO object; it uses only what Body has. It begins where the body stands.
    if not isinstance(body, bytes):
        body.seek(0)
    return body
