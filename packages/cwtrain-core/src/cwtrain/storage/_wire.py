"""The data plane: large bodies go over sockets of our own. botocore does everything else about a request.

botocore makes the request, signs it, fires its events, repeats it and reads the answer, exactly as for any other call;
only its last step, ``http_session.send``, is taken over, and only for a PUT whose body gives itself in large blocks
(``blocks()``). So credentials are asked for at every attempt, a repeated request is signed anew, retries and their
jitter are botocore's, and a header that an event handler adds (server-side encryption, say) is sent like any other.

What is saved is the way of the bytes: no copies between small reads, one system call for a megabyte. Where a body says
which places of a file it is made of (``spans()``) and there is no TLS, the kernel sends them, and they are not copied.
"""

from __future__ import annotations

import io
import logging
import os
import socket
import ssl
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from botocore.awsrequest import AWSResponse
from botocore.exceptions import (
    ClientError,
    ConnectionClosedError,
    ConnectTimeoutError,
    EndpointConnectionError,
    HTTPClientError,
    ReadTimeoutError,
    SSLError,
)
from botocore.httpsession import get_cert_path

from cwtrain._waiting import passes
from cwtrain.storage._connection import Connection, NotHttp
from cwtrain.storage._limits import seconds_at_most, unlimited, watched
from cwtrain.storage._translate import translate

if TYPE_CHECKING:
    from types_boto3_s3.client import S3Client

__all__ = ["OwnSending", "hang_up_in_time", "leave_connections", "send_with_own_sockets"]

_log = logging.getLogger("cwtrain.storage")

_RECEIVE = 64 << 10


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


def leave_connections(client: S3Client) -> Any:
    """Give up the connections of ``client``, which are the parent's of a forked process; return what they hang on.

    A client that is not built as botocore's is known to be keeps them.
    """
    endpoint: Any = getattr(client, "_endpoint", None)
    session: Any = getattr(endpoint, "http_session", None)
    left = [session]
    if isinstance(session, OwnSending):
        left.append(session.leave())
        session = session.theirs
    pools: Any = getattr(session, "_manager", None)
    if hasattr(session, "_proxy_managers") and hasattr(pools, "pool_classes_by_scheme"):
        fresh = type(pools)(**session._get_pool_manager_kwargs())
        fresh.pool_classes_by_scheme = pools.pool_classes_by_scheme
        left += [pools, session._proxy_managers]
        session._manager, session._proxy_managers = fresh, {}
    credentials: Any = getattr(getattr(client, "_request_signer", None), "_credentials", None)
    if hasattr(credentials, "_refresh_lock"):
        credentials._refresh_lock = threading.Lock()
    return left


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
        self._begin()
        self._tls: ssl.SSLContext | None = None
        self._silent: set[tuple[Any, ...]] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._theirs, name)

    @property
    def theirs(self) -> Any:
        """The botocore session that it stands in for."""
        return self._theirs

    def leave(self) -> Any:
        """Give up connections that are another process's, and return them."""
        self._at_the_end.detach()
        left = self._idle
        self._begin()
        return left

    def _begin(self) -> None:
        self._idle: dict[tuple[Any, ...], deque[Connection]] = {}
        self._lock = threading.Lock()
        # Also for who never calls close(). No __del__: a client is a cycle, and its sockets may be collected before it.
        self._at_the_end = weakref.finalize(self, _close_all, self._idle)
        self._at_the_end.atexit = False

    def send(self, request: Any) -> Any:
        """Send a prepared request and return botocore's response object. Raises botocore's own exceptions."""
        if not self._ours(request):
            return self._theirs.send(request)
        url = urlsplit(request.url)
        place = (url.scheme, url.hostname, url.port)
        try:
            connection = self._take(place) or self._connect(url.scheme, url.hostname or "", url.port)
        except TimeoutError as error:
            raise ConnectTimeoutError(endpoint_url=request.url, error=error) from error
        except ssl.SSLError as error:
            raise SSLError(endpoint_url=request.url, error=error) from error
        except OSError as error:
            raise EndpointConnectionError(endpoint_url=request.url, error=error) from error
        try:
            watched(connection.line)
            silence = seconds_at_most(self._read_timeout)
            answer = connection.put(request, url, silence, wait=place not in self._silent)
        except TimeoutError as error:
            connection.close()
            raise ReadTimeoutError(endpoint_url=request.url, error=error) from error
        except OSError as error:
            connection.close()
            raise ConnectionClosedError(endpoint_url=request.url, request=request, error=error) from error
        except NotHttp as error:
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
            idle = dict(self._idle)
            self._idle.clear()
        _close_all(idle)
        self._theirs.close()

    def _ours(self, request: Any) -> bool:
        return (
            request.method == "PUT"
            and hasattr(request.body, "blocks")
            and not request.headers.get("Transfer-Encoding")
            and self._theirs._cert_file is None
            and self._theirs._proxy_config.proxy_url_for(request.url) is None
            and request.url.startswith(("http://", "https://"))
        )

    def _take(self, place: tuple[Any, ...]) -> Connection | None:
        while True:
            with self._lock:
                line = self._idle.get(place)
                connection = line.pop() if line else None
            if connection is None or connection.usable():
                return connection
            connection.close()

    def _put_back(self, place: tuple[Any, ...], connection: Connection, keep: bool) -> None:
        if keep:
            with self._lock:
                line = self._idle.setdefault(place, deque())
                if len(line) < self._most:
                    line.append(connection)
                    return
        connection.close()

    def _connect(self, scheme: str, host: str, port: int | None) -> Connection:
        address = (host, port or (443 if scheme == "https" else 80))
        plain = socket.create_connection(address, seconds_at_most(self._connect_timeout))
        try:
            plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._keep_alive:
                plain.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            sock = self._context().wrap_socket(plain, server_hostname=host) if scheme == "https" else plain
        except BaseException:
            plain.close()
            raise
        return Connection(sock)

    def _context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = _tls_context(self._theirs._verify)
            return self._tls


