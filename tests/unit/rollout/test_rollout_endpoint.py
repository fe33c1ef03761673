"""What endpoints differ in, and how the sampler finds out: splits, fallbacks, sessions, recordings, streams."""

from __future__ import annotations

import asyncio
import gc
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import ConfigError
from cwtrain.plugins import Plugins
from cwtrain_rollout import (
    Group,
    Replay,
    RolloutConfig,
    RolloutError,
    RolloutRequestError,
    Sampler,
    SamplingParams,
)
from helpers.completions_server import CompletionsServer, Raw, answer, choice, good

KEY = "sk-very-secret-0123456789"
PARAMS = SamplingParams(max_tokens=4)


async def no_pause(seconds: float) -> None:
    await asyncio.sleep(0)


def sampler(server: CompletionsServer, **settings: Any) -> Sampler:
    more = {name: settings.pop(name) for name in ("tokenise", "transport") if name in settings}
    config = RolloutConfig(base_url=server.url, model="policy", **settings)
    return Sampler(config, rng=random.Random(1), sleep=no_pause, plugins=Plugins(), **more)


def test_a_group_can_be_split_and_stays_at_one_replica() -> None:
    with CompletionsServer() as server:
        one = sampler(server, group_requests=False)
        got = one.sample_groups([Group(prompt=[1], n=3, seed=50), Group(prompt=[2], n=2)], PARAMS)
    assert [len(group.samples) for group in got] == [3, 2]
    assert [request["n"] for request in server.requests] == [1] * 5
    seeds = sorted(request["seed"] for request in server.requests if request["prompt"] == [1])
    assert seeds == [50, 51, 52]
    assert all("seed" in request for request in server.requests), "single ones get a random seed"
    sessions = {(request["prompt"][0], headers["x-session-id"]) for request, headers in _pairs(server)}
    assert len(sessions) == 2, "one session for each group"


def test_a_conversation_s_session_is_sent_and_others_have_none() -> None:
    with CompletionsServer() as server:
        sampler(server).sample_groups([Group(prompt=[1], n=2, session="talk-7"), Group(prompt=[2])], PARAMS)
    assert {headers.get("x-session-id") for headers in server.headers} == {"talk-7", None}


def _pairs(server: CompletionsServer) -> list[tuple[dict[str, Any], dict[str, str]]]:
    return list(zip(server.requests, server.headers, strict=True))


def test_a_server_that_gives_one_choice_for_many_is_asked_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    """B52: n > 1 that does not give n samples."""

    def only_one(request: dict[str, Any]) -> dict[str, Any]:
        return answer(choice(0, (request.get("seed", 0) % 1000,)))

    with caplog.at_level("WARNING", "cwtrain.rollout"), CompletionsServer(rest=only_one) as server:
        one = sampler(server)
        got = one.sample_groups([Group(prompt=[1], n=6)], PARAMS)
        one.sample_groups([Group(prompt=[2], n=3)], PARAMS)
    assert len({sample.token_ids for sample in got[0].samples}) > 1
    assert [request["n"] for request in server.requests] == [6, 5, 1, 1, 1, 1, 1, 1, 1]
    assert sum("asked for by itself" in record.getMessage() for record in caplog.records) == 1


def test_ids_beside_the_answer_are_asked_for_where_choices_have_none() -> None:
    def dynamo(request: dict[str, Any]) -> dict[str, Any]:
        bare = [choice(index, (7, 8), token_ids=None) for index in range(request["n"])]
        if "completion_token_ids" in request.get("nvext", {}).get("extra_fields", ()):
            return answer(*bare, nvext={"completion_token_ids": [41, 42]})
        return answer(*bare)

    with CompletionsServer(rest=dynamo) as server:
        one = sampler(server, concurrency=8)
        for _ in range(2):
            (group,) = one.sample_groups([Group(prompt=[1], n=2)], PARAMS)
            assert [sample.token_ids for sample in group.samples] == [(41, 42)] * 2
    assert [request["n"] for request in server.requests] == [2, 1, 1, 1, 1], "one choice at a time from then on"


