from __future__ import annotations

import asyncio
import gc
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import ConfigError, IntegrationError
from cwtrain.plugins import get_plugins
from cwtrain_rollout import (
    Group,
    RolloutAnswerError,
    RolloutConfig,
    RolloutError,
    RolloutExhaustedError,
    RolloutRequestError,
    Sampler,
    SampleStatus,
    SamplingParams,
)
from helpers.completions_server import CompletionsServer, Raw, answer, choice, good

KEY = "sk-very-secret-0123456789"
PARAMS = SamplingParams(max_tokens=4)


class Sleeps(list[float]):
    """Pauses that take no time, and the clock that they move."""

    now = 1000.0

    async def __call__(self, seconds: float) -> None:
        self.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)

    def clock(self) -> float:
        return self.now


def sampler(server: CompletionsServer, sleeps: Sleeps | None = None, **settings: Any) -> Sampler:
    config = RolloutConfig(base_url=server.url, model="policy", **settings)
    sleeps = Sleeps() if sleeps is None else sleeps
    return Sampler(config, rng=random.Random(1), sleep=sleeps, clock=sleeps.clock)


def tokens(groups: list[Any]) -> list[list[tuple[int, ...]]]:
    return [[sample.token_ids for sample in group.samples] for group in groups]


def test_one_request_for_each_group_with_every_neutral_value_sent() -> None:
    with CompletionsServer() as server:
        got = sampler(server, api_key=KEY).sample_groups(
            [Group(prompt=[1, 2, 3], n=4, seed=7)], SamplingParams(max_tokens=9, stop_token_ids=[2]), cache_salt="hl-1"
        )
    (request,) = server.requests
    assert request == {
        "model": "policy",
        "prompt": [1, 2, 3],
        "n": 4,
        "max_tokens": 9,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "logprobs": 0,
        "return_tokens_as_token_ids": True,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "stream": False,
        "stop_token_ids": [2],
        "seed": 7,
        "nvext": {"cache_salt": "hl-1", "extra_fields": ["timing"]},
        "cache_salt": "hl-1",
    }
    assert server.headers[0]["authorization"] == f"Bearer {KEY}"
    (group,) = got
    assert [sample.index for sample in group.samples] == [0, 1, 2, 3]
    assert tokens(got) == [[(107, 0), (107, 1), (107, 2), (107, 3)]]
    first = group.samples[0]
    assert first.logprobs == (-0.5, -0.5)
    assert first.status is SampleStatus.COMPLETED
    assert first.request_id == server.headers[0]["x-request-id"]


def test_groups_go_unseeded_and_single_samples_get_a_random_seed() -> None:
    with CompletionsServer() as server:
        sampler(server).sample_groups([Group(prompt=[1], n=2)], PARAMS)
        sampler(server).sample_groups([Group(prompt=[1])], PARAMS)
        sampler(server, seeds=False).sample_groups([Group(prompt=[1])], PARAMS)
    assert "seed" not in server.requests[0]
    assert 0 <= server.requests[1]["seed"] < 2**62
    assert "seed" not in server.requests[2]


def test_results_have_the_order_of_the_groups_whatever_finishes_first() -> None:
    first_may_go = threading.Event()

    def slow_first(request: dict[str, Any]) -> dict[str, Any]:
        if request["prompt"] == [0]:
            assert first_may_go.wait(20)
        else:
            first_may_go.set()
        return good(request)

    with CompletionsServer(rest=slow_first) as server:
        got = sampler(server).sample_groups([Group(prompt=[i], n=1, seed=i) for i in range(6)], PARAMS)
    assert tokens(got) == [[(100 + i, 0)] for i in range(6)]
    assert [group.group.prompt for group in got] == [(i,) for i in range(6)]


def test_no_groups_is_no_request() -> None:
    with CompletionsServer() as server:
        assert sampler(server).sample_groups([], SamplingParams(max_tokens=1, temperature=0.5)) == []
    assert server.requests == []


def test_only_missing_and_unusable_choices_are_asked_for_again() -> None:
    """B24, B52: log-probs missing in one choice, another choice missing."""
    partial = answer(choice(0, (1,)), choice(2, (3,)), choice(3, (9,), logprobs=None))
    with CompletionsServer(partial, answer(choice(1, (4,)), choice(0, (2,)))) as server:
        one = sampler(server)
        got = one.sample_groups([Group(prompt=[5], n=4, seed=100)], PARAMS)
    assert [request["n"] for request in server.requests] == [4, 2]
    # what is asked for again draws from other seeds than those that were used
    assert [request["seed"] for request in server.requests] == [100, 104]
    assert tokens(got) == [[(1,), (2,), (3,), (4,)]]
    assert (one.totals.bad_answers, one.totals.retries, one.totals.samples) == (1, 1, 4)
    assert one.totals.completion_tokens == 4


