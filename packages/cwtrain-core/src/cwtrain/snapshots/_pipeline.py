"""Tensors that come one at a time, encoded by several threads while the next one is being produced.

The caller's thread copies new bytes into one of a few slots; a worker reads the old bytes beside them, compresses the
difference and leaves the new bytes to the base; what came of it goes to the sink in the order in which it came in. When
``add`` returns, the tensor has been read. Frames are the same as those of ``write_delta``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from cwtrain.snapshots._adler import combine
from cwtrain.snapshots._buffers import MAX_PARTS, Lane, positions_of, round_up
from cwtrain.snapshots._codec import (
    CHUNK_BYTES,
    Diff,
    DiffWorker,
    EncodedTensor,
    FrameJoiner,
    adler32,
    adler32_hex,
    delta_codec,
)

__all__ = ["Old", "Pipeline", "Sink"]


class Old(Protocol):
    """Where the bytes of the version before are, and the new ones go."""

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the old bytes from ``start`` on."""

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Take new bytes."""

    @property
    def sparse(self) -> bool:
        """Whether only what differs has to be written."""


class Sink(Protocol):
    """Takes what is written, tensor by tensor."""

    def begin_tensor(self, name: str) -> None:
        """Take note which tensor comes."""

    def write(self, piece: bytes | memoryview) -> object:
        """Take the next piece of the current tensor, valid during the call."""

    def end_tensor(self, name: str, encoded: EncodedTensor) -> None:
        """Take note that the tensor is done. Without a change, or without bytes, there was no piece."""


EMPTY = EncodedTensor(changed_bytes=0, checksum="00000001", frame_bytes=0)
"""What becomes of a tensor without bytes."""


class _Part(NamedTuple):
    name: str
    start: int
    length: int
    size: int
    """Of the whole tensor."""


class _Slot:
    """New bytes of some parts, on their way through a worker."""

    def __init__(self, chunk_bytes: int) -> None:
        self.lane = Lane(chunk_bytes)
        self.parts: list[_Part] = []
        self.end = self.size = 0
        self.result: Future[list[Diff]] | None = None

    def clear(self) -> None:
        """Be free again."""
        self.parts, self.end, self.size, self.result = [], 0, 0, None


class Pipeline:
    """``workers`` threads and ``slots`` of 1 MiB. ``sink`` is called in the caller's thread.

    With ``full`` the bytes themselves go to the sink, otherwise the frames that lead from ``old`` to them.
    """

    def __init__(
        self, sink: Sink, *, full: bool, old: Old | None, workers: int, slots: int, chunk_bytes: int = CHUNK_BYTES
    ) -> None:
        self.busy_seconds = 0.0
        """How long workers were at it, all together."""
        self.encoder = "" if full else delta_codec(chunk_bytes=chunk_bytes).name
        self._sink, self._full, self._old = sink, full, old
        self._chunk = chunk_bytes
        self._codec = delta_codec(chunk_bytes=chunk_bytes)
        # The public codec needs all parts of a tensor at one worker, in order.
        count = workers if full or self._codec.independent else 1
        self._pool = ThreadPoolExecutor(max_workers=count, thread_name_prefix="cwtrain-encode")
        self._free = [_Slot(chunk_bytes) for _ in range(max(2, slots))]
        self._filling: _Slot | None = None
        self._waiting: deque[_Slot] = deque()
        self._joiner: FrameJoiner | _PlainJoiner | None = None
        self._local = threading.local()
        self._lock = threading.Lock()

    def add(self, name: str, size: int, pieces: Iterator[memoryview]) -> None:
        """Take a tensor of ``size`` bytes. Raises what reading it, or the work on earlier ones, raises."""
        if not size:
            self._sink.end_tensor(name, EMPTY)
            return
        left = memoryview(b"")
        for start in range(0, size, self._chunk):
            length = min(self._chunk, size - start)
            target = self._place(_Part(name, start, length, size))
            done = 0
            while done < length:
                if not left:
                    left = next(pieces)
                count = min(length - done, len(left))
                target[done : done + count] = left[:count]
                left, done = left[count:], done + count
        while self._waiting and self._waiting[0].result is not None and self._waiting[0].result.done():
            self._drain()

    def finish(self) -> None:
        """Work off everything that was added."""
        self._start()
        while self._waiting:
            self._drain()
        self.stop()

    def stop(self) -> None:
        """End the threads; what they have not begun is dropped."""
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()

    def _place(self, part: _Part) -> memoryview:
        """Return where the new bytes of ``part`` go."""
        slot = self._filling
        if slot is not None and (slot.size + part.length > self._chunk or len(slot.parts) == MAX_PARTS):
            self._start()
            slot = None
        if slot is None:
            slot = self._filling = self._take()
        target = slot.lane.piece(slot.end, part.length)
        slot.parts.append(part)
        slot.end += round_up(part.length)
        slot.size += part.length
        return target

    def _take(self) -> _Slot:
        while not self._free:
            self._drain()
        return self._free.pop()

    def _start(self) -> None:
        """Hand the slot that was filled to a worker."""
        if self._filling is not None:
            slot, self._filling = self._filling, None
            slot.result = self._pool.submit(self._work, slot)
            self._waiting.append(slot)

    def _work(self, slot: _Slot) -> list[Diff]:
        began = time.perf_counter()
        lengths = [part.length for part in slot.parts]
        diffs = self._summed(slot, lengths) if self._full else self._compared(slot, lengths)
        with self._lock:
            self.busy_seconds += time.perf_counter() - began
        return diffs

    def _summed(self, slot: _Slot, lengths: list[int]) -> list[Diff]:
        views = slot.lane.settle(lengths, positions_of(lengths))
        if self._old is not None:
            for part, view in zip(slot.parts, views, strict=True):
                self._old.write(part.name, part.start, view)
        return [Diff(adler32(view), len(view), None) for view in views]

    def _compared(self, slot: _Slot, lengths: list[int]) -> list[Diff]:
        assert self._old is not None
        if not hasattr(self._local, "worker"):
            self._local.worker = self._codec.worker()
        worker: DiffWorker = self._local.worker
        for part, view in zip(slot.parts, worker.place_beside(lengths, slot.lane), strict=True):
            self._old.read(part.name, part.start, view)
        diffs = worker.diff([(part.start, part.size) for part in slot.parts])
        for part, position, diff in zip(slot.parts, positions_of(lengths), diffs, strict=True):
            if diff.changed_bytes or not self._old.sparse:
                self._old.write(part.name, part.start, slot.lane.piece(position, part.length))
        return diffs

    def _drain(self) -> None:
        """Hand on what became of the slot that was filled first; wait for it."""
        slot = self._waiting[0]
        assert slot.result is not None
        diffs = slot.result.result()
        for part, position, diff in zip(slot.parts, positions_of([p.length for p in slot.parts]), diffs, strict=True):
            if self._joiner is None:
                self._sink.begin_tensor(part.name)
                self._joiner = self._new_joiner(part)
            piece = slot.lane.piece(position, part.length) if self._full else diff.piece
            self._joiner.add(part.length, diff.checksum, diff.changed_bytes, piece)  # type: ignore[arg-type]
            if part.start + part.length == part.size:
                self._sink.end_tensor(part.name, self._joiner.finish())
                self._joiner = None
        self._waiting.popleft()
        slot.clear()
        self._free.append(slot)

    def _new_joiner(self, part: _Part) -> FrameJoiner | _PlainJoiner:
        if self._full:
            return _PlainJoiner(self._sink.write)
        return FrameJoiner(self._codec, part.size, self._sink.write)


class _PlainJoiner:
    """As a ``FrameJoiner``, for bytes that stay as they are."""

    def __init__(self, write: Callable[[bytes | memoryview], object]) -> None:
        self._write = write
        self._checksum, self._size = 1, 0

    def add(self, length: int, checksum: int, changed_bytes: int, piece: memoryview) -> None:
        """Take the next part."""
        self._checksum = combine(self._checksum, checksum, length)
        self._size += length
        self._write(piece)

    def finish(self) -> EncodedTensor:
        """Return what became of the tensor."""
        return EncodedTensor(changed_bytes=self._size, checksum=adler32_hex(self._checksum), frame_bytes=self._size)
