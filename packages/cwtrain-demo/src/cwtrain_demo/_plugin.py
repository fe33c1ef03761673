"""Entry point of this distribution in the `cwtrain` plugin group: it adds `cwtrain demo`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cwtrain.plugins import hookimpl

if TYPE_CHECKING:
    import click


@hookimpl
def cwtrain_register_commands(cli: click.Group) -> None:
    """Add `cwtrain demo`."""
    from cwtrain_demo.command import demo

    cli.add_command(demo)
