"""What callers give, at the border: one thing where several may be given, numbers of other libraries, fields of ours.

Three kinds. A text is one stop and an id is one id, wherever several may be given, and never their letters. A number
that numpy made is that number, None is the neutral value, and what cannot be converted is refused by name, before
anything is sent. A request's fields that are the sampler's own cannot come in through ``extra``, and what a caller puts
beside them does not push them out.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import ConfigError
from cwtrain.plugins import Plugins
from cwtrain_rollout import Group, Load, RolloutConfig, Sampler, SamplingParams, evaluate
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.requests import fields
from cwtrain_rollout.served import ServedWeights
from cwtrain_rollout.spans import History
from cwtrain_rollout.transport import Reply
from helpers.completions_server import CompletionsServer, answer, choice
from helpers.endpoint_model import EndpointModel

PARAMS = SamplingParams(max_tokens=4)
NEUTRAL = {
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def sampler(server: CompletionsServer, **settings: Any) -> Sampler:
    return Sampler(
        RolloutConfig(base_url=server.url, model="policy", **settings), rng=random.Random(1), plugins=Plugins()
    )


class Chat(EndpointModel):
    async def post(self, body: bytes, headers: Any) -> Reply:
        self.bodies.append(json.loads(body))
        return Reply(status=200, body=b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}')


def chat(**options: Any) -> dict[str, Any]:
    """Return the body that a chat completion is asked for with."""
    endpoint = Chat()
    one = ChatSampler(RolloutConfig(base_url="http://h", model="m"), transport=endpoint)
    asyncio.run(one.chat([[{"role": "user", "content": "ab"}]], **options))
    (body,) = endpoint.bodies
    return dict(body)


# One where several may be given --------------------------------------------------------------------------------------


class _Text(str):
    """A text of another class, as numpy's and others' are."""

    __slots__ = ()


def shown(value: Any) -> str:
    """Name a case alike in each process: no address, no order of a set."""
    if isinstance(value, set | frozenset):
        return f"{type(value).__name__} {sorted(value)}"
    return "generator" if isinstance(value, Iterator) else repr(value)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("</s>", ("</s>",)),
        (np.str_("</s>"), ("</s>",)),
        (_Text("ab"), ("ab",)),
        (None, ()),
        ((), ()),
        ([], ()),
        (["</s>", "\n"], ("</s>", "\n")),
        (("ab",), ("ab",)),
        ({"ab", "cd"}, ("ab", "cd")),
        (frozenset(["ab"]), ("ab",)),
        ((text for text in ("ab", "cd")), ("ab", "cd")),
        (np.array(["ab", "cd"]), ("ab", "cd")),
        ({"ab": 1}.keys(), ("ab",)),
    ],
    ids=shown,
)
def test_a_text_is_one_stop_and_several_are_several(given: Any, expected: tuple[str, ...]) -> None:
    found = SamplingParams(max_tokens=4, stop=given).stop
    assert found == expected
    assert set(map(type, found)) <= {str}


@pytest.mark.parametrize(
    "given", ["", ["ab", ""], b"ab", bytearray(b"ab"), [b"ab"], 7, 1.5, ["ab", None], {"ab": "cd"}, "\ud800", object()]
)
def test_what_is_no_stop_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="stop is "):
        SamplingParams(max_tokens=4, stop=given)
    with pytest.raises(ConfigError, match="stop is "):
        chat(stop=given)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (2, (2,)),
        (np.int64(2), (2,)),
        (np.array(2), (2,)),
        (0, (0,)),
        (None, ()),
        ((), ()),
        ([2, 3], (2, 3)),
        ({3, 2}, (2, 3)),
        (range(2), (0, 1)),
        ((number for number in (5, 6)), (5, 6)),
        (np.array([5, 6], np.uint16), (5, 6)),
        ([np.int32(5)], (5,)),
    ],
    ids=shown,
)
def test_an_id_is_one_stop_token_and_several_are_several(given: Any, expected: tuple[int, ...]) -> None:
    found = SamplingParams(max_tokens=4, stop_token_ids=given).stop_token_ids
    assert found == expected
    assert set(map(type, found)) <= {int}


@pytest.mark.parametrize("given", ["2", b"\x02", [2.0], 2.0, True, [True], -1, [-1], ["2"], {2: 3}, [[2]], 2**40])
def test_what_is_no_stop_token_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="stop_token_ids is "):
        SamplingParams(max_tokens=4, stop_token_ids=given)


def test_a_stop_goes_out_whole_in_both_kinds_of_requests() -> None:
    with CompletionsServer() as server:
        params = SamplingParams(max_tokens=4, stop="</s>", stop_token_ids=2)
        sampler(server).sample_groups([Group(prompt=[1])], params)
    assert (server.requests[0]["stop"], server.requests[0]["stop_token_ids"]) == (["</s>"], [2])
    assert chat(stop="</s>")["stop"] == ["</s>"]
    assert chat(stop=(text for text in ("a", "b")))["stop"] == ["a", "b"]
    assert "stop" not in chat(stop=None)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([1, 2], (1, 2)),
        (np.array([1, 2], np.int32), (1, 2)),
        ([np.int64(1), 2], (1, 2)),
        (range(1, 3), (1, 2)),
        ((number for number in (1, 2)), (1, 2)),
    ],
    ids=shown,
)
def test_ids_of_any_library_are_a_prompt(given: Any, expected: tuple[int, ...]) -> None:
    group = Group(prompt=given)
    assert group.prompt == expected
    assert set(map(type, group.prompt)) == {int}


@pytest.mark.parametrize("given", ["12", b"12", 7, None, {1, 2}, {1: 2}, ["1"], [1.0], [True], [[1, 2]], [2**40], []])
def test_what_is_no_prompt_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="prompt"):
        Group(prompt=given)


@pytest.mark.parametrize("given", ["ab", [1, 2], [["a"]], [b"ab"], 5, [{1, 2}], {1: 2}])
def test_what_is_no_list_of_answers_so_far_is_refused_by_name(given: Any) -> None:
    with pytest.raises(ConfigError, match="prefixes must be 1 lists"):
        Group(prompt=[1], prefixes=given)


def test_one_group_prompt_or_conversation_is_no_list_of_them() -> None:
    group = Group(prompt=[1])
    with CompletionsServer() as server:
        one = sampler(server)
        for wrong in (group, "text", [[1, 2]], None, 5):
            with pytest.raises(ConfigError, match="list of groups"):
                one.sample_groups(wrong, PARAMS)  # type: ignore[arg-type]
        for prompt in (5, "text", None):
            with pytest.raises(ConfigError, match="prompt"):
                asyncio.run(one.warm_up(prompt=prompt))  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="how to sample"):
            one.sample_groups([group], {"max_tokens": 4})  # type: ignore[arg-type]
        for prompts in (group, "text", b"text", [1, 2], ["text"]):
            with pytest.raises(ConfigError, match="prompt"):
                evaluate(prompts, lambda group, sample: 0.0, sampler=one)  # type: ignore[arg-type]
        assert server.requests == []
        assert one.sample_groups((group for _ in range(2)), PARAMS)  # type: ignore[arg-type]
    endpoint = Chat()
    talker = ChatSampler(RolloutConfig(base_url="http://h", model="m"), transport=endpoint)
    message = {"role": "user", "content": "ab"}
    for talks in (
        message,
        "ab",
        [message],
        ["ab"],
        [[]],
        [["ab"]],
        *([[{"role": "user", "content": one}]] for one in (object(), math.nan)),
    ):
        with pytest.raises(ConfigError, match="conversation"):
            asyncio.run(talker.chat(talks))  # type: ignore[arg-type]
    assert endpoint.bodies == []


# Numbers -------------------------------------------------------------------------------------------------------------

WHOLE = ("max_tokens", "top_k", "min_tokens")
REAL = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("make", [np.int64, np.uint8, np.array, int], ids=["int64", "uint8", "array", "int"])
def test_a_whole_number_of_any_library_is_that_number(name: str, make: Callable[[int], Any]) -> None:
    made = SamplingParams(**{"max_tokens": 8, name: make(3)})
    assert (getattr(made, name), type(getattr(made, name))) == (3, int)


@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("make", [np.float64, np.float32, np.float16, np.array, float])
def test_a_number_of_any_library_is_that_number(name: str, make: Callable[[float], Any]) -> None:
    made = SamplingParams(max_tokens=8, **{name: make(0.5)})
    assert (getattr(made, name), type(getattr(made, name))) == (0.5, float)


def test_numbers_of_numpy_reach_the_server() -> None:
    """With all of them at once, in completions and chat completions."""
    given = {name: np.float32(0.5) for name in REAL}
    params = SamplingParams(
        max_tokens=np.int64(4), top_k=np.int32(3), min_tokens=np.uint8(1), ignore_eos=np.bool_(True), **given
    )
    with CompletionsServer() as server:
        group = Group(prompt=np.array([1, 2]), n=np.int64(2), seed=np.int64(5), extra={"x": np.float32(0.5)})
        sampler(server, logprobs_mode="processed").sample_groups([group], params)
    for number, request in enumerate(sorted(server.requests, key=lambda request: request["seed"])):
        assert {name: request[name] for name in given} == dict.fromkeys(given, 0.5)
        assert (request["max_tokens"], request["top_k"], request["min_tokens"]) == (4, 3, 1)
        assert (request["ignore_eos"], request["prompt"], request["seed"]) == (True, [1, 2], 5 + number)
        assert request["x"] == 0.5
    body = chat(max_tokens=np.int64(4), top_k=np.int32(3), n=np.int64(1), **given)
    assert {name: body[name] for name in given} == dict.fromkeys(given, 0.5)
    assert (body["max_tokens"], body["top_k"]) == (4, 3)


@pytest.mark.parametrize("name", [*NEUTRAL, "min_tokens", "stop", "stop_token_ids", "ignore_eos"])
def test_none_is_the_neutral_value(name: str) -> None:
    assert SamplingParams(max_tokens=4, **{name: None}) == PARAMS


@pytest.mark.parametrize("name", [*WHOLE, *REAL])
@pytest.mark.parametrize("given", ["1", b"1", True, [1], (), np.array([1, 2]), object(), float("nan"), 10**400, 1j])
def test_what_is_no_number_is_refused_by_name(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=f"{name} is ") as caught:
        SamplingParams(**{"max_tokens": 4, name: given})
    assert any(problem.startswith(f"{name} is ") for problem in caught.value.problems)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_number_is_not_cut_out_of_another(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 1.5"):
        SamplingParams(**{"max_tokens": 4, name: 1.5})


@pytest.mark.parametrize(
    ("given", "word"),
    [({"max_tokens": 0}, "max_tokens is 0"), ({"max_tokens": None}, "max_tokens is None"), ({"top_k": 0}, "-1")],
)
def test_nothing_is_refused_by_name_where_it_says_nothing(given: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        SamplingParams(**{"max_tokens": 4, **given})


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("n", None), ("n", 1.0), ("n", "2"), ("n", True), ("n", 0), ("seed", "5"), ("seed", 1.5), ("seed", True),
        ("seeds", 5), ("seeds", "5"), ("seeds", [1.5]), ("seeds", {5}), ("text", 5), ("text", b"ab"), ("session", 7),
        ("session", "a\nb"), ("text", "\ud800"),
    ],
)  # fmt: skip
def test_every_field_of_a_group_is_checked_by_name(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Group(prompt=[1], **{name: given})


@pytest.mark.parametrize("salt", [5, b"ab", ["ab"], ""])
def test_a_salt_that_is_no_text_is_refused_by_name(salt: Any) -> None:
    with CompletionsServer() as server, pytest.raises(ConfigError, match="cache salt"):
        sampler(server).sample_groups([Group(prompt=[1])], PARAMS, cache_salt=salt)


def test_every_neutral_field_is_sent_in_both_kinds_of_requests() -> None:
    with CompletionsServer() as server:
        sampler(server).sample_groups([Group(prompt=[1])], PARAMS)
    (sent,) = server.requests
    assert {name: sent[name] for name in NEUTRAL} == NEUTRAL
    body = chat()
    assert {name: body[name] for name in NEUTRAL} == NEUTRAL


def test_chat_completions_take_every_way_to_draw() -> None:
    asked = {"top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": -0.5}
    body = chat(**asked, stop_token_ids=2, min_tokens=1, ignore_eos=True)
    assert {name: body[name] for name in asked} == asked
    assert (body["stop_token_ids"], body["min_tokens"], body["ignore_eos"]) == ([2], 1, True)
    for wrong in ({"top_k": "5"}, {"min_p": 2}, {"n": 0}, {"n": "2"}, {"max_tokens": None}, {"tpo_k": 5}):
        (name,) = wrong
        with pytest.raises(ConfigError, match=name):
            chat(**wrong)


TEXTS = (
    "base_url", "model", "api_key", "api_key_file", "logprobs_mode", "on_failure", "deployment_id", "record",
    "served_identity_file",
)  # fmt: skip


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("given", [5, 1.5, b"ab", ["ab"], True, np.int64(3)], ids=shown)
def test_a_setting_that_is_no_text_is_refused(name: str, given: Any) -> None:
    with pytest.raises(ConfigError, match=r"must be a (text|path)"):
        RolloutConfig(**{"base_url": "http://h", "model": "m", name: given})
    with pytest.raises(ConfigError, match=name):
        RolloutConfig.from_env({}, **{"base_url": "http://h", "model": "m", name: given})


def test_numbers_of_numpy_are_settings() -> None:
    config = RolloutConfig(
        base_url="http://h", model="m", concurrency=np.int64(8), timeout=np.float32(1.5), logprobs=np.bool_(True)
    )
    found = (config.concurrency, config.timeout, config.logprobs)
    assert (found, tuple(map(type, found))) == ((8, 1.5, True), (int, float, bool))


# Fields of the sampler's own -----------------------------------------------------------------------------------------


def ours() -> dict[str, Any]:
    """Return a body with everything that the sampler can send."""
    config = RolloutConfig(base_url="http://h", model="m", routed_experts=True)
    params = SamplingParams(max_tokens=4, min_tokens=1, stop=("a",), stop_token_ids=(2,), ignore_eos=True)
    sent = {
        "n": 1, "max_tokens": 4, "seed": 1, "salt": "s", "logprobs": 0, "stream": True, "timed": True,
        "completion_ids": True,
    }  # fmt: skip
    return fields(config, params, prompt="text", **sent)


@pytest.mark.parametrize("name", sorted(ours().keys() - {"nvext"}))
def test_what_the_sampler_sends_cannot_come_in_through_extra(name: str) -> None:
    with pytest.raises(ConfigError, match=repr(name)):
        Group(prompt=[1], extra={name: ours()[name]})


@pytest.mark.parametrize(
    "extra",
    [
        {"nvext": {"cache_salt": "mine"}},
        {"nvext": {"cache_salt": None}},
        {"nvext": {"agent_hints": {"priority": 1}, "cache_salt": ""}},
        {"nvext": {"token_data": [1, 2]}},
        {"nvext": {"greed_sampling": True}},
        {"cache_salt": "mine"},
        {"extra_key": "mine"},
        {"kv_transfer_params": {}},
        {"best_of": 3},
        {"rid": "mine"},
        {"echo": True},
        {"prompt_embeds": ""},
        {"truncate_prompt_tokens": 3},
        {"max_completion_tokens": 3},
        {"top_logprobs": 3},
        {"use_beam_search": True},
        {"lora_path": "x"},
        {"nvext": "text"},
        {"nvext": [1]},
        {"nvext": {"extra_fields": "timing"}},
        {"nvext": {"extra_fields": [1]}},
    ],
    ids=json.dumps,
)
def test_other_words_for_the_same_are_refused_too(extra: dict[str, Any]) -> None:
    (name,) = extra
    with pytest.raises(ConfigError, match=name):
        Group(prompt=[1], extra=extra)


def test_all_that_is_wrong_with_extra_is_told_at_once() -> None:
    extra = {"n": 5, "seed": 1, "mine": 2, "nvext": {"cache_salt": "x", "agent_hints": {}}, "stream": True}
    with pytest.raises(ConfigError) as caught:
        Group(prompt=[], extra=extra)
    told = " ".join(caught.value.problems)
    assert len(caught.value.problems) == 5
    assert all(repr(name) in told for name in ("n", "seed", "cache_salt", "stream"))
    assert all(repr(name) not in told for name in ("mine", "agent_hints"))


@pytest.mark.parametrize(
    "given",
    [
        "text",
        5,
        [("a", 1)],
        {"a": object()},
        {"a": {1, 2}.__iter__()},
        {"a": "\ud800"},
        {"a": [math.nan]},
        {"a": np.float32("inf")},
    ],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(given: Any) -> None:
    with pytest.raises(ConfigError, match="extra"):
        Group(prompt=[1], extra=given)


def test_extra_is_a_copy_of_what_is_sent() -> None:
    images = {"image": ["data:,"], "sizes": np.array([[1, 2]]), "scale": np.float32(0.5), "where": (1, 2)}
    extra: dict[str, Any] = {"multi_modal_data": images, "nvext": {"agent_hints": {"priority": np.int64(1)}}}
    group = Group(prompt=[1], extra=extra)
    images["image"] = []
    extra["n"] = 5
    plain = {"image": ["data:,"], "sizes": [[1, 2]], "scale": 0.5, "where": [1, 2]}
    assert group.extra == {"multi_modal_data": plain, "nvext": {"agent_hints": {"priority": 1}}}


class Always:
    """One hot-load that is served."""

    def history(self) -> History:
        return History((Load(id="salt", identity="run-v000001"),))

    def baseline(self) -> None:
        return None


@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("deployment", ["d-1", None])
def test_a_caller_s_nvext_is_merged_and_ours_stays(deployment: str | None, streamed: bool) -> None:
    """The salt stays where the endpoint looks for it, and what is asked for in ``extra_fields`` is of both."""
    theirs = {"agent_hints": {"priority": 1}, "extra_fields": ["worker_id", "timing"]}
    event = answer(choice(0, (7, 8)))

    async def scenario(server: CompletionsServer) -> None:
        config = RolloutConfig(base_url=server.url, model="policy", deployment_id=deployment)
        one = Sampler(config, served=ServedWeights(Always(), poll=60, patience=5), plugins=Plugins())
        groups = [Group(prompt=[1], n=2, extra={"nvext": theirs, "mine": 1})]
        async with one.rollout(groups, PARAMS, partial=streamed) as rollout:
            assert [group.whole async for group in rollout] == [True]

    with CompletionsServer(rest=event) as server:
        asyncio.run(scenario(server))
    assert len(server.requests) == 2
    for request in server.requests:
        assert request["nvext"] == {
            "agent_hints": {"priority": 1},
            "cache_salt": "salt",
            "extra_fields": ["timing", "worker_id"],
        }
        assert request.get("cache_salt") == (None if deployment else "salt")
        assert (request["mine"], request["n"], request["stream"]) == (1, 1, streamed)


@pytest.mark.parametrize("nvext", [None, {}])
def test_an_nvext_without_anything_in_it_is_none(nvext: Any) -> None:
    with CompletionsServer() as server:
        sampler(server, concurrency=8).sample_groups(
            [Group(prompt=[1], extra={"nvext": nvext})], PARAMS, cache_salt="s"
        )
    assert server.requests[0]["nvext"] == {"cache_salt": "s"}
