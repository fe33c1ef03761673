"""From a refused call to an error class: the one table of codes, and how each kind of answer is read.

Answers come gateway-style (``code`` a number), Connect-style (``code`` a name), wrapped in ``{"error": ...}``, as plain
text, as an HTML page, or empty.
"""

from __future__ import annotations

import datetime as dt
import html
import json
import re
from collections.abc import Callable, Iterable, Mapping
from http import HTTPStatus
from typing import Any

import attrs

from cwtrain import errors
from cwtrain._waiting import header_floor
from cwtrain.config._quotes import QUOTE_CHARS, Scrubber, quote

__all__ = ["QUOTE_CHARS", "Scrubber", "error_from_answer", "quote", "request_id_of", "retry_floor"]

_NUMBERED = (
    "ok",
    "canceled",
    "unknown",
    "invalid_argument",
    "deadline_exceeded",
    "not_found",
    "already_exists",
    "permission_denied",
    "resource_exhausted",
    "failed_precondition",
    "aborted",
    "out_of_range",
    "unimplemented",
    "internal",
    "unavailable",
    "data_loss",
    "unauthenticated",
)
_BY_NAME = {name.replace("_", ""): name for name in _NUMBERED} | {
    "cancelled": "canceled",
    "internalservererror": "internal",
    "internalerror": "internal",
    "unauthorized": "unauthenticated",
    "forbidden": "permission_denied",
}
_CLASSES: dict[str, type[errors.APIError]] = {
    "canceled": errors.CanceledError,
    "unknown": errors.UnknownError,
    "invalid_argument": errors.InvalidArgumentError,
    "deadline_exceeded": errors.DeadlineExceededError,
    "not_found": errors.NotFoundError,
    "already_exists": errors.AlreadyExistsError,
    "permission_denied": errors.PermissionDeniedError,
    "resource_exhausted": errors.ResourceExhaustedError,
    "failed_precondition": errors.FailedPreconditionError,
    "aborted": errors.AbortedError,
    "out_of_range": errors.OutOfRangeError,
    "unimplemented": errors.UnimplementedError,
    "internal": errors.InternalServerError,
    "unavailable": errors.UnavailableError,
    "data_loss": errors.DataLossError,
    "unauthenticated": errors.UnauthenticatedError,
}
_BY_STATUS = {
    400: "invalid_argument",
    401: "unauthenticated",
    403: "permission_denied",
    404: "not_found",
    408: "deadline_exceeded",
    409: "already_exists",
    412: "failed_precondition",
    429: "resource_exhausted",
    499: "canceled",
    501: "unimplemented",
    502: "unavailable",
    503: "unavailable",
    504: "deadline_exceeded",
}
_REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-correlation-id", "x-amzn-requestid", "cf-ray")
_RETRY_INFO = "type.googleapis.com/google.rpc.RetryInfo"
_MOST_DETAILS = 32


@attrs.frozen(kw_only=True)
class _Said:
    """What the body of a refusal says."""

    text: str = ""
    code: str | None = None
    details: tuple[dict[str, Any], ...] = ()


def error_from_answer(
    *,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    where: str,
    scrub: Scrubber,
    token_source: str = "",
    token_quoted: bool = False,
    now: Callable[[], dt.datetime] = lambda: dt.datetime.now(dt.UTC),
) -> errors.APIError:
    """Return the error for an answer that is no 2xx. ``headers`` have lower-case names; ``where`` names the call."""
    if 300 <= status < 400:
        return _redirect(status, headers, where, scrub)
    said = _read(body, headers.get("content-type", ""), scrub)
    code = said.code or _code_of_status(status, said.text)
    details = list(said.details)
    floor = header_floor(headers, now)
    if floor is not None:
        details.append({"@type": _RETRY_INFO, "retryDelay": f"{floor:g}s"})
    request_id = request_id_of(headers, details, scrub)
    text = said.text or f"no explanation ({_phrase(status)})"
    places = [code.upper(), f"HTTP {status}", where, *([f"request {request_id}"] if request_id else [])]
    message = f"{text} ({', '.join(places)})"
    if code == "unauthenticated" and token_source:
        message += f"; the token came from {token_source}"
    extra: dict[str, Any] = {"code": code, "status": status, "request_id": request_id, "details": details}
    extra["hint"] = _hint(code, said.text, where, token_quoted=token_quoted)
    if code == "resource_exhausted":
        return errors.ResourceExhaustedError(message, retry_after=_floor_of(details), **extra)
    return _CLASSES[code](message, **extra)


