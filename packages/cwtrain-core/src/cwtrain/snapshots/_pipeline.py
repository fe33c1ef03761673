"""Tensors that come one at a time, encoded by several threads while the next one is being produced.

Workers read the new bytes where they lie, and ``add`` returns when the last of them was read, not when it was encoded;
small tensors are copied, and several of them go to a worker together. A worker reads the old bytes beside the new ones,
compresses the difference and leaves the new bytes to the base. What came of it goes to the sink in the order in which
it came in. With pieces of the same size frames are the same as those of ``write_delta``.

The caller's thread is one of the workers: where it would wait for another, it takes a job itself. A thread that sleeps
and is woken for every tensor costs more than many a tensor does.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, Protocol

from cwtrain.snapshots._adler import combine
from cwtrain.snapshots._buffers import MAX_PARTS, WORD_BYTES, Lane, round_up
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

__all__ = ["DeltaPipeline", "FullPipeline", "Old", "Sink"]

_BORROWED_BYTES = 128 << 10
"""From this size on, a part is read by the worker where it lies."""
_MOST_AT_ONCE = 4
"""So many of them a worker takes together, where the tensor is large enough for all workers."""
_FULL_BYTES = 4 << 20
EMPTY = EncodedTensor(changed_bytes=0, checksum="00000001", frame_bytes=0)
"""What becomes of a tensor without bytes."""


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
    """Takes what is written, tensor by tensor, in the thread that adds."""

    @property
    def large_bytes(self) -> int:
        """From which size on the checksum of a whole tensor is wanted before its bytes."""

    def begin_tensor(self, name: str, *, checksum: str | None = None) -> None:
        """Take note which tensor comes, and what its checksum will be where that is known."""

    def write(self, piece: bytes | memoryview) -> object:
        """Take the next piece of the current tensor, valid during the call."""

    def end_tensor(self, name: str, encoded: EncodedTensor) -> None:
        """Take note that the tensor is done. Without a change, or without bytes, there was no piece."""


class _Part(NamedTuple):
    name: str
    start: int
    length: int
    size: int
    """Of the whole tensor."""


class _Job:
    """Parts that lie in the caller's memory (``sources``), or that were copied into a ``lane``."""

    def __init__(self, lane: Lane | None) -> None:
        self.lane = lane
        self.sources: list[memoryview] = []
        self.parts: list[_Part] = []
        self.end = self.size = 0
        self.read = threading.Event()
        """Set when the caller's memory is not looked at any more."""
        self.result: Future[list[Diff]] = Future()


