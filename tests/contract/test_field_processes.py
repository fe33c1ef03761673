"""Whatever holds threads, locks or connections, in another process: it works there, or says in one error what to do.

Every way of starting a process, after use and before, for what users hold: sampler, client, loader, publisher, and the
fixtures of the emulator.
"""

from __future__ import annotations

import os
import pickle

import pytest

from cwtrain.errors import MirrorLockedError
from cwtrain.hotload import HotLoader
from cwtrain.infra import InferenceClient
from cwtrain_emulator.emulator import Emulator
from cwtrain_rollout.backends import dedicated
from helpers.memory_scene import MemoryScene
from helpers.other_process import METHODS, Elsewhere, forked, report, start, use
from helpers.served_policy import serve


@pytest.fixture(scope="module")
def served(emulator, tmp_path_factory):
    yield from serve(emulator, tmp_path_factory.mktemp("served"), {"logprobs-mode": "processed_logprobs"})


@pytest.fixture
def environment(emulator):
    """The variables that a trainer exports; other processes have them too."""
    os.environ.update(emulator.env)


def things_of(served):
    client = InferenceClient()
    return {
        "sampler": dedicated(deployment=served.deployment_id, client=client, poll=60.0),
        "client": client,
        "loader": HotLoader(client, served.deployment_id, poll_interval=0.05),
    }


RIGHT = {
    "sampler": [3, 3],
    "client": ["READY"],
    "loader": "base-0",
    "bucket": 1,
    "faults": [],
}


@pytest.fixture(scope="module")
def used(emulator, served):
    """What this process has made use of: it has threads, locks and connections."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in emulator.env.items():
            patch.setenv(name, value)
        things = things_of(served)
        assert {name: use(name, thing) for name, thing in things.items()} == {name: RIGHT[name] for name in things}
        yield things


@pytest.mark.parametrize("method", METHODS)
def test_sampler_client_loader_and_fixtures_work_in_another_process_after_use_and_before(
    method, environment, served, used, bucket, faults
):
    fresh = things_of(served)
    things = {**used, "bucket": bucket, "faults": faults}
    if method != "forkserver":  # it takes things as spawn does, and is started in its own way
        things |= {f"{name} before use": thing for name, thing in fresh.items()}
    assert report(method, use, things) == {name: RIGHT[name.split()[0]] for name in things}
    assert {name: use(name, thing) for name, thing in used.items()} == {name: RIGHT[name] for name in used}


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("used", [True, False], ids=["after use", "before use"])
def test_publisher_and_emulator_say_in_a_fork_whose_they_are_and_leave_it_alone(used, scene, emulator):
    publisher = scene.publisher()
    if used:
        publisher.baseline()
    found = report("fork", use, {"publisher": publisher, "emulator": emulator})
    assert found["publisher"][0] == "ConfigError"
    assert f"belongs to process {os.getpid()}" in found["publisher"][1]
    assert found["emulator"] == [True, True]  # it can be asked, and `stop` ends nothing of its owner's
    if not used:
        publisher.baseline()
    assert publisher.publish_directory(scene.trainer.step()).identity == "run-v000001"


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_publisher_and_emulator_are_refused_at_the_start_of_another_process(method, scene, emulator):
    with pytest.raises(TypeError, match=r"a Publisher stays in its process .*: close it here and make one there"):
        start(method, use, "publisher", scene.publisher())
    with pytest.raises(TypeError, match=r"emulator\.env"):
        start(method, use, "emulator", emulator)


def test_a_fork_in_the_middle_of_a_publish_neither_waits_for_its_lock_nor_takes_it(scene):
    publisher = scene.publisher()
    publisher.baseline()

    def in_the_fork():
        problems = []
        for call in (
            lambda: publisher.publish_directory(scene.trainer.updates),
            lambda: publisher.baseline_running,
            lambda: publisher.finish(),
            lambda: publisher.note_checkpoint("/nowhere", step=1),
        ):
            try:
                call()
            except Exception as error:
                problems.append(type(error).__name__)
        publisher.close()  # as leaving `with` does
        return problems

    with Elsewhere(publisher._mutex):
        assert forked(in_the_fork) == ["ConfigError"] * 4
    with pytest.raises(MirrorLockedError, match=f"by process {os.getpid()}"):
        scene.publisher()  # the fork has not given it up
    assert publisher.publish_directory(scene.trainer.step()).identity == "run-v000001"


def test_a_fork_that_lives_on_keeps_neither_the_state_directory_nor_the_emulator(scene):
    publisher = scene.publisher()
    emulator = Emulator(replicas=1, start_timeout=60).start()
    process = start("fork", _wait_for_the_end)
    try:
        publisher.close()
        scene.publisher().close()  # free: the fork has no copy of the lock's file
        service = emulator._process
        emulator.stop()
        assert service.returncode == 0  # it ended with its pipe, and was not killed
    finally:
        process.kill()
        process.join()


def _wait_for_the_end():
    import signal

    signal.pause()


def test_a_pickle_holds_no_secret_and_names_what_is_missing(environment, emulator, used):
    token, secret = emulator.admin_token, emulator.secret_access_key
    raw = {name: pickle.dumps(thing) for name, thing in used.items()}
    for text in raw.values():
        assert token.encode() not in text
        assert secret.encode() not in text
    for name in ("COREWEAVE_API_TOKEN", "CWTRAIN_ROLLOUT_API_KEY"):
        os.environ.pop(name, None)
    for name in raw:
        again = pickle.loads(raw[name])  # a task of a pool must not be lost by an error here
        with pytest.raises(Exception, match="COREWEAVE_API_TOKEN"):
            use(name, again)
    os.environ["COREWEAVE_API_TOKEN"] = token
    assert {name: use(name, pickle.loads(text)) for name, text in raw.items()} == {name: RIGHT[name] for name in raw}
