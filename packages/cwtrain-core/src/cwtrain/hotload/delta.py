"""Writers of snapshot directories: a delta between two checkpoints, and a full snapshot with checksums.

    from cwtrain.hotload.delta import write_delta

    stats = write_delta("/ckpt/base", "/ckpt/step_000100", "/ckpt/delta_000001", version=1, base_version=0)
    print(stats.changed_tensors, stats.ratio)

They work on bytes, so every dtype is like any other, NaN payloads and the sign of zero count, and torch is not needed.
Files are read in blocks, never mapped. A directory appears under its name when it is complete and on the disk.
"""

from __future__ import annotations

import os
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import attrs

from cwtrain.errors import ChecksumError, ConfigError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._write import (
    Spill,
    SpillWriter,
    require_space,
    run_parallel,
    staged_directory,
    synced_file,
    worker_count,
)
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor, checkpoint_of, open_checkpoint, raise_problems
from cwtrain.snapshots.header import build_header
from cwtrain.snapshots.identity import version_number
from cwtrain.snapshots.index import dump_index, is_delta
from cwtrain.snapshots.inspect import Inspection, scan
from cwtrain.snapshots.verify import tensor_checksum

if TYPE_CHECKING:
    from cwtrain.snapshots._codec import DeltaEncoder

__all__ = ["DeltaStats", "checkpoint_checksums", "write_delta", "write_full_snapshot"]

_SHARD_BYTES = 4 << 30
_SPILL_BYTES = 32 << 20
_EXAMPLES = 5


@attrs.frozen(kw_only=True)
class DeltaStats:
    """What ``write_delta`` wrote."""

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
class _Changed:
    """One changed tensor, encoded."""

    name: str
    checksum: str
    frame_bytes: int
    changed_bytes: int
    stored: list[bytes | tuple[int, int]]


