"""The one place that knows aiohttp: a session for each event loop, and what went wrong in our words.

What a server sends is bounded before memory is spent on it, and lines are split here: aiohttp's own limit is on a line,
and one event of a stream may hold the routes of a long answer.
"""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import email.utils
import logging
import ssl
import threading
import weakref
import zlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

import aiohttp
import aiohttp.http_exceptions
import attrs
import msgspec

from cwtrain._process import renew_after_fork
from cwtrain.config.network import ca_bundles, proxy_for
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.transport import NoAnswer, Reply, StreamedReply

__all__ = ["HttpTransport"]

log = logging.getLogger("cwtrain.rollout")

_CONNECT_TIMEOUT = 30.0
_MODELS_TIMEOUT = 30.0
_KEEP_ALIVE = 4.0
"""Idle connections end here first: uvicorn closes them after 5 seconds, just as they may be used again."""
_READ_BUFFER = 1 << 20
_MOST_BYTES = 512 << 20
"""Bytes of an answer, or of one event of a streamed one."""
_MOST_BYTES_OF_A_REFUSAL = 1 << 20
_MOST_BYTES_OF_A_NOTE = 1 << 12
_OTHER_FILES = 256
"""Files that a trainer's process has open besides."""
_THEIRS = (
    aiohttp.ClientError,
    aiohttp.http_exceptions.HttpProcessingError,
    ssl.SSLError,
    OSError,
    EOFError,
    ValueError,
    RuntimeError,
    zlib.error,
)
"""What aiohttp and what it stands on raise: a connection, a proxy, or an answer that is no HTTP."""
_QUEUE_HEADERS = ("prefill-queue-duration", "fireworks-prefill-queue-duration")


@attrs.frozen
class _Open:
    """A session, and the generator whose end closes it: the event loop ends its generators before it closes."""

    session: aiohttp.ClientSession
    keeper: AsyncGenerator[None, None]


