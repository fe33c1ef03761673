"""A real HTTP/1.1 server on loopback that answers by script, for what only a real socket shows.

    with ScriptedServer([Reply(drop="before"), Reply(200, {"deployment": ...})]) as server:
        InferenceClient("token", base_url=server.url)

Replies are used in turn, the last one again and again. ``server.requests`` lists what came in.
"""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

import attrs


@attrs.frozen
class Reply:
    """One answer. ``drop`` closes the connection before the answer, or in the middle of its body."""

    status: int = 200
    data: Any = attrs.field(factory=dict)
    headers: dict[str, str] = attrs.field(factory=dict)
    drop: Literal["", "before", "middle"] = ""

    @property
    def body(self) -> bytes:
        if isinstance(self.data, bytes):
            return self.data
        return self.data.encode() if isinstance(self.data, str) else json.dumps(self.data).encode()


@attrs.frozen
class Received:
    """One request that came in."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body) if self.body else None


class ScriptedServer:
    """A server for the length of a ``with`` block; with ``tls`` it speaks HTTPS."""

    def __init__(self, replies: Sequence[Reply], *, tls: ssl.SSLContext | None = None) -> None:
        self.requests: list[Received] = []
        self._replies = list(replies)
        self._lock = threading.Lock()
        script = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle(self) -> None:
                try:
                    super().handle()
                except OSError:  # the other side went away
                    pass

            def log_message(self, *args: object) -> None:
                pass

            def do_GET(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = script._next(Received(self.command, self.path, headers, self.rfile.read(length)))
                self._send(reply)

            do_POST = do_PATCH = do_DELETE = do_CONNECT = do_GET

            def _send(self, reply: Reply) -> None:
                if reply.drop == "before":
                    self._hang_up()
                    return
                self.send_response(reply.status)
                for name, value in {"Content-Type": "application/json", **reply.headers}.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                if reply.drop == "middle":
                    self.wfile.write(reply.body[: len(reply.body) // 2])
                    self._hang_up()
                    return
                self.wfile.write(reply.body)

            def _hang_up(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._scheme = "https" if tls else "http"
        if tls:
            self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
            self._server.handle_error = lambda request, address: None  # type: ignore[method-assign]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"{self._scheme}://127.0.0.1:{self.port}"

    def __enter__(self) -> ScriptedServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _next(self, request: Received) -> Reply:
        with self._lock:
            self.requests.append(request)
            return self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