def write_delta(
    base: str | os.PathLike[str],
    new: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    version: int | str,
    base_version: int | str,
    workers: int | None = None,
    shard_bytes: int = _SHARD_BYTES,
) -> DeltaStats:
    """Write the directory ``out`` that leads from the checkpoint ``base`` to ``new``, and return what is in it.

    ``base`` and ``new`` are directories of full checkpoints, or single ``.safetensors`` files. ``version`` and
    ``base_version`` are numbers, written with at least six digits. ``workers`` threads encode (default: one per usable
    core, at most 8). A shard takes frames until ``shard_bytes`` are reached. The same input gives the same files,
    whatever ``workers``.

    Memory: at most 48 MiB and 16 MiB for each worker, whatever the sizes of tensors and files, beside the headers. The
    disk needs twice the delta's size for a moment if that exceeds 32 MiB; as the size is not known before, one sixty-
    fourth of the checkpoint must be free to begin with, and the exact rest before the shards are written.

    Raises SnapshotLayoutError where the two differ in names, dtypes or shapes (with examples of both sides), or where
    one of them is no complete checkpoint; SnapshotChangedError if a file changes meanwhile; SnapshotError if ``out``
    exists and is not empty, or the disk has no room; ConfigError for wrong arguments. Then nothing is left behind.
    """
    started = time.monotonic()
    numbers = _versions(version, base_version)
    count = worker_count(workers)
    if isinstance(shard_bytes, bool) or not isinstance(shard_bytes, int) or shard_bytes < 1:
        raise ConfigError(f"shard_bytes={shard_bytes!r} is not a positive number of bytes")
    old, current = open_checkpoint(base), open_checkpoint(new)
    _check_same_tensors(old, current)
    raw_bytes = current.tensor_bytes
    out_path = Path(os.path.abspath(os.fspath(out)))
    with staged_directory(str(out_path)) as stage:
        require_space(stage, raw_bytes // 64, "a delta of this checkpoint, at the usual 1 to 3 % of changed elements,")
        spill = Spill(stage, budget_bytes=_SPILL_BYTES)
        try:
            changed = _encode(old, current, spill, workers=count)
            delta_bytes, shards = _write_shards(stage, changed, spill, shard_bytes=shard_bytes, versions=numbers)
        finally:
            spill.close()
    return DeltaStats(
        path=out_path,
        version=numbers[0],
        base_version=numbers[1],
        tensors=len(current.tensors),
        changed_tensors=len(changed),
        raw_bytes=raw_bytes,
        changed_tensor_bytes=sum(current.tensors[item.name].size_bytes for item in changed),
        changed_bytes=sum(item.changed_bytes for item in changed),
        delta_bytes=delta_bytes,
        shards=shards,
        workers=count,
        seconds=time.monotonic() - started,
    )


def _versions(version: int | str, base_version: int | str) -> tuple[str, str]:
    numbers = []
    for key, value in (("version", version), ("base_version", base_version)):
        number = version_number(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else None
        if number is None:
            raise ConfigError(f"{key}={value!r} is not a version number", hint="give an integer, 0 or more")
        numbers.append(number)
    if numbers[0] <= numbers[1]:
        raise ConfigError(
            f"version {numbers[0]} is not above base_version {numbers[1]}", hint="number versions upwards"
        )
    return f"{numbers[0]:06d}", f"{numbers[1]:06d}"


def _check_same_tensors(old: Checkpoint, new: Checkpoint) -> None:
    """Refuse two checkpoints that are not the same model: a tensor that comes or goes is never 'unchanged'."""
    problems, hints = [], []
    gone = [name for name in old.tensors if name not in new.tensors]
    come = [name for name in new.tensors if name not in old.tensors]
    for names, here, there in ((gone, old, new), (come, new, old)):
        if names:
            problems.append(
                f"{_list(names)} {'is' if len(names) == 1 else 'are'} in {here.path}, but not in {there.path}"
            )
    if problems:
        hints.append("a delta needs the same tensors on both sides")
    if any("lm_head" in name or "embed" in name for name in (*gone, *come)):
        hints.append(
            "with tied embeddings (tie_word_embeddings) one side may store lm_head.weight and the other not: write the "
            "one that has more with write_full_snapshot(names=...) of the other's names, and start from that"
        )
    differing = []
    for name, tensor in new.tensors.items():
        other = old.tensors.get(name)
        if other is not None and (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            differing.append(
                f"tensor {name!r} is {other.dtype} {list(other.shape)} in {old.path}, "
                f"but {tensor.dtype} {list(tensor.shape)} in {new.path}"
            )
    problems += differing[:_EXAMPLES]
    if len(differing) > _EXAMPLES:
        problems.append(f"{len(differing) - _EXAMPLES} more tensors differ in dtype or shape")
    if differing:
        hints.append(
            "the base must be byte for byte what the deployment has: export the new one in its dtypes and shapes"
        )
    raise_problems(f"{old.path} and {new.path}", problems, hint="; ".join(hints) or None)


def _list(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_EXAMPLES]))
    if len(names) == 1:
        return f"tensor {shown}"
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > _EXAMPLES else ''})"


def _encode(old: Checkpoint, new: Checkpoint, spill: Spill, *, workers: int) -> list[_Changed]:
    """Return the changed tensors, encoded, in the order in which they lie in ``new``."""
    from cwtrain.snapshots._codec import DeltaEncoder

    local = threading.local()

    def encoder() -> DeltaEncoder:
        if not hasattr(local, "encoder"):
            local.encoder = DeltaEncoder()
        made: DeltaEncoder = local.encoder
        return made

    def encode(tensor: Tensor, check: Callable[[], None]) -> _Changed | None:
        before = old.tensors[tensor.name]
        writer = SpillWriter(spill)
        with before.open() as old_file, tensor.open() as new_file:

            def read_old(offset: int, view: memoryview) -> None:
                check()
                old_file.read_into(before.offset + offset, view)

            def read_new(offset: int, view: memoryview) -> None:
                new_file.read_into(tensor.offset + offset, view)

            result = encoder().encode(tensor.size_bytes, read_old, read_new, writer.write)
            before.check(old_file)
            tensor.check(new_file)
        if not result.changed_bytes:
            return None
        writer.close()
        return _Changed(
            name=tensor.name,
            checksum=result.checksum,
            frame_bytes=result.frame_bytes,
            changed_bytes=result.changed_bytes,
            stored=writer.stored,
        )

    full = [tensor for tensor in new.tensors.values() if tensor.size_bytes]  # an empty tensor cannot change
    return [item for item in run_parallel(encode, full, workers=workers) if item is not None]