def retry_floor(error: errors.CWTrainError) -> float:
    """Return how many seconds the other side asks to wait before the next try (Retry-After, RetryInfo), at least 0."""
    if isinstance(error, errors.StorageError):
        return error.retry_after or 0.0
    return (_floor_of(error.details) or 0.0) if isinstance(error, errors.APIError) else 0.0


# The body ------------------------------------------------------------------------------------------------------------


def _read(body: bytes, content_type: str, scrub: Scrubber) -> _Said:
    text = scrub.text(body.decode("utf-8", "replace")).strip()
    try:
        data = scrub.data(json.loads(text))
    except (ValueError, RecursionError):
        return _Said(text=quote(scrub.text(_page_text(text)) if _is_page(text, content_type) else text))
    return _read_json(data)


def _read_json(data: Any) -> _Said:
    if isinstance(data, list) and len(data) == 1:
        data = data[0]
    if isinstance(data, str):
        return _Said(text=quote(data))
    if not isinstance(data, dict):
        return _Said(text=quote(json.dumps(data)) if data else "")
    inner = data.get("error")
    if not isinstance(inner, dict):
        inner = data
    words = (_words(inner.get(key)) for key in ("message", "msg", "detail", "error_description", "title", "error"))
    message = next((text for text in words if text), "")
    code = next((found for key in ("code", "status", "error") if (found := _code(inner.get(key)))), None)
    details = tuple(_detail(item) for item in inner.get("details") or () if isinstance(item, dict))[:_MOST_DETAILS]
    parts = [message, *(text for item in details for text in _shown(item) if text not in message)]
    text = "; ".join(dict.fromkeys(part for part in parts if part))
    if not text and data and code is None:
        text = json.dumps(data)
    return _Said(text=quote(text), code=code, details=details)


def _words(value: Any) -> str:
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value) if value and isinstance(value, (dict, list)) else ""


def _code(value: Any) -> str | None:
    """Return the canonical code that a number (of gRPC) or a name in any spelling stands for."""
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return _NUMBERED[value] if 0 < value < len(_NUMBERED) else None
    if isinstance(value, str):
        name = _BY_NAME.get(re.sub(r"[^a-z]", "", value.lower()))
        return None if name == "ok" else name
    return None


def _code_of_status(status: int, text: str) -> str:
    if status == 409 and re.search(r"\babort|concurren|conflicting (update|write)|in progress", text, re.IGNORECASE):
        return "aborted"
    if status >= 500:
        return _BY_STATUS.get(status, "internal")
    return _BY_STATUS.get(status, "invalid_argument" if 400 <= status < 500 else "unknown")


def _is_page(text: str, content_type: str) -> bool:
    return "html" in content_type.lower() or text[:200].lstrip().lower().startswith(("<!doctype", "<html", "<head"))


def _page_text(page: str) -> str:
    page = re.sub(r"(?is)<(script|style)\b.*?(</\1>|$)", " ", page)
    words = html.unescape(re.sub(r"<[^>]*>", " ", page)).strip()
    return f"an HTML page: {words}" if words else "an HTML page without text"


# Details -------------------------------------------------------------------------------------------------------------


def _detail(item: dict[str, Any]) -> dict[str, Any]:
    """Return a detail with its type under ``@type``; Connect keeps it under ``type`` and the fields under ``debug``."""
    if "@type" in item or not isinstance(item.get("type"), str):
        return item
    fields = item["debug"] if isinstance(item.get("debug"), dict) else {"value": item.get("value")}
    return {"@type": f"type.googleapis.com/{item['type']}", **fields}


def _kind(item: Mapping[str, Any]) -> str:
    return str(item.get("@type", "")).rpartition("/")[2].rpartition(".")[2]


def _get(item: Any, camel: str) -> Any:
    """Return a field of a detail, spelt in either way."""
    if not isinstance(item, Mapping):
        return None
    return item.get(camel, item.get(re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), camel)))


def _shown(item: Mapping[str, Any]) -> list[str]:
    """Return what a person should see of a detail."""
    kind = _kind(item)
    if kind == "ResourceInfo":
        return [_joined(_get(item, "resourceType"), _get(item, "resourceName"), _get(item, "description"))]
    if kind in ("PreconditionFailure", "QuotaFailure"):
        return [
            _joined(_get(one, "type"), _get(one, "subject"), _get(one, "description"))
            for one in _items(item, "violations")
        ]
    if kind == "BadRequest":
        return [_joined(_get(one, "field"), _get(one, "description")) for one in _items(item, "fieldViolations")]
    if kind == "ErrorInfo":
        return [_joined("reason", _get(item, "reason"))] if _get(item, "reason") else []
    return []


