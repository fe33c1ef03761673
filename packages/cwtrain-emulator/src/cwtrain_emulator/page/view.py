"""What the page shows, as one JSON object: bounded, without secrets, cheap enough to be asked for every second."""

from __future__ import annotations

from dataclasses import asdict
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cwtrain_emulator.api.service import Service
from cwtrain_emulator.page.activity import KEPT_SECONDS, Activity
from cwtrain_emulator.replica.pool import Replica
from cwtrain_emulator.store import ACTIVE, HotLoadRow, ReplicaRow, Resource

__all__ = ["PageView"]

_DEPLOYMENTS = 24
_HOT_LOADS = 60
_REPLICAS_OF_HOT_LOAD = 8
_LONGEST_REASON = 800


class PageView:
    """Makes the object. Keeps what it said of ended hot-loads, whose chains are long to read."""

    def __init__(self, service: Service, activity: Activity) -> None:
        self._service = service
        self._activity = activity
        self._ended: dict[str, dict[str, Any]] = {}

    def now(self) -> dict[str, Any]:
        """Return everything that the page shows. Times are seconds since the epoch."""
        service, activity = self._service, self._activity
        deployments = service.store.resources("deployment")
        names = {row.id: row.name for row in deployments}
        hot_loads = self._hot_loads()
        completed: dict[str, dict[str, Any]] = {}
        for hot_load in hot_loads:
            if hot_load["state"] == "COMPLETED":
                completed.setdefault(hot_load["deployment_id"], hot_load)
        settings = service.settings
        return {
            "now": service.clock(),
            "emulator": {
                "version": _version(),
                "base_url": service.base_url,
                "s3_endpoint": service.s3_endpoint,
                "bucket": settings.bucket,
                "replicas": settings.replicas,
                "seed": settings.seed,
                "started_at": activity.started_at,
            },
            "deployments": [self._deployment(row, completed.get(row.id)) for row in deployments[-_DEPLOYMENTS:]],
            "more_deployments": max(0, len(deployments) - _DEPLOYMENTS),
            "hot_loads": [{**one, "deployment": names.get(one["deployment_id"], "")} for one in hot_loads],
            "requests": {"kept_seconds": KEPT_SECONDS, **activity.counts()},
            "problems": [asdict(problem) for problem in activity.problems()],
        }

    def _hot_loads(self) -> list[dict[str, Any]]:
        """Return the newest hot-loads, newest first."""
        store = self._service.store
        shown = []
        for hot_load_id in store.hot_load_ids(limit=_HOT_LOADS):
            entry = self._ended.get(hot_load_id)
            if entry is None:
                row = store.hot_load(hot_load_id)
                assert row is not None
                entry = _hot_load(row, store.replicas(row.id, limit=_REPLICAS_OF_HOT_LOAD))
            shown.append(entry)
        self._ended = {entry["id"]: entry for entry in shown if entry["state"] not in ACTIVE}
        return shown

    def _deployment(self, row: Resource, completed: dict[str, Any] | None) -> dict[str, Any]:
        service = self._service
        if completed is None:
            # It may be further back than the hot-loads that are shown.
            found = service.store.latest_completed(row.id)
            completed = None if found is None else _hot_load(found, [])
        gateways = [service.store.resource("gateway", gateway_id) for gateway_id in row.spec["gatewayIds"]]
        replicas = [_replica(replica) for replica in service.pool.of_deployment(row.id)]
        status = "DISABLED" if row.spec.get("disabled") else row.status
        broken = [replica for replica in replicas if replica["state"] == "ERROR"]
        if status == "READY":
            # The service's own word stays READY: what it serves with is another question, and the page's.
            status = "READY" if not broken else "ERROR" if len(broken) == len(replicas) else "DEGRADED"
        reasons = dict.fromkeys(replica["error"] for replica in broken if replica["error"])
        return {
            "id": row.id,
            "name": row.name,
            "model": row.spec["model"]["name"],
            "status": status,
            "reason": "; ".join(reasons)[:_LONGEST_REASON] or _reason(row.conditions),
            "hot_loads": "hotLoad" in row.spec,
            "identity": completed["identity"] if completed else "",
            "full_identity": completed["full"] if completed else "",
            "deltas": completed["deltas"] if completed else 0,
            "endpoints": [url for gateway in gateways if gateway is not None for url in service.endpoints(gateway)],
            "replicas": replicas,
        }


def _replica(replica: Replica) -> dict[str, Any]:
    return {
        "name": replica.name,
        "zone": replica.zone,
        "state": replica.state,
        "identity": replica.identity,
        "error": replica.error[:_LONGEST_REASON],
        "pid": replica.pid,
    }


def _hot_load(row: HotLoadRow, replicas: list[ReplicaRow]) -> dict[str, Any]:
    return {
        "id": row.id,
        "deployment_id": row.deployment_id,
        "identity": row.identity,
        "type": "FULL" if len(row.chain) == 1 else "DELTA",
        "previous": row.chain[-2]["identity"] if len(row.chain) > 1 else "",
        "full": row.chain[0]["identity"],
        "deltas": len(row.chain) - 1,
        "state": row.state,
        "created_at": row.created_at,
        "finished_at": row.finished_at,
        "reason": _reason(row.conditions),
        "replicas": [
            {"name": one.name, "state": one.state, "started_at": one.started_at, "finished_at": one.finished_at}
            for one in replicas
        ],
    }


def _reason(conditions: list[dict[str, Any]]) -> str:
    """Return why something is not as it should be."""
    return "; ".join(one["message"] for one in conditions if one.get("message"))[:_LONGEST_REASON]


@cache
def _version() -> str:
    try:
        return version("cwtrain-emulator")
    except PackageNotFoundError:
        return ""
