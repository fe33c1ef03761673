"""Alias of ``cwtrain_rollout``: ``pip install cwtrain-rollout``."""

from __future__ import annotations

from typing import Any

from cwtrain.integrations._missing import missing

try:
    import cwtrain_rollout as _impl
    from cwtrain_rollout import *  # noqa: F403 - an alias never lags behind a newer adapter
    from cwtrain_rollout import __all__ as __all__
except ModuleNotFoundError as exc:
    raise missing(exc, module="cwtrain_rollout", distribution="cwtrain-rollout") from exc

__doc__ = _impl.__doc__


def __getattr__(name: str) -> Any:
    return getattr(_impl, name)
