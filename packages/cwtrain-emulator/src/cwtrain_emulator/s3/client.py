"""A small S3 client on the standard library: the few calls that the service's side makes, signed with SigV4.

The replicas and the control plane read the bucket through it. It is small so that a replica starts quickly, and it is
independent of what the trainer's side uses.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import hmac
import http.client
import ipaddress
import os
import ssl
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote, urlsplit

__all__ = ["ObjectInfo", "S3Client", "S3Config", "S3Error", "is_loopback"]

_EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()
_CHUNK_BYTES = 1 << 20
_MAX_REPLY_BYTES = 16 << 20
_RETRIED = frozenset({500, 502, 503, 504})
_TRIED_OBJECTS = 3


class S3Error(Exception):
    """The store refused a call or could not be reached. `status` is 0 when there was no answer."""

    def __init__(self, message: str, *, status: int = 0, code: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.code = code


@dataclass(frozen=True)
class S3Config:
    """Where a store is and who asks. The secret never shows in a repr."""

    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    region: str = "US-EAST-04A"
    session_token: str = field(default="", repr=False)


@dataclass(frozen=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    size_bytes: int
    etag: str


def is_loopback(host: str) -> bool:
    """Return True when `host` (a name or an address, without port) means this machine."""
    name = host.strip("[]").rstrip(".").lower()
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class S3Client:
    """Reads objects of one store. May be used from several threads; each keeps its own connection."""

    def __init__(self, config: S3Config, *, timeout: float = 30.0, attempts: int = 4) -> None:
        self._config = config
        self._timeout = timeout
        self._attempts = attempts
        parts = urlsplit(config.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.path not in ("", "/"):
            raise ValueError(f"not an S3 endpoint (http://HOST[:PORT]): {config.endpoint!r}")
        self._scheme, self._host = parts.scheme, parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._path_style = _is_address(self._host) or is_loopback(self._host)
        self._local = threading.local()

    def create_bucket(self, bucket: str) -> None:
        """Make `bucket`; one that we have already is fine."""
        try:
            self._call("PUT", bucket, "")
        except S3Error as exc:
            if exc.code not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
                raise

    def list_objects(self, bucket: str, prefix: str, *, limit: int = 100_000) -> list[ObjectInfo]:
        """Return the objects whose key begins with `prefix`; raise S3Error when there are more than `limit`."""
        found: list[ObjectInfo] = []
        token = ""
        while True:
            query = {"list-type": "2", "prefix": prefix} | ({"continuation-token": token} if token else {})
            page = _parse_listing(self._call("GET", bucket, "", query=query))
            found.extend(page[0])
            token = page[1]
            if len(found) > limit:
                raise S3Error(f"more than {limit} objects under s3://{bucket}/{prefix}")
            if not token:
                return found

    def clear_bucket(self, bucket: str) -> int:
        """Delete every object of a bucket and abort every upload; return how many objects there were."""
        found = self.list_objects(bucket, "")
        for info in found:
            self._call("DELETE", bucket, info.key)
        uploads = ET.fromstring(self._call("GET", bucket, "", query={"uploads": ""}))  # noqa: S314
        for upload in uploads.findall("{*}Upload"):
            upload_id = upload.findtext("{*}UploadId") or ""
            self._call("DELETE", bucket, upload.findtext("{*}Key") or "", query={"uploadId": upload_id})
        return len(found)

    def can_read(self, bucket: str) -> bool:
        """Return True when the bucket's objects can be read, not only listed; of an empty bucket, True.

        A few are tried, a byte of each: one may have been damaged by a crash. Raises S3Error when listing fails.
        """
        page = _parse_listing(self._call("GET", bucket, "", query={"list-type": "2", "max-keys": "100"}))[0]
        tried = [info for info in page if info.size_bytes][:_TRIED_OBJECTS]
        return not tried or any(self._reads(bucket, info.key) for info in tried)

    def _reads(self, bucket: str, key: str) -> bool:
        try:
            with self._answer("GET", bucket, key, {}) as answer:
                return len(answer.read(1)) == 1
        except (S3Error, OSError, http.client.HTTPException):
            return False

    def get(self, bucket: str, key: str, *, limit: int = _MAX_REPLY_BYTES) -> bytes:
        """Return an object's bytes; raise S3Error when it is missing or longer than `limit` bytes."""
        return self._call("GET", bucket, key, limit=limit)

    def download(self, bucket: str, key: str, path: Path, *, size_bytes: int) -> None:
        """Write an object to `path`; raise S3Error unless exactly `size_bytes` bytes arrive."""
        for attempt in range(self._attempts):
            try:
                with self._answer("GET", bucket, key, {}) as answer:
                    written = _copy(answer, path)
            except (S3Error, OSError, http.client.HTTPException) as exc:
                if attempt + 1 == self._attempts or (isinstance(exc, S3Error) and exc.status not in _RETRIED | {0}):
                    raise _as_s3_error(exc, f"s3://{bucket}/{key}") from exc
                time.sleep(0.05 * 2**attempt)
                continue
            if written != size_bytes:
                raise S3Error(f"s3://{bucket}/{key}: {written} bytes arrived, the listing says {size_bytes}")
            return

    def close(self) -> None:
        """Close this thread's connection."""
        connection = getattr(self._local, "connection", None)
        if connection is not None:
            connection[1].close()
            self._local.connection = None

    def _call(
        self,
        method: str,
        bucket: str,
        key: str,
        *,
        query: Mapping[str, str] | None = None,
        limit: int = _MAX_REPLY_BYTES,
    ) -> bytes:
        for attempt in range(self._attempts):
            try:
                with self._answer(method, bucket, key, query or {}) as answer:
                    data = answer.read(limit + 1)
                    if len(data) > limit:
                        self.close()
                        raise S3Error(f"s3://{bucket}/{key}: longer than {limit} bytes", status=answer.status)
                    return data
            except (S3Error, OSError, http.client.HTTPException) as exc:
                if attempt + 1 == self._attempts or (isinstance(exc, S3Error) and exc.status not in _RETRIED):
                    raise _as_s3_error(exc, f"s3://{bucket}/{key}") from exc
                time.sleep(0.05 * 2**attempt)
        raise AssertionError("unreachable")

    @contextlib.contextmanager
    def _answer(
        self, method: str, bucket: str, key: str, query: Mapping[str, str]
    ) -> Iterator[http.client.HTTPResponse]:
        host = self._host if self._path_style else f"{bucket}.{self._host}"
        path = f"/{bucket}/{key}" if self._path_style else f"/{key}"
        if self._path_style and not key:
            path = f"/{bucket}"
        canonical_path = quote(path, safe="/-_.~")
        canonical_query = "&".join(
            f"{quote(name, safe='-_.~')}={quote(value, safe='-_.~')}" for name, value in sorted(query.items())
        )
        headers = self._signed_headers(method, host, canonical_path, canonical_query)
        connection = self._connection(host)
        target = canonical_path + (f"?{canonical_query}" if canonical_query else "")
        try:
            connection.request(method, target, headers=headers)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        try:
            if answer.status >= 300:
                raise _refusal(answer.status, answer.read(64 << 10), f"{method} s3://{bucket}/{key}")
            yield answer
        except BaseException:
            self.close()
            raise
        if not answer.isclosed():
            self.close()

    def _connection(self, host: str) -> http.client.HTTPConnection:
        kept: tuple[str, http.client.HTTPConnection] | None = getattr(self._local, "connection", None)
        if kept is not None and kept[0] == host:
            return kept[1]
        if kept is not None:
            kept[1].close()
        connection = (
            http.client.HTTPSConnection(host, self._port, timeout=self._timeout, context=ssl.create_default_context())
            if self._scheme == "https"
            else http.client.HTTPConnection(host, self._port, timeout=self._timeout)
        )
        self._local.connection = (host, connection)
        return connection

    def _signed_headers(self, method: str, host: str, path: str, query: str) -> dict[str, str]:
        config = self._config
        default_port = 443 if self._scheme == "https" else 80
        host_header = host if self._port == default_port else f"{host}:{self._port}"
        now = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
        headers = {"host": host_header, "x-amz-content-sha256": _EMPTY_SHA256, "x-amz-date": now}
        if config.session_token:
            headers["x-amz-security-token"] = config.session_token
        names = ";".join(sorted(headers))
        lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
        request = f"{method}\n{path}\n{query}\n{lines}\n{names}\n{_EMPTY_SHA256}"
        scope = f"{now[:8]}/{config.region}/s3/aws4_request"
        to_sign = f"AWS4-HMAC-SHA256\n{now}\n{scope}\n{hashlib.sha256(request.encode()).hexdigest()}"
        signing_key = f"AWS4{config.secret_key}".encode()
        for part in scope.split("/"):
            signing_key = hmac.digest(signing_key, part.encode(), "sha256")
        signature = hmac.digest(signing_key, to_sign.encode(), "sha256").hex()
        credential = f"Credential={config.access_key}/{scope}"
        headers["authorization"] = f"AWS4-HMAC-SHA256 {credential}, SignedHeaders={names}, Signature={signature}"
        return headers


