"""What goes into a rollout and what comes out, as plain data, and the Protocol of a backend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, Protocol

import attrs

from cwtrain.errors import ConfigError

__all__ = ["Group", "RolloutBackend", "Sample", "SampleStatus", "SampledGroup", "SamplerTotals", "SamplingParams"]

_MAX_STOPS = 4
_SALT_FORBIDDEN = frozenset("@/\\\0")
_SALT_LENGTH = 128


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


class SampleStatus(StrEnum):
    """How a sample ended."""

    COMPLETED = "COMPLETED"
    """The model stopped: the stop token is the last of ``token_ids``."""
    TRUNCATED = "TRUNCATED"
    """It ran into ``max_tokens`` or the end of the context."""


@attrs.frozen(kw_only=True)
class SamplingParams:
    """How tokens are drawn. The defaults are neutral: the model's own distribution, as on-policy training needs it.

    Every field is sent, the neutral ones too: a field left out is filled from the served model's
    ``generation_config.json``, which silently changes the distribution.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)

    def __attrs_post_init__(self) -> None:
        problems = []
        if self.max_tokens < 1:
            problems.append(f"max_tokens is {self.max_tokens}: at least 1 is needed")
        if not 0.0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {self.temperature}: a finite number of at least 0 is needed")
        if not 0.0 < self.top_p <= 1.0:
            problems.append(f"top_p is {self.top_p}: a number above 0 and at most 1 is needed")
        if self.top_k < 1 and self.top_k != -1:
            problems.append(f"top_k is {self.top_k}: at least 1 is needed, or -1 for all tokens")
        if not 0.0 <= self.min_p <= 1.0:
            problems.append(f"min_p is {self.min_p}: a number from 0 to 1 is needed")
        problems += [
            f"{name} has {len(given)} entries: the service takes at most {_MAX_STOPS}"
            for name, given in (("stop", self.stop), ("stop_token_ids", self.stop_token_ids))
            if len(given) > _MAX_STOPS
        ]
        if problems:
            raise ConfigError("Sampling parameters cannot be used: " + "; ".join(problems), problems=problems)

    @property
    def needs_processed(self) -> bool:
        """True when raw log-probs would be of another distribution than the one that is sampled from.

        At temperature 0 the log-probs are those of temperature 1 without filters, which the raw ones are.
        """
        unfiltered = self.top_p == 1.0 and self.top_k == -1 and self.min_p == 0.0
        return self.temperature != 0.0 and not (unfiltered and self.temperature == 1.0)


@attrs.frozen(kw_only=True)
class Group:
    """``n`` samples wanted for one prompt of token ids.

    With a ``seed`` the same weights give the same samples again; without one a single sample gets a random seed (all
    replicas start from the same default one) and a larger group none.
    """

    prompt: tuple[int, ...] = attrs.field(converter=_ids)
    n: int = 1
    seed: int | None = None

    def __attrs_post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("the prompt has no token ids")
        if any(type(token) is not int or token < 0 for token in self.prompt):
            problems.append("the prompt holds something else than token ids (whole numbers of at least 0)")
        if self.n < 1:
            problems.append(f"n is {self.n}: at least 1 is needed")
        if self.seed is not None and not 0 <= self.seed < 2**62:
            problems.append(f"seed is {self.seed}: a number from 0 to 2^62 - 1 is needed")
        if problems:
            raise ConfigError("A group of samples cannot be asked for: " + "; ".join(problems), problems=problems)


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


@attrs.frozen(kw_only=True)
class SampledGroup:
    """The samples of one group, in order: ``samples[i].index == i``."""

    group: Group
    samples: tuple[Sample, ...]


@attrs.define(kw_only=True)
class SamplerTotals:
    """What a sampler did so far."""

    requests: int = 0
    """HTTP requests sent, retries included."""
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


def check_salt(salt: str | None) -> None:
    """Refuse a cache salt that the service would not take."""
    if salt is not None and (not 0 < len(salt) <= _SALT_LENGTH or _SALT_FORBIDDEN & set(salt)):
        raise ConfigError(
            f"The cache salt {salt[:140]!r} cannot be used: 1 to {_SALT_LENGTH} characters without @ / \\ and NUL",
            hint="Use the id of the newest completed hot-load",
        )


def request_body(
    model: str, group: Group, sampling: SamplingParams, *, n: int, seed: int | None, cache_salt: str | None
) -> dict[str, Any]:
    """Return the JSON body of one ``/completions`` request. Neutral values are sent, never left out."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(group.prompt),
        "n": n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "stream": False,
    }
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    if seed is not None:
        body["seed"] = seed
    if cache_salt is not None:
        body["nvext"] = {"cache_salt": cache_salt}
    return body
