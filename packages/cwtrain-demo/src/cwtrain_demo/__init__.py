"""The quick start: train a small model against the emulator, weights hot-loaded after every step.

    from cwtrain_demo import DemoConfig, run_demo

    result = run_demo(DemoConfig(steps=20))
    assert result.weights_match and result.reward_rose

``cwtrain demo`` does the same from a shell.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain_demo.loop import DemoConfig, run_demo
    from cwtrain_demo.result import DemoResult, Step, Version

__all__ = ["DemoConfig", "DemoResult", "Step", "Version", "run_demo"]

_HOMES = {
    "DemoConfig": "cwtrain_demo.loop",
    "DemoResult": "cwtrain_demo.result",
    "Step": "cwtrain_demo.result",
    "Version": "cwtrain_demo.result",
    "run_demo": "cwtrain_demo.loop",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain_demo' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
