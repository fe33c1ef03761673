"""One connection of the data plane: the PUT of a large body goes out over HTTP/1.1, and its answer comes back."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import ssl
import time
from collections.abc import Iterator
from typing import Any

import attrs

from cwtrain.storage._buffers import SendingStopped
from cwtrain.storage._part_bodies import FileSpan, unreadable

__all__ = ["Connection", "NotHttp"]

_CONTINUE_SECONDS = 1.0
_LATE_ANSWER_SECONDS = 2.0
_MAX_HEAD_BYTES = 256 << 10
_MAX_BODY_BYTES = 16 << 20
_SMALL_BODY = 64 << 10
_RECEIVE = 64 << 10
_CONTINUE = b"HTTP/1.1 100"
_MOST_READ = 1 << 20
_NO_SENDFILE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
"""What a file system or a kernel answers that cannot do it."""
_BAD_DISK = (errno.EIO, errno.ESTALE)
"""What is about the file and not about the line."""


class NotHttp(Exception):
    """What came back cannot be read as an HTTP/1 answer."""


@attrs.define
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    keep: bool
    """Whether the connection can be used again."""
    silent: bool = False
    """Whether the server left ``Expect: 100-continue`` without an answer."""


class Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()

    @property
    def line(self) -> socket.socket:
        """The socket that it goes over."""
        return self._sock

    def usable(self) -> bool:
        """Return whether an idle connection is still open: one that has something to say was closed, or is confused."""
        return not self._received and not self._readable()

    def close(self) -> None:
        """Hang up."""
        with contextlib.suppress(OSError):
            self._sock.close()

    def put(self, request: Any, url: Any, read_timeout: float | None, *, wait: bool) -> _Answer:
        """Send the request and return the answer. Raises OSError (TimeoutError), and whatever the body raises."""
        length = int(_text(request.headers.get("Content-Length") or len(request.body)))
        expect = request.headers.get("Expect") is not None and wait and length > _SMALL_BODY
        self._sock.settimeout(read_timeout)
        self._send(_head(request, url, expect))
        silent = False
        if expect:
            answer, silent = self._await_continue(read_timeout)
            if answer is not None:
                return answer  # refused before a byte of the body was sent
        whole = False
        sent = 0
        try:
            for piece in self._pieces(request.body):
                if self._answered():
                    break
                if isinstance(piece, FileSpan):
                    self._send_span(piece, read_timeout)
                else:
                    self._send(piece)
                sent += len(piece)
            else:
                whole = True
        except (BrokenPipeError, ConnectionResetError):
            # A store that refuses in the middle answers and hangs up: its answer says more than the broken pipe.
            self._sock.settimeout(_LATE_ANSWER_SECONDS)
            try:
                answer = self._answer()
            except (OSError, NotHttp):
                answer = None
            if answer is None:
                raise
            answer.keep = False
            return answer
        if whole and sent != length:
            raise OSError(f"the body has {sent} bytes, {length} were announced")
        answer = self._answer()
        answer.keep = answer.keep and whole
        answer.silent = silent
        return answer

    def _await_continue(self, read_timeout: float | None) -> tuple[_Answer | None, bool]:
        """Wait for the server's leave to send the body; return the answer it gives instead, and if it was silent."""
        began = time.monotonic()
        try:
            while b"\r\n\r\n" not in self._received:
                left = _CONTINUE_SECONDS - (time.monotonic() - began)
                if left <= 0:
                    return None, True
                self._sock.settimeout(left)
                self._receive()
        except TimeoutError:
            return None, True  # a server that does not know the header just waits for the body
        finally:
            self._sock.settimeout(read_timeout)
        if self._received.startswith(_CONTINUE):
            self._until(b"\r\n\r\n", _MAX_HEAD_BYTES)
            return None, False
        answer = self._answer()
        answer.keep = False  # it may or may not still wait for the body
        return answer, False

    def _send(self, data: bytes | memoryview) -> None:
        # Not sendall: its time-out is for everything together, however slow the line.
        view = memoryview(data)
        while view:
            view = view[self._sock.send(view) :]

    def _pieces(self, body: Any) -> Iterator[FileSpan | memoryview]:
        spans = hasattr(body, "spans") and not isinstance(self._sock, ssl.SSLSocket)
        return body.spans() if spans else body.blocks()  # type: ignore[no-any-return]

    def _send_span(self, span: FileSpan, timeout: float | None) -> None:
        at, end = span.offset, span.offset + span.size
        while at < end:
            try:
                count = os.sendfile(self._sock.fileno(), span.fd, at, end - at)
            except BlockingIOError:
                self._await_room(timeout)
                continue
            except OSError as error:
                if error.errno in _BAD_DISK:
                    raise SendingStopped(unreadable(span.path, error)) from error
                if error.errno not in _NO_SENDFILE:
                    raise
                block = _read(span, at, end)
                self._send(block)
                count = len(block)
            if not count:
                raise OSError("the file became shorter while it was sent")
            at += count

    def _await_room(self, timeout: float | None) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLOUT)
        if not poll.poll(None if timeout is None else timeout * 1000):
            raise TimeoutError("the server takes no more bytes")

    def _receive(self) -> None:
        block = self._sock.recv(_RECEIVE)
        if not block:
            raise ConnectionResetError("the server closed the connection without an answer")
        self._received += block

    def _readable(self) -> bool:
        poll = select.poll()
        try:
            poll.register(self._sock, select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError):
            return True

    def _answered(self) -> bool:
        # Over TLS a session ticket makes the socket readable as well, so there it is only found out at the end.
        if isinstance(self._sock, ssl.SSLSocket):
            return False
        while self._received or self._readable():
            if not self._received:
                self._receive()
            if not self._received.startswith(_CONTINUE[: len(self._received)]):
                return True
            self._until(b"\r\n\r\n", _MAX_HEAD_BYTES)  # a late leave to go on
        return False

    def _answer(self) -> _Answer:
        while True:
            head = self._until(b"\r\n\r\n", _MAX_HEAD_BYTES)
            status, headers = _parse(head)
            if status >= 200:
                break
        keep = headers.get("connection", "").lower() != "close" and head.startswith(b"HTTP/1.1")
        if status in (204, 304):
            body = b""
        elif headers.get("transfer-encoding", "").lower() == "chunked":
            body = self._chunks()
        elif (length := headers.get("content-length")) is not None:
            if not length.isdigit() or int(length) > _MAX_BODY_BYTES:
                raise NotHttp(f"an answer of {length[:40]!r} bytes")
            body = self._exactly(int(length))
        else:
            body, keep = self._rest(), False
        return _Answer(status, headers, body, keep)

    def _until(self, mark: bytes, most: int) -> bytes:
        while (end := self._received.find(mark)) < 0:
            if len(self._received) > most:
                raise NotHttp("an answer without end")
            self._receive()
        return self._pop(end + len(mark))

    def _exactly(self, size: int) -> bytes:
        while len(self._received) < size:
            self._receive()
        return self._pop(size)

    def _pop(self, size: int) -> bytes:
        found = bytes(memoryview(self._received)[:size])
        del self._received[:size]
        return found

    def _chunks(self) -> bytes:
        body = bytearray()
        while True:
            line = self._until(b"\r\n", _MAX_HEAD_BYTES)
            try:
                size = int(line.partition(b";")[0], 16)
            except ValueError:
                raise NotHttp(f"a chunk of {line[:40]!r} bytes") from None
            if len(body) + size > _MAX_BODY_BYTES:
                raise NotHttp("an answer that is too long")
            if not size:
                while self._until(b"\r\n", _MAX_HEAD_BYTES) != b"\r\n":
                    pass  # trailers
                return bytes(body)
            body += self._exactly(size)
            self._until(b"\r\n", _MAX_HEAD_BYTES)

    def _rest(self) -> bytes:
        with contextlib.suppress(ConnectionResetError):
            while len(self._received) <= _MAX_BODY_BYTES:
                self._receive()
        return self._pop(len(self._received))


