"""Answers of a ``/completions`` endpoint: decoded into typed structs and judged, choice by choice.

Nothing here talks to a network. ``read_answer`` raises ``BadAnswer`` for an answer that cannot be used at all; what is
wrong with one choice alone stands in ``ReadAnswer.problems``, and the good choices are kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import attrs
import msgspec

from cwtrain_rollout.protocol import SampleStatus

__all__ = ["BadAnswer", "GoodChoice", "ReadAnswer", "UnfitAnswer", "excerpt", "read_answer"]

_ROUNDING = 1e-3
"""A log-prob this far above 0 is rounding of the engine; more is no log-prob."""
_FLOOR = -9999.0
_TOKEN_PREFIX = "token_id:"  # noqa: S105 - how vLLM spells a token, no secret
_STATUSES = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED}


class BadAnswer(Exception):
    """An answer that cannot be used; asking again may help."""


class UnfitAnswer(Exception):
    """An answer that cannot be used and will not change: ``hint`` names the setting."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _Logprobs(msgspec.Struct):
    tokens: list[str] | None = None
    token_logprobs: list[float | None] | None = None


class _Choice(msgspec.Struct):
    index: int | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None


class _Nvext(msgspec.Struct):
    completion_token_ids: list[int] | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    nvext: _Nvext | None = None
    object: str | None = None
    error: msgspec.Raw = msgspec.Raw(b"")
    message: msgspec.Raw = msgspec.Raw(b"")


_DECODER = msgspec.json.Decoder(_Answer)


