"""Answers of a ``/completions`` endpoint: decoded into typed structs and judged, choice by choice.

Nothing here talks to a network. ``read_answer`` raises ``BadAnswer`` for an answer that cannot be used at all; what is
wrong with one choice alone stands in ``ReadAnswer.problems``, and the good choices are kept.

The typed decoder makes the arrays of token ids and log-probs in one pass, checks each number as it goes, and skips what
nobody reads (the spelled tokens, the alternatives): that is most of what a client's CPU is spent on. An answer that it
refuses (NaN, null, text for a number) is read once more, patiently, so that one bad choice does not take the others
along.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs
import msgspec

from cwtrain.config._quotes import quote
from cwtrain_rollout._answers import Answer, Choice, Fault, loosely
from cwtrain_rollout.protocol import RoutedExperts, SampleStatus

__all__ = [
    "BadAnswer",
    "GoodChoice",
    "ReadAnswer",
    "UnfitAnswer",
    "Wanted",
    "decode",
    "excerpt",
    "judge",
    "read_answer",
]

_FLOOR = -9999.0
_STATUSES = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
    "cancelled": SampleStatus.ABORTED,
}
"""The finish reasons whose meaning is known, as they are spelled. With any other one a choice is no sample."""
_DECODER = msgspec.json.Decoder(Answer)


class BadAnswer(Exception):
    """An answer that cannot be used; asking again may help. ``error`` is the body where that is a server's error."""

    def __init__(self, message: str, *, error: bytes | None = None) -> None:
        super().__init__(message)
        self.error = error


class UnfitAnswer(Exception):
    """An answer that cannot be used and will not change: ``hint`` names the setting."""

    def __init__(self, message: str, *, hint: str, without_ids: bool = False) -> None:
        super().__init__(message)
        self.hint = hint
        self.without_ids = without_ids


@attrs.define(kw_only=True, eq=False)
class Wanted:
    """What an answer must have to be used."""

    n: int = 1
    prompt_tokens: int | None = None
    """How many were sent; None where the prompt went as text, or with what may add to it."""
    least_prompt_tokens: int = 0
    """How many there must be at least, whatever is added: an image's placeholder becomes many."""
    logprobs: bool = True
    token_ids: bool = True
    aborted: bool = False
    """Whether an aborted choice is taken as it is, instead of being asked for again."""
    routed_experts: bool = False
    tokenise: Callable[[str], list[int]] | None = None
    quote: Callable[[bytes], str] = attrs.field(default=lambda body: excerpt(body))


@attrs.define(kw_only=True, eq=False)
class GoodChoice:
    """A choice that has everything a sample needs; one that is ABORTED has what there was."""

    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    status: SampleStatus
    finish_reason: str
    text: str = ""
    floors: int = 0
    """Log-probs at -9999 or below."""
    routed_experts: RoutedExperts | None = None
    retokenised: bool = False


@attrs.define(kw_only=True, eq=False)
class ReadAnswer:
    """The usable choices of an answer by index, what was wrong with others, and how many came that nobody asked for."""

    choices: dict[int, GoodChoice]
    problems: tuple[str, ...] = ()
    extra: int = 0
    given: int = 0
    """How many choices the answer had."""
    given_up: tuple[str, ...] = ()
    """The finish reasons of choices that are no samples because of them."""
    queue_seconds: float | None = None
    """How long the request waited at the server, where the answer says so."""
    identity: str | None = None
    """The one identity that made it, where the answer names it."""
    prompt_tokens: int | None = None
    """How many tokens the server counted in the prompt, where it says so."""
    unfit_routes: str | None = None
    """What is wrong with routed experts: with a server that never gave better ones, nothing will change that."""


class _Problem(str):
    """What is wrong with a choice."""

    __slots__ = ()


class _UnfitRoutes(str):
    """What is wrong with a choice's routed experts."""

    __slots__ = ()


def excerpt(body: bytes, limit: int = 200) -> str:
    """Return the start of ``body`` as one line of text, for a message."""
    return quote(body[: limit * 40].decode("utf-8", "replace"), limit)


