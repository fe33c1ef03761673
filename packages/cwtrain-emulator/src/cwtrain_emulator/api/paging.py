"""Page sizes and page tokens: opaque, signed, and bound to what they were made for."""

from __future__ import annotations

import base64
import binascii
import hmac
import json
from typing import Any

from cwtrain_emulator.api.errors import invalid
from cwtrain_emulator.api.wire import as_int32

__all__ = ["page_size", "page_token", "read_page_token"]

_DEFAULT, _LARGEST = 50, 1000
_MAC_BYTES = 16


def page_size(value: str | None) -> int:
    """Return how many entries a page has: 50 when absent or 0, at most 1000; a negative size is refused."""
    if value is None or value == "":
        return _DEFAULT
    size = as_int32(value)
    if size is None:
        raise invalid(("maxPageSize", "must be a 32-bit integer"))
    if size < 0:
        raise invalid(("maxPageSize", "must not be negative"))
    return min(size, _LARGEST) or _DEFAULT


def page_token(key: str, scope: str, cursor: Any) -> str:
    """Return the token of the page after `cursor`, good only for the list that `scope` names."""
    payload = json.dumps(cursor, separators=(",", ":")).encode()
    return base64.urlsafe_b64encode(_mac(key, scope, payload) + payload).decode().rstrip("=")


def read_page_token(key: str, scope: str, token: str) -> Any:
    """Return the cursor in a token; raise INVALID_ARGUMENT for one that was not made for this list."""
    refusal = invalid(("pageToken", "is not a token of this list with this filter"))
    try:
        raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise refusal from None
    payload = raw[_MAC_BYTES:]
    if not hmac.compare_digest(raw[:_MAC_BYTES], _mac(key, scope, payload)):
        raise refusal
    return json.loads(payload)


def _mac(key: str, scope: str, payload: bytes) -> bytes:
    return hmac.digest(key.encode(), scope.encode() + b"\0" + payload, "sha256")[:_MAC_BYTES]