def _copy(answer: http.client.HTTPResponse, path: Path) -> int:
    written = 0
    buffer = memoryview(bytearray(_CHUNK_BYTES))
    with open(path, "wb") as file:
        while count := answer.readinto(buffer):
            file.write(buffer[:count])
            written += count
    return written


def _refusal(status: int, body: bytes, what: str) -> S3Error:
    code = ""
    with contextlib.suppress(ET.ParseError):
        code = ET.fromstring(body).findtext("{*}Code") or ""  # noqa: S314
    return S3Error(f"{what}: {status} {code}".rstrip(), status=status, code=code)


def _as_s3_error(exc: Exception, what: str) -> S3Error:
    return exc if isinstance(exc, S3Error) else S3Error(f"{what}: {type(exc).__name__}: {exc}")


def _parse_listing(body: bytes) -> tuple[list[ObjectInfo], str]:
    try:
        root = ET.fromstring(body)  # noqa: S314
    except ET.ParseError as exc:
        raise S3Error(f"the listing is not XML ({exc})") from None
    found = [
        ObjectInfo(
            key=entry.findtext("{*}Key") or "",
            size_bytes=int(entry.findtext("{*}Size") or 0),
            etag=(entry.findtext("{*}ETag") or "").strip('"'),
        )
        for entry in root.findall("{*}Contents")
    ]
    truncated = (root.findtext("{*}IsTruncated") or "").lower() == "true"
    return found, (root.findtext("{*}NextContinuationToken") or "") if truncated else ""


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def credentials_from_env(environ: Mapping[str, str] | None = None) -> tuple[str, str, str]:
    """Return access key, secret key and session token (may be empty) from the AWS variables; or raise ValueError."""
    values = os.environ if environ is None else environ
    access, secret = values.get("AWS_ACCESS_KEY_ID", ""), values.get("AWS_SECRET_ACCESS_KEY", "")
    if not access or not secret:
        raise ValueError("an external S3 endpoint needs AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    token = values.get("AWS_SESSION_TOKEN", "")
    given = {"AWS_ACCESS_KEY_ID": access, "AWS_SECRET_ACCESS_KEY": secret, "AWS_SESSION_TOKEN": token}
    for name, value in given.items():
        # In a header the HTTP library would quote it, signature and all.
        if not all("!" <= char <= "~" for char in value):
            raise ValueError(f"{name} holds a line end, a blank or another character that no key has")
    return access, secret, token
