"""The one place that knows aiohttp: a session for each event loop, and what went wrong in our words."""

from __future__ import annotations

import asyncio
import contextlib
import datetime as dt
import email.utils
import logging
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping

import aiohttp
import attrs

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
_OTHER_FILES = 256
"""Files that a trainer's process has open besides."""
_QUEUE_HEADERS = ("prefill-queue-duration", "fireworks-prefill-queue-duration")


@attrs.frozen
class _Open:
    """A session, and the generator whose end closes it: the event loop ends its generators before it closes."""

    session: aiohttp.ClientSession
    keeper: AsyncGenerator[None, None]


class HttpTransport:
    """HTTP to one endpoint. May be used from several event loops and threads: each loop has a session of its own.

    The pool has no limit of its own: the sampler's window is the limit. So waiting for a slot never counts against the
    time of an answer. A session lives until its loop is shut down (``asyncio.run`` does that) or ``aclose`` is called.
    """

    def __init__(self, config: RolloutConfig, *, path: str = "completions") -> None:
        self._config = config
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
                        return _reply(response, await response.read())
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
                    return _reply(response, await response.read())
        except _Disconnected as exc:
            raise NoAnswer(str(exc)) from exc

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """Open a streamed answer; leaving the context closes the connection, which ends the work at the server."""
        session, proxy = await self._session(), self._proxy_url
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_TIMEOUT, sock_read=self._config.idle_timeout)
        progress = _Progress()
        try:
            with self._in_our_words(progress):
                async with session.post(
                    self._url, data=body, headers=headers, allow_redirects=False, timeout=timeout, proxy=proxy
                ) as response:
                    progress.answered = True
                    if response.status != 200 or "event-stream" not in response.headers.get("Content-Type", ""):
                        yield StreamedReply(reply=_reply(response, await response.read()), events=None)
                        return
                    events = self._events(response, progress)
                    yield StreamedReply(reply=None, events=events, queue_seconds=_queued(response))
        except _Disconnected as exc:
            raise NoAnswer(str(exc)) from exc

    async def aclose(self) -> None:
        """Close the running event loop's session; a later request opens another one."""
        with self._lock:
            found = self._open.get(asyncio.get_running_loop())
        if found is not None:
            await found.keeper.aclose()

    async def _events(self, response: aiohttp.ClientResponse, progress: _Progress) -> AsyncIterator[bytes]:
        with self._in_our_words(progress):
            async for line in response.content:
                if line.startswith(b"data:"):
                    data = line[5:].strip()
                    if data == b"[DONE]":
                        return
                    yield data
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
        except (aiohttp.ClientError, ssl.SSLError) as exc:
            words = f"{type(exc).__name__}: {str(exc) or 'no more is known'}"
            words = config.quoted(words if self._proxy is None else self._proxy.hide(words), 500)
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
