"""What the operating system refuses in the state directory, told as a mistake in a setting."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from cwtrain.errors import ConfigError, CWTrainError
from cwtrain.snapshots._write import NoRoomError

__all__ = ["naming_the_setting"]


@contextlib.contextmanager
def naming_the_setting(state_dir: str) -> Iterator[None]:
    """Raise ConfigError in place of an OSError about something in ``state_dir``, or where its disk is full.

    Others pass: they are somebody else's, a plugin's, or those of a function that gives tensors.
    """
    try:
        yield
    except NoRoomError as error:
        if not Path(error.place).is_relative_to(state_dir):
            raise
        raise ConfigError(
            error.message,
            hint="make room, or set CWTRAIN_HOTLOAD_STATE_DIR to a directory on another disk; then the same call goes "
            "on where it stopped",
        ) from error
    except OSError as error:
        path = error.filename if isinstance(error.filename, str) else ""
        if isinstance(error, CWTrainError) or not Path(path).is_relative_to(state_dir):
            raise
        raise ConfigError(
            f"{path}: cannot be used: {error.strerror or error}",
            hint=f"let this process read and write all of {state_dir}; or remove it, or set CWTRAIN_HOTLOAD_STATE_DIR "
            "to a new directory: the run then goes on from what the bucket and the service say",
        ) from error
