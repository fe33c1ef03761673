"""Read a snapshot in the bucket back and check every byte against its manifest."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cwtrain.errors import StorageNotFoundError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots.manifest import parse_manifest
from cwtrain.storage import Location, ObjectStore
from cwtrain.storage._crew import each
from cwtrain.storage.patient import waiting_out

__all__ = ["VerifyReport", "verify_snapshot"]

_MAX_HEADER_BYTES = 100_000_000
"""As large as the reference reader of safetensors allows."""


@attrs.frozen(kw_only=True)
class VerifyReport:
    """What was compared; ``problems`` is empty when everything is as it was published.

    ``tensors`` counts the tensors of a full snapshot whose Adler-32 was compared; a delta's can only be checked by
    applying it.
    """

    identity: str
    uri: str
    objects: int
    tensors: int
    bytes_read: int
    problems: tuple[str, ...] = ()

    @property
    def verified(self) -> bool:
        """True when nothing is wrong."""
        return not self.problems


def verify_snapshot(
    store: ObjectStore,
    location: Location,
    identity: str,
    *,
    workers: int = 4,
    on_progress: Callable[[int], None] | None = None,
) -> VerifyReport:
    """Stream all objects of ``identity`` and compare them with the manifest's SHA-256, sizes and tensor checksums.

    ``on_progress`` gets the bytes of each block as it was read; ``workers`` objects are read at the same time, in
    blocks, so memory does not grow with their size. Raises StorageNotFoundError where there is no snapshot or no
    manifest, StorageError naming a refused permission.
    """
    store = waiting_out(store)
    try:
        manifest = parse_manifest(store.get(location.manifest_key(identity)))
    except StorageNotFoundError as error:
        raise StorageNotFoundError(
            f"{location.uri(identity)} has no manifest ({location.manifest_key(identity)})",
            action="s3:GetObject",
            bucket=location.bucket,
            key=location.manifest_key(identity),
            hint="it is no snapshot that was published with manifests, or its upload never ended: "
            "check the identity, or publish it again from its directory",
        ) from error
    objects: dict[str, dict[str, Any]] = manifest["objects"]
    full = manifest.get("type") != "INCREMENTAL"
    checksums: Mapping[str, str] = manifest["tensors"] if full else {}
    there = {info.key: info for info in store.list_objects(location.prefix(identity))}
    problems = [
        f"{key}: is not part of the snapshot"
        for key in sorted(there)
        if key != location.prefix(identity) and key not in {location.key(identity, name) for name in objects}
    ]
    if INDEX_NAME not in objects:
        problems.append(f"the manifest names no {INDEX_NAME}")

    def check(name: str) -> _Checked:
        key = location.key(identity, name)
        if key not in there:
            return _Checked(problems=(f"{key}: is gone",))
        return _check_object(store, key, objects[name], checksums, on_progress)

    results = each(check, sorted(objects), threads=max(1, workers))
    seen = {tensor for result in results for tensor in result.tensors}
    missing = sorted(set(checksums) - seen)
    if missing and not any(result.problems for result in results):
        problems.append(f"{len(missing)} tensors of the manifest are in no object, for example {missing[0]}")
    return VerifyReport(
        identity=identity,
        uri=location.uri(identity),
        objects=len(objects),
        tensors=len(seen),
        bytes_read=sum(result.bytes_read for result in results),
        problems=(*(problem for result in results for problem in result.problems), *problems),
    )


@attrs.frozen(kw_only=True)
class _Checked:
    problems: tuple[str, ...] = ()
    tensors: frozenset[str] = frozenset()
    bytes_read: int = 0


def _check_object(
    store: ObjectStore,
    key: str,
    expected: Mapping[str, Any],
    checksums: Mapping[str, str],
    on_progress: Callable[[int], None] | None,
) -> _Checked:
    digest = hashlib.sha256()
    tensors = _TensorSums(checksums) if key.endswith(".safetensors") and checksums else None
    size = 0
    for block in store.stream(key):
        digest.update(block)
        size += len(block)
        if tensors is not None:
            tensors.feed(block)
        if on_progress is not None:
            on_progress(len(block))
    problems = []
    if size != expected["size"]:
        problems.append(f"{key}: has {size} bytes, was published with {expected['size']}")
    elif digest.hexdigest() != expected["sha256"]:
        problems.append(f"{key}: its SHA-256 is not the one it was published with")
    if tensors is not None:
        problems += [f"{key}: {problem}" for problem in tensors.problems()]
    return _Checked(problems=tuple(problems), tensors=frozenset(tensors.sums if tensors else ()), bytes_read=size)


class _TensorSums:
    """Adler-32 of each tensor of a shard while its bytes go by, in blocks of any size."""

    def __init__(self, checksums: Mapping[str, str]) -> None:
        self.sums: dict[str, int] = {}
        self._expected = checksums
        self._head = bytearray()
        self._header_length: int | None = None
        self._plan: list[tuple[str, int]] = []
        self._broken: str | None = None

    def feed(self, block: bytes) -> None:
        if self._broken is not None:
            return
        view = memoryview(block)
        if self._header_length is None or len(self._head) < 8 + self._header_length:
            view = self._take_header(view)
        while len(view) and self._plan:
            name, left = self._plan[-1]
            part = view[:left]
            self.sums[name] = zlib.adler32(part, self.sums[name])
            view = view[len(part) :]
            if len(part) == left:
                self._plan.pop()
            else:
                self._plan[-1] = (name, left - len(part))

    def _take_header(self, view: memoryview) -> memoryview:
        view = self._fill_head(view, 8)
        if self._header_length is None and len(self._head) == 8:
            self._header_length = int.from_bytes(self._head, "little")
            if self._header_length > _MAX_HEADER_BYTES:
                self._broken = f"claims a header of {self._header_length} bytes"
        if self._header_length is None or self._broken is not None:
            return view[:0]
        view = self._fill_head(view, 8 + self._header_length)
        if len(self._head) == 8 + self._header_length:
            self._read_header()
        return view

    def _fill_head(self, view: memoryview, length: int) -> memoryview:
        take = max(0, length - len(self._head))
        self._head += view[:take]
        return view[take:]

    def _read_header(self) -> None:
        try:
            header = json.loads(bytes(self._head[8:]))
            header.pop("__metadata__", None)
            ranges = sorted((*map(int, entry["data_offsets"]), name) for name, entry in header.items())
        except (ValueError, KeyError, TypeError, AttributeError):
            self._broken = "has no readable safetensors header"
            return
        self.sums = {name: 1 for _, _, name in ranges}
        # Empty tensors take no bytes; the rest is consumed from the end of the list.
        self._plan = [(name, end - begin) for begin, end, name in reversed(ranges) if end > begin]

    def problems(self) -> list[str]:
        if self._broken is not None:
            return [self._broken]
        if self._plan:
            return [f"ends inside tensor {self._plan[-1][0]}"]
        wrong = [name for name, value in self.sums.items() if self._expected.get(name, "") != f"{value:08x}"]
        return [f"tensor {name} does not have the checksum it was published with" for name in wrong]
