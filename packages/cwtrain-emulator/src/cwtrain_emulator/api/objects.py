"""What the service checks in the bucket before it accepts a hot-load."""

from __future__ import annotations

from cwtrain_emulator.api.errors import ApiError, failed_precondition, unavailable
from cwtrain_emulator.engine.safetensors import INDEX_NAME, FormatError
from cwtrain_emulator.s3.client import S3Client, S3Error
from cwtrain_emulator.snapshots import delta_problems, listing_digest, parse_index

__all__ = ["check_snapshot_objects"]

_MAX_INDEX_BYTES = 64 << 20
_QUOTED = 20


def check_snapshot_objects(
    client: S3Client, *, bucket: str, prefix: str, identity: str, kind: str, previous: str
) -> str:
    """Return the digest of the snapshot's listing; raise FAILED_PRECONDITION that names everything that is wrong.

    `kind` is FULL or INCREMENTAL. Blocking: call it in a thread.
    """
    try:
        listed = {entry.key.removeprefix(prefix): entry for entry in client.list_objects(bucket, prefix)}
        if INDEX_NAME not in listed:
            raise _refusal(identity, [f"s3://{bucket}/{prefix}{INDEX_NAME} does not exist"])
        raw = client.get(bucket, prefix + INDEX_NAME, limit=_MAX_INDEX_BYTES)
    except S3Error as exc:
        if exc.status in (403, 404):
            raise failed_precondition(
                f"the service cannot read s3://{bucket}/{prefix}", ("STORAGE_ACCESS", str(exc))
            ) from exc
        raise unavailable(f"the object store does not answer: {exc}") from exc
    try:
        index = parse_index(raw)
    except FormatError as exc:
        raise _refusal(identity, [str(exc)]) from None
    problems = [f"{name}, which the index names, does not exist" for name in index.files if name not in listed]
    if kind == "INCREMENTAL":
        problems += delta_problems(index, identity=identity, previous=previous)
    else:
        if index.is_delta:
            problems.append(f"{INDEX_NAME}: the metadata is a delta's, but the hot-load asks for a full snapshot")
        if "config.json" not in listed:
            problems.append("config.json does not exist")
        if not index.weight_map:
            problems.append(f"{INDEX_NAME}: names no tensor")
    if problems:
        raise _refusal(identity, problems)
    return listing_digest((name, entry.size_bytes, entry.etag) for name, entry in listed.items())


def _refusal(identity: str, problems: list[str]) -> ApiError:
    more = f"; and {len(problems) - _QUOTED} more" if len(problems) > _QUOTED else ""
    message = f"snapshot {identity} cannot be loaded: " + "; ".join(problems[:_QUOTED]) + more
    return failed_precondition(message, *(("SNAPSHOT", problem) for problem in problems[:_QUOTED]))
