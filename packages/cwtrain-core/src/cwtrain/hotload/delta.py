"""Writers of snapshot directories: deltas, full snapshots with checksums, and what leads from one to the other.

    from cwtrain.hotload.delta import write_delta

    stats = write_delta("/ckpt/base", "/ckpt/step_000100", "/ckpt/delta_000001", version=1, base_version=0)
    print(stats.changed_tensors, stats.ratio)

They work on bytes, so every dtype is like any other, NaN payloads and the sign of zero count, and torch is not needed.
Files are read in blocks, never mapped. A directory appears under its name when it is complete and on the disk.

Memory, whatever the sizes of tensors and files: at most 64 MiB and 16 MiB for each worker, beside the headers. Where
``workers`` is not given there is one for each core that the process may use, as far as they fit in ``memory_bytes``
(by default 320 MiB) and each has 128 MiB to do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from cwtrain.errors import ConfigError
from cwtrain.hotload._delta_checks import check_same_tensors, compare, keep, scan_full, versions
from cwtrain.snapshots._parallel import worker_count
from cwtrain.snapshots._write import Spill, require_space, staged_directory
from cwtrain.snapshots.changes import open_delta
from cwtrain.snapshots.checkpoint import Checkpoint, checkpoint_of, open_checkpoint
from cwtrain.snapshots.verify import raise_wrong

if TYPE_CHECKING:
    from cwtrain.snapshots._codec import EncodedTensor
    from cwtrain.snapshots._delta_files import DeltaFiles
    from cwtrain.snapshots._sweep import Swept
    from cwtrain.snapshots._targets import Target

__all__ = [
    "AppliedDelta",
    "DeltaStats",
    "apply_delta",
    "checkpoint_checksums",
    "convert_delta",
    "write_delta",
    "write_full_snapshot",
]

OnProgress = Callable[[int, int], object]
"""Called with the bytes of tensors that are done, and of all: by several threads, one at a time."""

_SHARD_BYTES = 4 << 30
_SPILL_BYTES = 16 << 20


@attrs.frozen(kw_only=True)
class DeltaStats:
    """What ``write_delta`` or ``convert_delta`` wrote."""

    path: Path
    version: str
    base_version: str
    tensors: int
    """Tensors of the checkpoint."""
    changed_tensors: int
    raw_bytes: int
    """Bytes of all tensors of the checkpoint."""
    changed_tensor_bytes: int
    """Bytes of the tensors that changed, whole."""
    changed_bytes: int
    """Bytes that differ."""
    delta_bytes: int
    """Bytes of the written files, the index included."""
    shards: int
    workers: int
    seconds: float
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """Adler-32 of the new bytes of each tensor that changed."""
    encoder: str = ""
    """How the frames were made: ``sequences``, or ``public`` where the faster way is not available."""

    @property
    def ratio(self) -> float:
        """How many times smaller the delta is than the checkpoint's tensors."""
        return self.raw_bytes / self.delta_bytes if self.delta_bytes else 0.0

    @property
    def density(self) -> float:
        """Which part of all bytes differs, 0 to 1."""
        return self.changed_bytes / self.raw_bytes if self.raw_bytes else 0.0

    @property
    def empty(self) -> bool:
        """True when nothing changed: the delta has no shard and cannot be uploaded; skip the version."""
        return not self.changed_tensors


@attrs.frozen(kw_only=True)
class AppliedDelta:
    """What ``apply_delta`` wrote."""

    path: Path
    version: str
    """The delta's version: that of the new snapshot."""
    base_version: str
    tensors: int
    changed_tensors: int
    """Tensors that the delta holds."""
    raw_bytes: int
    workers: int
    seconds: float


