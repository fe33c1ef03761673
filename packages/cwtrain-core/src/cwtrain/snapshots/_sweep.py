"""One pass over the tensors of a checkpoint by several threads: read, change, checksum, write.

Copying, applying a delta, verifying one and computing checksums are all this pass, with or without changes and a
target.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import attrs

from cwtrain.snapshots._adler import adler32, adler32_hex, combine
from cwtrain.snapshots._buffers import Lane, phase, positions_of
from cwtrain.snapshots._checksums import ADLER32, hashers
from cwtrain.snapshots._parallel import Progress, ordered
from cwtrain.snapshots._patch import Blobs, Patcher, Wrong, mismatch
from cwtrain.snapshots._spans import BATCH_BYTES, PIECE_BYTES, Batch, Part, batches, spans
from cwtrain.snapshots._targets import Target
from cwtrain.snapshots._zstd import encoder_library
from cwtrain.snapshots.changes import Change
from cwtrain.snapshots.checkpoint import Tensor

_EMPTY = "00000001"


@attrs.frozen(kw_only=True)
class Swept:
    """The Adler-32 of each tensor after its change, and which changes did not work out."""

    checksums: dict[str, str]
    wrong: dict[str, Wrong]


class _Done(NamedTuple):
    part: Part
    checksum: int
    wrong: Wrong | None


def sweep(
    tensors: Sequence[Tensor],
    *,
    changes: Mapping[str, Change] | None = None,
    target: Target | None = None,
    workers: int,
    on_progress: Callable[[int, int], object] | None = None,
    encoder: str | None = None,
    chunk_bytes: int = PIECE_BYTES,
    batch_bytes: int = BATCH_BYTES,
) -> Swept:
    """Read ``tensors``, apply their ``changes``, write the result to ``target``, and return its checksums.

    A change that does not work out is reported, and the pass goes on; what was written for it is not to be used. Raises
    SnapshotChangedError if a file is not what it was when its header was read; ConfigError if a checksum's library is
    not installed. Memory: 16 MiB a worker, and zstd's window where a foreign frame has a large one.
    """
    changes = changes or {}
    full = [tensor for tensor in tensors if tensor.size_bytes or tensor.name in changes]
    make_hashers = {c.algorithm: hashers(c.algorithm) for c in changes.values() if c.algorithm != ADLER32}
    progress = Progress(sum(tensor.size_bytes for tensor in full), on_progress)
    library = encoder_library(encoder)
    local = threading.local()

    def work(batch: Batch, check: Callable[[], None]) -> list[_Done]:
        if not hasattr(local, "worker"):
            local.worker = _Worker(Patcher(library, make_hashers), chunk_bytes)
        worker: _Worker = local.worker
        return list(worker.run(batch, full, changes, target, progress, check))

    checksums = dict.fromkeys((tensor.name for tensor in tensors), _EMPTY)
    wrong: dict[str, Wrong] = {}
    value = 1
    for done in ordered(work, _plan(full, changes, target, chunk_bytes, batch_bytes), workers=workers):
        for part, checksum, trouble in done:
            tensor = full[part.tensor]
            value = combine(1 if part.start == 0 else value, checksum, part.length)
            if trouble is not None:
                wrong.setdefault(tensor.name, trouble)
            if part.start + part.length == tensor.size_bytes:
                checksums[tensor.name] = found = adler32_hex(value)
                change = changes.get(tensor.name)
                if change is None or change.algorithm != ADLER32 or found == change.checksum:
                    continue
                wrong.setdefault(tensor.name, mismatch(found, change))
    return Swept(checksums=checksums, wrong=wrong)


def _plan(
    tensors: Sequence[Tensor], changes: Mapping[str, Change], target: Target | None, chunk_bytes: int, batch_bytes: int
) -> Iterator[Batch]:
    def adjacent(number: int) -> bool:
        one, two = tensors[number - 1], tensors[number]
        if one.file is not two.file or one.offset + one.size_bytes != two.offset:
            return False
        return target is None or target.follows(two, one)

    def streamed(number: int) -> bool:
        change = changes.get(tensors[number].name)
        return change is not None and (change.encoding != "xor" or tensors[number].size_bytes > chunk_bytes)

    found = spans([tensor.size_bytes for tensor in tensors], adjacent=adjacent, chunk_bytes=chunk_bytes, alone=streamed)
    return batches(
        found,
        same_files=lambda one, two: tensors[one].file is tensors[two].file,
        batch_bytes=batch_bytes,
        whole=lambda part: streamed(part.tensor),
    )


class _Worker:
    """One worker's buffers and decoders. For one thread at a time."""

    def __init__(self, patcher: Patcher, chunk_bytes: int) -> None:
        self._patcher = patcher
        self._old, self._new = Lane(chunk_bytes), Lane(chunk_bytes)

    def run(
        self,
        batch: Batch,
        tensors: Sequence[Tensor],
        changes: Mapping[str, Change],
        target: Target | None,
        progress: Progress,
        check: Callable[[], None],
    ) -> Iterator[_Done]:
        """Yield what became of each part of the batch."""
        first = tensors[batch[0][0].tensor]
        with first.open() as file, Blobs() as blobs:
            for span in batch:
                check()
                begin = span[0]
                tensor = tensors[begin.tensor]
                offset = tensor.offset + begin.start
                lengths = [part.length for part in span]
                positions = positions_of(lengths)
                place = phase(offset, None if target is None else target.offset(tensor, begin.start))
                new = old = self._old.place(lengths, positions, place)
                file.read_views(offset, old)
                wrong: list[Wrong | None] = [None] * len(span)
                changing = [changes.get(tensors[part.tensor].name) for part in span]
                if any(changing):
                    new = self._new.place(lengths, positions, place)
                    for number, (part, change) in enumerate(zip(span, changing, strict=True)):
                        if change is None:
                            new[number] = old[number]
                        else:
                            size = tensors[part.tensor].size_bytes
                            wrong[number] = self._patcher.patch(change, part, size, old[number], new[number], blobs)
                yield from map(_Done, span, map(adler32, new), wrong)
                if target is not None and not any(wrong):  # what is wrong is no version of the tensor: it goes nowhere
                    target.write(tensor, begin.start, new, old)
                progress.add(sum(lengths))
            first.check(file)
            blobs.check()
