"""What belongs to a process, class by class: every public object pickles without secrets, or says in one TypeError what
to give instead; in a fork it has connections, locks and random numbers of its own, or says in one error whose it is."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import gc
import importlib
import importlib.util
import inspect
import os
import pickle
import warnings
from enum import Enum

import attrs
import numpy as np
import pytest

from cwtrain.config import ApiConfig
from cwtrain.errors import ConfigError
from cwtrain.hotload import CheckpointBase, HotLoader, MemoryBase, MirrorBase, SnapshotWriter, WeightMirror
from cwtrain.infra import InferenceClient
from cwtrain.infra._hold import held
from cwtrain.plugins import Plugins
from cwtrain.storage import Location, MemoryStore, S3Store, s3_client
from cwtrain_rollout import Group, Replay, RolloutConfig, Sampler, SamplingParams
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.served import FileSource, ServedWeights
from helpers.completions_server import CompletionsServer
from helpers.fake_service import FakeService
from helpers.memory_scene import MemoryScene
from helpers.other_process import Elsewhere, forked
from helpers.scripted_http import Reply, ScriptedServer
from helpers.scripted_s3 import ScriptedS3, scripted_s3
from helpers.tiny_checkpoint import write_full

TOKEN, KEY, SECRET = "tok-0123456789abcdef", "key-0123456789abcdef", "s3-secret-0123456789"


def a_client(**settings):
    return InferenceClient(TOKEN, base_url="http://127.0.0.1:9", retry_seconds=0, **settings)


def an_s3_client(url="http://127.0.0.1:9"):
    return s3_client(url, region_name="r", aws_access_key_id="AK", aws_secret_access_key=SECRET)


def a_config(**settings):
    return RolloutConfig(**{"base_url": "http://127.0.0.1:9", "model": "m", "deadline": 5, **settings})


def a_mirror(root):
    write_full(root / "base")
    return WeightMirror.create(root / "base", root / "mirror")


def a_writer(store, root):
    write_full(root / "side")
    (root / "side" / "config.json").write_text("{}")
    return SnapshotWriter(store, Location("b", "p"), "v1", kind="full", side_files=root / "side")


def a_rollout():
    return Sampler(a_config()).rollout([Group(prompt=(1,))], SamplingParams(max_tokens=1))


STAYS = {
    "Publisher": lambda root: MemoryScene(root).publisher(),
    "WeightMirror": a_mirror,
    "MirrorBase": lambda root: MirrorBase(a_mirror(root), "v0"),
    "MemoryBase": lambda root: MemoryBase(),
    "SnapshotWriter": lambda root: a_writer(MemoryStore("b"), root),
    "S3Store": lambda root: S3Store(an_s3_client(), "bucket"),
    "MemoryStore": lambda root: MemoryStore("b"),
    "Plugins": lambda root: Plugins(),
    "Rollout": lambda root: a_rollout(),
    "ServedWeights": lambda root: ServedWeights(FileSource(root / "served"), poll=1, patience=1),
}


def a_replay(root):
    (root / "lines").write_text('{"at": "", "request_id": "", "request": {"prompt": [1]}, "status": 200}\n')
    return Replay(root / "lines")


def a_base(root):
    write_full(root / "base")
    return CheckpointBase(root / "base", "v0")


GOES = {
    "HotLoader": lambda root: HotLoader(a_client(), "dep", s3=an_s3_client(), timeout=7),
    "InferenceClient": lambda root: a_client(headers={"X-Org": "a", "X-Api-Key": KEY}),
    "CheckpointBase": a_base,
    "Sampler": lambda root: Sampler(a_config(api_key=KEY), client=a_client(), transport=a_replay(root)),
    "ChatSampler": lambda root: ChatSampler(a_config(api_key=KEY)),
    "Replay": a_replay,
}


def test_every_public_class_is_known_here():
    public = {}
    for module in ("cwtrain", "cwtrain.hotload", "cwtrain.storage", "cwtrain.infra", "cwtrain.plugins",
                   "cwtrain_rollout", "cwtrain_rollout.chat", "cwtrain_rollout.served", "cwtrain_slime"):  # fmt: skip
        if module == "cwtrain_slime" and importlib.util.find_spec(module) is None:
            continue  # the sampler alone
        found = importlib.import_module(module)
        public |= {name: getattr(found, name) for name in found.__all__}
    plain = (BaseException, Enum)  # and attrs: data, which pickles
    assert STAYS.keys() | GOES.keys() == {
        name
        for name, kind in public.items()
        if inspect.isclass(kind)
        and not (issubclass(kind, plain) or attrs.has(kind) or getattr(kind, "_is_protocol", False))
    }


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_says_in_one_type_error_what_to_give_instead(name, tmp_path):
    thing = STAYS[name](tmp_path)
    for tried in (pickle.dumps, copy.deepcopy):
        with pytest.raises(TypeError, match=f"^a {name} stays in its process and cannot be pickled: .{{10}}"):
            tried(thing)


@pytest.mark.parametrize("name", GOES)
def test_what_pickles_takes_no_secret_along(name, tmp_path):
    os.environ["AWS_REGION"] = "r"
    raw = pickle.dumps(GOES[name](tmp_path))
    for secret in (TOKEN, KEY, SECRET):
        assert secret.encode() not in raw
    again = pickle.loads(raw)
    assert type(again).__name__ == name
    assert type(pickle.loads(pickle.dumps(again))).__name__ == name


def test_a_loader_goes_to_the_same_store_with_the_keys_of_the_other_process():
    with scripted_s3(ScriptedS3()) as server:
        loader = HotLoader(a_client(), "dep", s3=an_s3_client(server.url), poll_interval=2, timeout=7, run_id="r")
        again = pickle.loads(pickle.dumps(loader))
        os.environ.update({"AWS_ACCESS_KEY_ID": "other", "AWS_SECRET_ACCESS_KEY": "keys", "AWS_REGION": "elsewhere"})
        assert (again.deployment_id, again.poll_interval, again.timeout, again.run_id) == ("dep", 2, 7, "r")
        again._deployment = FakeService().deployment
        settings = again.store.inner.settings
    assert (settings.endpoint_url, settings.region) == (server.url, "r")


def test_keys_are_read_where_they_came_from_and_missed_by_name():
    for variable in ("CWTRAIN_ROLLOUT_API_KEY", "COREWEAVE_API_TOKEN", "WANDB_API_KEY"):
        os.environ[variable] = KEY
        raw = pickle.dumps(a_config(api_key=KEY))
        os.environ[variable] = "rotated"
        assert pickle.loads(raw).current_api_key() == "rotated"
        del os.environ[variable]
        with pytest.raises(ConfigError, match=rf"the key for http://127\.0\.0\.1:9/v1 is not known here.*{variable}"):
            pickle.loads(raw).current_api_key()
    assert pickle.loads(pickle.dumps(a_config())).current_api_key() is None  # an endpoint without a key


def test_headers_that_are_secrets_are_missed_by_name():
    os.environ["COREWEAVE_API_TOKEN"] = TOKEN
    raw = pickle.dumps(a_client(headers={"X-Org": "a", "X-Api-Key": KEY}))
    with pytest.raises(ConfigError, match="does not know the header X-Api-Key"):
        pickle.loads(raw).list_gateways()
    os.environ["CWTRAIN_API_HEADERS"] = f'{{"X-Api-Key": "{KEY}", "Other": "not asked for"}}'
    with ScriptedServer([Reply(200, {"items": []})]) as server:
        client = InferenceClient(TOKEN, base_url=server.url, headers={"X-Org": "a", "X-Api-Key": KEY})
        assert pickle.loads(pickle.dumps(client)).list_gateways() == []
    sent = server.requests[0].headers
    assert (sent["x-org"], sent["x-api-key"], sent["authorization"]) == ("a", KEY, f"Bearer {TOKEN}")
    assert "other" not in sent


def test_a_copy_in_the_same_process_keeps_its_key():
    for again in (copy.copy(a_config(api_key=KEY)), copy.deepcopy(a_config(api_key=KEY))):
        assert again.current_api_key() == KEY
    assert copy.deepcopy(ApiConfig(token=TOKEN)).token == TOKEN
    with ScriptedServer([Reply(200, {"items": []})]) as server:
        copy.deepcopy(InferenceClient(TOKEN, base_url=server.url)).list_gateways()
    assert server.requests[0].headers["authorization"] == f"Bearer {TOKEN}"


# Forks ---------------------------------------------------------------------------------------------------------------


def test_each_process_has_connections_of_its_own():
    """Two users of one connection read each other's answers."""
    s3 = ScriptedS3()
    s3.objects["k"] = (b"bytes", {})
    with scripted_s3(s3) as server, ScriptedServer([Reply(200, {"items": []})]) as api:
        client = InferenceClient(TOKEN, base_url=api.url)
        plain = S3Store(an_s3_client(server.url), "bucket")
        client.list_gateways()
        assert plain.get("k") == b"bytes"
        plain.put("new", b"x")
        ours = {request.connection for request in s3.requests}
        count = len(s3.requests)

        def use():
            client.list_gateways()
            return plain.get("k"), plain.put("new", b"y")

        assert forked(use) == (b"bytes", None)
        theirs = {request.connection for request in s3.requests[count:]}
        assert not ours & theirs
        assert plain.get("k") == b"bytes"
        assert s3.requests[-1].connection in ours  # and this process's is still good


