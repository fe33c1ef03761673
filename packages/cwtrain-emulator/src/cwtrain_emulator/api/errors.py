"""Refusals as the API answers them: a canonical code, its HTTP status, a message, and google.rpc details."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

__all__ = [
    "ApiError",
    "Violation",
    "already_exists",
    "failed_precondition",
    "internal",
    "invalid",
    "not_found",
    "permission_denied",
    "too_large",
    "unauthenticated",
    "unavailable",
    "unimplemented",
]

Violation = tuple[str, str]
"""A field (or a kind of precondition) and what is wrong with it."""

_TYPE = "type.googleapis.com/google.rpc."

# The number of each code that is used here, and the HTTP status that a JSON gateway gives it.
_CODES = {
    "INVALID_ARGUMENT": (3, 400),
    "NOT_FOUND": (5, 404),
    "ALREADY_EXISTS": (6, 409),
    "PERMISSION_DENIED": (7, 403),
    "RESOURCE_EXHAUSTED": (8, 429),
    "FAILED_PRECONDITION": (9, 400),
    "ABORTED": (10, 409),
    "UNIMPLEMENTED": (12, 501),
    "INTERNAL": (13, 500),
    "UNAVAILABLE": (14, 503),
    "UNAUTHENTICATED": (16, 401),
}


class ApiError(Exception):
    """A call is refused. `code` is the canonical name; `body` is what goes out."""

    def __init__(
        self, code: str, message: str, *, details: Iterable[dict[str, Any]] = (), status: int | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.number, default_status = _CODES[code]
        self.status = default_status if status is None else status
        self.message = message
        self.details = list(details)

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body, in the style of a gRPC JSON gateway."""
        return {"code": self.number, "message": self.message, "details": self.details}


def invalid(*violations: Violation) -> ApiError:
    """Return INVALID_ARGUMENT that names every field and what is wrong with it."""
    message = "; ".join(f"{field}: {what}" if field else what for field, what in violations)
    fields = [{"field": field, "description": what} for field, what in violations]
    return ApiError("INVALID_ARGUMENT", message, details=[{"@type": f"{_TYPE}BadRequest", "fieldViolations": fields}])


def not_found(kind: str, name: str) -> ApiError:
    """Return NOT_FOUND for a resource."""
    return ApiError("NOT_FOUND", f"{kind} {name} not found", details=[_resource_info(kind, name)])


def already_exists(kind: str, name: str, *, what: str = "id") -> ApiError:
    """Return ALREADY_EXISTS: a resource of this kind has this id (or another unique field, `what`)."""
    return ApiError(
        "ALREADY_EXISTS", f"a {kind} with {what} {name} already exists", details=[_resource_info(kind, name)]
    )


def failed_precondition(message: str, *violations: Violation) -> ApiError:
    """Return FAILED_PRECONDITION; each violation is a type and a description."""
    listed = [{"type": kind, "subject": "", "description": what} for kind, what in violations]
    details = [{"@type": f"{_TYPE}PreconditionFailure", "violations": listed}] if listed else []
    return ApiError("FAILED_PRECONDITION", message, details=details)


def unauthenticated() -> ApiError:
    """Return UNAUTHENTICATED: no token, or one that is not known."""
    return ApiError("UNAUTHENTICATED", "the request has no valid bearer token")


def permission_denied(message: str) -> ApiError:
    """Return PERMISSION_DENIED."""
    return ApiError("PERMISSION_DENIED", message)


def too_large(limit: int) -> ApiError:
    """Return the refusal of a body above `limit` bytes."""
    return ApiError("INVALID_ARGUMENT", f"the request's body is longer than {limit} bytes", status=413)


def unimplemented(message: str) -> ApiError:
    """Return UNIMPLEMENTED."""
    return ApiError("UNIMPLEMENTED", message)


def unavailable(message: str) -> ApiError:
    """Return UNAVAILABLE."""
    return ApiError("UNAVAILABLE", message)


def internal() -> ApiError:
    """Return INTERNAL, which says nothing; the log says more."""
    return ApiError("INTERNAL", "internal error")


def _resource_info(kind: str, name: str) -> dict[str, Any]:
    return {"@type": f"{_TYPE}ResourceInfo", "resourceType": kind, "resourceName": name}
