"""The place of NeMo-RL's adapter for CoreWeave Dedicated Inference.

This version registers the adapter and nothing more: the documented names ``CoreWeaveGeneration``,
``HotLoadWeightSynchronizer`` and ``CoreWeaveDTensorPolicyWorker`` are not in it yet, and asking for one of them says
so. Until then publish from the training script with ``cwtrain.HotLoader.publish``, or run ``cwtrain hotload publish``
after each save.
"""

from __future__ import annotations

from typing import Any

__all__: list[str] = []

_NOT_YET = frozenset({"CoreWeaveGeneration", "HotLoadWeightSynchronizer", "CoreWeaveDTensorPolicyWorker"})


def __getattr__(name: str) -> Any:
    if name in _NOT_YET:
        from importlib.metadata import version

        from cwtrain.errors import IntegrationError

        raise IntegrationError(
            f"cwtrain-nemo-rl {version('cwtrain-nemo-rl')} does not bring {name!r} yet",
            hint="update cwtrain-nemo-rl; until it does, publish with cwtrain.HotLoader or: cwtrain hotload publish",
        )
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
