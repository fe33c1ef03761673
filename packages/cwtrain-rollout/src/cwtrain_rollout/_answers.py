"""The shape of an answer, as the typed decoder fills it; and a second, patient reading of answers that it refuses."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import attrs
import msgspec

__all__ = ["RAW_OF_ANSWERS", "RAW_OF_CHOICES", "Answer", "Choice", "Fault", "Logprobs", "Nvext", "Usage", "loosely"]

ROUNDING = 1e-3
"""A log-prob this far above 0 is rounding of the engine; more is no log-prob."""

_TOKEN_PREFIX = "token_id:"  # noqa: S105 - how vLLM spells a token, no secret
_NOTHING = msgspec.Raw(b"")
_EMPTY = (b"", b"null")
RAW_OF_CHOICES = ("routed_experts", "meta_info", "sgl_ext", "sglext")
"""Fields of choices that stay as they came until somebody needs them."""
RAW_OF_ANSWERS = ("prompt_routed_experts", "meta_info", "sgl_ext", "sglext")
"""The same of answers."""


class Logprobs(msgspec.Struct, gc=False):
    """Log-probs of a choice's tokens; the spelled tokens stay raw until somebody needs them."""

    token_logprobs: tuple[Annotated[float, msgspec.Meta(le=ROUNDING)], ...] | None = None
    tokens: msgspec.Raw = _NOTHING


class Choice(msgspec.Struct, gc=False):
    """One choice."""

    index: int | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: tuple[Annotated[int, msgspec.Meta(ge=0)], ...] | None = None
    logprobs: Logprobs | None = None
    routed_experts: msgspec.Raw = _NOTHING
    meta_info: msgspec.Raw = _NOTHING
    sgl_ext: msgspec.Raw = _NOTHING
    sglext: msgspec.Raw = _NOTHING

    def spelled_ids(self) -> tuple[int, ...] | None:
        """Return the ids that ``logprobs.tokens`` spells as ``token_id:N``; None where it does not."""
        raw = bytes(self.logprobs.tokens) if self.logprobs else b""
        if raw in (b"", b"null"):
            return None
        try:
            tokens = msgspec.json.decode(raw, type=list[str])
            if not all(token.startswith(_TOKEN_PREFIX) for token in tokens):
                return None
            ids = tuple(int(token[len(_TOKEN_PREFIX) :]) for token in tokens)
            return ids if min(ids, default=0) >= 0 else None
        except (msgspec.DecodeError, ValueError):
            return None


class Usage(msgspec.Struct, gc=False):
    """What the server counted."""

    prompt_tokens: int | None = None


class Timing(msgspec.Struct, gc=False):
    """``nvext.timing``: milliseconds."""

    prefill_wait_time_ms: float | None = None
    queue_time_ms: float | None = None


class Nvext(msgspec.Struct, gc=False):
    """What Dynamo's frontend adds when it is asked to."""

    completion_token_ids: tuple[int, ...] | None = None
    routed_experts: msgspec.Raw = _NOTHING
    timing: Timing | None = None


class PerfMetrics(msgspec.Struct, gc=False, rename="kebab"):
    """Seconds that some servers report in the body."""

    prefill_queue_duration: float | None = None


class _Added(msgspec.Struct, gc=False):
    """What SGLang adds to an answer."""

    routed_experts: msgspec.Raw = _NOTHING