def read_answer(body: bytes, wanted: Wanted) -> ReadAnswer:
    """Return what is usable in the body of a 200 answer.

    Raises ``BadAnswer`` when nothing can be used but asking again may help (cut, HTML, an error inside, an index
    twice), ``UnfitAnswer`` when asking again cannot help (no token ids at all, another prompt length).
    """
    answer, faults = decode(body, wanted.quote)
    if not answer.choices:
        raise BadAnswer(f"the answer has no choices: {wanted.quote(body)}")
    return judge(answer, wanted, faults)


def judge(answer: Answer, wanted: Wanted, faults: dict[int, Fault]) -> ReadAnswer:
    """Return what is usable in an answer. ``faults`` says of choices, by their place, why they cannot be read."""
    choices = answer.choices or []
    _check_usage(answer, wanted)
    _check_indices(choices)
    single = wanted.n == 1 and len(choices) == 1
    good: dict[int, GoodChoice] = {}
    problems: dict[int, str] = {}
    given_up: list[str] = []
    unfit_routes: str | None = None
    extra = no_ids = 0
    for place, choice in enumerate(choices):
        index = place if choice.index is None else choice.index
        if not 0 <= index < wanted.n:
            extra += 1
            continue
        fault = faults.get(place)
        if fault and (wanted.logprobs or not fault.logprobs):
            problems[index] = fault.reason
            continue
        status = _status(choice.finish_reason, wanted)
        if isinstance(status, _Problem):
            # Before its ids are looked at: one that was given up before its first token may have none to show.
            if choice.finish_reason is not None:
                given_up.append(choice.finish_reason)
            problems[index] = status
            continue
        ids, again = _token_ids(choice, answer if single else None, wanted)
        if ids is None and status is SampleStatus.ABORTED and not choice.text:
            ids = ()
        if ids is None:
            no_ids += 1
            problems[index] = "it has no token ids"
            continue
        read = _judge(index, choice, ids, status, answer, wanted, retokenised=again)
        if isinstance(read, str):
            problems[index] = read
            if isinstance(read, _UnfitRoutes):
                unfit_routes = read
        else:
            good[index] = read
    if no_ids and no_ids == len(choices) - extra:
        raise UnfitAnswer(
            "the answer holds no token ids (neither choices[].token_ids, nor logprobs.tokens as 'token_id:N')",
            hint="The server must honour return_token_ids or return_tokens_as_token_ids: use a newer vLLM or Dynamo. "
            "CWTRAIN_ROLLOUT_TOKEN_IDS=0 tokenises the text again, which is not exact",
            without_ids=True,
        )
    told = [f"choice {index}: {problems[index]}" for index in sorted(problems)]
    told += [f"choice {index} is missing" for index in range(wanted.n) if index not in good and index not in problems]
    return ReadAnswer(
        choices=good,
        problems=tuple(told),
        extra=extra,
        given=len(choices),
        given_up=tuple(given_up),
        queue_seconds=answer.queue_seconds,
        identity=answer.single_identity,
        prompt_tokens=answer.usage.prompt_tokens if answer.usage else None,
        unfit_routes=unfit_routes,
    )


def decode(body: bytes, quoted: Callable[[bytes], str]) -> tuple[Answer, dict[int, Fault]]:
    """Return a body as an answer, with the faults of its choices by place; raises ``BadAnswer``."""
    if not body.strip():
        raise BadAnswer("the answer is empty")
    faults: dict[int, Fault] = {}
    try:
        answer = _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        found = loosely(body)
        if found is None:
            if body.lstrip()[:1] == b"<":
                raise BadAnswer(f"the answer is an HTML page: {quoted(body)}") from exc
            what = (
                "has an unexpected shape" if isinstance(exc, msgspec.ValidationError) else "is not JSON, or cut short"
            )
            raise BadAnswer(f"the answer {what}: {exc}: {quoted(body)}") from exc
        answer, faults = found
    if bytes(answer.error) not in (b"", b"null") or answer.object == "error":
        raise BadAnswer(f"the answer is an error in spite of its status 200: {quoted(body)}", error=body)
    return answer, faults


