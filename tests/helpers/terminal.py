"""A program on a terminal of a given width, and what it wrote there: lines, and frames of lines that are redrawn."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

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


def on_terminal(
    *args: str, columns: int = 80, env: Mapping[str, str] | None = None, program: tuple[str, ...] = ("-m", "cwtrain")
) -> Seen:
    """Run ``python -m cwtrain args`` with a terminal of ``columns`` as its streams, and wait for it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environ = {key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, *program, *args],
        env={**environ, "TERM": "xterm", **(env or {})},
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