@attrs.frozen(kw_only=True)
class GoodChoice:
    """A choice that has everything a training sample needs."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    status: SampleStatus
    finish_reason: str
    text: str
    floors: int
    """Log-probs at -9999 or below."""


@attrs.frozen(kw_only=True)
class ReadAnswer:
    """The usable choices of an answer by index, what was wrong with others, and how many came that nobody asked for."""

    choices: dict[int, GoodChoice]
    problems: tuple[str, ...] = ()
    extra: int = 0


def excerpt(body: bytes, limit: int = 200) -> str:
    """Return the start of ``body`` as one line of text, for a message."""
    text = " ".join(body[: limit * 4].decode("utf-8", "replace").split())
    return text[:limit] + ("..." if len(text) > limit else "")


def read_answer(
    body: bytes,
    *,
    n: int,
    prompt_tokens: int,
    logprobs_required: bool = True,
    quote: Callable[[bytes], str] = excerpt,
) -> ReadAnswer:
    """Return what is usable in the body of a 200 answer to a request for ``n`` choices.

    ``quote`` turns a body into the text that a message may show of it.

    Raises ``BadAnswer`` when nothing can be used but asking again may help (cut, HTML, an error inside, an index
    twice), ``UnfitAnswer`` when asking again cannot help (no token ids at all, another prompt length).
    """
    answer = _decode(body, quote)
    choices = answer.choices
    if not choices:
        raise BadAnswer("the answer has no choices")
    _check_usage(answer, prompt_tokens)
    _check_indices(choices)
    completion_ids = answer.nvext.completion_token_ids if answer.nvext and n == 1 and len(choices) == 1 else None

    good: dict[int, GoodChoice] = {}
    problems: list[str] = []
    extra = no_ids = 0
    for place, choice in enumerate(choices):
        index = place if choice.index is None else choice.index
        if not 0 <= index < n:
            extra += 1
            continue
        ids = _token_ids(choice, completion_ids)
        if ids is None:
            no_ids += 1
            problems.append(f"choice {index} has no token ids")
            continue
        read = _judge(index, choice, ids, logprobs_required)
        if isinstance(read, str):
            problems.append(f"choice {index}: {read}")
        else:
            good[index] = read
    if no_ids and no_ids == len(choices) - extra:
        raise UnfitAnswer(
            "the answer holds no token ids (neither choices[].token_ids, nor logprobs.tokens as 'token_id:N')",
            hint="The server must honour return_token_ids or return_tokens_as_token_ids: use a newer vLLM or Dynamo",
        )
    problems += [
        f"choice {index} is missing" for index in range(n) if index not in good and not _named(index, problems)
    ]
    return ReadAnswer(choices=good, problems=tuple(problems), extra=extra)


def _decode(body: bytes, quote: Callable[[bytes], str]) -> _Answer:
    if not body.strip():
        raise BadAnswer("the answer is empty")
    try:
        answer = _DECODER.decode(body)
    except msgspec.ValidationError as exc:
        raise BadAnswer(f"the answer has an unexpected shape: {exc}: {quote(body)}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        kind = "an HTML page" if body.lstrip()[:1] == b"<" else "not JSON (cut short, or with NaN or Infinity in it)"
        raise BadAnswer(f"the answer is {kind}: {quote(body)}") from exc
    if bytes(answer.error) not in (b"", b"null") or answer.object == "error":
        raise BadAnswer(f"the answer is an error in spite of its status 200: {quote(body)}")
    return answer


def _check_usage(answer: _Answer, prompt_tokens: int) -> None:
    said = answer.usage.prompt_tokens if answer.usage else None
    if said is not None and said != prompt_tokens:
        raise UnfitAnswer(
            f"the server counted {said} prompt tokens where {prompt_tokens} were sent: it changed the prompt",
            hint="Serve the model without prompt truncation and without special tokens added to token-id prompts",
        )


def _check_indices(choices: list[_Choice]) -> None:
    seen: set[int] = set()
    for choice in choices:
        if choice.index is None:
            if len(choices) > 1:
                raise BadAnswer("choices have no index, so they cannot be told apart")
            continue
        if choice.index in seen:
            raise BadAnswer(f"two choices have the index {choice.index}")
        seen.add(choice.index)


def _token_ids(choice: _Choice, completion_ids: list[int] | None) -> list[int] | None:
    if choice.token_ids is not None:
        return choice.token_ids
    tokens = choice.logprobs.tokens if choice.logprobs else None
    if tokens and all(token.startswith(_TOKEN_PREFIX) for token in tokens):
        try:
            return [int(token[len(_TOKEN_PREFIX) :]) for token in tokens]
        except ValueError:
            return None
    return completion_ids


def _judge(index: int, choice: _Choice, ids: list[int], logprobs_required: bool) -> GoodChoice | str:
    """Return the choice as a good one, or what is wrong with it."""
    reason = choice.finish_reason
    status = _STATUSES.get(reason or "")
    if status is None or reason is None:
        return f"it ended with finish_reason {reason!r}"
    if not ids:
        return "it has no tokens"
    if min(ids) < 0:
        return "it has a negative token id"
    given = choice.logprobs.token_logprobs if choice.logprobs else None
    values = _logprobs(given, len(ids))
    if isinstance(values, str):
        if logprobs_required:
            return values
        values = []
    return GoodChoice(
        index=index,
        token_ids=tuple(ids),
        logprobs=tuple(values),
        status=status,
        finish_reason=reason,
        text=choice.text or "",
        floors=sum(value <= _FLOOR for value in values),
    )


def _logprobs(given: list[float | None] | None, tokens: int) -> list[float] | str:
    if given is None:
        return "it has no log-probs"
    if len(given) != tokens:
        return f"it has {tokens} token ids and {len(given)} log-probs"
    values = [value for value in given if value is not None]
    if len(values) != tokens:
        return f"{tokens - len(values)} of its {tokens} log-probs are null"
    for value in values:
        if not math.isfinite(value):
            return f"it has the log-prob {value}"
        if value > _ROUNDING:
            return f"it has the log-prob {value}, which is above 0"
    return values


def _named(index: int, problems: list[str]) -> bool:
    return any(problem.startswith((f"choice {index} ", f"choice {index}:")) for problem in problems)
