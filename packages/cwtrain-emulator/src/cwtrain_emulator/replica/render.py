"""How a choice is shown in an answer: the completions form and the chat form, whole or in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cwtrain_emulator.engine.base import Detokenizer, Tokenizer
from cwtrain_emulator.engine.sampling import Floats

__all__ = ["Choice", "Form", "Fragment", "ranked"]

_LOWEST_LOGPROB = -9999.0

Fragment = dict[str, Any]
Ranked = list[tuple[int, float]]


@dataclass
class Choice:
    """One answer that is being made. `tops` has, for each token, the likeliest ids with their log-probs.

    `told_reason` and `most_tokens` are what a fault wants of its end.
    """

    index: int
    detokenizer: Detokenizer
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Ranked] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    identities: list[str] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    sent_tokens: int = 0
    sent_text: int = 0
    sent_end: bool = False
    begun: bool = False
    told_reason: str | None = None
    most_tokens: int | None = None

    @property
    def shown_reason(self) -> str | None:
        """The finish reason as it is told: a fault may have another one, or ``null``."""
        if self.finish_reason is None or self.told_reason is None:
            return self.finish_reason
        return None if self.told_reason == "null" else self.told_reason

    def finish(self, reason: str) -> None:
        """End it, with the text that was still waiting."""
        self.text += self.detokenizer.finish()
        self.finish_reason = reason


def ranked(logprobs: Floats, count: int) -> Ranked:
    """Return the `count` likeliest ids with their log-probs; minus infinity becomes a number that JSON has."""
    if not count:
        return []
    best = np.argsort(-logprobs, kind="stable")[:count]
    return [(int(token), max(float(logprobs[token]), _LOWEST_LOGPROB)) for token in best]


class Form:
    """Renders the choices of one prompt as its request wants them."""

    def __init__(self, request: Mapping[str, Any], tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._chat: bool = request["chat"]
        self._stream: bool = request["stream"]
        self._wanted: int | None = request["logprobs"]
        self._as_ids: bool = request["tokens_as_ids"]
        self._token_ids: bool = request["return_token_ids"]
        self._tokenizer = tokenizer
        self._prompt = prompt

    def opening(self, choice: Choice) -> list[Fragment]:
        """Return what goes out before a choice's first token: in chats, its role."""
        if not self._chat or choice.begun:
            return []
        choice.begun = True
        delta = {"role": "assistant", "content": ""}
        return [{"index": choice.index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def part(self, choice: Choice, start_token: int = 0, start_text: int = 0, end: int | None = None) -> Fragment:
        """Return a choice, or the part of it from some token and character on."""
        text = choice.text[start_text:end]
        part: Fragment = {
            "index": choice.index,
            "logprobs": None if self._wanted is None else self._logprobs(choice, start_token),
            "finish_reason": choice.shown_reason,
            "stop_reason": choice.stop_reason,
        }
        if not self._chat:
            part["text"] = text
        elif self._stream:
            part["delta"] = {"content": text}
        else:
            part["message"] = {"role": "assistant", "content": text}
        if self._token_ids:
            part["token_ids"] = choice.tokens[start_token:]
            if start_token == 0 and not self._chat:
                part["prompt_token_ids"] = self._prompt
        return part

    def _logprobs(self, choice: Choice, start: int) -> dict[str, Any]:
        tokens, logprobs, tops = choice.tokens[start:], choice.logprobs[start:], choice.tops[start:]
        if self._chat:
            shown = [
                {**self._entry(token, logprob), "top_logprobs": [self._entry(*other) for other in top]}
                for token, logprob, top in zip(tokens, logprobs, tops, strict=True)
            ]
            return {"content": shown}
        names = [self._name(token) for token in tokens]
        top_logprobs = []
        for name, logprob, top in zip(names, logprobs, tops, strict=True):
            found = {name: logprob}
            for other, value in top:
                found.setdefault(self._name(other), value)
            top_logprobs.append(found)
        return {
            "text_offset": choice.offsets[start:],
            "token_logprobs": logprobs,
            "tokens": names,
            "top_logprobs": top_logprobs,
        }

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.decode_bytes([token])
        return {"token": self._name(token), "logprob": logprob, "bytes": list(raw)}

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._as_ids else self._tokenizer.decode([token])
