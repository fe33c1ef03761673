"""A directory that shows another one's files late, as a shared disk shows the files of another node.

    rank 1 writes into `source`      rank 0 reads `view`: there each file is late, with no bytes, or short at first

It is a stand-in for a network file system whose listings and attributes lag; no such file system is mounted.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from cwtrain_emulator.faults import Fault

__all__ = ["LateFiles"]

_POLL_SECONDS = 0.05
_OWN = ".late-files-"


class LateFiles:
    """Keeps the views of all rules of the target `directory`, in a thread that runs while there are any."""

    def __init__(self, *, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._views: dict[str, _View] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    def added(self, rule: Fault) -> None:
        """Begin with a rule; those of other targets are nothing to do."""
        if rule.target != "directory":
            return
        with self._lock:
            self._views[rule.id] = _View(rule, self._clock)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="late-files", daemon=True)
                self._thread.start()

    def cleared(self, ids: Iterable[str]) -> None:
        """End with rules: their views show all that there is at once, and follow no more."""
        for fault_id in ids:
            with self._lock:
                view = self._views.pop(fault_id, None)
                if view is not None:
                    view.show(at_once=True)

    def stop(self) -> None:
        """End with all of them, as they are."""
        with self._lock:
            self._views.clear()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._views:
                    self._thread = None
                    return
                for view in self._views.values():
                    view.show()
            time.sleep(_POLL_SECONDS)


class _View:
    """One rule: `view` follows `source`."""

    def __init__(self, rule: Fault, clock: Callable[[], float]) -> None:
        self._rule = rule
        self._clock = clock
        self._source, self._view = rule["source"], rule["view"]
        self._due: dict[tuple[str, int, int], float] = {}
        self._shown: dict[str, tuple[int, int, bool]] = {}

    def show(self, *, at_once: bool = False) -> None:
        """Show what is due, and take away what is no longer in `source`."""
        there = set()
        for name, size, changed in _files(self._source):
            there.add(name)
            key = (name, size, changed)
            if key not in self._due:
                late = self._rule.strikes()
                self._due[key] = changed / 1e9 + (self._rule["seconds"] if late else 0.0)
            whole = at_once or self._clock() >= self._due[key]
            if whole or self._rule["first"] != "absent":
                self._put(name, size, changed, whole)
        for name in self._shown.keys() - there:
            del self._shown[name]
            with contextlib.suppress(OSError):
                os.unlink(os.path.join(self._view, name))
        for key in [key for key in self._due if key[0] not in there]:
            del self._due[key]

    def _put(self, name: str, size: int, changed: int, whole: bool) -> None:
        target = os.path.join(self._view, name)
        if self._shown.get(name) == (size, changed, whole) and os.path.lexists(target):
            return
        folder, base = os.path.split(target)
        made = os.path.join(folder, f"{_OWN}{base}")
        # Whoever reads or deletes the directory meanwhile is at fault for nothing: the next turn tries again.
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
            if whole or self._rule["first"] == "short":
                shutil.copyfile(os.path.join(self._source, name), made)
                if not whole:
                    os.truncate(made, size // 2)
            else:
                open(made, "wb").close()
            os.replace(made, target)
            self._shown[name] = (size, changed, whole)


def _files(root: str, inner: str = "") -> Iterator[tuple[str, int, int]]:
    """Yield path below `root`, size and time of the last change (ns) of each file."""
    with contextlib.suppress(OSError):
        for entry in sorted(os.scandir(os.path.join(root, inner)), key=lambda entry: entry.name):
            name = os.path.join(inner, entry.name)
            with contextlib.suppress(OSError):
                if entry.is_dir(follow_symlinks=False):
                    yield from _files(root, name)
                elif entry.is_file() and not entry.name.startswith(_OWN):
                    about = entry.stat()
                    yield name, about.st_size, about.st_ctime_ns