class Answer(msgspec.Struct, gc=False):
    """A whole answer, or one event of a streamed one."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    nvext: Nvext | None = None
    perf_metrics: PerfMetrics | None = None
    identity: str | None = None
    identities: list[str] | None = None
    object: str | None = None
    error: msgspec.Raw = _NOTHING
    prompt_routed_experts: msgspec.Raw = _NOTHING
    meta_info: msgspec.Raw = _NOTHING
    sgl_ext: msgspec.Raw = _NOTHING
    sglext: msgspec.Raw = _NOTHING

    def routed_experts(self, choice: Choice) -> bytes:
        """Return the routes of a choice as they came; nothing where there are none.

        They stand in Dynamo's ``nvext``, in vLLM's choices, or in what SGLang adds to a choice or to the answer.
        """
        for raw in (self.nvext.routed_experts if self.nvext else _NOTHING, choice.routed_experts):
            if (found := bytes(raw)) not in _EMPTY:
                return found
        for source in (choice, self):
            for raw in (source.meta_info, source.sgl_ext, source.sglext):
                try:
                    added = msgspec.json.decode(raw, type=_Added) if bytes(raw) not in _EMPTY else None
                except msgspec.DecodeError:
                    continue
                if added is not None and (found := bytes(added.routed_experts)) not in _EMPTY:
                    return found
        return b""

    @property
    def queue_seconds(self) -> float | None:
        """How long the request queued at the server, where the answer says so."""
        timing = self.nvext.timing if self.nvext else None
        if timing:
            for value in (timing.prefill_wait_time_ms, timing.queue_time_ms):
                if value is not None:
                    return value / 1000
        return self.perf_metrics.prefill_queue_duration if self.perf_metrics else None

    @property
    def single_identity(self) -> str | None:
        """The one identity that made the answer, where it names exactly one; an empty name names none."""
        if self.identities is None:
            return self.identity or None
        return (self.identities[0] or None) if len(self.identities) == 1 else None


@attrs.frozen
class Fault:
    """Why a choice cannot be read. ``logprobs``: only its log-probs cannot."""

    reason: str
    logprobs: bool = False


def loosely(body: bytes) -> tuple[Answer, dict[int, Fault]] | None:
    """Return an answer that the typed decoder refused, with the faults of its choices by place; None if it is no JSON.

    Python's parser takes ``NaN`` and ``Infinity``, as servers write them; the choices without them are as good as ever.
    """
    try:
        found = json.loads(body)
        if not isinstance(found, dict):
            return None
        given = found.pop("choices", None)
        nvext = found.pop("nvext", None)
        error = found.pop("error", None)
        raw = _as_raw(found, RAW_OF_ANSWERS)
        answer = msgspec.convert(found, Answer)
    except (ValueError, RecursionError):
        return None
    for name, value in raw.items():
        setattr(answer, name, value)
    if error is not None:
        answer.error = msgspec.Raw(json.dumps(error).encode())
    if nvext is not None:
        try:
            answer.nvext = msgspec.json.decode(json.dumps(nvext), type=Nvext)
        except msgspec.DecodeError:
            answer.nvext = None
    if given is not None and not isinstance(given, list):
        return None
    faults: dict[int, Fault] = {}
    answer.choices = [_choice(place, value, faults) for place, value in enumerate(given or [])]
    return answer, faults


def _as_raw(found: dict[str, Any], names: tuple[str, ...]) -> dict[str, msgspec.Raw]:
    """Take fields out of an object, as they would have come."""
    return {name: msgspec.Raw(json.dumps(found.pop(name)).encode()) for name in names if name in found}


def _choice(place: int, value: Any, faults: dict[int, Fault]) -> Choice:
    if not isinstance(value, dict):
        faults[place] = Fault("it is no JSON object")
        return Choice()
    logprobs = value.pop("logprobs", None)
    raw = _as_raw(value, RAW_OF_CHOICES)
    try:
        choice = msgspec.convert(value, Choice)
    except msgspec.ValidationError as exc:
        faults[place] = Fault(f"it has an unexpected shape: {exc}")
        index = value.get("index")
        return Choice(index=index if type(index) is int else None)
    for name, part in raw.items():
        setattr(choice, name, part)
    if isinstance(logprobs, dict):
        given = logprobs.get("token_logprobs")
        choice.logprobs = Logprobs(tokens=msgspec.Raw(json.dumps(logprobs.get("tokens")).encode()))
        if (reason := _fault(given)) is None:
            choice.logprobs.token_logprobs = None if given is None else tuple(map(float, given))
        else:
            faults[place] = Fault(reason, logprobs=True)
    elif logprobs is not None:
        faults[place] = Fault("its log-probs are no JSON object", logprobs=True)
    return choice


def _fault(given: Any) -> str | None:
    """Return what is wrong with a list of log-probs."""
    if given is None:
        return None
    if not isinstance(given, list):
        return "its log-probs are no list"
    if nulls := sum(entry is None for entry in given):
        return f"{nulls} of its {len(given)} log-probs are null"
    for entry in given:
        if isinstance(entry, bool) or not isinstance(entry, int | float):
            return f"it has the log-prob {entry!r}, which is no number"
        if not math.isfinite(entry):
            return f"it has the log-prob {entry}"
        if entry > ROUNDING:
            return f"it has the log-prob {entry}, which is above 0"
    return None