@pytest.mark.parametrize(
    "bad",
    [
        pytest.param(answer(choice(0), choice(0)), id="index twice"),
        pytest.param(answer(choice(0, logprobs=None), choice(1, logprobs=None)), id="no log-probs"),
        pytest.param(Raw(200, "<html>proxy</html>", headers={"Content-Type": "text/html"}), id="html"),
        pytest.param(Raw(200, '{"choices": [{"index": 0, "logprobs": {"token_logprobs": [NaN]}}]}'), id="nan"),
        pytest.param(Raw(200, '{"error": {"message": "engine died"}}'), id="error with 200"),
        pytest.param(Raw(200, ""), id="empty"),
        pytest.param(Raw(200, '{"choices": ['), id="half json"),
        pytest.param(Raw(200, "x" * 4000, cut=True), id="cut"),
        pytest.param(Raw(500, "Internal Server Error"), id="500"),
        pytest.param(Raw(502, "<html>bad gateway</html>"), id="502"),
    ],
)
def test_bad_answers_cost_an_attempt_each_and_are_bounded(bad: Any) -> None:
    """B24, B51, B52 among them."""
    with CompletionsServer(bad) as server:
        one = sampler(server, max_attempts=2)
        got = one.sample_groups([Group(prompt=[1], n=2, seed=0)], PARAMS)
    assert tokens(got) == [[(100, 0), (100, 1)]]
    assert one.totals.bad_answers == 1

    with CompletionsServer(rest=bad) as server:
        with pytest.raises(RolloutExhaustedError, match="3 of 3 attempts") as caught:
            sampler(server, max_attempts=3).sample_groups([Group(prompt=[1], n=2, seed=0)], PARAMS)
        assert len(server.requests) == 3
    assert caught.value.bad_answers == 3
    assert caught.value.hint
    assert caught.value.request_id


def test_a_connection_that_dies_without_an_answer_costs_time_only() -> None:
    """B14: read, and closed without an answer, as an idle connection is."""
    with CompletionsServer(*[Raw(drop=True)] * 5) as server:
        one = sampler(server, max_attempts=1)
        got = one.sample_groups([Group(prompt=[1], n=1, seed=0)], PARAMS)
    assert tokens(got) == [[(100, 0)]]
    # A connection that dies as it is used is tried again at once, another one after a pause.
    assert (one.totals.transport_errors, one.totals.bad_answers) == (2, 0)
    assert len({headers["x-request-id"] for headers in server.headers}) == 1


@pytest.mark.parametrize("status", [408, 425, 429, 503])
def test_refusals_cost_time_only_and_retry_after_is_a_floor(status: int) -> None:
    """B35."""
    sleeps = Sleeps()
    script = [Raw(status, "busy", headers={"Retry-After": "20"}), Raw(status, "busy", headers={"Retry-After": "soon"})]
    with CompletionsServer(*script) as server:
        one = sampler(server, sleeps, max_attempts=1)
        one.sample_groups([Group(prompt=[1], n=3)], PARAMS)
    assert one.totals.refusals == 2
    assert sleeps[0] == 20.0
    assert 0 < sleeps[1] <= 10.0
    assert [request["n"] for request in server.requests] == [3, 3, 3]  # a refusal never changes how prompts are sent


def test_a_retry_after_beyond_the_deadline_fails_at_once_with_the_number() -> None:
    sleeps = Sleeps()
    with CompletionsServer(rest=Raw(429, "quota", headers={"Retry-After": "86400"})) as server:
        with pytest.raises(RolloutExhaustedError, match="86400"):
            sampler(server, sleeps).sample_groups([Group(prompt=[1])], PARAMS)
        assert len(server.requests) == 1
    assert sleeps == []


def test_nobody_there_fails_within_the_deadline() -> None:
    with CompletionsServer() as server:
        url = server.url
    config = RolloutConfig(base_url=url, model="m", deadline=0.05)
    with pytest.raises(RolloutExhaustedError, match="connection failed"):
        Sampler(config).sample_groups([Group(prompt=[1])], PARAMS)


