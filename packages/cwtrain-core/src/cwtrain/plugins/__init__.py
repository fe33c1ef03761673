"""Plugins: an opinion, a veto or an ear, never a dependency.

A distribution that wants to take part names a module in the entry-point group ``cwtrain`` and marks functions with
``hookimpl``:

    # my_package/_plugin.py, named in pyproject.toml:  [project.entry-points.cwtrain]  mine = "my_package._plugin"
    from cwtrain.plugins import hookimpl

    @hookimpl
    def cwtrain_weight_sync(event):
        print(event)

``cwtrain.plugins.specs`` lists the hooks. ``get_plugins()`` gives the process-wide ``Plugins``, loaded at first use.
"""

from __future__ import annotations

from cwtrain.plugins.manager import BrokenPlugin, LoadedPlugin, Plugins, get_plugins
from cwtrain.plugins.specs import ENTRY_POINT_GROUP, HookKind, hookimpl, hookspec

__all__ = [
    "ENTRY_POINT_GROUP",
    "BrokenPlugin",
    "HookKind",
    "LoadedPlugin",
    "Plugins",
    "get_plugins",
    "hookimpl",
    "hookspec",
]
