"""One process at a time: a file lock, and beside it a note that says who has it."""

from __future__ import annotations

import datetime as dt
import json
import os
import socket

from filelock import FileLock, Timeout

from cwtrain.errors import ConfigError, MirrorLockedError

__all__ = ["MirrorLock"]


class MirrorLock:
    """The lock of the mirror (or of ``what``) at ``root``, its own files in ``directory``. Taken when made."""

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
        now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
        try:
            with open(self._note, "w", encoding="utf-8") as file:
                json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": now}, file)
        except OSError:  # it only tells others who has the lock; a full disk is told by what needs it
            pass

    def release(self) -> None:
        """Let others have it."""
        if self._lock.is_locked:
            try:
                os.unlink(self._note)
            except OSError:  # it only tells others who has the lock
                pass
            self._lock.release()


def _holder(note: str) -> str:
    try:
        with open(note, encoding="utf-8") as file:
            holder = json.load(file)
        return f"by process {holder['pid']} on {holder['host']} since {holder['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "by another process, which has not said which one"
