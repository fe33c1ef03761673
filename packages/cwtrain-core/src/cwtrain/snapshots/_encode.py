"""The delta between two checkpoints, encoded by several threads: reading, XOR, checksum and frame in one pass.

The frames go to a ``FrameSink`` in the order of the new checkpoint, piece by piece. Whoever keeps a copy of the new
version gives a ``Target``: it gets the new bytes while they are in memory, so encoding a delta and advancing a mirror
is one pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from cwtrain.snapshots._codec import CHUNK_BYTES, Codec, Diff, DiffWorker, EncodedTensor, FrameJoiner, delta_codec
from cwtrain.snapshots._parallel import Progress, ordered
from cwtrain.snapshots._spans import BATCH_BYTES, Batch, Part, batches, spans
from cwtrain.snapshots._targets import Target
from cwtrain.snapshots._write import Spill, Stored
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor

_EMPTY = EncodedTensor(changed_bytes=0, checksum="00000001", frame_bytes=0)


class FrameSink(Protocol):
    """Takes the frames of a delta in order."""

    def write(self, piece: bytes) -> object:
        """Take the next piece of a tensor's frame."""
        ...

    def end_tensor(self, name: str, encoded: EncodedTensor) -> None:
        """Take note that the tensor is done. Without a change there was no piece: ``frame_bytes`` is 0."""
        ...


class _Pair(NamedTuple):
    old: Tensor
    new: Tensor


class _Encoded(NamedTuple):
    """What a worker makes of one part. The piece may wait in a temporary file."""

    part: Part
    checksum: int
    changed_bytes: int
    piece: Stored | None


def encode_delta(
    old: Checkpoint,
    new: Checkpoint,
    sink: FrameSink,
    *,
    workers: int,
    spill: Spill,
    codec: Codec | None = None,
    target: Target | None = None,
    on_progress: Callable[[int, int], object] | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    batch_bytes: int = BATCH_BYTES,
) -> dict[str, EncodedTensor]:
    """Encode what leads from ``old`` to ``new``, which have the same tensors, and return what became of each tensor.

    The output depends on the bytes, the codec and ``chunk_bytes``, not on ``workers``. ``spill`` is where frames wait
    that the public codec makes ahead of their turn. ``on_progress`` gets (bytes done, bytes in all), from several
    threads, one at a time.

    Memory: 16 MiB a worker with the real chunk and batch, and what ``sink`` and ``spill`` keep. Raises
    SnapshotChangedError if a file is not what it was when its header was read.
    """
    codec = codec or delta_codec(chunk_bytes=chunk_bytes)
    pairs = [_Pair(old.tensors[name], tensor) for name, tensor in new.tensors.items() if tensor.size_bytes]
    progress = Progress(sum(pair.new.size_bytes for pair in pairs), on_progress)
    store: Callable[[bytes], Stored] = _itself if codec.independent else spill.store
    load: Callable[[Stored], bytes] = _itself if codec.independent else spill.load
    local = threading.local()

    def work(batch: Batch, check: Callable[[], None]) -> list[_Encoded]:
        if not hasattr(local, "worker"):
            local.worker = codec.worker()
        worker: DiffWorker = local.worker
        return list(_encode_batch(batch, pairs, worker, store, target, progress, check))

    parts = ordered(work, _plan(pairs, codec, target, chunk_bytes, batch_bytes), workers=workers)
    results = dict.fromkeys(new.tensors, _EMPTY)
    joiner: FrameJoiner | None = None
    for encoded in parts:
        for part, checksum, changed, piece in encoded:
            tensor = pairs[part.tensor].new
            if joiner is None:
                joiner = FrameJoiner(codec, tensor.size_bytes, sink.write)
            joiner.add(part.length, checksum, changed, None if piece is None else load(piece))
            if part.start + part.length == tensor.size_bytes:
                results[tensor.name] = joiner.finish()
                sink.end_tensor(tensor.name, results[tensor.name])
                joiner = None
    return results


def _itself(piece: Any) -> Any:
    return piece


def _plan(
    pairs: Sequence[_Pair], codec: Codec, target: Target | None, chunk_bytes: int, batch_bytes: int
) -> Iterator[Batch]:
    def adjacent(number: int) -> bool:
        before, pair = pairs[number - 1], pairs[number]
        together = all(
            one.file is two.file and one.offset + one.size_bytes == two.offset
            for one, two in zip(before, pair, strict=True)
        )
        return together and (target is None or target.follows(pair.old, before.old))

    def same_files(one: int, two: int) -> bool:
        return all(a.file is b.file for a, b in zip(pairs[one], pairs[two], strict=True))

    found = spans([pair.new.size_bytes for pair in pairs], adjacent=adjacent, chunk_bytes=chunk_bytes)
    return batches(found, same_files=same_files, batch_bytes=batch_bytes, whole=lambda part: not codec.independent)


def _encode_batch(
    batch: Batch,
    pairs: Sequence[_Pair],
    worker: DiffWorker,
    store: Callable[[bytes], Stored],
    target: Target | None,
    progress: Progress,
    check: Callable[[], None],
) -> Iterator[_Encoded]:
    first = pairs[batch[0][0].tensor]
    with first.old.open() as old_file, first.new.open() as new_file:
        for span in batch:
            check()
            begin = span[0]
            pair = pairs[begin.tensor]
            old_offset, new_offset = pair.old.offset + begin.start, pair.new.offset + begin.start
            write_offset = None if target is None else target.offset(pair.old, begin.start)
            old_views, new_views = worker.place([part.length for part in span], old_offset, new_offset, write_offset)
            old_file.read_views(old_offset, old_views)
            new_file.read_views(new_offset, new_views)
            if target is not None:
                target.write(pair.old, begin.start, new_views, old_views)
            diffs: list[Diff] = worker.diff([(part.start, pairs[part.tensor].new.size_bytes) for part in span])
            for part, (checksum, changed, piece) in zip(span, diffs, strict=True):
                yield _Encoded(part, checksum, changed, None if piece is None else store(piece))
            progress.add(sum(part.length for part in span))
        first.old.check(old_file)
        first.new.check(new_file)
