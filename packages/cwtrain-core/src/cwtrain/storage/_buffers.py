"""Memory for parts that wait to be sent: reused, and bounded whatever the number of workers."""

from __future__ import annotations

import contextlib
import mmap
import threading

__all__ = ["Buffers", "SendingStopped", "fresh"]

BUDGET_BYTES = 192 << 20


def fresh(size: int, *, shared: bool = False) -> mmap.mmap:
    """Return new memory of ``size`` bytes, in huge pages where the system has them.

    Memory that is ``shared`` with child processes comes in small pages on most systems, and costs five times as much to
    touch for the first time. But of private memory a process that has forked (a data loader's workers, say) copies each
    page that it writes to, as long as the child lives: what is large and stays for long has to be shared.
    """
    memory = mmap.mmap(-1, size, flags=(mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE) | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)  # one page fault for 2 MiB, not for 4 KiB
    return memory


class SendingStopped(BaseException):
    """Raised inside a request that must not go on; ``error`` says why, None when the whole upload was stopped.

    Not an Exception: botocore takes any Exception of a body for a broken connection and sends it again.
    """

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__(str(error or "the upload was stopped"))
        self.error = error


class Buffers:
    """Buffers of at most ``budget_bytes`` together.

    A part may take one after ``after_bytes``, where sending takes ``slow`` times as long as reading and hashing.
    """

    def __init__(self, budget_bytes: int = BUDGET_BYTES, *, after_bytes: int = 8 << 20, slow: float = 6.0) -> None:
        self.after_bytes = after_bytes
        self.slow = slow
        self._budget = budget_bytes
        self._lock = threading.Lock()
        self._free: list[mmap.mmap] = []
        self._taken_bytes = 0

    def take(self, size: int) -> mmap.mmap | None:
        """Return a buffer of ``size`` bytes, None where there is no room for it."""
        with self._lock:
            if self._taken_bytes + size > self._budget:
                return None
            self._taken_bytes += size
            for number, memory in enumerate(self._free):
                if len(memory) == size:
                    return self._free.pop(number)
            # Those of another size would count for nothing, so they go.
            self._free.clear()
            return fresh(size)

    def give(self, memory: mmap.mmap) -> None:
        """Take a buffer back; nobody may look at it any more."""
        with self._lock:
            self._taken_bytes -= len(memory)
            self._free.append(memory)
