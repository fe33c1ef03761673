"""Re-encoding a delta in the format that the service takes: decode, compare with the writer's checksum, encode."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from cwtrain.snapshots._checksums import hashers
from cwtrain.snapshots._codec import CHUNK_BYTES, Codec, DiffWorker, EncodedTensor, FrameJoiner, delta_codec
from cwtrain.snapshots._encode import FrameSink
from cwtrain.snapshots._parallel import Progress, ordered
from cwtrain.snapshots._patch import Blobs, Patcher, Wrong
from cwtrain.snapshots._spans import Part
from cwtrain.snapshots._write import Spill, Stored
from cwtrain.snapshots._zstd import encoder_library
from cwtrain.snapshots.changes import Change
from cwtrain.snapshots.checkpoint import Tensor

_GROUP_BYTES = 4 << 20


class _Piece(NamedTuple):
    length: int
    checksum: int
    changed_bytes: int
    stored: Stored | None


class _Converted(NamedTuple):
    tensor: Tensor
    pieces: list[_Piece]
    wrong: Wrong | None


def convert(
    tensors: Sequence[Tensor],
    changes: Mapping[str, Change],
    sink: FrameSink,
    *,
    workers: int,
    spill: Spill,
    on_progress: Callable[[int, int], object] | None = None,
    codec: Codec | None = None,
) -> tuple[dict[str, EncodedTensor], dict[str, Wrong]]:
    """Encode ``changes`` of ``tensors`` anew into ``sink``; return what became of each, and what did not work out."""
    codec = codec or delta_codec()
    library = encoder_library(codec.name)
    make_hashers = {change.algorithm: hashers(change.algorithm) for change in changes.values()}
    progress = Progress(sum(tensor.size_bytes for tensor in tensors), on_progress)
    local = threading.local()

    def work(group: Sequence[Tensor], check: Callable[[], None]) -> list[_Converted]:
        if not hasattr(local, "worker"):
            local.worker, local.patcher = codec.worker(), Patcher(library, make_hashers)
        with Blobs() as blobs:
            converted = [
                _convert(tensor, changes[tensor.name], blobs, local.worker, local.patcher, spill, progress, check)
                for tensor in group
            ]
            blobs.check()
        return converted

    results: dict[str, EncodedTensor] = {}
    wrong: dict[str, Wrong] = {}
    for group in ordered(work, _groups(tensors), workers=workers):
        for tensor, pieces, trouble in group:
            if trouble is not None:
                wrong[tensor.name] = trouble
                continue
            joiner = FrameJoiner(codec, tensor.size_bytes, sink.write)
            for piece in pieces:
                data = None if piece.stored is None else spill.load(piece.stored)
                joiner.add(piece.length, piece.checksum, piece.changed_bytes, data)
            results[tensor.name] = joiner.finish()
            sink.end_tensor(tensor.name, results[tensor.name])
    return results, wrong


def _groups(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    group: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if group and size + tensor.size_bytes > _GROUP_BYTES:
            yield group
            group, size = [], 0
        group.append(tensor)
        size += tensor.size_bytes
    if group:
        yield group


def _convert(
    tensor: Tensor,
    change: Change,
    blobs: Blobs,
    worker: DiffWorker,
    patcher: Patcher,
    spill: Spill,
    progress: Progress,
    check: Callable[[], None],
) -> _Converted:
    size = tensor.size_bytes
    pieces: list[_Piece] = []
    wrong: Wrong | None = None
    with tensor.open() as file:
        for start in range(0, max(size, 1), CHUNK_BYTES):
            check()
            part = Part(0, start, min(CHUNK_BYTES, size - start))
            (old,), (new,) = worker.place([part.length], tensor.offset + start)
            file.read_into(tensor.offset + start, old)
            wrong = patcher.patch(change, part, size, old, new, blobs)
            if wrong is not None:
                break
            if part.length:
                (diff,) = worker.diff([(start, size)])
                stored = None if diff.piece is None else spill.store(diff.piece)
                pieces.append(_Piece(part.length, diff.checksum, diff.changed_bytes, stored))
            progress.add(part.length)
        tensor.check(file)
    return _Converted(tensor, pieces, wrong)
