"""Threads that do tasks in the background, in order of their coming; the first error stops all of them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from cwtrain.storage._buffers import SendingStopped

__all__ = ["Hands"]

Task = Callable[[], None]


class Hands:
    """Up to ``count`` threads, which do not keep the process alive. ``stopped`` is set by the first error, for good.

    ``changed`` guards what the tasks share, and is notified whenever a task ends or something fails.
    """

    def __init__(self, count: int, *, name: str) -> None:
        self.stopped = threading.Event()
        self.changed = threading.Condition()
        self.error: BaseException | None = None
        self.busy_seconds = 0.0
        """How long tasks ran, all threads together."""
        self._count = count
        self._name = name
        self._tasks: deque[Task] = deque()
        self._threads = 0
        self._idle = 0
        self._active = 0
        self._closed = False

    def submit(self, task: Task) -> None:
        """Have ``task`` done. After an error it is dropped."""
        with self.changed:
            if self.stopped.is_set():
                return
            self._tasks.append(task)
            if not self._idle and self._threads < self._count:
                self._threads += 1
                threading.Thread(target=self._work, daemon=True, name=f"{self._name}-{self._threads}").start()
            self.changed.notify_all()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until everything is done, at most so long, and return whether it is. Raises the first error."""
        with self.changed:
            done = self.changed.wait_for(
                lambda: self.error is not None or not (self._tasks or self._active), timeout=seconds
            )
        self.check()
        return done

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def fail(self, error: BaseException) -> None:
        """Stop everything; ``error`` is raised from now on if it is the first."""
        with self.changed:
            if self.error is None:
                self.error = error
            self.stopped.set()
            self._tasks.clear()
            self.changed.notify_all()

    def close(self, grace_seconds: float) -> bool:
        """Let the threads end, and return whether none is busy after the grace time."""
        with self.changed:
            self._closed = True
            self._tasks.clear()
            self.changed.notify_all()
            return self.changed.wait_for(lambda: not self._active, timeout=grace_seconds)

    def _work(self) -> None:
        while (task := self._next()) is not None:
            began = time.perf_counter()
            try:
                task()
            except SendingStopped as stopped:
                if stopped.error is not None:
                    self.fail(stopped.error)
            except BaseException as error:  # noqa: BLE001  (whatever it is, the caller's thread raises it)
                self.fail(error)
            finally:
                del task  # what it holds is free before the next one waits
                with self.changed:
                    self.busy_seconds += time.perf_counter() - began
                    self._active -= 1
                    self.changed.notify_all()

    def _next(self) -> Task | None:
        with self.changed:
            self._idle += 1
            self.changed.wait_for(lambda: self._tasks or self._closed)
            self._idle -= 1
            if self._closed:
                return None
            self._active += 1
            return self._tasks.popleft()
