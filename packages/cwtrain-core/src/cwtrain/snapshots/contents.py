"""What lies in a snapshot, tensor by tensor and layer by layer: for eyes, and for finding where an update went."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import attrs

from cwtrain.errors import ChecksumError
from cwtrain.snapshots._parallel import worker_count
from cwtrain.snapshots.checkpoint import Tensor, checkpoint_of
from cwtrain.snapshots.index import is_delta
from cwtrain.snapshots.inspect import scan

__all__ = ["Contents", "Layer", "TensorContents", "read_contents"]

OnProgress = Callable[[int, int], object]

_LAYER = re.compile(r"(.*?\.\d+)(?:\.|$)")


@attrs.frozen(kw_only=True)
class _Sizes:
    """What tensors, layers and snapshots have in common."""

    raw_bytes: int | None
    """Bytes of the tensors themselves; None where only the base knows (the encoding ``overwrite``)."""
    stored_bytes: int
    """Bytes that they take in the snapshot's shards."""
    changed_bytes: int | None
    """Bytes that differ from the base; None for a full snapshot, and for the encoding ``overwrite``."""

    @property
    def density(self) -> float | None:
        """Which part of the bytes of these tensors differs from the base, 0 to 1."""
        return self.changed_bytes / self.raw_bytes if self.raw_bytes and self.changed_bytes is not None else None

    @property
    def ratio(self) -> float | None:
        """How many times smaller these tensors are as stored."""
        return self.raw_bytes / self.stored_bytes if self.raw_bytes is not None and self.stored_bytes else None

    def sizes(self) -> dict[str, Any]:
        """Return all this as JSON data."""
        return {
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "changed_bytes": self.changed_bytes,
            "density": _rounded(self.density),
            "ratio": _rounded(self.ratio),
        }


@attrs.frozen(kw_only=True)
class TensorContents(_Sizes):
    """One tensor of a snapshot."""

    name: str
    dtype: str | None
    """None in a delta, which knows bytes only."""
    shape: tuple[int, ...] | None
    checksum: str | None
    """As the snapshot records it."""

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        shape = None if self.shape is None else list(self.shape)
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": shape,
            **self.sizes(),
            "checksum": self.checksum,
        }


@attrs.frozen(kw_only=True)
class Layer(_Sizes):
    """The tensors whose names begin alike, up to the first number: ``model.layers.7``."""

    name: str
    tensors: int

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON data."""
        return {"layer": self.name, "tensors": self.tensors, **self.sizes()}


@attrs.frozen(kw_only=True)
class Contents(_Sizes):
    """What ``read_contents`` found. In a delta all sizes and ``density`` are of the tensors that it holds."""

    path: str
    delta: bool
    index_metadata: Mapping[str, Any] = attrs.field(repr=False)
    tensors: tuple[TensorContents, ...] = attrs.field(repr=False)

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The tensors by layer, in the order in which they come."""
        groups: dict[str, list[TensorContents]] = {}
        for tensor in self.tensors:
            match = _LAYER.match(tensor.name)
            groups.setdefault(match[1] if match else tensor.name, []).append(tensor)
        return tuple(Layer(name=name, tensors=len(group), **_sum(group)) for name, group in groups.items())

    def to_json(self) -> dict[str, Any]:
        """Return it as the JSON data that ``cwtrain snapshot show`` prints."""
        return {
            "path": self.path,
            "type": "INCREMENTAL" if self.delta else "FULL",
            "index_metadata": dict(self.index_metadata),
            "tensor_count": len(self.tensors),
            **self.sizes(),
            "layers": [layer.to_json() for layer in self.layers],
            "tensors": [tensor.to_json() for tensor in self.tensors],
        }


def read_contents(
    path: str | os.PathLike[str], *, workers: int | None = None, on_progress: OnProgress | None = None
) -> Contents:
    """Return what the snapshot directory at ``path`` holds. A delta's frames are decoded, to count what changes.

    Raises what inspection raises, and ChecksumError that names a damaged frame.
    """
    place = os.path.abspath(os.fspath(path))
    # Whatever the delta stands on is fine here.
    found = scan(place, previous_identity=place, allow_empty_delta=True, foreign_formats=True, any_names=True)
    assert found.index is not None  # scan() raised otherwise
    assert found.shards is not None
    tensors = checkpoint_of(found.shards).tensors
    delta = is_delta(found.index)
    metadata = found.index["metadata"]
    if not delta:
        rows = [_full(tensor, found.checksums.get(name)) for name, tensor in tensors.items()]
    elif metadata["delta_encoding"] == "xor":
        counts = _count(place, list(tensors.values()), workers=worker_count(workers), on_progress=on_progress)
        rows = [_changed(tensor, found.checksums.get(name), *counts[name]) for name, tensor in tensors.items()]
    else:
        rows = [_changed(tensor, found.checksums.get(name), None, None) for name, tensor in tensors.items()]
    return Contents(path=place, delta=delta, index_metadata=metadata, tensors=tuple(rows), **_sum(rows))


def _full(tensor: Tensor, checksum: str | None) -> TensorContents:
    return TensorContents(
        name=tensor.name,
        dtype=tensor.dtype,
        shape=tensor.shape,
        raw_bytes=tensor.size_bytes,
        stored_bytes=tensor.size_bytes,
        changed_bytes=None,
        checksum=checksum,
    )


def _changed(tensor: Tensor, checksum: str | None, raw: int | None, changed: int | None) -> TensorContents:
    return TensorContents(
        name=tensor.name,
        dtype=None,
        shape=None,
        raw_bytes=raw,
        stored_bytes=tensor.size_bytes,
        changed_bytes=changed,
        checksum=checksum,
    )


def _count(
    place: str, blobs: list[Tensor], *, workers: int, on_progress: OnProgress | None
) -> dict[str, tuple[int, int]]:
    """Return how many bytes each frame decodes to, and how many of them change something."""
    from cwtrain.snapshots._xor import count_nonzero
    from cwtrain.snapshots.verify import check_frames

    counts = {blob.name: (0, 0) for blob in blobs}

    def visit(blob: Tensor, piece: memoryview) -> None:
        raw, changed = counts[blob.name]
        counts[blob.name] = raw + len(piece), changed + count_nonzero(piece)

    wrong = check_frames(blobs, workers=workers, on_progress=on_progress, visit=visit)
    if wrong:
        lines = "".join(f"\n  - tensor {name!r}: {text}" for name, text in list(wrong.items())[:20])
        raise ChecksumError(
            f"{place}: {len(wrong)} damaged:{lines}",
            tensor=next(iter(wrong)),
            hint="the delta is damaged; write it again",
        )
    return counts


def _sum(rows: Iterable[_Sizes]) -> dict[str, Any]:
    rows = list(rows)
    raw = [row.raw_bytes for row in rows]
    changed = [row.changed_bytes for row in rows]
    return {
        "raw_bytes": None if None in raw else sum(filter(None, raw)),
        "stored_bytes": sum(row.stored_bytes for row in rows),
        "changed_bytes": None if not rows or None in changed else sum(filter(None, changed)),
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
