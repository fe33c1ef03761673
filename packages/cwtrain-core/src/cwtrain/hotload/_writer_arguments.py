"""What the arguments of a ``SnapshotWriter`` come to, and which of them do not fit together."""

from __future__ import annotations

import os

from cwtrain.errors import ConfigError, SnapshotError
from cwtrain.hotload._writer_side import read_side_files
from cwtrain.hotload.bases import BaseTensors
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.snapshots._codec import CHUNK_BYTES
from cwtrain.snapshots._parallel import BASE_BYTES, WORKER_BYTES, usable_cores, worker_count
from cwtrain.snapshots.identity import check_previous_identity
from cwtrain.storage.stream import StreamSizes

__all__ = [
    "check_sending",
    "delta_bytes",
    "encoders",
    "kind_of",
    "piece_bytes",
    "predecessor",
    "side_directory",
    "stream_sizes",
]

_MIB = 1 << 20
_MOST_WORKERS = 8
_SHARE_BYTES = 1 << 30
"""One thread encodes so much in about a second, while what it made before is being sent. On less, a second thread
saves hardly any time and takes a fifth more CPU from the trainer: the two take turns at the interpreter."""
_LEAST_POOL_BYTES = 48 * _MIB
_SHARDS_IN_POOL = 6


def predecessor(identity: str, base: BaseTensors | None, given: str | None, *, full: bool) -> str | None:
    """Return what a delta applies to, None for a full snapshot. Raises ConfigError, SnapshotError."""
    if full:
        if given is not None:
            raise ConfigError(f"{identity} is a full snapshot, previous_identity={given!r} is of a delta")
        return None
    if base is None:
        raise ConfigError(f"{identity}: a delta needs base=", hint="give what it applies to, or write a full snapshot")
    previous = given if given is not None else base.identity
    if previous is None or not base.types() or (base.identity is not None and base.identity != previous):
        held = f"holds {base.identity!r}" if base.identity else "holds no whole version"
        raise SnapshotError(
            f"{identity}: the base {held}, so there is no delta on {given!r}",
            hint="write a full snapshot with this base; it is filled by that",
        )
    if check_previous_identity(previous) == identity:
        raise SnapshotError(
            f"the delta cannot be published as {previous!r}, which it applies to itself",
            hint="choose a new identity for each snapshot",
        )
    return previous


def kind_of(kind: SnapshotKind | str) -> SnapshotKind:
    """Return the kind that ``kind`` names."""
    try:
        return SnapshotKind(str(kind).upper())
    except ValueError:
        raise ConfigError(f"kind={kind!r} is neither 'full' nor 'delta'") from None


def side_directory(path: str | os.PathLike[str] | None, *, needed: bool) -> str | None:
    """Return the directory of side files where they are ``needed``, after a look into it."""
    if path is None:
        if needed:
            raise ConfigError(
                "a full snapshot needs side_files=", hint="give a directory with config.json, the tokenizer and so on"
            )
        return None
    place = os.path.abspath(os.fspath(path))
    if needed:
        read_side_files(place, only_check=True)
    return place if needed else None


def check_sending(*, upload_workers: int, shard_bytes: int | None, max_bytes_per_second: float | None) -> None:
    """Raise ConfigError with every one of these that is no number above zero; None is what is not given."""
    given = {"upload_workers": upload_workers, "shard_bytes": shard_bytes, "max_bytes_per_second": max_bytes_per_second}
    wrong = [f"{name}={value}" for name, value in given.items() if value is not None and not value > 0]
    if wrong:
        raise ConfigError(f"{' and '.join(wrong)}: must be above zero", hint="give more than zero, or leave it out")


def encoders(workers: int | None, memory_bytes: int, *, work_bytes: int | None = None) -> int:
    """Return how many threads encode: what fits in the memory beside the least that sending needs.

    Where ``workers`` is not given but ``work_bytes``, one for each started share of it: see ``_SHARE_BYTES``.
    """
    worker_count(workers)  # a wrong argument comes first
    room = _room(memory_bytes)
    if room < 1:
        raise ConfigError(
            f"memory_bytes={memory_bytes} is not enough to write a snapshot",
            hint=f"give at least {BASE_BYTES + _LEAST_POOL_BYTES + WORKER_BYTES}, or leave it out",
        )
    worth = _MOST_WORKERS if work_bytes is None else work_bytes // _SHARE_BYTES + 1
    return min(workers or min(_MOST_WORKERS, worth, usable_cores()), room)


def delta_bytes(base: BaseTensors, ranks: int) -> int:
    """Return about how many bytes of tensors one of ``ranks`` compares with ``base``."""
    size = sum(kind.size_bytes for kind in base.types().values())
    return size // ranks if base.shared else size


def _room(memory_bytes: int) -> int:
    """Return how many workers fit beside the least that sending needs."""
    return (memory_bytes - BASE_BYTES - _LEAST_POOL_BYTES) // WORKER_BYTES


def piece_bytes(memory_bytes: int, workers: int) -> int:
    """Return how large the pieces of a delta are: a thread that encodes alone gets twice as much, and its memory.

    That takes about a twentieth less CPU: each piece costs some calls beside its bytes.
    """
    return 2 * CHUNK_BYTES if workers == 1 and _room(memory_bytes) >= 2 else CHUNK_BYTES


def stream_sizes(memory_bytes: int, workers: int) -> StreamSizes:
    """Return how the memory that the encoders leave is used: shards so large that several are on their way at once."""
    pool = memory_bytes - BASE_BYTES - workers * WORKER_BYTES * piece_bytes(memory_bytes, workers) // CHUNK_BYTES
    return StreamSizes(
        pool_bytes=pool,
        part_bytes=16 * _MIB if pool >= 128 * _MIB else 8 * _MIB,
        single_bytes=max(16 * _MIB, min(128 * _MIB, pool // _SHARDS_IN_POOL // (16 * _MIB) * 16 * _MIB)),
    )
