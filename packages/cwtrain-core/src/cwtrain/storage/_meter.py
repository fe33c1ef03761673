"""Count bytes as they go, say how fast they go, and hold them back to a limit."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from cwtrain.storage._source import BLOCK

__all__ = ["Meter"]

_WINDOW_SECONDS = 10.0
_SMALLEST_BLOCK = 16 << 10


class Meter:
    """``add`` is called by every sending thread; it blocks where the limit asks for it, until ``stopped`` is set."""

    def __init__(
        self,
        *,
        stopped: threading.Event,
        max_bytes_per_second: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] | None = None,
    ) -> None:
        self.sent_bytes = 0
        self._limit = max_bytes_per_second
        self._clock = clock
        self._wait = wait or stopped.wait
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._began = self._moved = clock()
        self._seen: deque[tuple[float, int]] = deque([(self._began, 0)])

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return self._clock() - self._began

    @property
    def still_seconds(self) -> float:
        """Seconds since bytes were last counted."""
        return self._clock() - self._moved

    @property
    def block_bytes(self) -> int:
        """How many bytes should be added at once, so that a low limit does not come out in bursts."""
        if self._limit is None:
            return BLOCK
        return int(min(BLOCK, max(_SMALLEST_BLOCK, self._limit / 16)))

    def add(self, count: int) -> None:
        """Count ``count`` bytes; fewer than none when bytes are to be sent again."""
        with self._lock:
            self.sent_bytes += count
            self._moved = self._clock()
            if self._limit is None or count <= 0:
                return
            now = self._clock()
            self._free_at = max(now, self._free_at) + count / self._limit
            pause = self._free_at - now
        self._wait(pause)

    def bytes_per_second(self) -> float:
        """Return the rate over the last seconds. To be called regularly, from one thread."""
        now = self._clock()
        self._seen.append((now, self.sent_bytes))
        while len(self._seen) > 2 and now - self._seen[0][0] > _WINDOW_SECONDS:
            self._seen.popleft()
        then, sent = self._seen[0]
        return max(0.0, (self.sent_bytes - sent) / (now - then)) if now > then else 0.0
