"""``cwtrain snapshot``: make, apply, convert, verify and look at snapshots on disk; no network, no credentials."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._group import LazyGroup

if TYPE_CHECKING:
    from cwtrain.hotload.delta import DeltaStats
    from cwtrain.snapshots.contents import Contents, Layer

__all__ = ["snapshot"]

_F = TypeVar("_F", bound=Callable[..., Any])

_CHECKPOINT: Final = click.Path(exists=True)
_DIRECTORY: Final = click.Path(exists=True, file_okay=False)
_NEW: Final = click.Path()
_BAR: Final = 16
_COLUMNS: Final = ("layer", "tensors?", "raw_bytes", "stored_bytes", "ratio?", "density", "bar")

_workers = click.option(
    "--workers", type=click.IntRange(min=1), help="Threads that do the work.  [default: one for each usable core]"
)


@click.group(cls=LazyGroup, no_args_is_help=False)
def snapshot() -> None:
    """Make, apply, convert, verify and show snapshots on disk.

    Needs no network and no credentials. A directory appears under its name when it is complete, and an error leaves
    nothing behind.
    """


@snapshot.command(cls=Command, example="cwtrain snapshot diff /ckpt/step_000100 /ckpt/step_000101 /ckpt/delta_000101")
@click.argument("base", type=_CHECKPOINT)
@click.argument("new", type=_CHECKPOINT)
@click.argument("out", type=_NEW)
@click.option(
    "--version",
    "version",
    type=click.IntRange(min=0),
    help="The delta's version.  [default: the number that NEW's name ends in, else one above --base-version]",
)
@click.option(
    "--base-version",
    type=click.IntRange(min=0),
    help="The version that it applies to.  [default: the number that BASE's name ends in, else 0]",
)
@_workers
@pass_context
def diff(
    ctx: Context, base: str, new: str, out: str, version: int | None, base_version: int | None, workers: int | None
) -> None:
    """Write the delta OUT that leads from the full checkpoint BASE to NEW, and print what is in it."""
    from cwtrain.hotload.delta import write_delta

    before = base_version if base_version is not None else _number(base, default=0)
    after = version if version is not None else max(_number(new, default=0), before + 1)
    with ctx.out.bytes_done("comparing") as tell:
        stats = write_delta(base, new, out, version=after, base_version=before, workers=workers, on_progress=tell)
    _print_delta(ctx, stats)


@snapshot.command(cls=Command, example="cwtrain snapshot apply /ckpt/step_000100 /ckpt/delta_000101 /ckpt/rebuilt")
@click.argument("base", type=_DIRECTORY)
@click.argument("delta", type=_DIRECTORY)
@click.argument("out", type=_NEW)
@_workers
@pass_context
def apply(ctx: Context, base: str, delta: str, out: str, workers: int | None) -> None:
    """Write the full snapshot OUT: the full snapshot BASE with the delta DELTA applied, every checksum compared."""
    from cwtrain.hotload.delta import apply_delta

    with ctx.out.bytes_done("applying") as tell:
        done = apply_delta(base, delta, out, workers=workers, on_progress=tell)
    result = {
        "path": str(done.path),
        "version": done.version,
        "base_version": done.base_version,
        "tensors": done.tensors,
        "changed_tensors": done.changed_tensors,
        "raw_bytes": done.raw_bytes,
        "workers": done.workers,
        "seconds": round(done.seconds, 3),
    }
    ctx.out.data(result, ids=[str(done.path)])


@snapshot.command(cls=Command, example="cwtrain snapshot full /ckpt/step_000100 /ckpt/full_000100")
@click.argument("src", type=_DIRECTORY)
@click.argument("out", type=_NEW)
@_workers
@pass_context
def full(ctx: Context, src: str, out: str, workers: int | None) -> None:
    """Write the full checkpoint SRC to OUT with the checksum of each tensor, so that the service can verify it."""
    from cwtrain.hotload.delta import write_full_snapshot
    from cwtrain.snapshots import inspect_snapshot, local_snapshot_to_json

    with ctx.out.bytes_done("writing") as tell:
        path = write_full_snapshot(src, out, workers=workers, on_progress=tell)
    ctx.out.data(local_snapshot_to_json(inspect_snapshot(path)), ids=[str(path)])


@snapshot.command(cls=Command, example="cwtrain snapshot convert /ckpt/step_000100 /ckpt/foreign /ckpt/delta_000101")
@click.argument("base", type=_CHECKPOINT)
@click.argument("delta", type=_DIRECTORY)
@click.argument("out", type=_NEW)
@_workers
@pass_context
def convert(ctx: Context, base: str, delta: str, out: str, workers: int | None) -> None:
    """Write the delta DELTA, made on BASE, to OUT in the formats that the service takes.

    For deltas in the encoding overwrite, or with the checksums xxh3-128 or blake3. Each tensor is decoded, compared
    with the checksum of its writer, and encoded again.
    """
    from cwtrain.hotload.delta import convert_delta

    with ctx.out.bytes_done("converting") as tell:
        stats = convert_delta(base, delta, out, workers=workers, on_progress=tell)
    _print_delta(ctx, stats)


@snapshot.command(cls=Command, example="cwtrain snapshot verify /ckpt/delta_000101 --base /ckpt/step_000100")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@click.option("--base", type=_CHECKPOINT, metavar="DIR", help="Checkpoint that the delta applies to.")
@pass_context
def verify(ctx: Context, directory: str, base: str | None) -> None:
    """Read everything in a snapshot, compare every checksum, and print what it is.

    Without --base a delta's frames are only checked to be whole; with it each tensor's new bytes are compared, too.
    "verified" says which: full, frames, or headers for a full snapshot that has no checksums.
    """
    from cwtrain.snapshots import inspect_snapshot, local_snapshot_to_json

    with ctx.out.bytes_done("verifying") as tell:
        found = inspect_snapshot(
            directory,
            previous_identity=_predecessor(directory),
            allow_empty_delta=True,
            verify="full",
            base=base,
            on_progress=tell,
        )
    for warning in found.warnings:
        ctx.out.say(f"warning: {warning}")
    ctx.out.data(local_snapshot_to_json(found), ids=[found.path])


@snapshot.command(cls=Command, example="cwtrain --output table snapshot show /ckpt/delta_000101")
@click.argument("directory", metavar="DIR", type=_DIRECTORY)
@_workers
@pass_context
def show(ctx: Context, directory: str, workers: int | None) -> None:
    """Print what a snapshot holds: each tensor and layer, how much of it changes, how small it became.

    A delta is decoded for that, and sizes and density are those of the tensors that it holds. As a table it is a bar
    for each layer: the part of its bytes that changes, or for a full snapshot its size; the longest is the largest.
    With jsonl it is a line for each tensor.
    """
    from cwtrain.snapshots.contents import read_contents

    with ctx.out.bytes_done("reading") as tell:
        found = read_contents(directory, workers=workers, on_progress=tell)
    match ctx.out.format:
        case "table":
            ctx.out.data(_layer_rows(found), columns=_COLUMNS)
        case "jsonl":
            ctx.out.data([tensor.to_json() for tensor in found.tensors])
        case _:
            ctx.out.data(found.to_json(), ids=[tensor.name for tensor in found.tensors])


def _print_delta(ctx: Context, stats: DeltaStats) -> None:
    if stats.empty:
        ctx.out.say("warning: nothing changed: an empty delta cannot be published, skip this version")
    result = {
        "path": str(stats.path),
        "version": stats.version,
        "base_version": stats.base_version,
        "tensors": stats.tensors,
        "changed_tensors": stats.changed_tensors,
        "raw_bytes": stats.raw_bytes,
        "changed_tensor_bytes": stats.changed_tensor_bytes,
        "changed_bytes": stats.changed_bytes,
        "delta_bytes": stats.delta_bytes,
        "density": float(f"{stats.density:.6g}"),
        "ratio": float(f"{stats.ratio:.6g}"),
        "empty": stats.empty,
        "shards": stats.shards,
        "encoder": stats.encoder,
        "workers": stats.workers,
        "seconds": round(stats.seconds, 3),
    }
    ctx.out.data(result, ids=[str(stats.path)])


def _number(path: str, *, default: int) -> int:
    """Return the number that the name of a directory ends in, as in ``step_000100``."""
    match = re.search(r"[0-9]{1,18}$", Path(path).resolve().name.removesuffix(".safetensors"))
    return int(match[0]) if match else default


def _predecessor(directory: str) -> str | None:
    """Return what a delta says that it applies to where that, or its version, is no number; else it needs no name."""
    from cwtrain.errors import SnapshotLayoutError
    from cwtrain.models.snapshot import INDEX_NAME
    from cwtrain.snapshots.identity import version_number
    from cwtrain.snapshots.index import is_delta, read_index

    try:
        index = read_index(str(Path(directory, INDEX_NAME)))
    except SnapshotLayoutError:  # inspection says it better
        return None
    versions = [index["metadata"].get(key) for key in ("base_version", "version")]
    if not is_delta(index) or not all(isinstance(text, str) for text in versions):
        return None
    return None if all(version_number(text) is not None for text in versions) else versions[0]


def _layer_rows(found: Contents) -> list[dict[str, Any]]:
    def weight(layer: Layer) -> float:
        return (layer.density if found.delta else layer.raw_bytes) or 0.0

    layers = found.layers
    longest = max(map(weight, layers), default=0.0)
    rows = []
    for layer in layers:
        row = layer.to_json()
        for key in ("ratio", "density"):
            if row[key] is not None:
                row[key] = f"{row[key]:.3%}" if key == "density" else f"{row[key]:.1f}"
        rows.append({**row, "bar": _bar(weight(layer) / longest if longest else 0.0)})
    return rows


def _bar(share: float) -> str:
    """Return a bar of blocks, an eighth of one at the finest; what is not nothing can be seen."""
    eighths = max(round(share * _BAR * 8), 1 if share else 0)
    return "█" * (eighths // 8) + ("" if eighths % 8 == 0 else "▏▎▍▌▋▊▉"[eighths % 8 - 1])
