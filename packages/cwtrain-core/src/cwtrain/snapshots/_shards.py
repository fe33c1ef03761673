"""The shards of an index against their headers: each tensor once, in the shard that the index says."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

import attrs

from cwtrain.errors import SnapshotLayoutError
from cwtrain.snapshots._files import Entry, RegularFile, same_bytes
from cwtrain.snapshots.header import Header, TensorInfo, build_header, read_header

NUMBERED = re.compile(r"model-.*-of-.*\.safetensors")
"""Names of shards that belong to a numbered set; one that the index does not name is left over from another save."""

_EXAMPLES = 20


@attrs.define(kw_only=True)
class Shards:
    """What the shards of one directory hold. ``headers`` has those that could be read, by file name.

    ``duplicates`` maps a shard to the tensors in it that another shard owns with equal bytes; they are not used.
    ``spare`` names shards outside the index that hold such duplicates and nothing else.
    """

    directory: str
    weight_map: Mapping[str, str]
    headers: dict[str, Header] = attrs.field(factory=dict)
    duplicates: dict[str, set[str]] = attrs.field(factory=dict)
    spare: list[str] = attrs.field(factory=list)

    def tensors(self) -> Iterable[tuple[str, str, TensorInfo]]:
        """Yield (name, shard, where) of each tensor that counts, shard by shard in the order of the data."""
        for shard, header in self.headers.items():
            for name, tensor in header.tensors.items():
                if self.weight_map.get(name) == shard:
                    yield name, shard, tensor

    def path(self, shard: str) -> str:
        """Return the path of a shard."""
        return os.path.join(self.directory, shard)


def read_shards(
    directory: str, weight_map: Mapping[str, str], listing: Mapping[str, Entry], problems: list[str]
) -> Shards:
    """Return the shards that ``weight_map`` names; adds to ``problems`` everything that does not fit together."""
    shards = Shards(directory=directory, weight_map=weight_map)
    wanted: dict[str, list[str]] = {}
    for name, shard in weight_map.items():
        wanted.setdefault(shard, []).append(name)
    for shard, names in sorted(wanted.items()):
        entry = listing.get(shard)
        if entry is None:
            problems.append(
                f"{shard}: the index names it for {_count(names)}, but it is not there; "
                "finish the download, or save the checkpoint again"
            )
        elif entry.trouble:
            problems.append(f"{shard}: {entry.trouble}")
        else:
            try:
                shards.headers[shard] = read_header(shards.path(shard), label=shard)
            except SnapshotLayoutError as error:
                problems.extend(error.problems)
    for shard, header in shards.headers.items():
        missing = [name for name in wanted[shard] if name not in header.tensors]
        _report(problems, shard, missing, "is in it by the index, but not by its header")
        _check_unowned(shards, shard, header, problems)
    return shards


def _count(names: list[str]) -> str:
    return f"tensor {names[0]!r}" if len(names) == 1 else f"{len(names)} tensors ({names[0]!r}, ...)"


def _report(problems: list[str], shard: str, names: list[str], what: str) -> None:
    fix = "save the checkpoint again, or correct the index"
    problems.extend(f"{shard}: tensor {name!r} {what}; {fix}" for name in names[:_EXAMPLES])
    if len(names) > _EXAMPLES:
        problems.append(f"{shard}: {len(names) - _EXAMPLES} more tensors likewise")


def _check_unowned(shards: Shards, shard: str, header: Header, problems: list[str]) -> None:
    """Look at the tensors of ``shard`` that the index places elsewhere, or nowhere."""
    strays = []
    for name in header.tensors:
        owner = shards.weight_map.get(name)
        if owner == shard:
            continue
        if owner is None:
            strays.append(name)
        elif owner in shards.headers and name in shards.headers[owner].tensors:
            if difference := _difference(shards, name, shard, owner):
                problems.append(
                    f"{shard}: tensor {name!r} is also in {owner}, with {difference}; only one can be right: "
                    "save the checkpoint again"
                )
            else:
                shards.duplicates.setdefault(shard, set()).add(name)
        elif owner in shards.headers:
            strays.append(name)
        # else: the owner could not be read, which is reported already
    _report(problems, shard, strays, "is in it, but the index does not place it there")


def _difference(shards: Shards, name: str, one: str, two: str) -> str | None:
    """Return in what two copies of a tensor differ, or None."""
    left, right = shards.headers[one], shards.headers[two]
    a, b = left.tensors[name], right.tensors[name]
    if left.metadata.get(name) != right.metadata.get(name):
        return f"another checksum ({left.metadata.get(name)} and {right.metadata.get(name)})"
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return f"another type ({a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)})"
    with RegularFile(shards.path(one), label=one) as first, RegularFile(shards.path(two), label=two) as second:
        equal = same_bytes(first, left.data_start + a.begin, second, right.data_start + b.begin, a.size_bytes)
    return None if equal else "other bytes"


def take_spare(shards: Shards, shard: str) -> bool:
    """Return whether an unnamed ``shard`` holds nothing but equal copies of tensors of named shards, and note it.

    slime writes one when a pipeline stage changed only the embedding that it shares with the last stage.
    """
    problems: list[str] = []
    try:
        header = read_header(shards.path(shard), label=shard)
    except SnapshotLayoutError:
        return False
    probe = Shards(directory=shards.directory, weight_map=shards.weight_map, headers={**shards.headers, shard: header})
    _check_unowned(probe, shard, header, problems)
    if problems or not header.tensors or len(probe.duplicates.get(shard, ())) != len(header.tensors):
        return False
    shards.spare.append(shard)
    return True


def without_duplicates(header: Header, names: set[str]) -> tuple[bytes, tuple[tuple[int, int], ...]]:
    """Return a new header of the file without the tensors ``names``, and the ranges of the file that follow it."""
    kept = {name: tensor for name, tensor in header.tensors.items() if name not in names}
    metadata = {key: text for key, text in header.metadata.items() if key not in names}
    head = build_header(((name, t.dtype, t.shape, t.size_bytes) for name, t in kept.items()), metadata)
    ranges: list[tuple[int, int]] = []
    for tensor in kept.values():
        start = header.data_start + tensor.begin
        if ranges and sum(ranges[-1]) == start:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + tensor.size_bytes)
        elif tensor.size_bytes:
            ranges.append((start, tensor.size_bytes))
    return head, tuple(ranges)
