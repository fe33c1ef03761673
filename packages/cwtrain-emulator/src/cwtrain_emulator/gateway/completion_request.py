"""The bodies of completions and chat completions: every field that is understood, checked, as a replica takes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cwtrain_emulator.gateway.errors import GatewayError

__all__ = ["CompletionRequest", "parse_chat", "parse_completion"]

_MAX_CHOICES = 1024
_MAX_PROMPTS = 1024
_MAX_STOPS = 4
_MAX_LOGPROBS = 20
_MAX_TOKEN = 2**31
_NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "logit_bias": (None, {}),
    "prompt_logprobs": (None,),
    "suffix": (None, ""),
    "use_beam_search": (None, False),
    "response_format": (None,),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
}
"""Fields that are known but not implemented, with the values that ask for nothing."""

_CHAT_NEUTRAL_ONLY: dict[str, tuple[Any, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none"),
    "functions": (None, []),
    "documents": (None, []),
}

_SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0.0, math.inf),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.0, math.inf),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}
"""Real-valued sampling fields with their bounds; top_p and repetition_penalty must also be above 0."""


@dataclass(frozen=True)
class CompletionRequest:
    """A checked request; `for_replica` goes to the replica as it is."""

    model: str
    chat: bool
    stream: bool
    include_usage: bool
    cache_salt: str
    extra_fields: tuple[str, ...]
    for_replica: dict[str, Any]


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the checked request; raise GatewayError (400) that names the field."""
    _refuse_unsupported(body, _NEUTRAL_ONLY)
    prompts = _prompts(body)
    return _request(
        body,
        prompts=prompts,
        max_tokens=_integer(body, "max_tokens", least=1, most=_MAX_TOKEN),
        logprobs=_integer(body, "logprobs", least=0, most=_MAX_LOGPROBS),
        chat=False,
    )


def parse_chat(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the checked request of a chat completion; raise GatewayError (400) that names the field."""
    _refuse_unsupported(body, {**_NEUTRAL_ONLY, **_CHAT_NEUTRAL_ONLY})
    kwargs = dict(_object(body, "chat_template_kwargs"))
    opening = body.get("add_generation_prompt")
    options = {
        **kwargs,
        "add_generation_prompt": opening is None or _flag(body, "add_generation_prompt"),
        "continue_final_message": _flag(body, "continue_final_message"),
    }
    if options["continue_final_message"]:
        if opening:
            message = "add_generation_prompt and continue_final_message cannot both be true"
            raise GatewayError(400, message, param="continue_final_message")
        options["add_generation_prompt"] = False
    tops = _integer(body, "top_logprobs", least=0, most=_MAX_LOGPROBS)
    wanted = _flag(body, "logprobs")
    if tops and not wanted:
        raise GatewayError(400, "when using top_logprobs, logprobs must be set to true", param="top_logprobs")
    limits = [_integer(body, name, least=1, most=_MAX_TOKEN) for name in ("max_completion_tokens", "max_tokens")]
    return _request(
        body,
        prompts=[{"messages": _messages(body), "options": options}],
        max_tokens=next((limit for limit in limits if limit is not None), None),
        logprobs=(tops or 0) if wanted else None,
        chat=True,
    )


def _request(
    body: Mapping[str, Any],
    *,
    prompts: Sequence[list[int] | str | dict[str, Any]],
    max_tokens: int | None,
    logprobs: int | None,
    chat: bool,
) -> CompletionRequest:
    """Return the request with the fields that both calls have."""
    stream = _flag(body, "stream")
    nvext = _object(body, "nvext")
    n = _integer(body, "n", least=1, most=_MAX_CHOICES)
    extra_fields = _extra_fields(nvext)
    cache_salt = _cache_salt(body, nvext)
    for_replica = {
        "prompts": prompts,
        "n": 1 if n is None else n,
        "max_tokens": max_tokens,
        "min_tokens": _integer(body, "min_tokens", least=0, most=_MAX_TOKEN) or 0,
        "sampling": _sampling(body),
        "seed": _integer(body, "seed", least=-(2**63), most=2**63 - 1),
        "stop": _stops(body),
        "stop_token_ids": _stop_token_ids(body),
        "logprobs": logprobs,
        "tokens_as_ids": _flag(body, "return_tokens_as_token_ids"),
        "return_token_ids": _flag(body, "return_token_ids"),
        "ignore_eos": _flag(body, "ignore_eos"),
        "include_stop_str_in_output": _flag(body, "include_stop_str_in_output"),
        "skip_special_tokens": body.get("skip_special_tokens") is None or _flag(body, "skip_special_tokens"),
        "report_tokens": "completion_token_ids" in extra_fields and n in (None, 1) and len(prompts) == 1,
        "cache_salt": cache_salt,
        "chat": chat,
        "stream": stream,
    }
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise GatewayError(400, "model must be a string", param="model")
    return CompletionRequest(
        model=model,
        chat=chat,
        stream=stream,
        include_usage=_flag(_object(body, "stream_options"), "include_usage"),
        cache_salt=cache_salt,
        extra_fields=extra_fields,
        for_replica=for_replica,
    )


def _refuse_unsupported(body: Mapping[str, Any], neutral: Mapping[str, tuple[Any, ...]]) -> None:
    for name, accepted in neutral.items():
        if body.get(name) not in accepted:
            raise GatewayError(400, f"{name} is not supported by this emulator", param=name)


def _messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation, each content as one text."""
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise GatewayError(400, "messages must be a list of messages, not empty", param="messages")
    found = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise GatewayError(400, f"messages[{number}] must be an object with a role", param="messages")
        content = message.get("content")
        if isinstance(content, list):
            content = "\n".join(_text_part(part, number) for part in content)
        if content is not None and not isinstance(content, str):
            raise GatewayError(400, f"messages[{number}].content must be a text or a list of parts", param="messages")
        found.append({**message, "content": content or ""})
    return found


def _text_part(part: object, number: int) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    raise GatewayError(400, f"messages[{number}].content: only parts of type text are supported", param="messages")


def _prompts(body: Mapping[str, Any]) -> list[list[int] | str]:
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(_is_token(token) for token in prompt):
            return [prompt]
        if len(prompt) <= _MAX_PROMPTS and (
            all(isinstance(entry, str) for entry in prompt)
            or all(isinstance(entry, list) and all(_is_token(token) for token in entry) for entry in prompt)
        ):
            return list(prompt)
    raise GatewayError(
        400,
        f"prompt must be a text, a list of token ids, or a list of up to {_MAX_PROMPTS} of one of these, not empty",
        param="prompt",
    )


def _sampling(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the fields that the request has; the others are the snapshot's business."""
    found: dict[str, float] = {}
    for name, (least, most) in _SAMPLING.items():
        value = body.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
            raise GatewayError(400, f"{name} must be a number from {least:g} to {most:g}", param=name)
        if value == 0 and name in ("top_p", "repetition_penalty"):
            raise GatewayError(400, f"{name} must be above 0", param=name)
        found[name] = min(float(value), 1e300)
    top_k = _integer(body, "top_k", least=-1, most=_MAX_TOKEN)
    if top_k is not None:
        found["top_k"] = top_k
    return found


def _stops(body: Mapping[str, Any]) -> list[str]:
    value = body.get("stop")
    stops = [value] if isinstance(value, str) else [] if value is None else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) and stop for stop in stops):
        raise GatewayError(400, "stop must be a text or a list of texts, none of them empty", param="stop")
    if len(stops) > _MAX_STOPS:
        raise GatewayError(400, f"stop takes at most {_MAX_STOPS} entries, not {len(stops)}", param="stop")
    return stops


