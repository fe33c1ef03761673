"""The drift alarm: how far the endpoint's log-probs are from the trainer's own for the same tokens.

The same weights give the same log-probs but for rounding and kernels. A mean that grows is the first sign of KV of
older weights, of raw log-probs, or of weights that are not those the trainer thinks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

import attrs

from cwtrain.errors import ConfigError
from cwtrain_rollout.protocol import Sample

__all__ = ["Drift"]

log = logging.getLogger("cwtrain.rollout")


@attrs.define(kw_only=True)
class Drift:
    """Mean and largest absolute difference over some samples.

    ``mean_threshold`` and ``max_threshold`` (nats) are warned about when a batch is over them. bfloat16 engines of
    other kernels than the trainer's differ by some 0.01 in the mean, and by more at single unlikely tokens.
    """

    mean_threshold: float = 0.05
    max_threshold: float = 2.0
    tokens: int = 0
    total: float = 0.0
    largest: float = 0.0
    alarms: int = 0

    def update(self, samples: Iterable[Sample], trainer_logprobs: Iterable[Sequence[float]]) -> dict[str, float]:
        """Compare a batch, and return its metrics; the totals go on. Raises ``ConfigError`` where lengths differ."""
        tokens, total, largest = 0, 0.0, 0.0
        samples, trainer_logprobs = list(samples), list(trainer_logprobs)
        if len(samples) != len(trainer_logprobs):
            raise ConfigError(
                f"There are {len(samples)} samples, and the trainer gave log-probs of {len(trainer_logprobs)}",
                hint="give one list of log-probs for each sample, in the same order",
            )
        for sample, ours in zip(samples, trainer_logprobs, strict=True):
            if len(ours) != len(sample.logprobs):
                raise ConfigError(
                    f"Sample {sample.request_id}[{sample.index}] has {len(sample.logprobs)} log-probs, "
                    f"and the trainer gave {len(ours)}",
                    hint="give the trainer's log-probs of the answer's tokens, the prompt's left out",
                )
            for mine, theirs in zip(ours, sample.logprobs, strict=True):
                apart = abs(float(mine) - theirs)
                total += apart
                largest = max(largest, apart)
            tokens += len(ours)
        self.tokens += tokens
        self.total += total
        self.largest = max(self.largest, largest)
        mean = total / tokens if tokens else 0.0
        if not (mean <= self.mean_threshold and largest <= self.max_threshold):  # NaN is within nothing
            self.alarms += 1
            log.warning(
                "The endpoint's log-probs are %.4f from the trainer's in the mean (threshold %g), %.3f at most "
                "(threshold %g): KV of older weights, raw log-probs, or other weights?",
                mean,
                self.mean_threshold,
                largest,
                self.max_threshold,
            )
        return {"rollout/logprob_drift_mean": mean, "rollout/logprob_drift_max": largest}

    @property
    def mean(self) -> float:
        """Mean over everything so far."""
        return self.total / self.tokens if self.tokens else 0.0
