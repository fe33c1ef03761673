"""Entry point of this distribution in the `cwtrain` plugin group: brings the command ``cwtrain emulator``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    import click

hookimpl = pluggy.HookimplMarker("cwtrain")


@hookimpl
def cwtrain_register_commands(cli: click.Group) -> None:
    """Add ``emulator`` to the command line."""
    from cwtrain_emulator._group import emulator_group

    cli.add_command(emulator_group)