def test_what_several_requests_learn_at_once_fails_none_of_them() -> None:
    """Kind of B14: an answer to what was sent before the lesson is no news, and no failure."""

    def all_of_it(request: dict[str, Any]) -> Any:
        if request["logprobs"] == 0:
            return Raw(400, '{"message": "logprobs must be at least 1"}')
        if isinstance(request["prompt"], list):
            return Raw(422, '{"message": "prompt must be a string"}')
        bare = [choice(index, (7, 8), token_ids=None) for index in range(request["n"])]
        if "completion_token_ids" in request.get("nvext", {}).get("extra_fields", ()):
            return answer(*bare, nvext={"completion_token_ids": [41, 42]})
        return answer(*bare)

    groups = [Group(prompt=[1], n=2, text=f"text {number}") for number in range(4)]
    with CompletionsServer(rest=all_of_it, together=4) as server:
        got = sampler(server, concurrency=8, text_fallback=True).sample_groups(groups, PARAMS)
    assert [sample.token_ids for group in got for sample in group.samples] == [(41, 42)] * 8


def test_a_server_that_refuses_text_too_is_a_final_refusal() -> None:
    def refuses(request: dict[str, Any]) -> Raw:
        return Raw(400, '{"message": "this prompt is not allowed"}')

    with CompletionsServer(rest=refuses) as server:
        with pytest.raises(RolloutRequestError, match="not allowed"):
            sampler(server, text_fallback=True).sample_groups([Group(prompt=[1], text="one")], PARAMS)
        assert [request["prompt"] for request in server.requests] == [[1], "one"]
        server.requests.clear()
        with pytest.raises(RolloutRequestError, match="not allowed"):
            sampler(server, text_fallback=True, token_id_prompts=False).sample_groups(
                [Group(prompt=[1], text="one")], PARAMS
            )
        assert len(server.requests) == 1


def streamed(*events: dict[str, Any]) -> Raw:
    lines = "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
    return Raw(200, lines, headers={"Content-Type": "text/event-stream"})


def test_a_stream_whose_ids_and_log_probs_part_is_a_bad_answer() -> None:
    """Equal counts over the whole stream do not say that they line up."""

    def event(ids: tuple[int, ...], values: tuple[float, ...], end: str | None) -> dict[str, Any]:
        return answer(choice(0, ids, finish_reason=end, logprobs={"token_logprobs": list(values)}))

    parted = streamed(event((5, 6), (-1.0,), None), event((7,), (-2.0, -3.0), "stop"))
    whole = streamed(event((5,), (-1.0,), None), event((6, 7), (-2.0, -3.0), "stop"))

    async def one(server: CompletionsServer) -> tuple[Any, int]:
        made = sampler(server)
        async with made.rollout([Group(prompt=[1])], PARAMS, partial=True) as rollout:
            groups = [group async for group in rollout]
        return groups[0].samples[0], made.totals.bad_answers

    with CompletionsServer(parted, rest=whole) as server:
        sample, bad = asyncio.run(one(server))
    assert (sample.token_ids, sample.logprobs, bad) == ((5, 6, 7), (-1.0, -2.0, -3.0), 1)


def test_a_rollout_that_was_left_or_never_entered_has_an_end() -> None:
    async def both(server: CompletionsServer) -> int:
        made = sampler(server)
        with pytest.raises(ConfigError, match="not entered"):
            await anext(made.rollout([Group(prompt=[1])], PARAMS))
        async with made.rollout([Group(prompt=[1])] * 4, PARAMS) as rollout:
            await anext(rollout)
        return len([group async for group in rollout])

    with CompletionsServer() as server:
        assert asyncio.run(asyncio.wait_for(both(server), 30)) <= 3


