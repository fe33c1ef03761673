"""Exact rollout samples (token ids and log-probs) from an OpenAI-compatible endpoint.

    from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams

    sampler = Sampler(RolloutConfig.from_env())
    groups = sampler.sample_groups([Group(prompt=[1, 2, 3], n=8)], SamplingParams(max_tokens=64))
    groups[0].samples[0].token_ids, groups[0].samples[0].logprobs

The environment variables that ``RolloutConfig.from_env`` reads:

CWTRAIN_ROLLOUT_BASE_URL      URL of the OpenAI-compatible endpoint; /v1 is added to a bare origin (required)
CWTRAIN_ROLLOUT_MODEL         name of the served model (required)
CWTRAIN_ROLLOUT_API_KEY       key of the endpoint, sent as a bearer token
CWTRAIN_ROLLOUT_API_KEY_FILE  file with the key, read for every request, so it may be rotated
CWTRAIN_ROLLOUT_CONCURRENCY   choices in flight; a request for n choices counts n (64)
CWTRAIN_ROLLOUT_TIMEOUT       seconds for one answer (3600)
CWTRAIN_ROLLOUT_DEADLINE      seconds from a group's first failure to the start of its last retry (1800)
CWTRAIN_ROLLOUT_MAX_ATTEMPTS  bad answers of one group until it fails (8)
CWTRAIN_ROLLOUT_LOGPROBS      1: a sample without exact log-probs is an error (1)
CWTRAIN_ROLLOUT_LOGPROBS_MODE what the server reports: processed, raw, or auto to find out (auto)
CWTRAIN_ROLLOUT_SEEDS         1: a single sample without a seed gets a random one (1)
CWTRAIN_ROLLOUT_TRUST_ENV     1: proxies of the environment are used (0)

This is the first sampler: one request for each group, a fixed number of choices in flight, no streaming, and no notion
of which weights answered. Any other ``CWTRAIN_ROLLOUT_*`` is warned about and has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain_rollout.config import RolloutConfig
    from cwtrain_rollout.errors import RolloutAnswerError, RolloutError, RolloutExhaustedError, RolloutRequestError
    from cwtrain_rollout.protocol import (
        Group,
        RolloutBackend,
        Sample,
        SampledGroup,
        SamplerTotals,
        SampleStatus,
        SamplingParams,
    )
    from cwtrain_rollout.sampler import Sampler

__all__ = [
    "Group",
    "RolloutAnswerError",
    "RolloutBackend",
    "RolloutConfig",
    "RolloutError",
    "RolloutExhaustedError",
    "RolloutRequestError",
    "Sample",
    "SampleStatus",
    "SampledGroup",
    "Sampler",
    "SamplerTotals",
    "SamplingParams",
]

_HOMES = {
    "Group": "cwtrain_rollout.protocol",
    "RolloutAnswerError": "cwtrain_rollout.errors",
    "RolloutBackend": "cwtrain_rollout.protocol",
    "RolloutConfig": "cwtrain_rollout.config",
    "RolloutError": "cwtrain_rollout.errors",
    "RolloutExhaustedError": "cwtrain_rollout.errors",
    "RolloutRequestError": "cwtrain_rollout.errors",
    "Sample": "cwtrain_rollout.protocol",
    "SampleStatus": "cwtrain_rollout.protocol",
    "SampledGroup": "cwtrain_rollout.protocol",
    "Sampler": "cwtrain_rollout.sampler",
    "SamplerTotals": "cwtrain_rollout.protocol",
    "SamplingParams": "cwtrain_rollout.protocol",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain_rollout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
