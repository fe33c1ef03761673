"""The trainer's directories that nobody needs any more, and the note beside its checkpoint."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from typing import Any

import attrs

from cwtrain.errors import ConfigError, HotLoadError, SnapshotError
from cwtrain.hotload._publish.state import State
from cwtrain.snapshots._json import parse_json

__all__ = ["NOTE_NAME", "PublishedNote", "note_of", "read_note", "removable", "remove_directories", "write_note"]

NOTE_NAME = "cwtrain_published.json"
"""The file beside a trainer's checkpoint that names the snapshot of the same weights."""

_SCHEMA = 1
_log = logging.getLogger("cwtrain.hotload")


def removable(state: State) -> dict[str, int]:
    """Return the trainer's directories that are acknowledged and behind the last full snapshot, with their versions."""
    known, full = state.acknowledged, state.full_number
    if known is None or full is None:
        return {}
    return {path: number for path, number in state.directories.items() if number < full and number <= known.through}


def remove_directories(found: Mapping[str, int], disk_dir: str | os.PathLike[str]) -> dict[str, int]:
    """Delete those of ``found`` that lie directly in ``disk_dir``, and return them. A failure is only logged."""
    parent = os.path.realpath(os.fspath(disk_dir))
    gone = {}
    for path, number in found.items():
        if os.path.islink(path) or os.path.dirname(os.path.realpath(path)) != parent:
            continue
        try:
            shutil.rmtree(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _log.warning("%s is not needed any more and cannot be deleted: %s", path, error)
            continue
        gone[path] = number
    return gone


@attrs.frozen(kw_only=True)
class PublishedNote:
    """Which snapshot has the weights of a trainer's checkpoint, so that a resume starts from the pair."""

    step: int
    version: int
    identity: str
    run_id: str
    epoch: int
    deployment_id: str
    acknowledged: bool
    """False where its hot-load was not known to be COMPLETED yet (WAIT=0)."""


def note_of(state: State, *, step: int) -> PublishedNote:
    """Return the note of what holds the trainer's last version. Raises HotLoadError while nothing does."""
    written, known, pending = state.written, state.acknowledged, state.pending
    number = written.number if written is not None else 0
    acknowledged = known is not None and (known.holds(number) or written is None)
    identity = known.identity if known is not None and acknowledged else None
    if identity is None and pending is not None and pending.number == number:
        identity = pending.identity
    if identity is None:
        raise HotLoadError(
            f"run {state.run_id} has published nothing that holds version {number}",
            hint="write the note after a publish",
        )
    return PublishedNote(
        step=step,
        version=number,
        identity=identity,
        run_id=state.run_id,
        epoch=state.epoch,
        deployment_id=state.deployment_id,
        acknowledged=acknowledged,
    )


def write_note(directory: str | os.PathLike[str], note: PublishedNote) -> str:
    """Write the note into the trainer's checkpoint directory, in one step, and return its path."""
    path = os.path.join(os.fspath(directory), NOTE_NAME)
    temporary = f"{path}.new"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            json.dump({"schema_version": _SCHEMA, **attrs.asdict(note)}, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        os.rename(temporary, path)
    except OSError as error:
        raise ConfigError(
            f"{path}: the note of what is published cannot be written: {error.strerror}",
            hint="give the directory of the trainer's checkpoint, which must be there",
        ) from error
    return path


def read_note(directory: str | os.PathLike[str]) -> PublishedNote | None:
    """Return the note in a trainer's checkpoint directory, None where there is none. Raises SnapshotError."""
    path = os.path.join(os.fspath(directory), NOTE_NAME)
    try:
        with open(path, "rb") as file:
            raw = file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SnapshotError(
            f"{path}: cannot be read: {error.strerror}", hint="give the directory of the trainer's checkpoint"
        ) from error
    try:
        value: dict[str, Any] = parse_json(raw)
        if value.pop("schema_version") != _SCHEMA:
            raise ValueError("has another schema version")
        return PublishedNote(**value)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SnapshotError(
            f"{path}: cannot be read: {error}", hint="remove the file: it only names a snapshot"
        ) from error
