"""Metrics of a publish, given to the trainer's own tracker (W&B, TensorBoard and whatever else it has), if it runs.

The tracker belongs to the trainer: it is never started or ended here, and what it raises never stops a run.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from typing import Any, Final

from cwtrain_slime._args import RunArgs

__all__ = ["STEP_KEY", "track"]

logger = logging.getLogger("cwtrain.slime")

STEP_KEY: Final = "hotload/version"
"""What the trackers plot the metrics against: the trainer's number of the version."""


def track(run: RunArgs, metrics: Mapping[str, float], *, version: int) -> bool:
    """Log ``metrics`` on the one rank where the trainer's tracker runs, and return whether it was this one.

    Called on every rank after a publish; only the main rank (the last pipeline stage's first) has a tracker.
    """
    module = next((found for name in run.dialect.tracking_modules if (found := sys.modules.get(name))), None)
    if module is None or not metrics:
        return False
    try:
        if not _runs_here(run, module):
            return False
        module.log(run.raw, {**metrics, STEP_KEY: version}, step_key=STEP_KEY)
    except Exception as exc:  # noqa: BLE001 - foreign code about numbers for people: never worth a run
        logger.warning("the trainer's tracker did not take the metrics of version %d: %s", version, exc)
        return False
    return True


def _runs_here(run: RunArgs, module: Any) -> bool:
    if run.dialect.main_rank is None:
        # miles: one manager for each process, which lists what has been started in it.
        return bool(module._manager._backends)
    wandb, tensorboard = (bool(getattr(run.raw, name, False)) for name in ("use_wandb", "use_tensorboard"))
    if not wandb and not tensorboard:
        return False
    if wandb and getattr(sys.modules.get("wandb"), "run", None) is None:
        return False
    where, function = run.dialect.main_rank
    return bool(getattr(sys.modules.get(where), function)())
