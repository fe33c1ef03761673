"""Making a mirror's directory, beside the place that it takes at the end."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

from cwtrain.errors import MirrorError, SnapshotError
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_files import HIDDEN, Layout, digest
from cwtrain.hotload._mirror_lock import MirrorLock
from cwtrain.hotload._mirror_state import ShardState, State, save_state
from cwtrain.snapshots.header import read_header

__all__ = ["replacing", "settle"]


def settle(disk: Disk, stage: str, version: str) -> None:
    """Turn the full snapshot in ``stage/full`` into a mirror in ``stage``."""
    layout = Layout(stage)
    full = os.path.join(stage, "full")
    names = sorted(os.listdir(full))
    shards = [name for name in names if name.endswith(".safetensors")]
    os.mkdir(layout.hidden)
    layout.make(disk, shards)
    states: dict[str, ShardState] = {}
    for name in names:
        path = layout.shard(name, "a") if name in shards else os.path.join(stage, name)
        os.rename(os.path.join(full, name), path)
        if name in shards:
            with open(path, "rb") as file:
                head = file.read(read_header(path).data_start)
            with open(layout.shard(name, "b"), "xb"):
                pass  # its entry is on the disk with the mirror, so no version has to sync a directory
            states[name] = ShardState(slot="a", head=digest(head))
    os.rmdir(full)
    state = State(version=version, serial=1, boot_id=disk.boot_id(), shards=states)
    save_state(disk, layout.state, state)
    layout.show(disk, state)
    for name in ("a", "b", "view-a", "view-b", ""):
        disk.fsync_directory(os.path.join(layout.hidden, name))


@contextmanager
def replacing(target: str, replace: bool) -> Iterator[str]:
    """Give where to make a new mirror, which becomes ``target`` at the end. One that is there is held until then."""
    hidden = os.path.join(target, HIDDEN)
    there = os.path.isdir(hidden)
    if there and not replace:
        raise MirrorError(
            f"{target}: there is a mirror already",
            hint="open it with WeightMirror(root), or replace it: WeightMirror.create(base, root, replace=True)",
        )
    if not there and os.path.lexists(target) and not (os.path.isdir(target) and not os.listdir(target)):
        raise SnapshotError(f"{target}: exists and is not an empty directory", hint="give a new directory")
    lock = MirrorLock(target, hidden) if there else None
    parent, name = os.path.split(target)
    tag = uuid.uuid4().hex[:8]
    new, old = (os.path.join(parent, f".{name}.{tag}.{what}") for what in ("new", "old"))
    try:
        yield new
        if there:
            os.rename(target, old)
        os.rename(new, target)  # also onto an empty directory
        Disk().fsync_directory(parent)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    finally:
        if lock is not None:
            lock.release()
    shutil.rmtree(old, ignore_errors=True)
