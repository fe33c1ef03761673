"""What all calls of one sampler share: its window, its connection, what it learned about the endpoint, its counts."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import math
import random
import re
import weakref
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from cwtrain.events import RolloutRetried, RolloutUnavailable, WeightVersionSeen
from cwtrain_rollout.admission import Admission
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.errors import RolloutRequestError
from cwtrain_rollout.protocol import SEEDS, SampledGroup, SamplerTotals, SamplingParams
from cwtrain_rollout.served import ServedWeights
from cwtrain_rollout.spans import History, Load
from cwtrain_rollout.transport import ListsModels, NoAnswer, Reply, Transport

if TYPE_CHECKING:
    from cwtrain.plugins import Plugins

__all__ = ["TOO_LONG", "Asked", "Engine", "Refusal", "ToldContext", "limit_in", "names_context", "speaks_of_length"]

log = logging.getLogger("cwtrain.rollout")

_REFUSALS = frozenset({408, 425, 429, 503})
"""The server did no work: they cost time, never an attempt."""
_OVERLOAD = frozenset({429, 503})
_AFTER_HOT_LOAD = 60.0
"""Seconds for which a 404 may be a model that is only being swapped."""
TOO_LONG = frozenset({400, 413, 422})
_LIMIT = re.compile(
    r"(?:context (?:length|window|size)|model length|allowed length|max_model_len|max_seq_len|max_num_tokens|n_ctx"
    r"|max(?:imum)? (?:sequence|input|prompt) length|longer than|tokens?`? must be <=)[^0-9]{0,24}(\d[\d,_]*)",
    re.IGNORECASE,
)
"""The number behind a context's name, in the words of vLLM, SGLang, TensorRT-LLM, TGI and llama.cpp."""
_LENGTH = re.compile(r"context|length|max_model_len|too long|longer than|too many tokens|token count", re.IGNORECASE)
_LENGTHS = ("max_model_len", "context_length", "context_window")
"""What a model of the endpoint's list calls its context."""
_SHORT_ANSWERS = 2
_NO_CHANCE = math.log(1e-3)
_GREEDY = 1e-4
"""Below this temperature engines decode greedily, and report the log-probs of temperature 1."""
_RETRY_BURST = 30.0
"""Seconds for which retries are one burst: plugins are told once."""


@attrs.frozen(kw_only=True)
class Refusal:
    """An answer, or the lack of one, that costs time only."""

    reason: str
    floor: float = 0.0
    overload: bool = False


@attrs.frozen(kw_only=True)
class Asked:
    """What a request asked for: tokens of the prompt as we count them, the answer's room, and in which form."""

    prompt: int
    room: int
    logprobs: int
    text_left: bool
    """Whether it had token ids, and there is a text."""


class ToldContext:
    """What the endpoint's list of models says of the context length: asked for once, however many want to know."""

    def __init__(self, transport: Transport, model: str) -> None:
        self._transport, self._model = transport, model
        self._told: tuple[int | None, ...] = ()
        self._in_vain = 0
        self._asking: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = weakref.WeakKeyDictionary()

    async def tokens(self, headers: Mapping[str, str]) -> int | None:
        """Return the context length; None where the list does not say, or cannot be read now.

        Whoever waits while it is asked for in vain does not ask again: it may take long, and many may wait.
        """
        in_vain = self._in_vain
        async with self._asking.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
            if not self._told and self._in_vain == in_vain and isinstance(self._transport, ListsModels):
                try:
                    reply = await self._transport.models(headers)
                except NoAnswer as exc:
                    log.debug("The list of models cannot be read: %s", exc)
                    self._in_vain += 1
                    return None
                if reply.good or (400 <= reply.status < 500 and reply.status not in _REFUSALS):
                    self._told = (_context_in(reply.body, self._model) if reply.good else None,)
                else:
                    self._in_vain += 1
        return self._told[0] if self._told else None


