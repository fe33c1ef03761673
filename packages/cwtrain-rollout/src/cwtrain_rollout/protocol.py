"""What goes into a rollout and what comes out, as plain data, and the Protocol of a backend."""

from __future__ import annotations

import math
import operator
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol, SupportsFloat, SupportsIndex

import attrs
import msgspec

from cwtrain.errors import ConfigError
from cwtrain_rollout.spans import WeightSpan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = [
    "Group",
    "RolloutBackend",
    "RoutedExperts",
    "Sample",
    "SampleStatus",
    "SampledGroup",
    "SamplerTotals",
    "SamplingParams",
]

_MAX_STOPS = 4
SEEDS = 2**62
"""Seeds are below this."""
_MOST = 2**31
"""Counts of tokens are below this."""
_LARGEST = sys.float_info.max

_OURS = {
    **dict.fromkeys(
        ("prompt", "prompt_embeds", "prompt_token_ids", "input_ids", "input_embeds", "messages", "suffix"),
        "the prompt is Group(prompt=...)",
    ),
    **dict.fromkeys(("truncate_prompt_tokens", "add_special_tokens", "echo"), "prompts go as they are"),
    **dict.fromkeys(("n", "best_of", "use_beam_search"), "the number of samples is Group(n=...)"),
    "seed": "seeds are Group(seed=...) or Group(seeds=...)",
    "sampling_seed": "seeds are Group(seed=...) or Group(seeds=...)",
    **dict.fromkeys(("model", "lora_path"), "the model is RolloutConfig(model=...)"),
    **dict.fromkeys(("stream", "stream_options"), "streams are sampler.rollout(..., partial=True)"),
    **dict.fromkeys(
        ("cache_salt", "extra_key", "kv_transfer_params"),
        "the salt that keeps KV of other weights away is the sampler's, or sample(cache_salt=...)",
    ),
    **dict.fromkeys(
        (
            "max_tokens", "max_completion_tokens", "max_new_tokens", "min_tokens", "min_new_tokens", "temperature",
            "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "stop",
            "stop_token_ids", "ignore_eos", "sampling_params",
        ),
        "how tokens are drawn is SamplingParams",
    ),
    **dict.fromkeys(
        (
            "logprobs", "top_logprobs", "prompt_logprobs", "return_tokens_as_token_ids", "return_token_ids",
            "skip_special_tokens", "include_stop_str_in_output", "detokenize",
        ),
        "what an answer must have is RolloutConfig's",
    ),
    **dict.fromkeys(("request_id", "rid"), "each request has an id of its own"),
}  # fmt: skip
"""Fields of a request that are not the caller's, and where what they ask for is said."""
_OURS_IN_NVEXT = {
    "cache_salt": _OURS["cache_salt"],
    "token_data": _OURS["prompt"],
    **dict.fromkeys(
        ("greed_sampling", "top_k", "top_p", "min_p", "repetition_penalty", "ignore_eos"), _OURS["temperature"]
    ),
}


# What callers give, converted at the border. What cannot be converted stays as it is: the check after it names it,
# together with everything else that is wrong.