def _write_shards(
    stage: str, changed: list[_Changed], spill: Spill, *, shard_bytes: int, versions: tuple[str, str]
) -> tuple[int, int]:
    """Write shards and index; return the bytes of all files and the number of shards."""
    groups: list[list[_Changed]] = []
    size = 0
    for item in changed:
        if not groups or size + item.frame_bytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.frame_bytes
    weight_map: dict[str, str] = {}
    heads = []
    for number, group in enumerate(groups):
        shard = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        weight_map.update((item.name, shard) for item in group)
        tensors = ((item.name, "U8", (item.frame_bytes,), item.frame_bytes) for item in group)
        heads.append((shard, build_header(tensors, {item.name: item.checksum for item in group}), group))
    index = dump_index(
        {
            "metadata": {
                "version": versions[0],
                "base_version": versions[1],
                "delta_encoding": "xor",
                "compression_format": "zstd",
                "checksum_format": "adler32",
            },
            "weight_map": weight_map,
        }
    )
    total = len(index) + sum(len(head) for _, head, _ in heads) + sum(item.frame_bytes for item in changed)
    require_space(stage, total, "the delta")
    for shard, head, group in heads:
        with synced_file(os.path.join(stage, shard)) as file:
            file.write(head)
            for item in group:
                for stored in item.stored:
                    file.write(spill.load(stored))
    with synced_file(os.path.join(stage, INDEX_NAME)) as file:
        file.write(index)
    return total, len(groups)


def checkpoint_checksums(path: str | os.PathLike[str], *, workers: int | None = None) -> dict[str, str]:
    """Return the Adler-32 of each tensor of the full checkpoint at ``path``, 8 hex digits, in the order of its files.

    Everything is read, in blocks, by ``workers`` threads (default: one per usable core, at most 8).
    """
    tensors = list(open_checkpoint(path).tensors.values())

    def checksum(tensor: Tensor, check: Callable[[], None]) -> str:
        check()
        return tensor_checksum(tensor)

    values = run_parallel(checksum, tensors, workers=worker_count(workers))
    return {tensor.name: value for tensor, value in zip(tensors, values, strict=True)}


def write_full_snapshot(
    src: str | os.PathLike[str],
    dest: str | os.PathLike[str],
    checksums: Mapping[str, str] | None = None,
    *,
    names: Iterable[str] | None = None,
    workers: int | None = None,
) -> Path:
    """Write the checkpoint ``src`` to ``dest`` as a full snapshot with each tensor's Adler-32, and return its path.

    Side files (configuration, tokenizer, ...) are copied. ``names`` keeps only these tensors (to leave out a tied
    ``lm_head.weight`` that the base does not have); ``total_size`` is that of what is kept. ``checksums`` says what the
    bytes must have; each is compared while the bytes are copied. ``workers`` threads write a shard each.

    Memory: 1 MiB for each worker, beside the headers. Raises SnapshotLayoutError if ``src`` is no full snapshot,
    ChecksumError for bytes that differ from ``checksums``, SnapshotError if ``dest`` exists and is not empty or the
    disk has no room, ConfigError for wrong arguments. Then nothing is left behind.
    """
    count = worker_count(workers)
    source = os.path.abspath(os.fspath(src))
    found = scan(source, previous_identity=source, allow_empty_delta=True)
    assert found.index is not None  # scan() raised otherwise
    assert found.shards is not None
    if is_delta(found.index):
        raise_problems(source, [f"{INDEX_NAME}: this is a delta; a full snapshot is written from a full checkpoint"])
    kept = _keep(checkpoint_of(found.shards), names, checksums)
    shards = _full_shards(found, kept)
    out = os.path.abspath(os.fspath(dest))
    with staged_directory(out) as stage:
        size = sum(tensor.size_bytes for tensor in kept.values())
        side_bytes = sum(found.listing[name].size_bytes for name in found.side_files)
        require_space(stage, size + side_bytes, "the snapshot")
        foreign = found.shards.weight_map.keys()

        def write(shard: tuple[str, list[Tensor]], check: Callable[[], None]) -> None:
            _write_full_shard(os.path.join(stage, shard[0]), shard[1], foreign, checksums, check)

        run_parallel(write, shards, workers=count)
        for name in found.side_files:
            _copy_side_file(found, name, stage)
        metadata = {**found.index["metadata"], "total_size": size, "checksum_format": "adler32"}
        weight_map = {tensor.name: shard for shard, tensors in shards for tensor in tensors}
        with synced_file(os.path.join(stage, INDEX_NAME)) as file:
            file.write(dump_index({**found.index, "metadata": metadata, "weight_map": weight_map}))
    return Path(out)


