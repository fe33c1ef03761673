"""Trainers whose nodes share no disk: each shard lies on the node of the rank that wrote it, the index on rank 0's.

Each rank sends the shards that only it has under the identity that rank 0's publisher chose. For the publisher, a
directory is laid out beside its journal: links to what rank 0 has, and for every other shard a file with the real
header, the real size and no data, which carries the record of the real SHA-256. So inspection sees every tensor, and
the upload finds the objects in the bucket equal. Such a file could never be read for its weights, so there is no mirror
here and no full snapshot.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, IntegrationError, SnapshotLayoutError
from cwtrain.hotload._publish.look import shown
from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.models.sync import WeightSyncRequest, WeightSyncResult
from cwtrain.plugins import hookimpl
from cwtrain.snapshots._digests import record_digest, recorded_digest
from cwtrain.snapshots._sidefiles import is_side_file
from cwtrain_slime._talk import Talk

if TYPE_CHECKING:
    from cwtrain.hotload.publisher import Publisher

__all__ = [
    "Part",
    "PartsSender",
    "Send",
    "Spread",
    "headers",
    "late_for_rank_0",
    "local_shards",
    "refuse_mirror",
    "send",
    "spread_of",
]


@attrs.frozen(kw_only=True)
class Spread:
    """Which rank sends which shard; ``elsewhere`` are those that rank 0 does not have."""

    owners: Mapping[str, int]

    @property
    def elsewhere(self) -> tuple[str, ...]:
        """Names of the shards that rank 0 does not have."""
        return tuple(name for name, rank in self.owners.items() if rank != 0)


@attrs.frozen(kw_only=True)
class Send:
    """Rank 0's question: send your shards under this identity, and say what you sent."""

    bucket: str
    path_prefix: str
    identity: str
    run_id: str
    workers: int
    spread: Spread


@attrs.frozen(kw_only=True)
class Part:
    """A shard of another rank, as far as rank 0 has to know it before it is sent."""

    name: str
    size_bytes: int
    header: bytes = attrs.field(repr=False)
    """The file's first bytes: the length of its header, and the header."""


def local_shards(version_dir: str | os.PathLike[str]) -> dict[str, Any]:
    """Return what this rank sees of a version: sizes of the files by name, and the index's names where it lies here."""
    root = Path(version_dir)
    sizes: dict[str, int] = {}
    for path in root.iterdir() if root.is_dir() else ():
        if path.suffix == ".safetensors" or path.name == INDEX_NAME or is_side_file(path.name):
            with suppress(OSError):  # a link to what is not there (yet), or one that is just being renamed
                sizes[path.name] = path.stat().st_size
    named: list[str] | None = None
    try:
        weight_map = json.loads((root / INDEX_NAME).read_bytes()).get("weight_map")
        named = sorted(set(weight_map.values()))
    except (OSError, ValueError, AttributeError, TypeError):
        pass  # not here, or no index: inspection says what is wrong with it
    return {"shards": sizes, "named": named}


