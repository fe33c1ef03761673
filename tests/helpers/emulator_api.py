"""The emulator over plain HTTP, with `requests` and nothing of the client or of the emulator's code."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import Any

import requests

PREFIX = "/v1alpha1/inference"
ZONE = "US-EAST-04A"
_PATIENCE = 60.0


class Api:
    """Calls of one emulator with one token."""

    def __init__(self, base_url: str, token: str | None, *, patience: float = _PATIENCE) -> None:
        self.base_url = base_url
        self._patience = patience
        self.session = requests.Session()
        self.session.trust_env = False
        if token is not None:
            self.session.headers["Authorization"] = f"Bearer {token}"

    def close(self) -> None:
        self.session.close()

    def call(self, method: str, path: str, body: Any = None, **options: Any) -> requests.Response:
        """Send a call to the API; `path` begins after the prefix."""
        return self.session.request(method, self.base_url + PREFIX + path, json=body, timeout=60, **options)

    def ok(self, method: str, path: str, body: Any = None, **options: Any) -> dict[str, Any]:
        """Send a call that must work and return its answer."""
        answer = self.call(method, path, body, **options)
        assert answer.status_code == 200, f"{method} {path}: {answer.status_code} {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    def refused(self, method: str, path: str, body: Any = None, **options: Any) -> tuple[int, int, str]:
        """Send a call that must be refused and return HTTP status, code and message."""
        answer = self.call(method, path, body, **options)
        assert answer.status_code >= 400, answer.text
        return answer.status_code, answer.json()["code"], answer.json()["message"]

    def own(self, path: str) -> Any:
        """Return the answer of one of the emulator's own routes."""
        answer = self.session.get(f"{self.base_url}/emulator/v1{path}", timeout=60)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def complete(self, body: Mapping[str, Any], *, origin: str | None = None, **options: Any) -> requests.Response:
        """Send a completions request, to the common endpoint or to a gateway's own."""
        return self.session.post(f"{origin or self.base_url}/v1/completions", json=body, timeout=60, **options)

    def streamed(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Send a streamed request and return its events; the last line must be the one that says that it is over."""
        answer = self.session.post(f"{self.base_url}/v1/{path}", json=body, timeout=self._patience, stream=True)
        assert answer.status_code == 200, answer.text
        lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
        assert lines[-1] == b"[DONE]"
        return [json.loads(line) for line in lines[:-1]]

    def gateway(self, **changes: Any) -> dict[str, Any]:
        """Make a gateway and return it when it is READY."""
        body = {
            "name": f"gw-{uuid.uuid4().hex[:8]}",
            "zones": [ZONE],
            "coreWeaveAuth": {},
            "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
            **changes,
        }
        made = self.ok("POST", "/gateways", body)["gateway"]["spec"]["id"]
        return self.until_status(f"/gateways/{made}", "gateway")

    def deployment(self, gateway_id: str, bucket: str, **changes: Any) -> dict[str, Any]:
        """Make a deployment with hot-loads and return it when it is READY."""
        made = self.ok("POST", "/deployments", deployment_body(gateway_id, bucket, **changes))
        return self.until_status(f"/deployments/{made['deployment']['spec']['id']}", "deployment")

    def until_status(self, path: str, key: str, status: str = "STATUS_READY") -> dict[str, Any]:
        """Poll until a resource has a status."""
        deadline = time.monotonic() + self._patience
        while True:
            found: dict[str, Any] = self.ok("GET", path)[key]
            if found["status"]["status"] == status:
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    def until_gone(self, path: str) -> None:
        """Poll until a resource is NOT_FOUND."""
        deadline = time.monotonic() + self._patience
        while self.call("GET", path).status_code != 404:
            assert time.monotonic() < deadline, f"{path} is still there"
            time.sleep(0.01)

    def hot_load(self, deployment_id: str, identity: str, previous: str | None = None, **changes: Any) -> str:
        """Create a hot-load and return its id."""
        body = {**hot_load_body(deployment_id, identity, previous), **changes}
        found: str = self.ok("POST", "/hotLoads", body)["hotLoad"]["spec"]["id"]
        return found

    def ended(self, hot_load_id: str) -> dict[str, Any]:
        """Poll until a hot-load has ended and return it."""
        deadline = time.monotonic() + self._patience
        while True:
            found: dict[str, Any] = self.ok("GET", f"/hotLoads/{hot_load_id}")["hotLoad"]
            if found["status"]["state"] not in ("HOT_LOAD_STATE_PENDING", "HOT_LOAD_STATE_IN_PROGRESS"):
                return found
            assert time.monotonic() < deadline, found
            time.sleep(0.01)

    def completed(self, deployment_id: str, identity: str, previous: str | None = None) -> dict[str, Any]:
        """Hot-load and return the hot-load, which must be COMPLETED."""
        found = self.ended(self.hot_load(deployment_id, identity, previous))
        assert found["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", found
        return found


def hot_load_body(deployment_id: str, identity: str, previous: str | None = None) -> dict[str, Any]:
    """Return the body of a create, full without `previous`, else a delta."""
    body: dict[str, Any] = {"deploymentId": deployment_id, "identity": identity, "type": "SNAPSHOT_TYPE_FULL"}
    if previous is not None:
        body["type"] = "SNAPSHOT_TYPE_INCREMENTAL"
        body["incrementalSnapshotMetadata"] = {
            "previousSnapshotIdentity": previous,
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
        }
    return body


def deployment_body(gateway_id: str, bucket: str, **changes: Any) -> dict[str, Any]:
    """Return the body of a create, with a name, a model name and a prefix of its own."""
    mark = uuid.uuid4().hex[:8]
    return {
        "name": f"dep-{mark}",
        "gatewayIds": [gateway_id],
        "runtime": {"engine": "dynamo-vllm"},
        "resources": {"instanceType": "gd-8xh100ib-i128", "gpuCount": 1},
        "model": {"name": f"model-{mark}", "bucket": bucket, "path": f"runs-{mark}/base"},
        "autoscaling": {"min": 1, "max": 1, "concurrency": 4},
        "traffic": {"weight": 100},
        "hotLoad": {"bucket": bucket, "pathPrefix": f"runs-{mark}", "transitionMode": "TRANSITION_MODE_ASYNC"},
        **changes,
    }