def test_forks_of_one_sampler_draw_seeds_of_their_own():
    with CompletionsServer() as server:
        sampler = Sampler(a_config(base_url=server.url), plugins=Plugins())

        def sample():
            return [group.samples[0].token_ids for group in sampler.sample_groups(groups, SamplingParams(max_tokens=2))]

        groups = [Group(prompt=(1,))] * 4
        sample()
        for _ in range(2):
            forked(sample)
        sample()
    seeds = [request["seed"] for request in server.requests]
    assert len(set(seeds)) == len(seeds) == 16


def test_a_fork_waits_for_no_lock_and_no_request_of_its_parent(tmp_path):
    """Whatever another thread held or was doing at the fork: the child has it free."""
    with CompletionsServer() as server, ScriptedServer([Reply(200, {"items": []})]) as api:
        (tmp_path / "served").write_text("run-v000001 id-1\n")
        config = a_config(base_url=server.url, served_identity_file=str(tmp_path / "served"), concurrency=1)
        sampler, client = Sampler(config, plugins=Plugins()), InferenceClient(TOKEN, base_url=api.url)
        store = MemoryStore("b")
        store.put("k", b"x")
        mirror = a_mirror(tmp_path)
        engine = sampler._engine
        engine.admission.in_flight = 1  # the window is full: of requests that the child does not have
        gate = engine.admission.gate  # and one of them probes a closed gate
        while gate.closed_since is None:
            gate.refused(engine.clock())
        assert gate.enter()

        def use():
            got = sampler.sample_groups([Group(prompt=(1,))], SamplingParams(max_tokens=2))
            return len(got), client.list_gateways(), store.get("k"), _problem(lambda: mirror.advance("2"))

        held = [engine.admission._lock, engine.served._lock, engine.transport._lock, store._lock, mirror._mutex]
        with contextlib.ExitStack() as stack:
            for lock in held:
                stack.enter_context(Elsewhere(lock))
            assert forked(use) == (1, [], b"x", True)
        engine.admission.in_flight = 0
        mirror.close()


