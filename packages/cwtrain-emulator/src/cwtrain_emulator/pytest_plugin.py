"""Pytest fixtures: a running emulator, a READY deployment on it, its bucket, and faults.

Nothing starts, and nothing heavy is imported, before a test asks for a fixture.
"""

from __future__ import annotations

import json
import os
import time
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from cwtrain_emulator.control_client import Control
    from cwtrain_emulator.emulator import Emulator

__all__ = ["Bucket", "Faults", "bucket", "deployment", "emulator", "faults"]

_API = "/v1alpha1/inference"
_READY_SECONDS = 60.0


class Bucket:
    """The emulator's bucket: its name, and a boto3 S3 client with the trainer's key (path style).

    Made with ``options`` of a client in place of one, as the fixture is, it pickles and works in forked processes: each
    process has a client of its own.
    """

    def __init__(self, name: str, client: Any = None, *, options: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self._options = options
        self._client, self._owner = client, os.getpid()

    @property
    def client(self) -> Any:
        """The client of this process."""
        if self._options is not None and (self._client is None or self._owner != os.getpid()):
            self._client, self._owner = _s3_client(self._options), os.getpid()
        return self._client

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_client": None if self._options is not None else self._client}


@dataclass(frozen=True)
class Faults:
    """Faults of the emulator, counted and deterministic; what there is, is in ``docs/reference/faults.md``."""

    control: Control

    def add(self, target: str, kind: str, **values: Any) -> dict[str, Any]:
        """Add a fault and return it. `target`: api, endpoint, store, replica or directory."""
        return self.control.add_fault(target, kind, **values)

    def all(self) -> list[dict[str, Any]]:
        """Return all faults, with how many requests each has `seen` and `struck`."""
        return self.control.faults()

    def struck(self, fault: Mapping[str, Any]) -> int:
        """Return how many requests a fault has struck by now."""
        return int(self.control.call("GET", f"/faults/{fault['id']}")["fault"]["struck"])

    def clear(self, fault: Mapping[str, Any] | None = None) -> None:
        """Remove a fault, or all; replicas that stand still because of it go on."""
        self.control.clear_faults(None if fault is None else fault["id"])


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    """Give an emulator with two replicas per deployment; one for the whole session."""
    from cwtrain_emulator.emulator import Emulator

    with Emulator() as running:
        yield running


@pytest.fixture
def bucket(emulator: Emulator) -> Bucket:
    """Give the emulator's bucket with a client."""
    return Bucket(
        emulator.bucket,
        options={
            "endpoint_url": emulator.s3_endpoint,
            "aws_access_key_id": emulator.access_key_id,
            "aws_secret_access_key": emulator.secret_access_key,
            "region_name": emulator.region,
        },
    )


def _s3_client(options: Mapping[str, Any]) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.Session().client("s3", config=config, **options)


@pytest.fixture
def faults(emulator: Emulator) -> Iterator[Faults]:
    """Give the emulator's faults; there are none at the test's start, and none after it."""
    made = Faults(emulator.control)
    made.clear()
    yield made
    made.clear()


@pytest.fixture(scope="session")
def _emulator_gateway(emulator: Emulator) -> str:
    """Give the id of the gateway that all `deployment` fixtures use."""
    body = {
        "name": f"gateway-{uuid.uuid4().hex[:8]}",
        "zones": ["US-EAST-04A"],
        "coreWeaveAuth": {},
        "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
    }
    return str(_call(emulator, "POST", "/gateways", body)["gateway"]["spec"]["id"])


@pytest.fixture
def deployment(emulator: Emulator, _emulator_gateway: str) -> Iterator[dict[str, Any]]:
    """Give a READY deployment with hot-loads and a bucket prefix of its own; it is deleted afterwards.

    The dict is the API's: ``deployment["spec"]["id"]``, ``["spec"]["hotLoad"]["pathPrefix"]`` and so on.
    """
    mark = uuid.uuid4().hex[:8]
    spec = {
        "name": f"deployment-{mark}",
        "gatewayIds": [_emulator_gateway],
        "runtime": {"engine": "dynamo-vllm"},
        "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
        "model": {"name": f"model-{mark}", "bucket": emulator.bucket, "path": f"test-{mark}/base"},
        "autoscaling": {"min": 1, "max": 1, "concurrency": 4},
        "traffic": {"weight": 100},
        "hotLoad": {
            "bucket": emulator.bucket,
            "pathPrefix": f"test-{mark}",
            "transitionMode": "TRANSITION_MODE_ASYNC",
        },
    }
    deployment_id = _call(emulator, "POST", "/deployments", spec)["deployment"]["spec"]["id"]
    yield _wait_ready(emulator, deployment_id)
    # A fault of the test must not strike its tidying up, whichever fixture was asked for first.
    emulator.control.clear_faults()
    _call(emulator, "DELETE", f"/deployments/{deployment_id}")


def _wait_ready(emulator: Emulator, deployment_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        found: dict[str, Any] = _call(emulator, "GET", f"/deployments/{deployment_id}")["deployment"]
        if found["status"]["status"] == "STATUS_READY":
            return found
        if time.monotonic() > deadline:
            pytest.fail(f"the emulator's deployment is not READY after {_READY_SECONDS:g} s: {found['status']}")
        time.sleep(0.02)


def _call(emulator: Emulator, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(  # noqa: S310
        f"{emulator.base_url}{_API}{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
        headers={"Authorization": f"Bearer {emulator.admin_token}", "Content-Type": "application/json"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=30) as answer:
        return json.loads(answer.read())
