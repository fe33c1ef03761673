"""Mechanisms of the project switched off in this process, for the rows that show what each of them buys.

The names in `CWTRAIN_BENCH_WITHOUT` (comma-separated) are switched off by `apply`, which operations call before
anything of `cwtrain` is used. A mechanism that is deleted goes from here with its row.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Callable
from typing import Any

VARIABLE = "CWTRAIN_BENCH_WITHOUT"


def own_connections() -> None:
    """Let botocore send everything; bodies hand out 1 MiB views, which it passes on as they are."""
    from cwtrain.storage import _memory_body, _part_bodies, s3

    s3.send_with_own_sockets = lambda client: False

    def read_part(self: Any, size: int = -1) -> Any:
        if size is None or size < 0:
            return b"".join(bytes(block) for block in iter(lambda: self.read(1 << 20), b""))
        if self._given == len(self._block):
            self._load()
        piece = self._block[self._given :]
        self._given = len(self._block)
        return piece

    def read_memory(self: Any, size: int = -1) -> Any:
        if size is None or size < 0:
            return b"".join(bytes(block) for block in iter(lambda: self.read(1 << 20), b""))
        return self._next(self._block_bytes)

    _part_bodies.PartBody.read = read_part
    _memory_body.MemoryBody.read = read_memory


def native() -> None:
    """Have numpy find where two versions differ."""
    sys.modules["cwtrain_native"] = None  # type: ignore[assignment]


def overlapped_parts() -> None:
    """Give the parts of a file no memory in which one waits to be sent while the next is read."""
    from cwtrain.storage import _buffers

    _buffers.Buffers.take = lambda self, size: None  # type: ignore[method-assign,assignment]


def entry_points() -> None:
    """Find plugins by `importlib.metadata`."""
    from cwtrain.plugins import manager

    manager.find_entry_points = lambda group: list(importlib.metadata.entry_points(group=group))


MECHANISMS: dict[str, Callable[[], None]] = {
    function.__name__: function for function in (own_connections, native, overlapped_parts, entry_points)
}


def apply() -> None:
    """Switch off what the environment names."""
    for name in filter(None, os.environ.get(VARIABLE, "").split(",")):
        MECHANISMS[name]()


if __name__ == "__main__":  # the command `cwtrain`, with its arguments
    apply()
    from cwtrain.__main__ import run

    sys.exit(run())
