"""What the environment says, as frozen objects. Nothing here does I/O or imports a network library."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain.config._describe import CONFIGS, Setting, SettingValue, describe, located
    from cwtrain.config.api import ApiConfig
    from cwtrain.config.hotload import HotLoadConfig
    from cwtrain.config.plugins import PluginConfig
    from cwtrain.config.storage import StorageConfig

__all__ = [
    "CONFIGS",
    "ApiConfig",
    "HotLoadConfig",
    "PluginConfig",
    "Setting",
    "SettingValue",
    "StorageConfig",
    "describe",
    "located",
]

_HOMES = {
    "CONFIGS": "cwtrain.config._describe",
    "ApiConfig": "cwtrain.config.api",
    "HotLoadConfig": "cwtrain.config.hotload",
    "PluginConfig": "cwtrain.config.plugins",
    "Setting": "cwtrain.config._describe",
    "SettingValue": "cwtrain.config._describe",
    "StorageConfig": "cwtrain.config.storage",
    "describe": "cwtrain.config._describe",
    "located": "cwtrain.config._describe",
}


def __getattr__(name: str) -> Any:
    if home := _HOMES.get(name):
        from importlib import import_module

        return getattr(import_module(home), name)
    raise AttributeError(f"module 'cwtrain.config' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
