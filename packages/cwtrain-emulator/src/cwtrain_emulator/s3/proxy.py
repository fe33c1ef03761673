"""The object store's door: a proxy that hands every request on as it came, and where faults strike.

It is always the endpoint that clients get, so that a fault can be set at any moment. SigV4 signs the Host header, and
the store checks what was signed, not where it listens: the head goes on byte by byte, and the signature holds.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack

from cwtrain_emulator.faults import Fault, FaultBook
from cwtrain_emulator.s3.faulty import Call, answer_to, refusal, without_lost
from cwtrain_emulator.s3.http11 import CHUNK_BYTES, Head, HttpError, body_of, read_head

__all__ = ["StoreProxy"]

_log = logging.getLogger("cwtrain_emulator.store_proxy")

_BUFFER_BYTES = 1 << 20
_CONNECT_SECONDS = 5.0
_LINGER_SECONDS = 2.0
_MOST_WRITTEN = 100_000
_HIDING = ("lost_object", "late_object")

Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class StoreProxy:
    """One listening port in front of the store. `callers` says whose each access key is; `store_port` where it is."""

    def __init__(self, book: FaultBook, *, callers: Mapping[str, str], store_port: Callable[[], int]) -> None:
        self._book = book
        self._callers = callers
        self._store_port = store_port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._written = _Written()
        self.port = 0

    @property
    def endpoint(self) -> str:
        """URL of the port."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self, preferred_port: int | None) -> None:
        """Listen, on the preferred port if it is free."""
        for port in [preferred_port, 0] if preferred_port else [0]:
            try:
                self._server = await asyncio.start_server(
                    self._connected, "127.0.0.1", port or 0, limit=_BUFFER_BYTES, backlog=1024
                )
            except OSError:
                if not port:
                    raise
                continue
            self.port = self._server.sockets[0].getsockname()[1]
            return

    async def stop(self) -> None:
        """Close everything."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            async with AsyncExitStack() as stack:
                stack.callback(writer.close)
                await self._serve((reader, writer), stack)
        except (HttpError, OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            writer.transport.abort()
        except Exception:  # noqa: BLE001 - one bad request must not end the door
            _log.exception("a request to the store failed")
            writer.transport.abort()
        finally:
            self._tasks.discard(task)

    async def _serve(self, client: Streams, stack: AsyncExitStack) -> None:
        """Serve one client's connection until it ends."""
        store: Streams | None = None
        while (head := await read_head(client[0])) is not None:
            call = Call.of(head)
            struck = self._book.take(
                "store",
                method=call.method,
                path=call.path,
                key=call.read_key,
                listing=call.listing,
                writes=call.writes in ("object", "part") and not call.checksum,
                ages=self._written,
                permission=call.permission,
                access_key=call.access_key,
                caller=self._callers.get(call.access_key, "other"),
            )
            for fault in struck:
                if fault.kind == "latency":
                    await asyncio.sleep(fault["seconds"])
            ending = next((fault for fault in struck if _answers(fault, call)), None)
            if ending is not None:
                await _answer(client, head, answer_to(ending, call))
                return
            if store is None or store[0].at_eof():
                try:
                    opening = asyncio.open_connection("127.0.0.1", self._store_port(), limit=_BUFFER_BYTES)
                    store = await asyncio.wait_for(opening, _CONNECT_SECONDS)
                except (OSError, TimeoutError):
                    answer = refusal(call, 503, "ServiceUnavailable", "The store is not running.", {})
                    await _answer(client, head, answer)
                    return
                stack.callback(store[1].close)
            if not await self._exchange(client, store, head, call, struck):
                return

    async def _exchange(self, client: Streams, store: Streams, head: Head, call: Call, struck: Sequence[Fault]) -> bool:
        """Hand a request and its answer on; return whether the connection can be used again."""
        rate = min((fault["bytes_per_second"] for fault in struck if fault.kind == "throttle"), default=None)
        cut = min((fault["bytes"] for fault in struck if fault.kind == "cut"), default=None)
        lost = [fault for fault in struck if fault.kind in _HIDING]
        store[1].write(head.raw)
        sending = asyncio.create_task(_send_body(client[0], store[1], head, rate))
        try:
            while True:
                answer = await read_head(store[0])
                if answer is None:
                    raise HttpError("the store hung up")
                status = int(answer.first.split(" ")[1])
                if status >= 200:
                    break
                client[1].write(answer.raw)
            for fault in struck:
                if fault.kind == "hold":
                    await self._book.held(fault)
            if status == 200 and call.writes in ("object", "whole"):
                self._written.note(call.key)
            empty = call.method == "HEAD" or status in (204, 304)
            if lost and not empty:
                await _filtered(client[1], store[0], answer, lost, self._written)
            elif not await _receive_body(client[1], store[0], answer, empty, rate, cut):
                return False
            # An answer before the end of the request (a refusal): let the client finish, or it may not see the answer.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(sending), _LINGER_SECONDS)
            if not sending.done():
                return False
            sending.result()
            until_close = not empty and answer.length is None and not answer.chunked
            return not (head.closes or answer.closes or until_close)
        finally:
            if not sending.done():
                sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)


