"""In which pieces tensors are read: large ones chunk by chunk, small neighbours together in one read.

A *span* is one read from one place of each file: parts of tensors that follow each other there. A *batch* is what a
worker does at once: some spans of the same files. Everything is in the order in which it is written.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from cwtrain.snapshots._buffers import MAX_PARTS

BATCH_BYTES = 4 << 20
"""How much a worker takes at once: so much that handing it over costs little, and so little that it can wait."""


PIECE_BYTES = 2 << 20
"""How much of a file is read at once where nothing is encoded: with more, less is spent on each piece."""


class Part(NamedTuple):
    """``length`` bytes from ``start`` on of the tensor with this number."""

    tensor: int
    start: int
    length: int


Span = tuple[Part, ...]
Batch = tuple[Span, ...]


def spans(
    sizes: Sequence[int],
    *,
    adjacent: Callable[[int], bool],
    chunk_bytes: int,
    alone: Callable[[int], bool] = lambda number: False,
) -> Iterator[Span]:
    """Yield the spans of tensors of these sizes, each of at most a chunk; an empty tensor is one empty part.

    Tensors are cut at multiples of the chunk, counted from their begin. ``adjacent(n)`` says whether tensor n follows
    tensor n-1 directly in every file that is read or written, ``alone(n)`` whether tensor n must not share a span.
    """
    span: list[Part] = []
    room = chunk_bytes
    for number, size in enumerate(sizes):
        for start in range(0, max(size, 1), chunk_bytes):
            length = min(chunk_bytes, size - start)
            if span:
                fits = length <= room and len(span) < MAX_PARTS
                follows = start > 0 or adjacent(number)
                if not (fits and follows) or alone(number) or alone(span[-1].tensor):
                    yield tuple(span)
                    span, room = [], chunk_bytes
            span.append(Part(number, start, length))
            room -= length
    if span:
        yield tuple(span)


def batches(
    found: Iterable[Span],
    *,
    same_files: Callable[[int, int], bool],
    batch_bytes: int = BATCH_BYTES,
    whole: Callable[[Part], bool] = lambda part: False,
) -> Iterator[Batch]:
    """Yield batches of spans, each of about ``batch_bytes``.

    ``same_files(m, n)`` says whether tensors m and n lie in the same files. ``whole(part)`` says that a span which
    begins with ``part`` must stay in one batch with the span before it, however large that gets.
    """
    batch: list[Span] = []
    room = batch_bytes
    for span in found:
        first = span[0]
        size = sum(part.length for part in span)
        if batch:
            stay = first.start > 0 and whole(first)
            if not stay and (room < size or not same_files(batch[-1][0].tensor, first.tensor)):
                yield tuple(batch)
                batch, room = [], batch_bytes
        batch.append(span)
        room -= size
    if batch:
        yield tuple(batch)
