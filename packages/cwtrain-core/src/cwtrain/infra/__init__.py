"""The Dedicated Inference API: a typed client and what to do with deployments.

    from cwtrain.infra import InferenceClient, lifecycle

    with InferenceClient() as client:
        deployment = client.create_deployment(spec)
        lifecycle.wait_for_deployment(client, deployment.id)

Names are loaded at first use, so this package can be imported without httpx or boto3.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cwtrain.config.api import token_from_env
    from cwtrain.infra import lifecycle
    from cwtrain.infra.client import InferenceClient
    from cwtrain.models.service import (
        CapacityClaim,
        ChecksumFormat,
        CompressionFormat,
        Condition,
        ConditionStatus,
        Deployment,
        Gateway,
        HotLoad,
        HotLoadReplica,
        HotLoadSpec,
        HotLoadState,
        HotLoadStatus,
        HotLoadTarget,
        IncrementalSnapshotMetadata,
        PromptCachePolicy,
        ReplicaState,
        ResourceStatus,
        SnapshotChainEntry,
        SnapshotType,
        TransitionMode,
    )
    from cwtrain.storage import s3_client

__all__ = [
    "CapacityClaim",
    "ChecksumFormat",
    "CompressionFormat",
    "Condition",
    "ConditionStatus",
    "Deployment",
    "Gateway",
    "HotLoad",
    "HotLoadReplica",
    "HotLoadSpec",
    "HotLoadState",
    "HotLoadStatus",
    "HotLoadTarget",
    "IncrementalSnapshotMetadata",
    "InferenceClient",
    "PromptCachePolicy",
    "ReplicaState",
    "ResourceStatus",
    "SnapshotChainEntry",
    "SnapshotType",
    "TransitionMode",
    "lifecycle",
    "s3_client",
    "token_from_env",
]

_MODELS = "cwtrain.models.service"
_HOMES = {
    "InferenceClient": "cwtrain.infra.client",
    "s3_client": "cwtrain.storage",
    "token_from_env": "cwtrain.config.api",
}

logging.getLogger("cwtrain").addHandler(logging.NullHandler())  # a library does not choose where logs go


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name == "lifecycle":
        return import_module("cwtrain.infra.lifecycle")
    if name in __all__:
        return getattr(import_module(_HOMES.get(name, _MODELS)), name)
    raise AttributeError(f"module 'cwtrain.infra' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
