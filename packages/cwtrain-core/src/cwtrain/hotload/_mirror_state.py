"""The state file of a mirror: which version it holds, and which of its files are that version.

    {"schema_version": 1, "version": "000007", "serial": 9, "boot_id": "...",
     "shards": {"model-00001-of-00002.safetensors": {"slot": "a", "head": "<sha256>", "spare": ["lm_head.weight"]}}}

``slot`` is the directory that has the shard now, ``head`` the SHA-256 of its header, which holds all checksums.
``spare`` lists the tensors in which the file in the other slot differs; null: nothing is known of it, or it is not
there. ``serial`` counts every switch.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from typing import Any

import attrs

from cwtrain.errors import MirrorDamagedError, MirrorError
from cwtrain.hotload._mirror_disk import Disk

__all__ = ["OTHER", "SCHEMA_VERSION", "ShardState", "State", "load_state", "save_state"]

SCHEMA_VERSION = 1
OTHER = {"a": "b", "b": "a"}
"""The other slot."""

_SHA256 = re.compile(r"[0-9a-f]{64}")


@attrs.frozen(kw_only=True)
class ShardState:
    """Where a shard lies. See the module."""

    slot: str
    head: str
    spare: frozenset[str] | None = None


@attrs.frozen(kw_only=True)
class State:
    """What the state file says. See the module."""

    version: str
    serial: int
    boot_id: str
    shards: Mapping[str, ShardState]

    def distrust_spares(self) -> State:
        """Return the state without any knowledge of the other slots: their files will be written whole."""
        return attrs.evolve(self, shards={name: attrs.evolve(shard, spare=None) for name, shard in self.shards.items()})


def load_state(path: str) -> State:
    """Return the state in the file at ``path``.

    Raises MirrorError for a schema version that this cwtrain does not know, MirrorDamagedError for anything unreadable.
    """
    try:
        with open(path, "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    schema = value.get("schema_version") if isinstance(value, dict) else None
    if isinstance(schema, bool) or schema != SCHEMA_VERSION:
        raise MirrorError(
            f"{path}: the state of this mirror has schema_version {schema!r}, this cwtrain reads {SCHEMA_VERSION}",
            hint="open it with the cwtrain that wrote it or a newer one, or make the mirror again",
        )
    try:
        shards = {str(name): _shard(entry) for name, entry in value["shards"].items()}
        state = State(version=value["version"], serial=value["serial"], boot_id=value["boot_id"], shards=shards)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _damaged(path, f"{type(error).__name__}: {error}") from error
    if not (isinstance(state.version, str) and isinstance(state.boot_id, str) and type(state.serial) is int and shards):
        raise _damaged(path, "version, serial, boot_id or shards are not as they must be")
    return state


def _damaged(path: str, what: str) -> MirrorDamagedError:
    return MirrorDamagedError(
        f"{path}: the state of this mirror cannot be read: {what}",
        hint="rebuild it: WeightMirror.from_bucket, or WeightMirror.create from the checkpoint",
    )


def _shard(entry: Mapping[str, Any]) -> ShardState:
    slot, head, spare = entry["slot"], entry["head"], entry["spare"]
    if slot not in OTHER or not _SHA256.fullmatch(head) or not isinstance(spare, list | None):
        raise ValueError("a shard is not described as it must be")
    return ShardState(slot=slot, head=head, spare=None if spare is None else frozenset(spare))


def save_state(disk: Disk, path: str, state: State) -> None:
    """Replace the state file. It is on the disk when its directory is synced too, which the caller does."""
    value = {
        "schema_version": SCHEMA_VERSION,
        "version": state.version,
        "serial": state.serial,
        "boot_id": state.boot_id,
        "shards": {
            name: {"slot": item.slot, "head": item.head, "spare": None if item.spare is None else sorted(item.spare)}
            for name, item in state.shards.items()
        },
    }
    temporary = f"{path}.new"
    disk.remove(temporary)
    fd = disk.open(temporary, create=True)
    try:
        disk.write(fd, [json.dumps(value, separators=(",", ":")).encode()], 0)
        disk.fsync(fd)
    finally:
        os.close(fd)
    disk.rename(temporary, path)