def whole(value: SupportsIndex) -> int:
    """Return a whole number, numpy's and others' too, as an int."""
    if type(value) is int or isinstance(value, bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value  # type: ignore[return-value]


def _whole_or_none(value: SupportsIndex | None) -> int | None:
    return None if value is None else whole(value)


def _whole_or_0(value: SupportsIndex | None) -> int:
    return 0 if value is None else whole(value)


def _whole_or_all(value: SupportsIndex | None) -> int:
    return -1 if value is None else whole(value)


def _real(value: SupportsFloat | SupportsIndex | None, neutral: float) -> float:
    """Return a number, numpy's and others' too, as an int or a float; ``neutral`` for None."""
    if value is None:
        return neutral
    if type(value) in (int, float) or isinstance(value, bool | str | bytes) or getattr(value, "ndim", 0) != 0:
        return value  # type: ignore[return-value]
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return value  # type: ignore[return-value]


def _real_or_0(value: SupportsFloat | SupportsIndex | None) -> float:
    return _real(value, 0.0)


def _real_or_1(value: SupportsFloat | SupportsIndex | None) -> float:
    return _real(value, 1.0)


def _flag(value: SupportsIndex | None) -> bool:
    """Return True or False, given as such, as 0 or 1, or as None."""
    if value is None or isinstance(value, bool):
        return bool(value)
    found = value.item() if hasattr(value, "item") else value
    return bool(found) if found in (0, 1) else value  # type: ignore[return-value]


def _items(value: Any) -> Any:
    """Return the items of a list, an array or another iterable as a tuple; anything else as it is.

    Texts and bytes are one thing each, and mappings and sets have no order to rely on.
    """
    if isinstance(value, (list, tuple)):
        return tuple(value)
    if isinstance(value, (str, bytes, bytearray, memoryview, Mapping, AbstractSet)):
        return value
    if hasattr(value, "tolist"):
        found = value.tolist()
        return tuple(found) if isinstance(found, list) else found
    try:
        return tuple(value)
    except TypeError:
        return value


def _ids(value: Iterable[SupportsIndex]) -> tuple[int, ...]:
    """Return whole numbers as a tuple of ints; a list where there is something else among them."""
    found = _items(value)
    if type(found) is tuple and not set(map(type, found)) <= {int}:
        found = list(map(whole, found))
        return tuple(found) if set(map(type, found)) <= {int} else found  # type: ignore[return-value]
    return found  # type: ignore[no-any-return]


def _ids_or_none(value: Iterable[SupportsIndex] | None) -> tuple[int, ...] | None:
    return None if value is None else _ids(value)


def _id_lists(value: Iterable[Iterable[SupportsIndex]] | None) -> tuple[tuple[int, ...], ...] | None:
    found = None if value is None else _items(value)
    return tuple(map(_ids, found)) if type(found) is tuple else found


def stop_ids(value: SupportsIndex | Iterable[SupportsIndex] | None) -> tuple[int, ...]:
    """Return the ids of stop tokens: one, several, or None for none."""
    if value is None:
        return ()
    found: Any = tuple(sorted(value, key=repr)) if isinstance(value, AbstractSet) else _items(value)
    if type(found) is tuple:
        return _ids(found)
    one = whole(found)
    return (one,) if type(one) is int else one  # type: ignore[return-value]


def stop_texts(value: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the texts that end an answer: one (it is not a list of letters), several, or None for none."""
    if value is None:
        return ()
    if isinstance(value, str):
        return (str(value),)
    found: Any = tuple(sorted(value, key=repr)) if isinstance(value, AbstractSet) else _items(value)
    if type(found) is tuple:
        return tuple(str(item) if isinstance(item, str) else item for item in found)
    return found  # type: ignore[no-any-return]


def stop_problems(texts: object, ids: object) -> list[str]:
    """Return what is wrong with ``stop`` and ``stop_token_ids`` as ``stop_texts`` and ``stop_ids`` gave them."""
    problems = []
    if not isinstance(texts, tuple) or not all(_is_text(text) and text for text in texts):
        problems.append(f"stop is {texts!r}: a text or several are needed, none of them empty")
    if not _are_ids(ids):
        problems.append(f"stop_token_ids is {ids!r}: a token id or several are needed")
    problems += [
        f"{name} has {len(given)} entries: the service takes at most {_MAX_STOPS}"
        for name, given in (("stop", texts), ("stop_token_ids", ids))
        if isinstance(given, tuple) and len(given) > _MAX_STOPS
    ]
    return problems


def _is_text(value: object) -> bool:
    """Whether a value is text that can be sent."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(value: object) -> Any:
    """Return data of numpy and others as what JSON has; raises TypeError."""
    if isinstance(value, Mapping):
        return dict(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def _check_numbers(value: object) -> None:
    """Refuse NaN and infinities, of which msgspec makes null without a word."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ConfigError(f"{value} is no number that JSON has")
    elif isinstance(value, dict | list | tuple):
        for part in value.values() if isinstance(value, dict) else value:
            _check_numbers(part)


def as_sent(value: object) -> Any:
    """Return a copy of data as it will be sent, arrays and numbers of numpy as lists and numbers.

    Raises ``ConfigError`` for what JSON does not have.
    """
    try:
        found = msgspec.to_builtins(value, str_keys=True, enc_hook=_plain)
        _check_numbers(found)
        return msgspec.json.decode(msgspec.json.encode(found))
    except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as exc:
        raise ConfigError(str(exc)) from exc


class _Unsendable(str):
    """Why more fields of a request cannot be sent."""

    __slots__ = ()


def _extra(value: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy of more fields of a request, as they will be sent."""
    if value is None or not isinstance(value, Mapping):
        return value
    try:
        found: dict[str, Any] = as_sent(dict(value))
    except ConfigError as exc:
        return _Unsendable(exc)  # type: ignore[return-value]
    return found


def _extra_problems(extra: object) -> list[str]:
    if extra is None:
        return []
    if isinstance(extra, _Unsendable):
        return [f"extra cannot be sent: {extra}"]
    if not isinstance(extra, dict):
        return [f"extra is {extra!r}: a mapping of fields to their values is needed"]
    problems = [f"extra has {name!r}, which is the sampler's own: {_OURS[name]}" for name in extra if name in _OURS]
    nvext = extra.get("nvext")
    if nvext is None:
        return problems
    if not isinstance(nvext, dict):
        return [*problems, f"extra['nvext'] is {nvext!r}: a mapping of fields to their values is needed"]
    problems += [
        f"extra['nvext'] has {name!r}, which is the sampler's own: {_OURS_IN_NVEXT[name]}"
        for name in nvext
        if name in _OURS_IN_NVEXT
    ]
    asked = nvext.get("extra_fields")
    if asked is not None and not (isinstance(asked, list) and all(isinstance(field, str) for field in asked)):
        problems.append(f"extra['nvext']['extra_fields'] is {asked!r}: a list of texts is needed")
    return problems


class SampleStatus(StrEnum):
    """How a sample ended."""

    COMPLETED = "COMPLETED"
    """The model stopped: the stop token is the last of ``token_ids``."""
    TRUNCATED = "TRUNCATED"
    """It ran into ``max_tokens`` or the end of the context; without tokens where the prompt left no room."""
    ABORTED = "ABORTED"
    """It was ended before the model was done; ``token_ids`` is what there was. Only in partial rollouts."""
    FAILED = "FAILED"
    """The endpoint gave it up: not for training. ``Sampler`` gives none: it asks again, and then the group fails."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn. The defaults are neutral: the model's own distribution, as on-policy training needs it.

    Every field is sent, the neutral ones too: a field left out is filled from the served model's
    ``generation_config.json``, which silently changes the distribution.
    """

    max_tokens: int = attrs.field(converter=whole)
    temperature: float = attrs.field(default=1.0, converter=_real_or_1)
    top_p: float = attrs.field(default=1.0, converter=_real_or_1)
    top_k: int = attrs.field(default=-1, converter=_whole_or_all)
    """-1: all tokens."""
    min_p: float = attrs.field(default=0.0, converter=_real_or_0)
    repetition_penalty: float = attrs.field(default=1.0, converter=_real_or_1)
    presence_penalty: float = attrs.field(default=0.0, converter=_real_or_0)
    frequency_penalty: float = attrs.field(default=0.0, converter=_real_or_0)
    min_tokens: int = attrs.field(default=0, converter=_whole_or_0)
    stop: tuple[str, ...] = attrs.field(default=(), converter=stop_texts)
    """Texts that end an answer; a text alone is one, not its letters."""
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=stop_ids)
    """Ids that end an answer; an id alone is one."""
    ignore_eos: bool = attrs.field(default=False, converter=_flag)

    def __attrs_post_init__(self) -> None:
        most = self.max_tokens if type(self.max_tokens) is int else 0
        wholes: tuple[tuple[str, Callable[[int], bool], str], ...] = (
            (
                "max_tokens",
                lambda value: 1 <= value < _MOST,
                f"a whole number of at least 1 and below {_MOST} is needed",
            ),
            (
                "top_k",
                lambda value: value == -1 or 1 <= value < _MOST,
                "a whole number of at least 1 is needed, or -1 (or None) for all tokens",
            ),
            ("min_tokens", lambda value: 0 <= value <= max(most, 0), "a whole number from 0 to max_tokens is needed"),
        )
        reals: tuple[tuple[str, Callable[[float], bool], str], ...] = (
            ("temperature", lambda value: 0.0 <= value <= _LARGEST, "a finite number of at least 0 is needed"),
            ("top_p", lambda value: 0.0 < value <= 1.0, "a number above 0 and at most 1 is needed"),
            ("min_p", lambda value: 0.0 <= value <= 1.0, "a number from 0 to 1 is needed"),
            ("repetition_penalty", lambda value: 0.0 < value <= _LARGEST, "a number above 0 is needed"),
            ("presence_penalty", lambda value: -2.0 <= value <= 2.0, "a number from -2 to 2 is needed"),
            ("frequency_penalty", lambda value: -2.0 <= value <= 2.0, "a number from -2 to 2 is needed"),
        )
        given = attrs.asdict(self, recurse=False)
        problems = [
            f"{name} is {given[name]!r}: {words}"
            for name, fits, words in wholes
            if type(given[name]) is not int or not fits(given[name])
        ]
        problems += [
            f"{name} is {given[name]!r}: {words}"
            for name, fits, words in reals
            if type(given[name]) not in (int, float) or not fits(given[name])
        ]
        if not isinstance(self.ignore_eos, bool):
            problems.append(f"ignore_eos is {self.ignore_eos!r}: True or False is needed")
        problems += stop_problems(self.stop, self.stop_token_ids)
        if problems:
            raise ConfigError("Sampling parameters cannot be used: " + "; ".join(problems), problems=problems)

    @property
    def needs_processed(self) -> bool:
        """True when raw log-probs would be of another distribution than the one that is sampled from.

        At temperature 0 the log-probs are those of temperature 1 without filters, which the raw ones are.
        """
        if (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.min_tokens > 0
        ):
            return True
        unfiltered = self.top_p == 1.0 and self.top_k == -1 and self.min_p == 0.0
        return self.temperature != 0.0 and not (unfiltered and self.temperature == 1.0)


@attrs.frozen(kw_only=True)
class Group:
    """``n`` samples wanted for one prompt of token ids.

    With a ``seed`` the same weights give the same samples again; without one a single sample gets a random seed (all
    replicas start from the same default one) and a larger group none. ``seeds`` gives each sample its own. ``prefixes``
    are the answers so far of partial samples: each goes on behind its own, and ``max_tokens`` counts them.
    """

    prompt: tuple[int, ...] = attrs.field(converter=_ids)
    n: int = attrs.field(default=1, converter=whole)
    seed: int | None = attrs.field(default=None, converter=_whole_or_none)
    seeds: tuple[int, ...] | None = attrs.field(default=None, converter=_ids_or_none)
    prefixes: tuple[tuple[int, ...], ...] | None = attrs.field(default=None, converter=_id_lists)
    text: str | None = None
    """The prompt as text, for endpoints that take no token ids (TOKEN_ID_PROMPTS=0, TEXT_FALLBACK=1)."""
    session: str | None = None
    """A conversation's name: all its turns go to one replica's prefix cache, where the endpoint knows sessions."""
    extra: Mapping[str, Any] | None = attrs.field(default=None, converter=_extra)
    """More fields of the request, such as multimodal data or ``{"nvext": {"agent_hints": {...}}}``.

    Each sample is then a request of its own. ``nvext`` is merged with what the sampler puts there; fields that are the
    sampler's own (the salt, ``n``, ``seed``, how tokens are drawn, ...) are refused by name. It is a copy.
    """

    def __attrs_post_init__(self) -> None:
        problems = []
        if not isinstance(self.prompt, tuple | list):
            problems.append(f"prompt is {self.prompt!r}: a list of token ids is needed, and text goes into text=")
        elif not self.prompt:
            problems.append("the prompt has no token ids")
        elif not _are_ids(self.prompt):
            problems.append("the prompt holds something else than token ids (whole numbers of at least 0)")
        n = self.n if type(self.n) is int else 0
        if n < 1:
            problems.append(f"n is {self.n!r}: a whole number of at least 1 is needed")
        if self.seed is not None and not _is_seed(self.seed):
            problems.append(f"seed is {self.seed!r}: a number from 0 to 2^62 - 1 is needed")
        if self.seeds is not None:
            if not isinstance(self.seeds, tuple) or len(self.seeds) != n or not all(map(_is_seed, self.seeds)):
                problems.append(f"seeds must be {self.n} numbers from 0 to 2^62 - 1")
            if self.seed is not None:
                problems.append("seed and seeds are both given")
        if self.prefixes is not None and not (
            isinstance(self.prefixes, tuple) and len(self.prefixes) == n and all(map(_are_ids, self.prefixes))
        ):
            problems.append(f"prefixes must be {self.n} lists of token ids")
        if self.text is not None and not _is_text(self.text):
            problems.append(f"text is {self.text!r}: a text is needed")
        if self.session is not None and not (_is_text(self.session) and self.session.isprintable()):
            problems.append(f"session is {self.session!r}: a text without control characters is needed")
        problems += _extra_problems(self.extra)
        if problems:
            raise ConfigError("A group of samples cannot be asked for: " + "; ".join(problems), problems=problems)


def _are_ids(values: object) -> bool:
    """Whether this is what ``_ids`` makes of token ids: from 0 to what 32 bits hold."""
    if not isinstance(values, tuple):
        return False
    try:
        array("I", values)  # one pass over long prompts
    except OverflowError:
        return False
    return True


def _is_seed(value: object) -> bool:
    return type(value) is int and 0 <= value < SEEDS


@attrs.frozen(kw_only=True)
class RoutedExperts:
    """The experts that each token but the last was routed to: ``[prompt + answer - 1, layers, top_k]``, C order."""

    data: bytes = attrs.field(repr=False)
    shape: tuple[int, int, int]
    dtype: str

    def array(self) -> npt.NDArray[np.integer[Any]]:
        """Return the routes as a numpy array that shares ``data``."""
        from cwtrain_rollout._routes import as_array

        return as_array(self)


@attrs.frozen(kw_only=True)
class Sample:
    """Exactly what was sampled: the token ids, the stop token included, and one log-prob for each.

    The log-probs are of the distribution that was sampled from.
    """

    index: int
    """Its place in the group."""
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """As many as ``token_ids``; empty only where log-probs are not required and the endpoint gave none."""
    status: SampleStatus
    finish_reason: str
    text: str = ""
    request_id: str = ""
    """The ``X-Request-Id`` of the request that gave it."""
    weights: WeightSpan | None = None
    """The weight versions that made it, where the sampler knows a deployment (or the answer said so)."""
    routed_experts: RoutedExperts | None = None
    retokenised: bool = False
    """True where ``token_ids`` were made from the text (TOKEN_IDS=0): not for training."""


@attrs.frozen(kw_only=True)
class SampledGroup:
    """The samples of one group, in order: ``samples[i].index == i``."""

    group: Group
    samples: tuple[Sample, ...]
    place: int = 0
    """The place of the group among those that were asked for."""

    @property
    def whole(self) -> bool:
        """Whether every sample ended by itself: none is ABORTED or FAILED."""
        return all(sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED) for sample in self.samples)


@attrs.define(kw_only=True)
class SamplerTotals:
    """What a sampler did so far."""

    requests: int = 0
    """HTTP requests sent, retries included."""
    answers: int = 0
    """Requests whose answer gave samples, or at least one of them."""
    samples: int = 0
    retries: int = 0
    refusals: int = 0
    """429, 503 and others that cost time only."""
    bad_answers: int = 0
    """Answers that could not be used in whole or in part."""
    transport_errors: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    floor_logprobs: int = 0
    """Log-probs of -9999 or less, which some engines send in place of minus infinity."""
    missing_logprobs: int = 0
    """Samples without usable log-probs, where those are not required."""
    truncated_prompts: int = 0
    """Samples without tokens: their prompt fills the context."""
    failed_samples: int = 0
    """Samples that the endpoint ended otherwise than by ``stop`` or ``length``; each was asked for again."""
    spanned_samples: int = 0
    """Samples that more than one weight version may have made."""
    requeued_groups: int = 0
    dropped_groups: int = 0
    seconds: float = 0.0
    """Wall time spent inside ``sample``."""

    def as_json(self) -> dict[str, Any]:
        """Return the totals as plain JSON data."""
        return attrs.asdict(self)


class RolloutBackend(Protocol):
    """A way to get samples. ``Sampler`` is the one that this distribution brings."""

    async def sample(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> list[SampledGroup]:
        """Return one ``SampledGroup`` for each group, in the order of ``groups``."""
        ...

    def sample_groups(
        self, groups: Sequence[Group], sampling: SamplingParams, *, cache_salt: str | None = None
    ) -> list[SampledGroup]:
        """The same for callers without an event loop."""
        ...
