"""An endpoint in memory that answers as a function says, whole or as a stream; everything that came in is kept."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

from cwtrain.plugins import Plugins
from cwtrain_rollout import RolloutConfig, Sampler
from cwtrain_rollout.transport import Reply, StreamedReply

Body = dict[str, Any]
Answer = Body | Reply | Sequence[Body]
"""A whole answer, a reply below JSON, or the events of a stream."""


class ToldEndpoint:
    """Gives `tell(request)` to every POST, and `models` to a GET of the models."""

    def __init__(self, tell: Callable[[Body], Answer], *, models: Reply | Body | None = None) -> None:
        self.tell, self.listing = tell, models
        self.requests: list[Body] = []
        self.listed = 0

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        """Return a whole answer; the events of a stream in one body where a stream was not asked for."""
        self.requests.append(json.loads(body))
        return _reply(self.tell(self.requests[-1]))

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        """Return a stream where the answer is one."""
        self.requests.append(json.loads(body))
        told = self.tell(self.requests[-1])
        if isinstance(told, Reply | dict):
            yield StreamedReply(reply=_reply(told), events=None)
            return

        async def events() -> AsyncIterator[bytes]:
            for event in told:
                yield json.dumps(event).encode()

        yield StreamedReply(reply=None, events=events())

    async def models(self, headers: Mapping[str, str]) -> Reply:
        """Return the list of models; 404 where there is none."""
        self.listed += 1
        return Reply(status=404, body=b"no such path") if self.listing is None else _reply(self.listing)

    async def aclose(self) -> None:
        """Nothing is open."""


def _reply(told: Answer) -> Reply:
    return told if isinstance(told, Reply) else Reply(status=200, body=json.dumps(told).encode())


async def no_pause(seconds: float) -> None:
    """Pause for no time."""


def sampler(endpoint: Any, **settings: Any) -> Sampler:
    """Return a sampler of this endpoint that pauses for no time."""
    more = {name: settings.pop(name) for name in ("served", "plugins") if name in settings}
    config = RolloutConfig(**{"base_url": "http://endpoint", "model": "m", **settings})
    return Sampler(config, transport=endpoint, sleep=no_pause, rng=random.Random(3), **{"plugins": Plugins(), **more})


def streamed_choice(tokens: Sequence[int], end: Any, *, last_event_empty: bool = False) -> list[Body]:
    """Return the events of one streamed choice: a token each, its end with the last one or in an event of its own."""
    events = [_event([token], [-0.5], None) for token in tokens]
    if events and not last_event_empty:
        events[-1]["choices"][0]["finish_reason"] = end
    else:
        events.append(_event([], [], end))
    return events


def _event(tokens: list[int], values: list[float], end: Any) -> Body:
    return {
        "choices": [
            {
                "index": 0,
                "text": "t" * len(tokens),
                "token_ids": tokens,
                "logprobs": {"tokens": [f"token_id:{token}" for token in tokens], "token_logprobs": values},
                "finish_reason": end,
            }
        ]
    }
