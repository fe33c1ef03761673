"""Refusals of the endpoint, in OpenAI style."""

from __future__ import annotations

from typing import Any

__all__ = ["GatewayError"]

_TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    413: "BadRequestError",
    429: "RateLimitError",
    501: "NotImplementedError",
    503: "ServiceUnavailableError",
}


class GatewayError(Exception):
    """A request is refused with an HTTP status; `param` names the field that is wrong, if one is."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        kind = _TYPES.get(self.status, "InternalServerError")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.status}}
