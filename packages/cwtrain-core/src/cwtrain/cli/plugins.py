"""``cwtrain plugins``: which plugins there are, and what is wrong with those that are broken."""

from __future__ import annotations

from typing import Any

import click

from cwtrain.cli._context import Command, Context, pass_context
from cwtrain.cli._group import LazyGroup

__all__ = ["plugin_rows", "plugins"]

_COLUMNS = ("name", "state", "distribution", "version", "provides", "problems")


@click.group(cls=LazyGroup, no_args_is_help=False)
def plugins() -> None:
    """Look at installed plugins."""


@plugins.command("list", cls=Command, example="cwtrain --output table plugins list")
@pass_context
def list_(ctx: Context) -> None:
    """Print the installed plugins: loaded, broken or disabled, with what they bring."""
    rows = plugin_rows()
    ctx.out.data(rows, ids=[row["name"] for row in rows], columns=_COLUMNS)


def plugin_rows() -> list[dict[str, Any]]:
    """Return one object for each installed plugin: what it is, what it brings, what is wrong with it."""
    from cwtrain.errors import PluginConflictError
    from cwtrain.plugins import get_plugins

    found = get_plugins()
    commands = found.register_commands(click.Group("scratch"))
    conflicts: list[str] = []
    provided: dict[str | None, list[str]] = {}
    for what, ask in (("integration", found.integrations), ("rollout backend", found.rollout_backends)):
        try:
            for item in ask():
                text = f"{what} {item.name}"
                status = getattr(item, "status", "")
                provided.setdefault(item.distribution, []).append(f"{text} ({status})" if status else text)
        except PluginConflictError as exc:
            conflicts.append(str(exc))
    rows = []
    for plugin in found.loaded:
        problems = [f"{broken.where}: {broken.error}" for broken in found.broken if broken.name == plugin.name]
        problems += [text for text in conflicts if plugin.origin in text]
        rows.append(
            {
                "name": plugin.name,
                "state": "broken" if problems else "loaded",
                "distribution": plugin.distribution,
                "version": plugin.version,
                "module": plugin.module,
                "hooks": list(plugin.hooks),
                "provides": [f"command {name}" for name, owner in commands.items() if owner == plugin.name]
                + provided.get(plugin.distribution, []),
                "problems": problems,
            }
        )
    names = {plugin.name for plugin in found.loaded}
    for broken in found.broken:
        if broken.name not in names:
            rows.append(
                {
                    "name": broken.name,
                    "state": "broken",
                    "distribution": broken.distribution,
                    "version": broken.version,
                    "module": broken.module,
                    "hooks": [],
                    "provides": [],
                    "problems": [f"{broken.where}: {broken.error}"],
                }
            )
    rows += [{"name": name, "state": "disabled", "problems": []} for name in found.disabled]
    return sorted(rows, key=lambda row: str(row["name"]))
