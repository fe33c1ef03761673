"""What belongs to one process: made anew in a forked child, or refused there, and never pickled.

A child of ``fork`` (how multiprocessing starts processes on Linux, unless told otherwise, up to Python 3.13) has a copy
of everything but the threads. A lock that one of them held stays taken for ever, what they were asked to do is never
done, and a connection has two users who read each other's answers. So whoever holds such things either has them made
anew in the child (``renew_after_fork``) or says there, in one error, what to do instead (``OneProcess``).

Nothing is done before a fork and nothing in the parent: a fork waits for nobody. In the child there are assignments
only. What is left behind is not closed: closing takes locks, and TLS would end the parent's connection.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self, SupportsIndex, TypeVar

from cwtrain.errors import ConfigError

__all__ = ["NotPickled", "OneProcess", "renew_after_fork", "renew_locks_after_fork"]

T = TypeVar("T")

_OWNERS: dict[tuple[int, Callable[[Any], object]], tuple[weakref.ref[Any], Callable[[Any], object]]] = {}
_LEFT_BEHIND: list[Any] = []


def renew_after_fork(owner: T, renew: Callable[[T], object]) -> None:
    """Have ``renew(owner)`` called in every forked child, as long as ``owner`` lives (an object, or a module).

    It assigns new locks, pools and connections; what it returns is kept, so that nothing of the parent's is closed by
    being collected. ``renew`` must not hold ``owner``.
    """
    key = (id(owner), renew)
    _OWNERS[key] = (weakref.ref(owner, lambda _: _OWNERS.pop(key, None)), renew)


def renew_locks_after_fork(owner: object, *names: str) -> None:
    """Have the locks that are these attributes of ``owner`` (an object, or a module) be free in every forked child."""

    def renew(owner: object) -> list[Any]:
        held = [getattr(owner, name) for name in names]
        for name, lock in zip(names, held, strict=True):
            setattr(owner, name, threading.RLock() if isinstance(lock, _REENTRANT) else threading.Lock())
        return held

    renew_after_fork(owner, renew)


_REENTRANT = type(threading.RLock())


def _renew() -> None:
    problems = []
    for reference, renew in list(_OWNERS.values()):
        if (owner := reference()) is not None:
            try:
                _LEFT_BEHIND.append(renew(owner))
            except Exception as error:  # noqa: BLE001 - the others are renewed all the same
                problems.append(error)
    if problems:
        raise problems[0]  # Python prints it: there is no caller


if hasattr(os, "register_at_fork"):  # not where nothing forks
    os.register_at_fork(after_in_child=_renew)


class NotPickled:
    """Does not pickle: a TypeError says what to give the other process instead (``_instead``)."""

    __slots__ = ()

    _instead: ClassVar[str]

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"a {type(self).__name__} stays in its process and cannot be pickled: {self._instead}")


class OneProcess(NotPickled):
    """Works in the process that made it, and in no fork of that.

    ``_check_process`` comes first in what a caller may call: before any lock.
    """

    _made_in: int

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Note whose it is."""
        made = super().__new__(cls)
        made._made_in = os.getpid()
        return made

    @property
    def _in_fork(self) -> bool:
        return self._made_in != os.getpid()

    def _check_process(self) -> None:
        if self._in_fork:
            raise ConfigError(
                f"this {type(self).__name__} belongs to process {self._made_in}, and this is process {os.getpid()}, "
                "forked from it: its threads, locks and connections did not come along",
                hint=f"use it in the process that made it, or {self._instead}",
            )
