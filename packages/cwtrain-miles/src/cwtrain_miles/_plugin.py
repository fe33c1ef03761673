"""Entry point of this distribution in the ``cwtrain`` plugin group: the integration, and ``cwtrain miles``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cwtrain.plugins import hookimpl

if TYPE_CHECKING:
    import click

    from cwtrain.models.sync import Integration

__all__ = ["cwtrain_register_commands", "cwtrain_register_integration"]


@hookimpl
def cwtrain_register_integration() -> Integration:
    """Return what this distribution integrates and how far it is."""
    from cwtrain.models.sync import Integration

    return Integration(
        name="miles",
        distribution="cwtrain-miles",
        documented="cwtrain.integrations.miles.hook",
        status="publishes the weights of miles 0.1.0 and its main branch of 2026-08; check: cwtrain miles check",
    )


@hookimpl
def cwtrain_register_commands(cli: click.Group) -> None:
    """Add ``cwtrain miles``."""
    from cwtrain_slime._command import trainer_group
    from cwtrain_slime._dialect import MILES

    cli.add_command(trainer_group(MILES))
