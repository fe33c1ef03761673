"""Entry point of this distribution in the ``cwtrain`` plugin group: the integration, and ``cwtrain slime``."""

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
        name="slime",
        distribution="cwtrain-slime",
        documented="cwtrain.integrations.slime.hook",
        status="publishes the weights of slime 0.3.1 and its main branch of 2026-08; check: cwtrain slime check",
    )


@hookimpl
def cwtrain_register_commands(cli: click.Group) -> None:
    """Add ``cwtrain slime``."""
    from cwtrain_slime._command import trainer_group
    from cwtrain_slime._dialect import SLIME

    cli.add_command(trainer_group(SLIME))
