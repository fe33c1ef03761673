"""When the next request may go to an endpoint that refuses. Pure: times are passed in, in seconds of one clock.

``Retry-After`` holds back every new request. After five refusals in a row without an answer the gate is closed: one
request at a time goes out to look whether the endpoint is back, with pauses between them.
"""

from __future__ import annotations

__all__ = ["Gate"]

_PATIENCE = 5
_FIRST_PAUSE = 0.5
_LONGEST_PAUSE = 5.0


class Gate:
    """One endpoint's gate."""

    def __init__(self) -> None:
        self._held_until = float("-inf")
        self._refusals = 0
        self._failed_probes = 0
        self._probing = False
        self.closed_since: float | None = None
        """Since when one probe at a time goes out; None while the endpoint answers."""

    @property
    def probing(self) -> bool:
        """Whether a probe is under way: the next one waits for its outcome."""
        return self._probing

    def wait(self, now: float) -> float:
        """Return the seconds until any request may go; 0.0 where nothing holds it back but a probe's outcome."""
        return max(0.0, self._held_until - now)

    def enter(self) -> bool:
        """Let a request through, and say whether it is the probe. It must report what became of it."""
        self._probing = self.closed_since is not None
        return self._probing

    def answered(self) -> bool:
        """Note an answer, good or bad: somebody is there. Return True when that opened the gate."""
        opened = self.closed_since is not None
        self._refusals = self._failed_probes = 0
        self._probing = False
        self.closed_since = None
        return opened

    def refused(self, now: float, floor: float = 0.0, *, probe: bool = False) -> bool:
        """Note a refusal that asked for ``floor`` seconds. Return True once in an outage, when a probe fails."""
        self._refusals += 1
        self._held_until = max(self._held_until, now + floor)
        if self._refusals < _PATIENCE:
            return False
        # A server that is only full refuses many in a row as well, until its next answer.
        outage = probe and self._failed_probes == 1
        closed = self.closed_since is None
        if closed:
            self.closed_since = now
        if closed or probe:
            pause = min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(self._failed_probes, 10))
            self._held_until = max(self._held_until, now + pause)
            self._failed_probes += 1
        if probe:
            self._probing = False
        return outage

    def gave_up(self, *, probe: bool) -> None:
        """Note that a request ended without an outcome: it was cancelled."""
        if probe:
            self._probing = False
