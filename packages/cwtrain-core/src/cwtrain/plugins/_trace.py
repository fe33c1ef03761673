"""Calls of hooks in the log, for ``CWTRAIN_TRACE_PLUGINS``."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import pluggy

__all__ = ["trace_after", "trace_before"]

logger = logging.getLogger("cwtrain.plugins")


def trace_before(hook_name: str, hook_impls: Iterable[pluggy.HookImpl], kwargs: Mapping[str, Any]) -> None:
    names = ", ".join(impl.plugin_name for impl in hook_impls)
    about = ", ".join(f"{key}={type(value).__name__}" for key, value in kwargs.items())
    logger.info("%s(%s) -> %s", hook_name, about, names or "nobody")


def trace_after(
    outcome: pluggy.Result[Any], hook_name: str, hook_impls: Iterable[pluggy.HookImpl], kwargs: Mapping[str, Any]
) -> None:
    how = f"raised {type(outcome.exception).__name__}" if outcome.exception is not None else "done"
    logger.info("%s %s", hook_name, how)
