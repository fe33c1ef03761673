"""The public names of cwtrain.infra, and what importing it costs."""

from __future__ import annotations

import inspect
import subprocess
import sys

import cwtrain.infra
from cwtrain.infra import InferenceClient, lifecycle

DOCUMENTED = [
    "InferenceClient",
    "lifecycle",
    "s3_client",
    "token_from_env",
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
    "Condition",
    "IncrementalSnapshotMetadata",
]
METHODS = [
    "create_gateway",
    "get_gateway",
    "list_gateways",
    "update_gateway",
    "delete_gateway",
    "get_gateway_parameters",
    "create_deployment",
    "get_deployment",
    "list_deployments",
    "update_deployment",
    "delete_deployment",
    "get_deployment_parameters",
    "create_capacity_claim",
    "get_capacity_claim",
    "list_capacity_claims",
    "update_capacity_claim",
    "delete_capacity_claim",
    "get_capacity_claim_parameters",
    "create_hot_load",
    "get_hot_load",
    "list_hot_loads",
    "list_hot_load_replicas",
    "cancel_hot_load",
    "close",
    "__enter__",
    "__exit__",
]


def test_the_documented_names_are_there():
    assert set(DOCUMENTED) <= set(cwtrain.infra.__all__)
    assert all(getattr(cwtrain.infra, name) is not None for name in cwtrain.infra.__all__)
    assert set(cwtrain.infra.__all__) <= set(dir(cwtrain.infra))
    assert not hasattr(cwtrain.infra, "no_such_name")
    assert all(callable(getattr(InferenceClient, name)) for name in METHODS)
    assert all(callable(getattr(lifecycle, name)) for name in lifecycle.__all__)


def test_arguments_after_those_of_the_spec_are_keyword_only():
    positional = {
        name: [p.name for p in inspect.signature(value).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        for name, value in {
            "client": InferenceClient,
            "create_hot_load": InferenceClient.create_hot_load,
            "wait": lifecycle.wait_for_deployment,
            "delete": lifecycle.delete_deployment,
            "running": lifecycle.running_deployment,
        }.items()
    }
    assert positional == {
        "client": ["token"],
        "create_hot_load": ["self", "deployment_id", "identity"],
        "wait": ["client", "deployment_id"],
        "delete": ["client", "deployment_id"],
        "running": ["client", "spec"],
    }


def test_importing_it_loads_no_network_library():
    code = """
import sys
import cwtrain.infra, cwtrain.config.api
from cwtrain.infra import HotLoadState, token_from_env
print([name for name in ("httpx", "boto3", "botocore", "cattrs", "stamina", "numpy", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
