"""Streamed answers of one choice: what exists is kept as it comes, so that a cancelled request loses no token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import attrs
import msgspec

from cwtrain_rollout._answers import RAW_OF_ANSWERS, RAW_OF_CHOICES, Answer, Choice, Logprobs
from cwtrain_rollout.parsing import BadAnswer, ReadAnswer, Wanted, decode, judge
from cwtrain_rollout.spans import History
from cwtrain_rollout.transport import Reply, Transport

__all__ = ["Partial", "read_stream"]

T = TypeVar("T")


@attrs.define(kw_only=True)
class Partial:
    """One choice so far."""

    history: History | None = None
    request_id: str = ""
    told: bool = False
    """Whether token ids came, were it none of them: an empty list is not the same as no list."""
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    texts: list[str] = attrs.field(factory=list)

    def keep(self, choice: Choice, *, logprobs: bool) -> None:
        """Add one event. Where log-probs are required, its ids and its log-probs come together: else ``BadAnswer``.

        (Over a whole stream the counts could be equal by chance, and every log-prob stand beside another token.)
        """
        ids = choice.token_ids if choice.token_ids is not None else choice.spelled_ids()
        values = choice.logprobs.token_logprobs if choice.logprobs else None
        if logprobs and ids is not None and len(ids) != len(values or ()):
            raise BadAnswer(f"an event of the stream has {len(ids)} token ids and {len(values or ())} log-probs")
        if choice.text:
            self.texts.append(choice.text)
        if ids is not None:
            self.told = True
            self.token_ids += ids
        if values:
            self.logprobs += values

    @property
    def aligned(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The tokens and their log-probs; none where they do not line up."""
        if len(self.logprobs) not in (0, len(self.token_ids)):
            return (), ()
        return tuple(self.token_ids), tuple(self.logprobs)


async def read_stream(
    transport: Transport, body: bytes, headers: Mapping[str, str], partial: Partial, wanted: Wanted
) -> tuple[Reply, ReadAnswer] | Reply:
    """Return the answer of a streamed request; the whole reply alone where it is no stream.

    ``partial`` has at any time what came so far. Raises ``BadAnswer``, ``UnfitAnswer`` and ``NoAnswer``.
    """
    async with transport.stream(body, headers) as streamed:
        if streamed.reply is not None:
            return streamed.reply
        assert streamed.events is not None
        end: str | None = None
        last, said = Answer(), b""
        routes: dict[str, msgspec.Raw] = {}
        async for data in streamed.events:
            event, faults = decode(data, wanted.quote)
            said = said or (b"" if event.choices else data)
            # What cannot be read is missing from the sample; only log-probs that nobody requires may be.
            for fault in faults.values():
                if wanted.logprobs or not fault.logprobs:
                    raise BadAnswer(f"an event of the stream: {fault.reason}")
            for choice in event.choices or ():
                if choice.index not in (0, None):
                    continue
                if wanted.routed_experts:
                    routes.update(_raw_fields(choice, RAW_OF_CHOICES))
                before = len(partial.token_ids)
                partial.keep(choice, logprobs=wanted.logprobs)
                # Some servers say "" in every event but the last: so an empty reason is no end, unless it is the last.
                if end and (len(partial.token_ids) > before or choice.finish_reason not in (None, end)):
                    raise BadAnswer(f"the stream went on after its end with finish_reason {end[:100]!r}")
                end = end if choice.finish_reason is None else choice.finish_reason
            if wanted.routed_experts:
                for name, raw in _raw_fields(event, RAW_OF_ANSWERS).items():
                    setattr(last, name, raw)
            last.usage = _later(event.usage, last.usage)
            last.nvext = _later(event.nvext, last.nvext)
            last.identity = _later(event.identity, last.identity)
            last.identities = _later(event.identities, last.identities)
        if end is None:
            also = f"; an event without choices: {wanted.quote(said)}" if said else ""
            raise BadAnswer(f"the stream ended without a finish_reason{also}")
        values = tuple(partial.logprobs)
        last.choices = [
            Choice(
                index=0,
                text="".join(partial.texts),
                finish_reason=end,
                token_ids=tuple(partial.token_ids) if partial.told else None,
                logprobs=Logprobs(token_logprobs=values, tokens=msgspec.Raw(b"")) if values else None,
                **routes,
            )
        ]
        read = judge(last, wanted, {})
        if streamed.queue_seconds is not None and read.queue_seconds is None:
            read = attrs.evolve(read, queue_seconds=streamed.queue_seconds)
        return Reply(status=200, body=b""), read


def _later(new: T | None, old: T | None) -> T | None:
    return old if new is None else new


def _raw_fields(found: Answer | Choice, names: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    """Return those of these fields that an event has."""
    return {name: raw for name in names if bytes(raw := getattr(found, name)) not in (b"", b"null")}
