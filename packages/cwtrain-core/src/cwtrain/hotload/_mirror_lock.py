"""One process at a time: a file lock, and beside it a note that says who has it."""

from __future__ import annotations

import contextlib
import datetime as dt
import json
import os
import socket
from typing import Any

from filelock import FileLock, Timeout

from cwtrain._process import OneProcess, renew_after_fork
from cwtrain.errors import ConfigError, MirrorLockedError

__all__ = ["MirrorLock"]


class MirrorLock(OneProcess):
    """The lock of the mirror (or of ``what``) at ``root``, its own files in ``directory``. Taken when made.

    A forked process has no part in it: it neither releases it nor keeps it when the one that took it is gone.
    """

    _instead = "take another one"

    def __init__(self, root: str, directory: str, *, what: str = "mirror") -> None:
        self._note = os.path.join(directory, "holder.json")
        self._lock = FileLock(os.path.join(directory, "lock"), thread_local=False)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise MirrorLockedError(
                f"{root}: the {what} is in use {_holder(self._note)}",
                hint=f"only one process works with a {what} at a time: stop the other one, or give each its own",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"{root}: the {what} cannot be locked: {error.strerror or error}",
                hint="give it a directory on a local disk that this process may write to",
            ) from error
        renew_after_fork(self, MirrorLock._leave)
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        try:
            with open(self._note, "w", encoding="utf-8") as file:
                json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now}, file)
        except OSError:  # it only tells others who has the lock; a full disk is told by what needs it
            pass

    def release(self) -> None:
        """Let others have it; does nothing in a forked process."""
        if not self._in_fork and self._lock.is_locked:
            try:
                os.unlink(self._note)
            except OSError:  # it only tells others who has the lock
                pass
            self._lock.release()

    def _leave(self) -> Any:
        """Close the copy of the file that a fork made: the lock is held as long as one is open. Unlocking ends it."""
        context = getattr(self._lock, "_context", None)
        descriptor = getattr(context, "lock_file_fd", None)
        if context is not None and descriptor is not None:  # newer versions of filelock have done it by themselves
            context.lock_file_fd = None
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self._lock.lock_file)):
                    os.close(descriptor)
        return self._lock


def _holder(note: str) -> str:
    try:
        with open(note, encoding="utf-8") as file:
            holder = json.load(file)
        return f"by process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "by another process, which has not said which one"
