"""Which deployment, and which of its replicas, serves a request."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence

from cwtrain_emulator.gateway.errors import GatewayError
from cwtrain_emulator.replica.pool import Pool, Replica
from cwtrain_emulator.store import Resource, Store

__all__ = ["Router", "max_model_len"]


class Router:
    """Chooses by model name, then by traffic weight, then in turn, or by session where there is one."""

    def __init__(self, store: Store, pool: Pool) -> None:
        self._store = store
        self._pool = pool
        self._turns: Counter[str] = Counter()
        self._shares: Counter[str] = Counter()

    def reset(self) -> None:
        """Forget whose turn it is."""
        self._turns.clear()
        self._shares.clear()

    def models(self, gateway_id: str | None) -> list[Resource]:
        """Return the deployments that a gateway (or any) serves."""
        return [
            deployment
            for deployment in self._store.resources("deployment")
            if (gateway_id is None or gateway_id in deployment.spec["gatewayIds"])
            and deployment.status in ("READY", "UPDATING", "ERROR")
            and not deployment.spec.get("disabled")
        ]

    def deployment(self, gateway_id: str | None, model: str) -> Resource:
        """Return the deployment that serves `model`; those of one name share by weight. Raises GatewayError (404)."""
        found = [row for row in self.models(gateway_id) if row.spec["model"]["name"] == model]
        if not found:
            raise GatewayError(404, f"The model `{model[:200]}` does not exist.", param="model")
        if len(found) == 1:
            return found[0]
        weights = {row.id: row.spec["traffic"].get("weight", 0) for row in found}
        if not any(weights.values()):
            weights = dict.fromkeys(weights, 1)
        candidates = [row for row in found if weights[row.id] > 0]
        # Whoever is furthest behind its share is next.
        chosen = min(candidates, key=lambda row: (self._shares[row.id] + 1) / weights[row.id])
        self._shares[chosen.id] += 1
        return chosen

    def context_length(self, deployment: Resource) -> int | None:
        """Return how many tokens a prompt and its answer may have; None while nothing is served that could say so."""
        lengths = [replica.max_length for replica in self._pool.of_deployment(deployment.id) if replica.max_length]
        told = max_model_len(deployment)
        return min([*lengths, *([told] if told else [])], default=None) if lengths else None

    def replica(self, deployment: Resource, session: str | None) -> Replica:
        """Return the replica for a request; raises GatewayError (503) when none has weights."""
        replicas = self._pool.of_deployment(deployment.id)
        serving = [replica for replica in replicas if replica.serving]
        if not serving:
            waiting = any(replica.restored for replica in replicas)
            reason = "no weights yet: the first hot-load has not been completed" if waiting else "no replica is ready"
            raise GatewayError(503, f"model `{deployment.spec['model']['name']}`: {reason}")
        if session:
            return _nearest(serving, session)
        turn = self._turns[deployment.id]
        self._turns[deployment.id] += 1
        return serving[turn % len(serving)]


def max_model_len(deployment: Resource) -> int | None:
    """Return the engine option of that name; None where it is not set."""
    longest = deployment.spec["runtime"].get("engineConfig", {}).get("max-model-len")
    return int(longest) if longest else None


def _nearest(replicas: Sequence[Replica], session: str) -> Replica:
    """Return the replica of a session: the same one while it serves; when one is lost, only its sessions move."""
    return max(replicas, key=lambda replica: hashlib.sha256(f"{session}\0{replica.name}".encode()).digest())