def _close_all(idle: Mapping[tuple[Any, ...], deque[Connection]]) -> None:
    for line in idle.values():
        for connection in line:
            connection.close()


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


def hang_up_in_time(client: Any) -> None:
    """Let the requests of a boto3 client be hung up when a limit is over, and let who set it make them again.

    Within a limit botocore makes one try: it would pause without looking at the time that is left. Where botocore is
    not built as it is known to be, only the time-outs of the client's configuration end a request.
    """
    client.meta.events.register_first("needs-retry.s3", _leave_it_to_us, unique_id="cwtrain-limits")
    session = getattr(getattr(client, "_endpoint", None), "http_session", None)
    theirs = getattr(session, "_theirs", session)
    pools = getattr(theirs, "_pool_classes_by_scheme", None)
    if not isinstance(pools, dict):
        return
    for scheme, pool in pools.items():
        kind = getattr(pool, "ConnectionCls", None)
        if kind is not None and not getattr(kind, "cwtrain_watched", False):
            watched_kind = type(kind.__name__, (_WatchedConnection, kind), {})
            pools[scheme] = type(pool.__name__, (pool,), {"ConnectionCls": watched_kind})


class _WatchedConnection:
    """Beside botocore's connection: its socket is known to the watch, and its time-outs end with the limit."""

    cwtrain_watched = True

    def connect(self: Any) -> Any:
        self.timeout = seconds_at_most(self.timeout)
        done = super().connect()  # type: ignore[misc]
        watched(self.sock)
        return done

    def request(self: Any, *args: Any, **kwargs: Any) -> Any:
        watched(self.sock)
        return super().request(*args, **kwargs)  # type: ignore[misc]

    def getresponse(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.timeout = seconds_at_most(self.timeout)
        if self.sock is not None and isinstance(self.timeout, (int, float)):
            self.sock.settimeout(self.timeout)
        return super().getresponse(*args, **kwargs)  # type: ignore[misc]


def _leave_it_to_us(
    response: Any = None, caught_exception: Exception | None = None, operation: Any = None, **_: Any
) -> None:
    """Raise what botocore would look at to repeat the request, where this thread has a limit."""
    if unlimited():
        return
    if caught_exception is not None:
        raise caught_exception
    if response is not None and response[0].status_code >= 300:
        refused = ClientError(response[1], operation.name)
        if passes(translate(refused)):
            raise refused


class _Raw(io.BytesIO):
    """An answer's body as botocore takes it."""

    def stream(self, amt: int = _RECEIVE, decode_content: bool | None = None) -> Iterator[bytes]:
        while block := self.read(amt):
            yield block