def _problem(call):
    with pytest.raises(ConfigError, match=f"belongs to process {os.getppid()}, and this is .* {os.getpid()}") as caught:
        call()
    return caught.value.hint is not None


def test_a_fork_writes_nothing_into_what_its_parent_holds(tmp_path):
    store = MemoryStore("b")
    base = MemoryBase()
    write_full(tmp_path / "files")
    base.load(tmp_path / "files", "v0")
    writer = a_writer(store, tmp_path)
    mirror = a_mirror(tmp_path)

    def use():
        problems = [
            _problem(call)
            for call in (
                lambda: writer.add("a", np.zeros(4, np.float32)),
                lambda: writer.close(),
                lambda: base.begin(fill=True),
                lambda: base.load(tmp_path / "files", "v1"),
                lambda: SnapshotWriter(store, Location("b", "p"), "v2", kind="delta", base=base),
                lambda: mirror.verify(),
                lambda: a_mirror_base(mirror).begin(fill=False),
            )
        ]
        writer.__exit__(None, None, None)
        mirror.close()
        return problems

    assert forked(use) == [True] * 7
    assert base.identity == "v0"
    mirror.advance("1")  # still ours
    mirror.close()
    writer.abort()


def a_mirror_base(mirror):
    return MirrorBase(mirror, "v0")