class DeltaPipeline:
    """Makes frames with ``workers`` threads, the caller's among them.

    At most ``waiting`` jobs, of ``chunk_bytes`` of tensors each, are on their way.
    """

    def __init__(self, sink: Sink, old: Old, *, workers: int, waiting: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self.busy_seconds = 0.0
        """How long workers were at it, all together."""
        self._sink, self._old, self._chunk = sink, old, chunk_bytes
        self._codec = delta_codec(chunk_bytes=chunk_bytes)
        # The public codec needs all parts of a tensor at one worker, in order.
        count = workers if self._codec.independent else 1
        self._workers = count
        self._pool = (
            ThreadPoolExecutor(max_workers=count - 1, thread_name_prefix="cwtrain-encode") if count > 1 else None
        )
        self._most = max(2, waiting)
        self._lanes: list[Lane] = []
        self._filling: _Job | None = None
        self._waiting: deque[_Job] = deque()
        self._borrowed: list[_Job] = []
        self._joiner: FrameJoiner | None = None
        self._local = threading.local()
        self._lock = threading.Lock()

    def add(self, name: str, size: int, read: Callable[[], Iterator[memoryview]]) -> None:
        """Take a tensor of ``size`` bytes. Raises what reading it, or the work on earlier ones, raises."""
        if not size:
            self._sink.end_tensor(name, EMPTY)
            return
        pieces = read()
        left = memoryview(b"")
        at_once = max(1, min(_MOST_AT_ONCE, size // (2 * self._chunk * self._workers)))
        for start in range(0, size, self._chunk):
            part = _Part(name, start, min(self._chunk, size - start), size)
            if not left:
                self._give_back()
                left = next(pieces)
            if part.length >= _BORROWED_BYTES and part.length % WORD_BYTES == 0 and len(left) >= part.length:
                if self._pool is None:
                    self._do(part, left[: part.length])
                else:
                    self._borrow(part, left[: part.length], at_once)
                left = left[part.length :]
                continue
            target = self._place(part)
            done = 0
            while done < part.length:
                if not left:
                    self._give_back()
                    left = next(pieces)
                count = min(part.length - done, len(left))
                target[done : done + count] = left[:count]
                left, done = left[count:], done + count
        self._give_back()
        while self._waiting and self._waiting[0].result.done():
            self._drain()

    def finish(self) -> None:
        """Work off everything that was added."""
        self._start_filled()
        while self._waiting:
            self._advance()
        self.stop()

    def stop(self) -> None:
        """End the threads; what they have not begun is dropped."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
        self._waiting.clear()

    def _do(self, part: _Part, source: memoryview) -> None:
        """Do a part in this thread, which is the only worker."""
        self._start_filled()
        while self._waiting:
            self._drain()
        began = time.perf_counter()
        (diff,) = self._compare_borrowed([part], [source], self._worker())
        self.busy_seconds += time.perf_counter() - began
        self._join(part, diff)

    def _borrow(self, part: _Part, source: memoryview, at_once: int) -> None:
        """Let a worker read a part where it lies, with those before it if they are few."""
        job = self._filling
        if job is not None and (job.lane is not None or len(job.parts) >= at_once):
            self._start_filled()
            job = None
        if job is None:
            job = self._filling = _Job(None)
            self._borrowed.append(job)
        job.parts.append(part)
        job.sources.append(source)

    def _give_back(self) -> None:
        """Wait until nobody looks at the caller's memory any more."""
        if self._filling is not None and self._filling.lane is None:
            self._start_filled()
        for job in reversed(self._borrowed):
            self._take_over(job)
        for job in self._borrowed:
            job.read.wait()
        self._borrowed.clear()

    def _place(self, part: _Part) -> memoryview:
        """Return where the new bytes of a small part go."""
        job = self._filling
        full = job is not None and (job.size + part.length > self._chunk or len(job.parts) == MAX_PARTS)
        if job is not None and (full or job.lane is None):
            self._start_filled()
            job = None
        if job is None:
            job = self._filling = _Job(self._lanes.pop() if self._lanes else Lane(self._chunk))
        assert job.lane is not None
        target = job.lane.piece(job.end, part.length)
        job.parts.append(part)
        job.end += round_up(part.length)
        job.size += part.length
        return target

    def _start_filled(self) -> None:
        if self._filling is not None:
            job, self._filling = self._filling, None
            self._start(job)

    def _start(self, job: _Job) -> None:
        """Hand a job to a worker, when there is room for what comes of it."""
        while len(self._waiting) >= self._most:
            self._advance()
        self._waiting.append(job)
        if self._pool is None:
            self._work_here(job)
        else:
            job.result = self._pool.submit(self._work, job)

    def _advance(self) -> None:
        """Hand on what became of the first job, or do another one meanwhile: the last that no worker has begun."""
        if not self._waiting[0].result.done():
            for job in reversed(self._waiting):
                if self._take_over(job):
                    return
        self._drain()

    def _take_over(self, job: _Job) -> bool:
        """Do a job in this thread if no worker has begun it, and return whether that was so."""
        if not job.result.cancel():
            return False
        self._work_here(job)
        return True

    def _work_here(self, job: _Job) -> None:
        job.result = Future()
        try:
            job.result.set_result(self._work(job))
        except Exception as error:  # noqa: BLE001  (raised in its turn, as that of another thread is)
            job.result.set_exception(error)

    def _work(self, job: _Job) -> list[Diff]:
        began = time.perf_counter()
        worker = self._worker()
        try:
            if job.lane is None:
                diffs = self._compare_borrowed(job.parts, job.sources, worker, job.read)
            else:
                diffs = self._compare(job, job.lane, worker)
        finally:
            job.sources.clear()
            job.read.set()
        with self._lock:
            self.busy_seconds += time.perf_counter() - began
        return diffs

    def _worker(self) -> DiffWorker:
        """Return this thread's buffers."""
        if not hasattr(self._local, "worker"):
            self._local.worker = self._codec.worker()
        worker: DiffWorker = self._local.worker
        return worker

    def _compare_borrowed(
        self,
        parts: Sequence[_Part],
        sources: Sequence[memoryview],
        worker: DiffWorker,
        read: threading.Event | None = None,
    ) -> list[Diff]:
        diffs = []
        for number, (part, source) in enumerate(zip(parts, sources, strict=True), start=1):
            self._old.read(part.name, part.start, worker.place_old(part.length))
            checksum = worker.take(source)
            # Also where nothing differs: that is known when it is compressed, and the caller waits for his memory.
            self._old.write(part.name, part.start, source)
            if read is not None and number == len(parts):
                read.set()
            diffs.append(worker.diff_taken(checksum, (part.start, part.size)))
        return diffs

    def _compare(self, job: _Job, lane: Lane, worker: DiffWorker) -> list[Diff]:
        olds, news = worker.place_beside([part.length for part in job.parts], lane)
        for part, view in zip(job.parts, olds, strict=True):
            self._old.read(part.name, part.start, view)
        diffs = worker.diff([(part.start, part.size) for part in job.parts])
        for part, view, diff in zip(job.parts, news, diffs, strict=True):
            if diff.changed_bytes or not self._old.sparse:
                self._old.write(part.name, part.start, view)
        return diffs

    def _drain(self) -> None:
        """Hand on what became of the first job; wait for it."""
        job = self._waiting[0]
        for part, diff in zip(job.parts, job.result.result(), strict=True):
            self._join(part, diff)
        self._waiting.popleft()
        if job.lane is not None:
            self._lanes.append(job.lane)

    def _join(self, part: _Part, diff: Diff) -> None:
        """Hand on what became of the next part."""
        if self._joiner is None:
            self._sink.begin_tensor(part.name)
            self._joiner = FrameJoiner(self._codec, part.size, self._sink.write)
        self._joiner.add(part.length, *diff)
        if part.start + part.length == part.size:
            self._sink.end_tensor(part.name, self._joiner.finish())
            self._joiner = None


class FullPipeline:
    """Hands the bytes themselves on; workers count their checksums and fill the base meanwhile."""

    def __init__(self, sink: Sink, old: Old | None, *, workers: int) -> None:
        self.busy_seconds = 0.0
        """How long workers were at it, all together."""
        self._sink, self._old = sink, old
        self._pool = ThreadPoolExecutor(max_workers=workers, thread_name_prefix="cwtrain-encode")
        self._lock = threading.Lock()

    def add(self, name: str, size: int, read: Callable[[], Iterator[memoryview]]) -> None:
        """Take a tensor of ``size`` bytes. One that is large for the sink is read twice: its checksum comes first."""
        if not size:
            self._sink.end_tensor(name, EMPTY)
            return
        if size > self._sink.large_bytes:
            checksum = self._run(name, size, read(), lambda block: None)
            self._sink.begin_tensor(name, checksum=adler32_hex(checksum))
            for piece in read():
                self._sink.write(piece)
        else:
            self._sink.begin_tensor(name)
            checksum = self._run(name, size, read(), self._sink.write)
        encoded = EncodedTensor(changed_bytes=size, checksum=adler32_hex(checksum), frame_bytes=size)
        self._sink.end_tensor(name, encoded)

    def _run(self, name: str, size: int, pieces: Iterator[memoryview], write: Callable[[memoryview], object]) -> int:
        """Give everything to the base and to ``write``, and return the checksum."""
        checksum, start = 1, 0
        for piece in pieces:
            if len(piece) == size <= _FULL_BYTES:
                write(piece)
                return self._take(name, 0, piece)
            blocks = [(begin, piece[begin : begin + _FULL_BYTES]) for begin in range(0, len(piece), _FULL_BYTES)]
            sums = [self._pool.submit(self._take, name, start + begin, block) for begin, block in blocks]
            try:
                for _, block in blocks:
                    write(block)
            finally:
                values = [one.result() for one in sums]
            for (_, block), value in zip(blocks, values, strict=True):
                checksum = combine(checksum, value, len(block))
            start += len(piece)
        return checksum

    def finish(self) -> None:
        """End the threads; nothing is left to do."""
        self.stop()

    def stop(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _take(self, name: str, start: int, data: memoryview) -> int:
        began = time.perf_counter()
        checksum = adler32(data)
        if self._old is not None:
            self._old.write(name, start, data)
        with self._lock:
            self.busy_seconds += time.perf_counter() - began
        return checksum