class HttpTransport:
    """HTTP to one endpoint. May be used from several event loops and threads: each loop has a session of its own.

    The pool has no limit of its own: the sampler's window is the limit. So waiting for a slot never counts against the
    time of an answer. ``most_bytes`` bounds an answer, and each event of a streamed one. A session lives until its loop
    is shut down (``asyncio.run`` does that) or ``aclose`` is called.
    """

    def __init__(self, config: RolloutConfig, *, path: str = "completions", most_bytes: int = _MOST_BYTES) -> None:
        self._config, self._most = config, most_bytes
        self._url = f"{config.base_url}/{path}"
        self._proxy = proxy_for(config.base_url) if config.trust_env else None
        if config.base_url.startswith("https:"):
            ca_bundles()  # OpenSSL reads the variables itself, and says nothing about a bundle that is not there
        self._timeout = aiohttp.ClientTimeout(total=config.timeout, sock_connect=_CONNECT_TIMEOUT)
        self._open: dict[asyncio.AbstractEventLoop, _Open] = {}
        self._lock = threading.Lock()
        renew_after_fork(self, HttpTransport._leave)

    def _leave(self) -> object:
        """Forget the sessions of another process's event loops."""
        left, self._open, self._lock = self._open, {}, threading.Lock()
        return left

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Return the answer to one POST; a connection that was dead when it was used is not the end."""
        session, proxy = await self._session(), self._proxy_url
        again = True
        while True:
            progress = _Progress()
            try:
                with self._in_our_words(progress):
                    async with session.post(
                        self._url, data=body, headers=headers, allow_redirects=False, timeout=self._timeout, proxy=proxy
                    ) as response:
                        progress.answered = True
                        return _reply(response, await _body(response, self._most))
            except _Disconnected as exc:
                # The server may have closed it as it became idle, and aiohttp repeats no POST by itself. Once: should
                # the next one die as well, somebody is there who does not want this.
                if not again:
                    raise NoAnswer(str(exc)) from exc
                again = False

    async def models(self, headers: Mapping[str, str]) -> Reply:
        """Return the answer to a GET of the endpoint's models."""
        session = await self._session()
        progress = _Progress()
        timeout = attrs.evolve(self._timeout, total=min(self._config.timeout, _MODELS_TIMEOUT))
        try:
            with self._in_our_words(progress):
                async with session.get(
                    f"{self._config.base_url}/models", headers=headers, allow_redirects=False, timeout=timeout
                ) as response:
                    progress.answered = True
                    return _reply(response, await _body(response, self._most))
        except _Disconnected as exc:
            raise NoAnswer(str(exc)) from exc

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """Open a streamed answer; leaving the context closes the connection, which ends the work at the server."""
        session, proxy = await self._session(), self._proxy_url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT, sock_read=self._config.idle_timeout)
        progress = _Progress()
        with contextlib.ExitStack() as opened:
            try:
                with self._in_our_words(progress):
                    response = await session.post(
                        self._url, data=body, headers=headers, allow_redirects=False, timeout=timeout, proxy=proxy
                    )
                    # One that was read to its end has given its connection back; any other one is ended by this.
                    opened.callback(response.close)
                    opened.enter_context(_ends_with_its_connection(response))
                    progress.answered = True
                    streams = response.status == 200 and "event-stream" in response.headers.get("Content-Type", "")
                    whole = None if streams else _reply(response, await _body(response, self._most))
            except _Disconnected as exc:
                raise NoAnswer(str(exc)) from exc
            # Outside: what the caller raises over the events is the caller's.
            if whole is not None:
                yield StreamedReply(reply=whole, events=None)
            else:
                events = self._events(response, progress)
                yield StreamedReply(reply=None, events=events, queue_seconds=_queued(response))

    async def aclose(self) -> None:
        """Close the running event loop's session; a later request opens another one."""
        with self._lock:
            found = self._open.get(asyncio.get_running_loop())
        if found is not None:
            await found.keeper.aclose()

    async def _events(self, response: aiohttp.ClientResponse, progress: _Progress) -> AsyncIterator[bytes]:
        split, pieces = _Events(self._most), response.content.iter_any()
        while True:
            with self._in_our_words(progress):
                piece = await anext(pieces, None)
            for data in split.finish() if piece is None else split.feed(piece):
                yield data
            if split.done:
                return
            if piece is None:
                raise NoAnswer("the stream ended without its last event", cut=True)

    async def _session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        with self._lock:
            found = self._open.get(loop)
            closed = [other for other in self._open if other.is_closed()]
            orphans = [self._open.pop(other) for other in closed]
        for orphan in orphans:
            _discard(orphan.session)
        if found is not None and not found.session.closed:
            return found.session
        config = self._config
        _make_room_for(config.fixed_concurrency or config.concurrency_max * config.replicas)
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE, ttl_dns_cache=60),
            trust_env=False,  # which proxy it is was read above; a .netrc is nobody's business
            # Bodies are mostly digits of high entropy: inflating them costs more than reading them.
            headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
            read_bufsize=_READ_BUFFER,
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        keeper = _keep(self._open, loop, session)
        with self._lock:
            self._open[loop] = _Open(session, keeper)
        # A transport that is collected takes its sessions along: they are closed in their loop, where it still runs.
        weakref.finalize(self, _close_later, loop, session)
        await anext(keeper)
        return session

    @contextlib.contextmanager
    def _in_our_words(self, progress: _Progress) -> Iterator[None]:
        """Turn what aiohttp raises into ``NoAnswer``, or ``_Disconnected`` before the first byte of an answer."""
        config = self._config
        try:
            yield
        except (aiohttp.ConnectionTimeoutError, aiohttp.ServerTimeoutError) as exc:
            if progress.answered or isinstance(exc, aiohttp.SocketTimeoutError):
                raise NoAnswer(f"no byte within {config.idle_timeout:g} s", cut=True) from exc
            raise NoAnswer(f"no connection within {_CONNECT_TIMEOUT:g} s{self._proxied}") from exc
        except TimeoutError as exc:
            raise NoAnswer(f"no answer within {config.timeout:g} s", cut=True) from exc
        except _THEIRS as exc:
            words = f"{type(exc).__name__}: {str(exc) or 'no more is known'}"
            words = config.quoted(words if self._proxy is None else self._proxy.hide(words), limit=500)
            if progress.answered:
                raise NoAnswer(f"the answer was cut short ({words})", cut=True) from exc
            failed = f"the connection failed ({words}){self._proxied}"
            if isinstance(exc, aiohttp.ServerDisconnectedError) or (
                isinstance(exc, aiohttp.ClientOSError) and not isinstance(exc, aiohttp.ClientConnectorError)
            ):
                raise _Disconnected(failed) from exc
            raise NoAnswer(failed) from exc

    @property
    def _proxy_url(self) -> str | None:
        return None if self._proxy is None else self._proxy.url

    @property
    def _proxied(self) -> str:
        if self._proxy is None:
            return ""
        return f" (TRUST_ENV=1: it went through the proxy {self._proxy.host} of {self._proxy.source})"


