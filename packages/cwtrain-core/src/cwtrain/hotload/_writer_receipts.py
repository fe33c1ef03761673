"""What ranks tell each other about the snapshot that they write together, and what comes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence

import attrs

from cwtrain.errors import SnapshotError
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.storage import ObjectDigest

__all__ = ["ShardReceipt", "WrittenSnapshot", "check_receipts", "written_snapshot"]

_EXAMPLES = 5


@attrs.frozen(kw_only=True)
class ShardReceipt:
    """What one rank wrote. Small, and pickles."""

    identity: str
    upload_id: str
    kind: SnapshotKind
    rank: int
    ranks: int
    previous_identity: str | None = None
    """What this rank's base holds, for a delta."""
    objects: Mapping[str, ObjectDigest] = attrs.field(factory=dict, repr=False)
    """Size and SHA-256 of its shards."""
    weight_map: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """The tensors in its shards: for a delta those that changed."""
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Adler-32 of every tensor that was added, changed or not."""
    raw_bytes: int = 0
    changed_bytes: int = 0
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    error: str | None = None
    """Why this rank failed; None where it did not."""


@attrs.frozen(kw_only=True)
class WrittenSnapshot:
    """A snapshot that is in the bucket, manifest and index included; or an empty delta, of which nothing is."""

    identity: str
    kind: SnapshotKind
    uri: str
    previous_identity: str | None
    empty: bool
    """True for a delta in which nothing changed: nothing was uploaded, skip the version."""
    tensors: int
    changed_tensors: int
    raw_bytes: int
    changed_bytes: int
    uploaded_bytes: int
    objects: Mapping[str, ObjectDigest] = attrs.field(factory=dict, repr=False)
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Adler-32 of every tensor."""
    seconds: Mapping[str, float] = attrs.field(factory=dict)
    """``total``; ``encode`` and ``upload``: how long threads were busy with it, all ranks together; of the slowest
    rank, ``produce``: between calls of ``add``, where the caller made the next tensor, and ``add``: inside them, with
    ``blocked``: the part of it that waited for the upload; ``close``, ``finalise``."""

    @property
    def density(self) -> float:
        """Which part of all bytes differs, 0 to 1; 1 for a full snapshot."""
        return self.changed_bytes / self.raw_bytes if self.raw_bytes else 0.0

    @property
    def ratio(self) -> float:
        """How many times smaller what was uploaded is than the tensors."""
        return self.raw_bytes / self.uploaded_bytes if self.uploaded_bytes else 0.0


def check_receipts(
    receipts: Sequence[ShardReceipt],
    *,
    identity: str,
    upload_id: str,
    kind: SnapshotKind,
    ranks: int,
    previous_identity: str | None,
    expected: Collection[str] | None,
) -> None:
    """Raise SnapshotError with everything that is wrong: a rank that failed or is missing, tensors missing or twice."""
    problems = [f"rank {one.rank} failed: {one.error}" for one in receipts if one.error is not None]
    failed = bool(problems)
    for one in receipts:
        if (one.identity, one.upload_id, one.kind, one.ranks) != (identity, upload_id, kind, ranks):
            problems.append(f"the receipt of rank {one.rank} is of another snapshot ({one.identity}, {one.upload_id})")
        if one.previous_identity != previous_identity:
            problems.append(f"rank {one.rank} wrote a delta on {one.previous_identity!r}, not on {previous_identity!r}")
    seen = Counter(one.rank for one in receipts)
    if missing := sorted(set(range(ranks)) - seen.keys()):
        problems.append(f"there is no receipt of rank {', '.join(map(str, missing[:_EXAMPLES]))} of {ranks}")
    if twice := sorted(rank for rank, count in seen.items() if count > 1 or not 0 <= rank < ranks):
        problems.append(f"rank {', '.join(map(str, twice[:_EXAMPLES]))} has more than one receipt, or should have none")
    if not problems:
        owners = Counter(name for one in receipts for name in one.checksums)
        if several := [name for name, count in owners.items() if count > 1]:
            problems.append(f"{len(several)} tensors come from more than one rank ({_shown(several)})")
        if expected is not None and (absent := sorted(set(expected) - owners.keys())):
            problems.append(f"{len(absent)} tensors were not added by any rank ({_shown(absent)})")
        if expected is not None and (unknown := sorted(owners.keys() - set(expected))):
            problems.append(f"{len(unknown)} tensors should not be there ({_shown(unknown)})")
    if problems:
        hint = "mend what failed, then write the version again under another identity (free_identity gives one)"
        if not failed:
            hint = "every rank adds its own tensors, each tensor once, and all receipts go to finalise"
        raise SnapshotError(f"{identity} is not published: {'; '.join(problems)}", hint=hint)


def _shown(names: list[str]) -> str:
    return ", ".join(map(repr, names[:_EXAMPLES])) + (", ..." if len(names) > _EXAMPLES else "")


def written_snapshot(
    receipts: Sequence[ShardReceipt],
    *,
    uri: str,
    previous_identity: str | None,
    objects: Mapping[str, ObjectDigest],
    seconds: Mapping[str, float],
) -> WrittenSnapshot:
    """Return what all ranks wrote together."""
    summed = {key: sum(one.seconds.get(key, 0.0) for one in receipts) for key in ("encode", "upload")}
    slowest = {
        key: max(one.seconds.get(key, 0.0) for one in receipts) for key in ("produce", "add", "blocked", "close")
    }
    first = receipts[0]
    changed = sum(len(one.weight_map) for one in receipts)
    return WrittenSnapshot(
        identity=first.identity,
        kind=first.kind,
        uri=uri,
        previous_identity=previous_identity,
        empty=first.kind is SnapshotKind.DELTA and not changed,
        tensors=sum(len(one.checksums) for one in receipts),
        changed_tensors=changed,
        raw_bytes=sum(one.raw_bytes for one in receipts),
        changed_bytes=sum(one.changed_bytes for one in receipts),
        uploaded_bytes=sum(digest.size_bytes for digest in objects.values()),
        objects=objects,
        checksums={name: value for one in receipts for name, value in one.checksums.items()},
        seconds={**summed, **slowest, **seconds},
    )
