"""No KV of other weights is in a sample that says it is exact, whatever a caller puts into its requests.

Random rollouts (streamed or not, with `extra` and a nested `nvext` of the caller's own, waiting for versions or not)
between random hot-loads that preserve the prompt cache, rollbacks among them. The emulator's request log says for each
token which weights computed it and with whose KV.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any

import attrs
import pytest

from cwtrain.infra import InferenceClient
from cwtrain.plugins import Plugins
from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.engine.model_io import make_model
from cwtrain_rollout import Group, RolloutConfig, Sample, Sampler, SamplingParams
from cwtrain_rollout._http import HttpTransport
from cwtrain_rollout.transport import Reply, StreamedReply
from helpers.conformance import bucket_of, put_snapshot
from helpers.emulator_api import Api

VERSIONS = 4
PROMPTS = [(5, 6, 7, 8), (5, 6, 7, 8, 9), (5, 6, 7), (20, 21)]


def name(number: int) -> str:
    return f"run-v{number:06d}"


@attrs.frozen(kw_only=True)
class World:
    """Replicas that swap at different moments, and versions that are ready to be loaded."""

    emulator: Emulator
    api: Api
    id: str
    model: str
    named: bool = True
    """Whether answers say which weights made them."""

    def load(self, number: int) -> str:
        return self.api.hot_load(self.id, name(number), promptCachePolicy="PROMPT_CACHE_POLICY_PRESERVE")

    def config(self) -> RolloutConfig:
        return RolloutConfig(
            base_url=f"{self.emulator.gateway_url}/v1",
            model=self.model,
            api_key=self.emulator.viewer_token,
            deployment_id=self.id,
            poll=0.05,
            deadline=60,
        )

    def foreign(self, sample: Sample) -> set[str]:
        """Return whose weights or KV are in a sample that is not the one version that it names."""
        record = self.api.own(f"/requests/{sample.request_id}")["attempts"][-1]["choices"]
        choice = record[sample.index if len(record) > 1 else 0]
        seen = set(choice["tokens"]) | set(choice["prompt_kv"]) | {one for kv in choice["kv"] for one in kv}
        assert sample.weights is not None
        return seen - set(sample.weights.identities)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with Emulator(replicas=2, report_identity=True, extra_args=["--swap-delay=0.1"]) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
        for number in range(VERSIONS):
            directory = tmp_path_factory.mktemp(name(number))
            make_model(directory, vocab_size=40, hidden_size=4, context=3, seed=number, max_length=32)
            files = {path.name: path.read_bytes() for path in directory.iterdir()}
            put_snapshot(bucket_of(emulator), deployment, name(number), files)
        spec = deployment["spec"]
        yield World(emulator=emulator, api=api, id=spec["id"], model=spec["model"]["name"])
        api.close()


@pytest.fixture(params=[False, True], ids=["silent", "answers name their identity"])
def world(request: pytest.FixtureRequest, started: World) -> World:
    return attrs.evolve(started, named=request.param)


class Between(HttpTransport):
    """HTTP before whose second request something else happens, and whose answers may lose the names of weights."""

    def __init__(self, world: World, config: RolloutConfig, happens: Callable[[], object] = lambda: None) -> None:
        super().__init__(config)
        self._named, self._happens, self._sent = world.named, happens, 0

    def _told(self, body: bytes) -> bytes:
        return body if self._named else body.replace(b'"identit', b'"nobody_reads_identit')

    async def post(self, body: bytes, headers: Mapping[str, str]) -> Reply:
        self._sent += 1
        if self._sent == 2:
            await asyncio.to_thread(self._happens)
        reply = await super().post(body, headers)
        return attrs.evolve(reply, body=self._told(reply.body))

    @contextlib.asynccontextmanager
    async def stream(self, body: bytes, headers: Mapping[str, str]) -> AsyncIterator[StreamedReply]:
        async with super().stream(body, headers) as streamed:
            if streamed.events is None:
                yield streamed
            else:
                yield attrs.evolve(streamed, events=(self._told(event) async for event in streamed.events))


def any_extra(rng: random.Random) -> dict[str, Any] | None:
    """Return more fields of a request: none, some of the caller's own, and an nvext with whatever may be in it."""
    if rng.random() < 0.2:
        return None
    nvext: dict[str, Any] = {}
    for field, value in (
        ("agent_hints", {"priority": rng.randrange(5), "osl": rng.choice([None, 7])}),
        ("extra_fields", rng.sample(["worker_id", "timing", "completion_token_ids"], rng.randrange(3))),
        ("annotations", ["token_ids"]),
        ("session_control", {"session_id": "talk", "action": "bind"}),
        ("mine", {"deeper": {"cache_salt": "not the place for one"}}),
    ):
        if rng.random() < 0.5:
            nvext[field] = value
    extra: dict[str, Any] = {"nvext": rng.choice([nvext, nvext, nvext, None])}
    if rng.random() < 0.3:
        extra["user"] = "somebody"
    return extra if rng.random() < 0.9 else {"priority": 1}


