"""One completions request on one replica: from prompts to choices, token by token.

Between two tokens the event loop runs, so other requests go on and a swap of weights can happen: the next token is then
computed by the new weights on what was remembered with the old ones.
"""

from __future__ import annotations

import asyncio
import codecs
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cwtrain_emulator.engine.numpy_engine import NumpyEngine
from cwtrain_emulator.engine.sampling import Floats, Penalties, Sampling, Step, generator, sample
from cwtrain_emulator.engine.tokenizer import ByteTokenizer, TextError
from cwtrain_emulator.replica.serving import Served

__all__ = ["Completion", "RequestError", "complete"]

_DEFAULT_MAX_TOKENS = 16
_LOWEST_LOGPROB = -9999.0
# Below this a temperature means greedy decoding, as in vLLM: dividing by it would leave nothing finite.
_GREEDY_BELOW = 1e-5

Fragment = dict[str, Any]


class RequestError(Exception):
    """A request that cannot be served; `status` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param


@dataclass
class Completion:
    """A finished request: its choices, and which identity computed each token (with whose remembered prompt)."""

    choices: list[dict[str, Any]] = field(default_factory=list)
    prompt_tokens: int = 0
    completion_tokens: int = 0
    record: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] | None = None


@dataclass
class _Choice:
    """One answer that is being made."""

    index: int
    tokens: list[int] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[dict[str, float]] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sent_tokens: int = 0
    sent_text: int = 0
    decoder: codecs.IncrementalDecoder = field(default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace"))


class _Group:
    """The choices of one prompt."""

    def __init__(
        self, served: Served, request: Mapping[str, Any], *, number: int, draw: int, seed: int, mode: str
    ) -> None:
        if served.engine is None or served.tokenizer is None:
            raise RequestError(
                501, f"the served checkpoint is a {served.model_type!r} model, which the numpy engine does not run"
            )
        self._request = request
        self._served = served
        self._engine: NumpyEngine = served.engine
        self._tokenizer: ByteTokenizer = served.tokenizer
        self._processed = mode == "processed_logprobs"
        self.prompt = self._prompt_ids(request["prompts"][number])
        self.read_with = served.identity
        self.n = int(request["n"])
        self.max_tokens = self._token_limit()
        self._sampling = _sampling(request["sampling"], served.defaults)
        self._stops: list[str] = request["stop"]
        self._held_back = max((len(stop) for stop in self._stops), default=1) - 1
        self._eos = frozenset() if request["ignore_eos"] else served.eos_ids
        self._stop_ids = frozenset(request["stop_token_ids"])
        self.choices = [_Choice(number * self.n + position) for position in range(self.n)]
        self._uniforms = np.stack([self._numbers(position, draw, seed) for position in range(self.n)])

    def _prompt_ids(self, prompt: list[int] | str) -> list[int]:
        if isinstance(prompt, str):
            try:
                ids = self._tokenizer.encode(prompt)
            except TextError as exc:
                raise RequestError(400, str(exc), param="prompt") from None
        else:
            ids = prompt
        if not ids:
            raise RequestError(400, "the prompt is empty", param="prompt")
        largest = max(ids)
        if largest >= self._engine.vocab_size:
            raise RequestError(
                400, f"token id {largest} is out of vocabulary ({self._engine.vocab_size})", param="prompt"
            )
        return ids

    def _token_limit(self) -> int:
        limit = min(self._engine.max_length, self._request.get("max_model_len") or self._engine.max_length)
        room = limit - len(self.prompt)
        if room < 1:
            raise RequestError(
                400,
                f"This model's maximum context length is {limit} tokens, but the prompt has {len(self.prompt)} tokens "
                "and leaves no room for an answer.",
                param="prompt",
            )
        asked: int | None = self._request["max_tokens"]
        if asked is None:
            return min(self._served.default_max_tokens or _DEFAULT_MAX_TOKENS, room)
        if asked > room:
            raise RequestError(
                400,
                f"'max_tokens' is too large: {asked}. This model's maximum context length is {limit} tokens and the "
                f"prompt has {len(self.prompt)} tokens.",
                param="max_tokens",
            )
        return asked

    def _numbers(self, position: int, draw: int, seed: int) -> Floats:
        asked = self._request["seed"]
        if asked is not None:
            words: list[object] = ["seeded", asked, position]
        else:
            ids = ",".join(map(str, self.prompt))
            words = ["unseeded", seed, self._served.identity, ids, draw, position]
        return generator(words).random(self.max_tokens)

    async def run(self, current: Callable[[], Served], emit: Callable[[list[Fragment]], None] | None) -> None:
        """Make all tokens; `emit` gets what is new after each step."""
        # An earlier prompt of this request may have taken a while: read this one with the weights of now.
        self._follow(current(), batch_accepts=lambda engine: True)
        self.read_with = self._served.identity
        batch = self._engine.start(self.prompt, self.n)
        penalties = None
        if self._sampling.penalised:
            penalties = Penalties.of(self.prompt, vocab_size=self._engine.vocab_size, copies=self.n)
        active = list(self.choices)
        for position in range(self.max_tokens):
            if not self._follow(current(), batch_accepts=lambda engine: engine.accepts(batch)):
                for choice in active:
                    self._finish(choice, "abort")
                break
            rows = np.array([choice.index - self.choices[0].index for choice in active])
            step = sample(
                self._engine.logits(batch),
                self._sampling,
                self._uniforms[rows, position],
                penalties=penalties,
                banned=sorted(self._eos | self._stop_ids) if position < self._request["min_tokens"] else (),
            )
            self._take(active, step)
            if penalties is not None:
                penalties.counts[np.arange(len(active)), step.tokens] += 1
            going = np.array([choice.finish_reason is None for choice in active])
            if emit is not None:
                emit([fragment for choice in active if (fragment := self._fragment(choice))])
            active = [choice for choice in active if choice.finish_reason is None]
            if not active:
                break
            self._engine.extend(batch, step.tokens)
            if not going.all():
                self._engine.keep(batch, going)
                if penalties is not None:
                    penalties = Penalties(penalties.in_prompt[going], penalties.counts[going])
            await asyncio.sleep(0)
        if emit is not None:
            emit([fragment for choice in self.choices if (fragment := self._fragment(choice))])

    def _follow(self, now: Served, *, batch_accepts: Callable[[NumpyEngine], bool]) -> bool:
        """Go on with the weights served now; False when they are of another shape."""
        if now is self._served:
            return True
        engine = now.engine
        if engine is None or engine.vocab_size != self._engine.vocab_size or not batch_accepts(engine):
            return False
        self._served, self._engine = now, engine
        return True

    def _take(self, active: Sequence[_Choice], step: Step) -> None:
        """Append one step's token to each choice and end those that end with it."""
        wanted: int | None = self._request["logprobs"]
        logprobs = step.processed if self._processed else step.raw
        chosen = logprobs[np.arange(len(active)), step.tokens]
        if not np.isfinite(chosen).all():
            raise RequestError(500, f"the weights of {self._served.identity} give no finite log-probs")
        for row, choice in enumerate(active):
            token = int(step.tokens[row])
            choice.tokens.append(token)
            choice.identities.append(self._served.identity)
            if wanted is not None:
                logprob = float(chosen[row])
                choice.logprobs.append(logprob)
                choice.names.append(self._name(token))
                choice.tops.append(self._top(logprobs[row], token, logprob, wanted))
                choice.offsets.append(len(choice.text))
            self._read(choice, token)

    def _read(self, choice: _Choice, token: int) -> None:
        ended = len(choice.tokens) > self._request["min_tokens"] and (token in self._eos or token in self._stop_ids)
        if not ended or self._request["include_stop_str_in_output"]:
            choice.text += choice.decoder.decode(self._tokenizer.decode_bytes([token]))
        if ended:
            choice.stop_reason = None if token in self._eos else token
            self._finish(choice, "stop")
        elif not self._find_stop(choice) and len(choice.tokens) >= self.max_tokens:
            self._finish(choice, "length")

    def _find_stop(self, choice: _Choice) -> bool:
        places = [(place, stop) for stop in self._stops if (place := choice.text.find(stop, choice.sent_text)) >= 0]
        if not places or len(choice.tokens) <= self._request["min_tokens"]:
            return False
        place, stop = min(places)
        choice.text = choice.text[: place + (len(stop) if self._request["include_stop_str_in_output"] else 0)]
        choice.finish_reason, choice.stop_reason = "stop", stop
        return True

    def _finish(self, choice: _Choice, reason: str) -> None:
        choice.text += choice.decoder.decode(b"", final=True)
        choice.finish_reason = reason

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._request["tokens_as_ids"] else self._tokenizer.decode([token])

    def _top(self, logprobs: Floats, token: int, logprob: float, wanted: int) -> dict[str, float]:
        found = {self._name(token): logprob}
        if wanted:
            best = np.argsort(-logprobs, kind="stable")[:wanted]
            for other in best:
                found.setdefault(self._name(int(other)), max(float(logprobs[other]), _LOWEST_LOGPROB))
        return found

    def _fragment(self, choice: _Choice) -> Fragment | None:
        """Return what of a choice has not been sent, or None; text that may turn out to be a stop string waits."""
        done = choice.finish_reason is not None
        end = len(choice.text) if done else max(choice.sent_text, len(choice.text) - self._held_back)
        start_token, start_text = choice.sent_tokens, choice.sent_text
        if start_token == len(choice.tokens) and start_text == end:
            return None
        choice.sent_tokens, choice.sent_text = len(choice.tokens), end
        return self.rendered(choice, start_token, start_text, end)

    def rendered(self, choice: _Choice, start_token: int = 0, start_text: int = 0, end: int | None = None) -> Fragment:
        """Return a choice, or the part of it from some token and character on, as the answer shows it."""
        part: Fragment = {
            "index": choice.index,
            "text": choice.text[start_text:end],
            "logprobs": None,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._request["logprobs"] is not None:
            part["logprobs"] = {
                "text_offset": choice.offsets[start_token:],
                "token_logprobs": choice.logprobs[start_token:],
                "tokens": choice.names[start_token:],
                "top_logprobs": choice.tops[start_token:],
            }
        if self._request["return_token_ids"]:
            part["token_ids"] = choice.tokens[start_token:]
            if start_token == 0:
                part["prompt_token_ids"] = self.prompt
        return part


async def complete(
    request: Mapping[str, Any],
    *,
    current: Callable[[], Served],
    seed: int,
    mode: str,
    emit: Callable[[list[Fragment]], None] | None = None,
) -> Completion:
    """Serve a request, which the gateway has checked, with the weights that `current` gives at each token.

    Raises RequestError. With `emit` the choices go out in fragments, and the result's `choices` stay empty.
    """
    served = current()
    groups = [
        _Group(served, request, number=number, draw=draw, seed=seed, mode=mode)
        for number, draw in enumerate(request["draws"])
    ]
    result = Completion()
    for group in groups:
        await group.run(current, emit)
        result.prompt_tokens += len(group.prompt)
        for choice in group.choices:
            result.completion_tokens += len(choice.tokens)
            result.record.append(
                {"index": choice.index, "prompt_read_with": group.read_with, "runs": _runs(choice.identities)}
            )
            if emit is None:
                result.choices.append(group.rendered(choice))
            if request["report_tokens"]:
                result.tokens = choice.tokens
    return result


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
