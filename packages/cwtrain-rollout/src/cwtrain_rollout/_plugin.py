"""Entry point of this distribution in the `cwtrain` plugin group. Light: the sampler is imported when it is made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cwtrain.plugins import hookimpl

if TYPE_CHECKING:
    from cwtrain.models.sync import RolloutBackendFactory
    from cwtrain_rollout.protocol import RolloutBackend


@hookimpl
def cwtrain_register_rollout_backend() -> RolloutBackendFactory:
    """Offer the sampler of this distribution as the backend `openai`."""
    from cwtrain.models.sync import RolloutBackendFactory

    return RolloutBackendFactory(
        name="openai",
        distribution="cwtrain-rollout",
        create=_create,
        help="any OpenAI-compatible /completions endpoint, by its base URL",
    )


def _create(**settings: Any) -> RolloutBackend:
    from cwtrain_rollout.config import RolloutConfig
    from cwtrain_rollout.sampler import Sampler

    return Sampler(RolloutConfig.from_env(**settings))
