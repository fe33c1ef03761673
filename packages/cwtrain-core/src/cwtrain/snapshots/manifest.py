"""``_manifests/<identity>.json``: what a published snapshot holds, so that it can be checked without its directory.

A manifest is JSON data:

    schema_version   1
    identity         the snapshot's identity
    type             FULL or INCREMENTAL
    run_id           the run that published it, or null
    deployment_id    the deployment it was published for, or null
    version          the trainer's version, or null
    previous_identity  what a delta applies to, or null
    objects          object name -> {"size": bytes, "sha256": hex}
    tensors          tensor name -> Adler-32 of its (new) raw bytes, 8 hex digits
    base_version     the version that a delta names as its base in its own index, where that was all that says it

Other keys are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from cwtrain.errors import SnapshotError
from cwtrain.snapshots._json import parse_json
from cwtrain.snapshots.identity import check_identity

__all__ = ["BASE_VERSION", "SCHEMA_VERSION", "ObjectSum", "build_manifest", "manifest_to_bytes", "parse_manifest"]

SCHEMA_VERSION = 1
BASE_VERSION = "base_version"

_SHA256 = re.compile(r"[0-9a-f]{64}")
_ADLER32 = re.compile(r"[0-9a-f]{8}")


class ObjectSum(Protocol):
    """Size and SHA-256 of one object, as an upload reports them."""

    @property
    def size_bytes(self) -> int:
        """Length of the object in bytes."""

    @property
    def sha256(self) -> str:
        """Hex SHA-256 of the object."""


def build_manifest(
    *,
    identity: str,
    objects: Mapping[str, ObjectSum],
    tensors: Mapping[str, str],
    type: str,  # noqa: A002 - the key's name
    run_id: str | None = None,
    deployment_id: str | None = None,
    version: str | int | None = None,
    previous_identity: str | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Return the manifest of a snapshot as JSON data. ``extra`` keys are added; they cannot replace ours."""
    manifest: dict[str, Any] = {
        **extra,
        "schema_version": SCHEMA_VERSION,
        "identity": check_identity(identity),
        "type": type,
        "run_id": run_id,
        "deployment_id": deployment_id,
        "version": version,
        "previous_identity": previous_identity,
        "objects": {name: {"size": item.size_bytes, "sha256": item.sha256} for name, item in sorted(objects.items())},
        "tensors": dict(sorted(tensors.items())),
    }
    return parse_manifest(manifest)


def manifest_to_bytes(manifest: Mapping[str, Any]) -> bytes:
    """Return the bytes of a manifest object; the same manifest gives the same bytes."""
    return (json.dumps(manifest, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def parse_manifest(data: bytes | Mapping[str, Any]) -> dict[str, Any]:
    """Return a checked manifest from an object's bytes or from JSON data.

    Raises SnapshotError that names what is wrong, or the schema version if it is not one that we know.
    """
    try:
        value = parse_json(data) if isinstance(data, bytes) else dict(data)
    except ValueError as error:
        raise SnapshotError(f"the manifest {error}", hint="publish the snapshot again under a new identity") from None
    if not isinstance(value, dict):
        raise SnapshotError("the manifest is not a JSON object", hint="publish the snapshot again under a new identity")
    schema = value.get("schema_version")
    if schema != SCHEMA_VERSION or isinstance(schema, bool):
        raise SnapshotError(
            f"the manifest has schema_version {schema!r}, this cwtrain reads {SCHEMA_VERSION}",
            hint="install the cwtrain that wrote it, or a newer one",
        )
    if problems := _problems(value):
        raise SnapshotError(f"the manifest of {value.get('identity')!r} is wrong: {'; '.join(problems)}")
    return value


def _problems(value: Mapping[str, Any]) -> list[str]:
    problems = []
    if not isinstance(value.get("identity"), str):
        problems.append("identity is no string")
    for key in ("run_id", "deployment_id", "previous_identity"):
        if not isinstance(value.get(key), str | None):
            problems.append(f"{key} is neither a string nor null")
    if not isinstance(value.get("version"), str | int | None):
        problems.append("version is neither a string, a number nor null")
    objects, tensors = value.get("objects"), value.get("tensors")
    if not isinstance(objects, dict):
        problems.append("objects is missing")
    else:
        problems += [f"object {name!r} has no good size and sha256" for name, it in objects.items() if not _is_sum(it)]
    if not isinstance(tensors, dict):
        problems.append("tensors is missing")
    else:
        problems += [
            f"tensor {name!r} has no 8-digit checksum"
            for name, text in tensors.items()
            if not (isinstance(text, str) and _ADLER32.fullmatch(text))
        ]
    return problems


def _is_sum(item: Any) -> bool:
    if not isinstance(item, dict) or type(item.get("size")) is not int or item["size"] < 0:
        return False
    sha256 = item.get("sha256")
    return isinstance(sha256, str) and _SHA256.fullmatch(sha256) is not None
