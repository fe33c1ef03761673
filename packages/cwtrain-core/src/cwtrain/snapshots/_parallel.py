"""Work spread over threads: results in order, a bounded number of them waiting, the first error stopping all."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from cwtrain.errors import ConfigError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

BASE_BYTES = 64 << 20
"""Memory of a writer apart from its workers: the interpreter with its libraries, and output that is held back."""

WORKER_BYTES = 16 << 20
"""Memory of one worker: its buffers, zstd's context, and results that wait for their turn."""

DEFAULT_MEMORY_BYTES = BASE_BYTES + 16 * WORKER_BYTES

_SHARE_BYTES = 128 << 20


class StoppedError(Exception):
    """Another worker failed; this one's result is not wanted any more."""


def worker_count(workers: int | None = None, memory_bytes: int | None = None, *, work_bytes: int | None = None) -> int:
    """Return how many workers to start: ``workers``, or one for each core that this process may use.

    At most as many as fit in ``memory_bytes`` (64 MiB and 16 MiB for each worker; by default 320 MiB, so 16 workers,
    which bounds only what is not given). Where ``workers`` is not given but ``work_bytes``, at most one for each
    started 128 MiB: on less, threads that take turns cost more than they gain. Raises ConfigError for wrong arguments
    and for a budget below one worker's.
    """
    for name, value in (("workers", workers), ("memory_bytes", memory_bytes)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}={value!r} is not a positive integer")
    if memory_bytes is None and workers is not None:
        return workers
    fit = ((memory_bytes or DEFAULT_MEMORY_BYTES) - BASE_BYTES) // WORKER_BYTES
    if fit < 1:
        raise ConfigError(
            f"memory_bytes={memory_bytes} is not enough for one worker",
            hint=f"give at least {BASE_BYTES + WORKER_BYTES}, or leave it out",
        )
    if workers is not None:
        return min(fit, workers)
    worth = fit if work_bytes is None else work_bytes // _SHARE_BYTES + 1
    return min(fit, worth, usable_cores())


def usable_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Progress:
    """Counts bytes done by several threads and tells a callback, one call at a time."""

    def __init__(self, total: int, callback: Callable[[int, int], object] | None) -> None:
        self._total, self._callback = total, callback
        self._done = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Note that ``count`` more bytes are done."""
        if self._callback is not None and count:
            with self._lock:
                self._done += count
                self._callback(self._done, self._total)


def ordered(
    work: Callable[[_Item, Callable[[], None]], _Result], items: Iterable[_Item], *, workers: int
) -> Iterator[_Result]:
    """Yield ``work(item, check)`` for each item, in order, made by several threads.

    At most twice as many items as workers are begun and not yielded, so results cannot pile up. The first error in
    order is raised, and stops the rest: ``check()``, to be called now and then, raises StoppedError after it. So does
    leaving the iteration before its end.
    """
    stop = threading.Event()

    def check() -> None:
        if stop.is_set():
            raise StoppedError

    def guarded(item: _Item) -> _Result:
        check()
        try:
            return work(item, check)
        except BaseException:
            stop.set()
            raise

    if workers == 1:
        for item in items:
            yield work(item, check)
        return
    waiting: deque[Future[_Result]] = deque()
    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="cwtrain-snapshot") as pool:
        try:
            for item in items:
                waiting.append(pool.submit(guarded, item))
                if len(waiting) == 2 * workers:
                    yield _result(waiting)
            while waiting:
                yield _result(waiting)
        finally:
            stop.set()
            for future in waiting:
                future.cancel()


def _result(waiting: deque[Future[_Result]]) -> _Result:
    """Return the result of the first one; if it was stopped by another's error, raise that."""
    try:
        return waiting.popleft().result()
    except StoppedError:
        for future in waiting:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, StoppedError):
                raise error from None
        raise
