"""What is worth another try, and when: the one retry policy. Nothing above it retries.

Tried again, on every verb: transport errors, 408, 429, every 5xx except 501, and a 2xx whose body is not JSON. That is
safe because all creates carry an id that we chose and deletes are idempotent. The limit is a budget in seconds, not a
count; what the service asks for (Retry-After, RetryInfo) is the least pause.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import attrs
import stamina

from cwtrain._waiting import Pauses, jitter, passes
from cwtrain.errors import CWTrainError, UnexpectedAnswerError
from cwtrain.infra._status import retry_floor

__all__ = ["RetryPolicy", "is_retryable"]

T = TypeVar("T")

logger = logging.getLogger("cwtrain.infra")
_SILENCE = 5.0
"""Seconds of failing tries after which a person who waits is told, once for each call."""


def is_retryable(error: BaseException) -> bool:
    """Return whether the same call may succeed a moment later."""
    if isinstance(error, UnexpectedAnswerError) and isinstance(
        error.__cause__, (json.JSONDecodeError, UnicodeDecodeError)
    ):
        return True  # a 2xx that is not JSON: a proxy's page, or an answer that was cut
    return passes(error)


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """Exponential pauses with jitter within a budget of ``seconds``; 0 means one try.

    ``clock``, ``sleep`` and ``uniform`` (the jitter) are there for tests; without ``sleep`` stamina sleeps.
    """

    seconds: float = 60.0
    first_pause: float = 0.25
    longest_pause: float = 8.0
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] | None = None
    uniform: Callable[[float, float], float] = jitter

    def call(self, attempt: Callable[[], T]) -> T:
        """Return what ``attempt()`` returns, tried until it succeeds, fails for good, or the budget is spent.

        The error that is raised says how often and how long it was tried, and why no longer.
        """
        run = _Run(self)
        try:
            return attempt()
        except Exception as error:  # noqa: BLE001 - raised again below, as the first of the tries
            failed = [error]

        # Made only now: most calls succeed at once, and this costs more than all else that we do about a call.
        def one_try() -> T:  # of our own module, by which stamina's lines about it are known
            if failed:
                raise failed.pop()
            return attempt()

        try:
            return stamina.retry(on=run.pause_after, attempts=None, timeout=None)(one_try)()
        except CWTrainError as error:
            run.explain(error)
            raise


class _Run:
    """The tries of one call."""

    def __init__(self, policy: RetryPolicy) -> None:
        self.policy = policy
        self.began = policy.clock()
        self.tries = 0
        self.reason = ""
        self.told = False

    def pause_after(self, error: Exception) -> bool | float:
        """Return the seconds until the next try, or False when there is none (stamina's back-off hook)."""
        self.tries += 1
        if not isinstance(error, CWTrainError) or not is_retryable(error):
            return False
        policy = self.policy
        spent = policy.clock() - self.began
        left = policy.seconds - spent
        if left <= 0:
            return False
        floor = retry_floor(error)
        if floor > left:
            self.reason = f"the service asks to wait {floor:g} s, which is more than the {left:.3g} s left"
            return False
        pauses = Pauses(first=policy.first_pause, longest=policy.longest_pause, uniform=policy.uniform)
        pause = pauses.after(self.tries, floor=floor, left=left)
        if spent >= _SILENCE and not self.told:
            self.told = True
            logger.warning("still failing after %.0f s, tried for %.0f s more: %s", spent, left, error)
        else:
            logger.info("try %d failed, next in %.2f s: %s", self.tries, pause, error)
        if policy.sleep is None:
            return pause
        policy.sleep(pause)
        return 0.0

    def explain(self, error: CWTrainError) -> None:
        """Add to the message how hard it was tried."""
        said = [self.reason] if self.reason else []
        if self.tries > 1:
            spent = self.policy.clock() - self.began
            said.append(f"gave up after {self.tries} tries in {spent:.1f} s")
        if said:
            error.message = f"{error.message}; {', '.join(said)}"
            error.args = (error.message,)


def _not_ours(record: logging.LogRecord) -> bool:
    """Drop stamina's own lines about our calls: ``pause_after`` says more."""
    return not str(record.__dict__.get("stamina.callable", "")).startswith("cwtrain")


logging.getLogger("stamina").addFilter(_not_ours)
