"""Chat completions: messages in, text out. For evaluation and looking at a model; nothing here can be trained on."""

from __future__ import annotations

import asyncio
import inspect
import math
import random
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn, SupportsIndex

import attrs
import msgspec

from cwtrain.errors import ConfigError
from cwtrain_rollout._answers import Usage
from cwtrain_rollout._engine import TOO_LONG, ToldContext, limit_in, names_context
from cwtrain_rollout._group import all_or_nothing
from cwtrain_rollout._http import HttpTransport
from cwtrain_rollout.admission import Admission
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.errors import RolloutError, RolloutExhaustedError, RolloutRequestError
from cwtrain_rollout.protocol import Group, SampledGroup, SamplingParams, as_sent, whole
from cwtrain_rollout.requests import drawing
from cwtrain_rollout.transport import NoAnswer, Reply, Transport
from cwtrain_rollout.window import AdaptiveWindow, FixedWindow

__all__ = ["ChatAnswer", "ChatSampler", "Conversation"]

Conversation = Sequence[Mapping[str, Any]]
"""Messages, each with a role and its content."""

_REFUSALS = (408, 425, 429, 503)
_ENDS = ("stop", "length")
"""How an answer ends that is whole; with any other reason it is asked for again."""


class _Message(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None
    error: Any = None


@attrs.frozen(kw_only=True)
class ChatAnswer:
    """One whole answer to a conversation: ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    finish_reason: str
    request_id: str
    prompt_tokens: int | None = None
    """How many tokens the server counted in the conversation, where it says so."""


class ChatSampler:
    """Asks a ``/chat/completions`` endpoint; every answer is a request of its own. It pickles as a ``Sampler`` does.

    Refusals and bad answers are waited out as the sampler does it. ``sample`` refuses: an endpoint without
    ``/completions`` takes no token ids and gives neither ids nor log-probs of what it sampled.
    """

    def __init__(
        self,
        config: RolloutConfig,
        *,
        transport: Transport | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self._given = transport
        self._transport = transport if transport is not None else HttpTransport(config, path="chat/completions")
        self._told = ToldContext(self._transport, config.model)
        fixed = config.fixed_concurrency
        window = FixedWindow(fixed) if fixed else AdaptiveWindow(maximum=config.concurrency_max)
        self._admission = Admission(window, clock, sleep)
        self._clock, self._sleep = clock, sleep
        self._rng = random.Random(secrets.randbits(64))  # noqa: S311 - jitter

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: it opens its own connections."""
        return {"config": self.config, "transport": self._given}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    async def chat(
        self,
        conversations: Sequence[Conversation],
        *,
        n: int = 1,
        max_tokens: int = 1024,
        temperature: float | None = None,
        top_p: float | None = None,
        stop: str | Iterable[str] | None = None,
        **drawn: Any,
    ) -> list[tuple[ChatAnswer, ...]]:
        """Return ``n`` answers to each conversation, in order.

        One that fills the context has an empty answer, which ended with ``length``.

        ``drawn`` are other fields of ``SamplingParams`` (``top_k``, ``min_p``, ...). All of them are sent, the neutral
        ones too. Raises ``RolloutError``, and ``ConfigError`` for what cannot be asked for.
        """
        if unknown := sorted(drawn.keys() - {field.name for field in attrs.fields(SamplingParams)}):
            raise ConfigError(f"chat takes no {', '.join(unknown)}", hint="give fields of SamplingParams")
        sampling = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, stop=stop, **drawn)
        talks, n = _talks(conversations), _count(n)
        body = drawing(sampling, max_tokens=sampling.max_tokens)
        flat = await all_or_nothing([self._fitted(body, messages) for messages in talks for _ in range(n)])
        return [tuple(flat[place * n : (place + 1) * n]) for place in range(len(talks))]

    async def evaluate(
        self,
        conversations: Sequence[Conversation],
        scorer: Callable[[Conversation, ChatAnswer], float | Awaitable[float]],
        **options: Any,
    ) -> float:
        """Return the mean score of the answers, NaN where there are none; ``options`` are those of ``chat``."""
        scores = []
        conversations = list(conversations)
        for messages, answers in zip(conversations, await self.chat(conversations, **options), strict=True):
            for answer in answers:
                score = scorer(messages, answer)
                scores.append(float(await score if inspect.isawaitable(score) else score))
        return sum(scores) / len(scores) if scores else math.nan

    async def sample(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> list[SampledGroup]:
        """Refuse: raises ``RolloutError`` with the reason."""
        self._refuse()

    def sample_groups(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> list[SampledGroup]:
        """Refuse: raises ``RolloutError`` with the reason."""
        self._refuse()

    async def aclose(self) -> None:
        """Close the running event loop's connections."""
        await self._transport.aclose()

    def _refuse(self) -> NoReturn:
        raise RolloutError(
            f"{self.config.base_url} cannot give training samples: it publishes no /completions, takes no token ids, "
            "and returns neither the ids that were sampled nor their log-probs",
            hint="Train on a Dedicated Inference deployment (backend 'dedicated'); use this one for evaluation",
        )

    async def _fitted(self, fields: Mapping[str, Any], messages: Conversation) -> ChatAnswer:
        """Return an answer with the room that the conversation leaves; an empty one where it fills the context.

        How many tokens a conversation has, only the server knows: an answer of one token tells.
        """
        try:
            return await self._ask(fields, messages)
        except RolloutRequestError as exc:
            words = exc.answer or ""
            if exc.status not in TOO_LONG:
                raise
            limit = limit_in(words)
            told = await self._told.tokens(self._headers(exc.request_id or ""))
            context = limit if told is None else told
            if context is None:
                raise
            try:
                one = await self._ask(_with_room(fields, 1), messages)
            except RolloutRequestError:
                if limit is None and not names_context(words, context):
                    raise exc from None
                return ChatAnswer(text="", finish_reason="length", request_id=exc.request_id or "")
        room = 1 if one.prompt_tokens is None else min(fields["max_tokens"], context - one.prompt_tokens)
        return await self._ask(_with_room(fields, room), messages) if room > 1 else one

    async def _ask(self, fields: Mapping[str, Any], messages: Conversation) -> ChatAnswer:
        config, admission = self.config, self._admission
        request_id = str(uuid.uuid4())
        body = msgspec.json.encode({"model": config.model, "messages": list(messages), "n": 1, **fields})
        first_failure: float | None = None
        tries = bad = 0
        await admission.acquire(1)
        try:
            epoch = admission.epoch()
            while True:
                probe = await admission.pass_gate()
                told = False
                try:
                    reply, reason, refused = await self._post(body, request_id)
                    told = True
                    if refused:
                        overload = reply is not None and reply.status in (429, 503)
                        floor = reply.retry_after or 0.0 if reply is not None else 0.0
                        admission.refused(
                            epoch, floor=floor if floor <= config.deadline else 0.0, overload=overload, probe=probe
                        )
                    else:
                        found = _read(reply, request_id) if reply is not None and reply.good else reason
                        if reply is not None and isinstance(found, ChatAnswer):
                            admission.answered(epoch, 1, reply.queue_seconds)
                            return found
                        admission.disappointed()
                        reason = f"{config.quoted(str(found), limit=300)} ({reason})" if found != reason else reason
                        bad, floor = bad + 1, 0.0
                finally:
                    if not told:
                        admission.gave_up(probe=probe)
                now = self._clock()
                first_failure = now if first_failure is None else first_failure
                tries += 1
                pause = max(floor, min(10.0, 0.25 * 2 ** min(tries, 10)) * (0.5 + 0.5 * self._rng.random()))
                if bad >= config.max_attempts or now - first_failure + pause > config.deadline:
                    raise RolloutExhaustedError(
                        f"{config.base_url}/chat/completions gave no answer in {tries} tries; last: {reason}; "
                        f"the next try would be {pause:g} s away",
                        bad_answers=bad,
                        last=reason,
                        request_id=request_id,
                        hint="CWTRAIN_ROLLOUT_MAX_ATTEMPTS and CWTRAIN_ROLLOUT_DEADLINE allow more",
                    )
                await self._sleep(pause)
        finally:
            admission.release(1)

    def _headers(self, request_id: str) -> dict[str, str]:
        headers = {"X-Request-Id": request_id}
        if key := self.config.current_api_key():
            headers["Authorization"] = f"Bearer {key}"
        return headers

    async def _post(self, body: bytes, request_id: str) -> tuple[Reply | None, str, bool]:
        """Return the reply, what is wrong with it in words, and whether that is a refusal; raises for final ones."""
        config = self.config
        try:
            reply = await self._transport.post(body, self._headers(request_id))
        except NoAnswer as exc:
            return None, str(exc), not exc.cut
        kind = f" ({config.quoted(reply.content_type, limit=80)})" if reply.content_type else ""
        words = f"HTTP {reply.status}: {config.quoted(reply.body) or '(an empty answer)'}{kind}"
        if reply.status in _REFUSALS:
            return reply, words, True
        if not reply.good and (reply.status < 500 or reply.status == 501):
            raise RolloutRequestError(
                f"{config.base_url}/chat/completions refused a request for {config.model!r}: {words}",
                status=reply.status,
                answer=config.quoted(reply.body),
                request_id=request_id,
                hint="Check the key, the model's name and the base URL",
            )
        return reply, words, False


def _talks(conversations: Iterable[Conversation]) -> list[Any]:
    """Return the conversations as they will be sent; one that stands alone is no list of them."""
    talks = [] if isinstance(conversations, str | Mapping) else [_messages(talk) for talk in conversations]
    if isinstance(conversations, str | Mapping) or not all(talks):
        raise ConfigError(
            "chat takes a list of conversations, each a list of messages",
            hint='give [[{"role": "user", "content": "..."}]]',
        )
    try:
        return [as_sent(talk) for talk in talks]
    except ConfigError as exc:
        raise ConfigError(f"a conversation cannot be sent: {exc}") from exc


def _messages(talk: object) -> list[Mapping[str, Any]]:
    """Return a conversation's messages, none where it is no conversation."""
    given = list(talk) if isinstance(talk, Iterable) and not isinstance(talk, str | bytes | Mapping) else []
    return given if all(isinstance(message, Mapping) for message in given) else []


def _count(n: SupportsIndex) -> int:
    count = whole(n)
    if type(count) is not int or count < 1:
        raise ConfigError(f"n is {n!r}: a whole number of at least 1 is needed")
    return count


def _read(reply: Reply, request_id: str) -> ChatAnswer | str:
    """Return the answer in a reply, or what is wrong with it."""
    try:
        answer = msgspec.json.decode(reply.body, type=_Answer)
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        return f"the answer cannot be read: {exc}"
    if answer.error is not None:
        return "the answer is an error in spite of its status 200"
    if not answer.choices:
        return "the answer has no choices"
    choice = answer.choices[0]
    if choice.finish_reason not in _ENDS:
        said = "no finish_reason" if choice.finish_reason is None else f"finish_reason {choice.finish_reason[:100]!r}"
        return f"the answer ended with {said}"
    return ChatAnswer(
        text=choice.message.content or "",
        finish_reason=choice.finish_reason,
        request_id=request_id,
        prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
    )


def _with_room(fields: Mapping[str, Any], room: int) -> dict[str, Any]:
    """Return a request's fields with less room for the answer."""
    least = {"min_tokens": min(fields["min_tokens"], room)} if "min_tokens" in fields else {}
    return {**fields, "max_tokens": room, **least}
