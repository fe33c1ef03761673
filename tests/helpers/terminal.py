"""A program on a terminal of a given width, and what it wrote there: lines, and frames of lines that are redrawn."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Mapping
from unittest import mock

import attrs

_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][A-Z0-9]")


@attrs.frozen
class Seen:
    """What a terminal was sent, both streams together."""

    code: int
    raw: str

    @property
    def lines(self) -> list[str]:
        """Every line and every frame of a redrawn line, without colours and the moves of the cursor."""
        return [line.rstrip() for line in re.split(r"[\r\n]+", _SEQUENCE.sub("", self.raw)) if line.strip()]

    @property
    def text(self) -> str:
        """The lines as one text."""
        return "\n".join(self.lines)


def shown(*args: str, columns: int = 80, env: Mapping[str, str] | None = None) -> Seen:
    """Run ``cwtrain args`` in this process with a terminal of ``columns`` as its output: no new interpreter."""
    from cwtrain.cli import main

    ours, theirs = _open(columns)
    written = bytearray()

    def read() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while block := os.read(ours, 65536):
                written.extend(block)

    reader = threading.Thread(target=read)
    reader.start()
    with (
        mock.patch.dict(os.environ, {**_environ(), **(env or {})}, clear=True),
        open(theirs, "w", encoding="utf-8", buffering=1) as stream,
        contextlib.redirect_stdout(stream),
        contextlib.redirect_stderr(stream),
    ):
        code = main(list(args))
    reader.join(60)
    os.close(ours)
    return Seen(code, written.decode("utf-8", "replace"))


def _open(columns: int) -> tuple[int, int]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    return ours, theirs


def _environ() -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    return {**kept, "TERM": "xterm"}


def on_terminal(
    *args: str, columns: int = 80, env: Mapping[str, str] | None = None, program: tuple[str, ...] = ("-m", "cwtrain")
) -> Seen:
    """Run ``python -m cwtrain args`` with a terminal of ``columns`` as its streams, and wait for it."""
    ours, theirs = _open(columns)
    process = subprocess.Popen(
        [sys.executable, *program, *args],
        env={**_environ(), **(env or {})},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        close_fds=True,
    )
    os.close(theirs)
    written = bytearray()
    limit = time.monotonic() + 120
    try:
        while time.monotonic() < limit:
            if not select.select([ours], [], [], 1)[0]:
                continue
            try:
                block = os.read(ours, 65536)
            except OSError:  # the last one who held the other end has gone
                break
            if not block:
                break
            written += block
        return Seen(process.wait(timeout=10), written.decode("utf-8", "replace"))
    finally:
        process.kill()
        os.close(ours)