@pytest.mark.parametrize("status", [301, 400, 401, 403, 404, 422, 501])
def test_final_refusals_are_raised_at_once(status: int) -> None:
    with CompletionsServer(rest=Raw(status, f"no: {KEY}", headers={"Location": "http://127.0.0.1:1/"})) as server:
        with pytest.raises(RolloutRequestError, match=f"HTTP {status}: no: \\*\\*\\*") as caught:
            sampler(server, api_key=KEY).sample_groups([Group(prompt=[1], n=2)], PARAMS)
        assert len(server.requests) == 1
    assert caught.value.status == status
    assert caught.value.answer == "no: ***"
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.status, str(again)) == (status, str(caught.value))


def test_an_answer_that_will_not_change_is_raised_at_once() -> None:
    with CompletionsServer(rest=answer(choice(0, token_ids=None))) as server:
        with pytest.raises(RolloutAnswerError, match="no token ids"):
            sampler(server).sample_groups([Group(prompt=[1])], PARAMS)
        assert len(server.requests) == 2
        assert "completion_token_ids" in server.requests[1]["nvext"]["extra_fields"], "the other way was tried"
    with (
        CompletionsServer(rest=answer(choice(0), prompt_tokens=2)) as server,
        pytest.raises(RolloutAnswerError, match="2 prompt tokens where 1 were sent"),
    ):
        sampler(server).sample_groups([Group(prompt=[1])], PARAMS)


def test_errors_and_reprs_never_hold_the_key() -> None:
    echo = Raw(200, f'{{"error": "your key is {KEY}"}}')
    with CompletionsServer(rest=echo) as server:
        one = sampler(server, api_key=KEY, max_attempts=2)
        with pytest.raises(RolloutError) as caught:
            one.sample_groups([Group(prompt=[1])], PARAMS)
    error: BaseException | None = caught.value
    while error is not None:
        assert KEY not in f"{error!r} {error} {vars(error)}"
        error = error.__cause__ or error.__context__
    assert KEY not in repr(one)
    assert isinstance(caught.value, IntegrationError)


def test_the_first_failure_cancels_the_rest_and_nothing_runs_on() -> None:
    never = threading.Event()

    def one_fails(request: dict[str, Any]) -> Any:
        if request["prompt"] == [3]:
            return Raw(400, "prompt 3 is refused")
        never.wait(20)
        return good(request)

    async def scenario() -> None:
        with pytest.raises(RolloutRequestError, match="prompt 3 is refused"):
            await one.sample([Group(prompt=[i]) for i in range(6)], PARAMS)
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    with CompletionsServer(rest=one_fails) as server:
        one = sampler(server)
        asyncio.run(scenario())
        never.set()


def test_the_window_counts_choices_and_is_the_only_limit() -> None:
    """B08: no pool caps what the window lets through."""
    # all 120 must be in flight at once, or the barrier never opens
    with CompletionsServer(together=120) as server:
        sampler(server, concurrency=120).sample_groups([Group(prompt=[1])] * 120, PARAMS)
        assert server.peak == 120
    with CompletionsServer() as server:
        sampler(server, concurrency=4).sample_groups([Group(prompt=[1], n=2)] * 12, PARAMS)
        assert server.peak <= 2
    with CompletionsServer() as server:  # larger than the window: it goes alone
        sampler(server, concurrency=4).sample_groups([Group(prompt=[1], n=16)] * 3, PARAMS)
        assert server.peak == 1


