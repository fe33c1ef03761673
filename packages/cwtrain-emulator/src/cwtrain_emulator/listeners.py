"""The ports of the API and of the gateways: one server for each, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from cwtrain_emulator.api.edge import Edge
from cwtrain_emulator.faults import FaultBook
from cwtrain_emulator.gateway.app import Gateway, gateway_app
from cwtrain_emulator.http_faults import Faulty, HangUpProtocol
from cwtrain_emulator.page.activity import Activity, Watched
from cwtrain_emulator.s3.client import is_loopback

__all__ = ["PortListeners", "bind"]


class _Server(uvicorn.Server):
    """A uvicorn server that leaves signals alone: several of them share this process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do nothing; `serve` handles the signals."""
        yield

    def install_signal_handlers(self) -> None:
        """Do nothing (older versions call this)."""


class PortListeners:
    """One server per port, on this event loop."""

    def __init__(self, host: str, activity: Activity, faults: FaultBook) -> None:
        self._host = host
        self._faults = faults
        self._activity = activity
        self._gateway: Gateway | None = None
        self._running: dict[str, tuple[_Server, asyncio.Task[None], int]] = {}

    def attach(self, gateway: Gateway) -> None:
        """Say what the gateways' ports serve."""
        self._gateway = gateway

    def open(self, gateway_id: str, preferred_port: int | None) -> int:
        """Listen for a gateway, if that is not done already, and return the port."""
        if gateway_id not in self._running:
            assert self._gateway is not None
            self.listen(gateway_id, gateway_app(self._gateway, gateway_id), bind(self._host, preferred_port))
        return self._running[gateway_id][2]

    def close(self, gateway_id: str) -> None:
        """Listen for it no more."""
        running = self._running.pop(gateway_id, None)
        if running is not None:
            running[0].should_exit = True

    def listen(self, name: str, app: ASGIApp, sock: socket.socket) -> None:
        """Serve `app` on a bound socket."""
        config = uvicorn.Config(
            Edge(Watched(Faulty(app, self._faults), self._activity), loopback_only=is_loopback(self._host)),
            http=HangUpProtocol,
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            ws="none",
            timeout_graceful_shutdown=1,
            server_header=False,
        )
        server = _Server(config)
        task = asyncio.create_task(server.serve(sockets=[sock]))
        self._running[name] = (server, task, sock.getsockname()[1])

    async def stop(self) -> None:
        """End all servers, open connections included."""
        running = list(self._running.values())
        self._running.clear()
        for server, _, _ in running:
            server.should_exit = server.force_exit = True
        await asyncio.gather(*(task for _, task, _ in running), return_exceptions=True)


def bind(host: str, port: int | None) -> socket.socket:
    """Return a listening socket: on `port`, if one is given and it is free, else on any. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for candidate in [port, 0] if port else [0]:
        # The protocol is named because asyncio turns Nagle's algorithm off only where it is.
        sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
        if os.name == "posix":
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, candidate))
            sock.listen(2048)
        except OSError:
            sock.close()
            continue
        return sock
    raise OSError(f"cannot listen on {host}: it is no address of this machine, or all its ports are taken")