class Left(Exception):
    """Ends a block in the child of a plain fork."""


def fork():
    with warnings.catch_warnings():  # of a fork beside threads, from Python 3.12 on
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def left_in_a_fork(block):
    """Leave `block`, a context manager, in a plain fork, and return how that ended; then here."""
    pid = None
    try:
        with block as held:
            pid = fork()
            if pid == 0:
                raise Left
            status = os.waitpid(pid, 0)[1]
            yield held
    except Left:
        os._exit(7)
    finally:
        if pid == 0:
            os._exit(1)
    assert os.waitstatus_to_exitcode(status) == 7


def test_leaving_a_block_in_a_fork_deletes_no_deployment_of_the_parent():
    service = FakeService()
    service.create_deployment = lambda spec: service.deployment
    service.delete_deployment = lambda name: service.calls.append(("delete", name))
    block = held(service, {"id": "dep"}, wait=service.get_deployment, delete=service.delete_deployment)
    for _ in left_in_a_fork(block):
        assert ("delete", "dep") not in service.calls
    assert ("delete", "dep") in service.calls


def test_a_fork_within_a_running_event_loop_samples_by_itself():
    with CompletionsServer() as server:
        sampler = Sampler(a_config(base_url=server.url), plugins=Plugins())
        groups, sampling = [Group(prompt=(1,))], SamplingParams(max_tokens=2)

        async def scenario():
            await sampler.sample(groups, sampling)
            got = forked(lambda: len(sampler.sample_groups(groups, sampling)))
            return got, len(await sampler.sample(groups, sampling))

        assert asyncio.run(scenario()) == (1, 1)


def test_a_rollout_in_flight_says_in_a_fork_whose_it_is_and_goes_on_in_its_own_process():
    with CompletionsServer() as server:
        sampler = Sampler(a_config(base_url=server.url), plugins=Plugins())

        async def scenario():
            async with sampler.rollout([Group(prompt=(1,))], SamplingParams(max_tokens=2)) as rollout:
                calls = {"next": rollout.__anext__, "abort": rollout.abort}
                told = {name: forked(lambda call=call: asyncio.run(call())) for name, call in calls.items()}
                told["leave"] = forked(lambda: asyncio.run(rollout.__aexit__(None, None, None)))
                return told, [group async for group in rollout]

        told, groups = asyncio.run(scenario())
    assert told.pop("leave") is None
    for kind, words in told.values():
        assert kind == "ConfigError"
        assert f"this Rollout belongs to process {os.getpid()}" in words
    assert len(groups) == 1


def test_what_is_gone_is_not_renewed():
    for _ in range(3):
        sampler = Sampler(a_config())
        del sampler
    gc.collect()
    owners = importlib.import_module("cwtrain._process")._OWNERS
    before = len(owners)
    sampler = Sampler(a_config())
    assert len(owners) > before
    del sampler
    gc.collect()
    assert len(owners) == before
