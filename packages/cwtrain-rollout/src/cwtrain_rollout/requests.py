"""The bodies of ``/completions`` requests: what is sent for which samples of a group. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from cwtrain.errors import ConfigError
from cwtrain_rollout.config import RolloutConfig
from cwtrain_rollout.protocol import SEEDS, Group, SamplingParams

__all__ = ["Ask", "check_salt", "drawing", "fields", "must_split", "plan", "prompt_of", "seed_of", "session_of"]

_SALT_FORBIDDEN = frozenset("@/\\\0")
_SALT_LENGTH = 128


@attrs.frozen(kw_only=True)
class Ask:
    """Samples of a group that one request asks for, by their places in the group."""

    indices: tuple[int, ...]
    prompt: tuple[int, ...]
    max_tokens: int
    """The answer's room; 0 where the prompt leaves none."""


def plan(
    group: Group, sampling: SamplingParams, *, indices: Sequence[int], split: bool, context: int | None
) -> list[Ask]:
    """Return the requests for some samples of a group: one for all, or with ``split`` one for each."""
    together = [tuple(indices)] if not split and group.prefixes is None else [(index,) for index in indices]
    asks = []
    for some in together:
        prefix = group.prefixes[some[0]] if group.prefixes else ()
        prompt = group.prompt + prefix if prefix else group.prompt
        room = sampling.max_tokens - len(prefix)
        if context is not None:
            room = min(room, context - len(prompt))
        asks.append(Ask(indices=some, prompt=prompt, max_tokens=max(0, room)))
    return asks


def must_split(group: Group, config: RolloutConfig, *, streamed: bool) -> bool:
    """Whether each sample of a group needs a request of its own."""
    return group.n > 1 and (
        streamed
        or not config.group_requests
        or config.routed_experts
        or group.seeds is not None
        or group.prefixes is not None
        or group.extra is not None
    )


def prompt_of(group: Group, ask: Ask, *, text: bool) -> tuple[int, ...] | str:
    """Return the prompt as it is sent."""
    if not text:
        return ask.prompt
    if group.text is None:
        raise ConfigError(
            "Prompts are to be sent as text, and a group has none",
            hint="give Group(text=...), or unset CWTRAIN_ROLLOUT_TOKEN_ID_PROMPTS",
        )
    if len(ask.prompt) != len(group.prompt):
        raise ConfigError("A partial sample cannot go on from text", hint="unset CWTRAIN_ROLLOUT_TOKEN_ID_PROMPTS")
    return group.text


def seed_of(group: Group, ask: Ask, *, split: bool, used: int, random_seed: int | None) -> int | None:
    """Return the seed of a request, ``used`` answers to its samples having been used already.

    Choice i of a seeded request draws from seed + i (or from the seed and i): what is asked for again must not be the
    same samples, so it gets another seed.
    """
    again = used * group.n
    if group.seeds is not None:
        return (group.seeds[ask.indices[0]] + again) % SEEDS
    if group.seed is not None:
        return (group.seed + again + (ask.indices[0] if split else 0)) % SEEDS
    return random_seed if len(ask.indices) == 1 else None


def drawing(sampling: SamplingParams, *, max_tokens: int) -> dict[str, Any]:
    """Return the fields that say how tokens are drawn, of completions and chat completions alike.

    Neutral values are sent, never left out: the model's ``generation_config.json`` fills in what is missing.
    """
    body: dict[str, Any] = {
        "max_tokens": max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
    }
    if sampling.min_tokens:
        body["min_tokens"] = min(sampling.min_tokens, max_tokens)
    if sampling.ignore_eos:
        body["ignore_eos"] = True
    if sampling.stop:
        body["stop"] = list(sampling.stop)
    if sampling.stop_token_ids:
        body["stop_token_ids"] = list(sampling.stop_token_ids)
    return body


def fields(
    config: RolloutConfig,
    sampling: SamplingParams,
    *,
    prompt: tuple[int, ...] | str,
    n: int,
    max_tokens: int,
    seed: int | None,
    salt: str | None,
    logprobs: int,
    stream: bool,
    timed: bool,
    completion_ids: bool,
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the JSON body of one request.

    ``extra`` is the caller's: what is ours wins, and ``nvext`` has both. (A caller's ``nvext`` in place of ours would
    have no salt, and KV of other weights would be in samples that say they are exact.)
    """
    body: dict[str, Any] = {
        "model": config.model,
        "prompt": prompt,
        "n": n,
        **drawing(sampling, max_tokens=max_tokens),
        "logprobs": logprobs,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    if seed is not None:
        body["seed"] = seed
    if isinstance(prompt, str):
        body["add_special_tokens"] = False
    asked = {"timing": timed, "routed_experts": config.routed_experts, "completion_token_ids": completion_ids}
    wanted = [name for name, is_asked in asked.items() if is_asked]
    nvext: dict[str, Any] = {}
    if salt is not None:
        nvext["cache_salt"] = salt
        if config.deployment_id is None:
            # vLLM by itself ignores nvext and has the salt at the top.
            body["cache_salt"] = salt
    if wanted:
        nvext["extra_fields"] = wanted
    if nvext:
        body["nvext"] = nvext
    return _merged(extra, body) if extra else body


def _merged(extra: Mapping[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """Return a body with the caller's fields behind ours, ``nvext`` one level further down."""
    theirs, ours = extra.get("nvext") or {}, body.get("nvext", {})
    nvext = {**theirs, **ours}
    if fields := [*ours.get("extra_fields", ()), *(theirs.get("extra_fields") or ())]:
        nvext["extra_fields"] = list(dict.fromkeys(fields))
    return {**extra, **body, **({"nvext": nvext} if nvext else {})}


def session_of(group: Group, *, split: bool) -> str | None:
    """Return the session of a group's requests: its conversation, or one of its own where it is split."""
    return group.session or (uuid.uuid4().hex if split else None)


def check_salt(salt: str | None) -> None:
    """Refuse a cache salt that the service would not take."""
    if salt is None:
        return
    if not isinstance(salt, str) or not 0 < len(salt) <= _SALT_LENGTH or _SALT_FORBIDDEN & set(salt):
        raise ConfigError(
            f"The cache salt {str(salt)[:140]!r} cannot be used: 1 to {_SALT_LENGTH} characters without @ / \\ and NUL",
            hint="Use the id of the newest completed hot-load",
        )
