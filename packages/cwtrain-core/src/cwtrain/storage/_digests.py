"""SHA-256 of files that were read already, so that no file is read twice to find out the same thing.

A digest belongs to a file as it was: device, inode, size and modification time. A file that was written to has another
modification time and is read again. What is known is only ever a shortcut: the bytes that are sent are hashed as they
go, and must come to the same.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import time
from collections import OrderedDict
from typing import Any

from cwtrain._process import renew_locks_after_fork
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage.report import ObjectDigest

__all__ = ["forget", "known_digest", "remember"]

_MOST = 4096
_SETTLED_NS = 100_000_000
_SETTLED_COARSE_NS = 3_000_000_000
_lock = threading.Lock()
renew_locks_after_fork(sys.modules[__name__], "_lock")
_seen: OrderedDict[tuple[Any, ...], str] = OrderedDict()


def known_digest(file: SnapshotFile) -> ObjectDigest | None:
    """Return the digest that whoever described ``file`` knows, or that this process found out; else None."""
    if file.path is None:
        return ObjectDigest(file.size_bytes, hashlib.sha256(file.head).hexdigest())
    if file.sha256 is not None:
        return ObjectDigest(file.size_bytes, file.sha256)
    if (key := _key(file)) is None:
        return None
    with _lock:
        sha256 = _seen.get(key)
        if sha256 is not None:
            _seen.move_to_end(key)
    return None if sha256 is None else ObjectDigest(file.size_bytes, sha256)


def remember(file: SnapshotFile, digest: ObjectDigest) -> None:
    """Keep the digest of ``file`` as it is described."""
    # A second write within one tick of the file system's clock does not show: such a file is read again.
    settled = _SETTLED_NS if file.mtime_ns % 1_000_000_000 else _SETTLED_COARSE_NS
    if (key := _key(file)) is None or abs(time.time_ns() - file.mtime_ns) < settled:
        return
    with _lock:
        _seen[key] = digest.sha256
        _seen.move_to_end(key)
        while len(_seen) > _MOST:
            _seen.popitem(last=False)


def forget(file: SnapshotFile) -> None:
    """Drop what is known of ``file``: its bytes came to something else."""
    if (key := _key(file)) is not None:
        with _lock:
            _seen.pop(key, None)


def _key(file: SnapshotFile) -> tuple[Any, ...] | None:
    # Without inode and time, nobody looked: then nothing says that it is still the same file.
    if not (file.inode and file.mtime_ns):
        return None
    head = hashlib.sha256(file.head).digest() if file.head else b""
    return file.device, file.inode, file.file_bytes, file.mtime_ns, head, file.ranges
