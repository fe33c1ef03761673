"""Groups that import their commands when they are used; the root has the plugins' commands beside core's."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click

__all__ = ["LazyGroup", "RootGroup"]


class LazyGroup(click.Group):
    """A group that imports the module of a command when the command is asked for.

    ``lazy`` maps a name to ``package.module:attribute``.
    """

    def __init__(self, *args: Any, lazy: Mapping[str, str] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the commands, in the order in which they were given."""
        return [*self._lazy, *(name for name in self.commands if name not in self._lazy)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return the command called ``cmd_name``, importing its module."""
        if cmd_name in self._lazy and cmd_name not in self.commands:
            module, _, attribute = self._lazy[cmd_name].partition(":")
            self.commands[cmd_name] = getattr(import_module(module), attribute)
        return super().get_command(ctx, cmd_name)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` names; an unknown one is a usage error with the nearest name."""
        name = args[0]
        if self.get_command(ctx, name) is None and not ctx.resilient_parsing and not name.startswith("-"):
            import difflib

            close = difflib.get_close_matches(name, self.list_commands(ctx), 1)
            raise click.UsageError(f"no command {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""), ctx)
        return super().resolve_command(ctx, args)


class RootGroup(LazyGroup):
    """The root: core's commands, and for ``--help`` and names that core does not know, the plugins'.

    A plugin that cannot be loaded is warned about on standard error; core's commands do not depend on it. ``elsewhere``
    says which extra brings a command that is not installed. ``about`` has the line that help shows for each of core's
    commands, so that it imports none.
    """

    def __init__(
        self,
        *args: Any,
        about: Mapping[str, str] | None = None,
        elsewhere: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._about = dict(about or {})
        self._elsewhere = dict(elsewhere or {})
        self._plugins_loaded = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return core's commands, then the plugins'."""
        self._load_plugins(ctx)
        return super().list_commands(ctx)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return core's command, or else a plugin's."""
        command = super().get_command(ctx, cmd_name)
        if command is None and not cmd_name.startswith("-"):
            self._load_plugins(ctx)
            command = super().get_command(ctx, cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command that ``args`` names; for one that is not installed, the error says what brings it."""
        extra = self._elsewhere.get(args[0])
        if extra is not None and not ctx.resilient_parsing and self.get_command(ctx, args[0]) is None:
            raise click.UsageError(f"cwtrain {args[0]} is not installed: pip install 'cwtrain-core[{extra}]'", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write core's commands and the plugins' in two sections."""
        names = self.list_commands(ctx)
        for title, chosen in (
            ("Commands", [name for name in names if name in self._lazy]),
            ("Commands of plugins", [name for name in names if name not in self._lazy]),
        ):
            limit = formatter.width - 6 - max(map(len, chosen), default=0)
            rows = [(name, line) for name in chosen if (line := self._line(ctx, name, limit)) is not None]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def _line(self, ctx: click.Context, name: str, limit: int) -> str | None:
        """Return the line of help about a command, None for a hidden one."""
        if name in self._about:
            return self._about[name]
        command = self.get_command(ctx, name)
        return None if command is None or command.hidden else command.get_short_help_str(limit)

    def _load_plugins(self, ctx: click.Context) -> None:
        if self._plugins_loaded:
            return
        self._plugins_loaded = True
        from cwtrain.plugins import get_plugins

        get_plugins().register_commands(self, reserved=tuple(self._lazy))
