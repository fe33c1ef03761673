"""The data plane: large bodies go over sockets of our own. botocore does everything else about a request.

botocore makes the request, signs it, fires its events, repeats it and reads the answer, exactly as for any other call;
only its last step, ``http_session.send``, is taken over, and only for a PUT whose body gives itself in large blocks
(``blocks()``). So credentials are asked for at every attempt, a repeated request is signed anew, retries and their
jitter are botocore's, and a header that an event handler adds (server-side encryption, say) is sent like any other.

What is saved is the way of the bytes: no copies between small reads, one system call for a megabyte. Where a body says
which places of a file it is made of (``spans()``) and there is no TLS, the kernel sends them, and they are not copied.
"""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import select
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import attrs
from botocore.awsrequest import AWSResponse
from botocore.exceptions import (
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
    SSLError,
)
from botocore.httpsession import get_cert_path

from cwtrain.storage._part_bodies import FileSpan

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

__all__ = ["OwnSending", "send_with_own_sockets"]

_log = logging.getLogger("cwtrain.storage")

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


def send_with_own_sockets(client: S3Client) -> bool:
    """Let large bodies of ``client`` go over our own sockets, and return whether it is so.

    It is not where botocore is not built as it is known to be: then it sends everything itself.
    """
    endpoint: Any = getattr(client, "_endpoint", None)
    theirs: Any = getattr(endpoint, "http_session", None)
    known = all(hasattr(theirs, name) for name in ("send", "_verify", "_proxy_config", "_cert_file"))
    if not known:
        _log.debug("this botocore has no http session that is known: it sends everything itself")
        return False
    config = client.meta.config
    endpoint.http_session = OwnSending(
        theirs,
        connect_timeout=config.connect_timeout,
        read_timeout=config.read_timeout,
        keep_alive=bool(getattr(config, "tcp_keepalive", None)),
        most=config.max_pool_connections,
    )
    return True


class OwnSending:
    """Stands in for a botocore http session (``theirs``): takes over the PUT of large bodies, hands on the rest.

    Requests through a proxy and with a client certificate are handed on too. Threads share the connections.
    """

    def __init__(
        self,
        theirs: Any,
        *,
        connect_timeout: float | None,
        read_timeout: float | None,
        keep_alive: bool = False,
        most: int = 64,
    ) -> None:
        self.sent = 0
        """How many requests went over our own sockets."""
        self._theirs = theirs
        self._connect_timeout = connect_timeout
        self._read_timeout = read_timeout
        self._keep_alive = keep_alive
        self._most = most
        self._idle: dict[tuple[Any, ...], deque[_Connection]] = {}
        self._lock = threading.Lock()
        self._tls: ssl.SSLContext | None = None
        self._silent: set[tuple[Any, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    def send(self, request: Any) -> Any:
        """Send a prepared request and return botocore's response object. Raises botocore's own exceptions."""
        if not self._ours(request):
            return self._theirs.send(request)
        url = urlsplit(request.url)
        place = (os.getpid(), url.scheme, url.hostname, url.port)
        try:
            connection = self._take(place) or self._connect(url.scheme, url.hostname or "", url.port)
        except TimeoutError as error:
            raise ConnectTimeoutError(endpoint_url=request.url, error=error) from error
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=request.url, error=error) from error
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=request.url, error=error) from error
        try:
            answer = connection.put(request, url, self._read_timeout, wait=place not in self._silent)
        except TimeoutError as error:
            connection.close()
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
        except OSError as error:
            connection.close()
            raise ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from error
        except _NotHttp as error:
            connection.close()
            raise HTTPClientError(error=error) from error
        except BaseException:
            connection.close()
            raise
        if answer.silent:
            self._silent.add(place)
        self._put_back(place, connection, answer.keep)
        with self._lock:
            self.sent += 1
        return AWSResponse(request.url, answer.status, answer.headers, _Raw(answer.body))

    def close(self) -> None:
        """Close every idle connection, ours and theirs."""
        with self._lock:
            idle = [connection for line in self._idle.values() for connection in line]
            self._idle.clear()
        for connection in idle:
            connection.close()
        self._theirs.close()

    def __del__(self) -> None:
        for line in self._idle.values():
            for connection in line:
                connection.close()

    def _ours(self, request: Any) -> bool:
        return (
            request.method == "PUT"
            and hasattr(request.body, "blocks")
            and not request.headers.get("Transfer-Encoding")
            and self._theirs._cert_file is None
            and self._theirs._proxy_config.proxy_url_for(request.url) is None
            and request.url.startswith(("http://", "https://"))
        )

    def _take(self, place: tuple[Any, ...]) -> _Connection | None:
        while True:
            with self._lock:
                line = self._idle.get(place)
                connection = line.pop() if line else None
            if connection is None or connection.usable():
                return connection
            connection.close()

    def _put_back(self, place: tuple[Any, ...], connection: _Connection, keep: bool) -> None:
        if keep:
            with self._lock:
                line = self._idle.setdefault(place, deque())
                if len(line) < self._most:
                    line.append(connection)
                    return
        connection.close()

    def _connect(self, scheme: str, host: str, port: int | None) -> _Connection:
        plain = socket.create_connection((host, port or (443 if scheme == "https" else 80)), self._connect_timeout)
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._keep_alive:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock = self._context().wrap_socket(plain, server_hostname=host) if scheme == "https" else plain
        except BaseException:
            plain.close()
            raise
        return _Connection(sock)

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = _tls_context(self._theirs._verify)
            return self._tls


def _tls_context(verify: bool | str) -> ssl.SSLContext:
    """Return what botocore makes of ``verify``: True (its own bundle), the path of a bundle, or False."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if not verify:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    bundle = get_cert_path(verify)
    if os.path.isdir(bundle):
        context.load_verify_locations(capath=bundle)
    else:
        context.load_verify_locations(cafile=bundle)
    return context


class _NotHttp(Exception):
    """What came back cannot be read as an HTTP/1 answer."""


class _Raw(io.BytesIO):
    """An answer's body as botocore takes it."""

    def stream(self, amt: int = _RECEIVE, decode_content: bool | None = None) -> Iterator[bytes]:
        while block := self.read(amt):
            yield block


@attrs.define
class _Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    keep: bool
    """Whether the connection can be used again."""
    silent: bool = False
    """Whether the server left ``Expect: 100-continue`` without an answer."""


class _Connection:
    """One connection, used by one thread at a time."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._received = bytearray()

    def usable(self) -> bool:
        """Return whether an idle connection is still open: one that has something to say was closed, or is confused."""
        return not self._received and not self._readable()

    def close(self) -> None:
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
            except (OSError, _NotHttp):
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
                if error.errno not in _NO_SENDFILE:
                    raise
                block = os.pread(span.fd, min(end - at, _MOST_READ), at)
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
                raise _NotHttp(f"an answer of {length[:40]!r} bytes")
            body = self._exactly(int(length))
        else:
            body, keep = self._rest(), False
        return _Answer(status, headers, body, keep)

    def _until(self, mark: bytes, most: int) -> bytes:
        while (end := self._received.find(mark)) < 0:
            if len(self._received) > most:
                raise _NotHttp("an answer without end")
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
                raise _NotHttp(f"a chunk of {line[:40]!r} bytes") from None
            if len(body) + size > _MAX_BODY_BYTES:
                raise _NotHttp("an answer that is too long")
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
        raise _NotHttp(f"an answer that begins with {first[:60]!r}")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if colon:
            name, value = name.strip().lower(), value.strip()
            headers[name] = f"{headers[name]}, {value}" if name in headers else value
    return int(rest[:3]), headers