def write_delta(
    base: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    version: int | str,
    base_version: int | str,
    workers: int | None = None,
    shard_bytes: int = _SHARD_BYTES,
    memory_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> DeltaStats:
    """Write the directory ``out`` that leads from the checkpoint ``base`` to ``new``, and return what is in it.

    ``base`` and ``new`` are directories of full checkpoints, or single ``.safetensors`` files. ``version`` and
    ``base_version`` are numbers, written with at least six digits. ``workers`` threads encode, all of them also one
    huge tensor. A shard takes frames until it has ``shard_bytes``. The same input gives the same files, whatever
    ``workers``.

    As the delta's size is not known before, one sixty-fourth of the checkpoint must be free on the disk to begin with.

    Raises SnapshotLayoutError where the two differ in names, dtypes or shapes (with examples of both sides), or where
    one of them is no complete checkpoint; SnapshotChangedError if a file changes meanwhile; SnapshotError if ``out``
    exists and is not empty, or the disk has no room; ConfigError for wrong arguments. Then nothing is left behind.
    """
    return write_delta_between(
        lambda: (open_checkpoint(base), open_checkpoint(new)),
        out,
        version=version,
        base_version=base_version,
        workers=workers,
        memory_bytes=memory_bytes,
        shard_bytes=shard_bytes,
        on_progress=on_progress,
    )


def write_delta_between(
    checkpoints: Callable[[], tuple[Checkpoint, Checkpoint]],
    out: str | os.PathLike[str],
    *,
    version: int | str,
    base_version: int | str,
    workers: int | None = None,
    memory_bytes: int | None = None,
    shard_bytes: int = _SHARD_BYTES,
    on_progress: OnProgress | None = None,
    target: Target | None = None,
) -> DeltaStats:
    """Write the delta between two open checkpoints; see ``write_delta``. The new bytes go to ``target`` too."""
    from cwtrain.snapshots._codec import delta_codec
    from cwtrain.snapshots._encode import encode_delta

    started = time.monotonic()
    numbers = versions(version, base_version)
    worker_count(workers, memory_bytes)  # wrong arguments come first
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes!r} is not a positive number of bytes")
    codec = delta_codec()
    old, current = checkpoints()
    check_same_tensors(old, current)
    count = worker_count(workers, memory_bytes, work_bytes=current.tensor_bytes)

    def encode(files: DeltaFiles, spill: Spill) -> dict[str, EncodedTensor]:
        return encode_delta(
            old, current, files, workers=count, spill=spill, codec=codec, target=target, on_progress=on_progress
        )

    return _write_delta(
        out,
        current,
        encode,
        names=[tensor.name for tensor in current.tensors.values() if tensor.size_bytes],
        numbers=numbers,
        shard_bytes=shard_bytes,
        workers=count,
        encoder=codec.name,
        started=started,
    )


