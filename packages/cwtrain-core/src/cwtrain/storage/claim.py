"""The claim: who may write under an identity, decided before any byte of weights is sent.

It is one small object, ``_claims/<identity>.json``, written by one conditional PUT, and it is never replaced. The same
PUT made twice also shows what the store makes of ``If-None-Match``: that is found out once for each store.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import json
import logging
import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cwtrain.errors import StorageConflictError, StorageError, StorageNotFoundError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage._learned import learned_of
from cwtrain.storage.location import Location
from cwtrain.storage.store import ObjectStore

__all__ = ["Claim", "claim_of", "read_claim", "refuses_condition", "stream_claim", "take_claim"]

_log = logging.getLogger("cwtrain.storage")

_SCHEMA = 1
_ATTEMPTS = 3
# Codes of a 400 that are about something else than the conditional header.
_OTHER_400 = {
    "AuthorizationHeaderMalformed",
    "BadDigest",
    "EntityTooLarge",
    "EntityTooSmall",
    "ExpiredToken",
    "IncompleteBody",
    "InvalidBucketName",
    "InvalidDigest",
    "InvalidPart",
    "InvalidPartOrder",
    "InvalidToken",
    "KeyTooLongError",
    "MalformedXML",
    "MetadataTooLarge",
    "PathStyleRequestNotAllowed",
    "RequestTimeout",
    "TokenRefreshRequired",
    "XAmzContentSHA256Mismatch",
}


def refuses_condition(error: StorageError) -> bool:
    """Return whether a conditional write may have been refused for its ``If-None-Match`` header alone (501, 400)."""
    return error.status == 501 or (error.status == 400 and error.code not in _OTHER_400)


@attrs.frozen(kw_only=True)
class Claim:
    """What an upload says about itself.

    ``files`` maps each object's name to its size and modification time, or to the SHA-256 of what is made in memory.
    """

    uuid: str
    run_id: str | None
    host: str
    directory: str
    files: Mapping[str, Mapping[str, Any]] = attrs.field(repr=False)
    created: str = ""

    def to_bytes(self) -> bytes:
        """Return it as it stands in the bucket."""
        data = {"schema_version": _SCHEMA, **attrs.asdict(self)}
        return json.dumps(data, indent=1, sort_keys=True).encode()

    def covers(self, other: Claim) -> bool:
        """Return whether ``other`` may go on under this claim: the same run, or the same files."""
        if self.run_id is not None and self.run_id == other.run_id:
            return True
        return (self.directory, self.files) == (other.directory, other.files)

    def holder(self) -> str:
        """Return in words who made it."""
        run = f"run {self.run_id!r}" if self.run_id else "an upload without a run id"
        return f"{run} from {self.directory} on host {self.host} at {self.created}"


def claim_of(files: Sequence[SnapshotFile], *, run_id: str | None, directory: str | None = None) -> Claim:
    """Return the claim of an upload of ``files``; their directory is found from their paths when it is not given."""
    if directory is None:
        folders = {os.path.dirname(os.path.abspath(file.path)) for file in files if file.path is not None}
        directory = os.path.commonpath(folders) if folders else ""
    return Claim(
        uuid=str(uuid.uuid4()),
        run_id=run_id,
        host=socket.gethostname(),
        directory=os.path.abspath(directory) if directory else "",
        files={file.name: _described(file) for file in files},
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    )


def stream_claim(upload_id: str, *, run_id: str | None) -> Claim:
    """Return the claim of a streamed upload: equal for all ranks that have the same ``upload_id``, for nobody else."""
    return Claim(
        uuid=upload_id,
        run_id=run_id,
        host=socket.gethostname(),
        directory=f"memory (streamed, {upload_id})",
        files={},
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    )


def _described(file: SnapshotFile) -> dict[str, Any]:
    described: dict[str, Any] = {"size_bytes": file.size_bytes, "mtime_ns": file.mtime_ns}
    if file.head:
        described["head_sha256"] = hashlib.sha256(file.head).hexdigest()
    return described


def read_claim(store: ObjectStore, location: Location, identity: str) -> Claim | None:
    """Return the claim under ``identity``, None when there is none."""
    try:
        text = store.get(location.claim_key(identity))
    except StorageNotFoundError as error:
        if error.code == "NoSuchBucket":
            raise
        return None
    try:
        data = json.loads(text)
        if data["schema_version"] != _SCHEMA:
            raise ValueError(f"schema version {data['schema_version']}")
        return Claim(**{field.name: data[field.name] for field in attrs.fields(Claim)})
    except (ValueError, TypeError, KeyError) as error:
        # Someone's claim all the same: nothing is equal to it.
        return Claim(
            uuid="", run_id=None, host="?", directory=f"an unreadable claim ({error})", files={}, created="unknown time"
        )


def take_claim(store: ObjectStore, location: Location, identity: str, claim: Claim) -> tuple[Claim, bool]:
    """Write ``claim`` unless there is one. Return whose claim stands, and whether conditional writes are to be used.

    A store that refuses ``If-None-Match``, or ignores it, is warned about, once: there nothing stops two uploads that
    begin at the same moment.
    """
    learned = learned_of(store)
    key = location.claim_key(identity)
    body = claim.to_bytes()
    for _ in range(_ATTEMPTS):
        try:
            store.put(key, body, if_absent=True)
        except StorageConflictError as error:
            if (held := read_claim(store, location, identity)) is not None:
                learned.conditional = learned.conditional or error.status == 412
                return held, True
            continue  # it is gone again, or another PUT is under way
        except StorageError as error:
            if not refuses_condition(error):
                raise
            learned.conditional = False
            if (held := read_claim(store, location, identity)) is not None:
                return held, False
            # Were it not for the header, this raises the real reason.
            store.put(key, body)
            if learned.tell("refuses conditions"):
                _log.warning(
                    "%s takes no If-None-Match (%s): two uploads of one identity at the same moment are not told apart",
                    store.endpoint,
                    error,
                )
            return read_claim(store, location, identity) or claim, False
        if learned.conditional:
            return claim, True
        return _probed(store, location, identity, claim, body)
    raise StorageConflictError(
        f"the claim s3://{location.bucket}/{key} can be neither written nor read",
        action="s3:PutObject",
        bucket=location.bucket,
        key=key,
        hint="another upload of this identity is under way; wait for it, or use another identity",
    )


def _probed(store: ObjectStore, location: Location, identity: str, claim: Claim, body: bytes) -> tuple[Claim, bool]:
    try:
        store.put(location.claim_key(identity), body, if_absent=True)
    except StorageConflictError as error:
        learned_of(store).conditional = error.status == 412
        return claim, True
    if learned_of(store).tell("ignores conditions"):
        _log.warning(
            "%s ignores If-None-Match on a PUT: two uploads of one identity at the same moment are not told apart",
            store.endpoint,
        )
    return read_claim(store, location, identity) or claim, True
