"""A deployment of the emulator that serves a small policy, found and filled through the client's own calls."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from cwtrain.hotload import HotLoader
from cwtrain.infra import InferenceClient, lifecycle, s3_client
from cwtrain_demo.trainer import Policy
from cwtrain_emulator.engine.model_io import make_model
from cwtrain_rollout import RolloutConfig

VOCABULARY = 40
CONTEXT_LIMIT = 64


@attrs.frozen(kw_only=True)
class Served:
    """A deployment that serves `policy`."""

    config: RolloutConfig
    policy: Policy
    hot_load_id: str
    deployment_id: str


def serve(emulator: Any, directory: Path, engine_config: dict[str, str]) -> Iterator[Served]:
    mark = uuid.uuid4().hex[:8]
    model = make_model(
        directory / "base", vocab_size=VOCABULARY, hidden_size=16, context=3, seed=4, max_length=CONTEXT_LIMIT
    )
    with InferenceClient(emulator.admin_token, base_url=emulator.base_url) as client:
        gateway = client.create_gateway(
            {
                "name": f"rollout-{mark}",
                "zones": ["US-EAST-04A"],
                "coreWeaveAuth": {},
                "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
            }
        )
        lifecycle.wait_for_gateway(client, gateway.id, timeout=60, poll_interval=0.05)
        spec = {
            "name": f"rollout-{mark}",
            "gatewayIds": [gateway.id],
            "runtime": {"engine": "dynamo-vllm", "engineConfig": engine_config},
            "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
            "model": {"name": f"model-{mark}", "bucket": emulator.bucket, "path": f"rollout-{mark}/none"},
            "autoscaling": {"min": 2, "max": 2},
            "hotLoad": {
                "bucket": emulator.bucket,
                "pathPrefix": f"rollout-{mark}",
                "transitionMode": "TRANSITION_MODE_ASYNC",
            },
        }
        with lifecycle.running_deployment(client, spec, timeout=60, poll_interval=0.05) as deployment:
            store = s3_client(
                emulator.s3_endpoint,
                region_name=emulator.region,
                aws_access_key_id=emulator.access_key_id,
                aws_secret_access_key=emulator.secret_access_key,
            )
            loader = HotLoader(client, deployment.id, s3=store, poll_interval=0.05, timeout=60)
            hot_load = loader.publish(directory / "base", "base-0")
            (endpoint,) = lifecycle.endpoints(client, deployment)
            yield Served(
                config=RolloutConfig(
                    base_url=lifecycle.rollout_base_url(endpoint),
                    model=deployment.model_name,
                    api_key=emulator.admin_token,
                    deadline=30,
                ),
                policy=Policy(model.tensors, 3),
                hot_load_id=hot_load.id,
                deployment_id=deployment.id,
            )
