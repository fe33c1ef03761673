"""What may happen to a file between its inspection and the last byte of its upload, and what an upload makes of it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from cwtrain.errors import SnapshotChangedError
from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.storage import Fault, Location, MemoryStore, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.upload_files import write

HERE = Location("memory")


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"Z" * 1024)


def overwrite_unseen(path: Path) -> None:
    """As through a memory map, or on a file system with coarse times: the time stays."""
    about = os.stat(path)
    overwrite(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def truncate(path: Path) -> None:
    os.truncate(path, 20_000)


def truncate_unseen(path: Path) -> None:
    about = os.stat(path)
    os.truncate(path, 20_000)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


CHANGES = [overwrite, overwrite_unseen, append, truncate, truncate_unseen]


def check_a_change_is_found(shard: SnapshotFile, change: Callable[[Path], None], *, multipart: bool) -> None:
    """Upload ``shard``, changed while it is sent, and check that the upload is refused and leaves nothing half.

    One worker sends in order, so the change is always ahead of what was sent.
    """
    assert shard.path is not None
    path = Path(shard.path)
    files = [shard, *write(path.parent, {INDEX_NAME: b"{}"})]
    call = "upload_part" if multipart else "put"
    store = MemoryStore(faults=[Fault(call=call, key="safetensors", action=lambda: change(path))])
    with pytest.raises(SnapshotChangedError, match="changed after it was inspected") as changed:
        upload_objects(
            files,
            store=store,
            location=HERE,
            identity="v1",
            workers=1,
            sizes=PartSizes(multipart_above_bytes=20_000 if multipart else 1 << 20, part_bytes=8_000),
            record_directory=str(path.parent.parent),
        )
    assert changed.value.file == str(path)
    assert store.uploads == {}
    assert set(store.objects) == {HERE.claim_key("v1")}