def _whole(seen: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return the true sizes: the rank that wrote a file sees all of it, others may see less of it for a while."""
    sizes: dict[str, int] = {}
    for one in seen:
        for name, size in one["shards"].items():
            sizes[name] = max(size, sizes.get(name, 0))
    return sizes


def late_for_rank_0(seen: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the files of a version that some rank sees and rank 0 does not see, or sees shorter.

    ``seen`` is ``local_shards`` of every rank. Shards that the index does not name do not count.
    """
    mine, named = seen[0]["shards"], seen[0]["named"]
    return sorted(
        name
        for name, size in _whole(seen).items()
        if mine.get(name, -1) < size and (named is None or name in named or not name.endswith(".safetensors"))
    )


def spread_of(seen: Sequence[Mapping[str, Any]]) -> Spread | None:
    """Return who sends what where shards lie on several nodes, None where rank 0 has all that its index names.

    ``seen`` is ``local_shards`` of every rank. A shard that nobody has is rank 0's, whose inspection names it.
    """
    named = seen[0]["named"]
    if not named:
        return None
    whole = _whole(seen)
    owners = {
        name: next((rank for rank, one in enumerate(seen) if one["shards"].get(name, -1) == whole.get(name)), 0)
        for name in named
    }
    return Spread(owners=owners) if any(owners.values()) else None


def refuse_mirror(
    settings: HotLoadConfig, *, full_mode: bool, late: Sequence[str], version_dir: str, waited: float = 0.0
) -> None:
    """Raise ConfigError where rank 0 lacks files (``late``) and the settings want what only one disk can give.

    ``waited`` is for how many seconds they were looked for.
    """
    where = (
        f"{version_dir}: {shown(late)} not to be seen by rank 0, or not whole, also when looked at again for "
        f"{waited:g} s: either the nodes share no disk, or the shared disk shows the files of other nodes later than "
        "that"
    )
    longer = "for a shared disk that is slower set CWTRAIN_HOTLOAD_FILES_WAIT above the seconds of its attribute cache"
    if full_mode:
        raise ConfigError(
            f"{where}; and full checkpoints have to be read on one node",
            hint=f"{longer}; else use --update-weight-mode delta, or put --update-weight-disk-dir on a shared file "
            "system",
        )
    if settings.keeps_mirror or settings.full_every > 0:
        raise ConfigError(
            f"{where}; and a mirror or a full snapshot needs every delta on one node",
            hint=f"{longer}; else set CWTRAIN_HOTLOAD_MIRROR=0 and CWTRAIN_HOTLOAD_FULL_EVERY=0, or put "
            "--update-weight-disk-dir on a shared file system",
        )


def _owned(spread: Spread, rank: int, version_dir: str | os.PathLike[str]) -> list[Path]:
    return [Path(version_dir) / name for name, owner in spread.owners.items() if owner == rank != 0]


def headers(version_dir: str | os.PathLike[str], rank: int, spread: Spread) -> list[Part]:
    """Return what rank 0 has to know of the shards that this rank will send."""
    return [
        Part(name=path.name, size_bytes=path.stat().st_size, header=_header(path))
        for path in _owned(spread, rank, version_dir)
    ]


def send(version_dir: str | os.PathLike[str], rank: int, question: Send, *, s3: Any = None) -> dict[str, str]:
    """Send the shards that this rank owns, and return the SHA-256 of each. ``s3`` is a boto3 client or a store."""
    from cwtrain.hotload.upload import store_for
    from cwtrain.storage import Location, upload_objects

    files = [_file(path) for path in _owned(question.spread, rank, version_dir)]
    if not files:
        return {}
    report = upload_objects(
        files,
        store=store_for(question.bucket, s3, workers=question.workers),
        location=Location(bucket=question.bucket, path_prefix=question.path_prefix),
        identity=question.identity,
        workers=question.workers,
        run_id=question.run_id,
        others=(INDEX_NAME, *question.spread.owners),
    )
    return {name: digest.sha256 for name, digest in report.digests.items()}


def _file(path: Path) -> SnapshotFile:
    about = path.stat()
    return SnapshotFile(
        name=path.name,
        size_bytes=about.st_size,
        path=str(path),
        ranges=((0, about.st_size),),
        file_bytes=about.st_size,
        mtime_ns=about.st_mtime_ns,
        inode=about.st_ino,
        device=about.st_dev,
    )


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= path.stat().st_size - 8:
            raise SnapshotLayoutError(
                f"{path}: is no safetensors file",
                problems=[f"{path.name}: no header"],
                hint="let the trainer write it anew",
            )
        return start + file.read(length)


class PartsSender:
    """The plugin that has the other ranks send their shards before core sends the rest. Rank 0's."""

    def __init__(self) -> None:
        self._now: tuple[Path, Talk, Spread, Publisher] | None = None

    @contextmanager
    def sending(
        self, version_dir: Path, parts: Sequence[Part], talk: Talk, spread: Spread, publisher: Publisher
    ) -> Iterator[Path]:
        """Give the directory to publish instead of ``version_dir``; it is removed afterwards."""
        directory = publisher.state_dir / "parts" / version_dir.name
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        self._now = (directory.resolve(), talk, spread, publisher)
        elsewhere = {part.name for part in parts}
        try:
            for path in version_dir.iterdir():
                # A shared disk may show another rank's shard late: writing through a link would empty that shard.
                if path.name not in elsewhere:
                    (directory / path.name).symlink_to(path.absolute())
            for part in parts:
                with (directory / part.name).open("wb") as file:
                    file.write(part.header)
                    file.truncate(part.size_bytes)
            yield directory
        finally:
            self._now = None
            shutil.rmtree(directory, ignore_errors=True)

    @hookimpl(wrapper=True)
    def cwtrain_sync_weights(
        self, request: WeightSyncRequest
    ) -> Generator[None, WeightSyncResult | None, WeightSyncResult | None]:
        """Ask for the shards of the version that is published now, then let it be published."""
        if self._now is not None and Path(request.path).resolve() == self._now[0]:
            _collect(request, *self._now)
        return (yield)


def _collect(request: WeightSyncRequest, directory: Path, talk: Talk, spread: Spread, publisher: Publisher) -> None:
    location = publisher.loader.location
    answers = talk.ask(
        Send(
            bucket=location.bucket,
            path_prefix=location.path_prefix,
            identity=request.identity,
            run_id=publisher.run_id,
            workers=publisher.settings.upload_workers,
            spread=spread,
        )
    )
    for sent in answers:
        for name, sha256 in (sent or {}).items():
            _record(directory / name, sha256)


def _record(path: Path, sha256: str) -> None:
    """Record what a part's bytes are, where it was sent. Raises IntegrationError where the disk takes no record."""
    record_digest(path, sha256)
    about = path.stat()
    known = recorded_digest(str(path), inode=about.st_ino, size_bytes=about.st_size, mtime_ns=about.st_mtime_ns)
    if known != sha256:
        raise IntegrationError(
            f"the file system of {path.parent} keeps no extended attributes, which shards on several nodes need",
            hint="put CWTRAIN_HOTLOAD_STATE_DIR on a local ext4 or xfs disk",
        )