def _keep(
    checkpoint: Checkpoint, names: Iterable[str] | None, checksums: Mapping[str, str] | None
) -> dict[str, Tensor]:
    kept = dict(checkpoint.tensors)
    if names is not None:
        wanted = set(names)
        if unknown := sorted(wanted - kept.keys()):
            raise ConfigError(f"names= has {_list(unknown)}, which {checkpoint.path} does not have")
        if not wanted:
            raise ConfigError("names= is empty", hint="name the tensors to keep, or leave names= out to keep all")
        kept = {name: tensor for name, tensor in kept.items() if name in wanted}
    if checksums is not None and (missing := [name for name in kept if name not in checksums]):
        raise ConfigError(f"checksums= has none for {_list(missing)}", hint="give all, or none: then they are computed")
    return kept


def _full_shards(found: Inspection, kept: Mapping[str, Tensor]) -> list[tuple[str, list[Tensor]]]:
    """Return the shards to write. They keep their names, unless some fall away: then they are counted from 1."""
    assert found.shards is not None
    groups: dict[str, list[Tensor]] = {}
    for name, shard, _ in found.shards.tensors():
        if name in kept:
            groups.setdefault(shard, []).append(kept[name])
    if len(groups) == len(found.shards.headers):
        return list(groups.items())
    numbers = enumerate(groups.values(), start=1)
    return [(f"model-{number:05d}-of-{len(groups):05d}.safetensors", tensors) for number, tensors in numbers]


def _write_full_shard(
    path: str,
    tensors: list[Tensor],
    names: Iterable[str],
    checksums: Mapping[str, str] | None,
    check: Callable[[], None],
) -> None:
    """Copy tensors into a new shard: the data first, then the header over its placeholder, of the same length."""
    header = tensors[0].file
    known = set(names)
    other = {key: text for key, text in header.metadata.items() if key not in known}
    metadata = {**other, "format": "pt", **dict.fromkeys((tensor.name for tensor in tensors), "0" * 8)}
    layout = [(tensor.name, tensor.dtype, tensor.shape, tensor.size_bytes) for tensor in tensors]
    with tensors[0].open() as source, synced_file(path) as file:
        file.write(build_header(layout, metadata))
        buffer = bytearray(1 << 20)
        for tensor in tensors:
            value = 1
            for block in source.blocks(tensor.offset, tensor.size_bytes, buffer=buffer):
                check()
                value = zlib.adler32(block, value)
                file.write(block)
            text = metadata[tensor.name] = f"{value:08x}"
            if checksums is not None and text != checksums[tensor.name]:
                raise ChecksumError(
                    f"{header.path}: tensor {tensor.name!r} has the Adler-32 {text}, "
                    f"expected is {checksums[tensor.name]}",
                    tensor=tensor.name,
                    hint="the file is damaged, or the checksums are of another version",
                )
        tensors[0].check(source)
        file.seek(0)
        file.write(build_header(layout, metadata))


def _copy_side_file(found: Inspection, name: str, stage: str) -> None:
    entry = found.listing[name]
    with RegularFile(found.place(name), label=name) as source, synced_file(os.path.join(stage, name)) as file:
        for block in source.blocks(0, entry.size_bytes):
            file.write(block)
        source.check_unchanged(size_bytes=entry.size_bytes, mtime_ns=entry.mtime_ns, inode=entry.inode)
