"""The time of the requests under way: what a thread may still spend, and a watch that hangs up what takes longer.

    with limited(left_seconds, silence=60):
        client.put_object(...)          # over by then, with the error of a connection that broke

Time-outs of a socket are for each piece of an answer or of a body, so a store that sends a byte a second never meets
them. The watch closes the connection under the request instead, whatever it is doing. It is one thread for the process,
started with the first limit, and costs a request two entries in a table.
"""

from __future__ import annotations

import contextlib
import math
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from cwtrain._process import renew_after_fork
from cwtrain.errors import RequestTimeoutError

__all__ = ["current_socket", "limited", "seconds_at_most", "unlimited", "watched"]

_LEAST_SECONDS = 0.001
_local = threading.local()


class _Line:
    """What one call of this thread may take: until ``at`` in all, and ``silence`` seconds without a byte."""

    __slots__ = ("at", "cut", "silence", "socket", "tokens")

    def __init__(self, at: float, silence: float) -> None:
        self.at = at
        self.silence = silence
        self.cut = False
        self.tokens: list[int] = []
        self.socket: socket.socket | None = None


@contextlib.contextmanager
def limited(seconds: float, *, silence: float = math.inf) -> Iterator[None]:
    """Let the requests that this thread makes within be over after ``seconds``, or ``silence`` without a byte.

    Raises RequestTimeoutError where a request was cut and nobody noticed: an answer that ends with the connection looks
    whole then.
    """
    outer = getattr(_local, "line", None)
    line = _local.line = _Line(time.monotonic() + seconds, silence)
    try:
        yield
    finally:
        _local.line = outer
        _WATCH.forget(line.tokens)
    if line.cut:
        raise RequestTimeoutError("the answer was cut: the time of the request was over")


def unlimited() -> bool:
    """Return whether this thread has no limit now."""
    return getattr(_local, "line", None) is None


def seconds_at_most(usual: float | None) -> float | None:
    """Return the time-out of a socket: ``usual`` (None: none), or what the limit leaves if that is less."""
    line: _Line | None = getattr(_local, "line", None)
    if line is None:
        return usual
    most = max(_LEAST_SECONDS, min(line.silence, line.at - time.monotonic()))
    if isinstance(usual, (int, float)):
        return min(usual, most)
    return most if most < math.inf else usual


def watched(sock: Any) -> None:
    """Note that this thread's request goes over ``sock`` now: it is hung up when the limit is over."""
    line: _Line | None = getattr(_local, "line", None)
    if line is None or sock is None:
        return
    line.socket = sock
    if line.at < math.inf:
        line.tokens.append(_WATCH.add(line, sock))


def current_socket() -> Any:
    """Return the socket of this thread's last request within the limit, None where that is not known."""
    line: _Line | None = getattr(_local, "line", None)
    return None if line is None else line.socket


class _Watch:
    """One thread that hangs up connections at their times."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._lines: dict[int, tuple[_Line, Any]] = {}
        self._made = 0
        self._wakes = math.inf
        self._running = False

    def add(self, line: _Line, sock: Any) -> int:
        with self._changed:
            self._made += 1
            self._lines[self._made] = (line, sock)
            if not self._running:
                self._running = True
                threading.Thread(target=self._work, daemon=True, name="cwtrain-watch").start()
            elif line.at < self._wakes:
                self._changed.notify()
            return self._made

    def forget(self, tokens: list[int]) -> None:
        if tokens:
            with self._changed:
                for token in tokens:
                    self._lines.pop(token, None)

    def renew(self) -> Any:
        """Begin anew in a forked child, where there is no thread and none of the requests that were under way."""
        left = self._changed, self._lines
        self._changed, self._lines = threading.Condition(), {}
        self._running = False
        return left

    def _work(self) -> None:
        with self._changed:
            while True:
                now = time.monotonic()
                for token in [token for token, (line, _) in self._lines.items() if line.at <= now]:
                    line, sock = self._lines.pop(token)
                    line.cut = True
                    _hang_up(sock)
                self._wakes = min((line.at for line, _ in self._lines.values()), default=math.inf)
                self._changed.wait(None if self._wakes == math.inf else max(0.0, self._wakes - now))


def _hang_up(sock: Any) -> None:
    # Of the socket, not of its TLS: that one's own method would let the sender go on in plain text.
    with contextlib.suppress(OSError, ValueError, TypeError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


_WATCH = _Watch()
renew_after_fork(_WATCH, _Watch.renew)
