"""Prompts that are too long. Kind: one refusal in words that were not foreseen ended the batch of everybody."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from cwtrain_rollout import (
    Group,
    RolloutAnswerError,
    RolloutConfig,
    RolloutRequestError,
    Sampler,
    SampleStatus,
    SamplingParams,
)
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.record import Recorder, Replay
from cwtrain_rollout.transport import NoAnswer, Reply
from helpers.told_endpoint import ToldEndpoint, no_pause, sampler, streamed_choice

LIMIT = 64
PARAMS = SamplingParams(max_tokens=20)

Words = Callable[[int, int], str]

WORDS: dict[str, Words] = {
    "vllm": lambda prompt, answer: (
        f"You passed {prompt} input tokens and requested {answer} output tokens. However, the model's context length "
        f"is only {LIMIT} tokens, resulting in a maximum input length of {LIMIT - answer} tokens. Please reduce the "
        "length of the input prompt. (parameter=input_tokens, value=70)"
    ),
    "vllm length": lambda prompt, answer: (
        f"The decoder prompt (length {prompt}) is longer than the maximum model length of {LIMIT}. Make sure that "
        "`max_model_len` is no smaller than the number of text tokens."
    ),
    "vllm old": lambda prompt, answer: (
        f"This model's maximum context length is {LIMIT} tokens. However, you requested {prompt + answer} tokens "
        f"({prompt} in the messages, {answer} in the completion). Please reduce the length of the messages."
    ),
    "vllm max_tokens": lambda prompt, answer: (
        f"'max_tokens' or 'max_completion_tokens' is too large: {answer}. This model's maximum context length is "
        f"{LIMIT} tokens and your request has {prompt} input tokens ({answer} > {LIMIT} - {prompt})."
    ),
    "sglang": lambda prompt, answer: (
        f"Requested token count exceeds the model's maximum context length of {LIMIT} tokens. You requested a total of "
        f"{prompt + answer} tokens: {prompt} tokens from the input messages and {answer} tokens for the completion."
    ),
    "sglang input": lambda prompt, answer: (
        f"The input ({prompt} tokens) is longer than the model's context length ({LIMIT} tokens)."
    ),
    "tgi": lambda prompt, answer: (
        f"Input validation error: `inputs` tokens + `max_new_tokens` must be <= {LIMIT}. Given: {prompt} `inputs` "
        f"tokens and {answer} `max_new_tokens`"
    ),
}
WORDLESS: dict[str, Words] = {
    "none": lambda prompt, answer: "Bad Request",
    "unforeseen": lambda prompt, answer: f"Zu lang: {prompt} und {answer} sind mehr, als hineingeht.",
    "empty": lambda prompt, answer: "",
}


@attrs.define
class Limited:
    """A server of a context of `LIMIT`; `expands` is what it makes of each image beyond its placeholder."""

    words: Words
    status: int = 400
    expands: int = 0
    counts: bool = True
    """Whether it says how many tokens it counted."""

    def __call__(self, request: dict[str, Any]) -> Any:
        prompt = len(request["prompt"]) + self.expands * len(request.get("images", ()))
        answer = request["max_tokens"]
        if prompt + answer > LIMIT or (prompt >= LIMIT and self.words is WORDS["sglang input"]):
            said = {"error": {"message": self.words(prompt, answer), "code": self.status}}
            if self.status == 200:
                return [said] if request["stream"] else said
            return Reply(status=self.status, body=json.dumps(said).encode())
        usage = {"usage": {"prompt_tokens": prompt}} if self.counts else {}
        tokens = list(range(answer))
        if request["stream"]:
            events = streamed_choice(tokens, "length")
            return [*events, {"choices": [], **usage}]
        choices = [
            {
                "index": index,
                "token_ids": tokens,
                "finish_reason": "length",
                "logprobs": {"token_logprobs": [-0.5] * answer},
            }
            for index in range(request["n"])
        ]
        return {"choices": choices, **usage}


def listing(**changes: Any) -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "m", "object": "model", "max_model_len": LIMIT, **changes}]}


LENGTHS = (10, 44, 45, 60, 63, 64, 65, 70, 84, 200)


def check(one: Sampler, *, partial: bool = False, n: int = 2) -> None:
    """Every prompt gives what the context has room for, and the last ones nothing."""
    groups = [Group(prompt=[1] * length, n=n) for length in LENGTHS]

    async def scenario() -> list[Any]:
        async with one.rollout(groups, PARAMS, partial=partial) as rollout:
            return sorted([group async for group in rollout], key=lambda group: group.place)

    for length, group in zip(LENGTHS, asyncio.run(scenario()), strict=True):
        room = max(0, min(PARAMS.max_tokens, LIMIT - length))
        assert [len(sample.token_ids) for sample in group.samples] == [room] * n, length
        assert {sample.status for sample in group.samples} == {SampleStatus.TRUNCATED}


@pytest.mark.parametrize(("status", "partial"), [(400, False), (413, True), (422, False)])
@pytest.mark.parametrize("words", [*WORDS, *WORDLESS])
def test_the_context_is_asked_for_once_and_no_wording_is_needed(words: str, status: int, partial: bool) -> None:
    endpoint = ToldEndpoint(Limited({**WORDS, **WORDLESS}[words], status), models=listing())
    check(sampler(endpoint), partial=partial)
    assert endpoint.listed == 1


@pytest.mark.parametrize(("status", "partial"), [(200, False), (200, True), (500, False)])
@pytest.mark.parametrize("words", list(WORDS))
def test_a_refusal_that_comes_as_another_status_is_one_all_the_same(words: str, status: int, partial: bool) -> None:
    endpoint = ToldEndpoint(Limited(WORDS[words], status), models=listing())
    check(sampler(endpoint), partial=partial)


@pytest.mark.parametrize(
    "models",
    [
        None,
        {"object": "list", "data": []},
        listing(max_model_len=None),
        listing(max_model_len="many"),
        Reply(status=200, body=b"<html>"),
        Reply(status=401, body=b"no"),
        {"data": {"m": 1}},
        [1],
    ],
)
@pytest.mark.parametrize("words", ["vllm", "sglang input"])
def test_the_words_are_read_where_the_list_does_not_say(words: str, models: Any) -> None:
    endpoint = ToldEndpoint(Limited(WORDS[words]), models=models)
    check(sampler(endpoint))
    assert endpoint.listed == 1


@pytest.mark.parametrize(
    "models",
    [
        {"data": [{"id": "base", "max_model_len": LIMIT}, {"id": "m", "parent": "base", "max_model_len": None}]},
        {"data": [{"id": "other", "max_model_len": 7}, {"id": "m", "max_model_len": LIMIT}]},
        {"data": [{"id": "alias", "max_model_len": LIMIT}]},
        listing(max_model_len=None, context_length=LIMIT),
    ],
)
def test_the_list_is_read_as_servers_write_it(models: Any) -> None:
    check(sampler(ToldEndpoint(Limited(WORDLESS["none"]), models=models)))


@pytest.mark.parametrize("words", list(WORDS))
def test_every_wording_is_enough_by_itself(words: str) -> None:
    check(sampler(ToldEndpoint(Limited(WORDS[words]))))


def test_a_configured_context_that_is_too_large_is_corrected_and_a_smaller_one_stays() -> None:
    check(sampler(ToldEndpoint(Limited(WORDLESS["none"]), models=listing()), context_length=1000))
    endpoint = ToldEndpoint(Limited(WORDLESS["none"]), models=listing())
    (group,) = sampler(endpoint, context_length=30).sample_groups([Group(prompt=[1] * 25)], PARAMS)
    assert len(group.samples[0].token_ids) == 5
    assert endpoint.listed == 0


def test_an_endpoint_without_long_prompts_is_never_asked() -> None:
    endpoint = ToldEndpoint(Limited(WORDS["vllm"]), models=listing())
    sampler(endpoint).sample_groups([Group(prompt=[1] * 10, n=2)] * 5, PARAMS)
    assert (endpoint.listed, len(endpoint.requests)) == (0, 5)


def test_a_list_that_is_away_for_a_moment_is_asked_for_again() -> None:
    endpoint = ToldEndpoint(Limited(WORDLESS["none"]), models=Reply(status=503, body=b"busy"))
    one = sampler(endpoint)
    with pytest.raises(RolloutRequestError):
        one.sample_groups([Group(prompt=[1] * 70)], PARAMS)
    endpoint.listing = listing()
    check(one)
    assert endpoint.listed == 2


class Unlisted(ToldEndpoint):
    """Lets whoever asks for its models wait, and then says nothing."""

    async def models(self, headers: Any) -> Reply:
        self.listed += 1
        for _ in range(100):
            await asyncio.sleep(0)
        raise NoAnswer("no answer within 30 s", cut=True)


def test_many_wait_once_for_a_list_that_does_not_come() -> None:
    endpoint = Unlisted(Limited(WORDS["vllm"]))
    one = sampler(endpoint, concurrency=64)
    found = one.sample_groups([Group(prompt=[1] * 70)] * 50, PARAMS)
    assert {sample.status for group in found for sample in group.samples} == {SampleStatus.TRUNCATED}
    assert (len(endpoint.requests), endpoint.listed) == (50, 1)


def test_a_refusal_for_another_reason_stays_one() -> None:
    def refuse(request: dict[str, Any]) -> Any:
        return Reply(status=400, body=b'{"error": {"message": "n must be at most 4, of length 3"}}')

    endpoint = ToldEndpoint(refuse, models=listing())
    with pytest.raises(RolloutRequestError, match="n must be at most 4"):
        sampler(endpoint).sample_groups([Group(prompt=[1] * 10, n=2)], PARAMS)
    assert len(endpoint.requests) == 1


def test_a_transport_that_cannot_list_models_still_reads_the_words() -> None:
    inner = ToldEndpoint(Limited(WORDS["vllm"]))

    class Bare:
        post, stream, aclose = inner.post, inner.stream, inner.aclose

    check(sampler(Bare()))


# What the server counts and we do not ----------------------------------------------------------------------------


@pytest.mark.parametrize("models", [None, listing()])
@pytest.mark.parametrize("words", list(WORDS))
@pytest.mark.parametrize(("status", "partial"), [(400, False), (200, True), (500, False)])
def test_an_image_that_becomes_many_tokens_is_within_the_context_or_truncated(
    words: str, status: int, models: Any, partial: bool
) -> None:
    """Our count of the prompt is the placeholder's one token; the server's is what the image becomes."""
    groups = [Group(prompt=[1] * 5, n=2, extra={"images": ["x"] * images}) for images in (0, 1, 2, 3)]
    endpoint = ToldEndpoint(Limited(WORDS[words], status, expands=25), models=models)

    async def scenario() -> list[Any]:
        one = sampler(endpoint)
        async with one.rollout(groups, PARAMS, partial=partial) as rollout:
            return sorted([group async for group in rollout], key=lambda group: group.place)

    found = [[len(sample.token_ids) for sample in group.samples] for group in asyncio.run(scenario())]
    assert found == [[20, 20], [20, 20], [9, 9], [0, 0]]


def test_a_server_that_counts_without_saying_gives_at_least_one_token() -> None:
    endpoint = ToldEndpoint(Limited(WORDS["vllm"], expands=25, counts=False), models=listing())
    groups = [Group(prompt=[1] * 5, extra={"images": ["x"] * images}) for images in (2, 3)]
    found = sampler(endpoint).sample_groups(groups, PARAMS)
    assert [len(group.samples[0].token_ids) for group in found] == [1, 0]
    assert {group.samples[0].status for group in found} == {SampleStatus.TRUNCATED}


def test_a_server_that_takes_shorter_prompts_than_its_context_holds_truncates_only_those() -> None:
    """SGLang keeps some tokens of its context for the answer."""

    def serve(request: dict[str, Any]) -> Any:
        if len(request["prompt"]) > 59:
            said = f"Input length ({len(request['prompt'])} tokens) exceeds the maximum allowed length (59 tokens)."
            return Reply(status=400, body=said.encode())
        return Limited(WORDS["sglang"])(request)

    groups = [Group(prompt=[1] * length) for length in (58, 60, 62, 50, 59)]
    found = sampler(ToldEndpoint(serve, models=listing())).sample_groups(groups, PARAMS)
    assert [len(group.samples[0].token_ids) for group in found] == [6, 0, 0, 14, 5]


def test_the_probe_of_log_probs_is_not_spent_on_a_prompt_that_is_too_long() -> None:
    """The first prompt filled the context, so raw log-probs of filtered sampling were taken without a word."""
    endpoint = ToldEndpoint(Limited(WORDS["vllm"]), models=listing())
    with pytest.raises(RolloutAnswerError, match="raw log-probs"):
        sampler(endpoint).sample_groups(
            [Group(prompt=[1] * 90), Group(prompt=[1] * 5)], SamplingParams(max_tokens=4, temperature=0.5)
        )


# A recording -----------------------------------------------------------------------------------------------------


def test_the_list_of_models_is_recorded_and_replayed(tmp_path: Path) -> None:
    file = tmp_path / "record"
    endpoint = ToldEndpoint(Limited(WORDLESS["none"]), models=listing())
    check(sampler(Recorder(endpoint, file)))
    check(sampler(Replay(file)))
    without = [line for line in file.read_bytes().splitlines(keepends=True) if b'"/models"' not in line]
    file.write_bytes(b"".join(without))
    with pytest.raises(RolloutRequestError):
        check(sampler(Replay(file)))


def test_a_list_that_cannot_be_reached_leaves_the_refusal_as_it_is() -> None:
    class Away(ToldEndpoint):
        async def models(self, headers: Any) -> Reply:
            raise NoAnswer("the connection failed")

    with pytest.raises(RolloutRequestError, match="Bad Request"):
        sampler(Away(Limited(WORDLESS["none"]))).sample_groups([Group(prompt=[1] * 70)], PARAMS)
    check(sampler(Away(Limited(WORDS["sglang"]))))


# Chat ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [None, listing()])
@pytest.mark.parametrize("words", list(WORDS))
def test_a_conversation_that_is_too_long_does_not_end_the_others(words: str, models: Any) -> None:
    def serve(request: dict[str, Any]) -> Any:
        prompt, room = len(request["messages"][0]["content"]), request["max_tokens"]
        if prompt + room > LIMIT:
            return Reply(status=400, body=json.dumps({"error": {"message": WORDS[words](prompt, room)}}).encode())
        one = {"index": 0, "message": {"content": "t" * room}, "finish_reason": "length"}
        return {"choices": [one], "usage": {"prompt_tokens": prompt}}

    async def scenario() -> list[int]:
        config = RolloutConfig(base_url="http://endpoint", model="m")
        one = ChatSampler(config, transport=ToldEndpoint(serve, models=models), sleep=no_pause)
        talks = [[{"role": "user", "content": "x" * length}] for length in LENGTHS]
        found = await one.chat(talks, max_tokens=20)
        assert {answer.finish_reason for answers in found for answer in answers} == {"length"}
        return [len(answer.text) for (answer,) in found]

    assert asyncio.run(scenario()) == [max(0, min(20, LIMIT - length)) for length in LENGTHS]


def test_a_chat_that_is_refused_for_another_reason_says_it() -> None:
    async def scenario() -> None:
        endpoint = ToldEndpoint(lambda request: Reply(status=400, body=b"no such role"), models=listing())
        one = ChatSampler(RolloutConfig(base_url="http://endpoint", model="m"), transport=endpoint, sleep=no_pause)
        with pytest.raises(RolloutRequestError, match="no such role"):
            await one.chat([[{"role": "user", "content": "x"}]])

    asyncio.run(scenario())
