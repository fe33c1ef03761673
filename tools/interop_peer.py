"""The side of `tools/interop.py` that runs in the published client's own environment, on its documented names alone.

Reads one JSON object `{"call": ..., ...}` a line and answers each with one line, `{"value": ...}` or `{"error": ...}`.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cwtrain
from cwtrain import HotLoader, InferenceClient
from cwtrain.hotload.delta import write_delta, write_full_snapshot
from cwtrain.infra import HotLoadState, SnapshotType, lifecycle

PAUSE = 0.2
PATIENCE = 60.0


class Peer:
    """Each method is a call; arguments and results are JSON."""

    def __init__(self) -> None:
        self._client = InferenceClient(base_url=os.environ["COREWEAVE_API_URL"])

    def version(self) -> str:
        return cwtrain.__version__

    def create_gateway(self, spec: dict[str, Any]) -> dict[str, Any]:
        made = self._client.create_gateway(spec)
        ready = lifecycle.wait_for_gateway(self._client, made.id, timeout=PATIENCE, poll_interval=PAUSE)
        return {
            "id": ready.id,
            "status": ready.status.name,
            "endpoints": list(ready.endpoints),
            "zones": list(ready.zones),
        }

    def gateways(self) -> list[str]:
        return [gateway.id for gateway in self._client.list_gateways()]

    def delete_gateway(self, gateway: str, timeout: float = PATIENCE) -> Any:
        return lifecycle.delete_gateway(self._client, gateway, timeout=timeout, poll_interval=PAUSE)

    def create_deployment(self, spec: dict[str, Any]) -> dict[str, Any]:
        made = self._client.create_deployment(spec)
        ready = lifecycle.wait_for_deployment(self._client, made.id, timeout=PATIENCE, poll_interval=PAUSE)
        return {"id": ready.id, "status": ready.status.name}

    def delete_deployment(self, deployment: str) -> Any:
        return lifecycle.delete_deployment(self._client, deployment, timeout=PATIENCE, poll_interval=PAUSE)

    def deployment(self, deployment: str) -> dict[str, Any]:
        found = self._client.get_deployment(deployment)
        urls = lifecycle.endpoints(self._client, found)
        return {"raw": dict(found.raw), "endpoints": list(urls), "rollouts": lifecycle.rollout_base_url(urls[0])}

    def deployments(self) -> list[str]:
        return [deployment.id for deployment in self._client.list_deployments()]

    def gateway_parameters(self) -> Any:
        return self._client.get_gateway_parameters()

    def create_hot_load(self, deployment: str, identity: str, hot_load: str) -> str:
        made = self._client.create_hot_load(deployment, identity, snapshot_type=SnapshotType.FULL, hot_load_id=hot_load)
        return made.id

    def state(self, hot_load: str) -> str:
        return HotLoadState(self._client.get_hot_load(hot_load).status.state).name

    def hot_loads(self, deployment: str) -> list[str]:
        return [hot_load.spec.id for hot_load in self._client.list_hot_loads(deployment)]

    def replicas(self, hot_load: str) -> list[dict[str, str]]:
        return [
            {"name": replica.name, "state": replica.state.name, "identity": replica.current_snapshot_identity}
            for replica in self._client.list_hot_load_replicas(hot_load)
        ]

    def cancel(self, hot_load: str) -> None:
        self._client.cancel_hot_load(hot_load)

    def trigger(self, deployment: str, identity: str) -> dict[str, str]:
        """Ask for a full one, wait for it to end, and say how the first one before it stood when it was accepted."""
        loader = self._loader(deployment)
        before = self.hot_loads(deployment)[0]
        made = loader.trigger(identity)
        return {"id": made.spec.id, "before": self.state(before), "state": loader.wait(made.spec.id).state.name}

    def publish(self, deployment: str, checkpoint: str, identity: str, previous: str | None = None) -> dict[str, Any]:
        seen: list[str] = []
        done = self._loader(deployment).publish(
            Path(checkpoint),
            identity,
            previous_identity=previous,
            on_progress=lambda event: seen.append(HotLoadState(event.hot_load.status.state).name),
        )
        return {"id": done.id, "state": done.state.name, "progress": sorted(set(seen))}

    def rollback(self, deployment: str, identity: str) -> dict[str, str]:
        done = self._loader(deployment).rollback(identity)
        return {"id": done.id, "state": done.state.name}

    def write_delta(self, base: str, new: str, out: str, version: str, base_version: str) -> None:
        write_delta(Path(base), Path(new), Path(out), version=version, base_version=base_version)

    def write_full_snapshot(self, source: str, out: str) -> None:
        write_full_snapshot(Path(source), Path(out))

    def _loader(self, deployment: str) -> HotLoader:
        return HotLoader(self._client, deployment_id=deployment, poll_interval=PAUSE, timeout=PATIENCE)


def answer(peer: Peer, line: str) -> dict[str, Any]:
    """Make one call and return what goes out."""
    asked = json.loads(line)
    call: Callable[..., Any] = getattr(peer, asked.pop("call"))
    try:
        return {"value": call(**asked)}
    except Exception as error:  # noqa: BLE001 - becomes the answer
        classes = [kind.__name__ for kind in type(error).__mro__ if kind.__name__ not in ("BaseException", "object")]
        return {"error": {"classes": classes, "message": str(error)}}


if __name__ == "__main__":
    session = Peer()
    for asked_line in sys.stdin:
        print(json.dumps(answer(session, asked_line)), flush=True)