def _read(span: FileSpan, at: int, end: int) -> bytes:
    try:
        return os.pread(span.fd, min(end - at, _MOST_READ), at)
    except OSError as error:
        raise SendingStopped(unreadable(span.path, error)) from error


def _head(request: Any, url: Any, expect: bool) -> bytes:
    target = (url.path or "/") + (f"?{url.query}" if url.query else "")
    lines = [f"PUT {target} HTTP/1.1"]
    names = {name.lower() for name in request.headers}
    if "host" not in names:
        lines.append(f"Host: {url.netloc.rpartition('@')[2]}")
    if "accept-encoding" not in names:
        lines.append("Accept-Encoding: identity")
    for name, value in request.headers.items():
        if name.lower() != "expect" or expect:
            lines.append(f"{name}: {_text(value)}")
    head = "\r\n".join(lines)
    if head.count("\r\n") != len(lines) - 1 or head.count("\n") != len(lines) - 1:
        raise OSError("a header has a line end in it")
    return f"{head}\r\n\r\n".encode("latin-1")


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _parse(head: bytes) -> tuple[int, dict[str, str]]:
    first, *lines = head.decode("latin-1").split("\r\n")
    version, _, rest = first.partition(" ")
    if not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise NotHttp(f"an answer that begins with {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return int(rest[:3]), headers
