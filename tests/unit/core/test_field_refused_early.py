"""What would refuse a publish at its end is told before a byte of the weights is sent, and in a dry run."""

from __future__ import annotations

import attrs
import pytest

from cwtrain.errors import ConfigError, CWTrainError, DeploymentFailedError, HotLoadError
from cwtrain.hotload import HotLoader
from cwtrain.models.service import ResourceStatus
from cwtrain.plugins import hookimpl
from helpers.memory_scene import MemoryScene
from helpers.publish_scene import plugins_with
from helpers.run_cli import run
from helpers.tiny_api import TinyApi
from helpers.tiny_checkpoint import write_full
from helpers.toy_model import Model


class Veto:
    """A plugin that refuses every plan while it is told to, and notes what it was asked."""

    def __init__(self):
        self.on, self.asked = False, []

    @hookimpl
    def cwtrain_before_publish(self, plan):
        self.asked.append((plan.identity, getattr(plan, "dry_run", None)))
        if self.on:
            raise ConfigError("vetoed by the site")


class Closing(MemoryScene):
    def __init__(self, root):
        super().__init__(root)
        self.model, self.veto = Model(root), Veto()
        self.plugins = plugins_with(self.veto)
        self.loader = HotLoader(
            self.client, "dep", s3=self.store, plugins=self.plugins, clock=self.clock, sleep=self.clock.sleep
        )

    def close_as(self, how):
        """Let nothing be published any more."""
        self.veto.on = how == "veto"
        change = {
            "disabled": {"disabled": True},
            "disabled, and never READY": {"disabled": True, "status": ResourceStatus.UNSPECIFIED},
            "FAILED": {"status": ResourceStatus.FAILED},
            "DELETING": {"status": ResourceStatus.DELETING},
            "veto": {},
        }[how]
        self.client.deployment = attrs.evolve(self.client.deployment, **change)

    def sent(self):
        """The weights in the bucket."""
        return sorted(key for key in self.store.objects if key.endswith(".safetensors"))


CLOSED = {
    "disabled": (HotLoadError, "is disabled"),
    "disabled, and never READY": (HotLoadError, "is disabled"),
    "FAILED": (DeploymentFailedError, "FAILED"),
    "DELETING": (DeploymentFailedError, "DELETING"),
    "veto": (ConfigError, "vetoed by the site"),
}


@pytest.fixture
def scene(tmp_path):
    made = Closing(tmp_path)
    yield made
    made.close()


def publisher_of(scene, base):
    scene.trainer.base = scene.model.base
    return scene.publisher(plugins=scene.plugins, tensor_base=base)


def from_tensors(base):
    def call(scene):
        made = publisher_of(scene, base)
        return lambda: made.publish_tensors(scene.model.train(), number=1)

    return call


def several_ranks(scene):
    made = publisher_of(scene, "none")
    return lambda: made.begin_tensors(number=1, base_identity=None)


def baseline(scene):
    return scene.publisher(plugins=scene.plugins).baseline


def from_directory(scene):
    made = scene.publisher(plugins=scene.plugins)
    made.baseline()
    step = scene.trainer.step()
    return lambda: made.publish_directory(step)


WAYS = {
    "publish": lambda scene: lambda: scene.loader.publish(scene.model.base, "one"),
    "dry run": lambda scene: lambda: scene.loader.publish(scene.model.base, "one", dry_run=True),
    "plan": lambda scene: lambda: scene.loader.plan(scene.model.base, "one"),
    "baseline": baseline,
    "directory": from_directory,
    **{f"tensors, base {base}": from_tensors(base) for base in ("none", "memory", "disk")},
    "several ranks": several_ranks,
}


@pytest.mark.parametrize("how", CLOSED)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_told_before_anything_is_sent(scene, way, how):
    call = WAYS[way](scene)
    before = scene.sent()
    scene.close_as(how)
    kind, words = CLOSED[how]
    began = scene.clock.now
    with pytest.raises(kind, match=words) as caught:
        call()
    assert isinstance(caught.value, CWTrainError)
    assert scene.sent() == before
    assert scene.clock.now - began < 60  # at once: nothing was waited for
    if "disabled" in how:
        assert "cwtrain deployment update dep --enable" in caught.value.hint


def test_a_plugin_knows_a_dry_run_and_is_not_asked_for_what_is_served(scene):
    scene.loader.plan(scene.model.base, "one")
    scene.loader.publish(scene.model.base, "one")
    scene.veto.on = True
    assert scene.loader.plan(scene.model.base, "one").already_served
    assert scene.veto.asked == [("one", True), ("one", False)]


@pytest.mark.parametrize("call", ["trigger", "rollback"])
def test_what_sends_nothing_says_it_too(scene, call):
    scene.loader.publish(scene.model.base, "one")
    scene.close_as("disabled")
    with pytest.raises(HotLoadError, match="is disabled"):
        getattr(scene.loader, call)("one")


def test_tensors_look_at_the_deployment_no_more_often_than_before(scene):
    publisher = publisher_of(scene, "memory")
    for number in (1, 2):
        publisher.publish_tensors(scene.model.train(), number=number)
        looks = scene.client.count("get_deployment")
    publisher.publish_tensors(scene.model.train(), number=3)
    assert scene.client.count("get_deployment") - looks == 1


def test_the_command_says_it_in_a_dry_run(tmp_path):
    write_full(tmp_path / "base")
    with TinyApi() as api:
        api.deployment("d", disabled=True)
        env = {**api.env, "AWS_REGION": "r", "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "s"}
        for more in (["--dry-run"], []):
            args = ["--deployment", "d", "--checkpoint", str(tmp_path / "base"), "--identity", "one", *more]
            done = run("hotload", "publish", *args, env=env)
            assert (done.code, done.out) == (1, "")
            assert "is disabled" in done.err
