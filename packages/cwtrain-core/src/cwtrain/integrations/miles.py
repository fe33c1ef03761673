"""Alias of ``cwtrain_miles``: ``pip install cwtrain-miles``."""

from __future__ import annotations

from typing import Any

from cwtrain.integrations._missing import missing

try:
    import cwtrain_miles as _impl
    from cwtrain_miles import *  # noqa: F403 - an alias never lags behind a newer adapter
    from cwtrain_miles import __all__ as __all__
except ModuleNotFoundError as exc:
    raise missing(exc, module="cwtrain_miles", distribution="cwtrain-miles") from exc

__doc__ = _impl.__doc__


def __getattr__(name: str) -> Any:
    return getattr(_impl, name)