class _Events:
    """The events of a stream (server-sent events): ``feed`` takes the network's pieces and gives what they complete.

    Comments and the events of other names (Dynamo's annotations, pings) are left out, an event ``error`` becomes an
    error's body. Raises ``NoAnswer`` for an event above ``most`` bytes. ``done`` after the last one, ``[DONE]``.
    """

    def __init__(self, most: int) -> None:
        self.done = False
        self._most = most
        self._begun = False
        self._parts: list[bytes] = []
        self._after_cr = False
        self._name = b""
        self._data: list[bytes] = []
        self._notes = bytearray()
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that end in this piece."""
        if not self._begun:
            self._begun, piece = True, piece.removeprefix(b"\xef\xbb\xbf")
        if self._after_cr:  # a CR LF that was cut apart is one end of a line
            self._after_cr, piece = not piece, piece.removeprefix(b"\n")
        if b"\n" not in piece and b"\r" not in piece:
            self._parts.append(piece)
            self._holds(self._size + len(piece))
            return []
        self._after_cr = piece.endswith(b"\r")
        lines = (b"".join(self._parts) + piece if self._parts else piece).splitlines()
        self._parts = [] if piece.endswith((b"\n", b"\r")) else [lines.pop()]
        found: list[bytes] = []
        for line in lines:
            if self._line(line, found):
                break
        self._holds(sum(map(len, self._data)) + sum(map(len, self._parts)))
        return found

    def finish(self) -> list[bytes]:
        """Return the data of an event that the end of the stream ends."""
        found: list[bytes] = []
        for line in (b"".join(self._parts), b""):
            if self._line(line, found):
                break
        return found

    def _holds(self, count: int) -> None:
        """Note how many bytes wait for the end of their event."""
        self._size = count
        if count > self._most:
            raise NoAnswer(f"an event of the stream is larger than {_size(self._most)}", cut=True)

    def _line(self, line: bytes, found: list[bytes]) -> bool:
        """Take one line, and say whether it was the stream's last."""
        if not line:
            if (data := self._ended()) is not None:
                found.append(data)
            return False
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"data":
            last = value.strip() == b"[DONE]"
            # No JSON goes on like this: the blank line between two events was left out.
            without_blank = self._data and self._data[-1].endswith(b"}") and (last or value.startswith(b"{"))
            if without_blank and (data := self._ended()) is not None:
                found.append(data)
            if last and not self._data:
                self.done = True
                return True
            self._data.append(value)
        elif field == b"event":
            self._name = value.strip()
        elif not field and len(self._notes) < _MOST_BYTES_OF_A_NOTE:
            self._notes += value[:_MOST_BYTES_OF_A_NOTE] + b"\n"
        return False

    def _ended(self) -> bytes | None:
        """Return the data of the event that a blank line ended, None where it is none for us."""
        name, data, notes = self._name, b"\n".join(self._data).strip(), bytes(self._notes).strip()
        self._name, self._data, self._notes = b"", [], bytearray()
        if name == b"error":
            return data if b'"error"' in data else msgspec.json.encode({"error": _text(data or notes)})
        # Some servers give every event a name: those that hold choices are meant.
        known = name in (b"", b"message") or b'"choices"' in data
        return data if data and known else None


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "replace") or "the stream ended with an error"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count} bytes"


@contextlib.contextmanager
def _ends_with_its_connection(response: aiohttp.ClientResponse) -> Iterator[None]:
    """Let reading end when the connection does.

    aiohttp closes it where a chunk's size is no number, and (3.14) leaves whoever reads waiting for the rest.
    """
    content, connection = response.content, response.connection

    def ended(future: asyncio.Future[None] | None = None) -> None:
        if future is not None and not future.cancelled():
            future.exception()
        if not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the connection ended in the middle of it"))

    if connection is None or connection.protocol is None:  # it was read to its end already
        yield
        return
    closed = getattr(connection.protocol, "closed", None)
    if closed is None:
        if not connection.protocol.is_connected():
            ended()
        yield
        return
    closed.add_done_callback(ended)
    try:
        yield
    finally:
        closed.remove_done_callback(ended)


