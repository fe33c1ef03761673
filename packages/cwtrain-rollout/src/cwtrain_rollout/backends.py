"""The backends of this distribution, by name: where each finds endpoint, model, key and what is served.

- ``dedicated``: a deployment of Dedicated Inference, by its id. Everything else comes from the API.
- ``openai``: any OpenAI-compatible ``/completions`` endpoint, by its base URL.
- ``serverless``: chat completions of a served artifact. Text only: for evaluation and looking, never for training.

The plugin hook ``cwtrain_register_rollout_backend`` offers them; another distribution adds its own there.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.errors import ConfigError
from cwtrain_rollout.config import PREFIX, RolloutConfig

if TYPE_CHECKING:
    from cwtrain.infra import InferenceClient
    from cwtrain.models.service import Deployment
    from cwtrain_rollout.chat import ChatSampler
    from cwtrain_rollout.sampler import Sampler

__all__ = ["dedicated", "dedicated_config", "openai", "serverless"]

SERVERLESS_URL = "https://forge.coreweave.com/api/training/v1"
"""Where Serverless Training serves checkpoints (its documentation, 2026-09)."""
_ARTIFACT = "wandb-artifact:///"


def openai(**settings: Any) -> Sampler:
    """Return a sampler for an endpoint: ``base_url``, ``model`` and any other setting; then the environment."""
    from cwtrain_rollout.sampler import Sampler

    return Sampler(RolloutConfig.from_env(**settings), name="openai")


def dedicated(*, deployment: str | None = None, client: InferenceClient | None = None, **settings: Any) -> Sampler:
    """Return a sampler for a deployment, found by the API: gateway, model, key, replicas, what is served.

    ``deployment`` is its id (then the environment's). Raises ``ConfigError`` where it has no endpoint yet.
    """
    from cwtrain.infra import InferenceClient
    from cwtrain_rollout.sampler import Sampler

    client = InferenceClient() if client is None else client
    return Sampler(dedicated_config(client, deployment, **settings), name="dedicated", client=client)


def dedicated_config(
    client: InferenceClient, deployment: str | None = None, *, environ: Mapping[str, str] | None = None, **settings: Any
) -> RolloutConfig:
    """Return the configuration for a deployment, by its id or name; what ``settings`` and the environment say wins."""
    from cwtrain.config import ApiConfig
    from cwtrain.infra import lifecycle
    from cwtrain.infra._find import find_one

    environ = os.environ if environ is None else environ
    name = deployment or environ.get(f"{PREFIX}DEPLOYMENT_ID") or environ.get("CWTRAIN_HOTLOAD_DEPLOYMENT_ID")
    if not name:
        raise ConfigError(
            "The backend 'dedicated' needs a deployment's id", hint=f"give deployment=..., or set {PREFIX}DEPLOYMENT_ID"
        )
    found = find_one("deployment", name, client.get_deployment, client.list_deployments)
    given: dict[str, Any] = {"deployment_id": found.id, "model": found.model_name, **_engine(found), **settings}
    for field in ("base_url", "api_key", "model"):
        if environ.get(f"{PREFIX}{field.upper()}") and field not in settings:
            given.pop(field, None)
    if "base_url" not in given and not environ.get(f"{PREFIX}BASE_URL"):
        urls = lifecycle.endpoints(client, found)
        if not urls:
            raise ConfigError(
                f"Deployment {found.name or found.id} has no endpoint: none of its gateways is READY",
                hint=f"wait for it: cwtrain deployment wait {found.id}",
            )
        given["base_url"] = lifecycle.rollout_base_url(urls[0])
    keys = (f"{PREFIX}API_KEY", f"{PREFIX}API_KEY_FILE")
    if not (given.get("api_key") or given.get("api_key_file") or any(environ.get(key) for key in keys)):
        # A gateway with the service's own authentication takes the token of the API.
        given["api_key"] = ApiConfig.from_env(environ).token
    return RolloutConfig.from_env(environ, **given)


def _engine(deployment: Deployment) -> dict[str, Any]:
    """Return what a deployment's own spec says about its engine and its replicas."""
    spec = deployment.raw.get("spec") or {}
    options = (spec.get("runtime") or {}).get("engineConfig") or {}
    found: dict[str, Any] = {}
    replicas = (spec.get("autoscaling") or {}).get("min")
    if isinstance(replicas, int) and replicas > 0:
        found["replicas"] = replicas
    mode = str(options.get("logprobs-mode") or "")
    if mode in ("processed_logprobs", "raw_logprobs"):
        found["logprobs_mode"] = mode.removesuffix("_logprobs")
    longest = str(options.get("max-model-len") or "")
    if longest.isdigit() and int(longest):
        found["context_length"] = int(longest)
    return found


def serverless(*, model: str | None = None, **settings: Any) -> ChatSampler:
    """Return a sampler of chat completions for ``model``, such as ``wandb-artifact:///team/project/name:step5``."""
    from cwtrain_rollout.chat import ChatSampler

    model = model or os.environ.get(f"{PREFIX}MODEL", "")
    if not model.startswith(_ARTIFACT):
        raise ConfigError(
            f"The backend 'serverless' serves artifacts, and {model!r} is no name of one",
            hint=f"give a model like {_ARTIFACT}entity/project/name:step5",
        )
    given: dict[str, Any] = {"model": model, **settings}
    if "base_url" not in given and not os.environ.get(f"{PREFIX}BASE_URL"):
        given["base_url"] = SERVERLESS_URL
    keys = (f"{PREFIX}API_KEY", f"{PREFIX}API_KEY_FILE")
    if not (given.get("api_key") or given.get("api_key_file") or any(os.environ.get(key) for key in keys)):
        given["api_key"] = os.environ.get("WANDB_API_KEY") or None
    return ChatSampler(attrs.evolve(RolloutConfig.from_env(**given), deployment_id=None))
