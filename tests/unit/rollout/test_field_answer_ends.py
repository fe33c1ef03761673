"""How answers end. Kind: what a server gave up was delivered as a sample, and an empty list was taken for none."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from cwtrain.plugins import Plugins
from cwtrain_rollout import (
    Group,
    RolloutConfig,
    RolloutExhaustedError,
    SampledGroup,
    Sampler,
    SampleStatus,
    SamplingParams,
    evaluate,
)
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.transport import Reply
from helpers.completions_server import answer, choice
from helpers.told_endpoint import ToldEndpoint, no_pause, sampler, streamed_choice

PARAMS = SamplingParams(max_tokens=8)
ODD = [
    "aborted",
    "canceled",
    "Abort",
    "preempted",
    "timeout",
    "error",
    "",
    "STOP",
    " stop",
    "content_filter",
    "tool_calls",
]
UNKNOWN = [*ODD, "abort", "cancelled", None]


def first_then(*first: Any, rest: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    script = list(first)
    return lambda request: script.pop(0) if script else rest(request)


def whole(request: dict[str, Any]) -> Any:
    return answer(*[choice(index, (40 + index,)) for index in range(request["n"])])


@pytest.mark.parametrize("tokens", [(), (7,), (7, 8, 9, 10, 11)])
@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_choice_that_did_not_end_by_itself_is_asked_again(reason: str | None, tokens: tuple[int, ...]) -> None:
    odd = answer(choice(0, (1,)), choice(1, tokens, finish_reason=reason), choice(2, (3,)))
    endpoint = ToldEndpoint(first_then(odd, rest=whole))
    one = sampler(endpoint)
    (group,) = one.sample_groups([Group(prompt=[5], n=3)], PARAMS)
    assert [request["n"] for request in endpoint.requests] == [3, 1]
    assert [sample.token_ids for sample in group.samples] == [(1,), (40,), (3,)]
    assert group.whole
    assert one.totals.failed_samples == (reason is not None)


@pytest.mark.parametrize("tokens", [(), (7, 8)])
@pytest.mark.parametrize("reason", UNKNOWN)
def test_one_that_never_ends_by_itself_fails_within_the_bound_and_says_how(
    reason: str | None, tokens: tuple[int, ...]
) -> None:
    endpoint = ToldEndpoint(lambda request: answer(choice(0, tokens, finish_reason=reason)))
    said = "no finish_reason" if reason is None else f"finish_reason {reason!r}"
    with pytest.raises(RolloutExhaustedError, match=said):
        sampler(endpoint, max_attempts=3).sample_groups([Group(prompt=[5])], PARAMS)
    assert len(endpoint.requests) == 3


@pytest.mark.parametrize("tokens", [(), (7, 8)])
@pytest.mark.parametrize("reason", UNKNOWN)
def test_evaluation_never_scores_one(reason: str | None, tokens: tuple[int, ...]) -> None:
    endpoint = ToldEndpoint(
        lambda request: (
            answer(choice(0, tokens, finish_reason=reason if request["prompt"] == [6] else "stop"))
            if tokens or request["prompt"] == [6]
            else whole(request)
        )
    )
    scored: list[int] = []

    def score(group: Group, sample: Any) -> float:
        scored.append(group.prompt[0])
        return 1.0

    found = evaluate([[5], [6], [7]], score, sampler=sampler(endpoint, max_attempts=2, on_failure="drop"))
    assert scored == [5, 7]
    assert [group.prompt for group in found.dropped] == [(6,)]
    scored.clear()
    with pytest.raises(RolloutExhaustedError):
        evaluate([[5], [6], [7]], score, sampler=sampler(endpoint, max_attempts=2))
    assert scored == []


def test_evaluation_leaves_out_what_another_sampler_calls_failed() -> None:
    class Other(Sampler):
        async def sample(self, groups: Any, sampling: Any, **options: Any) -> list[SampledGroup]:
            found = await super().sample(groups, sampling, **options)
            import attrs

            first = found[0]
            broken = attrs.evolve(first.samples[0], status=SampleStatus.FAILED)
            return [attrs.evolve(first, samples=(broken,)), *found[1:]]

    one = Other(RolloutConfig(base_url="http://e", model="m"), transport=ToldEndpoint(whole), plugins=Plugins())
    found = evaluate([[5], [6]], lambda group, sample: float(group.prompt[0]), sampler=one)
    assert (found.scores, [group.prompt for group in found.dropped]) == (((6.0,),), [(5,)])


# Streams ---------------------------------------------------------------------------------------------------------


def partial_rollout(endpoint: ToldEndpoint, n: int = 1, **settings: Any) -> tuple[Sampler, list[Any]]:
    async def scenario() -> tuple[Sampler, list[Any]]:
        one = sampler(endpoint, **settings)
        async with one.rollout([Group(prompt=[5], n=n)], PARAMS, partial=True) as rollout:
            return one, [sample async for group in rollout for sample in group.samples]

    return asyncio.run(asyncio.wait_for(scenario(), 60))


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("tokens", [(), (7,), (7, 8, 9)])
@pytest.mark.parametrize("reason", [*ODD, None])
def test_a_stream_that_did_not_end_by_itself_is_asked_again(
    reason: str | None, tokens: tuple[int, ...], apart: bool
) -> None:
    odd = streamed_choice(tokens, reason, last_event_empty=apart)
    endpoint = ToldEndpoint(first_then(odd, rest=lambda request: streamed_choice((1, 2), "stop")))
    one, (sample,) = partial_rollout(endpoint)
    assert (sample.token_ids, sample.logprobs, sample.status) == ((1, 2), (-0.5, -0.5), SampleStatus.COMPLETED)
    assert (len(endpoint.requests), one.totals.bad_answers) == (2, 1)


@pytest.mark.parametrize("reason", ["abort", "cancelled"])
@pytest.mark.parametrize(
    "ids", [{"token_ids": []}, {"token_ids": [], "logprobs": {"tokens": [], "token_logprobs": []}}, {}]
)
def test_an_abort_before_the_first_token_is_an_aborted_sample_without_tokens(reason: str, ids: dict[str, Any]) -> None:
    """It was told to be a server that gives no token ids: final for one, and requests split for good."""
    event = {"choices": [{"index": 0, "text": "", "finish_reason": reason, **ids}]}
    one, (sample,) = partial_rollout(ToldEndpoint(lambda request: [event]))
    assert (sample.status, sample.token_ids, sample.logprobs) == (SampleStatus.ABORTED, (), ())
    endpoint = one._engine.transport
    assert isinstance(endpoint, ToldEndpoint)
    endpoint.tell, endpoint.requests[:] = whole, []
    one.sample_groups([Group(prompt=[5], n=4)], PARAMS)
    assert [request["n"] for request in endpoint.requests] == [4]
    assert "completion_token_ids" not in json.dumps(endpoint.requests)


@pytest.mark.parametrize("ids", [{"token_ids": []}, {}, {"token_ids": None}, {"logprobs": {"tokens": []}}])
@pytest.mark.parametrize("n", [1, 2])
def test_an_abort_before_the_first_token_teaches_nothing_about_token_ids(ids: dict[str, Any], n: int) -> None:
    none = {"text": "", "finish_reason": "abort", **ids}
    odd = answer(*[{"index": index, **none} for index in range(n)])
    endpoint = ToldEndpoint(first_then(odd, odd, odd, rest=whole))
    (group,) = sampler(endpoint).sample_groups([Group(prompt=[5], n=n)], PARAMS)
    assert group.whole
    assert [request["n"] for request in endpoint.requests] == [n] * 4
    assert "completion_token_ids" not in json.dumps(endpoint.requests)


@pytest.mark.parametrize("end", ["stop", "length"])
@pytest.mark.parametrize(
    "empty",
    [
        {"token_ids": [], "logprobs": {"tokens": [], "token_logprobs": []}},
        {"token_ids": [], "logprobs": None},
        {"token_ids": None, "logprobs": {"tokens": [], "token_logprobs": []}},
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_whole_answer_without_a_token_is_asked_again(end: str, empty: dict[str, Any], stream: bool) -> None:
    odd = {"choices": [{"index": 0, "text": "", "finish_reason": end, **empty}]}
    rest: Any = (lambda request: streamed_choice((1,), "stop")) if stream else whole
    endpoint = ToldEndpoint(first_then([odd] if stream else odd, rest=rest))
    if stream:
        _, (sample,) = partial_rollout(endpoint)
    else:
        ((sample,),) = [group.samples for group in sampler(endpoint).sample_groups([Group(prompt=[5])], PARAMS)]
    assert sample.token_ids in ((1,), (40,))
    assert len(endpoint.requests) == 2


@pytest.mark.parametrize("logprobs", [True, False])
@pytest.mark.parametrize(
    "odd",
    [
        {"token_ids": [2, -1]},
        {"token_ids": [2, None]},
        {"token_ids": "2"},
        {"finish_reason": 1},
        {"finish_reason": {"type": "stop"}},
        {"finish_reason": ["stop"]},
        {"finish_reason": False},
    ],
)
def test_a_stream_with_an_event_that_cannot_be_read_is_asked_again(odd: dict[str, Any], logprobs: bool) -> None:
    """Its tokens were left out of the sample where log-probs are not required."""
    events = [*streamed_choice((1,), None), *streamed_choice((2,), None), *streamed_choice((3,), "stop")]
    events[1]["choices"][0].update(odd)
    endpoint = ToldEndpoint(first_then(events, rest=lambda request: streamed_choice((7, 8), "stop")))
    one, (sample,) = partial_rollout(endpoint, logprobs=logprobs)
    assert (sample.token_ids, one.totals.bad_answers) == ((7, 8), 1)


@pytest.mark.parametrize("reason", [1, {"type": "stop"}, ["stop"], False, {}])
def test_a_reason_that_is_no_text_is_asked_again(reason: Any) -> None:
    endpoint = ToldEndpoint(first_then(answer(choice(0, finish_reason=reason)), rest=whole))
    (group,) = sampler(endpoint).sample_groups([Group(prompt=[5])], PARAMS)
    assert (group.samples[0].token_ids, len(endpoint.requests)) == ((40,), 2)


def test_an_empty_reason_before_the_last_event_is_no_end() -> None:
    events = [*streamed_choice((1,), ""), *streamed_choice((2,), ""), *streamed_choice((3,), "length")]
    _, (sample,) = partial_rollout(ToldEndpoint(lambda request: events))
    assert (sample.token_ids, sample.status) == ((1, 2, 3), SampleStatus.TRUNCATED)


@pytest.mark.parametrize(
    "after", [streamed_choice((2,), None), streamed_choice((), "abort"), streamed_choice((2,), "stop")]
)
def test_a_stream_that_goes_on_after_its_end_is_asked_again(after: list[dict[str, Any]]) -> None:
    odd = [*streamed_choice((1,), "stop"), *after]
    endpoint = ToldEndpoint(first_then(odd, rest=lambda request: streamed_choice((7,), "stop")))
    _, (sample,) = partial_rollout(endpoint)
    assert (sample.token_ids, len(endpoint.requests)) == ((7,), 2)


@pytest.mark.parametrize(
    "named", [{"identity": ""}, {"identities": [""]}, {"identities": []}, {"identity": "", "identities": []}]
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_empty_identity_names_no_weights(named: dict[str, Any], stream: bool) -> None:
    if stream:
        events = streamed_choice((1,), "stop")
        _, (sample,) = partial_rollout(ToldEndpoint(lambda request: [{**event, **named} for event in events]))
    else:
        endpoint = ToldEndpoint(lambda request: answer(choice(0), **named))
        ((sample,),) = [group.samples for group in sampler(endpoint).sample_groups([Group(prompt=[5])], PARAMS)]
    assert sample.weights is None


# Chat ------------------------------------------------------------------------------------------------------------


def said(reason: str | None, text: str = "half an answ") -> dict[str, Any]:
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


def chat_sampler(tell: Callable[[dict[str, Any]], Any], **settings: Any) -> ChatSampler:
    config = RolloutConfig(base_url="http://endpoint", model="m", **settings)
    return ChatSampler(config, transport=ToldEndpoint(tell), sleep=no_pause)


@pytest.mark.parametrize("text", ["", "half an answ"])
@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_chat_answer_that_did_not_end_by_itself_is_never_the_answer(reason: str | None, text: str) -> None:
    async def scenario() -> None:
        script = [said(reason, text), said("length", "whole")]
        ((found,),) = await chat_sampler(lambda request: script.pop(0)).chat([[{"role": "user", "content": "hi"}]])
        assert (found.text, found.finish_reason) == ("whole", "length")
        never = chat_sampler(lambda request: said(reason, text), max_attempts=3)
        what = "no finish_reason" if reason is None else f"finish_reason {reason!r}"
        with pytest.raises(RolloutExhaustedError, match=what):
            await never.evaluate([[{"role": "user", "content": "hi"}]], lambda messages, answer: 1.0)

    asyncio.run(scenario())


def test_an_error_beside_a_chat_answer_is_never_the_answer() -> None:
    script = [{**said("stop"), "error": {"message": "the engine died"}}, said("stop", "whole")]
    one = chat_sampler(lambda request: script.pop(0))
    ((found,),) = asyncio.run(one.chat([[{"role": "user", "content": "hi"}]]))
    assert found.text == "whole"


def test_a_reply_below_json_is_said_in_the_chat_s_error() -> None:
    async def scenario() -> None:
        one = chat_sampler(lambda request: Reply(status=200, body=b"<html>"), max_attempts=2)
        with pytest.raises(RolloutExhaustedError, match="<html>"):
            await one.chat([[{"role": "user", "content": "hi"}]])

    asyncio.run(scenario())