class _Written(Mapping[str, float]):
    """How many seconds ago objects were written, by key; what is older than any fault can ask for is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: dict[str, float] = {}

    def note(self, key: str) -> None:
        """An object was written now."""
        self._times.pop(key, None)
        self._times[key] = self._clock()
        while len(self._times) > _MOST_WRITTEN:
            del self._times[next(iter(self._times))]

    def __getitem__(self, key: str) -> float:
        return self._clock() - self._times[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)


def _answers(fault: Fault, call: Call) -> bool:
    return fault.ends or fault.kind == "checksum_required" or (fault.kind in _HIDING and not call.listing)


async def _answer(client: Streams, head: Head, answer: bytes | None) -> None:
    """Send an answer of our own, after what the client has to say; without one, just hang up."""
    if answer is None:
        client[1].transport.abort()
        return
    if "100-continue" not in head.headers.get("expect", "").lower():
        async for _ in body_of(client[0], head, until_close=False):
            pass
    client[1].write(answer)
    await client[1].drain()


async def _send_body(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: Head, rate: int | None) -> None:
    pace = _Pace(rate)
    async for piece, content in body_of(reader, head, until_close=False):
        await pace.write(writer, piece, len(content))


async def _receive_body(
    writer: asyncio.StreamWriter,
    reader: asyncio.StreamReader,
    answer: Head,
    empty: bool,
    rate: int | None,
    cut: int | None,
) -> bool:
    """Hand an answer on; return False when it was cut."""
    if cut == 0:
        writer.transport.abort()
        return False
    writer.write(answer.raw)
    pace, sent = _Pace(rate), 0
    if cut is not None and answer.length:
        # An answer that fits is cut all the same.
        cut = min(cut, answer.length - 1)
    if not empty:
        async for piece, content in body_of(reader, answer, until_close=True):
            if cut is not None and (sent + len(content) > cut or not content):
                writer.write(b"" if answer.chunked else content[: cut - sent])
                break
            sent += len(content)
            await pace.write(writer, piece, len(content))
    await writer.drain()
    if cut is None:
        return True
    writer.close()
    return False


async def _filtered(
    writer: asyncio.StreamWriter,
    reader: asyncio.StreamReader,
    answer: Head,
    lost: Sequence[Fault],
    ages: Mapping[str, float],
) -> None:
    """Hand a listing on without what is lost."""
    body = b"".join([content async for _, content in body_of(reader, answer, until_close=True)])
    if " 200" in answer.first:
        body = without_lost(body, lost, ages)
    left_out = (b"content-length:", b"transfer-encoding:")
    lines = [line for line in answer.raw.split(b"\r\n") if line and not line.lower().startswith(left_out)]
    lines.append(b"Content-Length: " + str(len(body)).encode())
    writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
    await writer.drain()


class _Pace:
    """Writes no faster than some bytes per second; None: as fast as it goes."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._loop = asyncio.get_running_loop()
        self._start = self._loop.time()
        self._sent = 0

    async def write(self, writer: asyncio.StreamWriter, piece: bytes, content_bytes: int) -> None:
        """Write a piece, in parts when it is more than a twentieth of a second's worth."""
        if self._rate is None:
            writer.write(piece)
            await writer.drain()
            return
        step = max(1, min(CHUNK_BYTES, self._rate // 20))
        for start in range(0, len(piece), step):
            part = piece[start : start + step]
            self._sent += min(len(part), content_bytes)
            await asyncio.sleep(max(0.0, self._start + self._sent / self._rate - self._loop.time()))
            writer.write(part)
            await writer.drain()
