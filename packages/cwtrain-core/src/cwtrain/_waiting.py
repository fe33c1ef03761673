"""Waiting: a budget of seconds, which failures pass by themselves, and how long to pause until the next try.

One policy for the API and for the object store. What passes: no answer (a refused certificate aside), 408, 429, every
5xx except 501, and the store's own words for "later" under another status. The pauses grow with jitter; what the other
side asks for (Retry-After, RetryInfo) is the least of them.
"""

from __future__ import annotations

import datetime as dt
import logging
import math
import random
import re
import ssl
import time
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime

import attrs

from cwtrain.errors import APIError, ConfigError, CWTrainError, StorageError, TransportError, WaitTimeoutError

__all__ = ["Deadline", "Outage", "Pauses", "check_seconds", "header_floor", "passes"]

_LEAST_SECONDS = 0.001
"""What is left of a time that is over, where nothing else may be asked for: a last look."""
_TELL_SECONDS = 14.0
"""Somebody who waits is told what for with the first try after that: every half minute at least."""

CLOCK_SKEW = "RequestTimeTooSkewed"
_LATER = {
    "BandwidthLimitExceeded",
    "InternalError",
    "OperationAborted",
    "PriorRequestNotComplete",
    "RequestLimitExceeded",
    "RequestThrottled",
    "RequestThrottledException",
    "RequestTimeout",
    "RequestTimeoutException",
    "ServiceUnavailable",
    "SlowDown",
    "SlowDownRead",
    "SlowDownWrite",
    "ThrottledException",
    "Throttling",
    "ThrottlingException",
    "TooManyRequests",
    "TooManyRequestsException",
    "UnreadableAnswer",
}
"""Codes of a store that ask to come again, whatever status they come with."""


def check_seconds(name: str, value: float) -> float:
    """Return ``value`` if it is a finite number above zero, else raise ``ConfigError`` naming the argument."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise ConfigError(f"{name}={value!r} must be a finite number of seconds above 0", hint=f"correct {name}")
    return float(value)


class Deadline:
    """A time budget that several waits share; it starts now.

    ``seconds`` must be finite and above 0; None is a time without end. ``used`` of them were spent before.
    """

    def __init__(
        self,
        seconds: float | None,
        clock: Callable[[], float] = time.monotonic,
        *,
        name: str = "timeout",
        used: float = 0.0,
    ) -> None:
        self.seconds = None if seconds is None else check_seconds(name, seconds)
        self._clock = clock
        self._began = clock() - used

    def spent(self) -> float:
        """Return the seconds since the start."""
        return self._clock() - self._began

    def left(self) -> float:
        """Return the seconds that are left, infinite without an end, at least 0."""
        return math.inf if self.seconds is None else max(0.0, self.seconds - self.spent())

    def late(self, seconds: float) -> bool:
        """Return whether the end was so many seconds ago."""
        return self.seconds is not None and self.spent() > self.seconds + seconds

    def at_most(self, seconds: float) -> float:
        """Return ``seconds``, or what is left if that is less."""
        return max(_LEAST_SECONDS, min(seconds, self.left()))

    def check(self, what: str) -> None:
        """Raise WaitTimeoutError if the time is over; ``what`` says what was being done."""
        if not self.left():
            raise self.over(what)

    def over(self, what: str, last: CWTrainError | None = None) -> WaitTimeoutError:
        """Return the error of a time that is over; ``last`` is what went wrong last."""
        return WaitTimeoutError(
            f"the {self.seconds:g} s of this call are over; it was {what}" + (f": {last}" if last else ""),
            last_seen=str(last) if last else what,
            hint="the same call goes on where this one stopped. CWTRAIN_HOTLOAD_DEADLINE sets the time; a full "
            "snapshot takes longest",
        )


def passes(error: BaseException) -> bool:
    """Return whether the same request may succeed a moment later."""
    if isinstance(error, TransportError):
        return not _is_untrusted(error)
    if isinstance(error, (APIError, StorageError)):
        if isinstance(error, StorageError) and error.code in _LATER:
            return True
        return error.status is not None and (
            error.status in (408, 429) or (error.status >= 500 and error.status != 501)
        )
    return False


def _is_untrusted(error: BaseException) -> bool:
    """Return whether a certificate was refused, which no second try changes."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ssl.SSLCertVerificationError) or "CERTIFICATE_VERIFY_FAILED" in str(cause):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def header_floor(headers: Mapping[str, str], now: Callable[[], dt.datetime]) -> float | None:
    """Return the seconds of Retry-After, a number or a date; a date counts from the server's own clock if it tells.

    The names of ``headers`` are in lower case.
    """
    text = headers.get("retry-after", "").strip()
    if re.fullmatch(r"\d+(\.\d*)?", text):
        return float(text)
    at = _http_date(text)
    if at is None:
        return None
    return max(0.0, (at - (_http_date(headers.get("date", "")) or now())).total_seconds())


def _http_date(text: str) -> dt.datetime | None:
    try:
        at = parsedate_to_datetime(text)
    except (TypeError, ValueError, IndexError):
        return None
    return at if at.tzinfo else at.replace(tzinfo=dt.UTC)


def jitter(low: float, high: float) -> float:
    """Return a random number between the two; a function, so that a pickled policy carries no random state."""
    return random.uniform(low, high)  # noqa: S311 - spreads tries, hides nothing


@attrs.frozen(kw_only=True)
class Pauses:
    """How long to pause before the next try: growing, with jitter, never less than what was asked for."""

    first: float = 0.25
    longest: float = 8.0
    uniform: Callable[[float, float], float] = jitter

    def after(self, tries: int, *, floor: float, left: float) -> float:
        """Return the pause after so many ``tries``; the last one is at the very end of what is ``left``."""
        growth = min(self.longest, self.first * 2.0 ** min(tries - 1, 16))
        return min(left, max(floor, growth) + self.uniform(0, growth))


class Outage:
    """One outage, from its first failure to the next success; ``seconds`` is how long it may last."""

    def __init__(self, deadline: Deadline, *, seconds: float, clock: Callable[[], float], pauses: Pauses) -> None:
        self.tries = 0
        self._deadline = deadline
        self._seconds = seconds
        self._clock = clock
        self._pauses = pauses
        self._began = self._told = clock()

    def spent(self) -> float:
        """Return the seconds since it began."""
        return self._clock() - self._began

    def left(self) -> float:
        """Return how long it may still last."""
        return min(self._deadline.left(), max(0.0, self._seconds - self.spent()))

    def ends_with_the_call(self) -> bool:
        """Return whether the deadline is what ends it, and not how long an outage may last."""
        return self._deadline.left() <= max(0.0, self._seconds - self.spent())

    def pause(self, error: CWTrainError, what: str, log: logging.Logger, *, floor: float) -> float | None:
        """Return the seconds until the next try, or None where the time for it is over.

        Who waits is told at the beginning and then every half minute at least.
        """
        self.tries += 1
        left = self.left()
        if left <= 0 or floor > left:
            return None
        now = self._clock()
        if self.tries == 1 or now - self._told >= _TELL_SECONDS:
            self._told = now
            log.warning("%s: no usable answer for %.0f s, tried for %.0f s more: %s", what, self.spent(), left, error)
        return self._pauses.after(self.tries, floor=floor, left=left)