async def rolled_out(sampler: Sampler, rng: random.Random, newest: str | None) -> list[Sample]:
    groups = [
        Group(prompt=rng.choice(PROMPTS), n=rng.choice([1, 2]), extra=any_extra(rng), session=rng.choice([None, "a"]))
        for _ in range(3)
    ]
    options: dict[str, Any] = {"partial": rng.random() < 0.5}
    if newest is not None and rng.random() < 0.5:
        options[rng.choice(["min_version", "exact_version"])] = newest
    params = SamplingParams(max_tokens=rng.choice([1, 3, 6]), ignore_eos=True)
    async with sampler.rollout(groups, params, **options) as rollout:
        return [sample async for group in rollout for sample in group.samples]


def test_what_says_it_is_exact_has_no_kv_of_other_weights(world: World) -> None:
    rng = random.Random(2)
    world.api.completed(world.id, name(0))
    samples: list[Sample] = []

    async def scenario(client: InferenceClient) -> None:
        config = world.config()
        between = Between(world, config)
        async with Sampler(config, client=client, transport=between, plugins=Plugins()) as sampler:
            newest, loading = None, None
            for _ in range(10):
                if rng.random() < 0.6:
                    if loading is not None:
                        await asyncio.to_thread(world.api.ended, loading)
                    newest = loading = await asyncio.to_thread(world.load, rng.randrange(VERSIONS))
                samples.extend(await rolled_out(sampler, rng, newest))
            if loading is not None:
                await asyncio.to_thread(world.api.ended, loading)

    with InferenceClient(world.emulator.viewer_token, base_url=world.emulator.base_url) as client:
        asyncio.run(scenario(client))
    exact = [sample for sample in samples if sample.weights is not None and sample.weights.exact]
    assert [(sample.request_id, found) for sample in exact if (found := world.foreign(sample))] == []
    assert len(exact) > 15


def test_a_caller_s_nvext_brings_back_no_kv_of_the_version_before(world: World) -> None:
    """ai-dynamo/dynamo#13157: a request with hints of the caller's own, before and after a hot-load."""
    world.api.completed(world.id, name(0))
    group = Group(
        prompt=(5, 6, 7, 8, 9, 10), session="one replica's cache", extra={"nvext": {"agent_hints": {"priority": 1}}}
    )
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    with InferenceClient(world.emulator.viewer_token, base_url=world.emulator.base_url) as client:
        config = world.config()
        sampler = Sampler(config, client=client, transport=Between(world, config), plugins=Plugins())
        for number in (0, 1):
            hot_load = world.load(number)
            world.api.ended(hot_load)
            for _ in range(2):  # the second time from the cache
                (found,) = sampler.sample_groups([group], params, min_version=hot_load)
                (sample,) = found.samples
                assert sample.weights is not None
                assert (sample.weights.exact, sample.weights.identities) == (True, (name(number),))
                assert world.foreign(sample) == set()
                (attempt,) = world.api.own(f"/requests/{sample.request_id}")["attempts"]
                assert attempt["cache_salt"] == hot_load


def test_a_request_with_the_salt_of_the_version_before_is_not_exact_whoever_answers(world: World) -> None:
    """It was sent before the hot-load was known: new weights computed it on the old KV, and say their name."""
    first = world.load(0)
    world.api.ended(first)
    config = attrs.evolve(world.config(), poll=60, concurrency=1)
    groups = [Group(prompt=(30, 31, 32, 33, 34, 35), session="one replica's cache")] * 2
    with InferenceClient(world.emulator.viewer_token, base_url=world.emulator.base_url) as client:
        transport = Between(world, config, lambda: world.api.ended(world.load(1)))
        sampler = Sampler(config, client=client, transport=transport, plugins=Plugins())
        found = sampler.sample_groups(groups, SamplingParams(max_tokens=4, ignore_eos=True))
    (one,), (two,) = (group.samples for group in found)
    assert two.weights is not None
    assert (two.weights.exact, two.weights.identities) == (False, (name(0), name(1)))
    assert world.foreign(two) == set()
    assert one.weights is not None
    assert not one.weights.exact or world.foreign(one) == set()
