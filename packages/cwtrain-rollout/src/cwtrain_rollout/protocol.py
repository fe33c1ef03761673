"""What goes into a rollout and what comes out, as plain data, and the Protocol of a backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import attrs

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


def _ids(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


def _ids_or_none(values: Iterable[int] | None) -> tuple[int, ...] | None:
    return None if values is None else tuple(values)


def _id_lists(values: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    return None if values is None else tuple(tuple(value) for value in values)


def _strings(values: Iterable[str]) -> tuple[str, ...]:
    return tuple(values)


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

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_tokens: int = 0
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_ids)
    ignore_eos: bool = False

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
        if not 0.0 < self.repetition_penalty < float("inf"):
            problems.append(f"repetition_penalty is {self.repetition_penalty}: a number above 0 is needed")
        problems += [
            f"{name} is {given}: a number from -2 to 2 is needed"
            for name, given in (
                ("presence_penalty", self.presence_penalty),
                ("frequency_penalty", self.frequency_penalty),
            )
            if not -2.0 <= given <= 2.0
        ]
        if not 0 <= self.min_tokens <= max(self.max_tokens, 0):
            problems.append(f"min_tokens is {self.min_tokens}: a number from 0 to max_tokens is needed")
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
    n: int = 1
    seed: int | None = None
    seeds: tuple[int, ...] | None = attrs.field(default=None, converter=_ids_or_none)
    prefixes: tuple[tuple[int, ...], ...] | None = attrs.field(default=None, converter=_id_lists)
    text: str | None = None
    """The prompt as text, for endpoints that take no token ids (TOKEN_ID_PROMPTS=0, TEXT_FALLBACK=1)."""
    session: str | None = None
    """A conversation's name: all its turns go to one replica's prefix cache, where the endpoint knows sessions."""
    extra: Mapping[str, Any] | None = None
    """More fields of the request, such as multimodal data; each sample is then a request of its own."""

    def __attrs_post_init__(self) -> None:
        problems = []
        if not self.prompt:
            problems.append("the prompt has no token ids")
        if not _are_ids(self.prompt):
            problems.append("the prompt holds something else than token ids (whole numbers of at least 0)")
        if self.n < 1:
            problems.append(f"n is {self.n}: at least 1 is needed")
        if self.seed is not None and not 0 <= self.seed < SEEDS:
            problems.append(f"seed is {self.seed}: a number from 0 to 2^62 - 1 is needed")
        if self.seeds is not None:
            if len(self.seeds) != self.n or not all(0 <= seed < SEEDS for seed in self.seeds):
                problems.append(f"seeds must be {self.n} numbers from 0 to 2^62 - 1")
            if self.seed is not None:
                problems.append("seed and seeds are both given")
        if self.prefixes is not None and (
            len(self.prefixes) != self.n or not all(_are_ids(prefix) for prefix in self.prefixes)
        ):
            problems.append(f"prefixes must be {self.n} lists of token ids")
        if problems:
            raise ConfigError("A group of samples cannot be asked for: " + "; ".join(problems), problems=problems)


def _are_ids(values: tuple[int, ...]) -> bool:
    return not values or (set(map(type, values)) == {int} and min(values) >= 0)


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
