"""Entry point of this distribution in the `cwtrain` plugin group. Light: the sampler is imported when it is made."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cwtrain.plugins import hookimpl

if TYPE_CHECKING:
    import click

    from cwtrain.config import SettingValue
    from cwtrain.models.sync import RolloutBackendFactory


@hookimpl
def cwtrain_register_rollout_backend() -> list[RolloutBackendFactory]:
    """Offer the backends `dedicated`, `openai` and `serverless`."""
    from cwtrain.models.sync import RolloutBackendFactory

    about = {
        "dedicated": "a Dedicated Inference deployment, by its id: gateway, model, key, replicas, weight versions",
        "openai": "any OpenAI-compatible /completions endpoint, by its base URL",
        "serverless": "chat completions of a wandb artifact: evaluation and looking, no training",
    }
    return [
        RolloutBackendFactory(name=name, distribution="cwtrain-rollout", create=_maker(name), help=text)
        for name, text in about.items()
    ]


@hookimpl
def cwtrain_register_commands(cli: click.Group) -> None:
    """Add `cwtrain rollout`."""
    from cwtrain_rollout.command import rollout

    cli.add_command(rollout)


@hookimpl
def cwtrain_register_settings() -> Iterable[SettingValue]:
    """Show what the sampler reads from the environment, ``CWTRAIN_ROLLOUT_*``."""
    from cwtrain.config import located
    from cwtrain_rollout.config import RolloutConfig

    return located(RolloutConfig)


def _maker(name: str) -> Callable[..., Any]:
    def create(**settings: Any) -> Any:
        from cwtrain_rollout import backends

        return getattr(backends, name)(**settings)

    return create
