"""What a publisher does with arguments that do not fit, and with calls in an order that nobody meant."""

from __future__ import annotations

import signal
import threading

import numpy as np
import pytest

from cwtrain.errors import ConfigError, HotLoadError
from cwtrain.hotload import Publisher
from cwtrain.hotload.publisher import PublishState
from cwtrain.plugins import Plugins, hookimpl
from helpers.memory_scene import MemoryScene
from helpers.publish_scene import plugins_with


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    yield made
    made.close()


class Gate:
    """A plugin that holds the base's publish up until it is let go."""

    def __init__(self):
        self.reached, self.open = threading.Event(), threading.Event()
        self.running = self.most = 0

    @hookimpl
    def cwtrain_before_publish(self, plan):
        self.running += 1
        self.most = max(self.most, self.running)
        self.reached.set()
        assert self.open.wait(60)
        self.running -= 1


def test_an_interrupt_while_the_base_is_waited_for_does_not_start_it_twice(scene):
    """A Ctrl-C in Thread.join() marks a thread that runs as ended: a second one would share journal and mirror."""
    gate = Gate()
    publisher = scene.publisher(plugins=plugins_with(gate))
    main = threading.main_thread().ident

    def interrupt():
        assert gate.reached.wait(60)
        signal.pthread_kill(main, signal.SIGINT)

    helper = threading.Thread(target=interrupt)
    helper.start()
    with pytest.raises(KeyboardInterrupt):
        publisher.baseline(wait_seconds=60)
    helper.join()
    assert publisher.baseline_running
    publisher.close()
    with pytest.raises(Exception, match="in use by process"):
        scene.publisher()
    gate.open.set()


@pytest.mark.parametrize("seconds", [float("nan"), -1.0])
def test_a_wait_that_is_no_time_is_refused_before_anything_starts(scene, seconds):
    publisher = scene.publisher()
    with pytest.raises(ConfigError, match="wait_seconds"):
        publisher.baseline(wait_seconds=seconds)
    assert not publisher.baseline_running
    assert scene.hot_loads() == []


@pytest.mark.parametrize("seconds", [float("inf"), 1e18])
def test_a_wait_without_end_waits_until_the_base_is_served(scene, seconds):
    assert scene.publisher().baseline(wait_seconds=seconds).state is PublishState.COMPLETED
    assert scene.hot_loads() == [("run-v000000", "COMPLETED")]


def test_a_publisher_that_is_closed_does_nothing_more(scene):
    """Another process may work with the state directory by then."""
    publisher = scene.publisher()
    publisher.baseline()
    publisher.close()
    calls = (
        publisher.baseline,
        publisher.finish,
        lambda: publisher.publish_directory(scene.trainer.step()),
        lambda: publisher.publish_tensors({"a": np.zeros(4, np.float32)}, number=1),
    )
    for call in calls:
        with pytest.raises(HotLoadError, match="is closed"):
            call()
    assert [name for name, _ in scene.hot_loads()] == ["run-v000000"]


@pytest.mark.parametrize("number", [-1, 10**18, True, 1.0, "1", None])
def test_what_is_no_version_is_refused_before_anything_is_written(scene, number):
    publisher = scene.publisher(tensor_base="memory")
    with pytest.raises(ConfigError, match="is not a version"):
        publisher.publish_tensors({"a": np.zeros(4, np.float32)}, number=number)
    with pytest.raises(ConfigError, match="is not a version"):
        publisher.begin_tensors(number=number, base_identity=None)
    if number is not None:
        with pytest.raises(ConfigError, match="is not a version"):
            publisher.publish_directory(scene.trainer.base, number=number)
    assert scene.objects("") == {}


def test_a_number_of_numpy_is_a_version(scene):
    publisher = scene.publisher(tensor_base="none")
    assert publisher.publish_tensors({"a": np.zeros(4, np.float32)}, number=np.int64(3)).number == 3


@pytest.mark.parametrize("made", [list, iter])
def test_tensors_that_come_only_once_are_refused_with_what_to_give(scene, made):
    publisher = scene.publisher(tensor_base="memory")
    with pytest.raises(ConfigError, match="neither a mapping nor a function") as caught:
        publisher.publish_tensors(made([("a", np.zeros(4, np.float32))]), number=1)
    assert "anew" in caught.value.hint
    assert scene.objects("") == {}


def test_an_unknown_place_for_the_base_and_a_state_directory_that_cannot_be_used_are_settings_errors(scene, tmp_path):
    with pytest.raises(ConfigError, match="tensor_base='gpu'"):
        scene.publisher(tensor_base="gpu")
    blocked = tmp_path / "blocked"
    (blocked / "lock").mkdir(parents=True)
    with pytest.raises(ConfigError, match="cannot be locked"):
        Publisher(
            scene.settings(state_dir=str(blocked)),
            disk_dir=scene.trainer.updates,
            base=scene.trainer.base,
            client=scene.client,
            s3=scene.s3,
            plugins=Plugins(),
        )
    scene.publisher()
