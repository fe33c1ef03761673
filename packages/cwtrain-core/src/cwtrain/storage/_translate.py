"""From botocore's exceptions to ours: the one place that reads them.

A refusal names the permission, the bucket and the key; a signature problem names the region and where it came from.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from botocore import exceptions as boto
from botocore.parsers import ResponseParserError

from cwtrain._waiting import CLOCK_SKEW, header_floor, passes
from cwtrain.config._quotes import Scrubber, quote
from cwtrain.config.network import hide_user_info
from cwtrain.errors import (
    ConfigError,
    ConnectionFailedError,
    CWTrainError,
    RequestTimeoutError,
    StorageAccessError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
    StorageRegionError,
)

if TYPE_CHECKING:
    from cwtrain.storage.s3 import S3Settings

__all__ = ["expired", "quotes_a_header", "translate"]

_QUOTED = 500
_SIGNED = re.compile(
    r"AWS4-HMAC-SHA256\s+Credential=[^'\"]*|AWS [^\s:]+:[A-Za-z0-9+/=]{20,}|"
    r"(?i:(?:Credential|Signature|X-Amz-Signature|X-Amz-Credential|X-Amz-Security-Token)=)[^&\s,'\"<]+|"
    r"(?i:Bearer )[^\s'\"]+"
)
"""What signs a request, as libraries and stores quote it."""

_NO_CREDENTIALS = (
    boto.NoCredentialsError,
    boto.PartialCredentialsError,
    boto.CredentialRetrievalError,
    boto.TokenRetrievalError,
    boto.NoAuthTokenError,
    boto.SSOError,
    getattr(boto, "LoginError", boto.SSOError),
)
_TIMEOUTS = (boto.ConnectTimeoutError, boto.ReadTimeoutError)
_NO_ANSWER = (boto.ConnectionError, boto.HTTPClientError, boto.ResponseStreamingError, boto.IncompleteReadError)

_DENIED = {"AccessDenied", "AllAccessDisabled", "AccountProblem", "Forbidden", "403"}
_BAD_KEYS = {"InvalidAccessKeyId", "ExpiredToken", "InvalidToken", "TokenRefreshRequired", "401", "Unauthorized"}
_EXPIRED = {"ExpiredToken", "InvalidToken", "TokenRefreshRequired"}
_REGION = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "IncorrectEndpoint",
    "PermanentRedirect",
    "TemporaryRedirect",
    "301",
    "307",
}
_CHECKSUM_CODES = {"MissingContentMD5", "MissingContentMD5OrChecksum", "MissingDigest"}
_ABSENT = {"NoSuchKey", "NoSuchUpload", "NotFound", "404"}
_CONFLICT = {"PreconditionFailed", "ConditionalRequestConflict", "412"}


def expired(error: boto.ClientError) -> bool:
    """Return whether the store may have refused credentials because their time is over. A HEAD does not say why."""
    code = str(error.response.get("Error", {}).get("Code") or "")
    return code in _EXPIRED or (error.operation_name == "HeadObject" and code in ("403", "400"))


def translate(
    error: Exception,
    *,
    what: str | None = None,
    action: str | None = None,
    bucket: str | None = None,
    key: str | None = None,
    settings: S3Settings | None = None,
    credentials: str | None = None,
    secrets: Iterable[str | None] = (),
) -> CWTrainError:
    """Return our error for botocore's ``error``.

    ``what`` says what was tried; without it, ``action`` (the S3 permission), ``bucket`` and ``key`` do. ``credentials``
    is the name of the provider that they come from; ``secrets`` are those of them that no message may hold.
    """
    scrub = Scrubber(secret for secret in secrets if secret)
    where = f"s3://{bucket}/{key}" if key is not None else f"s3://{bucket}"
    what = what or f"{(action or 's3').removeprefix('s3:')} on {where} failed"
    place: dict[str, Any] = {"action": action, "bucket": bucket, "key": key}
    if isinstance(error, boto.ClientError):
        return _refusal(error, what, place, settings, credentials, scrub)
    at = f" at {settings.endpoint_url}" if settings else ""
    text = quote(scrub.text(_hidden(str(error))), _QUOTED)
    if quotes_a_header(error):
        return ConfigError(
            f"{what}: a header of the request holds a line end or a control character and cannot be sent",
            hint="look at the credentials that the client was made with: they have no blanks, line ends or notes",
        )
    if isinstance(error, _NO_CREDENTIALS):
        return StorageAccessError(
            f"{what}: there are no usable S3 credentials ({text})",
            hint="set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE",
            **place,
        )
    if isinstance(error, boto.NoRegionError | boto.InvalidRegionError):
        return StorageRegionError(
            f"{what}: {text}", hint="set AWS_REGION to the bucket's zone, for example US-EAST-04A"
        )
    if isinstance(error, boto.ProfileNotFound | boto.ConfigParseError | boto.ConfigNotFound):
        return ConfigError(f"{what}: {text}", hint="check AWS_PROFILE and the files ~/.aws/config, ~/.aws/credentials")
    if isinstance(error, _TIMEOUTS):
        return RequestTimeoutError(
            f"{what}: no answer in time{at} ({text})", hint="run it again: what is in the bucket is not sent again"
        )
    if isinstance(error, boto.SSLError):
        return ConnectionFailedError(
            f"{what}: TLS failed{at} ({text})", hint="give the store's CA bundle with AWS_CA_BUNDLE, or verify="
        )
    if isinstance(error, boto.ProxyConnectionError):
        return ConnectionFailedError(
            f"{what}: the connection failed{at}: the proxy of the environment does not answer ({text})",
            hint="correct HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, or name the store's host in NO_PROXY",
        )
    if isinstance(error, _NO_ANSWER):
        return ConnectionFailedError(
            f"{what}: the connection failed{at} ({text})",
            hint="check the endpoint (CW_S3_ENDPOINT) and the network, then run it again" + _other_style(settings),
        )
    if isinstance(error, ResponseParserError):
        return StorageError(
            f"{what}: the answer is not S3's{at} ({text})",
            code="UnreadableAnswer",
            hint="check that the endpoint (CW_S3_ENDPOINT) is the store and no other server answers in its place",
            **place,
        )
    return StorageError(f"{what}: {text}", **place)


def _refusal(
    error: boto.ClientError,
    what: str,
    place: dict[str, Any],
    settings: S3Settings | None,
    credentials: str | None,
    scrub: Scrubber,
) -> StorageError:
    answer: dict[str, Any] = scrub.data(dict(error.response))
    code = str(answer.get("Error", {}).get("Code") or "")
    message = quote(_hidden(str(answer.get("Error", {}).get("Message") or "")), _QUOTED)
    meta = answer.get("ResponseMetadata", {})
    status = meta.get("HTTPStatusCode")
    place |= {"code": code or None, "status": status, "request_id": meta.get("RequestId") or None}
    headers = {name.lower(): str(value) for name, value in (meta.get("HTTPHeaders") or {}).items()}
    place["retry_after"] = header_floor(headers, lambda: dt.datetime.now(dt.UTC))
    # A HEAD has no body, so botocore repeats the status as the code.
    said = " ".join(part for part in (str(status or ""), code if code != str(status) else "") if part)
    said = f"{said}: {message}" if message and message not in (code, "Bad Request", "Forbidden") else said
    action, bucket = place["action"], place["bucket"]
    signed = ""
    if settings:
        signed = f"; signed for region {settings.region!r} from {settings.region_source}"

    if code == "SignatureDoesNotMatch":
        return StorageAccessError(
            f"{what}: the store does not accept the signature ({said}{signed})",
            hint="check the secret key, and that AWS_REGION is the bucket's zone in the store's own spelling",
            **place,
        )
    if code in _REGION or (code == "400" and settings):
        wanted = answer.get("Error", {}).get("Region")
        wanted = f", the store expects {wanted!r}" if wanted else ""
        return StorageRegionError(
            f"{what}: the store does not accept the region ({said}{signed}{wanted})"
            if code in _REGION
            else f"{what}: the store refused the request without saying why ({said}{signed})",
            hint="set AWS_REGION to the bucket's zone in the store's own spelling, for example US-EAST-04A",
            **place,
        )
    if code == CLOCK_SKEW:
        return StorageAccessError(f"{what}: {said}", hint="set this machine's clock; it is off by minutes", **place)
    if code in _BAD_KEYS:
        source = f" that come from {credentials!r}" if credentials else ""
        trouble = f"the credentials{source} have expired" if code == "ExpiredToken" else ""
        return StorageAccessError(
            f"{what}: {trouble or f'the store does not accept the credentials{source}'} ({said})",
            hint="renew AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or the profile's",
            **place,
        )
    if code in _DENIED:
        return StorageAccessError(
            f"{what}: {action or 'the call'} is refused ({said})",
            hint=f"let the bucket policy of {bucket} allow {action} to this user, then: cwtrain hotload check",
            **place,
        )
    if code == "NoSuchBucket":
        return StorageNotFoundError(
            f"{what}: there is no bucket {bucket!r}{_at(settings)} ({said})",
            hint="check the deployment's hotLoad.bucket and the endpoint",
            **place,
        )
    if code in _CONFLICT:
        return StorageConflictError(f"{what}: the object is there already, or is another one by now ({said})", **place)
    if code in _ABSENT:
        return StorageNotFoundError(f"{what}: it is not there ({said})", **place)
    if code == "PathStyleRequestNotAllowed":
        return StorageError(
            f"{what}: the store takes virtual-hosted addressing only ({said})",
            hint="make the client with cwtrain.storage.s3_client(), which addresses buckets in the host name",
            **place,
        )
    if status == 400 and (code in _CHECKSUM_CODES or _demands_checksum(message)):
        return StorageError(
            f"{what}: the bucket demands checksums, as one with object lock does ({said})",
            hint=_checksum_hint(settings),
            **place,
        )
    refusal = StorageError(f"{what} ({said})", **place)
    if passes(refusal):
        again = "the store is busy or failing: run it again, what is in the bucket is not sent again"
        return StorageError(refusal.message, hint=again, **place)
    return refusal


def _demands_checksum(message: str) -> bool:
    """Return whether a refusal is for want of a checksum, and not for one that does not fit."""
    text = message.lower()
    about = (
        "content-md5" in text or "x-amz-checksum" in text or "x-amz-sdk-checksum" in text or "checksum header" in text
    )
    return about and any(word in text for word in ("required", "missing", "must", "need"))


def _checksum_hint(settings: S3Settings | None) -> str:
    if settings is not None and settings.checksums == "when_supported":
        return (
            "AWS_REQUEST_CHECKSUM_CALCULATION=when_supported is set already: the store wants another checksum than "
            "boto3's; look at the bucket's settings"
        )
    return (
        "set AWS_REQUEST_CHECKSUM_CALCULATION=when_supported (or request_checksum_calculation in the AWS profile), and "
        "run it again"
    )


def _other_style(settings: S3Settings | None) -> str:
    """Return what to try where a store may know no host name for its buckets."""
    if settings is None or settings.addressing == "path" or settings.own:
        return ""
    return "; a store that takes path style only: CW_S3_ADDRESSING_STYLE=path"


def _at(settings: S3Settings | None) -> str:
    return f" at {settings.endpoint_url} in {settings.region!r}" if settings else ""


def quotes_a_header(error: Exception) -> bool:
    """Return whether the library could not send a header, and quotes all of it: its cause must not be shown either."""
    return "invalid header" in str(error).lower()


def _hidden(text: str) -> str:
    """Return ``text`` in one line, without what signs a request and without passwords in URLs."""
    return hide_user_info(_SIGNED.sub("***", " ".join(text.split())))
