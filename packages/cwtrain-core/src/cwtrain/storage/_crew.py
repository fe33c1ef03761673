"""Run tasks on a bounded number of threads; the first error stops them all and is the one that is raised."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from cwtrain.storage._source import SendingStopped

__all__ = ["INTERRUPTED_SECONDS", "Crew", "each", "run_all", "was_interrupted"]

Task = Callable[[], None]
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

INTERRUPTED_SECONDS = 0.75
"""What each step of giving up may take after a Ctrl-C or SIGTERM: who gives one does not want to wait."""


def was_interrupted(error: BaseException | None) -> bool:
    """Return whether ``error`` is no error but somebody who wants an end, now."""
    return isinstance(error, KeyboardInterrupt | SystemExit)


class Crew:
    """Up to ``workers`` threads. ``stopped`` is set once something failed or was interrupted, and stays set.

    ``on_tick`` is called in the thread that called ``run``, a few times a second and at the end. What it raises, and
    Ctrl-C, stop the crew as well.
    """

    def __init__(
        self,
        workers: int,
        *,
        on_tick: Callable[[], None] | None = None,
        tick_seconds: float = 0.25,
        grace_seconds: float = 5.0,
    ) -> None:
        self.workers = workers
        self.stopped = threading.Event()
        self.changed = threading.Condition()
        """Its lock guards whatever the tasks share; ``pick`` is called under it."""
        self._on_tick = on_tick
        self._tick_seconds = tick_seconds
        self._grace_seconds = grace_seconds
        self._active = 0
        self._finished = False
        self._error: BaseException | None = None

    def run(self, pick: Callable[[], Task | None], *, most: int | None = None) -> None:
        """Run the tasks that ``pick`` gives until it gives none while no task runs; ``most`` bounds the threads.

        Raises the first error. Tasks that cannot be stopped within the grace time, which is short after an interrupt,
        are left behind, in threads that do not keep the process alive.
        """
        self._finished = False
        count = max(1, min(self.workers, self.workers if most is None else most))
        threads = [
            threading.Thread(target=self._work, args=(pick,), daemon=True, name=f"cwtrain-upload-{number}")
            for number in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            while not self._wait(self._tick_seconds, lambda: self._finished or self.stopped.is_set()):
                self._tick()
        except BaseException as error:  # noqa: BLE001  (raised below, when the threads have stopped)
            self.fail(error)
        if self.stopped.is_set():
            interrupted = was_interrupted(self._error)
            grace = min(self._grace_seconds, INTERRUPTED_SECONDS) if interrupted else self._grace_seconds
            self._wait(grace, lambda: not self._active)
        if self._error is not None:
            raise self._error
        for thread in threads:
            thread.join()
        self._tick()

    def fail(self, error: BaseException | None) -> None:
        """Stop everything; ``error`` is raised by ``run`` if it is the first."""
        with self.changed:
            if self._error is None:
                self._error = error
            self.stopped.set()
            self.changed.notify_all()

    def _tick(self) -> None:
        if self._on_tick is not None:
            self._on_tick()

    def _wait(self, seconds: float, until: Callable[[], bool]) -> bool:
        with self.changed:
            return self.changed.wait_for(until, timeout=seconds)

    def _work(self, pick: Callable[[], Task | None]) -> None:
        while (task := self._next(pick)) is not None:
            try:
                task()
            except SendingStopped as stopped:
                self.fail(stopped.error)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the caller's thread raises it)
                self.fail(error)
            finally:
                with self.changed:
                    self._active -= 1
                    self.changed.notify_all()

    def _next(self, pick: Callable[[], Task | None]) -> Task | None:
        with self.changed:
            while not (self._finished or self.stopped.is_set()):
                if (task := pick()) is not None:
                    self._active += 1
                    return task
                if not self._active:
                    self._finished = True
                    self.changed.notify_all()
                else:
                    self.changed.wait()
        return None


def each(work: Callable[[_Item], _Result], items: Sequence[_Item], *, threads: int) -> list[_Result]:
    """Return ``work(item)`` of each item, in order, made by several threads. Raises the first error.

    Unlike an executor's, the threads do not keep the caller, or the process, when a Ctrl-C finds them in a request.
    """
    results: dict[int, _Result] = {}
    left = deque(enumerate(items))

    def task(number: int, item: _Item) -> None:
        results[number] = work(item)

    def pick() -> Task | None:
        return partial(task, *left.popleft()) if left else None

    if items:
        Crew(threads).run(pick, most=len(items))
    return [results[number] for number in range(len(items))]


def run_all(tasks: Sequence[Task], *, threads: int, seconds: float) -> bool:
    """Run ``tasks``, which must not raise, and return whether all were done within ``seconds``."""
    left = list(reversed(tasks))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not left:
                    return
                task = left.pop()
            task()

    crew = [threading.Thread(target=work, daemon=True) for _ in range(min(threads, len(tasks)))]
    for thread in crew:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in crew:
        thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in crew)
