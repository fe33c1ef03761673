"""What the object store answers to a request that a fault strikes, and which request a rule is about."""

from __future__ import annotations

import re
import time
import uuid
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

from cwtrain_emulator.faults import Fault
from cwtrain_emulator.s3.http11 import Head

__all__ = ["Call", "answer_to", "refusal", "without_lost"]

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)")
_CODES = {
    400: "InvalidRequest",
    403: "AccessDenied",
    404: "NoSuchKey",
    409: "OperationAborted",
    412: "PreconditionFailed",
    429: "TooManyRequests",
    500: "InternalError",
    503: "ServiceUnavailable",
}
_HTML = (
    "<!DOCTYPE html>\n<html><head><title>{status}</title></head>\n"
    "<body><center><h1>{status}</h1></center><hr><center>emulated proxy</center></body></html>\n"
)


@dataclass(frozen=True)
class Call:
    """One S3 request, as far as faults look at it."""

    method: str
    path: str
    key: str
    listing: bool
    permission: str
    access_key: str
    writes: str = ""
    """`object` or `part` where the request's body is one, `whole` where it makes an object of parts, else nothing."""
    checksum: bool = False
    """Whether the request says a checksum of its body."""

    @classmethod
    def of(cls, head: Head) -> Call:
        """Take a request's head apart; path-style, and virtual-hosted below ``localhost``."""
        method, _, rest = head.first.partition(" ")
        parts = urlsplit(rest.rpartition(" ")[0])
        path = unquote(parts.path)
        query = parse_qs(parts.query, keep_blank_values=True)
        host = head.headers.get("host", "").partition(":")[0]
        virtual = host.endswith(".localhost")
        key = path[1:] if virtual else path[1:].partition("/")[2]
        found = _CREDENTIAL.search(head.headers.get("authorization", ""))
        access_key = found[1] if found else query.get("X-Amz-Credential", [""])[0].partition("/")[0]
        listing = method == "GET" and not key and "uploads" not in query and "location" not in query
        permission = _permission(method, key, query)
        return cls(
            method, path, key, listing, permission, access_key, _writes(method, key, query), _has_checksum(head.headers)
        )

    @property
    def read_key(self) -> str:
        """The key of an object that is read, else nothing."""
        return self.key if self.method in ("GET", "HEAD") and self.permission == "s3:GetObject" else ""


def _writes(method: str, key: str, query: Mapping[str, list[str]]) -> str:
    if not key or not ({"partNumber", "uploadId"} & query.keys() or method == "PUT"):
        return ""
    if method == "PUT":
        return "part" if "uploadId" in query else "object"
    return "whole" if method == "POST" else ""


def _has_checksum(headers: Mapping[str, str]) -> bool:
    algorithms = ("crc32", "crc32c", "crc64nvme", "sha1", "sha256", "md5", "sha512", "xxhash64", "xxhash3", "xxhash128")
    named = {"content-md5", *(f"x-amz-checksum-{algorithm}" for algorithm in algorithms)}
    trailers = {name.strip().lower() for name in headers.get("x-amz-trailer", "").split(",")}
    return bool(named & (headers.keys() | trailers))


def _permission(method: str, key: str, query: Mapping[str, list[str]]) -> str:
    if not key:
        return "s3:ListBucketMultipartUploads" if "uploads" in query else "s3:ListBucket"
    if method in ("GET", "HEAD"):
        return "s3:GetObject"
    if method == "DELETE":
        return "s3:AbortMultipartUpload" if "uploadId" in query else "s3:DeleteObject"
    return "s3:PutObject"