def _check_usage(answer: Answer, wanted: Wanted) -> None:
    said = answer.usage.prompt_tokens if answer.usage else None
    if said is None:
        return
    sent = said if wanted.prompt_tokens is None else wanted.prompt_tokens
    if said != sent or said < wanted.least_prompt_tokens:
        raise UnfitAnswer(
            f"the server counted {said} prompt tokens where {max(sent, wanted.least_prompt_tokens)} were sent: "
            "it changed the prompt",
            hint="Serve the model without prompt truncation and without special tokens added to token-id prompts",
        )


def _check_indices(choices: list[Choice]) -> None:
    seen: set[int] = set()
    for choice in choices:
        if choice.index is None:
            if len(choices) > 1:
                raise BadAnswer("choices have no index, so they cannot be told apart")
            continue
        if choice.index in seen:
            raise BadAnswer(f"two choices have the index {choice.index}")
        seen.add(choice.index)


def _status(reason: str | None, wanted: Wanted) -> SampleStatus | _Problem:
    """Return how a choice ended; what is wrong where that makes it no sample."""
    if reason is None:
        return _Problem("it has no finish_reason")
    status = _STATUSES.get(reason)
    if status is None or (status is SampleStatus.ABORTED and not wanted.aborted):
        return _Problem(f"it ended with finish_reason {reason[:100]!r}")
    return status


def _token_ids(choice: Choice, single: Answer | None, wanted: Wanted) -> tuple[tuple[int, ...] | None, bool]:
    """Return the ids of a choice, and whether they were made from its text."""
    if not wanted.token_ids:
        assert wanted.tokenise is not None
        return tuple(wanted.tokenise(choice.text or "")), True
    ids = choice.token_ids
    if ids is None:
        ids = choice.spelled_ids()
    if ids is None and single is not None and single.nvext:
        ids = single.nvext.completion_token_ids
    return ids, False


def _judge(
    index: int,
    choice: Choice,
    ids: tuple[int, ...],
    status: SampleStatus,
    answer: Answer,
    wanted: Wanted,
    *,
    retokenised: bool,
) -> GoodChoice | str:
    """Return the choice as a good one, or what is wrong with it."""
    aborted = status is SampleStatus.ABORTED
    if not ids and not aborted:
        return "it has no tokens"
    values: tuple[float, ...] | str = () if retokenised else _logprobs(choice, len(ids))
    if isinstance(values, str):
        if wanted.logprobs:
            return values
        values = ()
    routes: RoutedExperts | None = None
    if wanted.routed_experts and not aborted:
        found = _routes(answer, choice, wanted, len(ids))
        if isinstance(found, str):
            return found
        routes = found
    return GoodChoice(
        index=index,
        token_ids=ids,
        logprobs=values,
        status=status,
        finish_reason=choice.finish_reason or "",
        text=choice.text or "",
        floors=sum(value <= _FLOOR for value in values) if values and min(values) <= _FLOOR else 0,
        routed_experts=routes,
        retokenised=retokenised,
    )


def _logprobs(choice: Choice, tokens: int) -> tuple[float, ...] | str:
    given = choice.logprobs.token_logprobs if choice.logprobs else None
    if given is None:
        return "it has no log-probs" if tokens else ()
    if len(given) != tokens:
        return f"it has {tokens} token ids and {len(given)} log-probs"
    return given


def _routes(answer: Answer, choice: Choice, wanted: Wanted, tokens: int) -> RoutedExperts | _UnfitRoutes:
    raw = answer.routed_experts(choice)
    if not raw:
        return _UnfitRoutes("it has no routed experts (the deployment's engine option enable-return-routed-experts)")
    from cwtrain_rollout._routes import read_routes

    prompt = wanted.prompt_tokens
    if prompt is None:
        prompt = answer.usage.prompt_tokens if answer.usage else None
    if prompt is None:
        prompt = wanted.least_prompt_tokens
    apart = bytes(answer.prompt_routed_experts)
    found = read_routes(raw, rows=prompt + tokens - 1, prompt=b"" if apart == b"null" else apart)
    return _UnfitRoutes(found) if isinstance(found, str) else found
