"""A delta directory as a set of changes, each of which can be applied to its tensor; in any format that we can read."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor, checkpoint_of, raise_problems
from cwtrain.snapshots.index import is_delta

__all__ = ["Change", "DeltaDirectory", "check_known", "open_delta"]


@attrs.frozen(kw_only=True)
class Change:
    """What a delta holds for one tensor: the frame, how to read it, and the checksum that the new bytes must have."""

    blob: Tensor
    encoding: str
    """``xor`` or ``overwrite``."""
    algorithm: str
    """``adler32``, ``xxh3-128`` or ``blake3``."""
    checksum: str


@attrs.frozen(kw_only=True)
class DeltaDirectory:
    """A delta on disk that passed inspection, the formats aside."""

    path: str
    version: str
    base_version: str
    changes: Mapping[str, Change] = attrs.field(repr=False)


def open_delta(path: str | os.PathLike[str], *, base: Checkpoint) -> DeltaDirectory:
    """Return what the delta directory at ``path`` changes on ``base``. Only headers are read.

    Encodings and checksums that the service does not take are fine, as long as we can read them. Raises
    SnapshotLayoutError with everything that is wrong, tensors that ``base`` does not have included.
    """
    from cwtrain.snapshots.inspect import scan

    # Named or not, the predecessor is `base`: so the delta may carry identities instead of numbers.
    found = scan(
        os.path.abspath(os.fspath(path)), allow_empty_delta=True, previous_identity=base.path, foreign_formats=True
    )
    assert found.index is not None  # scan() raised otherwise
    assert found.shards is not None
    if not is_delta(found.index):
        raise_problems(found.path, [f"{INDEX_NAME}: this is a full snapshot, give the directory of a delta"])
    blobs = checkpoint_of(found.shards).tensors
    check_known(found.path, blobs, base)
    metadata = found.index["metadata"]
    return DeltaDirectory(
        path=found.path,
        version=str(found.versions.version),
        base_version=str(found.versions.base_version),
        changes={
            name: Change(
                blob=blob,
                encoding=metadata["delta_encoding"],
                algorithm=metadata["checksum_format"],
                checksum=found.checksums[name],
            )
            for name, blob in blobs.items()
        },
    )


def check_known(place: str, blobs: Mapping[str, Tensor], base: Checkpoint) -> None:
    """Raise SnapshotLayoutError if the delta at ``place`` changes tensors that ``base`` does not have."""
    unknown = [name for name in blobs if name not in base.tensors]
    problems = [f"tensor {name!r} is not in the base {base.path}" for name in unknown]
    raise_problems(
        place,
        problems,
        hint="the delta was made from another base; with tied embeddings one side may store lm_head and the other not",
    )
