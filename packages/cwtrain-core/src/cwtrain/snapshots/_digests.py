"""SHA-256 of files that cwtrain wrote, kept with the file: an upload need not read them once more to know it.

The record is an extended attribute of the file, so it goes with it through a rename and lies in nobody's way. It names
the inode, size and modification time that it is about; a file that was written to, or copied with its attributes, has
others, and then the record counts for nothing. Where a file system takes no attributes there is no record, and an
upload reads the file to find out.
"""

from __future__ import annotations

import hashlib
import os
import re

__all__ = ["record_digest", "recorded_digest"]

_NAME = "user.cwtrain.sha256"
_RECORD = re.compile(r"1 ([0-9a-f]{64}) (\d+) (\d+) (\d+)")
_BLOCK = 1 << 20


def record_digest(file: str | os.PathLike[str] | int, sha256: str | None = None) -> str:
    """Record that ``file`` (a path or a descriptor), as it is now, has this SHA-256, and return it.

    It is computed where it is not given. Nothing may be written to the file afterwards; renaming it is fine.
    """
    if sha256 is None:
        sha256 = _sha256(file)
    about = os.stat(file)
    record = f"1 {sha256} {about.st_ino} {about.st_size} {about.st_mtime_ns}"
    if hasattr(os, "setxattr"):
        try:
            os.setxattr(file, _NAME, record.encode())
        except OSError:
            pass  # it is a convenience
    return sha256


def recorded_digest(path: str, *, inode: int, size_bytes: int, mtime_ns: int) -> str | None:
    """Return the SHA-256 recorded for the file at ``path`` as it is described, None where there is none."""
    if not hasattr(os, "getxattr"):
        return None
    try:
        record = os.getxattr(path, _NAME).decode("ascii", "replace")
    except OSError:
        return None
    said = _RECORD.fullmatch(record)
    if said is None or tuple(map(int, said.groups()[1:])) != (inode, size_bytes, mtime_ns):
        return None
    return said[1]


def _sha256(file: str | os.PathLike[str] | int) -> str:
    digest = hashlib.sha256()
    scratch = memoryview(bytearray(_BLOCK))
    fd = file if isinstance(file, int) else os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        offset = 0
        while size := os.preadv(fd, [scratch], offset):
            digest.update(scratch[:size])
            offset += size
    finally:
        if fd != file:
            os.close(fd)
    return digest.hexdigest()