async def _body(response: aiohttp.ClientResponse, most: int) -> bytes:
    """Return the body of an answer; raises ``NoAnswer`` above ``most`` bytes. Of a refusal only the start is read."""
    good = 200 <= response.status < 300
    limit = most if good else min(most, _MOST_BYTES_OF_A_REFUSAL)
    length, headers = response.content_length, response.headers
    plain = "Content-Encoding" not in headers and "Transfer-Encoding" not in headers
    if good and plain and length is not None and length <= limit:
        return await response.read()  # nearly all answers: aiohttp holds them to the length that they name
    pieces: list[bytes] = []
    size = length or 0 if good else 0
    if size <= limit:
        size = 0
        with _ends_with_its_connection(response):
            async for piece in response.content.iter_any():
                pieces.append(piece)
                size += len(piece)
                if size > limit:
                    break
    if good and size > limit:
        raise NoAnswer(f"the answer is larger than {_size(limit)}", cut=True)
    return b"".join(pieces)[:limit]


@attrs.define
class _Progress:
    answered: bool = False


class _Disconnected(Exception):
    """The connection ended before any byte of an answer."""


def _make_room_for(connections: int) -> None:
    """Raise this process's limit of open files as far as it may, where the window would run into it."""
    try:
        import resource
    except ImportError:  # no such limit on this system
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    except (OSError, ValueError):  # macOS allows less than its hard limit says
        allowed = soft
    log.debug("The limit of open files was %d and is %d", soft, allowed)
    if allowed < wanted:
        log.warning(
            "%d connections may be wanted, and this process may open %d files: raise the hard limit (ulimit -Hn)",
            connections,
            allowed,
        )


async def _keep(
    sessions: dict[asyncio.AbstractEventLoop, _Open], loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession
) -> AsyncGenerator[None, None]:
    """Wait for the end of the loop, and close its session then."""
    try:
        yield
    finally:
        sessions.pop(loop, None)
        await session.close()
        # Connections close one turn of the loop later; without this turn they would be collected open.
        await asyncio.sleep(0)


def _close_later(loop: asyncio.AbstractEventLoop, session: aiohttp.ClientSession) -> None:
    """Close a session that nobody can use any more, from wherever its owner was collected."""
    if session.closed:
        return
    if loop.is_running():
        closing = session.close()
        try:
            loop.call_soon_threadsafe(lambda: _CLOSING.add(asyncio.ensure_future(closing, loop=loop)))
        except RuntimeError:  # it was closed in this moment
            closing.close()
            _discard(session)
    else:
        _discard(session)


_CLOSING: weakref.WeakSet[asyncio.Future[None]] = weakref.WeakSet()


def _discard(session: aiohttp.ClientSession) -> None:
    """Let go of a session whose event loop was closed without a word; nobody is left to close its connections."""
    session.detach()


def _reply(response: aiohttp.ClientResponse, body: bytes) -> Reply:
    return Reply(
        status=response.status,
        body=body,
        retry_after=retry_after(response.headers.get("Retry-After")) if response.status >= 400 else None,
        queue_seconds=_queued(response),
        content_type=response.headers.get("Content-Type", ""),
    )


def _queued(response: aiohttp.ClientResponse) -> float | None:
    for name in _QUEUE_HEADERS:
        if (value := response.headers.get(name)) is not None:
            try:
                return max(0.0, float(value))
            except ValueError:
                return None
    return None


def retry_after(value: str | None) -> float | None:
    """Return a ``Retry-After`` in seconds, from a number or an HTTP date; nonsense gives None."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        try:
            when = email.utils.parsedate_to_datetime(value)
        except ValueError:
            return None
        if when.tzinfo is None:
            when = when.replace(tzinfo=dt.UTC)
        return max(0.0, (when - dt.datetime.now(dt.UTC)).total_seconds())
    return seconds if 0 <= seconds < float("inf") else None
