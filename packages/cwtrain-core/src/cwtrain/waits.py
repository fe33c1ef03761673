"""What this process waits for, kept in one place, so that no wait is silent.

Whatever may take long is done inside ``waiting``. The command line looks here (``current``) and says a line whenever
nothing was said for ``SILENCE_SECONDS``; a loop that wakes up anyway calls ``beat`` on its wait, which logs as much for
who uses the library. Nothing here starts a thread.
"""

from __future__ import annotations

import datetime as dt
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

from cwtrain.models.text import duration

__all__ = ["SILENCE_SECONDS", "Wait", "current", "serving", "waiting"]

SILENCE_SECONDS: Final = 25.0
"""After so long without a word a wait is told: nobody is left without one for half a minute."""
_INNER_SECONDS: Final = 10.0
"""A wait inside another one is worth a word when it takes as long as that."""
_LONGEST_SECONDS: Final = 1e8
"""What takes longer, years, has no limit that anybody waits for."""
_NO_LIMIT: Final = ", no time limit"

_log = logging.getLogger("cwtrain.waits")
_waits: list[Wait] = []
"""Oldest first. Changed by single operations of the list only, so that no lock can be held where a process forks."""


class Wait:
    """Something that is waited for: what, since when, and until when at most."""

    def __init__(
        self,
        what: str | Callable[[], str],
        *,
        seconds: float | Callable[[], float | None] | None = None,
        part: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.part = part
        """Whether it is a single request, a part of what the person waits for."""
        self._what = what
        self._seconds = seconds
        self._clock = clock
        self._began = self._told = clock()

    @property
    def what(self) -> str:
        """What goes on, in words."""
        return self._what if isinstance(self._what, str) else self._what()

    @property
    def spent(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._began

    @property
    def left(self) -> float | None:
        """Seconds until it is given up; None where it has no limit of its own."""
        left = self._seconds() if callable(self._seconds) else self._seconds
        if left is None or left > _LONGEST_SECONDS:
            return None
        return left if callable(self._seconds) else max(0.0, left - self.spent)

    def words(self, left: float | None = None) -> str:
        """Return what is waited for, since when and until when; ``left`` is the least of the seconds that are left."""
        text, left = f"{self.what}; {duration(round(self.spent))} so far", self.left if left is None else left
        if self.part and not left:  # a request that is answered bit by bit begins anew with each of them
            return text
        if left is None:
            return f"{text}{_NO_LIMIT}"
        until = dt.datetime.now().astimezone() + dt.timedelta(seconds=left)
        return f"{text}, {duration(round(left))} left (until {until:%H:%M:%S})"

    def beat(self) -> None:
        """Log it when it has not been logged for ``SILENCE_SECONDS``; to be called by who waits in a loop."""
        now = self._clock()
        if now - self._told >= SILENCE_SECONDS:
            self._told = now
            _log.info("%s", self.words())


@contextmanager
def waiting(
    what: str | Callable[[], str],
    *,
    seconds: float | Callable[[], float | None] | None = None,
    part: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Wait]:
    """Note inside the block that ``what`` goes on, for ``seconds`` at most (None: without a limit of its own).

    ``what`` is a phrase such as "waiting for ...". It may be a function that gives one, and ``seconds`` one that gives
    how many are left; they may be called in another thread. A single request is a ``part``: it is named where it takes
    long, beside what it is for.
    """
    wait = Wait(what, seconds=seconds, part=part, clock=clock)
    _waits.append(wait)
    try:
        yield wait
    finally:
        _waits.remove(wait)


@contextmanager
def serving() -> Iterator[None]:
    """Note inside the block that this process serves until it is ended, and has said so: that is no wait to be told."""
    with waiting(""):
        yield


def current() -> str | None:
    """Return in words what this process waits for, None where nothing is: the whole, and the request that takes long.

    The whole is what began last, so the innermost of nested ones, and ends when the first of them does; the request is
    the oldest that is under way.
    """
    waits = list(_waits)
    wholes = [wait for wait in waits if not wait.part]
    if wholes and not wholes[-1].what:
        return None
    slow = [wait for wait in waits if wait.part and (wait.spent >= _INNER_SECONDS or not wholes)]
    limits = [left for wait in wholes if (left := wait.left) is not None]
    told = [wait.words(min(limits, default=None)) for wait in wholes[-1:]] + [wait.words() for wait in slow[:1]]
    if len(told) > 1:  # the request says until when
        told[0] = told[0].removesuffix(_NO_LIMIT)
    return "; ".join(told) or None
