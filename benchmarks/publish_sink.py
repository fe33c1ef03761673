"""The service for measuring publishes: a bucket that keeps what it gets, and an API that completes every hot-load.

It prints the ports of the bucket and of the API, and serves until its standard input ends.
"""

from __future__ import annotations

import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from upload_sink import Sink, serve_until_stdin_ends

PREFIX = "/v1alpha1/inference"
DEPLOYMENT = {
    "spec": {
        "id": "d",
        "name": "bench",
        "gatewayIds": [],
        "runtime": {"engine": "dynamo-vllm"},
        "model": {"name": "bench"},
        "hotLoad": {"bucket": "bench", "pathPrefix": "rl"},
    },
    "status": {"status": "STATUS_READY"},
}


class Service:
    """The API's state: hot-loads, newest first. The identity `v0` was hot-loaded before."""

    def __init__(self) -> None:
        self.hot_loads: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.answer(
            "POST", "/hotLoads", {"id": "h0", "deploymentId": "d", "identity": "v0", "type": "SNAPSHOT_TYPE_FULL"}
        )

    def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Return status and answer."""
        words = path.strip("/").split("/")
        if words[0] == "deployments":
            return 200, {"deployment": DEPLOYMENT} if len(words) > 1 else {"items": [DEPLOYMENT]}
        if words[0] != "hotLoads":
            return 404, {"code": 5, "message": f"no such path {path}"}
        if method == "POST":
            spec = {**body, "id": body.get("id") or body.get("hotLoadId")}
            stamp = "2026-01-01T00:00:00Z"
            status = {"state": "HOT_LOAD_STATE_COMPLETED", "createdAt": stamp, "updatedAt": stamp, "finishedAt": stamp}
            made = {"spec": spec, "status": status}
            with self.lock:
                self.hot_loads.insert(0, made)
            return 200, {"hotLoad": made}
        if len(words) == 1:
            return 200, {"hotLoads": self.hot_loads}
        found = next(one for one in self.hot_loads if one["spec"]["id"] == words[1])
        if len(words) == 2:
            return 200, {"hotLoad": found}
        replica = {"name": "r0", "zone": "z", "state": "READY", "currentSnapshotIdentity": found["spec"]["identity"]}
        return 200, {"replicas": [replica]}


def handler(service: Service) -> type[BaseHTTPRequestHandler]:
    """Return what answers the API's requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # head and body are two writes: the second would wait 40 ms for the first's ACK

        def _serve(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            status, answer = service.answer(self.command, urlsplit(self.path).path.removeprefix(PREFIX), body)
            data = json.dumps(answer).encode()
            self.send_response_only(status)
            self.send_header("Date", self.date_time_string())
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = _serve

        def log_message(self, *args: Any) -> None:
            """Say nothing."""

    return Handler


def main() -> None:
    """Serve on free ports of loopback."""
    sink = Sink(kept_bytes=1 << 40)
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    api = ThreadingHTTPServer(("127.0.0.1", 0), handler(Service()))
    api.daemon_threads = True
    print(listener.getsockname()[1], api.server_port, flush=True)
    threading.Thread(target=api.serve_forever, args=(0.05,), daemon=True).start()

    serve_until_stdin_ends(sink, listener)


if __name__ == "__main__":
    main()
