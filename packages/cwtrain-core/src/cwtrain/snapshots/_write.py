"""Writing directories that appear whole or not at all, with the disk's room checked and several threads at work."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import IO, TypeVar

from cwtrain.errors import ConfigError, SnapshotError

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

PIECE_BYTES = 1 << 20
_MAX_DEFAULT_WORKERS = 8


@contextmanager
def staged_directory(out: str) -> Iterator[str]:
    """Give a temporary directory beside ``out`` that becomes ``out`` at the end, or is removed after an error.

    Raises SnapshotError at once if ``out`` exists and is not an empty directory. The files in it must be synced by who
    writes them; the directories are synced here.
    """
    out = os.path.realpath(out)
    if os.path.lexists(out) and not (os.path.isdir(out) and not os.listdir(out)):
        raise SnapshotError(f"{out}: exists and is not an empty directory", hint="write into a new directory")
    parent, name = os.path.split(out)
    stage = os.path.join(parent, f".{name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        os.makedirs(parent, exist_ok=True)
        os.mkdir(stage)
    except OSError as error:
        raise SnapshotError(
            f"{out}: cannot be made: {error.strerror}", hint="choose a directory that you may write to"
        ) from error
    try:
        yield stage
        _sync_directory(stage)
        os.rename(stage, out)  # also onto an empty directory
        _sync_directory(parent)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(parent).free
            raise SnapshotError(
                f"{out}: the disk is full ({free} bytes are free now that what was written is removed)",
                hint="make room, or write to another disk",
            ) from error
        raise


def _sync_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def synced_file(path: str) -> Iterator[IO[bytes]]:
    """Open a new file for writing and sync it at the end."""
    with open(path, "xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def require_space(
    directory: str,
    need_bytes: int,
    what: str,
    *,
    free: Callable[[str], int] = lambda path: shutil.disk_usage(path).free,
) -> None:
    """Raise SnapshotError if fewer than ``need_bytes`` are free where ``directory`` lies."""
    have = free(directory)
    if have < need_bytes:
        raise SnapshotError(
            f"{os.path.dirname(directory)}: {what} needs {need_bytes} bytes, {have} are free",
            hint="make room, or write to another disk",
        )


def worker_count(workers: int | None) -> int:
    """Return ``workers``, or one for each core that this process may use, at most 8. Raises ConfigError."""
    if workers is None:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(_MAX_DEFAULT_WORKERS, usable)
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise ConfigError(f"workers={workers!r} is not a positive integer")
    return workers


class StoppedError(Exception):
    """Another worker failed; this one's result is not wanted any more."""


def run_parallel(
    work: Callable[[_Item, Callable[[], None]], _Result], items: Sequence[_Item], *, workers: int
) -> list[_Result]:
    """Return ``work(item, check)`` for each item, in order, made by several threads.

    The first error stops the rest and is raised: ``check()``, to be called now and then, raises StoppedError after it.
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

    with ThreadPoolExecutor(max_workers=workers, thread_name_prefix="cwtrain-write") as pool:
        futures = [pool.submit(guarded, item) for item in items]
        try:
            wait(futures)
        except BaseException:  # an interrupt
            stop.set()
            raise
    errors = [error for future in futures if (error := future.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, StoppedError)), errors[0])
    return [future.result() for future in futures]


class Spill:
    """Where encoded tensors wait until their shard can be written: in memory up to a budget, the rest in a file.

    A shard begins with the lengths of all its frames, so none of it can be written before all are encoded.
    """

    def __init__(self, directory: str, *, budget_bytes: int) -> None:
        self._directory = directory
        self._budget = budget_bytes
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def store(self, piece: bytes) -> bytes | tuple[int, int]:
        """Keep ``piece`` and return what ``load`` wants to have."""
        with self._lock:
            if self._budget >= len(piece):
                self._budget -= len(piece)
                return piece
            if self._file is None:
                self._file = tempfile.TemporaryFile(dir=self._directory)  # noqa: SIM115 - closed by close()
            offset, self._end = self._end, self._end + len(piece)
            fd = self._file.fileno()
        view = memoryview(piece)
        while view:
            view = view[os.pwrite(fd, view, offset + len(piece) - len(view)) :]
        return offset, len(piece)

    def load(self, stored: bytes | tuple[int, int]) -> bytes:
        """Return a piece that was stored."""
        if isinstance(stored, bytes):
            return stored
        assert self._file is not None
        offset, length = stored
        data = os.pread(self._file.fileno(), length, offset)
        if len(data) != length:
            raise SnapshotError("the temporary file of encoded tensors lost data", hint="write the delta again")
        return data

    def close(self) -> None:
        """Drop everything."""
        if self._file is not None:
            self._file.close()


class SpillWriter:
    """One encoded tensor on its way into a ``Spill``: small pieces are joined first."""

    def __init__(self, spill: Spill) -> None:
        self._spill = spill
        self._pending = bytearray()
        self.stored: list[bytes | tuple[int, int]] = []

    def write(self, piece: bytes) -> None:
        """Take one piece."""
        self._pending += piece
        if len(self._pending) >= PIECE_BYTES:
            self.close()

    def close(self) -> None:
        """Store what is pending."""
        if self._pending:
            self.stored.append(self._spill.store(bytes(self._pending)))
            self._pending.clear()
