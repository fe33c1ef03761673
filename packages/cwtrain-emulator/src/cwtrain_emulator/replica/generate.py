"""One completions request on one replica: from prompts to choices, token by token.

Between two tokens the event loop runs, so other requests go on and a swap of weights can happen: the next token is then
computed by the new weights on what was remembered with the old ones.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from cwtrain_emulator.engine.base import Engine, TextError, Tokenizer
from cwtrain_emulator.engine.prefix_cache import PrefixCache
from cwtrain_emulator.engine.sampling import Floats, Penalties, Sampling, Step, generator, sample
from cwtrain_emulator.replica.capacity import between_tokens
from cwtrain_emulator.replica.render import Choice, Form, Fragment, ranked
from cwtrain_emulator.replica.serving import Served

__all__ = ["Completion", "Context", "RequestError", "complete", "too_long"]

_DEFAULT_MAX_TOKENS = 16
# Below this a temperature means greedy decoding, as in vLLM: dividing by it would leave nothing finite.
_GREEDY_BELOW = 1e-5


class RequestError(Exception):
    """A request that cannot be served; `status` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass
class Completion:
    """A finished request: its choices, and which identity computed each token (with whose KV)."""

    choices: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    record: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] | None = None
    prompt_token_ids: list[int] | None = None


@dataclass
class Context:
    """What requests share on a replica.

    `current` gives what is served now and raises RequestError when nothing is. Whoever holds `gate` may compute, or
    swap the weights: so a swap falls between two tokens. `compute` runs the engines that are slow.
    """

    current: Callable[[], Served]
    seed: int = 0
    gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    cache: PrefixCache | None = None
    compute: Executor | None = None


