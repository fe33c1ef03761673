"""The wait loop: fetch, look, report, sleep, until it is done or the deadline has come."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from cwtrain._waiting import Deadline, check_seconds
from cwtrain.errors import CWTrainError, WaitTimeoutError
from cwtrain.infra._retry import is_retryable
from cwtrain.infra._status import retry_floor
from cwtrain.waits import waiting

__all__ = ["Deadline", "check_seconds", "poll"]

T = TypeVar("T")

EAGER_SECONDS = 0.1
"""The first pause of an eager wait."""

logger = logging.getLogger("cwtrain.infra")


def poll(
    fetch: Callable[[], T],
    *,
    done: Callable[[T], bool],
    timeout: float | Deadline,
    poll_interval: float,
    describe: Callable[[T], str],
    what: str = "an answer",
    on_progress: Callable[[T, float], None] | None = None,
    timeout_error: Callable[[T | None, str, float], CWTrainError] | None = None,
    eager: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Return the first value of ``fetch`` for which ``done`` is true.

    ``fetch`` failing with an outage (see ``is_retryable``) is ridden out until the deadline; any other error of it, and
    whatever ``done`` raises, ends the wait at once. ``what`` says what is waited for, ``describe`` puts a value into
    words. ``on_progress`` gets each value and the seconds spent. There is always a last look at the deadline itself.
    When time runs out, ``timeout_error(last value, what was seen, seconds)`` is raised, by default a
    ``WaitTimeoutError``.
    ``eager`` looks more often at first (every quarter of the time spent, at least 0.1 s), so that a short job does not
    cost a whole interval. ``timeout`` and ``poll_interval`` are seconds; 0, negative, infinite and NaN are a
    ``ConfigError``.
    """
    deadline = timeout if isinstance(timeout, Deadline) else Deadline(check_seconds("timeout", timeout), clock)
    check_seconds("poll_interval", poll_interval)
    value: T | None = None
    seen = "nothing yet"
    outage: CWTrainError | None = None

    def goes_on() -> str:
        trouble = "" if outage is None else f", and the last look failed: {outage}"
        return f"waiting for {what}: {seen}{trouble}"

    with waiting(goes_on, seconds=deadline.left(), clock=clock) as wait:
        while True:
            floor = 0.0
            last_look = deadline.left() <= 0
            try:
                value = fetch()
            except CWTrainError as error:
                if not is_retryable(error):
                    raise
                if outage is None:
                    logger.warning("no usable answer while waiting, waiting on: %s", error)
                outage, floor = error, retry_floor(error)
            else:
                outage, seen = None, describe(value)
                if on_progress is not None:
                    on_progress(value, deadline.spent())
                if done(value):
                    return value
            if last_look:
                break
            pause = min(poll_interval, max(EAGER_SECONDS, deadline.spent() / 4)) if eager else poll_interval
            wait.beat()
            sleep(min(max(pause, floor), deadline.left()))
    if outage is not None:
        seen = f"{seen}; the last look failed: {outage}"
    if timeout_error is not None:
        raise timeout_error(value, seen, deadline.spent()) from outage
    raise WaitTimeoutError(f"not done after {deadline.spent():.1f} s; last seen: {seen}", last_seen=seen) from outage
