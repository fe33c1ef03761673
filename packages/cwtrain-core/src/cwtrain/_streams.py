"""The standard streams of a program: closed, full, or with nobody left who reads them.

What is said to a person on standard error never fails the work that it tells of. Data that standard output does not
take is an error, also where it was closed from the start. Imports nothing that costs time: every command begins here.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # not typing's: see ``cwtrain/__init__.py``
if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType
    from typing import Any

__all__ = ["Unfailing", "UnfailingStderr", "open_closed_streams", "settle_streams"]


class Unfailing:
    """A stream that drops what its stream does not take; everything but writing is that stream's own.

    Dropped is what a full disk, a closed file or a pipe without a reader refuses. Later writes are tried again.
    """

    def __init__(self, stream: Any, kind: type = str) -> None:
        self._stream = stream
        self._kind = kind

    def __getattr__(self, name: str) -> Any:
        if name == "buffer":
            return Unfailing(self._stream.buffer, bytes)
        return getattr(self._stream, name)

    def write(self, text: Any) -> int:
        """Write ``text`` where that is possible, and return its length."""
        if self._kind is str and not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        try:
            try:
                self._stream.write(text)
            except UnicodeError:  # half a character, or a stream that knows few of them: shown as an escape
                self._stream.write(text.encode("ascii", "backslashreplace").decode("ascii"))
        except (OSError, ValueError):  # ValueError: it is closed
            pass
        return len(text)

    def writelines(self, lines: Iterable[Any]) -> None:
        """Write ``lines`` where that is possible."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what is buffered, where that is possible."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        try:
            return bool(self._stream.isatty())
        except (OSError, ValueError):
            return False


class UnfailingStderr:
    """Makes ``sys.stderr`` unfailing inside a ``with`` block, for whoever writes to it: us, plugins, logging, rich."""

    def __enter__(self) -> None:
        self._before = sys.stderr
        self._sink = open(os.devnull, "w") if self._before is None else None
        if not isinstance(self._before, Unfailing):
            sys.stderr = Unfailing(self._sink or self._before)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        sys.stderr = self._before
        if self._sink is not None:
            self._sink.close()


def open_closed_streams() -> None:
    """Open what was closed of file descriptors 0 to 2: else the next file or socket gets the number, and our words.

    Reading finds the end. Writing to standard output fails as to a closed one; standard error goes nowhere.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)  # the lowest free number: this one
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115


def settle_streams() -> None:
    """Drop what neither stream takes, before the process ends: Python would try again, and change the exit code."""
    for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
        try:
            stream.flush()
        except (OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
