"""Multipart uploads that were left open: known from this machine's own records, or older than a day.

The store bills the parts of an upload that was neither completed nor aborted. A process that is killed cannot abort,
so each upload notes what it opens in a small file in the temporary directory, and the next one cleans up after it. It
notes the key before it asks for an upload: one whose id the killed process never learned is found by its key.

Of a file in parts it also notes which have arrived, with the file's SHA-256: an upload that was killed, or whose store
did not come back in time, is gone on with from there by the next one for the same object.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import hashlib
import json
import logging
import math
import os
import socket
import stat
import tempfile
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import attrs

from cwtrain.errors import CWTrainError, StorageError, StorageNotFoundError
from cwtrain.storage._learned import learned_of
from cwtrain.storage.location import Location
from cwtrain.storage.store import ObjectStore, OpenUpload

__all__ = ["KeptParts", "UploadRecord", "abort_abandoned", "abort_left_open", "abort_quietly", "is_old"]

_log = logging.getLogger("cwtrain.storage")
_DAY = dt.timedelta(days=1)
_mine: set[str] = set()
_WRITE_SECONDS = 0.5
"""Parts that arrive are written down no more often than that: a record of ten thousand is not small."""
_ASKED = "?"
"""What stands before the number of an upload whose id is not known yet."""


@attrs.define
class KeptParts:
    """An upload of a file in parts: which file that is, how it is cut, and the ETags of the parts that have arrived."""

    key: str
    upload_id: str
    sha256: str
    part_bytes: int
    etags: dict[int, str] = attrs.field(factory=dict)
    """By the part's number, from 0."""

    @classmethod
    def read(cls, upload_id: str, noted: Any) -> KeptParts | None:
        """Return what a record says of an upload, None where it says no more than its key."""
        try:
            etags = {int(part): str(etag) for part, etag in noted["etags"].items()}
            return cls(str(noted["key"]), upload_id, str(noted["sha256"]), int(noted["part_bytes"]), etags)
        except (TypeError, KeyError, ValueError, AttributeError):
            return None

    def noted(self) -> dict[str, Any]:
        """Return it as it stands in a record."""
        return {"key": self.key, "sha256": self.sha256, "part_bytes": self.part_bytes, "etags": self.etags}


