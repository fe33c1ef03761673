"""Writing directories that appear whole or not at all, with the disk's room checked."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import shutil
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, cast

from cwtrain.errors import SnapshotError


class NoRoomError(SnapshotError):
    """The disk of ``place`` is full, or has too little room for what is to be written."""

    def __init__(
        self, message: str, *, place: str = "", hint: str | None = "make room, or write to another disk"
    ) -> None:
        super().__init__(message, hint=hint)
        self.place = place


Stored = bytes | tuple[int, int]
"""A piece that a ``Spill`` keeps: itself, or where it lies in the file."""


def is_full(error: BaseException) -> bool:
    """Return whether ``error`` is the system's word for a full disk, or a quota that is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def naming_full_disk(place: str) -> Iterator[None]:
    """Raise NoRoomError naming ``place`` in place of the system's word for a full disk."""
    try:
        yield
    except OSError as error:
        if not is_full(error):
            raise
        raise NoRoomError(f"{place}: the disk is full", place=place) from error


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
        _into_place(stage, out)
        _sync_directory(parent)
    except BaseException as error:
        shutil.rmtree(stage, ignore_errors=True)
        if is_full(error):
            free = shutil.disk_usage(parent).free
            raise NoRoomError(
                f"{out}: the disk is full ({free} bytes are free now that what was written is removed)", place=out
            ) from error
        raise


def _into_place(stage: str, out: str) -> None:
    try:
        os.rename(stage, out)  # also onto an empty directory
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise
        raise SnapshotError(
            f"{out}: exists, it was made meanwhile by another process", hint="look at it, or write into a new directory"
        ) from error


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


_Reserve = Callable[[int, int, int, int], int]
"""``fallocate`` of the C library: descriptor, mode, offset, length; not 0 is an error."""


def allocate(fd: int, size: int, *, find: Callable[[], _Reserve | None] | None = None) -> None:
    """Give a new file its size, with room on the disk for all of it where the system can promise that.

    The kernel then writes into it about a third cheaper. ``os.posix_fallocate`` is not used: where the file system
    cannot, the C library writes a byte to every block.
    """
    reserve = (find or _fallocate)()
    if size and reserve is not None:
        while reserve(fd, 0, 0, size):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise OSError(number, os.strerror(number))
            if number != errno.EINTR:
                break
    os.ftruncate(fd, size)


@functools.cache
def _fallocate() -> _Reserve | None:
    library = ctypes.CDLL(None, use_errno=True)
    for name in ("fallocate64", "fallocate"):
        function = getattr(library, name, None)
        if function is not None:
            function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
            return cast("_Reserve", function)
    return None


def require_space(
    directory: str,
    need_bytes: int,
    what: str,
    *,
    free: Callable[[str], int] = lambda path: shutil.disk_usage(path).free,
) -> None:
    """Raise NoRoomError, which is a SnapshotError, if fewer than ``need_bytes`` are free where ``directory`` lies."""
    have = free(directory)
    if have < need_bytes:
        place = os.path.dirname(directory)
        raise NoRoomError(f"{place}: {what} needs {need_bytes} bytes, {have} are free", place=place)


class Spill:
    """Where pieces wait that were made ahead of their turn: in memory up to a budget, then in a file without a name.

    Only the public codec needs it: it makes a tensor's frame in one go, however large.
    """

    def __init__(self, directory: str, *, budget_bytes: int) -> None:
        self._directory = directory
        self._budget = budget_bytes
        self._file: IO[bytes] | None = None
        self._end = 0
        self._lock = threading.Lock()

    def store(self, piece: bytes) -> Stored:
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

    def load(self, stored: Stored) -> bytes:
        """Return a piece that was stored; it is kept no longer."""
        if isinstance(stored, bytes):
            with self._lock:
                self._budget += len(stored)
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