def test_a_rollout_whose_tasks_somebody_cancels_has_an_end_too() -> None:
    async def cancelled(server: CompletionsServer) -> None:
        me = asyncio.current_task()
        async with sampler(server).rollout([Group(prompt=[1])] * 4, PARAMS) as rollout:
            await asyncio.sleep(0)
            for task in asyncio.all_tasks():
                if task is not me:
                    task.cancel()
            with pytest.raises(RolloutError, match="cancelled from outside"):
                await asyncio.wait_for(anext(rollout), 30)

    with CompletionsServer() as server:
        asyncio.run(cancelled(server))


def test_logprobs_0_that_is_refused_becomes_1() -> None:
    def picky(request: dict[str, Any]) -> Any:
        if request["logprobs"] == 0:
            return Raw(400, '{"message": "logprobs must be at least 1"}')
        return good(request)

    with CompletionsServer(rest=picky) as server:
        one = sampler(server)
        one.sample_groups([Group(prompt=[1])], PARAMS)
        one.sample_groups([Group(prompt=[1])], PARAMS)
    assert [request["logprobs"] for request in server.requests] == [0, 1, 1]


def text_only(request: dict[str, Any]) -> Any:
    if isinstance(request["prompt"], list):
        return Raw(422, '{"message": "prompt must be a string"}')
    return good(request)


def test_token_id_prompts_that_are_refused_become_text_only_where_that_is_allowed() -> None:
    group = Group(prompt=[1, 2], n=2, text="one two")
    with CompletionsServer(rest=text_only) as server:
        with pytest.raises(RolloutRequestError, match="prompt must be a string"):
            sampler(server).sample_groups([group], PARAMS)
        with pytest.raises(RolloutRequestError):
            sampler(server, text_fallback=True).sample_groups([Group(prompt=[1, 2])], PARAMS)
        one = sampler(server, text_fallback=True)
        one.sample_groups([group], PARAMS)
        server.requests.clear()
        one.sample_groups([group], PARAMS)
    assert [request["prompt"] for request in server.requests] == ["one two"]
    assert server.requests[0]["add_special_tokens"] is False
    with CompletionsServer() as server:
        sampler(server, token_id_prompts=False).sample_groups([group], PARAMS)
        assert server.requests[0]["prompt"] == "one two"
        with pytest.raises(ConfigError, match="a group has none"):
            sampler(server, token_id_prompts=False).sample_groups([Group(prompt=[1])], PARAMS)


def test_text_is_tokenised_again_only_where_that_is_asked_for() -> None:
    with CompletionsServer(rest=answer(choice(0, token_ids=None, logprobs=None, text="ab"))) as server:
        with pytest.raises(ConfigError, match="no tokeniser is given"):
            sampler(server, token_ids=False, logprobs=False)
        one = sampler(server, token_ids=False, logprobs=False, tokenise=lambda text: [ord(letter) for letter in text])
        (group,) = one.sample_groups([Group(prompt=[1])], PARAMS)
    assert group.samples[0].token_ids == (97, 98)
    assert group.samples[0].retokenised


def test_routed_experts_are_one_request_for_each_sample() -> None:
    routes = {"data": "AQIDBAUG", "shape": [3, 1, 2], "start": 0, "dtype": "uint8"}

    def routed(request: dict[str, Any]) -> dict[str, Any]:
        return answer(choice(0, (7, 8)), nvext={"routed_experts": routes})

    with CompletionsServer(rest=routed) as server:
        (group,) = sampler(server, routed_experts=True).sample_groups([Group(prompt=[1, 2], n=2)], PARAMS)
    assert [request["n"] for request in server.requests] == [1, 1]
    assert "routed_experts" in server.requests[0]["nvext"]["extra_fields"]
    for sample in group.samples:
        assert sample.routed_experts is not None
        assert sample.routed_experts.array().tolist() == [[[1, 2]], [[3, 4]], [[5, 6]]]


