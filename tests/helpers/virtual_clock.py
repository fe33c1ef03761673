"""Time that passes only when somebody sleeps, so that waits of hours are tested in microseconds."""

from __future__ import annotations

import attrs


@attrs.define
class VirtualClock:
    """``now()`` is the clock, ``sleep`` moves it; ``slept`` lists the pauses."""

    seconds: float = 1000.0
    slept: list[float] = attrs.field(factory=list)

    def now(self) -> float:
        return self.seconds

    def sleep(self, seconds: float) -> None:
        assert seconds >= 0
        self.slept.append(seconds)
        self.seconds += seconds

    @property
    def spent(self) -> float:
        return self.seconds - 1000.0