class UploadRecord:
    """What one upload has open, kept in a file while there is anything; several threads may use it.

    A directory that cannot be written, or belongs to someone else, means that no record is kept.
    """

    def __init__(self, store: ObjectStore, location: Location, identity: str, *, directory: str | None = None) -> None:
        self._directory = directory or os.path.join(tempfile.gettempdir(), f"cwtrain-{os.getuid()}")
        where = "\n".join((store.endpoint, store.bucket, location.prefix(identity)))
        self._stem = f"upload-{hashlib.sha256(where.encode()).hexdigest()[:32]}-"
        pid = os.getpid()
        self._name = f"{self._stem}{socket.gethostname()}-{pid}-{_started(pid)}-{uuid.uuid4().hex[:8]}.json"
        self._open: dict[str, str | KeptParts] = {}
        self._written = -math.inf
        self._lock = threading.Lock()
        _mine.add(self._name)

    @contextlib.contextmanager
    def opening(self, key: str) -> Iterator[str]:
        """Note that an upload of ``key`` is asked for, and give what ``opened`` is told then.

        Without an answer it stays noted, because there may be one all the same.
        """
        asked = f"{_ASKED}{uuid.uuid4().hex[:8]}"
        self.opened(key, asked)
        try:
            yield asked
        except StorageError:
            self.closed(asked)
            raise

    def opened(self, key: str, upload_id: str, asked: str = "") -> None:
        """Note that an upload was begun, which was asked for as ``asked``."""
        with self._lock:
            self._open.pop(asked, None)
            self._open[upload_id] = key
            self._write()

    def keeps(self, parts: KeptParts) -> None:
        """Note what an upload that is open is of, so that another one can go on with it."""
        with self._lock:
            self._open[parts.upload_id] = parts
            self._write()

    def arrived(self, upload_id: str, part: int, etag: str) -> None:
        """Note that a part of an upload is there."""
        with self._lock:
            if isinstance(parts := self._open.get(upload_id), KeptParts):
                parts.etags[part] = etag
                if time.monotonic() - self._written >= _WRITE_SECONDS:
                    self._write()

    def closed(self, upload_id: str) -> None:
        """Note that an upload is completed or aborted."""
        with self._lock:
            if self._open.pop(upload_id, None) is not None:
                self._write()

    def close(self) -> None:
        """End the upload that keeps this record; what is still open is left for the next one."""
        with self._lock:
            if self._open:
                self._write()
        _mine.discard(self._name)

    def abandoned(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Return (file, what is noted by upload id) of uploads under the same identity whose process no longer runs."""
        try:
            names = os.listdir(self._directory) if self._usable() else []
        except OSError:
            return
        for name in names:
            if not name.startswith(self._stem) or name in _mine or _running(name.removeprefix(self._stem)):
                continue
            path = os.path.join(self._directory, name)
            try:
                with open(path, encoding="utf-8") as file:
                    left = json.load(file)
            except (OSError, ValueError):
                continue
            if isinstance(left, dict):
                yield path, left

    def _usable(self) -> bool:
        """Only a directory that is ours and closed to others tells us what to abort."""
        try:
            about = os.lstat(self._directory)
        except OSError:
            return False
        return stat.S_ISDIR(about.st_mode) and about.st_uid == os.getuid() and not about.st_mode & 0o022

    def _write(self) -> None:
        path = os.path.join(self._directory, self._name)
        self._written = time.monotonic()
        try:
            if not self._open:
                os.unlink(path)
                return
            os.makedirs(self._directory, mode=0o700, exist_ok=True)
            if not self._usable():
                return
            with open(path + ".tmp", "w", encoding="utf-8") as file:
                noted = {key: one if isinstance(one, str) else one.noted() for key, one in self._open.items()}
                json.dump(noted, file)
            os.replace(path + ".tmp", path)
        except OSError as error:
            _log.debug("no record of open uploads can be kept in %s: %s", self._directory, error)


def abort_left_open(
    record: UploadRecord,
    store: ObjectStore,
    location: Location,
    identity: str,
    *,
    new: bool = False,
    wanted: Collection[str] = (),
) -> dict[str, KeptParts]:
    """Abort what earlier uploads of ``identity`` left open, and what has been open for more than a day.

    The second needs the optional permission s3:ListBucketMultipartUploads, and is looked for at most once in an hour.
    ``new``: nobody has written under the identity before. What has parts of the keys ``wanted`` is kept and returned.
    Never raises: this is cleaning up.
    """
    kept = abort_abandoned(record, store, wanted=wanted)
    _abort_old(store, location, identity, new=new)
    return kept


def _abort_old(store: ObjectStore, location: Location, identity: str, *, new: bool) -> None:
    # Without a prefix of its own, a deployment may share the bucket with strangers, whose uploads are left alone.
    if not location.root and new:
        return
    prefix = location.root or location.prefix(identity)
    if not learned_of(store).time_to_clean(prefix):
        return
    try:
        for upload in store.list_uploads(prefix):
            if is_old(upload):
                abort_quietly(store, upload.key, upload.upload_id)
    except CWTrainError as error:
        _log.debug("open multipart uploads cannot be listed: %s", error)


def is_old(upload: OpenUpload) -> bool:
    """Return whether an upload has been open for so long that nobody works on it any more."""
    return upload.started is not None and upload.started < dt.datetime.now(dt.UTC) - _DAY


def abort_abandoned(record: UploadRecord, store: ObjectStore, *, wanted: Collection[str] = ()) -> dict[str, KeptParts]:
    """Abort what processes that no longer run left open under the same identity. Never raises.

    What has parts of the keys ``wanted`` is noted in ``record`` instead, and returned by key.
    """
    kept: dict[str, KeptParts] = {}
    for path, left in record.abandoned():
        gone = []
        for upload_id, noted in left.items():
            parts = KeptParts.read(upload_id, noted)
            if parts is not None and parts.etags and parts.key in wanted and parts.key not in kept:
                kept[parts.key] = parts
                record.keeps(parts)
            elif upload_id.startswith(_ASKED):
                gone.append(_abort_asked(store, str(noted)))
            else:
                gone.append(abort_quietly(store, parts.key if parts is not None else str(noted), upload_id))
        if all(gone):
            try:
                os.unlink(path)
            except OSError as error:
                _log.debug("%s cannot be removed: %s", path, error)
    return kept


def _abort_asked(store: ObjectStore, key: str) -> bool:
    """Abort the uploads of ``key``: the identity is ours, and so was the process that asked for one and is gone."""
    try:
        ids = [upload.upload_id for upload in store.list_uploads(key) if upload.key == key]
    except CWTrainError as error:
        _log.debug("open multipart uploads cannot be listed: %s", error)
        return True  # nothing more can be done here; it is found by its age
    gone = [abort_quietly(store, key, upload_id) for upload_id in ids]
    return all(gone)


def abort_quietly(store: ObjectStore, key: str, upload_id: str) -> bool:
    """Abort an upload and return whether it is gone. A failure is only logged: it must not hide what went before."""
    try:
        store.abort_upload(key, upload_id)
    except StorageNotFoundError:
        pass
    except CWTrainError as error:
        _log.warning(
            "the multipart upload %s of s3://%s/%s is still open and its parts are billed: %s",
            upload_id,
            store.bucket,
            key,
            error,
        )
        return False
    return True


def _running(owner: str) -> bool:
    """Return whether the process may still run that made a record; one of another host may."""
    host, pid, started, _ = owner.rsplit("-", 3)
    if host != socket.gethostname() or not pid.isdigit():
        return True
    if int(pid) == os.getpid() and started == _started(os.getpid()):
        return False  # not among those of this process that are under way
    return _started(int(pid)) == started


def _started(pid: int) -> str:
    """Return what tells a process from a later one with the same number; ``gone`` when it does not run."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            fields = file.read().rpartition(")")[2].split()
            # A killed process stays as a zombie until its parent looks.
            return "gone" if fields[0] in "ZX" else fields[19]
    except OSError:
        pass
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return "gone"
    except OSError:
        pass
    return "unknown"