def _stop_token_ids(body: Mapping[str, Any]) -> list[int]:
    ids = body.get("stop_token_ids")
    if ids is None:
        return []
    if not isinstance(ids, list) or not all(_is_token(token) for token in ids):
        raise GatewayError(400, "stop_token_ids must be a list of token ids", param="stop_token_ids")
    if len(ids) > _MAX_STOPS:
        raise GatewayError(
            400, f"stop_token_ids takes at most {_MAX_STOPS} entries, not {len(ids)}", param="stop_token_ids"
        )
    return ids


def _cache_salt(body: Mapping[str, Any], nvext: Mapping[str, Any]) -> str:
    """Return the salt, from nvext (the frontend's place for it) or else from the top (vLLM's)."""
    for fields, name in ((nvext, "nvext.cache_salt"), (body, "cache_salt")):
        salt = fields.get("cache_salt")
        if salt is None:
            continue
        if not isinstance(salt, str) or not 0 < len(salt) <= 128 or any(mark in salt for mark in "@/\\\0"):
            raise GatewayError(400, f"{name} must have 1 to 128 characters, none of @ / \\ or NUL", param=name)
        return salt
    return ""


def _extra_fields(nvext: Mapping[str, Any]) -> tuple[str, ...]:
    fields = nvext.get("extra_fields")
    if fields is None:
        return ()
    if not isinstance(fields, list) or not all(isinstance(field, str) for field in fields):
        raise GatewayError(400, "nvext.extra_fields must be a list of texts", param="nvext.extra_fields")
    return tuple(fields)


def _object(body: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise GatewayError(400, f"{name} must be an object", param=name)
    return value


def _flag(body: Mapping[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise GatewayError(400, f"{name} must be true or false", param=name)
    return bool(value)


def _integer(body: Mapping[str, Any], name: str, *, least: int, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise GatewayError(400, f"{name} must be an integer from {least} to {most}", param=name)
    return value


def _is_token(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_TOKEN
