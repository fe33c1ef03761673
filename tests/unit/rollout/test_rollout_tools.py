"""The drift alarm, evaluation, chat completions, and warm-up."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
import signal
from typing import Any

import pytest

from cwtrain.errors import ConfigError
from cwtrain.plugins import Plugins, get_plugins
from cwtrain_rollout import (
    Drift,
    Group,
    RolloutConfig,
    RolloutError,
    RolloutRequestError,
    Sample,
    Sampler,
    SampleStatus,
    SamplingParams,
    evaluate,
    evaluate_async,
)
from cwtrain_rollout.bench import Bench
from cwtrain_rollout.chat import ChatSampler
from helpers.completions_server import CompletionsServer, Raw, good
from helpers.endpoint_model import EndpointModel
from helpers.run_cli import run, start


def made(*logprobs: float) -> Sample:
    ids = tuple(range(len(logprobs)))
    return Sample(index=0, token_ids=ids, logprobs=logprobs, status=SampleStatus.COMPLETED, finish_reason="stop")


def test_drift_is_a_metric_with_a_threshold(caplog: pytest.LogCaptureFixture) -> None:
    drift = Drift(mean_threshold=0.1, max_threshold=1.0)
    with caplog.at_level(logging.WARNING, "cwtrain.rollout"):
        assert drift.update([made(-1.0, -2.0)], [[-1.0, -2.02]]) == {
            "rollout/logprob_drift_mean": pytest.approx(0.01),
            "rollout/logprob_drift_max": pytest.approx(0.02),
        }
        assert caplog.records == []
        drift.update([made(-1.0)], [[-1.5]])
    (record,) = caplog.records
    assert "KV of older weights" in record.getMessage()
    assert (drift.alarms, drift.tokens) == (1, 3)
    assert drift.mean == pytest.approx(0.52 / 3)
    with pytest.raises(ConfigError, match="has 1 log-probs, and the trainer gave 2"):
        drift.update([made(-1.0)], [[-1.0, -2.0]])
    with pytest.raises(ConfigError, match="1 samples, and the trainer gave log-probs of 2"):
        drift.update([made(-1.0)], [[-1.0], [-2.0]])
    assert Drift().mean == 0.0


def test_a_trainer_whose_log_probs_are_no_numbers_is_an_alarm() -> None:
    drift = Drift()
    drift.update([made(-1.0, -2.0)], [[-1.0, float("nan")]])
    assert drift.alarms == 1


def test_evaluation_samples_scores_and_says_how_it_went() -> None:
    async def later(group: Group, sample: Sample) -> float:
        await asyncio.sleep(0)
        return float(sample.index)

    with CompletionsServer() as server:
        config = RolloutConfig(base_url=server.url, model="m")
        one = Sampler(config, plugins=Plugins())
        found = evaluate([[1], Group(prompt=[2], n=3)], later, sampler=one, n=2)
        assert server.requests[0]["temperature"] == 0.0
        assert server.requests[0]["max_tokens"] == 1024
        assert found.scores == ((0.0, 1.0), (0.0, 1.0, 2.0))
        assert (found.mean, found.best_of_n, found.truncated, found.versions) == (0.8, 1.5, 0.0, ())
        assert found.as_json()["samples"] == 5

        async def inside() -> Any:
            with pytest.raises(ConfigError, match="running event loop"):
                evaluate([[1]], later, sampler=one)
            return await evaluate_async([[1]], lambda group, sample: 2, sampler=one)

        assert asyncio.run(inside()).mean == 2.0


def test_an_evaluation_says_what_was_dropped_and_is_no_mean_over_all(caplog: pytest.LogCaptureFixture) -> None:
    """A mean over the prompts that happened to be answered was told as the mean over all."""

    def refuses(*prompts: int) -> Any:
        def reply(request: Any) -> Any:
            return Raw(400, "no") if request["prompt"][0] in prompts else good(request)

        return reply

    def score(group: Group, sample: Sample) -> float:
        return float(group.prompt[0])

    with CompletionsServer(rest=refuses(2)) as server:
        one = Sampler(RolloutConfig(base_url=server.url, model="m", on_failure="drop"), plugins=Plugins())
        with caplog.at_level(logging.WARNING, "cwtrain.rollout"):
            found = evaluate([[1], [2], Group(prompt=[2], n=3), [3]], score, sampler=one, n=2)
        assert found.scores == ((1.0, 1.0), (3.0, 3.0))
        assert [(group.prompt, group.n) for group in found.dropped] == [((2,), 2), ((2,), 3)]
        told = found.as_json()
        assert (told["mean"], told["groups"], told["samples"]) == (2.0, 2, 4)
        assert (told["dropped_groups"], told["dropped_samples"]) == (2, 5)
        assert "over 2 of 4 groups: 2 failed and were dropped" in caplog.text
        server.rest = refuses(1)
        nothing = evaluate([[1]], score, sampler=one)
        assert math.isnan(nothing.mean)
        assert json.loads(json.dumps(nothing.as_json(), allow_nan=False))["mean"] is None
        caplog.clear()
        assert evaluate([[3]], score, sampler=one).as_json()["dropped_groups"] == 0
        assert "dropped" not in caplog.text


def test_warming_up_raises_nothing() -> None:
    async def scenario() -> EndpointModel:
        endpoint = EndpointModel(service=0.0)
        config = RolloutConfig(base_url="http://endpoint", model="m", replicas=3)
        await Sampler(config, transport=endpoint, plugins=Plugins()).warm_up()
        broken = EndpointModel(outage=(0.0, 1e18))
        config = RolloutConfig(base_url="http://endpoint", model="m", deadline=0.01)
        await Sampler(config, transport=broken, plugins=Plugins()).warm_up(requests=2)
        return endpoint

    endpoint = asyncio.run(scenario())
    assert [body["max_tokens"] for body in endpoint.bodies] == [1, 1, 1]


def chat_answer(request: dict[str, Any]) -> dict[str, Any]:
    said = request["messages"][-1]["content"]
    return {"choices": [{"index": 0, "message": {"role": "assistant", "content": said[::-1]}, "finish_reason": "stop"}]}


def test_chat_completions_are_for_looking_and_scoring_never_for_training() -> None:
    from cwtrain_rollout.transport import Reply

    class Script(EndpointModel):
        script: list[Any]

        async def post(self, body: bytes, headers: Any) -> Any:
            import json

            self.bodies.append(json.loads(body))
            if self.script:
                return self.script.pop(0)
            return Reply(status=200, body=json.dumps(chat_answer(self.bodies[-1])).encode())

    endpoint = Script()
    endpoint.script = [
        Reply(status=429, body=b"busy"),
        Reply(status=200, body=b"<html>"),
        Reply(status=200, body=b'{"choices": []}'),
    ]

    async def no_pause(seconds: float) -> None:
        await asyncio.sleep(0)

    settings = {"model": "wandb-artifact:///team/project/name:step5", "api_key": "k"}
    made = get_plugins().rollout_backend("serverless").create(**settings)
    assert isinstance(made, ChatSampler)
    assert made.config.base_url.endswith("/api/training/v1")
    one = ChatSampler(made.config, transport=endpoint, sleep=no_pause)

    async def scenario() -> tuple[Any, float]:
        answers = await one.chat([[{"role": "user", "content": "ab"}], [{"role": "user", "content": "cd"}]], n=2)
        score = await one.evaluate([[{"role": "user", "content": "abc"}]], lambda talk, answer: len(answer.text))
        return answers, score

    answers, score = asyncio.run(scenario())
    assert [[answer.text for answer in group] for group in answers] == [["ba", "ba"], ["dc", "dc"]]
    assert score == 3.0
    with pytest.raises(RolloutError, match="publishes no /completions"):
        one.sample_groups([Group(prompt=[1])], SamplingParams(max_tokens=1))
    with pytest.raises(RolloutError, match="publishes no /completions"):
        asyncio.run(one.sample([Group(prompt=[1])], SamplingParams(max_tokens=1)))
    endpoint.script = [Reply(status=401, body=b"no key")]
    with pytest.raises(RolloutRequestError, match="HTTP 401"):
        asyncio.run(one.chat([[{"role": "user", "content": "ab"}]]))
    with pytest.raises(ConfigError, match="is no name of one"):
        get_plugins().rollout_backend("serverless").create(model="llama")


@pytest.mark.parametrize("option", [("--seed", "3"), ("--top-k", "4")])
def test_what_chat_completions_cannot_do_is_refused_and_not_left_out(option: tuple[str, str]) -> None:
    where = ("--backend", "serverless", "--model", "wandb-artifact:///a/b/c:v1", "--endpoint", "http://127.0.0.1:9")
    refused = run("rollout", "sample", *where, "--prompt", "hi", *option)
    assert (refused.code, option[0] in refused.err) == (2, True)


@pytest.mark.parametrize(
    ("number", "code", "word"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_a_measurement_that_is_interrupted_says_what_it_has(number: signal.Signals, code: int, word: str) -> None:
    with CompletionsServer() as server:
        where = ("--endpoint", server.url, "--model", "m", "--concurrency", "2", "-n", "1")
        # Python takes SIGINT where a shell's background job ignores it: the tests may be one.
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            process = start("rollout", "bench", *where, "--seconds", "50")
        finally:
            signal.signal(signal.SIGINT, before)
        assert process.stderr is not None
        for line in process.stderr:
            if re.search(r"[1-9][0-9]* groups done", line):
                break
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
    assert (process.returncode, "Traceback" in err, word in err) == (code, False, True)
    found = json.loads(out)
    assert found["interrupted"] is True
    assert 0 < found["groups"] <= found["totals"]["samples"]
    assert 0 < found["seconds"] < 50
    assert found["groups_per_second"] > 0
    assert found["latency_seconds"]["p50"] > 0


def test_a_measurement_that_is_interrupted_before_an_answer_has_no_latencies() -> None:
    async def scenario() -> Any:
        endpoint = EndpointModel(service=1e9)
        sampler = Sampler(RolloutConfig(base_url="http://endpoint", model="m"), transport=endpoint, plugins=Plugins())
        load = Bench(sampler, [(1,)], n=2, seconds=1e9, sampling=SamplingParams(max_tokens=1))
        assert load.result() is None
        task = asyncio.create_task(load.run())
        while not endpoint.bodies:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return load.result()

    found = asyncio.run(scenario())
    assert (found["interrupted"], found["groups"], found["latency_seconds"]["max"]) == (True, 0, None)
    assert found["totals"]["samples"] == 0
