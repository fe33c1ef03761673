"""slime without engines of its own: the opt-in that makes it write weights although nobody in the run reads them.

slime's train actor leaves ``update_weights`` early when the rollout manager knows no engine: no files, no hook, and the
run trains against a policy that never changes. ``publish_without_engines`` wraps that one method so that the actor sees
an empty list that is not false, and one new "engine" the first time, so that every rank's writer connects once. All
else is slime's own code. The wrap is refused where the method does not look as it did in the versions below.
"""

from __future__ import annotations

import functools
import inspect
import sys
from types import ModuleType
from typing import Any, Final

from cwtrain.errors import UnsupportedFrameworkError

__all__ = ["NoEngines", "is_wrapped", "publish_without_engines"]

ACTOR_MODULE: Final = "slime.backends.megatron_utils.actor"
ACTOR_CLASS: Final = "MegatronTrainRayActor"
READ_IN: Final = ("0.3.1",)
"""The versions of slime in which the method was read; also its main branch of 2026-08 (624b824a)."""

_ASKS: Final = "get_updatable_engines_and_lock"
_USES: Final = frozenset({"rollout_manager", _ASKS, "weight_updater", "connect_rollout_engines", "update_weights"})
_ANSWER: Final = 6
"""Engines, lock, number of new engines, GPU counts, GPU offsets, parallel configurations."""
_MARK: Final = "_cwtrain_without_engines"
_TRANSPORT: Final = "update_weight_transport"


class NoEngines(list[Any]):
    """No engines, and yet true: slime's "is there anybody?" passes, and every loop over it does nothing."""

    def __bool__(self) -> bool:
        return True


def publish_without_engines() -> bool:
    """Wrap slime's train actor in this process and return True; False where this is no train actor of slime.

    Does nothing the second time. Raises UnsupportedFrameworkError, at actor start and before any training, when the
    method is not the one that this was written for.
    """
    module = sys.modules.get(ACTOR_MODULE)
    if module is None:
        return False
    actor = getattr(module, ACTOR_CLASS, None)
    method = getattr(actor, "update_weights", None)
    if actor is None or method is None:
        raise _unsupported(module, f"it has no {ACTOR_CLASS}.update_weights")
    if getattr(method, _MARK, False):
        return True
    _check(module, method)
    ray = module.ray

    @functools.wraps(method)
    def update_weights(self: Any) -> Any:
        if getattr(self.args, _TRANSPORT, None) != "disk":
            return method(self)
        manager = self.rollout_manager
        self.rollout_manager = _ManagerWithoutEngines(manager, ray, module, self)
        try:
            return method(self)
        finally:
            self.rollout_manager = manager

    setattr(update_weights, _MARK, True)
    actor.update_weights = update_weights
    return True


def is_wrapped() -> bool:
    """Return whether this process' train actor publishes without engines."""
    actor = getattr(sys.modules.get(ACTOR_MODULE), ACTOR_CLASS, None)
    return bool(getattr(getattr(actor, "update_weights", None), _MARK, False))


class _ManagerWithoutEngines:
    """The rollout manager's handle as one call of ``update_weights`` sees it."""

    def __init__(self, manager: Any, ray: Any, module: ModuleType, actor: Any) -> None:
        self._manager = manager
        self._ray = ray
        self._module = module
        self._actor = actor

    def __getattr__(self, name: str) -> Any:
        return _Asked(self) if name == _ASKS else getattr(self._manager, name)

    def answer(self) -> Any:
        answer = self._ray.get(getattr(self._manager, _ASKS).remote())
        if not isinstance(answer, tuple) or len(answer) != _ANSWER or not isinstance(answer[0], list):
            raise _unsupported(self._module, f"{_ASKS} answers {type(answer).__name__} of another shape")
        if answer[0]:
            return self._ray.put(answer)
        connected = getattr(self._actor, "_cwtrain_connected", False)
        self._actor._cwtrain_connected = True
        return self._ray.put((NoEngines(), answer[1], 0 if connected else 1, *answer[3:]))


class _Asked:
    """``manager.get_updatable_engines_and_lock`` with its ``remote``."""

    def __init__(self, manager: _ManagerWithoutEngines) -> None:
        self._manager = manager

    def remote(self) -> Any:
        return self._manager.answer()


def _check(module: ModuleType, method: Any) -> None:
    inner = inspect.unwrap(method)
    if list(inspect.signature(inner).parameters) != ["self"]:
        raise _unsupported(module, f"update_weights takes {inspect.signature(inner)}")
    missing = sorted(_USES - set(inner.__code__.co_names))
    if missing:
        raise _unsupported(module, f"update_weights no longer uses {', '.join(missing)}")
    if not hasattr(module, "ray"):
        raise _unsupported(module, "its actor module does not import ray")


def _unsupported(module: ModuleType, why: str) -> UnsupportedFrameworkError:
    return UnsupportedFrameworkError(
        f"slime cannot be made to publish without engines here: {why} ({module.__name__})",
        found=why,
        supported=f"slime {' and '.join(READ_IN)}",
        hint="give the run one engine (--rollout-num-gpus 1) and use cwtrain.integrations.slime.hook, or update "
        "cwtrain-slime",
    )
