"""``model.safetensors.index.json``: read, checked, generated, and rewritten with identities for the upload."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from cwtrain.errors import SnapshotChainError, SnapshotLayoutError
from cwtrain.models.snapshot import INDEX_NAME, LocalSnapshot, SnapshotFile, SnapshotKind
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._json import MAX_JSON_BYTES, encodable, may_hold_half_characters, parse_json
from cwtrain.snapshots.header import Header
from cwtrain.snapshots.identity import check_identity, check_previous_identity

__all__ = [
    "DELTA_KEYS",
    "dump_index",
    "files_for_upload",
    "generate_index",
    "index_for_upload",
    "is_delta",
    "read_index",
    "shard_name_trouble",
]

DELTA_KEYS = ("delta_encoding", "base_version", "compression_format")
"""Any of these in an index's metadata says that the directory is a delta; the first is the one that writers go by."""

_EXAMPLES = 20


def read_index(path: str, *, label: str = INDEX_NAME) -> dict[str, Any]:
    """Return the index at ``path`` as JSON data with a ``weight_map`` of names and ``metadata`` that is an object.

    Raises SnapshotLayoutError with everything that is wrong with it.
    """
    with RegularFile(path, label=label) as file:
        if file.size_bytes > MAX_JSON_BYTES:
            raise _refused([f"{label}: has {file.size_bytes} bytes, no index is that long (at most {MAX_JSON_BYTES})"])
        raw = file.read(0, file.size_bytes)
    try:
        index = parse_json(raw)
    except ValueError as error:
        raise _refused([f"{label}: {error}; save or download the checkpoint again"]) from None
    if problems := [f"{label}: {problem}" for problem in _problems(index, raw)]:
        raise _refused(problems)
    return {**index, "metadata": index.get("metadata") or {}}


def _refused(problems: list[str]) -> SnapshotLayoutError:
    return SnapshotLayoutError("; ".join(problems), problems=problems)


def _problems(index: Any, raw: bytes) -> list[str]:
    if not isinstance(index, dict):
        return ["is not a JSON object; save or download the checkpoint again"]
    problems = []
    if not isinstance(index.get("metadata"), dict | None):
        problems.append("metadata is not an object; save the checkpoint again")
    if may_hold_half_characters(raw) and not encodable(json.dumps(index, ensure_ascii=False)):
        problems.append("has half a character in a name or value; save the checkpoint again")
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict):
        problems.append("weight_map is missing" if weight_map is None else "weight_map is not an object")
        return problems
    names = {shard for shard in weight_map.values() if isinstance(shard, str)}
    good = {shard for shard in names if shard_name_trouble(shard) is None}
    wrong = [
        (name, shard_name_trouble(shard))
        for name, shard in weight_map.items()
        if not isinstance(shard, str) or shard not in good
    ]
    problems += [f"weight_map sends tensor {name!r} to {trouble}" for name, trouble in wrong[:_EXAMPLES]]
    if len(wrong) > _EXAMPLES:
        problems.append(f"weight_map has {len(wrong) - _EXAMPLES} more entries that name no shard")
    return problems


def shard_name_trouble(shard: object) -> str | None:
    """Return why ``shard`` cannot name a shard, or None: a ``.safetensors`` file directly in the directory."""
    if not isinstance(shard, str):
        return f"{shard!r}, which is no file name"
    if "/" in shard or "\\" in shard:
        return f"{shard!r}, which is not directly in the directory; move the shard there and name it without a path"
    if not shard.endswith(".safetensors"):
        return f"{shard!r}, which is no .safetensors file; save the checkpoint as safetensors"
    if shard.startswith(".") or not shard.isprintable():
        return f"{shard!r}, which cannot be an object's name; rename the shard"
    return None


def is_delta(index: Mapping[str, Any]) -> bool:
    """Return whether the index is a delta's."""
    return any(key in index["metadata"] for key in DELTA_KEYS)


def generate_index(header: Header, shard: str) -> dict[str, Any]:
    """Return the index of a checkpoint that is the single file ``shard``: the same bytes for the same header."""
    return {
        "metadata": {"total_size": sum(tensor.size_bytes for tensor in header.tensors.values())},
        "weight_map": dict.fromkeys(sorted(header.tensors), shard),
    }


def dump_index(index: Mapping[str, Any]) -> bytes:
    """Return the bytes of an index file; the same index gives the same bytes. A delta has the shortest."""
    if is_delta(index):
        return json.dumps(index, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()
    return (json.dumps(index, indent=2, allow_nan=False) + "\n").encode()


def index_for_upload(snapshot: LocalSnapshot, identity: str) -> bytes:
    """Return the index that is uploaded for ``snapshot`` under ``identity``.

    A delta's ``version`` becomes ``identity`` and its ``base_version`` the predecessor's identity; the local file keeps
    its numbers. Raises SnapshotError for an identity that cannot be published, SnapshotChainError for a delta without a
    predecessor or with itself as predecessor.
    """
    check_identity(identity)
    if snapshot.kind is SnapshotKind.FULL:
        return dump_index(snapshot.index)
    if snapshot.previous_identity is None:
        raise SnapshotChainError(
            f"{snapshot.path}: the identity that this delta applies to is not known",
            hint="give it: previous_identity= (--previous-identity)",
        )
    previous = check_previous_identity(snapshot.previous_identity)
    if previous == identity:
        raise SnapshotChainError(
            f"{snapshot.path}: the delta cannot be published as {identity!r}, which it applies to itself",
            hint="choose a new identity for each snapshot",
        )
    metadata = {**snapshot.index_metadata, "version": identity, "base_version": previous}
    return dump_index({**snapshot.index, "metadata": metadata})


def files_for_upload(snapshot: LocalSnapshot, identity: str) -> tuple[SnapshotFile, ...]:
    """Return the snapshot's objects in upload order, the index last and, for a delta, with identities in it."""
    if snapshot.kind is SnapshotKind.FULL:
        check_identity(identity)
        return snapshot.files
    head = index_for_upload(snapshot, identity)
    index = SnapshotFile(name=INDEX_NAME, size_bytes=len(head), head=head)
    return (*(file for file in snapshot.files if file.name != INDEX_NAME), index)
