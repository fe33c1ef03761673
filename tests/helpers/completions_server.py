"""A scripted `/v1/completions` server on loopback: answers in turn, then good ones; every request is recorded."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Body = dict[str, Any]


def choice(index: int, tokens: Sequence[int] = (7, 8), /, **changes: Any) -> Body:
    """One good choice; `changes` replace its fields, and a field changed to `...` is left out."""
    made: Body = {
        "index": index,
        "text": f"t{index}",
        "finish_reason": "stop",
        "token_ids": list(tokens),
        "logprobs": {"tokens": ["t"] * len(tokens), "token_logprobs": [-0.5] * len(tokens)},
        **changes,
    }
    return {name: value for name, value in made.items() if value is not ...}


def answer(*choices: Body, prompt_tokens: int | None = None, **more: Any) -> Body:
    """One answer with these choices."""
    made: Body = {"id": "cmpl-1", "object": "text_completion", "model": "m", "choices": list(choices), **more}
    if prompt_tokens is not None:
        made["usage"] = {"prompt_tokens": prompt_tokens, "completion_tokens": 99}
    return made


def good(request: Body) -> Body:
    """What a well-behaved server answers to `request`: choice i has the tokens (100 + seed, i)."""
    seed = request.get("seed", 0) % 1000
    choices = [choice(i, (100 + seed, i)) for i in range(request["n"])]
    return answer(*choices, prompt_tokens=len(request["prompt"]))


class Raw:
    """A scripted answer below JSON: status, headers, bytes; `cut` closes in the middle, `drop` without an answer."""

    def __init__(
        self,
        status: int = 200,
        body: bytes | str = b"",
        *,
        headers: dict[str, str] | None = None,
        cut: bool = False,
        drop: bool = False,
    ) -> None:
        self.status, self.headers, self.cut, self.drop = status, headers or {}, cut, drop
        self.body = body.encode() if isinstance(body, str) else body


Answer = Body | Raw | Callable[[Body], "Body | Raw"]


class CompletionsServer:
    """Gives `script` in turn, then what `rest` says.

    `requests` and `headers` hold what came in, `connections` how many there were, `peak` how many were in work; with
    `together` no answer is given before so many are.
    """

    def __init__(self, *script: Answer, rest: Answer = good, together: int = 0) -> None:
        self.script, self.rest = list(script), rest
        self.requests: list[Body] = []
        self.headers: list[dict[str, str]] = []
        self.running = self.peak = self.connections = 0
        self._lock = threading.Lock()
        self._barrier = threading.Barrier(together) if together else None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                outer.connections += 1
                super().setup()

            def do_POST(self) -> None:
                outer._serve(self)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 512

            def handle_error(self, *_: object) -> None:
                """A client that goes away is part of some tests."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self.origin = f"http://127.0.0.1:{self._server.server_address[1]}"
        self.url = f"{self.origin}/v1"

    def __enter__(self) -> CompletionsServer:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _serve(self, handler: BaseHTTPRequestHandler) -> None:
        body = handler.rfile.read(int(handler.headers.get("Content-Length") or 0))
        request: Body = json.loads(body)
        with self._lock:
            self.requests.append(request)
            self.headers.append({name.lower(): value for name, value in handler.headers.items()})
            step = self.script.pop(0) if self.script else self.rest
            self.running += 1
            self.peak = max(self.peak, self.running)
        try:
            if self._barrier:
                self._barrier.wait(timeout=30)
            made = step(request) if callable(step) else step
            reply = made if isinstance(made, Raw) else Raw(200, json.dumps(made))
        finally:
            with self._lock:
                self.running -= 1
        if handler.path != "/v1/completions":
            reply = Raw(404, "no such path")
        if reply.drop:
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.send_response(reply.status)
        for name, value in {"Content-Type": "application/json", **reply.headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(reply.body)))
        handler.end_headers()
        if reply.cut:
            handler.wfile.write(reply.body[: len(reply.body) // 2])
            handler.wfile.flush()
            handler.close_connection = True
            handler.connection.shutdown(socket.SHUT_RDWR)
            return
        handler.wfile.write(reply.body)
