"""HTTP/1.1 as the store's proxy needs it: heads taken apart, bodies handed on in the framing they came in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

__all__ = ["CHUNK_BYTES", "Head", "HttpError", "body_of", "read_head"]

CHUNK_BYTES = 256 << 10
"""Bytes that are handed on at once, at most."""


class HttpError(Exception):
    """What came is not HTTP/1.1 that can be handed on."""


@dataclass(frozen=True)
class Head:
    """A request's or an answer's head. `raw` is what came, blank line included; names of headers are in lower case."""

    raw: bytes
    first: str
    headers: dict[str, str]

    @property
    def length(self) -> int | None:
        """The announced length of the body, or None."""
        value = self.headers.get("content-length")
        if value is None:
            return None
        if not (value.isascii() and value.isdigit()):
            raise HttpError(f"not a Content-Length: {value[:50]!r}")
        return int(value)

    @property
    def chunked(self) -> bool:
        """True when the body comes in chunks."""
        return "chunked" in self.headers.get("transfer-encoding", "").lower()

    @property
    def closes(self) -> bool:
        """True when the connection ends after this message."""
        return "close" in self.headers.get("connection", "").lower() or "HTTP/1.0" in self.first


async def read_head(reader: asyncio.StreamReader) -> Head | None:
    """Return the next head, or None at the end of the connection; raise HttpError."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as exc:
        if exc.partial:
            raise HttpError("the connection ended within a head") from None
        return None
    except asyncio.LimitOverrunError:
        raise HttpError("a head is too long") from None
    first, *lines = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    headers: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        headers[name.strip().lower()] = value.strip()
    return Head(raw, first, headers)


async def body_of(reader: asyncio.StreamReader, head: Head, *, until_close: bool) -> AsyncIterator[tuple[bytes, bytes]]:
    """Yield the pieces of a body: as they came (chunk framing included), and their content alone.

    A body with neither length nor chunks is empty, or goes on until the connection closes.
    """
    if head.chunked:
        async for piece in _chunks(reader):
            yield piece
        return
    left = head.length
    if left is None and not until_close:
        return
    while left is None or left > 0:
        piece_bytes = await reader.read(CHUNK_BYTES if left is None else min(CHUNK_BYTES, left))
        if not piece_bytes:
            if left is None:
                return
            raise HttpError("the connection ended within a body")
        if left is not None:
            left -= len(piece_bytes)
        yield piece_bytes, piece_bytes


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[tuple[bytes, bytes]]:
    try:
        while True:
            line = await reader.readuntil(b"\r\n")
            size = int(line.split(b";")[0].strip() or b"0", 16)
            if size == 0:
                end = line
                while (trailer := await reader.readuntil(b"\r\n")) != b"\r\n":
                    end += trailer
                yield end + trailer, b""
                return
            content = await reader.readexactly(size)
            yield line + content + await reader.readexactly(2), content
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
        raise HttpError("the connection ended within a body, or its chunks are none") from None
