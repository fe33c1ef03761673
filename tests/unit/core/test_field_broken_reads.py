"""An object whose bytes stop coming: read to its end by another request, or refused in our words, and never short."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from cwtrain.errors import TransportError
from cwtrain.storage import S3Store, s3_client

WHOLE = bytes(range(256)) * 1000


class Store:
    """Gives half of what is asked for, `broken` times, and then hangs up, with a reset or without one."""

    def __init__(self, *, broken: int, reset: bool) -> None:
        self.broken, self.reset = broken, reset
        self.ranges: list[str] = []
        self.url = ""

    def client(self) -> Any:
        keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "US-EAST-04A"}
        return s3_client(self.url, **keys)


@contextlib.contextmanager
def serving(store: Store) -> Iterator[Store]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            wanted = self.headers.get("Range", "bytes=0-")
            store.ranges.append(wanted)
            body = WHOLE[int(wanted.removeprefix("bytes=").partition("-")[0]) :]
            self.send_response(206 if "Range" in self.headers else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if len(store.ranges) > store.broken:
                self.wfile.write(body)
                return
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            self.close_connection = True
            if store.reset:
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    store.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_read_goes_on_where_it_broke(reset: bool) -> None:
    with serving(Store(broken=2, reset=reset)) as store:
        assert S3Store(store.client(), "weights").get("run/a") == WHOLE
    assert len(store.ranges) == 3


@pytest.mark.parametrize("reset", [False, True], ids=["closed", "reset"])
def test_a_read_that_always_breaks_is_told_in_our_words(reset: bool) -> None:
    with (
        serving(Store(broken=1000, reset=reset)) as store,
        pytest.raises(TransportError, match=r"GetObject on s3://weights/run/a failed"),
    ):
        S3Store(store.client(), "weights").get("run/a")
