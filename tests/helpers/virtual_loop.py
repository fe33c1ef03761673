"""An event loop whose time passes only when everybody waits: hours of a rollout in seconds, the same every time."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _Jumping(selectors.DefaultSelector):
    """A selector that never waits; it tells how long it would have."""

    def __init__(self, jump: Callable[[float], None]) -> None:
        super().__init__()
        self._jump = jump

    def select(self, timeout: float | None = None) -> Any:
        found = super().select(0)
        if not found and timeout:
            self._jump(timeout)
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """``time()`` is virtual; ``asyncio.sleep`` and all timers go by it."""

    def __init__(self) -> None:
        self._now = 1000.0
        super().__init__(_Jumping(self._pass))

    def time(self) -> float:
        return self._now

    def _pass(self, seconds: float) -> None:
        self._now += seconds


def run_virtually(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a coroutine function to its end on a loop of its own, whose clock begins at 1000."""
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(work())
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()