def _write_delta(
    out: str | os.PathLike[str],
    checkpoint: Checkpoint,
    encode: Callable[[DeltaFiles, Spill], dict[str, EncodedTensor]],
    *,
    names: list[str],
    numbers: tuple[str, str],
    shard_bytes: int,
    workers: int,
    encoder: str,
    started: float,
) -> DeltaStats:
    """Write the frames that ``encode`` makes as a delta of ``checkpoint``, which has the sizes of the tensors."""
    from cwtrain.snapshots._delta_files import DeltaFiles

    raw_bytes = checkpoint.tensor_bytes
    out_path = Path(os.path.abspath(os.fspath(out)))
    with staged_directory(str(out_path)) as stage:
        require_space(stage, raw_bytes // 64, "a delta of this checkpoint, at the usual 1 to 3 % of changed elements,")
        spill = Spill(stage, budget_bytes=_SPILL_BYTES)
        files = DeltaFiles(stage, names, raw_bytes=raw_bytes, shard_bytes=shard_bytes)
        try:
            encoded = encode(files, spill)
            shards = files.close(numbers)
        finally:
            files.abandon()
            spill.close()
    changed = {name: item for name, item in encoded.items() if item.changed_bytes}
    return DeltaStats(
        path=out_path,
        version=numbers[0],
        base_version=numbers[1],
        tensors=len(checkpoint.tensors),
        changed_tensors=len(changed),
        raw_bytes=raw_bytes,
        changed_tensor_bytes=sum(checkpoint.tensors[name].size_bytes for name in changed),
        changed_bytes=sum(item.changed_bytes for item in changed.values()),
        delta_bytes=files.total_bytes,
        shards=shards,
        workers=workers,
        seconds=time.monotonic() - started,
        checksums={name: item.checksum for name, item in changed.items()},
        encoder=encoder,
    )


def convert_delta(
    base: str | os.PathLike[str],
    delta: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    memory_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> DeltaStats:
    """Write the delta ``delta``, made on ``base``, to ``out`` in the formats that the service takes.

    For deltas in the encoding ``overwrite``, or with the checksums ``xxh3-128`` or ``blake3``: each tensor is decoded,
    compared with the checksum of its writer, and encoded again as xor, zstd, adler32. The version numbers stay.

    Raises what inspection raises; ChecksumError that names all tensors that do not come out as their writer recorded;
    ConfigError where a checksum's library is not installed; and like ``write_delta``. Then nothing is left behind.
    """
    from cwtrain.snapshots._codec import delta_codec
    from cwtrain.snapshots._convert import convert

    started = time.monotonic()
    worker_count(workers, memory_bytes)  # wrong arguments come first
    root = open_checkpoint(base)
    found = open_delta(delta, base=root)
    numbers = versions(found.version, found.base_version)
    codec = delta_codec()
    tensors = [tensor for name, tensor in root.tensors.items() if name in found.changes]
    count = worker_count(workers, memory_bytes, work_bytes=sum(tensor.size_bytes for tensor in tensors))

    def encode(files: DeltaFiles, spill: Spill) -> dict[str, EncodedTensor]:
        encoded, wrong = convert(
            tensors, found.changes, files, workers=count, spill=spill, codec=codec, on_progress=on_progress
        )
        raise_wrong(found.path, wrong, base=root.path)
        return encoded

    return _write_delta(
        out,
        root,
        encode,
        names=[tensor.name for tensor in tensors],
        numbers=numbers,
        shard_bytes=_SHARD_BYTES,
        workers=count,
        encoder=codec.name,
        started=started,
    )


def checkpoint_checksums(
    path: str | os.PathLike[str], *, workers: int | None = None, on_progress: OnProgress | None = None
) -> dict[str, str]:
    """Return the Adler-32 of each tensor of the full checkpoint at ``path``, 8 hex digits, in the order of its files.

    Everything is read, in blocks, by ``workers`` threads (default: one for each usable core).
    """
    from cwtrain.snapshots._sweep import sweep

    checkpoint = open_checkpoint(path)
    count = worker_count(workers, work_bytes=checkpoint.tensor_bytes)
    return sweep(list(checkpoint.tensors.values()), workers=count, on_progress=on_progress).checksums


def write_full_snapshot(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    checksums: Mapping[str, str] | None = None,
    *,
    names: Iterable[str] | None = None,
    workers: int | None = None,
    memory_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> Path:
    """Write the checkpoint ``src`` to ``dest`` as a full snapshot with each tensor's Adler-32, and return its path.

    Side files (configuration, tokenizer, ...) are copied. ``names`` keeps only these tensors (to leave out a tied
    ``lm_head.weight`` that the base does not have); ``total_size`` is that of what is kept. ``checksums`` says what the
    bytes must have. Everything is read once and written once, by ``workers`` threads.

    Raises SnapshotLayoutError if ``src`` is no full snapshot, ChecksumError that names all tensors whose bytes differ
    from ``checksums``, SnapshotError if ``dest`` exists and is not empty or the disk has no room, ConfigError for wrong
    arguments. Then nothing is left behind.
    """
    from cwtrain.snapshots._full import write_full

    worker_count(workers, memory_bytes)  # wrong arguments come first
    found = scan_full(src)
    assert found.shards is not None
    kept = keep(checkpoint_of(found.shards), names, checksums)
    count = worker_count(workers, memory_bytes, work_bytes=sum(tensor.size_bytes for tensor in kept.values()))

    def accept(swept: Swept) -> None:
        if checksums is not None:
            compare(found.path, swept.checksums, checksums)

    out = os.path.abspath(os.fspath(dest))
    with staged_directory(out) as stage:
        write_full(found, kept, stage, accept=accept, workers=count, on_progress=on_progress)
    return Path(out)


def apply_delta(
    base: str | os.PathLike[str],
    delta: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    workers: int | None = None,
    memory_bytes: int | None = None,
    on_progress: OnProgress | None = None,
) -> AppliedDelta:
    """Write the full snapshot ``out``: the full snapshot ``base`` with the delta ``delta`` applied; return what it is.

    ``out`` has the shards and side files of ``base``, and each tensor's Adler-32. Each changed tensor is compared with
    the checksum of the delta, each other one with that of ``base`` where one is recorded. Deltas in formats that the
    service does not take are applied too (see ``convert_delta``).

    Raises what inspection raises; ChecksumError that names all wrong tensors; ConfigError where a checksum's library is
    not installed; SnapshotError if ``out`` exists and is not empty or the disk has no room. Then nothing is left
    behind.
    """
    from cwtrain.snapshots._full import write_full

    started = time.monotonic()
    worker_count(workers, memory_bytes)  # wrong arguments come first
    found = scan_full(base)
    assert found.shards is not None
    root = checkpoint_of(found.shards)
    count = worker_count(workers, memory_bytes, work_bytes=root.tensor_bytes)
    change = open_delta(delta, base=root)

    def accept(swept: Swept) -> None:
        raise_wrong(change.path, swept.wrong, base=root.path)
        recorded = {name: value for name, value in found.checksums.items() if name not in change.changes}
        compare(root.path, swept.checksums, recorded)

    path = os.path.abspath(os.fspath(out))
    with staged_directory(path) as stage:
        write_full(
            found, root.tensors, stage, changes=change.changes, accept=accept, workers=count, on_progress=on_progress
        )
    return AppliedDelta(
        path=Path(path),
        version=change.version,
        base_version=change.base_version,
        tensors=len(root.tensors),
        changed_tensors=len(change.changes),
        raw_bytes=root.tensor_bytes,
        workers=count,
        seconds=time.monotonic() - started,
    )
