"""The one place that knows httpx: connections, TLS, proxies, headers, time limits, and JSON in and out."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import ssl
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

import attrs
import httpx

from cwtrain._process import renew_after_fork
from cwtrain.config.api import ApiConfig, is_loopback, is_secret
from cwtrain.config.network import Proxy, ca_bundles, hide_user_info, proxy_for
from cwtrain.errors import (
    ConfigError,
    ConnectionFailedError,
    RequestTimeoutError,
    TransportError,
    UnexpectedAnswerError,
)
from cwtrain.infra._retry import RetryPolicy
from cwtrain.infra._status import Scrubber, error_from_answer, quote, request_id_of
from cwtrain.waits import waiting

__all__ = ["PREFIX", "Http", "Limits", "Transport"]

PREFIX = "/v1alpha1/inference"
"""Where the service lives under its origin."""

LARGEST_ANSWER_BYTES = 256 * 2**20
LARGEST_REFUSAL_BYTES = 2**20
_IDLE_SECONDS = 4.0  # below the 5 s after which common servers close: we drop an idle connection first

Transport = httpx.BaseTransport
"""What a test may put in place of the network."""

Query = Mapping[str, str | int | Sequence[str]]

logger = logging.getLogger("cwtrain.infra")

# A line for each request, at a level that trainers show: who wants them sets a level of the logger's own.
if (_their_log := logging.getLogger("httpx")).level == logging.NOTSET:
    _their_log.setLevel(logging.WARNING)


@attrs.frozen(kw_only=True)
class Limits:
    """How long one call may take: ``timeout`` seconds for each try, and the policy for more tries."""

    timeout: float = 30.0
    retry: RetryPolicy = attrs.field(factory=RetryPolicy)

    def within(self, seconds: float, *, retries: bool = True) -> Limits:
        """Return the limits of a call that is over within about ``seconds``."""
        budget = min(self.retry.seconds, seconds) if retries else 0.0
        timeout = min(self.timeout, max(seconds, 1.0))  # a try of no time at all could never succeed
        return attrs.evolve(self, timeout=timeout, retry=attrs.evolve(self.retry, seconds=budget))


class Http:
    """JSON calls to one origin, with one pool of connections. Safe to use from several threads."""

    def __init__(
        self,
        config: ApiConfig,
        *,
        transport: Transport | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        token = config.token or ""
        self.base_url = config.base_url
        self._clock = clock
        self._token_source = config.token_source
        self._token_quoted = len(token) > 1 and token[0] == token[-1] and token[0] in "\"'"
        given = [(name, value) for name, value in config.headers.items() if len(value) >= 8]
        self._scrub = Scrubber(
            [token, *(value for name, value in given if is_secret(name))], whole=[value for _, value in given]
        )
        loopback = is_loopback(config.base_url)
        self._closed = False
        self._missing = config.missing
        if urlsplit(config.base_url).scheme == "http" and not loopback:
            logger.warning("%s is not encrypted: the token can be read on the way", config.base_url)
        if config.verify is False:
            logger.warning("TLS checks are off for %s", config.base_url)
        # Certificates take 30 ms to load: not where nothing is encrypted (loopback has no proxy either).
        needs_tls = transport is None and (not loopback or urlsplit(config.base_url).scheme == "https")
        headers = {
            "Accept": "application/json",
            "User-Agent": f"cwtrain/{version('cwtrain-core')} python/{platform.python_version()}",
            **config.headers,
            "Authorization": f"Bearer {token}",
        }
        tls = _tls(config.verify) if needs_tls else False
        self._proxy: Proxy | None = None
        if transport is None and not loopback:
            self._proxy = proxy_for(config.base_url, schemes=_proxy_schemes())
        self._connect = functools.partial(
            _connected, headers, tls, transport, None if self._proxy is None else self._proxy.url
        )
        self._client: httpx.Client | None
        try:
            self._open()
        except (ValueError, ImportError, httpx.InvalidURL) as exc:
            raise ConfigError(
                f"cannot set up connections to {config.base_url}: {self._hidden(exc)}",
                hint="check HTTPS_PROXY, HTTP_PROXY and ALL_PROXY, or name the host in NO_PROXY",
            ) from None
        renew_after_fork(self, Http._leave)

    def close(self) -> None:
        """Close the connections; calls after that are refused."""
        self._closed = True
        self._close()

    def _open(self) -> httpx.Client:
        self._client = client = self._connect()
        self._close = weakref.finalize(self, client.close)  # also for who never calls close()
        return client

    def _leave(self) -> httpx.Client | None:
        """Give up connections that are another process's; the next call opens some."""
        self._close.detach()
        client, self._client = self._client, None
        return client

    def call(
        self,
        method: str,
        path: str,
        *,
        limits: Limits,
        query: Query | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the JSON object that answers ``method path`` (under the prefix), tried as ``limits`` say.

        ``{}`` stands for an empty answer to DELETE. Raises the class of ``cwtrain.errors`` for what went wrong.
        """
        where = f"{method} {path}"
        if self._closed:
            raise ConfigError(f"this client is closed ({where})", hint="make a new InferenceClient")
        if self._missing is not None:
            raise self._missing
        content = None if body is None else _encoded(body, where)

        def one_try() -> dict[str, Any]:
            status, headers, answer = self._exchange(method, path, query, content, limits.timeout, where)
            if not 200 <= status < 300:
                raise error_from_answer(
                    status=status,
                    headers=headers,
                    body=answer,
                    where=where,
                    scrub=self._scrub,
                    token_source=self._token_source,
                    token_quoted=self._token_quoted,
                )
            if method == "DELETE" and not answer.strip():
                return {}
            return self._decoded(answer, status, headers, where)

        longest = limits.timeout + limits.retry.seconds
        with waiting(f"waiting for {self.base_url} to answer {where}", seconds=longest, part=True, clock=self._clock):
            return limits.retry.call(one_try)

    def _exchange(
        self, method: str, path: str, query: Query | None, content: bytes | None, timeout: float, where: str
    ) -> tuple[int, dict[str, str], bytes]:
        """Return status, headers (lower-case names) and body of one try. ``timeout`` also limits the whole of it."""
        began = self._clock()
        client = self._client or self._open()
        headers = {} if content is None else {"Content-Type": "application/json"}
        try:
            request = client.build_request(
                method,
                f"{self.base_url}{PREFIX}{path}",
                params=dict(query) if query else None,
                content=content,
                headers=headers,
                timeout=timeout,
            )
            response = client.send(request, stream=True)
            try:
                refused = not 200 <= response.status_code < 300
                most = LARGEST_REFUSAL_BYTES if refused else LARGEST_ANSWER_BYTES
                answer = bytearray()
                for chunk in response.iter_bytes():
                    answer += chunk
                    if len(answer) > most:
                        if refused:
                            break
                        raise UnexpectedAnswerError(
                            f"the answer is larger than {most} bytes ({where})", status=response.status_code
                        )
                    if self._clock() - began > timeout:
                        raise RequestTimeoutError(f"the answer did not end within {timeout:g} s ({where})")
            finally:
                response.close()
            return response.status_code, {k.lower(): v for k, v in response.headers.items()}, bytes(answer)
        except httpx.TimeoutException as exc:
            what = "no connection" if isinstance(exc, (httpx.ConnectTimeout, httpx.PoolTimeout)) else "no answer"
            raise RequestTimeoutError(
                f"{what} within {timeout:g} s ({where}){self._by_proxy()}",
                hint="the call may have taken effect; it is safe to make it again",
            ) from exc
        except (httpx.UnsupportedProtocol, httpx.LocalProtocolError, httpx.InvalidURL) as exc:
            raise ConfigError(f"the request cannot be sent ({where}): {self._hidden(exc)}") from exc
        except httpx.RequestError as exc:
            raise self._no_connection(exc, where) from exc

    def _no_connection(self, exc: httpx.RequestError, where: str) -> TransportError:
        text = quote(self._hidden(exc)) or type(exc).__name__
        hint = "check the network and COREWEAVE_API_URL"
        if "CERTIFICATE_VERIFY_FAILED" in text:
            hint = "give the CA bundle that the server's certificate needs: SSL_CERT_FILE or verify=PATH"
        return ConnectionFailedError(
            f"no answer from {self.base_url} ({where}): {text}{self._by_proxy()}",
            hint=hint,
        )

    def _hidden(self, exc: Exception) -> str:
        """Return what the library said, without a secret in it."""
        text = self._scrub.text(str(exc))
        return hide_user_info(text) if self._proxy is None else self._proxy.hide(text)

    def _by_proxy(self) -> str:
        """Say so when a proxy from the environment is in between; it is the first suspect."""
        return "" if self._proxy is None else f"; it went through the proxy {self._proxy.host} of {self._proxy.source}"

    def _quoted(self, answer: bytes, headers: Mapping[str, str]) -> str:
        """Return the beginning of an answer that cannot be used, and what it calls itself."""
        kind = quote(self._scrub.text(headers.get("content-type", "")), 80)
        text = quote(self._scrub.text(answer.decode("utf-8", "replace")), 200) or "it is empty"
        return f"{text} ({kind})" if kind else text

    def _decoded(self, answer: bytes, status: int, headers: Mapping[str, str], where: str) -> dict[str, Any]:
        try:
            data = json.loads(answer.decode("utf-8"))
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as exc:
            text = self._quoted(answer, headers)
            raise UnexpectedAnswerError(
                f"the answer is not JSON: {text} (HTTP {status}, {where})",
                status=status,
                request_id=request_id_of(headers, (), self._scrub),
                hint="check that COREWEAVE_API_URL is the API and no other server answers in its place",
            ) from exc
        if not isinstance(data, dict):
            raise UnexpectedAnswerError(
                f"the answer is no JSON object: {self._quoted(answer, headers)} (HTTP {status}, {where})",
                status=status,
                request_id=request_id_of(headers, (), self._scrub),
                hint="check that COREWEAVE_API_URL is the API and no other server answers in its place",
            )
        return data


def _encoded(body: Mapping[str, Any], where: str) -> bytes:
    try:
        return json.dumps(body, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (TypeError, ValueError) as exc:
        raise ConfigError(
            f"the request is no JSON ({where}): {exc}",
            hint="give text, finite numbers, true, false, null, lists and objects",
        ) from exc


def _connected(
    headers: Mapping[str, str], tls: Any, transport: httpx.BaseTransport | None, proxy: str | None
) -> httpx.Client:
    """Return a new client. What of the environment counts was read before."""
    limits = httpx.Limits(keepalive_expiry=_IDLE_SECONDS)
    if proxy is not None:  # `proxy=` of a client is younger than the oldest httpx that we take
        transport = httpx.HTTPTransport(verify=tls, limits=limits, trust_env=False, proxy=httpx.Proxy(proxy))
    return httpx.Client(
        headers=headers, verify=tls, transport=transport, trust_env=False, follow_redirects=False, limits=limits
    )


def _proxy_schemes() -> tuple[str, ...]:
    return ("http", "https", "socks5", "socks5h") if find_spec("socksio") else ("http", "https")


def _tls(verify: bool | str) -> bool | ssl.SSLContext:
    """Return what httpx takes: no checks, its own default, or a context for the CA file or folders that were named."""
    if verify is False:
        return False
    source, named = ("the CA bundle", [verify]) if isinstance(verify, str) else ca_bundles()
    if not named:
        return True
    try:
        context = ssl.create_default_context(
            cafile=None if os.path.isdir(named[0]) else named[0], capath=named[0] if os.path.isdir(named[0]) else None
        )
        for path in named[1:]:
            context.load_verify_locations(capath=path)
        return context
    except OSError as exc:  # ssl.SSLError is one
        raise ConfigError(
            f"{named[0]} cannot be used as a CA bundle ({source}): {exc}",
            hint="give the path of a PEM file with certificates",
        ) from exc
