"""Alias of ``cwtrain_slime``: ``pip install cwtrain-slime``."""

from __future__ import annotations

from typing import Any

from cwtrain.integrations._missing import missing

try:
    import cwtrain_slime as _impl
    from cwtrain_slime import *  # noqa: F403 - an alias never lags behind a newer adapter
    from cwtrain_slime import __all__ as __all__
except ModuleNotFoundError as exc:
    raise missing(exc, module="cwtrain_slime", distribution="cwtrain-slime") from exc

__doc__ = _impl.__doc__


def __getattr__(name: str) -> Any:
    return getattr(_impl, name)
