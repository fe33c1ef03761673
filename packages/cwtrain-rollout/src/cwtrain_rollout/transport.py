"""What the sampler needs of a way to reach an endpoint, as a Protocol: HTTP, a recording, a test's own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Protocol, runtime_checkable

import attrs

__all__ = ["ListsModels", "NoAnswer", "Reply", "StreamedReply", "Transport"]


class NoAnswer(Exception):
    """No whole answer came. ``cut`` is True when it had begun, so that the server did the work."""

    def __init__(self, message: str, *, cut: bool = False) -> None:
        super().__init__(message)
        self.cut = cut


@attrs.define(kw_only=True, eq=False)
class Reply:
    """A whole HTTP answer."""

    status: int
    body: bytes
    retry_after: float | None = None
    """Seconds, where the server named them."""
    queue_seconds: float | None = None
    """How long the request queued at the server, where a header says so."""
    content_type: str = ""
    """What the answer calls itself; empty where it does not say."""

    @property
    def good(self) -> bool:
        """Whether the status says that the body is an answer."""
        return 200 <= self.status < 300


@attrs.frozen(kw_only=True)
class StreamedReply:
    """An answer whose events come one by one; ``reply`` is the whole of one that is no stream (a refusal)."""

    reply: Reply | None
    events: AsyncIterator[bytes] | None
    queue_seconds: float | None = None


class Transport(Protocol):
    """Sends the body of a request to an endpoint's ``/completions``."""

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Return the answer; raises ``NoAnswer``."""
        ...

    def stream(self, body: bytes, headers: Mapping[str, str]) -> AbstractAsyncContextManager[StreamedReply]:
        """Open a streamed answer: its events' data as they come, without the last ``[DONE]``; raises ``NoAnswer``."""
        ...

    async def aclose(self) -> None:
        """Close what the running event loop holds open."""
        ...


@runtime_checkable
class ListsModels(Protocol):
    """A transport that can ask the endpoint for its models, too."""

    async def models(self, headers: Mapping[str, str]) -> Reply:
        """Return the answer to a GET of ``/models``; raises ``NoAnswer``."""
        ...
