"""The documented names: what users' scripts import. One table for the unit tests and for the wheel check.

A name in `LATER` belongs to a later version: asking for it must say so in words, never fail as a typing mistake would.
"""

from __future__ import annotations

_MODELS = [
    "Gateway",
    "Deployment",
    "CapacityClaim",
    "HotLoad",
    "HotLoadReplica",
    "HotLoadState",
    "ReplicaState",
    "SnapshotType",
    "PromptCachePolicy",
    "ResourceStatus",
]

NAMES: dict[str, list[str]] = {
    "cwtrain": ["HotLoader", "InferenceClient", "inspect_snapshot", "upload_snapshot", "__version__"],
    "cwtrain.infra": ["InferenceClient", "lifecycle", "s3_client", "token_from_env", *_MODELS],
    "cwtrain.infra.lifecycle": [
        "wait_for_gateway",
        "wait_for_deployment",
        "delete_gateway",
        "delete_deployment",
        "endpoints",
        "rollout_base_url",
        "LifecycleError",
        "running_deployment",
    ],
    "cwtrain.hotload": [
        "HotLoader",
        "ProgressEvent",
        "inspect_snapshot",
        "upload_snapshot",
        "WeightMirror",
        "SnapshotError",
        "SnapshotConflictError",
        "HotLoadFailedError",
        "HotLoadTimeoutError",
        "HotLoad",
        "HotLoadReplica",
        "HotLoadState",
        "ReplicaState",
        "SnapshotType",
        "PromptCachePolicy",
    ],
    "cwtrain.hotload.delta": ["write_delta", "write_full_snapshot", "checkpoint_checksums", "DeltaStats"],
    "cwtrain.errors": [
        "CWTrainError",
        "APIError",
        "InvalidArgumentError",
        "UnauthenticatedError",
        "PermissionDeniedError",
        "NotFoundError",
        "AlreadyExistsError",
        "FailedPreconditionError",
        "HotLoadInProgressError",
        "UnimplementedError",
        "UnavailableError",
    ],
    "cwtrain.integrations.rollout": ["RolloutConfig", "Sampler"],
    "cwtrain.integrations.slime": ["hook"],
    "cwtrain.integrations.miles": ["hook"],
    "cwtrain.integrations.preflight": ["main"],
    "cwtrain_emulator": ["Emulator"],
}

LATER: dict[str, list[str]] = {
    "cwtrain.integrations.nemo_rl": [
        "CoreWeaveGeneration",
        "HotLoadWeightSynchronizer",
        "CoreWeaveDTensorPolicyWorker",
    ],
}

LATER_SAYS = r"\byet\b|later version|this version"
"""What the answer to a name of a later version must contain."""


def brought_by(module: str) -> str:
    """Return the distribution that makes the names of a documented module work."""
    alias = module.removeprefix("cwtrain.integrations.")
    if alias != module and alias != "preflight":
        return f"cwtrain-{alias.replace('_', '-')}"
    return module.replace("_", "-") if module.startswith("cwtrain_") else "cwtrain-core"
