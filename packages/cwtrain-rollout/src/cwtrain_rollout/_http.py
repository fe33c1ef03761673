"""The one place that knows aiohttp: one session for each call of the sampler, and what went wrong in our words."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import attrs
import msgspec

from cwtrain_rollout.config import RolloutConfig

__all__ = ["NoAnswer", "Reply", "Session", "open_session"]

_CONNECT_TIMEOUT = 30.0


class NoAnswer(Exception):
    """No whole answer came. ``cut`` is True when it had begun, so that the server did the work."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        self.cut = cut


@attrs.frozen(kw_only=True)
class Reply:
    """A whole HTTP answer."""

    status: int
    body: bytes
    retry_after: float | None = None
    """Seconds, where the server named them."""


@attrs.frozen(kw_only=True)
class Session:
    """An open HTTP session to one endpoint."""

    client: aiohttp.ClientSession
    config: RolloutConfig

    async def post(self, body: dict[str, Any], *, request_id: str) -> Reply:
        """Return the answer to one POST of ``body`` to ``/completions``; raises ``NoAnswer``."""
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        if key := self.config.current_api_key():
            headers["Authorization"] = f"Bearer {key}"
        answered = False
        try:
            async with self.client.post(
                f"{self.config.base_url}/completions",
                data=msgspec.json.encode(body),
                headers=headers,
                allow_redirects=False,
            ) as response:
                answered = True
                return Reply(
                    status=response.status,
                    body=await response.read(),
                    retry_after=_seconds(response.headers.get("Retry-After")),
                )
        except aiohttp.ServerTimeoutError as exc:  # of the connection alone: no other one is set
            raise NoAnswer(f"no connection within {_CONNECT_TIMEOUT:g} s") from exc
        except TimeoutError as exc:
            raise NoAnswer(f"no answer within {self.config.timeout:g} s", cut=True) from exc
        except aiohttp.ClientError as exc:
            what = "the answer was cut short" if answered else "the connection failed"
            raise NoAnswer(f"{what} ({type(exc).__name__}: {str(exc) or 'no more is known'})", cut=answered) from exc


@contextlib.asynccontextmanager
async def open_session(config: RolloutConfig) -> AsyncIterator[Session]:
    """Open a session for the running event loop and close it on the way out.

    The pool has no limit of its own: the sampler's window is the limit. Waiting for a slot there never counts against
    the time of an answer.
    """
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=config.timeout, sock_connect=_CONNECT_TIMEOUT)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=config.trust_env) as client:
        yield Session(client=client, config=config)
    # Connections close one turn of the loop later; without this turn they would be collected open.
    await asyncio.sleep(0)


def _seconds(value: str | None) -> float | None:
    """Return a ``Retry-After`` in seconds; dates and nonsense are no number and give None."""
    if value is None:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None
