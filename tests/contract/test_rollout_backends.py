"""Backends and `cwtrain rollout` against the emulator: a deployment's id is enough."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cwtrain.errors import ConfigError
from cwtrain.hotload import status
from cwtrain.infra import InferenceClient, s3_client
from cwtrain.plugins import get_plugins
from cwtrain.storage import Location, S3Store
from cwtrain_rollout import Group, Sampler, SamplingParams, StaleWeightsError
from helpers.run_cli import run
from helpers.served_policy import Served, serve

MODE = {"logprobs-mode": "processed_logprobs", "max-model-len": "48"}


@pytest.fixture(scope="module")
def served(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("backends"), MODE)


@pytest.fixture
def deployment(served: Served, emulator: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in emulator.env.items():
        monkeypatch.setenv(name, value)
    return served.deployment_id


def test_a_deployment_s_id_finds_everything(served: Served, deployment: str) -> None:
    sampler = get_plugins().rollout_backend("dedicated").create(deployment=deployment, poll=0.05)
    assert isinstance(sampler, Sampler)
    config = sampler.config
    assert (config.base_url, config.model) == (served.config.base_url, served.config.model)
    assert (config.replicas, config.logprobs_mode, config.context_length) == (2, "processed", 48)
    assert config.deployment_id == deployment
    assert sampler.window == 16
    groups = [Group(prompt=[1, 2], n=4)] * 3
    for group in sampler.sample_groups(groups, SamplingParams(max_tokens=3, temperature=0.5)):
        for sample in group.samples:
            assert sample.weights is not None
            assert sample.weights.exact
            assert sample.weights.oldest is not None
            assert sample.weights.oldest.id == served.hot_load_id


def test_the_environment_wins_over_the_deployment(
    served: Served, deployment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CWTRAIN_ROLLOUT_BASE_URL", "http://frontend.cluster:8000")
    monkeypatch.setenv("CWTRAIN_HOTLOAD_DEPLOYMENT_ID", deployment)
    monkeypatch.setenv("CWTRAIN_ROLLOUT_API_KEY", "another")
    config = get_plugins().rollout_backend("dedicated").create().config
    assert (config.base_url, config.api_key) == ("http://frontend.cluster:8000/v1", "another")
    monkeypatch.delenv("CWTRAIN_HOTLOAD_DEPLOYMENT_ID")
    with pytest.raises(ConfigError, match="needs a deployment's id"):
        get_plugins().rollout_backend("dedicated").create()


def test_a_base_under_way_is_read_from_the_bucket(served: Served, emulator: Any, deployment: str) -> None:
    with InferenceClient(emulator.viewer_token, base_url=emulator.base_url) as client:
        target = client.get_deployment(deployment).hot_load
        assert target is not None
        store, location = S3Store(s3_client(), target.bucket), Location(target.bucket, target.path_prefix)
        told = status.BaselineStatus(
            deployment_id=deployment,
            run_id="run",
            identity="run-v000000",
            state=status.BaselineState.FAILED,
            error="the disk is full",
        )
        status.write_status(store, location, told)
        sampler = get_plugins().rollout_backend("dedicated").create(deployment=deployment, poll=0.05)
        with pytest.raises(StaleWeightsError, match="'run-v000000' of the run was not published: the disk is full"):
            sampler.sample_groups([Group(prompt=[1])], SamplingParams(max_tokens=1))
        status.write_status(
            store,
            location,
            status.BaselineStatus(
                deployment_id=deployment,
                run_id="run",
                identity="run-v000000",
                state=status.BaselineState.SERVED,
            ),
        )
        assert sampler.sample_groups([Group(prompt=[1])], SamplingParams(max_tokens=1))


def test_samples_on_the_command_line(served: Served, deployment: str) -> None:
    done = run("rollout", "sample", "--deployment", deployment, "--prompt", "$%", "-n", "2", "--max-tokens", "4")
    assert done.code == 0, done.err
    rows = done.data
    assert [row["index"] for row in rows] == [0, 1]
    assert all(len(row["token_ids"]) == len(row["logprobs"]) > 0 for row in rows)
    assert rows[0]["versions"] == ["base-0"]
    done = run(
        "rollout", "sample", "--endpoint", served.config.base_url, "--model", served.config.model,
        "--prompt-ids", "1,2,3", "--seed", "5",
        env={"CWTRAIN_ROLLOUT_API_KEY": served.config.api_key},
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.data[0]["prompt"] == [1, 2, 3]
    for wrong in (["--prompt-ids", "1,x"], [], ["--prompt", "a", "--prompt-ids", "1"]):
        assert run("rollout", "sample", "--deployment", deployment, *wrong).code == 2
    refused = run("rollout", "sample", "--deployment", deployment, "--prompt", "a", "--backend", "unheard-of")
    assert refused.code == 1
    assert "dedicated, openai, serverless" in refused.err


def test_a_measurement_on_the_command_line(deployment: str) -> None:
    done = run("rollout", "bench", "--deployment", deployment, "--seconds", "1", "-n", "4", "--max-tokens", "4")
    assert done.code == 0, done.err
    found = done.data
    assert found["groups"] > 0
    assert found["tokens_per_second"] > 0
    assert found["latency_seconds"]["p50"] <= found["latency_seconds"]["p99"]
    assert found["window"][0]["window"] == 16
    assert found["totals"]["bad_answers"] == 0
    assert found["interrupted"] is False
