"""Entry point of this distribution in the ``cwtrain`` plugin group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cwtrain.plugins import hookimpl

if TYPE_CHECKING:
    from cwtrain.models.sync import Integration

__all__ = ["cwtrain_register_integration"]


@hookimpl
def cwtrain_register_integration() -> Integration:
    """Return what this distribution integrates and how far it is."""
    from cwtrain.models.sync import Integration

    return Integration(
        name="nemo_rl",
        distribution="cwtrain-nemo-rl",
        documented="cwtrain.integrations.nemo_rl.CoreWeaveGeneration",
        status="registered only: CoreWeaveGeneration and its companions are not in this version yet",
    )
