"""Exact rollout samples (token ids and log-probs) from an OpenAI-compatible endpoint.

    from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams

    sampler = Sampler(RolloutConfig.from_env())
    groups = sampler.sample_groups([Group(prompt=[1, 2, 3], n=8)], SamplingParams(max_tokens=64))
    groups[0].samples[0].token_ids, groups[0].samples[0].logprobs

The environment variables that ``RolloutConfig.from_env`` reads:

CWTRAIN_ROLLOUT_BASE_URL              URL of the OpenAI-compatible endpoint; /v1 is added to a bare origin (required)
CWTRAIN_ROLLOUT_MODEL                 name of the served model (required)
CWTRAIN_ROLLOUT_API_KEY               key of the endpoint, sent as a bearer token
CWTRAIN_ROLLOUT_API_KEY_FILE          file with the key, read for every request, so it may be rotated
CWTRAIN_ROLLOUT_CONCURRENCY           choices in flight; a request for n choices counts n; auto: found by itself (auto)
CWTRAIN_ROLLOUT_CONCURRENCY_MAX       choices in flight for each replica at most, where auto (256)
CWTRAIN_ROLLOUT_REPLICAS              replicas behind the endpoint: bounds of auto are for each (1)
CWTRAIN_ROLLOUT_TIMEOUT               seconds for one answer (3600)
CWTRAIN_ROLLOUT_IDLE_TIMEOUT          seconds without a byte of a streamed answer (600)
CWTRAIN_ROLLOUT_DEADLINE              seconds from a group's first failure to the start of its last retry (1800)
CWTRAIN_ROLLOUT_MAX_ATTEMPTS          bad answers to one request until its group fails (8)
CWTRAIN_ROLLOUT_CONTEXT_LENGTH        tokens of prompt and answer together; asked for after a refusal where unset
CWTRAIN_ROLLOUT_LOGPROBS              1: a sample without exact log-probs is an error (1)
CWTRAIN_ROLLOUT_LOGPROBS_MODE         what the server reports: processed, raw, or auto to find out (auto)
CWTRAIN_ROLLOUT_TOKEN_IDS             1: answers without token ids are an error; 0: text is tokenised again (1)
CWTRAIN_ROLLOUT_TOKEN_ID_PROMPTS      1: prompts are sent as token ids; 0: as the text that a group brings (1)
CWTRAIN_ROLLOUT_TEXT_FALLBACK         1: a prompt whose token ids are refused is sent as its text (0)
CWTRAIN_ROLLOUT_GROUP_REQUESTS        1: a group of fresh, equal prompts is one request; 0: one for each sample (1)
CWTRAIN_ROLLOUT_ROUTED_EXPERTS        1: samples bring the experts that each token was routed to (0)
CWTRAIN_ROLLOUT_SEEDS                 1: a single sample without a seed gets a random one (1)
CWTRAIN_ROLLOUT_TRUST_ENV             1: proxies of the environment are used (0)
CWTRAIN_ROLLOUT_ON_FAILURE            what a failed group does: raise, requeue (once more at the end), drop (raise)
CWTRAIN_ROLLOUT_POLL                  seconds between two reads of what is served (5)
CWTRAIN_ROLLOUT_DEPLOYMENT_ID         deployment whose hot-loads are the weight versions; its API token is read as usual
CWTRAIN_ROLLOUT_SERVED_IDENTITY_FILE  file that names what is served, for endpoints without that API
CWTRAIN_ROLLOUT_RECORD                file that every request and answer is appended to, without secrets

Any other ``CWTRAIN_ROLLOUT_*`` is warned about, with the nearest name, and has no effect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain_rollout.config import RolloutConfig
    from cwtrain_rollout.drift import Drift
    from cwtrain_rollout.errors import (
        RolloutAnswerError,
        RolloutError,
        RolloutExhaustedError,
        RolloutRequestError,
        StaleWeightsError,
    )
    from cwtrain_rollout.evaluation import Evaluation, evaluate, evaluate_async
    from cwtrain_rollout.protocol import (
        Group,
        RolloutBackend,
        RoutedExperts,
        Sample,
        SampledGroup,
        SamplerTotals,
        SampleStatus,
        SamplingParams,
    )
    from cwtrain_rollout.record import Replay
    from cwtrain_rollout.rollout import Rollout
    from cwtrain_rollout.sampler import Sampler
    from cwtrain_rollout.spans import Load, WeightSpan

__all__ = [
    "Drift",
    "Evaluation",
    "Group",
    "Load",
    "Replay",
    "Rollout",
    "RolloutAnswerError",
    "RolloutBackend",
    "RolloutConfig",
    "RolloutError",
    "RolloutExhaustedError",
    "RolloutRequestError",
    "RoutedExperts",
    "Sample",
    "SampleStatus",
    "SampledGroup",
    "Sampler",
    "SamplerTotals",
    "SamplingParams",
    "StaleWeightsError",
    "WeightSpan",
    "evaluate",
    "evaluate_async",
]

_HOMES = {
    "Drift": "cwtrain_rollout.drift",
    "Evaluation": "cwtrain_rollout.evaluation",
    "Group": "cwtrain_rollout.protocol",
    "Load": "cwtrain_rollout.spans",
    "Replay": "cwtrain_rollout.record",
    "Rollout": "cwtrain_rollout.rollout",
    "RolloutAnswerError": "cwtrain_rollout.errors",
    "RolloutBackend": "cwtrain_rollout.protocol",
    "RolloutConfig": "cwtrain_rollout.config",
    "RolloutError": "cwtrain_rollout.errors",
    "RolloutExhaustedError": "cwtrain_rollout.errors",
    "RolloutRequestError": "cwtrain_rollout.errors",
    "RoutedExperts": "cwtrain_rollout.protocol",
    "Sample": "cwtrain_rollout.protocol",
    "SampleStatus": "cwtrain_rollout.protocol",
    "SampledGroup": "cwtrain_rollout.protocol",
    "Sampler": "cwtrain_rollout.sampler",
    "SamplerTotals": "cwtrain_rollout.protocol",
    "SamplingParams": "cwtrain_rollout.protocol",
    "StaleWeightsError": "cwtrain_rollout.errors",
    "WeightSpan": "cwtrain_rollout.spans",
    "evaluate": "cwtrain_rollout.evaluation",
    "evaluate_async": "cwtrain_rollout.evaluation",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain_rollout' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
