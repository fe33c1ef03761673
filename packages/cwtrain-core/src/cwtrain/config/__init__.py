"""What the environment says, as frozen objects. Nothing here does I/O or imports a network library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain.config.api import ApiConfig

__all__ = ["ApiConfig"]

_HOMES = {
    "ApiConfig": "cwtrain.config.api",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain.config' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
