"""Find out what the credentials may do in a bucket, all at once, and leave nothing behind."""

from __future__ import annotations

import contextlib
import logging
import uuid
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import attrs

from cwtrain.errors import StorageAccessError, StorageError, StorageNotFoundError
from cwtrain.storage._open_uploads import UploadRecord, abort_abandoned, abort_quietly, is_old
from cwtrain.storage.location import Location
from cwtrain.storage.store import ObjectStore, OpenUpload

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

__all__ = ["NOT_TRIED", "AccessReport", "PermissionCheck", "check_access"]

_log = logging.getLogger("cwtrain.storage")
_PART = b"a part of an upload that is aborted\n"

NOT_TRIED = (
    "the PUT of an object in one request, as indexes are written: it would stay in the bucket (a part of an upload was "
    "sent with the same headers)",
)
"""What ``check_access`` does not find out, in words for people."""


@attrs.frozen(kw_only=True)
class PermissionCheck:
    """One S3 permission. ``allowed`` is None when it could not be found out; ``detail`` says what the store said."""

    action: str
    allowed: bool | None
    required: bool = True
    detail: str = ""


@attrs.frozen(kw_only=True)
class AccessReport:
    """What the credentials may do under a location."""

    bucket: str
    path_prefix: str
    endpoint: str
    checks: tuple[PermissionCheck, ...]

    @property
    def ok(self) -> bool:
        """Whether every permission that publishing needs is there."""
        return all(check.allowed for check in self.checks if check.required)

    @property
    def refused(self) -> tuple[str, ...]:
        """The permissions that publishing needs and that are refused."""
        return tuple(check.action for check in self.checks if check.required and check.allowed is False)

    def raise_for_refused(self) -> None:
        """Raise StorageAccessError naming every permission that is missing, if there is one."""
        if self.ok:
            return
        place = f"s3://{self.bucket}/{self.path_prefix}".rstrip("/")
        missing = [check for check in self.checks if check.required and not check.allowed]
        raise StorageAccessError(
            f"{', '.join(check.action for check in missing)} refused on {place}: "
            + "; ".join(check.detail for check in missing if check.detail),
            action=missing[0].action,
            bucket=self.bucket,
            hint="let the bucket policy allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject and "
            f"s3:AbortMultipartUpload on {place}/*",
        )


def check_access(store: ObjectStore | S3Client, location: Location) -> AccessReport:
    """Return what the credentials behind ``store`` (an object store, or a boto3 client) may do under ``location``.

    Lists the prefix, asks for a random key under ``_preflight/``, begins a multipart upload on it, sends a part as a
    publish does, and aborts that: nothing is left, where uploads may be listed also when an answer was lost on the way.
    What a killed check left open is aborted by the next one on the same machine, and on any machine after a day.
    Refused permissions are in the report. Raises StorageError or TransportError for what is no matter of permission: no
    such bucket, a wrong region, no credentials, a demand that is not met (checksums), no answer. What it did not try is
    in ``NOT_TRIED``.
    """
    target = _store(store, location.bucket)
    key = location.preflight_key(str(uuid.uuid4()))
    listing = _try("s3:ListBucket", lambda: next(iter(target.list_objects(location.root)), None))
    reading = _try("s3:GetObject", lambda: target.head(key))
    if reading.allowed is False and listing.allowed is False:
        reading = attrs.evolve(
            reading, allowed=None, detail="without s3:ListBucket, a key that does not exist is refused as well"
        )
    record = UploadRecord(target, location, "_preflight")
    abort_abandoned(record, target)
    try:
        writing, aborting, open_uploads = _try_an_upload(target, location, key, record)
    finally:
        record.close()
    return AccessReport(
        bucket=target.bucket,
        path_prefix=location.path_prefix,
        endpoint=target.endpoint,
        checks=(listing, reading, writing, aborting, open_uploads),
    )


def _try_an_upload(
    store: ObjectStore, location: Location, key: str, record: UploadRecord
) -> tuple[PermissionCheck, PermissionCheck, PermissionCheck]:
    """Return whether an upload of ``key`` may be begun, whether it may be aborted, and whether it can be listed."""
    upload_id = ""

    def begin() -> None:
        nonlocal upload_id
        with record.opening(key) as asked:
            upload_id = store.create_upload(key)
            record.opened(key, upload_id, asked)

    def abort() -> None:
        # Gone is as good: a repeat of a request whose answer was lost finds nothing.
        with contextlib.suppress(StorageNotFoundError):
            store.abort_upload(key, upload_id)

    writing = _try("s3:PutObject", begin)
    if upload_id:
        try:
            # A store may let uploads begin and refuse their bytes: one that demands checksums does.
            writing = _try("s3:PutObject", lambda: store.upload_part(key, upload_id, 1, _PART))
        except BaseException:
            abort_quietly(store, key, upload_id)
            raise
        aborting = _try("s3:AbortMultipartUpload", abort)
        if aborting.allowed:
            record.closed(upload_id)
        else:
            _log.warning("the multipart upload %s of s3://%s/%s is still open", upload_id, store.bucket, key)
    else:
        aborting = PermissionCheck(
            action="s3:AbortMultipartUpload", allowed=None, detail="cannot be tried without s3:PutObject"
        )
    left: list[OpenUpload] = []
    checks = location.preflight_key("")
    open_uploads = _optional("s3:ListBucketMultipartUploads", lambda: left.extend(store.list_uploads(checks)))
    if aborting.allowed:
        # A request to begin that was repeated, as its answer was lost, has begun two; killed checks left the old ones.
        for one in left:
            if one.key == key or is_old(one):
                abort_quietly(store, one.key, one.upload_id)
    return writing, aborting, open_uploads


def _store(store: ObjectStore | S3Client, bucket: str) -> ObjectStore:
    if hasattr(store, "list_objects_v2"):
        from cwtrain.storage.s3_store import S3Store

        return S3Store(cast("S3Client", store), bucket)
    return cast("ObjectStore", store)


def _try(action: str, call: Callable[[], object]) -> PermissionCheck:
    try:
        call()
    except StorageAccessError as error:
        # Anything else than a refusal (unknown keys, a wrong signature) would be answered to every call.
        if error.code not in ("AccessDenied", "AllAccessDisabled", "Forbidden", "403"):
            raise
        return PermissionCheck(action=action, allowed=False, detail=error.message)
    return PermissionCheck(action=action, allowed=True)


def _optional(action: str, call: Callable[[], object]) -> PermissionCheck:
    try:
        check = _try(action, call)
    except StorageError as error:  # stores without this call
        check = PermissionCheck(action=action, allowed=None, detail=error.message)
    return attrs.evolve(check, required=False)
