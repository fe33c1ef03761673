"""The bucket's door against a store that answers by script: framing, ports that are gone, requests cut short."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import pytest

from cwtrain_emulator.faults import FaultBook
from cwtrain_emulator.s3.faulty import Call, without_lost
from cwtrain_emulator.s3.http11 import Head, HttpError, body_of, read_head
from cwtrain_emulator.s3.proxy import StoreProxy

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def closed(writer: asyncio.StreamWriter) -> None:
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


async def exchange(proxy: StoreProxy, sent: bytes) -> bytes:
    """Send bytes to a proxy and return all that comes back until the connection ends."""
    await proxy.start(None)
    reader, writer = await asyncio.open_connection("127.0.0.1", proxy.port)
    try:
        writer.write(sent)
        return await reader.read()
    finally:
        await closed(writer)
        await proxy.stop()


async def through(handler: Handler, sent: bytes) -> bytes:
    """Send bytes through a proxy to a store and return all that comes back until the connection ends."""
    ended: list[asyncio.Task[None]] = []

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        ended.append(task)
        with contextlib.suppress(HttpError, OSError):
            await handler(reader, writer)
        await closed(writer)

    store = await asyncio.start_server(served, "127.0.0.1", 0)
    port = store.sockets[0].getsockname()[1]
    try:
        return await exchange(StoreProxy(FaultBook(), callers={}, store_port=lambda: port), sent)
    finally:
        store.close()
        await asyncio.gather(*ended)


def run(work: Awaitable[bytes]) -> bytes:
    async def bounded() -> bytes:
        return await asyncio.wait_for(work, 30)

    return asyncio.run(bounded())


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer each request with its body, in chunks."""
    while (head := await read_head(reader)) is not None:
        body = b"".join([content async for _, content in body_of(reader, head, until_close=False)])
        raw = head.first.split()[1].encode() + b" " + body
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(raw), raw))


def test_requests_of_every_framing_on_one_connection() -> None:
    sent = (
        b"PUT /b/one HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc"
        b"PUT /b/two HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nde\r\n1;x=y\r\nf\r\n0\r\nT: 1\r\n\r\n"
        b"GET /b/three HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    )
    answer = run(through(echo, sent))
    assert answer.count(b"HTTP/1.1 200 OK") == 3
    assert all(part in answer for part in (b"/b/one abc", b"/b/two def", b"/b/three "))


def test_a_continue_is_handed_on_and_an_early_refusal_is_seen() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 Forbidden\r\nContent-Length: 2\r\n\r\nno")
        await writer.drain()
        await reader.read()

    sent = b"PUT /b/k HTTP/1.1\r\nConnection: close\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n12345"
    answer = run(through(refuse, sent))
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 403 Forbidden")


def test_a_store_that_is_away_is_503_and_one_that_hangs_up_hangs_up() -> None:
    away = StoreProxy(FaultBook(), callers={}, store_port=lambda: 1)
    answer = run(exchange(away, b"PUT /b/k HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc"))
    assert b"<Code>ServiceUnavailable</Code>" in answer

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        await writer.drain()

    # Whatever part of it came through: the connection has ended, and the announced ten bytes were not there.
    assert run(through(hang_up, b"GET /b/k HTTP/1.1\r\n\r\n")).partition(b"\r\n\r\n")[2] in (b"", b"half")


def test_what_is_no_http_ends_the_connection() -> None:
    assert run(through(echo, b"GET /b/k HTTP/1.1\r\nContent-Length: x\r\n\r\n")) == b""

    async def endless() -> bytes:
        reader = asyncio.StreamReader(limit=64)
        reader.feed_data(b"x" * 200)
        with pytest.raises(HttpError, match="too long"):
            await read_head(reader)
        reader = asyncio.StreamReader()
        reader.feed_data(b"zz\r\n")
        reader.feed_eof()
        head = Head(b"", "GET / HTTP/1.1", {"transfer-encoding": "chunked"})
        with pytest.raises(HttpError, match="chunks"):
            _ = [piece async for piece in body_of(reader, head, until_close=False)]
        return b""

    run(endless())


@pytest.mark.parametrize(
    ("line", "key", "permission", "listing"),
    [
        ("GET /b/a%20b/c HTTP/1.1", "a b/c", "s3:GetObject", False),
        ("HEAD /b/k HTTP/1.1", "k", "s3:GetObject", False),
        ("PUT /b/k?partNumber=1&uploadId=x HTTP/1.1", "k", "s3:PutObject", False),
        ("POST /b/k?uploads HTTP/1.1", "k", "s3:PutObject", False),
        ("DELETE /b/k?uploadId=x HTTP/1.1", "k", "s3:AbortMultipartUpload", False),
        ("DELETE /b/k HTTP/1.1", "k", "s3:DeleteObject", False),
        ("GET /b?list-type=2&prefix=p HTTP/1.1", "", "s3:ListBucket", True),
        ("GET /b?uploads HTTP/1.1", "", "s3:ListBucketMultipartUploads", False),
    ],
)
def test_what_a_request_asks_for(line: str, key: str, permission: str, listing: bool) -> None:
    credential = "AWS4-HMAC-SHA256 Credential=AKEY/20260101/US-EAST-04A/s3/aws4_request, SignedHeaders=host"
    call = Call.of(Head(b"", line, {"host": "127.0.0.1:80", "authorization": credential}))
    assert (call.key, call.permission, call.listing, call.access_key) == (key, permission, listing, "AKEY")
    virtual = Call.of(Head(b"", line.replace("/b", "/", 1).replace("//", "/"), {"host": "b.localhost:80"}))
    assert (virtual.key, virtual.permission, virtual.access_key) == (key, permission, "")


def test_a_listing_loses_what_is_lost() -> None:
    book = FaultBook()
    lost = [book.add({"target": "store", "kind": "lost_object", "key": "^p/b c$"})]
    listing = (
        b'<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/"><KeyCount>2</KeyCount>'
        b"<EncodingType>url</EncodingType><Contents><Key>p/a</Key></Contents><Contents><Key>p/b%20c</Key></Contents>"
        b"</ListBucketResult>"
    )
    left = without_lost(listing, lost)
    assert b"<Key>p/a</Key>" in left
    assert b"b%20c" not in left
    assert b"<KeyCount>1</KeyCount>" in left
    assert without_lost(b"no xml", lost) == b"no xml"
