"""The publisher's state on the disk: one small file, replaced in one step, and one process at a time.

<STATE_DIR>/journal.json   the state, with a schema version
<STATE_DIR>/lock           held while a publisher lives
<STATE_DIR>/mirror/        the mirror
<STATE_DIR>/staging/       converted deltas, until they are in the bucket
"""

from __future__ import annotations

import json
import os
import shutil
import uuid

from cwtrain.errors import ConfigError
from cwtrain.hotload._mirror_lock import MirrorLock
from cwtrain.hotload._publish.state import SCHEMA_VERSION, Acknowledged, State, from_json, to_json
from cwtrain.snapshots._json import parse_json

__all__ = ["Journal"]

_NAME = "journal.json"
_STAGING = "staging"


class Journal:
    """The journal in the directory ``root``, opened: nobody else can use it until ``close``.

    A journal of another run, or of another deployment, is left aside: this run begins with a new one, and trusts no
    mirror that lies here. Raises MirrorLockedError naming the process that has it, ConfigError for a journal that this
    version cannot read and for a directory that cannot be written.
    """

    def __init__(self, root: str | os.PathLike[str], *, run_id: str, deployment_id: str) -> None:
        self.root = os.path.realpath(os.fspath(root))
        self._path = os.path.join(self.root, _NAME)
        try:
            os.makedirs(self.root, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"{self.root}: the state directory cannot be made: {error.strerror}",
                hint="set CWTRAIN_HOTLOAD_STATE_DIR to a directory on a local disk that you may write to",
            ) from error
        self._lock = MirrorLock(self.root, self.root, what="publisher's state directory")
        try:
            found = _load(self._path)
        except BaseException:
            self._lock.release()
            raise
        self.found = found is not None and (found.run_id, found.deployment_id) == (run_id, deployment_id)
        """Whether this run was here before."""
        self.state = (
            found
            if found is not None and self.found
            else State(run_id=run_id, deployment_id=deployment_id, owner=str(uuid.uuid4()))
        )

    @property
    def mirror_path(self) -> str:
        """Where the mirror lies."""
        return os.path.join(self.root, "mirror")

    def staging_path(self, number: int, content: str) -> str:
        """Return where the converted delta of a version lies until it is published; ``content`` is its digest."""
        return os.path.join(self.root, _STAGING, f"{self.state.epoch}-{number}-{content[:16]}")

    def staged(self, number: int) -> list[str]:
        """Return where converted deltas of a version of this epoch lie."""
        folder = os.path.join(self.root, _STAGING)
        if not os.path.isdir(folder):
            return []
        begin = f"{self.state.epoch}-{number}-"
        return [os.path.join(folder, name) for name in sorted(os.listdir(folder)) if name.startswith(begin)]

    def save(self, state: State) -> State:
        """Write ``state`` down, and return it: after a kill, or a crash of the machine, it is this one or the last."""
        try:
            self._write(json.dumps(to_json(state), indent=1, sort_keys=True).encode())
        except OSError as error:
            raise ConfigError(
                f"{self._path}: the journal cannot be written: {error.strerror}",
                hint="make room, or let this process write there; then the same call goes on where it stopped",
            ) from error
        self.state = state
        return state

    def _write(self, data: bytes) -> None:
        temporary = f"{self._path}.new"
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, self._path)
        fd = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def open_epoch(self, epoch: int, *, keep: Acknowledged | None = None) -> State:
        """Write down that ``epoch`` begins; converted deltas of earlier ones are thrown away."""
        shutil.rmtree(os.path.join(self.root, _STAGING), ignore_errors=True)
        return self.save(self.state.opened(epoch, keep=keep))

    def close(self) -> None:
        """Let others use the directory. Can be called twice."""
        self._lock.release()


def _load(path: str) -> State | None:
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(path, str(error)) from error
    try:
        value = parse_json(raw)
    except ValueError as error:
        raise _unreadable(path, str(error)) from error
    schema = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(schema, bool) or schema != SCHEMA_VERSION:
        raise ConfigError(
            f"{path}: the journal has schema_version {schema!r}, this cwtrain reads {SCHEMA_VERSION}",
            hint="go on with the cwtrain that wrote it or a newer one, or set CWTRAIN_HOTLOAD_STATE_DIR to a new "
            "directory: the run then goes on from what the bucket and the service say",
        )
    try:
        return from_json(value)
    except (KeyError, TypeError, ValueError) as error:
        raise _unreadable(path, f"{type(error).__name__}: {error}") from error


def _unreadable(path: str, what: str) -> ConfigError:
    return ConfigError(
        f"{path}: the journal cannot be read: {what}",
        hint="remove the state directory, or set CWTRAIN_HOTLOAD_STATE_DIR to a new one: the run then goes on from "
        "what the bucket and the service say",
    )