def test_more_fields_of_a_request_go_with_each_sample() -> None:
    with CompletionsServer() as server:
        images = {"multi_modal_data": {"image": ["data:,"]}}
        sampler(server).sample_groups([Group(prompt=[1], n=2, extra=images)], PARAMS)
    assert [(request["n"], request["multi_modal_data"]) for request in server.requests] == [
        (1, {"image": ["data:,"]})
    ] * 2


def test_the_queue_time_is_asked_for_only_where_the_window_follows_it() -> None:
    with CompletionsServer() as server:
        sampler(server).sample_groups([Group(prompt=[1], n=2)], PARAMS)
        sampler(server, concurrency=8).sample_groups([Group(prompt=[1], n=2)], PARAMS)
    assert server.requests[0]["nvext"] == {"extra_fields": ["timing"]}
    assert "nvext" not in server.requests[1]


def test_a_retry_after_may_be_a_date() -> None:
    import datetime as dt
    import email.utils

    from cwtrain_rollout._http import retry_after

    later = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=60)
    seconds = retry_after(email.utils.format_datetime(later, usegmt=True))
    assert seconds is not None
    assert 50 < seconds <= 60
    assert retry_after("Mon, 01 Jan 2024 00:00:00 GMT") == 0.0
    assert [retry_after(value) for value in ("soon", "nan", "-1", "inf", None)] == [None] * 5
    assert retry_after("2.5") == 2.5


def test_loops_that_end_and_samplers_that_are_left_give_no_warning() -> None:
    """B09: collected after its loops closed, or while one runs; warnings are errors here."""

    async def left_behind(server: CompletionsServer) -> None:
        for _ in range(3):
            await sampler(server).sample([Group(prompt=[1])] * 4, PARAMS)
            gc.collect()
            await asyncio.sleep(0)

    with CompletionsServer() as server:
        one = sampler(server)
        for _ in range(3):
            asyncio.run(one.sample([Group(prompt=[1])] * 4, PARAMS))
        loop = asyncio.new_event_loop()
        loop.run_until_complete(one.sample([Group(prompt=[1])] * 4, PARAMS))
        loop.run_until_complete(one.aclose())
        loop.close()
        del one, loop
        gc.collect()
        asyncio.run(left_behind(server))
        gc.collect()


def test_connections_are_kept_between_calls_in_one_loop() -> None:
    async def scenario(one: Sampler) -> None:
        async with one:
            for _ in range(5):
                await one.sample([Group(prompt=[1])], PARAMS)

    with CompletionsServer() as server:
        asyncio.run(scenario(sampler(server)))
        assert server.connections == 1


def test_what_was_recorded_can_be_replayed(tmp_path: Path) -> None:
    file = tmp_path / "rollouts.jsonl"
    groups = [Group(prompt=[1], n=2), Group(prompt=[2])]
    echo = Raw(500, f"your key is {KEY}")
    with CompletionsServer(echo, Raw(drop=True), Raw(drop=True)) as server:
        one = sampler(server, record=str(file), api_key=KEY, concurrency=2)
        first = one.sample_groups(groups, PARAMS)
        url = server.url
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 4
    assert KEY not in file.read_text()
    assert {line["status"] for line in lines} == {500, None, 200}
    again = Sampler(
        RolloutConfig(base_url=url, model="policy"), transport=Replay(file), sleep=no_pause, plugins=Plugins()
    )
    replayed = again.sample_groups(groups, PARAMS)
    assert [[sample.token_ids for sample in group.samples] for group in replayed] == [
        [sample.token_ids for sample in group.samples] for group in first
    ]
    with pytest.raises(ConfigError, match="holds no \\(further\\) answer"):
        again.sample_groups(groups, PARAMS)
    with pytest.raises(ConfigError, match="cannot be written"):
        sampler(server, record=str(tmp_path / "no" / "such" / "folder"))


def test_the_limit_of_open_files_is_raised_for_the_window_and_never_lowered() -> None:
    """B08: no hidden limit of the process either."""
    import resource

    from cwtrain_rollout._http import _make_room_for

    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, before[1]))
        _make_room_for(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 512
        _make_room_for(500)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 756
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