def test_one_sampler_serves_several_event_loops_and_threads() -> None:
    """B09."""
    groups = [Group(prompt=[1], n=2)] * 6
    with CompletionsServer() as server:
        one = sampler(server, concurrency=4)
        asyncio.run(one.sample(groups, PARAMS))
        asyncio.run(one.sample(groups, PARAMS))
        failures: list[BaseException] = []

        def use(shared: Sampler) -> None:
            try:
                shared.sample_groups(groups, PARAMS)
            except BaseException as exc:
                failures.append(exc)

        threads = [threading.Thread(target=use, args=(one,)) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert failures == []
        again: Sampler = pickle.loads(pickle.dumps(Sampler(one.config)))
        assert len(again.sample_groups(groups, PARAMS)) == 6
        del one, again, threads
        gc.collect()  # warnings are errors: no session may be left open


def test_the_facade_says_what_to_do_inside_a_loop() -> None:
    async def scenario(one: Sampler) -> None:
        with pytest.raises(ConfigError, match="running event loop") as caught:
            one.sample_groups([], PARAMS)
        assert "await" in (caught.value.hint or "")

    with CompletionsServer() as server:
        asyncio.run(scenario(sampler(server)))


def test_oddities_are_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    floor = {"token_logprobs": [-9999.0]}
    odd = answer(choice(0, (5,), logprobs=floor), choice(1, (5,), logprobs=floor), choice(2, (5,)))
    with caplog.at_level("WARNING", "cwtrain.rollout"), CompletionsServer(rest=odd) as server:
        one = sampler(server)
        for _ in range(2):
            one.sample_groups([Group(prompt=[1], n=2, seed=3)], PARAMS)
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert any("1 choices more" in text for text in texts)
    assert any("-9999" in text for text in texts)
    assert any("equal" in text for text in texts)
    assert one.totals.floor_logprobs == 4


def test_a_rotated_key_is_used(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("first")
    with CompletionsServer() as server:
        one = sampler(server, api_key_file=str(file))
        one.sample_groups([Group(prompt=[1])], PARAMS)
        file.write_text("second")
        one.sample_groups([Group(prompt=[1])], PARAMS)
    assert [headers["authorization"] for headers in server.headers] == ["Bearer first", "Bearer second"]


def test_proxies_of_the_environment_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """B10."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with CompletionsServer() as server:
        sampler(server).sample_groups([Group(prompt=[1])], PARAMS)
        with pytest.raises(RolloutExhaustedError):
            sampler(server, trust_env=True, deadline=0.01).sample_groups([Group(prompt=[1])], PARAMS)


def _probe(logprob: float) -> Any:
    def respond(request: dict[str, Any]) -> dict[str, Any]:
        if request["top_k"] == 1:
            return answer(choice(0, (5,), logprobs={"token_logprobs": [logprob]}))
        return good(request)

    return respond


def test_filtered_sampling_needs_processed_log_probs_and_one_probe_tells() -> None:
    warm = SamplingParams(max_tokens=4, temperature=0.7)
    with CompletionsServer(rest=_probe(0.0)) as server:
        one = sampler(server)
        one.sample_groups([Group(prompt=[1], n=2)], warm)
        one.sample_groups([Group(prompt=[1], n=2)], warm)
    assert [(request["n"], request["max_tokens"], request["top_k"]) for request in server.requests] == [
        (1, 1, 1),
        (2, 4, -1),
        (2, 4, -1),
    ]
    assert server.requests[0]["temperature"] == 1.0

    with CompletionsServer(rest=_probe(-1.25)) as server:
        one = sampler(server)
        for _ in range(2):
            with pytest.raises(RolloutAnswerError, match="raw log-probs") as caught:
                one.sample_groups([Group(prompt=[1])], warm)
        assert "logprobs-mode: processed_logprobs" in (caught.value.hint or "")
        assert len(server.requests) == 1
        one.sample_groups([Group(prompt=[1])], PARAMS)  # neutral sampling takes either
        one.sample_groups([Group(prompt=[1])], SamplingParams(max_tokens=1, temperature=0.0))
        sampler(server, logprobs=False).sample_groups([Group(prompt=[1])], warm)


def test_the_mode_may_be_told_instead_of_probed() -> None:
    warm = SamplingParams(max_tokens=4, top_p=0.9)
    with CompletionsServer() as server:
        sampler(server, logprobs_mode="processed").sample_groups([Group(prompt=[1])], warm)
        with pytest.raises(RolloutAnswerError, match="raw"):
            sampler(server, logprobs_mode="raw").sample_groups([Group(prompt=[1])], warm)
        assert len(server.requests) == 1


def test_what_cannot_be_asked_for_is_refused_before_sending() -> None:
    with pytest.raises(ConfigError) as caught:
        SamplingParams(max_tokens=0, temperature=float("nan"), top_p=0.0, top_k=0, min_p=2.0, stop=list("abcde"))
    assert len(caught.value.problems) == 6
    with pytest.raises(ConfigError) as caught:
        Group(prompt=[], n=0, seed=-1)
    assert len(caught.value.problems) == 3
    with pytest.raises(ConfigError):
        Group(prompt=[1, -1])
    with CompletionsServer() as server:
        for salt in ("", "a/b", "a@b", "x" * 129):
            with pytest.raises(ConfigError, match="cache salt"):
                sampler(server).sample_groups([Group(prompt=[1])], PARAMS, cache_salt=salt)
    assert server.requests == []


def test_the_plugin_offers_it_as_the_openai_backend() -> None:
    factory = get_plugins().rollout_backend("openai")
    assert (factory.name, factory.distribution) == ("openai", "cwtrain-rollout")
    assert isinstance(factory.create(base_url="http://h", model="m"), Sampler)
