"""Decoding what inspection found: every frame, every checksum, in bounded memory, by several threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from cwtrain.errors import ChecksumError
from cwtrain.snapshots._checksums import ADLER32, hashers
from cwtrain.snapshots._parallel import Progress, ordered, worker_count
from cwtrain.snapshots._shards import Shards
from cwtrain.snapshots.changes import Change, check_known, open_delta
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor, checkpoint_of, open_checkpoint

if TYPE_CHECKING:
    from cwtrain.snapshots._patch import Wrong

__all__ = ["check_frames", "decode_delta", "raise_wrong", "verify_delta", "verify_full"]

OnProgress = Callable[[int, int], object]

_EXAMPLES = 20
_GROUP_BYTES = 4 << 20


def verify_full(
    shards: Shards, checksums: Mapping[str, str], *, workers: int | None = None, on_progress: OnProgress | None = None
) -> None:
    """Compare each tensor of a full snapshot with its Adler-32. Raises ChecksumError that names all wrong ones."""
    from cwtrain.snapshots._sweep import sweep

    tensors = list(checkpoint_of(shards).tensors.values())
    count = worker_count(workers, work_bytes=sum(tensor.size_bytes for tensor in tensors))
    found = sweep(tensors, workers=count, on_progress=on_progress).checksums
    wrong = {
        name: f"its bytes have the Adler-32 {value}, recorded is {checksums[name]}"
        for name, value in found.items()
        if value != checksums[name]
    }
    _raise(shards.directory, wrong, hint="the file is damaged, or the checksum is of other bytes; save it again")


def verify_delta(
    shards: Shards,
    checksums: Mapping[str, str],
    *,
    base: str | os.PathLike[str] | None,
    workers: int | None = None,
    on_progress: OnProgress | None = None,
) -> None:
    """Decode each frame of a delta and, with ``base``, compare the result with its Adler-32.

    Raises SnapshotLayoutError for tensors that the base does not have, ChecksumError that names all wrong frames.
    """
    blobs = checkpoint_of(shards).tensors
    if base is None:
        count = worker_count(workers)
        damaged = check_frames(list(blobs.values()), workers=count, on_progress=on_progress)
        _raise(shards.directory, damaged, hint="the delta is damaged; write it again")
        return
    from cwtrain.snapshots._sweep import sweep

    root = open_checkpoint(base)
    check_known(shards.directory, blobs, root)
    changes = {
        name: Change(blob=blob, encoding="xor", algorithm=ADLER32, checksum=checksums[name])
        for name, blob in blobs.items()
    }
    tensors = [tensor for name, tensor in root.tensors.items() if name in changes]
    count = worker_count(workers, work_bytes=sum(tensor.size_bytes for tensor in tensors))
    swept = sweep(tensors, changes=changes, workers=count, on_progress=on_progress)
    raise_wrong(shards.directory, {name: swept.wrong[name] for name in blobs if name in swept.wrong}, base=root.path)


def check_frames(
    blobs: Sequence[Tensor],
    *,
    workers: int,
    on_progress: OnProgress | None,
    visit: Callable[[Tensor, memoryview], None] | None = None,
) -> dict[str, str]:
    """Decode frames without their base, and return what is wrong with them.

    ``visit`` gets each piece that comes out; those of one frame come in order and from one thread.
    """
    from cwtrain.snapshots._codec import CHUNK_BYTES
    from cwtrain.snapshots._decoder import Decoder, decoded_pieces
    from cwtrain.snapshots._frames import FrameError
    from cwtrain.snapshots._zstd import encoder_library

    library = encoder_library()
    progress = Progress(sum(blob.size_bytes for blob in blobs), on_progress)
    local = threading.local()

    def work(group: list[Tensor], check: Callable[[], None]) -> dict[str, str]:
        if not hasattr(local, "decoder"):
            local.decoder, local.buffer = Decoder(library), bytearray(CHUNK_BYTES)
        wrong = {}
        with group[0].open() as file:
            for blob in group:

                def read_into(offset: int, view: memoryview, begin: int = blob.offset) -> None:
                    file.read_into(begin + offset, view)

                try:
                    reader = local.decoder.open(read_into, blob.size_bytes, size=None)
                    for piece in decoded_pieces(reader, memoryview(local.buffer)):
                        check()
                        if visit is not None:
                            visit(blob, piece)
                except FrameError as error:
                    wrong[blob.name] = f"its frame {error}"
                progress.add(blob.size_bytes)
            group[0].check(file)
        return wrong

    found: dict[str, str] = {}
    for wrong in ordered(work, _groups(blobs), workers=workers):
        found |= wrong
    return found


def _groups(blobs: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield frames of one file each, several small ones together."""
    group: list[Tensor] = []
    size = 0
    for blob in blobs:
        if group and (size >= _GROUP_BYTES or len(group) == 256 or group[0].file is not blob.file):
            yield group
            group, size = [], 0
        group.append(blob)
        size += blob.size_bytes
    if group:
        yield group


def decode_delta(
    base: str | os.PathLike[str] | Checkpoint, delta: str | os.PathLike[str]
) -> Iterator[tuple[str, bytes]]:
    """Yield (name, new bytes) of each tensor that the delta directory ``delta`` changes on ``base``.

    Deltas in encodings and checksums that the service does not take are decoded too. One tensor is in memory at a time.
    Raises what inspection raises, ChecksumError for the first wrong tensor (what was yielded before is right), and
    ConfigError where the library of a checksum is not installed.
    """
    from cwtrain.snapshots._codec import CHUNK_BYTES
    from cwtrain.snapshots._patch import Blobs, Patcher
    from cwtrain.snapshots._spans import Part
    from cwtrain.snapshots._zstd import encoder_library

    root = base if isinstance(base, Checkpoint) else open_checkpoint(base)
    found = open_delta(delta, base=root)
    make_hashers = {change.algorithm: hashers(change.algorithm) for change in found.changes.values()}
    patcher = Patcher(encoder_library(), make_hashers)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for name, change in found.changes.items():
        old = root.tensors[name]
        size = old.size_bytes
        new = bytearray(size)
        with old.open() as file, Blobs() as blobs:
            for start in range(0, max(size, 1), CHUNK_BYTES):
                part = Part(0, start, min(CHUNK_BYTES, size - start))
                before, after = buffer[: part.length], memoryview(new)[start : start + part.length]
                file.read_into(old.offset + start, before)
                if wrong := patcher.patch(change, part, size, before, after, blobs):
                    raise_wrong(found.path, {name: wrong}, base=root.path)
            old.check(file)
            blobs.check()
        yield name, bytes(new)


def raise_wrong(place: str, wrong: Mapping[str, Wrong], *, base: str) -> None:
    """Raise ChecksumError that names all changes of the delta at ``place`` that do not work out on ``base``, if any."""
    hint = f"{base} is not the base that the delta was made from, or the delta is damaged"
    if any(item.damaged for item in wrong.values()):
        hint = "the delta is damaged; write it again"
    _raise(place, {name: item.text for name, item in wrong.items()}, hint=hint)


def _raise(place: str, wrong: Mapping[str, str], *, hint: str) -> None:
    if not wrong:
        return
    lines = [f"tensor {name!r}: {text}" for name, text in list(wrong.items())[:_EXAMPLES]]
    if len(wrong) > _EXAMPLES:
        lines.append(f"and {len(wrong) - _EXAMPLES} more tensors")
    joined = lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
    raise ChecksumError(f"{place}: {joined}", tensor=next(iter(wrong)), hint=hint)