@attrs.define(kw_only=True)
class Engine:
    """Shared by all calls, event loops and threads of a sampler."""

    config: RolloutConfig
    name: str
    transport: Transport
    admission: Admission
    served: ServedWeights | None
    totals: SamplerTotals
    rng: random.Random
    clock: Callable[[], float]
    sleep: Callable[[float], Awaitable[None]]
    plugins: Plugins | None
    tokenise: Callable[[str], list[int]] | None
    mode: str | None = None
    """Which log-probs the server reports; None until it is known."""
    context: int | None = None
    logprobs: int = 0
    """What ``logprobs`` asks for: only the sampled token's; 1 where the server refuses 0."""
    text: bool = False
    split: bool = False
    """Whether the server answers ``n > 1`` with one choice, so that each choice is asked for by itself."""
    trouble: str = ""
    """What was wrong with the last bad answer, for who waits."""
    completion_ids: bool = False
    """Whether ids are asked for in ``nvext``, because the server honours no other way; then one choice at a time."""
    routed: bool = False
    """Whether an answer brought routed experts that can be used: another one without them is worth another try."""
    _told: ToldContext = attrs.field(init=False)
    _equal: float | None = 0.0
    """The log of the chance of seeded groups that were all equal; None when that is no question any more."""
    _short: int = 0
    _warned: set[str] = attrs.field(factory=set)
    _seen: set[str] = attrs.field(factory=set)
    _burst: float = float("-inf")

    def __attrs_post_init__(self) -> None:
        self._told = ToldContext(self.transport, self.config.model)

    def warn_once(self, message: str, *values: object) -> None:
        """Log a warning the first time."""
        if message not in self._warned:
            self._warned.add(message)
            log.warning(message, *values)

    def seed(self) -> int:
        """Return a random seed: replicas start from the same default one."""
        return self.rng.randrange(SEEDS)

    def history(self) -> History | None:
        """Return what is known to be served; None where nobody can say."""
        return self.served.known if self.served else None

    def salt(self, history: History | None) -> str | None:
        """Return the id of the newest COMPLETED hot-load: under it no KV of older weights is found."""
        if history is None:
            return None
        return history.served.id if history.served else f"base-{self.config.deployment_id or 'weights'}"

    def quoted(self, body: bytes, content_type: str = "") -> str:
        """Return the start of an answer for a message, without the key, and what it calls itself."""
        text = self.config.quoted(body) or "(an empty answer)"
        return f"{text} ({self.config.quoted(content_type, limit=80)})" if content_type else text

    def refusal(self, reply: Reply) -> Refusal | None:
        """Return an answer as a refusal that costs time only; None where it is none."""
        lately = reply.status == 404 and self.served is not None and self.served.changed_lately(_AFTER_HOT_LOAD)
        if reply.status not in _REFUSALS and not lately:
            return None
        return Refusal(
            reason=f"HTTP {reply.status}: {self.quoted(reply.body, reply.content_type)}",
            floor=reply.retry_after or 0.0,
            overload=reply.status in _OVERLOAD,
        )

    async def learn(self, words: str, asked: Asked, headers: Mapping[str, str]) -> str | None:
        """Return what a refusal teaches; None when it is final.

        - ``logprobs``, ``text``: the request is to be sent in another form.
        - ``context``: the context is known now, and prompt and answer together are longer.
        - ``longer``: they would fit, and the server says that they do not: it counts more tokens than we do, as for
          an image whose placeholder becomes many.
        - ``full``: the prompt alone is too long.

        It is about the request that was sent, whatever others have taught since. What the context is, the list of
        models says; only where it does not, the refusal's words are searched for it.
        """
        if asked.logprobs == 0 and "logprobs" in words and "prompt_logprobs" not in words:
            if self.logprobs == 0:
                self.logprobs = 1
                log.info("The endpoint refuses logprobs=0: 1 is sent from now on")
            return "logprobs"
        told = await self._told.tokens(headers)
        if told is not None and (self.context is None or told < self.context):
            self._found_context(told)
        if self.context is not None and self.context < asked.prompt + asked.room:
            return "context"
        limit = limit_in(words)
        if limit is not None and limit <= asked.prompt and told is not None:
            # It takes shorter prompts than its context would hold.
            return "full"
        if limit is not None and limit < asked.prompt + asked.room:
            self._found_context(limit)
            return "context"
        if limit is not None or (self.context is not None and names_context(words, self.context)):
            if self.context is None and limit is not None:
                self._found_context(limit)
            return "full" if asked.room == 1 else "longer"
        if asked.text_left and self.config.text_fallback and "prompt" in words:
            self.warn_once(
                "The endpoint refuses token-id prompts: they are sent as text (%s)", self.quoted(words.encode())
            )
            return "text"
        return None

    def _found_context(self, tokens: int) -> None:
        self.context = tokens
        log.info("The endpoint's context length is %d tokens", tokens)

    def watch_seeds(self, group: SampledGroup, sampling: SamplingParams) -> None:
        """Look at the samples of one seed: that all are equal is suspicious where the policy would hardly do it.

        How likely it is, the log-probs say; a policy that is certain repeats itself. Groups in a row count together,
        and one whose samples differ ends the question: this endpoint draws each choice by itself.
        """
        if (
            self._equal is None
            or sampling.temperature < _GREEDY
            or (sampling.needs_processed and self.mode != "processed")
        ):
            # Decided; or the log-probs are of another distribution than the one that was drawn from.
            return
        first, *others = group.samples
        if not all(sample.logprobs for sample in group.samples):
            return
        if any(sample.token_ids != first.token_ids for sample in others):
            self._equal = None
            return
        self._equal += len(others) * sum(first.logprobs)
        if self._equal < _NO_CHANCE:
            self._equal = None
            log.warning(
                "All %d samples of a seeded group are equal, and their log-probs say that this is no chance: the "
                "endpoint may give every choice the same seed",
                len(group.samples),
            )

    def ask_for_completion_ids(self) -> None:
        """Turn to the ids that Dynamo gives beside an answer of one choice."""
        if not self.completion_ids:
            self.completion_ids = self.split = True
            log.warning("The endpoint gives no token ids with its choices: nvext.completion_token_ids are asked for")

    def one_choice_instead_of_many(self) -> None:
        """Note an answer with one choice where more were asked for; the second one ends requests for more."""
        self._short += 1
        if self._short >= _SHORT_ANSWERS and not self.split:
            self.split = True
            log.warning("The endpoint gives one choice where more are asked for: each is asked for by itself")

    def refused(self, reply: Reply, request_id: str) -> RolloutRequestError:
        """Return the error of a final refusal."""
        answer = self.quoted(reply.body)
        return RolloutRequestError(
            f"{self.config.base_url}/completions refused a request for {self.config.model!r}: "
            f"HTTP {reply.status}: {self.quoted(reply.body, reply.content_type)}",
            status=reply.status,
            answer=answer,
            request_id=request_id,
            hint=_HINTS.get(reply.status),
        )

    # Events ------------------------------------------------------------------------------------------------------

    def notify(self, event: RolloutRetried | RolloutUnavailable | WeightVersionSeen) -> None:
        """Tell plugins."""
        if self.plugins is not None:
            self.plugins.notify(event)

    def retried(self, reason: str, attempt: int, delay: float) -> None:
        """Note a retry, and tell plugins once in a burst."""
        self.totals.retries += 1
        self.trouble = reason
        now = self.clock()
        if self.plugins is not None and now - self._burst >= _RETRY_BURST:
            self._burst = now
            self.notify(RolloutRetried(backend=self.name, reason=reason, attempt=attempt, delay=delay))

    def unavailable(self, reason: str) -> None:
        """Tell that the endpoint refuses everything."""
        self.trouble = reason
        log.warning("%s refuses: one request at a time looks whether it is back (%s)", self.config.base_url, reason)
        self.notify(RolloutUnavailable(backend=self.name, since=dt.datetime.now(dt.UTC), reason=reason))

    def version_seen(self, load: Load | None) -> None:
        """Tell of the first sample that one weight version alone made."""
        if load is not None and load.id not in self._seen:
            self._seen.add(load.id)
            now = dt.datetime.now(dt.UTC)
            self.notify(WeightVersionSeen(backend=self.name, identity=load.identity, first_request_at=now))


