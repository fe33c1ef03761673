"""Evaluation: prompts in, scores out, each sample made by one weight version alone, behind training's requests."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.errors import ConfigError
from cwtrain_rollout.protocol import Group, Sample, SampledGroup, SamplingParams, whole

if TYPE_CHECKING:
    from cwtrain_rollout.sampler import Sampler

__all__ = ["Evaluation", "Scorer", "evaluate", "evaluate_async"]

log = logging.getLogger("cwtrain.rollout")

Scorer = Callable[[Group, Sample], float | Awaitable[float]]
"""Returns a sample's score; may be a coroutine function."""


@attrs.frozen(kw_only=True)
class Evaluation:
    """What an evaluation gave. Its means are over ``groups`` alone, and NaN where there are none."""

    groups: tuple[SampledGroup, ...]
    scores: tuple[tuple[float, ...], ...]
    """One for each sample of each group."""
    dropped: tuple[Group, ...] = ()
    """What ON_FAILURE=drop left out: asked for, failed, and in no mean. Means can be compared where it is empty."""

    @property
    def mean(self) -> float:
        """Mean over the samples that there are."""
        return _mean([score for scores in self.scores for score in scores])

    @property
    def best_of_n(self) -> float:
        """Mean over the groups of each one's best score."""
        return _mean([max(scores) for scores in self.scores])

    @property
    def truncated(self) -> float:
        """Share of the samples that ran into ``max_tokens`` or the end of the context."""
        ended = [float(sample.status == "TRUNCATED") for group in self.groups for sample in group.samples]
        return _mean(ended)

    @property
    def versions(self) -> tuple[str, ...]:
        """The identities that made the samples, where they are known; one unless a hot-load came in between."""
        found = [sample.weights for group in self.groups for sample in group.samples if sample.weights]
        return tuple(dict.fromkeys(identity for span in found for identity in span.identities))

    def as_json(self) -> dict[str, Any]:
        """Return the figures as plain JSON data, means of nothing as None."""
        return {
            "mean": _number(self.mean),
            "best_of_n": _number(self.best_of_n),
            "truncated": _number(self.truncated),
            "samples": sum(map(len, self.scores)),
            "groups": len(self.groups),
            "dropped_samples": sum(group.n for group in self.dropped),
            "dropped_groups": len(self.dropped),
            "versions": list(self.versions),
        }


async def evaluate_async(
    prompts: Sequence[Sequence[int] | Group],
    scorer: Scorer,
    *,
    sampler: Sampler | None = None,
    sampling: SamplingParams | None = None,
    n: int = 1,
    seed: int | None = None,
    exact_version: bool | int | str | None = None,
) -> Evaluation:
    """Sample ``n`` answers to each prompt, score them, and return the evaluation.

    Greedy with at most 1024 tokens unless ``sampling`` says otherwise. ``sampler`` is made from the environment without
    one. Where the sampler knows what is served, every sample is of one weight version (``exact_version``: of that one).
    What ON_FAILURE=drop leaves out is in ``Evaluation.dropped`` and warned about: the means are over a part then.
    Raises ``RolloutError``; what ``scorer`` raises is raised.
    """
    from cwtrain_rollout.config import RolloutConfig
    from cwtrain_rollout.sampler import Sampler

    if type(count := whole(n)) is not int or count < 1:
        raise ConfigError(f"n is {n!r}: a whole number of at least 1 is needed")
    if isinstance(prompts, str | bytes | Mapping | Group):
        raise ConfigError(f"prompts is {prompts!r}: a list of prompts or groups is needed")
    sampler = Sampler(RolloutConfig.from_env()) if sampler is None else sampler
    groups = [prompt if isinstance(prompt, Group) else Group(prompt=prompt, n=count, seed=seed) for prompt in prompts]
    exact = sampler.served is not None if exact_version is None else exact_version
    params = SamplingParams(max_tokens=1024, temperature=0.0) if sampling is None else sampling
    found = await sampler.sample(groups, params, evaluation=True, exact_version=exact)
    # A sample that did not end by itself is no answer to score, whoever gave it.
    found = [group for group in found if group.whole]
    scores = []
    for group in found:
        given = []
        for sample in group.samples:
            score = scorer(group.group, sample)
            given.append(float(await score if inspect.isawaitable(score) else score))
        scores.append(tuple(given))
    there = {group.place for group in found}
    dropped = tuple(group for place, group in enumerate(groups) if place not in there)
    if dropped:
        log.warning(
            "The evaluation is over %d of %d groups: %d failed and were dropped (ON_FAILURE=drop); its means are not "
            "those of all prompts",
            len(found),
            len(groups),
            len(dropped),
        )
    return Evaluation(groups=tuple(found), scores=tuple(scores), dropped=dropped)


def evaluate(prompts: Sequence[Sequence[int] | Group], scorer: Scorer, **options: Any) -> Evaluation:
    """Return what ``evaluate_async`` does, for callers without an event loop; takes the same arguments."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(evaluate_async(prompts, scorer, **options))
    raise ConfigError("evaluate was called inside a running event loop", hint="Use `await evaluate_async(...)` there")


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