def answer_to(fault: Fault, call: Call) -> bytes | None:
    """Return the whole answer of a fault that ends a request; None when there is to be none."""
    skew = 0.0
    extra: dict[str, str] = {}
    if fault["retry_after"]:
        extra["Retry-After"] = fault["retry_after"]
    kind = fault.kind
    if kind == "drop":
        return None
    if kind == "html":
        status = fault["status"]
        return _answer(call, status, _HTML.format(status=status), "text/html", extra, skew)
    if kind == "error_body":
        return refusal(call, 200, "InternalError", fault["message"] or "We encountered an internal error.", extra)
    if kind == "denied":
        return refusal(call, 403, "AccessDenied", "Access Denied", extra)
    if kind == "slow_down":
        return refusal(call, 503, "SlowDown", "Please reduce your request rate.", extra)
    if kind == "precondition_failed":
        return refusal(call, 412, "PreconditionFailed", "At least one of the preconditions did not hold.", extra)
    if kind == "clock_skew":
        text = "The difference between the request time and the current time is too large."
        return refusal(call, 403, "RequestTimeTooSkewed", text, extra, skew=fault["seconds"])
    if kind == "expired_credentials":
        return refusal(call, 400, "ExpiredToken", "The provided token has expired.", extra)
    if kind == "operation_aborted":
        text = "A conflicting conditional operation is currently in progress against this resource. Try again."
        return refusal(call, 409, "OperationAborted", text, extra)
    if kind == "checksum_required":
        what = "Part" if call.writes == "part" else "Object"
        needed = "Content-MD5 OR x-amz-checksum- HTTP header is required"
        text = f"{needed} for Put {what} requests with Object Lock parameters"
        return refusal(call, 400, "InvalidRequest", text, extra)
    if kind in ("lost_object", "late_object"):
        return refusal(call, 404, "NoSuchKey", "The specified key does not exist.", extra)
    status = fault["status"]
    code = fault["code"] or _CODES.get(status, "InternalError" if status >= 500 else "InvalidRequest")
    return refusal(call, status, code, fault["message"] or "An emulated fault.", extra)


def refusal(call: Call, status: int, code: str, message: str, extra: Mapping[str, str], *, skew: float = 0.0) -> bytes:
    """Return S3's XML for a refusal, as a whole answer that closes the connection."""
    server_time = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + skew))
    fields = {"Code": code, "Message": message, "Resource": call.path, "ServerTime": server_time}
    inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    text = f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}</Error>'
    return _answer(call, status, text, "application/xml", extra, skew)


def _answer(call: Call, status: int, text: str, kind: str, extra: Mapping[str, str], skew: float) -> bytes:
    body = text.encode()
    headers = {
        "Content-Type": kind,
        "Content-Length": str(len(body)),
        "Date": formatdate(time.time() + skew, usegmt=True),
        "x-amz-request-id": uuid.uuid4().hex[:16].upper(),
        "Connection": "close",
        **extra,
    }
    lines = [f"HTTP/1.1 {status} Emulated", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join(lines).encode("latin-1", "replace") + b"\r\n\r\n" + (b"" if call.method == "HEAD" else body)


def without_lost(listing: bytes, lost: Sequence[Fault], ages: Mapping[str, float] | None = None) -> bytes:
    """Return a listing's XML without the keys that are lost, or late; `ages`: seconds since they were written."""
    try:
        root = ET.fromstring(listing)  # noqa: S314
    except ET.ParseError:
        return listing
    space = root.tag.partition("}")[0] + "}" if root.tag.startswith("{") else ""
    encoded = root.findtext(f"{space}EncodingType") == "url"
    for entry in root.findall(f"{space}Contents"):
        key = entry.findtext(f"{space}Key") or ""
        if any(rule.hides(unquote(key) if encoded else key, ages or {}) for rule in lost):
            root.remove(entry)
    count = root.find(f"{space}KeyCount")
    if count is not None:
        count.text = str(len(root.findall(f"{space}Contents")) + len(root.findall(f"{space}CommonPrefixes")))
    if space:
        ET.register_namespace("", space[1:-1])
    raw: bytes = ET.tostring(root, encoding="utf-8", xml_declaration=True)
    return raw
