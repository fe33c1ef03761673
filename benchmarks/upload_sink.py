"""An S3 server that throws bytes away, for measuring clients: python upload_sink.py [CERTIFICATE KEY]

With `--bytes-per-second N` no connection takes more than that. It prints its port and serves until its standard input
ends. It knows what an upload asks for (conditional PUT, multipart, metadata, listings of one page), keeps sizes and
metadata, and the bytes of small objects only.
"""

from __future__ import annotations

import os
import socket
import ssl
import sys
import threading
import time
from typing import NoReturn
from urllib.parse import parse_qs, unquote, urlsplit

KEPT_BYTES = 1 << 20
BLOCK = 1 << 20
PACED_BYTES = 256 << 10


class Sink:
    """The state: objects by key, as (size, metadata, bytes up to ``kept_bytes``), and what is in open uploads."""

    def __init__(self, kept_bytes: int = KEPT_BYTES, bytes_per_second: int = 0) -> None:
        self.kept_bytes = kept_bytes
        self.bytes_per_second = bytes_per_second
        self.objects: dict[str, tuple[int, dict[str, str], bytes]] = {}
        self.uploads: dict[str, tuple[dict[str, str], dict[int, tuple[int, bytes]]]] = {}
        self.lock = threading.Lock()

    def serve(self, sock: socket.socket) -> None:
        """Answer the requests of one connection."""
        buffer = bytearray()
        scratch = memoryview(bytearray(BLOCK))
        while True:
            while (end := buffer.find(b"\r\n\r\n")) < 0:
                size = sock.recv_into(scratch)
                if not size:
                    return
                buffer += scratch[:size]
            first, *lines = bytes(buffer[:end]).decode("latin-1").split("\r\n")
            del buffer[: end + 4]
            method, target, _ = first.split(" ")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            if headers.get("expect"):
                sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            kept = bytearray()
            if headers.get("transfer-encoding") == "chunked":
                while chunk := int(_line(sock, buffer), 16):
                    if not _drop(sock, buffer, scratch, chunk + 2, None):
                        return
                _line(sock, buffer)
                length = int(headers.get("x-amz-decoded-content-length", 0))
            else:
                length = int(headers.get("content-length", 0))
                began = time.perf_counter()
                for begin in range(0, length, PACED_BYTES if self.bytes_per_second else max(1, length)):
                    size = min(PACED_BYTES, length - begin) if self.bytes_per_second else length
                    if not _drop(sock, buffer, scratch, size, kept if length <= self.kept_bytes else None):
                        return
                    if self.bytes_per_second:
                        due = (begin + size) / self.bytes_per_second
                        time.sleep(max(0.0, began + due - time.perf_counter()))
            with self.lock:
                status, extra, body = self.answer(method, target, headers, length, bytes(kept))
            head = f"HTTP/1.1 {status} X\r\n" + "".join(f"{name}: {value}\r\n" for name, value in extra.items())
            if "Content-Length" not in extra:
                head += f"Content-Length: {len(body)}\r\n"
            sock.sendall(head.encode() + b"\r\n" + (b"" if method == "HEAD" else body))

    def answer(
        self, method: str, target: str, headers: dict[str, str], length: int, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        """Do what is asked for and return status, headers and body."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        key = unquote(url.path).lstrip("/").partition("/")[2]
        upload_id = query.get("uploadId", "")
        metadata = {name: value for name, value in headers.items() if name.startswith("x-amz-meta-")}
        if method == "GET" and not key:
            prefix = query.get("prefix", "")
            found = "".join(
                f"<Contents><Key>{name}</Key><Size>{one[0]}</Size></Contents>"
                for name, one in sorted(self.objects.items())
                if name.startswith(prefix)
            )
            return 200, {}, f"<R><IsTruncated>false</IsTruncated>{found}</R>".encode()
        if method == "POST" and "uploads" in query:
            upload_id = f"u{len(self.uploads)}"
            self.uploads[upload_id] = (metadata, {})
            return 200, {}, f"<R><UploadId>{upload_id}</UploadId></R>".encode()
        if method == "POST":
            metadata, parts = self.uploads.pop(upload_id)
            size = sum(length for length, _ in parts.values())
            self.objects[key] = (size, metadata, b"".join(parts[number][1] for number in sorted(parts)))
            return 200, {}, b'<R><ETag>"0"</ETag></R>'
        if method == "PUT" and upload_id:
            self.uploads[upload_id][1][int(query["partNumber"])] = (length, body)
            return 200, {"ETag": '"0"'}, b""
        if method == "PUT":
            if headers.get("if-none-match") == "*" and key in self.objects:
                return 412, {}, b"<Error><Code>PreconditionFailed</Code></Error>"
            self.objects[key] = (length, metadata, body)
            return 200, {"ETag": '"0"'}, b""
        if method == "DELETE":
            self.uploads.pop(upload_id, None)
            return 204, {}, b""
        if key not in self.objects:
            return 404, {}, b"<Error><Code>NoSuchKey</Code></Error>"
        size, metadata, body = self.objects[key]
        return 200, {**metadata, "Content-Length": str(size if method == "HEAD" else len(body))}, body


def _line(sock: socket.socket, buffer: bytearray) -> bytes:
    while (end := buffer.find(b"\r\n")) < 0:
        block = sock.recv(65536)
        if not block:
            raise ConnectionError("the client hung up")
        buffer += block
    line = bytes(buffer[:end])
    del buffer[: end + 2]
    return line


def _drop(sock: socket.socket, buffer: bytearray, scratch: memoryview, left: int, kept: bytearray | None) -> bool:
    """Take ``left`` bytes off the connection, into ``kept`` if there is one; False when the client hung up."""
    part = buffer[:left]
    del buffer[:left]
    left -= len(part)
    if kept is not None:
        kept += part
    while left:
        size = sock.recv_into(scratch[: min(left, BLOCK)])
        if not size:
            return False
        if kept is not None:
            kept += scratch[:size]
        left -= size
    return True


def serve_until_stdin_ends(sink: Sink, listener: socket.socket, context: ssl.SSLContext | None = None) -> NoReturn:
    """Answer everyone who connects, over TLS with ``context``; end the process with its standard input."""

    def serve(plain: socket.socket) -> None:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            sink.serve(context.wrap_socket(plain, server_side=True) if context else plain)
        except OSError:
            pass
        finally:
            plain.close()

    def accept() -> None:
        while True:
            threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()
    os._exit(0)


def main(arguments: list[str]) -> None:
    """Serve on a free port of loopback."""
    context, pace = None, 0
    if "--bytes-per-second" in arguments:
        at = arguments.index("--bytes-per-second")
        pace = int(arguments[at + 1])
        del arguments[at : at + 2]
    if arguments:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*arguments)
    sink = Sink(bytes_per_second=pace)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)

    serve_until_stdin_ends(sink, listener, context)


if __name__ == "__main__":
    main(sys.argv[1:])
