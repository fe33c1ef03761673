"""Weight versions under hot-loads: three client processes sample while versions come and go, and every stamp is checked
against what the emulator says computed each token, and against the weights themselves.

PRESERVE, prefix cache on, no identity in the answers, replicas that swap at different moments, with and without waiting
for a hot-load before the next is asked for, and a rollback. Without salts the same checks find stale KV.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from cwtrain.infra import InferenceClient
from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.engine.model_io import make_model
from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams, StaleWeightsError, evaluate
from helpers import numpy_model
from helpers.conformance import bucket_of, put_snapshot
from helpers.emulator_api import Api

CONTEXT = 3
CLIENT = Path(__file__).parents[1] / "helpers" / "rollout_client.py"
VERSIONS = 5


@attrs.frozen(kw_only=True)
class World:
    """An emulator whose replicas swap a quarter of a second apart, and snapshots that are ready to be loaded."""

    emulator: Emulator
    api: Api
    deployment: dict[str, Any]
    tensors: dict[str, dict[str, Any]]

    @property
    def id(self) -> str:
        return str(self.deployment["spec"]["id"])

    @property
    def url(self) -> str:
        return f"{self.emulator.gateway_url}/v1"

    @property
    def model(self) -> str:
        return str(self.deployment["spec"]["model"]["name"])

    def client(self) -> InferenceClient:
        return InferenceClient(self.emulator.viewer_token, base_url=self.emulator.base_url)

    def config(self, **settings: Any) -> RolloutConfig:
        given = {"poll": 0.05, "deadline": 30, "deployment_id": self.id, **settings}
        return RolloutConfig(base_url=self.url, model=self.model, api_key=self.emulator.viewer_token, **given)

    def load(self, number: int) -> str:
        return self.api.hot_load(self.id, name(number), promptCachePolicy="PROMPT_CACHE_POLICY_PRESERVE")


def name(number: int) -> str:
    return f"run-v{number:06d}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with Emulator(replicas=2, tokens_per_second=150, extra_args=["--swap-delay=0.25"]) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
        bucket = bucket_of(emulator)
        tensors = {}
        for number in range(VERSIONS):
            directory = tmp_path_factory.mktemp(name(number))
            make_model(directory, vocab_size=97, hidden_size=8, context=CONTEXT, seed=50 + number, max_length=64)
            files = {path.name: path.read_bytes() for path in directory.iterdir()}
            put_snapshot(bucket, deployment, name(number), files)
            tensors[name(number)] = numpy_model.read_tensors(directory)
        yield World(emulator=emulator, api=api, deployment=deployment, tensors=tensors)
        api.close()


def traffic(world: World, folder: Path, *, salt: str | None, loads: list[tuple[int, bool]]) -> list[dict[str, Any]]:
    """Let three processes sample during some hot-loads, (version, whether it is waited for), and return their lines."""
    stop = folder / "stop"
    outputs = [folder / f"{number}.jsonl" for number in range(3)]
    environ = {**world.emulator.env, "COREWEAVE_API_TOKEN": world.emulator.viewer_token, "OMP_NUM_THREADS": "1"}
    task = {"base_url": world.url, "model": world.model, "key": world.emulator.viewer_token, "deployment": world.id}
    clients = [
        subprocess.Popen(
            [sys.executable, str(CLIENT), json.dumps({**task, "stop": str(stop), "out": str(out), "salt": salt})],
            env={"PATH": "/usr/bin:/bin", **environ},
        )
        for out in outputs
    ]

    def lines() -> int:
        return sum(out.read_bytes().count(b"\n") for out in outputs if out.exists())

    def more(count: int) -> None:
        deadline, target = time.monotonic() + 60, lines() + count
        while lines() < target:
            assert time.monotonic() < deadline
            assert all(client.poll() is None for client in clients), "a client ended"
            time.sleep(0.02)

    try:
        for out in outputs:
            deadline = time.monotonic() + 60
            while not out.exists() or not out.stat().st_size:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        for number, waited in loads:
            hot_load = world.load(number)
            if waited:
                assert world.api.ended(hot_load)["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
                more(60)
            else:
                # The trainer goes on at once; only before the next hot-load the service makes it wait.
                more(20)
                world.api.ended(hot_load)
    finally:
        stop.touch()
        codes = [client.wait(60) for client in clients]
    assert codes == [0, 0, 0]
    return [json.loads(line) for out in outputs for line in out.read_text().splitlines()]


@attrs.frozen(kw_only=True)
class Verdict:
    """What the checks of many samples found."""

    exact: int
    spanned: int
    foreign: list[str]
    """Samples that weights, or KV of weights, outside of their span made."""
    apart: list[float]
    """For each exact sample, how far its log-probs are from those of its version alone."""


def judge(world: World, lines: list[dict[str, Any]]) -> Verdict:
    loads = world.api.ok("GET", f"/hotLoads?parentDeploymentId={world.id}&maxPageSize=1000")["hotLoads"]
    order = [load["spec"]["id"] for load in reversed(loads)]
    identity = {load["spec"]["id"]: load["spec"]["identity"] for load in loads}
    foreign, apart = [], []
    records: dict[str, Any] = {}
    for line in lines:
        first, last = order.index(line["oldest"]), order.index(line["newest"])
        allowed = {identity[load] for load in order[first : last + 1]}
        if line["request"] not in records:
            (attempt,) = world.api.own(f"/requests/{line['request']}")["attempts"]
            records[line["request"]] = attempt["choices"]
        record = records[line["request"]][line["index"]]
        seen = set(record["tokens"]) | set(record["prompt_kv"]) | {one for kv in record["kv"] for one in kv}
        if not seen <= allowed:
            foreign.append(f"{line['request']}: {seen} is not within {allowed}")
        if line["exact"]:
            tensors = world.tensors[identity[line["oldest"]]]
            sequence, worst = list(line["prompt"]), 0.0
            for token, logprob in zip(line["tokens"], line["logprobs"], strict=True):
                expected = numpy_model.next_token_logprobs(tensors, sequence, CONTEXT)[token]
                worst = max(worst, abs(float(expected) - logprob))
                sequence.append(token)
            apart.append(worst)
    exact = sum(line["exact"] for line in lines)
    return Verdict(exact=exact, spanned=len(lines) - exact, foreign=foreign, apart=apart)


def test_no_stamp_is_wrong_while_versions_come_and_go(world: World, tmp_path: Path) -> None:
    """B02, B68: KV of older weights, and samples under way as weights change."""
    world.api.completed(world.id, name(0))
    loads = [(1, True), (2, False), (3, False), (1, True), (4, True)]  # the second 1 is a rollback
    found = judge(world, traffic(world, tmp_path, salt=None, loads=loads))
    assert found.foreign == []
    assert max(found.apart) < 1e-4
    assert found.exact > 150, "versions alone do make samples"
    assert found.spanned > 50, "and there were samples under way as weights changed"


def test_the_same_without_salts_finds_stale_kv(world: World, tmp_path: Path) -> None:
    """What the other test cannot find is really not there: it can fail."""
    world.api.completed(world.id, name(0))
    found = judge(world, traffic(world, tmp_path, salt="always-the-same", loads=[(1, True), (2, True)]))
    assert found.foreign
    assert max(found.apart) > 1e-2


def test_exact_versions_are_sampled_until_they_are(world: World) -> None:
    world.api.completed(world.id, name(0))
    with world.client() as client:
        sampler = Sampler(world.config(), client=client)
        groups = [Group(prompt=[5, 6, 7], n=2, seed=3)] * 3
        hot_load = world.load(1)  # under way now
        got = sampler.sample_groups(groups, SamplingParams(max_tokens=6, ignore_eos=True), exact_version=True)
        spans = [sample.weights for group in got for sample in group.samples]
        assert all(span is not None and span.exact for span in spans)
        assert {span.newest.id for span in spans if span and span.newest} == {hot_load}
        assert {span.newest_version for span in spans if span} == {1}

        scores = evaluate([[5, 6, 7], [8, 9]], lambda group, sample: len(sample.token_ids), sampler=sampler, n=2)
        assert scores.versions == (name(1),)
        assert scores.mean > 0


def test_a_version_is_waited_for_or_fails_by_name(world: World) -> None:
    world.api.completed(world.id, name(0))
    with world.client() as client:
        sampler = Sampler(world.config(deadline=0.6), client=client)
        params = SamplingParams(max_tokens=2)
        world.load(2)
        (group,) = sampler.sample_groups([Group(prompt=[5])], params, min_version=2)
        assert group.samples[0].weights is not None
        assert group.samples[0].weights.oldest_version == 2
        with pytest.raises(StaleWeightsError, match=r"version 3 is not served after 0\.6 s; served is run-v000002"):
            sampler.sample_groups([Group(prompt=[5])], params, min_version=3)
        world.api.ended(world.load(3))
        world.api.ended(world.load(1))  # a rollback: version 3 is no longer served
        with pytest.raises(StaleWeightsError, match="version 'run-v000003' is not served"):
            sampler.sample_groups([Group(prompt=[5])], params, min_version=name(3))
        world.emulator.control.add_fault("replica", "damage")
        assert world.api.ended(world.load(4))["status"]["state"] == "HOT_LOAD_STATE_FAILED"
        world.emulator.control.clear_faults()
        with pytest.raises(StaleWeightsError, match="'run-v000004' is FAILED"):
            sampler.sample_groups([Group(prompt=[5])], params, min_version=4)


def test_an_answer_that_names_its_identity_wins(world: World, tmp_path: Path) -> None:
    with Emulator(replicas=1, report_identity=True) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
        make_model(tmp_path, vocab_size=31, hidden_size=4, context=1, seed=1, max_length=64)
        files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
        put_snapshot(bucket_of(emulator), deployment, name(7), files)
        api.completed(deployment["spec"]["id"], name(7))
        config = RolloutConfig(
            base_url=emulator.gateway_url, model=deployment["spec"]["model"]["name"], api_key=emulator.viewer_token
        )
        (group,) = Sampler(config).sample_groups([Group(prompt=[5], n=2)], SamplingParams(max_tokens=2))
        spans = [sample.weights for sample in group.samples]
        assert [(span.exact, span.newest_version) for span in spans if span] == [(True, 7)] * 2
        assert np.isfinite([sample.logprobs for sample in group.samples]).all()
        api.close()
