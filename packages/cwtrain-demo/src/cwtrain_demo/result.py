"""What a run of the demo gives back: its steps, its versions, and whether it showed what it promises."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import attrs

from cwtrain_rollout.protocol import SamplerTotals

__all__ = ["DemoResult", "Step", "Version"]


@attrs.frozen(kw_only=True)
class Version:
    """One published version of the weights. Times are seconds, sizes bytes."""

    version: int
    identity: str
    kind: str
    """FULL or DELTA."""
    hot_load_id: str
    bytes: int
    """Size of its objects."""
    ratio: float
    """How many times smaller than a full snapshot's tensors."""
    changed_tensors: int
    tensors: int
    density: float
    """Which part of all bytes differs from the version before; 1 for a full snapshot."""
    write_seconds: float
    """From the first tensor to the index in the bucket; encoding and upload run side by side in it."""
    encode_seconds: float
    """How long threads were encoding, all together."""
    upload_seconds: float
    """How long threads were hashing and sending, all together."""
    hot_load_seconds: float
    """From the request to the last replica."""
    seconds: float
    """All of it."""


@attrs.frozen(kw_only=True)
class Step:
    """One step: rollouts from a version, and what was learned."""

    step: int
    version: int
    """The version that answered."""
    reward: float
    samples: int
    tokens: int
    logprob_mismatches: int
    example: str
    seconds: float


@attrs.define(kw_only=True)
class DemoResult:
    """What came out. ``ok`` says whether the weights match and the reward rose."""

    seed: int
    engine: str
    steps: list[Step] = attrs.field(factory=list)
    versions: list[Version] = attrs.field(factory=list)
    seconds: dict[str, float] = attrs.field(factory=dict)
    replicas: dict[str, str] = attrs.field(factory=dict)
    """Replica to the identity that it serves at the end."""
    weights_match: bool = False
    weights_differ: dict[str, list[str]] = attrs.field(factory=dict)
    """Replica to the tensors whose bytes are not the trainer's."""
    logprob_difference: float = 0.0
    """The largest difference between a log-prob that was returned and the trainer's own."""
    sampler: SamplerTotals = attrs.field(factory=SamplerTotals)
    state_dir: str | None = None
    """Where everything was kept, if it was."""

    @property
    def fifth(self) -> int:
        """How many steps are a fifth of all, at least one."""
        return max(1, len(self.steps) // 5)

    @property
    def reward_start(self) -> float:
        """Mean reward of the first fifth of the steps."""
        return _mean([step.reward for step in self.steps[: self.fifth]])

    @property
    def reward_end(self) -> float:
        """Mean reward of the last fifth of the steps."""
        return _mean([step.reward for step in self.steps[-self.fifth :]])

    @property
    def reward_rose(self) -> bool:
        """Whether the last fifth was better than the first."""
        return self.reward_end > self.reward_start

    @property
    def logprobs_match(self) -> bool:
        """Whether every log-prob that was returned is that of the trainer's weights of the version served."""
        return all(step.logprob_mismatches == 0 for step in self.steps)

    @property
    def ok(self) -> bool:
        """Whether the demo showed what it promises."""
        return self.weights_match and self.reward_rose

    def problems(self) -> list[str]:
        """Return in words why it is not ok."""
        found = []
        if not self.reward_rose:
            found.append(f"the reward did not rise: {self.reward_start:.3f} at first, {self.reward_end:.3f} at the end")
        if not self.weights_match:
            where = "; ".join(f"{name}: {', '.join(tensors[:3])}" for name, tensors in self.weights_differ.items())
            found.append(f"the weights on the replicas are not the trainer's ({where or 'no replica was seen'})")
        return found

    def as_json(self) -> dict[str, Any]:
        """Return the result as plain JSON data."""
        return {
            "reward_start": round(self.reward_start, 6),
            "reward_end": round(self.reward_end, 6),
            "reward_rose": self.reward_rose,
            "weights_match": self.weights_match,
            "logprobs_match": self.logprobs_match,
            "logprob_mismatches": sum(step.logprob_mismatches for step in self.steps),
            "logprob_difference": self.logprob_difference,
            "replicas": self.replicas,
            "steps": [attrs.asdict(step) for step in self.steps],
            "versions": [attrs.asdict(version) for version in self.versions],
            "seconds": {name: round(value, 3) for name, value in self.seconds.items()},
            "sampler": self.sampler.as_json(),
            "seed": self.seed,
            "engine": self.engine,
            "state_dir": self.state_dir,
        }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