def speaks_of_length(status: int, words: str) -> bool:
    """Whether an answer may be the refusal of a prompt that is too long: some come as 500, or as an error with 200."""
    return status in TOO_LONG or (status != 501 and (_LENGTH.search(words) or _LIMIT.search(words)) is not None)


def limit_in(words: str) -> int | None:
    """Return the context length that a refusal names, in words that are known; None where it names none."""
    found = _LIMIT.search(words)
    return int(re.sub("[,_]", "", found[1])) if found else None


def names_context(words: str, context: int) -> bool:
    """Whether a refusal speaks of this context, in whatever words."""
    return re.search(rf"(?<![\d.]){context}(?![\d]|\.\d)", words) is not None and _LENGTH.search(words) is not None


def _context_in(body: bytes, model: str) -> int | None:
    """Return the context length of a model in the answer of ``/models``; None where it is not there."""
    try:
        listed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    rows = listed.get("data") if isinstance(listed, dict) else None
    models: dict[Any, dict[str, Any]] = (
        {row["id"]: row for row in rows or () if isinstance(row, dict) and isinstance(row.get("id"), str)}
        if isinstance(rows, list)
        else {}
    )
    row = models.get(model) or (next(iter(models.values())) if len(models) == 1 else {})
    # An adapter has the context of its base.
    for one in (row, models.get(row.get("parent"), {})):
        for name in _LENGTHS:
            if type(value := one.get(name)) is int and value > 0:
                return value
    return None


_HINTS = {
    400: "The server's words say which field it does not take; a prompt must be shorter than the model's context",
    401: "Set CWTRAIN_ROLLOUT_API_KEY, or CWTRAIN_ROLLOUT_API_KEY_FILE, to a valid key",
    403: "The key's roles do not allow inference on this endpoint",
    404: "Check CWTRAIN_ROLLOUT_BASE_URL (it ends in /v1) and CWTRAIN_ROLLOUT_MODEL (the deployment's model name)",
    501: "The endpoint has no /completions for this model",
}
