"""One look at the API for ``cwtrain doctor``: does anything answer, how fast, and what time is it there."""

from __future__ import annotations

import datetime as dt
import email.utils
import time

import attrs

from cwtrain.config.api import ApiConfig
from cwtrain.infra._http import Http

__all__ = ["Probe", "probe"]


@attrs.frozen(kw_only=True)
class Probe:
    """What came back: HTTP status, seconds it took, and how far our clock is ahead of the server's.

    ``skew_seconds`` is None when the answer has no usable date; it is exact to about a second.
    """

    status: int
    seconds: float
    skew_seconds: float | None


def probe(config: ApiConfig, *, timeout: float = 10.0) -> Probe:
    """Ask the API one cheap question, once. Any answer will do, a refusal too; no answer is a ``TransportError``."""
    # Whether there is a token is another question; without one the header would not be a valid one.
    http = Http(config if config.token else attrs.evolve(config, token="none"))  # noqa: S106 - not a password
    try:
        began, sent_at = time.monotonic(), dt.datetime.now(dt.UTC)
        status, headers, _ = http._exchange(
            "GET", "/gateways/parameters", None, None, timeout, "GET /gateways/parameters"
        )
        seconds = time.monotonic() - began
    finally:
        http.close()
    return Probe(status=status, seconds=seconds, skew_seconds=_skew(headers.get("date"), sent_at, seconds))


def _skew(date: str | None, sent_at: dt.datetime, seconds: float) -> float | None:
    try:
        server = email.utils.parsedate_to_datetime(date or "")
    except ValueError:
        return None
    if server.tzinfo is None:
        server = server.replace(tzinfo=dt.UTC)
    # The server wrote its date somewhere between the request and the answer.
    return (sent_at + dt.timedelta(seconds=seconds / 2) - server).total_seconds()
