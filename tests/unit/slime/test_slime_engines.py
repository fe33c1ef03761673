"""slime without engines: the opt-in, on an actor that is shaped like slime's, and what it refuses."""

from __future__ import annotations

import sys
import types
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest

import cwtrain.integrations.slime as documented
from cwtrain.errors import UnsupportedFrameworkError
from cwtrain_slime import hook
from cwtrain_slime._engines import ACTOR_CLASS, ACTOR_MODULE, NoEngines, is_wrapped, publish_without_engines

ANSWER = ([], "lock", 0, [], [], [])


class Ray:
    get = staticmethod(lambda value: value)
    put = staticmethod(lambda value: value)


class Manager:
    """The rollout manager's handle; ``answer`` is what it says of engines."""

    def __init__(self, answer: Any) -> None:
        self.get_updatable_engines_and_lock = Namespace(remote=lambda: answer)
        self.clear_updatable_num_new_engines = Namespace(remote=lambda: "cleared")


def slimes_update(self: Any) -> str:
    """Have the shape of slime's method; it is not slime's code."""
    engines, lock, new, *_ = Ray.get(self.rollout_manager.get_updatable_engines_and_lock.remote())
    if not engines:
        return "skipped"
    if new > 0:
        self.weight_updater.connect_rollout_engines(engines, lock)
        self.rollout_manager.clear_updatable_num_new_engines.remote()
    self.weight_updater.update_weights()
    return "updated"


class Updater:
    def __init__(self) -> None:
        self.connected: list[Any] = []
        self.updates = 0

    def connect_rollout_engines(self, engines: Any, lock: Any) -> None:
        self.connected.append((list(engines), lock))

    def update_weights(self) -> None:
        self.updates += 1


@pytest.fixture
def actor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., type]:
    """Put a train actor of slime's shape where slime's is."""

    def put(method: Any = slimes_update, *, ray: bool = True) -> type:
        made = type(ACTOR_CLASS, (), {"update_weights": method} if method else {})
        module = types.ModuleType(ACTOR_MODULE)
        module.__dict__.update({ACTOR_CLASS: made, **({"ray": Ray} if ray else {})})
        monkeypatch.setitem(sys.modules, ACTOR_MODULE, module)
        return made

    return put


def made_of(actor: type, answer: Any = ANSWER, *, transport: str = "disk") -> Any:
    one = actor()
    one.args = Namespace(update_weight_transport=transport)
    one.rollout_manager, one.weight_updater = Manager(answer), Updater()
    return one


def test_it_publishes_and_connects_once(actor: Callable[..., type]) -> None:
    cls = actor()
    assert made_of(cls).update_weights() == "skipped"
    assert documented.hook_without_engines is hook
    one = made_of(cls)
    manager = one.rollout_manager
    assert [one.update_weights() for _ in range(3)] == ["updated"] * 3
    assert one.weight_updater.connected == [([], "lock")]
    assert one.weight_updater.updates == 3
    assert one.rollout_manager is manager
    assert is_wrapped()


def test_engines_that_are_there_are_slimes_own_affair(actor: Callable[..., type]) -> None:
    cls = actor()
    publish_without_engines()
    one = made_of(cls, (["engine"], "lock", 1, [1], [0], []))
    assert one.update_weights() == "updated"
    assert one.weight_updater.connected == [(["engine"], "lock")]


def test_other_transports_are_left_alone(actor: Callable[..., type]) -> None:
    cls = actor()
    publish_without_engines()
    assert made_of(cls, transport="nccl").update_weights() == "skipped"


def test_looking_it_up_twice_wraps_once(actor: Callable[..., type]) -> None:
    cls = actor()
    publish_without_engines()
    wrapped = cls.update_weights
    assert publish_without_engines()
    assert cls.update_weights is wrapped


def test_outside_a_train_actor_it_is_only_the_hook() -> None:
    assert not publish_without_engines()
    assert not is_wrapped()
    assert documented.hook_without_engines is hook
    assert "hook_without_engines" not in documented.__all__, "`import *` must not change slime"


def _with_an_argument(self: Any, rollout_id: int) -> None:
    self.rollout_manager.get_updatable_engines_and_lock.remote()


def _another(self: Any) -> None:
    self.rollout_manager.engines()


@pytest.mark.parametrize(
    ("method", "ray", "why"),
    [
        (None, True, "has no"),
        (_with_an_argument, True, "takes"),
        (_another, True, "no longer uses"),
        (slimes_update, False, "does not import ray"),
    ],
)
def test_an_actor_of_another_shape_is_refused(method: Any, ray: bool, why: str, actor: Callable[..., type]) -> None:
    actor(method, ray=ray)
    with pytest.raises(UnsupportedFrameworkError, match=why) as caught:
        _ = documented.hook_without_engines
    assert "--rollout-num-gpus 1" in str(caught.value.hint)


def test_an_answer_of_another_shape_is_refused(actor: Callable[..., type]) -> None:
    cls = actor()
    publish_without_engines()
    one = made_of(cls, ([], "lock", 0))
    manager = one.rollout_manager
    with pytest.raises(UnsupportedFrameworkError, match="answers tuple of another shape"):
        one.update_weights()
    assert one.rollout_manager is manager


def test_no_engines_is_an_empty_list_that_is_true() -> None:
    assert NoEngines()
    assert list(NoEngines()) == []
