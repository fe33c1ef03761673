"""miles adapter for CoreWeave Dedicated Inference.

This version registers the adapter and nothing more: ``hook``, the documented name, is not in it yet, and asking for it
says so. Until then publish from the training script with ``cwtrain.HotLoader.publish``, or run
``cwtrain hotload publish`` after each save.
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []

_NOT_YET = frozenset({"hook"})


def __getattr__(name: str) -> Any:
    if name in _NOT_YET:
        from importlib.metadata import version

        from cwtrain.errors import IntegrationError

        raise IntegrationError(
            f"cwtrain-miles {version('cwtrain-miles')} does not bring {name!r} yet",
            hint="update cwtrain-miles; until it does, publish with cwtrain.HotLoader or: cwtrain hotload publish",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
