"""Samples straight from a policy of the demo, all at once and without any server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cwtrain_demo.trainer import Policy
from cwtrain_rollout.protocol import Group, Sample, SampledGroup, SampleStatus, SamplingParams


def sample_exactly(policy: Policy, groups: Sequence[Group], sampling: SamplingParams) -> list[SampledGroup]:
    """Return what an exact engine with `policy` could answer; draws follow from the groups' seeds."""
    (end,) = sampling.stop_token_ids
    rows = [(group, index) for group in groups for index in range(group.n)]
    draws = [np.random.default_rng([group.seed or 0, index]) for group, index in rows]
    answers: list[list[int]] = [[] for _ in rows]
    logprobs: list[list[float]] = [[] for _ in rows]
    running = list(range(len(rows)))
    for _ in range(sampling.max_tokens):
        sequences = [[*rows[row][0].prompt, *answers[row]] for row in running]
        contexts = np.concatenate([policy.contexts([*seq, 0], len(seq)) for seq in sequences])
        table = policy.logprobs(contexts)
        for row, line in zip(list(running), table, strict=True):
            token = int(np.searchsorted(np.exp(line).cumsum(), draws[row].random(), side="right"))
            token = min(token, len(line) - 1)
            answers[row].append(token)
            logprobs[row].append(float(line[token]))
            if token == end:
                running.remove(row)
        if not running:
            break
    made = iter(zip(rows, answers, logprobs, strict=True))
    result = []
    for group in groups:
        samples = []
        for _ in range(group.n):
            (_, index), ids, values = next(made)
            stopped = ids[-1] == end
            samples.append(
                Sample(
                    index=index,
                    token_ids=tuple(ids),
                    logprobs=tuple(values),
                    status=SampleStatus.COMPLETED if stopped else SampleStatus.TRUNCATED,
                    finish_reason="stop" if stopped else "length",
                )
            )
        result.append(SampledGroup(group=group, samples=tuple(samples)))
    return result