class _Group:
    """The choices of one prompt."""

    def __init__(
        self,
        served: Served,
        request: Mapping[str, Any],
        context: Context,
        *,
        number: int,
        mode: str,
        faults: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        if served.engine is None or served.tokenizer is None:
            raise RequestError(501, served.why_not or f"a {served.model_type!r} model is not run here")
        self._request = request
        self._context = context
        self._served = served
        self._too_long = next((fault for fault in faults if fault["kind"] == "too_long"), None)
        self._engine: Engine = served.engine
        self._tokenizer: Tokenizer = served.tokenizer
        self._processed = mode == "processed_logprobs"
        self._salt: str = request.get("cache_salt") or ""
        self._cache = context.cache if request.get("prefix_caching", True) else None
        self.prompt = self._prompt_ids(request["prompts"][number])
        for fault in faults:
            if fault["kind"] == "expand":
                # No longer than what is refused anyway.
                self.prompt = self.prompt + self.prompt[-1:] * min(fault["by"], self._engine.max_length + 1)
        self.read_with: list[str] = []
        self.cached_tokens = 0
        self.n = int(request["n"])
        self.max_tokens = self._token_limit()
        self._sampling = _sampling(request["sampling"], served.defaults)
        self._stops: list[str] = request["stop"]
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._eos = frozenset() if request["ignore_eos"] else served.eos_ids
        self._stop_ids = frozenset(request["stop_token_ids"])
        skip_special = request["skip_special_tokens"]
        self.choices = [
            Choice(number * self.n + position, self._tokenizer.detokenizer(self.prompt, skip_special=skip_special))
            for position in range(self.n)
        ]
        draw = request["draws"][number]
        self._uniforms = np.stack([self._numbers(position, draw) for position in range(self.n)])
        self.form = Form(request, self._tokenizer, self.prompt)

    def _prompt_ids(self, prompt: Any) -> list[int]:
        try:
            if isinstance(prompt, Mapping):
                ids = self._tokenizer.chat(prompt["messages"], prompt["options"])
            else:
                ids = self._tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        except TextError as exc:
            raise RequestError(400, str(exc), param=self._prompt_field) from None
        if not ids:
            raise RequestError(400, "the prompt is empty", param=self._prompt_field)
        largest = max(ids)
        if largest >= self._engine.vocab_size:
            raise RequestError(
                400, f"token id {largest} is out of vocabulary ({self._engine.vocab_size})", param=self._prompt_field
            )
        return ids

    @property
    def _prompt_field(self) -> str:
        return "messages" if self._request["chat"] else "prompt"

    def _token_limit(self) -> int:
        limit = min(self._engine.max_length, self._request.get("max_model_len") or self._engine.max_length)
        room = limit - len(self.prompt)
        asked: int | None = self._request["max_tokens"]
        if room < 1:
            raise self._refusal(limit, asked, self._prompt_field)
        if asked is None:
            usual = room if self._request["chat"] else _DEFAULT_MAX_TOKENS
            return min(self._served.default_max_tokens or usual, room)
        if asked > room:
            raise self._refusal(limit, asked, "max_tokens")
        return asked

    def _refusal(self, limit: int, asked: int | None, param: str) -> RequestError:
        """Return the refusal of a prompt and an answer that are longer than the context."""
        fault, prompt = self._too_long, len(self.prompt)
        words = "own" if fault is None else fault["words"]
        status = 400 if fault is None else fault["answer"]
        return RequestError(status, too_long(words, limit=limit, prompt=prompt, asked=asked), param=param)

    def _numbers(self, position: int, draw: int) -> Floats:
        asked = self._request["seed"]
        if asked is not None:
            words: list[object] = ["seeded", asked, position]
        else:
            ids = ",".join(map(str, self.prompt))
            words = ["unseeded", self._context.seed, self._served.identity, ids, draw, position]
        return generator(words).random(self.max_tokens)

    def end_with(self, ending: Mapping[str, Any]) -> None:
        """Have choices end as a fault wants it: with its reason, and after so many tokens at the latest."""
        for choice in self.choices:
            if ending.get("choice") in (None, choice.index - self.choices[0].index):
                choice.told_reason, choice.most_tokens = ending.get("reason", ""), ending.get("tokens")
                if choice.most_tokens == 0:
                    choice.finish("abort")

    async def run(self, emit: Callable[[list[Fragment]], None] | None) -> None:
        """Make all tokens; `emit` gets what is new after each step."""
        batch: Any = None
        penalties = None
        active = [choice for choice in self.choices if choice.finish_reason is None]
        if self._sampling.penalised:
            penalties = Penalties.of(self.prompt, vocab_size=self._engine.vocab_size, copies=len(active))
        epoch = -1
        for position in range(self.max_tokens if active else 0):
            async with self._context.gate:
                if not self._follow(self._context.current()):
                    for choice in active:
                        choice.finish("abort")
                    break
                if batch is None:
                    # Not before this: an earlier prompt of this request may have taken a while.
                    epoch = 0 if self._cache is None else self._cache.epoch
                    batch = self._begin()
                logits = await self._read(batch)
                identity = self._served.identity
            self.read_with += [identity] * (len(self.prompt) + position - len(self.read_with))
            if position == 0:
                self._keep_in_cache(batch, 0, self.prompt, epoch)
                self._engine.repeat(batch, len(active))
                logits = np.repeat(logits, len(active), axis=0)
            rows = np.array([choice.index - self.choices[0].index for choice in active])
            step = sample(
                logits,
                self._sampling,
                self._uniforms[rows, position],
                penalties=penalties,
                banned=sorted(self._eos | self._stop_ids) if position < self._request["min_tokens"] else (),
            )
            self._take(active, step, identity)
            if penalties is not None:
                penalties.counts[np.arange(len(active)), step.tokens] += 1
            going = np.array([choice.finish_reason is None for choice in active])
            for row in np.flatnonzero(~going):
                self._keep_in_cache(batch, int(row), [*self.prompt, *active[row].tokens[:-1]], epoch)
            if emit is not None:
                emit([fragment for choice in active for fragment in self._fragments(choice)])
            active = [choice for choice in active if choice.finish_reason is None]
            if not active:
                break
            self._engine.extend(batch, step.tokens)
            if not going.all():
                self._engine.keep(batch, going)
                if penalties is not None:
                    penalties = Penalties(penalties.in_prompt[going], penalties.counts[going])
            await between_tokens()
        if emit is not None:
            emit([fragment for choice in self.choices for fragment in self._fragments(choice)])

    def _begin(self) -> Any:
        """Return the prompt as a batch of one, with what the cache has of it."""
        found = None if self._cache is None else self._cache.find(self._engine, self._salt, self.prompt)
        if found is None:
            return self._engine.start(self.prompt)
        self.cached_tokens = found.memory.length
        self.read_with = list(found.read_with)
        return self._engine.start(self.prompt, found.memory)

    def _keep_in_cache(self, batch: Any, row: int, tokens: list[int], epoch: int) -> None:
        if self._cache is not None and self._cache.epoch == epoch:
            known = self.read_with[: len(tokens)]
            self._cache.put(self._engine, self._salt, tokens, lambda: self._engine.remember(batch, row), known)

    async def _read(self, batch: Any) -> npt.NDArray[np.float32]:
        if not self._engine.in_thread:
            return self._engine.read(batch)
        work = asyncio.get_running_loop().run_in_executor(self._context.compute, self._engine.read, batch)
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            # A thread cannot be stopped: hold the gate until it is done, so that nobody swaps under it.
            await asyncio.wait([work])
            raise

    def _follow(self, now: Served) -> bool:
        """Go on with the weights served now; False when they are of another shape."""
        if now is self._served:
            return True
        engine = now.engine
        if engine is None or engine.shape != self._engine.shape:
            return False
        self._served, self._engine = now, engine
        return True

    def _take(self, active: Sequence[Choice], step: Step, identity: str) -> None:
        """Append one step's token to each choice and end those that end with it."""
        wanted: int | None = self._request["logprobs"]
        logprobs = step.processed if self._processed else step.raw
        chosen = logprobs[np.arange(len(active)), step.tokens]
        if not np.isfinite(chosen).all():
            raise RequestError(500, f"the weights of {identity} give no finite log-probs")
        for row, choice in enumerate(active):
            token = int(step.tokens[row])
            choice.tokens.append(token)
            choice.identities.append(identity)
            if wanted is not None:
                choice.logprobs.append(float(chosen[row]))
                choice.tops.append(ranked(logprobs[row], wanted))
                choice.offsets.append(len(choice.text))
            self._show(choice, token)

    def _show(self, choice: Choice, token: int) -> None:
        """Add a token's text, and end the choice where it ends."""
        ended = len(choice.tokens) > self._request["min_tokens"] and (token in self._eos or token in self._stop_ids)
        if not ended or self._request["include_stop_str_in_output"]:
            choice.text += choice.detokenizer.push(token)
        if ended:
            choice.stop_reason = None if token in self._eos else token
            choice.finish("stop")
        elif not self._find_stop(choice) and len(choice.tokens) >= self._most(choice):
            choice.finish("length")

    def _most(self, choice: Choice) -> int:
        return self.max_tokens if choice.most_tokens is None else min(self.max_tokens, choice.most_tokens)

    def _find_stop(self, choice: Choice) -> bool:
        places = [(place, stop) for stop in self._stops if (place := choice.text.find(stop, choice.sent_text)) >= 0]
        if not places or len(choice.tokens) <= self._request["min_tokens"]:
            return False
        place, stop = min(places)
        choice.text = choice.text[: place + (len(stop) if self._request["include_stop_str_in_output"] else 0)]
        choice.finish_reason, choice.stop_reason = "stop", stop
        return True

    def _fragments(self, choice: Choice) -> list[Fragment]:
        """Return what of a choice has not been sent; text that may turn out to be a stop string waits."""
        done = choice.finish_reason is not None
        end = len(choice.text) if done else max(choice.sent_text, len(choice.text) - self._held_back)
        start_token, start_text = choice.sent_tokens, choice.sent_text
        if start_token == len(choice.tokens) and start_text == end and choice.sent_end == done:
            return []
        choice.sent_tokens, choice.sent_text, choice.sent_end = len(choice.tokens), end, done
        return [*self.form.opening(choice), self.form.part(choice, start_token, start_text, end)]

    def record(self, choice: Choice) -> dict[str, Any]:
        """Return whose weights computed each token of a choice, and whose KV each token's computation could see."""
        return {
            "index": choice.index,
            "cached_tokens": self.cached_tokens,
            "prompt_tokens": len(self.prompt),
            "window": self._engine.window,
            "kv": _runs(self.read_with[: len(self.prompt) + max(len(choice.tokens) - 1, 0)]),
            "runs": _runs(choice.identities),
        }


async def complete(
    request: Mapping[str, Any],
    context: Context,
    *,
    mode: str,
    emit: Callable[[list[Fragment]], None] | None = None,
    faults: Sequence[Mapping[str, Any]] = (),
) -> Completion:
    """Serve a request, which the gateway has checked, with the weights that are current at each token.

    Raises RequestError. With `emit` the choices go out in fragments, and the result's `choices` stay empty. `faults`
    are those that change what is answered.
    """
    served = context.current()
    groups = [
        _Group(served, request, context, number=number, mode=mode, faults=faults)
        for number in range(len(request["prompts"]))
    ]
    for group in groups:
        for fault in faults:
            if fault["kind"] == "finish":
                group.end_with(fault)
    result = Completion()
    if request["chat"] and request["return_token_ids"]:
        result.prompt_token_ids = groups[0].prompt
    for group in groups:
        await group.run(emit)
        result.prompt_tokens += len(group.prompt)
        result.cached_tokens += group.cached_tokens
        for choice in group.choices:
            result.completion_tokens += len(choice.tokens)
            result.record.append(group.record(choice))
            if emit is None:
                result.choices.append(group.form.part(choice))
            if request["report_tokens"]:
                result.tokens = choice.tokens
    return result


def too_long(words: str, *, limit: int, prompt: int, asked: int | None) -> str:
    """Return how an engine (or this emulator) refuses `prompt` and `asked` tokens where `limit` go."""
    answer = asked or 0
    fits = prompt < limit
    if words == "vllm":
        return (
            f"You passed {prompt} input tokens and requested {answer} output tokens. However, the model's context "
            f"length is only {limit} tokens, resulting in a maximum input length of {max(0, limit - answer)} tokens. "
            "Please reduce the length of the input prompt."
        )
    if words == "vllm-length":
        return (
            f"The decoder prompt (length {prompt}) is longer than the maximum model length of {limit}. Make sure that "
            "`max_model_len` is no smaller than the number of text tokens."
        )
    if words == "vllm-old":
        return (
            f"This model's maximum context length is {limit} tokens. However, you requested {prompt + answer} tokens "
            f"({prompt} in the messages, {answer} in the completion). Please reduce the length of the messages or "
            "completion."
        )
    if words == "sglang" or (words == "sglang-input" and fits):
        return (
            f"Requested token count exceeds the model's maximum context length of {limit} tokens. You requested a "
            f"total of {prompt + answer} tokens: {prompt} tokens from the input messages and {answer} tokens for the "
            "completion."
        )
    if words == "sglang-input":
        return f"The input ({prompt} tokens) is longer than the model's context length ({limit} tokens)."
    if words == "none":
        return "The request cannot be served."
    if fits:
        return (
            f"'max_tokens' is too large: {asked}. This model's maximum context length is {limit} tokens and the "
            f"prompt has {prompt} tokens."
        )
    return (
        f"This model's maximum context length is {limit} tokens, but the prompt has {prompt} tokens "
        "and leaves no room for an answer."
    )


def _sampling(asked: Mapping[str, float], defaults: Mapping[str, float]) -> Sampling:
    """Return the request's sampling fields; what it leaves out comes from the snapshot's generation_config."""
    values = {**defaults, **asked}
    temperature = values.get("temperature", 1.0)
    top_k = values.get("top_k", 0)
    return Sampling(
        temperature=0.0 if temperature < _GREEDY_BELOW or not math.isfinite(temperature) else temperature,
        top_p=min(max(values.get("top_p", 1.0), 1e-12), 1.0),
        top_k=int(top_k) if top_k > 0 else 0,
        min_p=min(max(values.get("min_p", 0.0), 0.0), 1.0),
        repetition_penalty=values.get("repetition_penalty", 1.0) or 1.0,
        presence_penalty=values.get("presence_penalty", 0.0),
        frequency_penalty=values.get("frequency_penalty", 0.0),
    )


def _runs(identities: Sequence[str]) -> list[list[Any]]:
    """Return the identities as runs of (identity, tokens)."""
    runs: list[list[Any]] = []
    for identity in identities:
        if runs and runs[-1][0] == identity:
            runs[-1][1] += 1
        else:
            runs.append([identity, 1])
    return runs
