"""Alias of ``cwtrain_nemo_rl``: ``pip install cwtrain-nemo-rl``."""

from __future__ import annotations

from typing import Any

from cwtrain.integrations._missing import missing

try:
    import cwtrain_nemo_rl as _impl
    from cwtrain_nemo_rl import *  # noqa: F403 - an alias never lags behind a newer adapter
    from cwtrain_nemo_rl import __all__ as __all__
except ModuleNotFoundError as exc:
    raise missing(exc, module="cwtrain_nemo_rl", distribution="cwtrain-nemo-rl") from exc

__doc__ = _impl.__doc__


def __getattr__(name: str) -> Any:
    return getattr(_impl, name)
