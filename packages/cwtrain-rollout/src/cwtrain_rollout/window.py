"""How many choices may be in flight: a fixed number, or one that follows what the server says. Pure, no clock.

The adaptive window W moves in rounds. A round is W choices answered to requests that were sent under the present W;
answers to older requests say nothing about it. The signal of a round is the mean queue time of its own answers, never
averaged across rounds (an average that remembers the last rounds makes one overload count as several).
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["AdaptiveWindow", "FixedWindow", "Window"]

START = 8
"""Choices in flight at first, for each replica."""
MAXIMUM = 256
"""Choices in flight at most, for each replica."""
TARGET = 0.5
"""Seconds that a choice may wait in the server's queue, in the mean of a round."""

_CUT = 0.85
_GROWTH = 1.1
_NEAR = 0.95
"""From this share of the ceiling on the window grows by 1 every `_NEAR_ROUNDS` rounds, for `_NEAR_PATIENCE` rounds."""
_NEAR_ROUNDS = 4
_NEAR_PATIENCE = 12


class Window(Protocol):
    """What the admission of requests asks, and tells."""

    @property
    def size(self) -> int:
        """How many choices may be in flight now."""
        ...

    @property
    def epoch(self) -> int:
        """Changes whenever ``size`` does; a request remembers the one that it was sent in."""
        ...

    def was_the_limit(self) -> None:
        """Hear that a request had to wait for room."""
        ...

    def answered(self, epoch: int, weight: int, queue_seconds: float | None) -> None:
        """Hear of an answer with ``weight`` choices to a request of ``epoch``, and how long it had queued."""
        ...

    def refused(self, epoch: int) -> None:
        """Hear of a 429 or 503 to a request of ``epoch``."""
        ...


class FixedWindow:
    """A number that nothing changes."""

    epoch = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def was_the_limit(self) -> None:
        """Nothing follows."""

    def answered(self, epoch: int, weight: int, queue_seconds: float | None) -> None:
        """Nothing follows."""

    def refused(self, epoch: int) -> None:
        """Nothing follows."""


class AdaptiveWindow:
    """Doubles until its first cut; then it looks for the largest W that the server takes without a long queue.

    ``start`` and ``maximum`` are choices for each replica, ``target`` is in seconds.
    """

    def __init__(
        self, *, replicas: int = 1, start: int = START, maximum: int = MAXIMUM, target: float = TARGET
    ) -> None:
        self._most = max(1, maximum) * replicas
        self._least = replicas
        self._size = float(min(start * replicas, self._most))
        self._target = target
        self._ceiling: float | None = None
        self._was_cut = False
        self._near_rounds = 0
        self.epoch = 0
        self.cuts = 0
        self._new_round()

    @property
    def size(self) -> int:
        """How many choices may be in flight now."""
        return int(self._size)

    def was_the_limit(self) -> None:
        """Hear that a request had to wait for room: without that, the window has no reason to grow."""
        self._limited = True

    def answered(self, epoch: int, weight: int, queue_seconds: float | None) -> None:
        """Count an answer, and end the round when it has W choices."""
        if epoch != self.epoch:
            return
        self._answers += weight
        if queue_seconds is not None:
            self._timed += weight
            self._queued += weight * queue_seconds
        if self._answers < self.size:
            return
        if self._timed and self._queued / self._timed > self._target:
            self._cut()
        elif self._limited:
            self._grow()
        self._new_round()

    def refused(self, epoch: int) -> None:
        """Cut the window, once in a round."""
        if epoch == self.epoch:
            self._cut()
            self._new_round()

    def _new_round(self) -> None:
        self._answers = self._timed = 0
        self._queued = 0.0
        self._limited = False

    def _cut(self) -> None:
        self.cuts += 1
        self._was_cut = True
        self._ceiling = self._size
        self._near_rounds = 0
        # At least one less: of a small window 15 % may be less than a whole choice.
        self._set(min(self._size * _CUT, self.size - 1))

    def _grow(self) -> None:
        if not self._was_cut:
            self._set(self._size * 2)
            return
        if self._ceiling is None or self._size < _NEAR * self._ceiling:
            grown = max(self._size * _GROWTH, self.size + 1)
            self._set(grown if self._ceiling is None else min(grown, max(self.size + 1, _NEAR * self._ceiling)))
            return
        self._near_rounds += 1
        if self._near_rounds > _NEAR_PATIENCE:
            # The server takes more than it did when the ceiling was found.
            self._ceiling = None
            self._set(max(self._size * _GROWTH, self.size + 1))
        elif self._near_rounds % _NEAR_ROUNDS == 0:
            self._set(self.size + 1)

    def _set(self, size: float) -> None:
        before = self.size
        self._size = min(max(size, self._least), self._most)
        if self.size != before:
            self.epoch += 1
