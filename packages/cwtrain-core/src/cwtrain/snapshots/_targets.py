"""Where the bytes of a new version go while they are in memory: beside their encoding, decoding or checksum."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Protocol

from cwtrain.snapshots.checkpoint import Tensor


class Target(Protocol):
    """Takes new bytes from several workers, in any order."""

    def offset(self, tensor: Tensor, start: int) -> int:
        """Return where in its file the bytes from ``start`` on of ``tensor`` will be written."""
        ...

    def follows(self, tensor: Tensor, after: Tensor) -> bool:
        """Return whether ``tensor`` begins where ``after`` ends, so that both can be written at once."""
        ...

    def write(self, tensor: Tensor, start: int, new: Sequence[memoryview], old: Sequence[memoryview]) -> None:
        """Take new bytes, and the old ones that they replace: views that are valid during the call.

        They begin at byte ``start`` of ``tensor``, a tensor of the old version, and may go on over those that follow it
        there.
        """
        ...


class FileTarget:
    """Writes into existing files. ``places`` says for each tensor in which, and where it begins there.

    Close it when all workers are done.
    """

    def __init__(self, places: Mapping[str, tuple[str, int]]) -> None:
        self._places = places
        # Workers that write to one file wait here, asleep: the kernel would let them spin for the file's lock.
        self._turns = {path: threading.Lock() for path, _ in places.values()}
        self._local = threading.local()
        self._open: set[int] = set()
        self._lock = threading.Lock()

    def offset(self, tensor: Tensor, start: int) -> int:
        """Return where the bytes from ``start`` on of ``tensor`` go."""
        return self._places[tensor.name][1] + start

    def follows(self, tensor: Tensor, after: Tensor) -> bool:
        """Return whether ``tensor`` begins where ``after`` ends."""
        path, offset = self._places[after.name]
        return self._places[tensor.name] == (path, offset + after.size_bytes)

    def write(self, tensor: Tensor, start: int, new: Sequence[memoryview], old: Sequence[memoryview]) -> None:
        """Write new bytes."""
        path, offset = self._places[tensor.name]
        fd = self._file(path)
        with self._turns[path]:
            write_views(fd, new, offset + start)

    def close(self) -> None:
        """Close the files."""
        with self._lock:
            for fd in self._open:
                os.close(fd)
            self._open.clear()
        self._local = threading.local()

    def _file(self, path: str) -> int:
        """Return the file; each thread keeps one open, the one that it wrote to last."""
        known: tuple[str, int] | None = getattr(self._local, "file", None)
        if known is not None and known[0] == path:
            return known[1]
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
        with self._lock:
            self._open.add(fd)
            if known is not None:
                self._open.discard(known[1])
                os.close(known[1])
        self._local.file = (path, fd)
        return fd


def write_views(fd: int, views: Sequence[memoryview], offset: int) -> None:
    """Write the views one after the other from ``offset`` on, in one go where possible."""
    done = os.pwritev(fd, views, offset)
    for view in views:
        skip = min(done, len(view))
        done -= skip
        offset += skip
        rest = view[skip:]
        while rest:
            count = os.pwrite(fd, rest, offset)
            rest, offset = rest[count:], offset + count
