"""Writing a full snapshot: each tensor read once, changed if a delta says so, checksummed and written once.

The length of a shard's header is known before its checksums are: data first, the header last.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping

from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._sweep import Swept, sweep
from cwtrain.snapshots._targets import FileTarget
from cwtrain.snapshots._write import allocate, require_space, synced_file
from cwtrain.snapshots.changes import Change
from cwtrain.snapshots.checkpoint import Tensor
from cwtrain.snapshots.header import build_header
from cwtrain.snapshots.index import dump_index
from cwtrain.snapshots.inspect import Inspection

_UNKNOWN = "0" * 8


def write_full(
    found: Inspection,
    kept: Mapping[str, Tensor],
    stage: str,
    *,
    changes: Mapping[str, Change] | None = None,
    accept: Callable[[Swept], None],
    workers: int,
    on_progress: Callable[[int, int], object] | None = None,
) -> None:
    """Write the tensors ``kept`` of the checkpoint ``found``, with ``changes``, and its side files into ``stage``.

    ``accept`` looks at what came out, and raises if that must not be used. Raises SnapshotError if the disk has no
    room.
    """
    assert found.index is not None  # scan() raised otherwise
    assert found.shards is not None
    shards = _group(found, kept)
    size = sum(tensor.size_bytes for tensor in kept.values())
    require_space(stage, size + sum(found.listing[name].size_bytes for name in found.side_files), "the snapshot")
    known = found.shards.weight_map.keys()
    paths: dict[str, str] = {}
    places: dict[str, tuple[str, int]] = {}
    for shard, tensors in shards.items():
        paths[shard] = path = os.path.join(stage, shard)
        offset = len(_head(tensors, known, {}))
        for tensor in tensors:
            places[tensor.name] = (path, offset)
            offset += tensor.size_bytes
        with open(path, "xb") as file:
            allocate(file.fileno(), offset)
    target = FileTarget(places)
    ordered = [tensor for tensors in shards.values() for tensor in tensors]
    try:
        swept = sweep(ordered, changes=changes, target=target, workers=workers, on_progress=on_progress)
    finally:
        target.close()
    accept(swept)
    for shard, tensors in shards.items():
        with open(paths[shard], "r+b") as file:
            file.write(_head(tensors, known, swept.checksums))
            file.flush()
            os.fsync(file.fileno())
    for name in found.side_files:
        _copy_side_file(found, name, stage)
    metadata = {**found.index["metadata"], "total_size": size, "checksum_format": "adler32"}
    weight_map = {tensor.name: shard for shard, tensors in shards.items() for tensor in tensors}
    with synced_file(os.path.join(stage, INDEX_NAME)) as file:
        file.write(dump_index({**found.index, "metadata": metadata, "weight_map": weight_map}))


def _group(found: Inspection, kept: Mapping[str, Tensor]) -> dict[str, list[Tensor]]:
    """Return the shards to write. They keep their names, unless some fall away: then they are counted from 1."""
    assert found.shards is not None
    groups: dict[str, list[Tensor]] = {}
    for name, shard, _ in found.shards.tensors():
        if name in kept:
            groups.setdefault(shard, []).append(kept[name])
    if len(groups) == len(found.shards.headers):
        return groups
    numbers = enumerate(groups.values(), start=1)
    return {f"model-{number:05d}-of-{len(groups):05d}.safetensors": tensors for number, tensors in numbers}


def _head(tensors: list[Tensor], known: Collection[str], checksums: Mapping[str, str]) -> bytes:
    """Return a shard's header; where checksums are not known yet, one of the same length."""
    names = [tensor.name for tensor in tensors]
    other = {key: text for key, text in tensors[0].file.metadata.items() if key not in known}
    metadata = {**other, "format": "pt", **{name: checksums.get(name, _UNKNOWN) for name in names}}
    return build_header(((t.name, t.dtype, t.shape, t.size_bytes) for t in tensors), metadata)


def _copy_side_file(found: Inspection, name: str, stage: str) -> None:
    entry = found.listing[name]
    os.makedirs(os.path.dirname(os.path.join(stage, name)), exist_ok=True)
    with RegularFile(found.place(name), label=name) as source, synced_file(os.path.join(stage, name)) as file:
        for block in source.blocks(0, entry.size_bytes):
            file.write(block)
        source.check_unchanged(size_bytes=entry.size_bytes, mtime_ns=entry.mtime_ns, inode=entry.inode)
