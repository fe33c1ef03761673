"""Who may send now: room in the window, and the endpoint's gate. Works across event loops and threads.

A waiter is a future of its own loop; whoever makes room wakes it there. So one sampler has one window, wherever it is
used.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Awaitable, Callable

import attrs

from cwtrain._process import renew_after_fork
from cwtrain_rollout.gate import Gate
from cwtrain_rollout.window import Window

__all__ = ["Admission"]


@attrs.define(eq=False)
class _Waiter:
    """Somebody who waits, in an event loop. ``granted``: the room is taken already, whatever becomes of the future."""

    weight: int
    loop: asyncio.AbstractEventLoop
    turn: asyncio.Future[None]
    granted: bool = False

    @classmethod
    def here(cls, weight: int) -> _Waiter:
        """Return one of the running event loop."""
        loop = asyncio.get_running_loop()
        return cls(weight, loop, loop.create_future())

    def wake(self) -> None:
        """Set the future, from whatever thread; a loop that is closed has nobody to wake."""
        if self.loop is _running_loop():
            self._set()
        elif not self.loop.is_closed():
            self.loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        if not self.turn.done():
            self.turn.set_result(None)


@attrs.define
class Admission:
    """The window and the gate of one endpoint. ``clock`` is in seconds, ``sleep`` pauses."""

    window: Window
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    gate: Gate = attrs.field(factory=Gate)
    in_flight: int = 0
    peak: int = 0
    _lines: tuple[deque[_Waiter], deque[_Waiter]] = attrs.field(factory=lambda: (deque(), deque()))
    """Those who wait for room: training first, evaluation behind it."""
    _at_gate: list[_Waiter] = attrs.field(factory=list)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def __attrs_post_init__(self) -> None:
        renew_after_fork(self, Admission._leave)

    def _leave(self) -> object:
        """Forget who is on the way and who waits: they are in another process."""
        left = self._lines, self._at_gate
        self._lines, self._at_gate, self._lock = (deque(), deque()), [], threading.Lock()
        self.gate, self.in_flight = Gate(), 0
        return left

    async def acquire(self, weight: int, *, evaluation: bool = False) -> None:
        """Wait for room for ``weight`` choices and take it. First come, first served, but evaluation comes last.

        A request that is larger than the window goes alone.
        """
        with self._lock:
            ahead = self._lines[0] or (self._lines[1] if evaluation else False)
            if not ahead and self._fits(weight):
                self._take(weight)
                return
            self.window.was_the_limit()
            waiter = _Waiter.here(weight)
            self._lines[evaluation].append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            with self._lock:
                if waiter.granted:  # its turn had come in the same moment
                    self.in_flight -= weight
                else:
                    self._lines[evaluation].remove(waiter)
                self._advance()
            raise

    def release(self, weight: int) -> None:
        """Give room back."""
        with self._lock:
            self.in_flight -= weight
            self._advance()

    async def pass_gate(self) -> bool:
        """Wait until the endpoint may be asked, and return whether this request is the probe of a closed gate.

        What becomes of it must be told by ``answered``, ``disappointed``, ``refused`` or ``gave_up``.
        """
        while True:
            with self._lock:
                wait = self.gate.wait(self.clock())
                if not wait:
                    if not self.gate.probing:
                        return self.gate.enter()
                    waiter = _Waiter.here(0)
                    self._at_gate.append(waiter)
            if wait:
                await self.sleep(wait)
            else:
                await waiter.turn

    def epoch(self) -> int:
        """Return the window's epoch, for a request that is about to be sent."""
        return self.window.epoch

    def answered(self, epoch: int, weight: int, queue_seconds: float | None) -> None:
        """Note a whole answer, with how long it waited in the server's queue where that is known."""
        with self._lock:
            self._woken(self.gate.answered())
            self.window.answered(epoch, weight, queue_seconds)
            self._advance()

    def disappointed(self) -> None:
        """Note an answer that cannot be used: somebody is there, but it says nothing about the window."""
        with self._lock:
            self._woken(self.gate.answered())

    def refused(self, epoch: int, *, floor: float, overload: bool, probe: bool) -> bool:
        """Note a refusal; an ``overload`` (429, 503) moves the window. Return True once in an outage."""
        with self._lock:
            if overload:
                self.window.refused(epoch)
            outage = self.gate.refused(self.clock(), floor, probe=probe)
            self._woken(probe)
            return outage

    def gave_up(self, *, probe: bool) -> None:
        """Note a request that was cancelled."""
        with self._lock:
            self.gate.gave_up(probe=probe)
            self._woken(probe)

    def idle(self) -> bool:
        """Say whether nothing is in flight and nobody waits."""
        return not (self.in_flight or self._lines[0] or self._lines[1])

    def _fits(self, weight: int) -> bool:
        return not self.in_flight or self.in_flight + weight <= self.window.size

    def _take(self, weight: int) -> None:
        self.in_flight += weight
        self.peak = max(self.peak, self.in_flight)

    def _advance(self) -> None:
        for line in self._lines:
            while line:
                waiter = line[0]
                if waiter.loop.is_closed():
                    line.popleft()
                    continue
                if not self._fits(waiter.weight):
                    self.window.was_the_limit()
                    return
                line.popleft()
                self._take(waiter.weight)
                waiter.granted = True
                waiter.wake()

    def _woken(self, changed: bool) -> None:
        if changed and self._at_gate:
            waiting, self._at_gate = self._at_gate, []
            for waiter in waiting:
                waiter.wake()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