def _items(item: Mapping[str, Any], camel: str) -> list[Any]:
    value = _get(item, camel)
    return value if isinstance(value, list) else []


def _joined(*parts: Any) -> str:
    return ": ".join(str(part) for part in parts if part)


def _floor_of(details: Iterable[Mapping[str, Any]]) -> float | None:
    floors = [_duration(_get(item, "retryDelay")) for item in details if _kind(item) == "RetryInfo"]
    known = [floor for floor in floors if floor is not None]
    return max(known) if known else None


def _duration(value: Any) -> float | None:
    """Return the seconds of a proto duration: ``"1.5s"``, or an object with seconds and nanos."""
    if isinstance(value, Mapping):
        try:
            return max(0.0, float(value.get("seconds", 0)) + float(value.get("nanos", 0)) / 1e9)
        except (TypeError, ValueError):
            return None
    match = re.fullmatch(r"(\d+(?:\.\d*)?)s?", str(value).strip())
    return float(match[1]) if match else None


def request_id_of(headers: Mapping[str, str], details: Iterable[Mapping[str, Any]], scrub: Scrubber) -> str | None:
    """Return what support asks for, from the headers or a RequestInfo; None without one."""
    said = [headers.get(name, "") for name in _REQUEST_ID_HEADERS]
    said += [str(_get(item, "requestId") or "") for item in details if _kind(item) == "RequestInfo"]
    return next((quote(scrub.text(text), 128) for text in said if text.strip()), None)


# Words ---------------------------------------------------------------------------------------------------------------


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return f"status {status}"


def _redirect(status: int, headers: Mapping[str, str], where: str, scrub: Scrubber) -> errors.APIError:
    to = quote(scrub.text(headers.get("location", "")).partition("?")[0], 200) or "nowhere"
    return errors.UnexpectedAnswerError(
        f"redirected to {to}, which is not followed because the token would go along (HTTP {status}, {where})",
        status=status,
        request_id=request_id_of(headers, (), scrub),
        hint="check COREWEAVE_API_URL or base_url: it must be the API's own origin",
    )


def _hint(code: str, text: str, where: str, *, token_quoted: bool) -> str:
    """Return the next step: what the words of the refusal suggest, or what its code does."""
    low = text.lower()
    if "not enabled for this organization" in low:
        return "ask CoreWeave support to turn hot-loads on, and give your organization id"
    if "chain is too long" in low:
        return "publish a full snapshot; it starts a new chain"
    if "previoussnapshotidentity" in low:
        return "give one that `cwtrain hotload list --deployment ID` shows as COMPLETED, or publish a full snapshot"
    if code == "unauthenticated":
        if token_quoted:
            return "the token begins and ends with a quote: take the quotes away"
        return "check that the token is a current CoreWeave API access token and belongs to this API"
    if code == "permission_denied":
        return "reads need the role Inference Viewer, writes Inference Admin; give the token's owner that role"
    if code == "resource_exhausted":
        return "wait, or ask for a higher quota"
    if code == "unimplemented":
        if where.endswith(":cancel"):
            return "the service cannot cancel yet: wait until the hot-load has ended, then start another"
        return "the service does not offer this call yet: do without it, or ask CoreWeave support"
    show = _what_there_is(low, where)
    if code == "not_found":
        return f"check the id{show}"
    if code == "already_exists":
        return f"choose another id or name{show}"
    if code in ("invalid_argument", "out_of_range"):
        kind = re.match(r"(?:POST|PATCH) /(deployment|gateway)s", where)
        may = f"; what can be chosen shows: cwtrain {kind[1]} parameters" if kind else show
        return f"correct what the service names{may}"
    if code in ("failed_precondition", "aborted"):
        return f"put right what the service names, or wait until it is over; then try again{show}"
    return "try again later; if it stays, tell CoreWeave support the time and the request id"


def _what_there_is(low: str, where: str) -> str:
    """Return the command that lists what the refused call was about: a field that it names, or what is in its path."""
    path = where.lower()
    if "gatewayid" in low or "/deployments/parameters" in path:
        kind = "gateway"
    elif "deploymentid" in low or (path.startswith("delete") and "/gateways" in path):
        kind = "deployment"  # which deployment is meant, or uses the gateway
    else:
        kind = next((word for word in ("gateway", "deployment", "hotload") if f"/{word}s" in path), "")
    return f"; see what there is with: cwtrain {kind} list" if kind else ""
