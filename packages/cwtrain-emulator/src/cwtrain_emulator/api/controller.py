"""What makes states come true: resources become READY or go, replicas run, hot-loads end.

Everything it decides it reads from the store and from the replicas' states, so after a restart it goes on where the
last process stopped. It runs on the event loop; `wake` has it look again.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from cwtrain_emulator.replica.pool import Pool, Replica
from cwtrain_emulator.snapshots import INITIAL, ChainEntry
from cwtrain_emulator.store import ACTIVE, HotLoadRow, ReplicaRow, Resource, Store, with_state

__all__ = ["Controller", "Listeners", "condition", "replica_count", "replica_names"]

_log = logging.getLogger("cwtrain_emulator.controller")

_RESTORE = "restore"
_MAX_DEATHS = 3
_IDLE_SECONDS = 1.0
_RETRY_SECONDS = 2.0


class Listeners(Protocol):
    """Opens and closes the ports of gateways."""

    def open(self, gateway_id: str, preferred_port: int | None) -> int:
        """Listen for a gateway, if that is not done already, and return the port."""

    def close(self, gateway_id: str) -> None:
        """Listen for it no more."""


class Controller:
    """The loop. `clock` gives seconds since the epoch."""

    def __init__(
        self,
        store: Store,
        *,
        replicas: int,
        zones_of: Callable[[Resource], list[str]],
        clock: Callable[[], float],
        root: Path,
    ) -> None:
        self._store = store
        self._replicas = replicas
        self._zones_of = zones_of
        self._clock = clock
        self._root = root
        self._wake = asyncio.Event()
        self._deaths: Counter[tuple[str, str]] = Counter()
        self._retry_at: dict[str, float] = {}
        self._removals: dict[str, tuple[str, asyncio.Task[None]]] = {}
        self.pool: Pool
        self.listeners: Listeners

    def start(self, pool: Pool, listeners: Listeners) -> None:
        """Take up what the store says: listeners, replicas, hot-loads that have not ended."""
        self.pool, self.listeners = pool, listeners
        self._sweep_files()
        for row in self._store.active_hot_loads():
            deployment = self._store.resource("deployment", row.deployment_id)
            if deployment is None or deployment.status == "DELETING":
                self.fail_hot_load(row, "DeploymentDeleted", "the deployment was deleted")
                continue
            self._forget_progress(row, replica_names(deployment, self._replicas))
        for deployment in self._store.resources("deployment"):
            latest = self._store.latest_hot_load(deployment.id)
            if latest is not None and latest.state == "COMPLETED":
                self._forget_progress(latest, replica_names(deployment, self._replicas))
        self.reconcile()

    def _forget_progress(self, hot_load: HotLoadRow, names: list[str]) -> None:
        """Note that no replica is where it was in a hot-load: all of them are new processes now, or gone."""
        now = self._clock()
        known = self._store.replicas(hot_load.id)
        self._store.drop_replicas(hot_load.id, {row.name for row in known} - set(names))
        for row in known:
            if row.name in names:
                began = ReplicaRow(hot_load.id, row.name, row.zone, "PENDING_UPDATE", "", now, now)
                self._store.put_replica(began)

    async def run(self) -> None:
        """Reconcile for ever."""
        while True:
            due = [row.due_at for row in self._all_resources() if row.due_at is not None]
            pause = min([_IDLE_SECONDS, *(max(0.005, moment - self._clock()) for moment in due)])
            try:
                await asyncio.wait_for(self._wake.wait(), pause)
            except TimeoutError:
                pass
            self._wake.clear()
            try:
                self.reconcile()
            except Exception:  # noqa: BLE001 - one bad turn must not end the loop
                _log.exception("reconciling failed")

    def wake(self) -> None:
        """Have the loop look at everything again."""
        self._wake.set()

    def reconcile(self) -> None:
        """Bring everything one step closer to what the store says."""
        now = self._clock()
        for gateway in self._store.resources("gateway"):
            self._reconcile_gateway(gateway, now)
        for claim in self._store.resources("capacityClaim"):
            self._settle(claim, now)
        for deployment in self._store.resources("deployment"):
            self._reconcile_deployment(deployment, now)

    # Resources

    def _all_resources(self) -> Iterable[Resource]:
        for kind in ("gateway", "deployment", "capacityClaim"):
            yield from self._store.resources(kind)

    def _settle(self, resource: Resource, now: float) -> bool:
        """End a state whose time is over; return False when the resource has gone."""
        if resource.due_at is None or resource.due_at > now:
            return True
        if resource.status == "DELETING":
            self._store.remove_resource(resource.kind, resource.id)
            return False
        self._store.update_resource(replace(resource, status="READY", due_at=None, updated_at=now, conditions=[]))
        return True

    def _reconcile_gateway(self, gateway: Resource, now: float) -> None:
        if gateway.status == "DELETING":
            self.listeners.close(gateway.id)
        else:
            port = self.listeners.open(gateway.id, gateway.extra.get("port"))
            if port != gateway.extra.get("port"):
                gateway = replace(gateway, extra={**gateway.extra, "port": port})
                self._store.update_resource(gateway)
        self._settle(gateway, now)

    def _reconcile_deployment(self, deployment: Resource, now: float) -> None:
        if deployment.status == "DELETING":
            if self._remove_replicas(deployment.id, keep_files=False):
                self._settle(deployment, now)
            return
        if deployment.spec.get("disabled"):
            self._remove_replicas(deployment.id, keep_files=True)
            self._settle(deployment, now)
            return
        zone = (self._zones_of(deployment) or [""])[0]
        wanted = replica_names(deployment, self._replicas)
        self._remove_replicas(deployment.id, keep_files=False, but=wanted)
        for ordinal, name in enumerate(wanted):
            if self.pool.get(name) is None and name not in self._removals:
                self.pool.add(name, zone=zone, deployment_id=deployment.id, ordinal=ordinal)
        self._retry_restores(deployment, now)
        self._settle_deployment(deployment, now)

    def _retry_restores(self, deployment: Resource, now: float) -> None:
        """Try again what a replica could not restore, a while later: the bucket may have been away."""
        if self._store.active_hot_load(deployment.id) is not None:
            return
        for replica in self.pool.of_deployment(deployment.id):
            failed = replica.connected and replica.load_id == _RESTORE and replica.state == "ERROR"
            if failed and self._retry_at.get(replica.name, 0.0) <= now:
                self.restore(replica)

    def _settle_deployment(self, deployment: Resource, now: float) -> None:
        """A deployment is READY when its replicas are up, and in ERROR while its base weights cannot be loaded."""
        if deployment.status not in ("CREATING", "UPDATING", "ERROR"):
            return
        if deployment.due_at is not None and deployment.due_at > now:
            return
        replicas = self.pool.of_deployment(deployment.id)
        if len(replicas) < replica_count(deployment, self._replicas) or not all(
            replica.restored for replica in replicas
        ):
            if deployment.due_at is not None:
                # Nothing is due any more: the replicas' own news wake the loop.
                self._store.update_resource(replace(deployment, due_at=None))
            return
        errors = [f"{replica.name}: {replica.error}" for replica in replicas if replica.state == "ERROR"]
        if errors and not self._store.latest_completed(deployment.id):
            if deployment.status != "ERROR":
                problem = condition("Ready", False, "BaseWeightsFailed", "; ".join(errors), now)
                changed = replace(deployment, status="ERROR", conditions=[problem], due_at=None, updated_at=now)
                self._store.update_resource(changed)
            return
        self._store.update_resource(replace(deployment, status="READY", conditions=[], due_at=None, updated_at=now))

    def _remove_replicas(self, deployment_id: str, *, keep_files: bool, but: Sequence[str] = ()) -> bool:
        """End a deployment's replicas, all but some, in the background; return True when none is left to end."""
        for replica in self.pool.of_deployment(deployment_id):
            if replica.name not in self._removals and replica.name not in but:
                task = asyncio.create_task(self.pool.remove(replica.name, keep_files=keep_files))
                self._removals[replica.name] = (deployment_id, task)
                task.add_done_callback(partial(self._removed, replica.name))
        return all(owner != deployment_id for owner, _ in self._removals.values())

    def _removed(self, name: str, _task: asyncio.Task[None]) -> None:
        self._removals.pop(name, None)
        self.wake()

    def _sweep_files(self) -> None:
        """Delete the files of replicas whose deployment is gone."""
        known = {deployment.id for deployment in self._store.resources("deployment")}
        if self._root.is_dir():
            for directory in self._root.iterdir():
                if directory.name not in known:
                    shutil.rmtree(directory, ignore_errors=True)

    def scale(self, deployment: Resource, count: int) -> None:
        """Give a deployment another number of replicas. A hot-load that runs waits for those that come."""
        changed = replace(deployment, extra={**deployment.extra, "replicas": count}, updated_at=self._clock())
        self._store.update_resource(changed)
        names = replica_names(changed, self._replicas)
        latest = self._store.latest_hot_load(deployment.id)
        if latest is not None:
            known = {row.name for row in self._store.replicas(latest.id)}
            self._store.drop_replicas(latest.id, known - set(names))
            if latest.state in ACTIVE:
                now = self._clock()
                zone = (self._zones_of(deployment) or [""])[0]
                for name in names:
                    if name not in known:
                        self._store.put_replica(ReplicaRow(latest.id, name, zone, "PENDING_UPDATE", "", now, now))
                self._store.update_hot_load(self._outcome(latest, self._store.replicas(latest.id), now))
        self.reconcile()

    def autoscaling_changed(self, deployment_id: str, old: Mapping[str, Any]) -> None:
        """Keep the number of replicas within bounds that an update has moved."""
        deployment = self._store.resource("deployment", deployment_id)
        if deployment is None:
            return
        new = deployment.spec["autoscaling"]
        if (new["min"], new["max"]) != (old["min"], old["max"]):
            count = replica_count(deployment, self._replicas)
            self.scale(deployment, min(max(count, new["min"]), new["max"]))

    async def reset(self) -> None:
        """Forget everything: resources, hot-loads, replicas and what they have on disk."""
        gateways = self._store.resources("gateway")
        self._store.clear()
        self._deaths.clear()
        self._retry_at.clear()
        for gateway in gateways:
            self.listeners.close(gateway.id)
        removals = [task for _, task in self._removals.values()]
        await asyncio.gather(*removals, *(self.pool.remove(name, keep_files=False) for name in self.pool.names()))
        self._sweep_files()

    # Hot-loads

    def begin_hot_load(self, row: HotLoadRow) -> None:
        """Tell the replicas of a hot-load that was just accepted."""
        for replica in self.pool.of_deployment(row.deployment_id):
            if replica.restored:
                self._dispatch(replica, row)

    def fail_hot_load(self, row: HotLoadRow, reason: str, message: str) -> None:
        """End a hot-load as FAILED."""
        now = self._clock()
        problem = condition("Ready", False, reason, message, now)
        self._store.update_hot_load(with_state(row, "FAILED", now=now, conditions=[problem]))

    def deployment_updated(self, deployment_id: str) -> None:
        """Have a changed deployment's replicas load what they should serve now; usually that is what they serve."""
        for replica in self.pool.of_deployment(deployment_id):
            if replica.restored:
                replica.restored = False
                self.restore(replica)

    def restore(self, replica: Replica) -> None:
        """Tell a replica to serve the deployment's last COMPLETED identity, or its base weights."""
        deployment = self._store.resource("deployment", replica.deployment_id)
        if deployment is None:
            return
        self._retry_at[replica.name] = self._clock() + _RETRY_SECONDS
        self.pool.load(replica, _RESTORE, self._restore_chain(deployment), hot_load=False)

    def _restore_chain(self, deployment: Resource) -> list[ChainEntry]:
        completed = self._store.latest_completed(deployment.id)
        if completed is not None:
            return [ChainEntry.from_json(entry) for entry in completed.chain]
        model = deployment.spec["model"]
        path = model.get("path", "").strip("/")
        return [ChainEntry(INITIAL, "FULL", bucket=model["bucket"], prefix=f"{path}/" if path else "")]

    def _dispatch(self, replica: Replica, row: HotLoadRow) -> None:
        if self._deaths[row.id, replica.name] >= _MAX_DEATHS:
            self._note(row, replica, "ERROR", f"the replica died {_MAX_DEATHS} times while it loaded {row.identity}")
            return
        chain = [ChainEntry.from_json(entry) for entry in row.chain]
        reset = row.spec.get("promptCachePolicy") == "PROMPT_CACHE_POLICY_RESET_ALL"
        self.pool.load(replica, row.id, chain, hot_load=True, reset_cache=reset)

    def replica_changed(self, replica: Replica) -> None:
        """Take note of a replica's news."""
        if replica.name in self._removals or self.pool.get(replica.name) is not replica:
            return
        active = self._store.active_hot_load(replica.deployment_id)
        if replica.load_id == _RESTORE and replica.state in ("READY", "ERROR"):
            replica.restored = True
            if active is not None:
                self._note(active, replica, "PENDING_UPDATE")
                self._dispatch(replica, active)
            else:
                self._note_served(replica)
        elif active is not None and not replica.connected:
            row = self._row(active, replica)
            if row.state == "UPDATING":
                self._deaths[active.id, replica.name] += 1
            self._note(active, replica, "PENDING_UPDATE")
        elif active is not None and replica.load_id == active.id:
            self._note(active, replica, replica.state, replica.error)
        elif active is None:
            self._note_served(replica)
        self.wake()

    def _note_served(self, replica: Replica) -> None:
        """Show a restarted replica in the newest hot-load's list, when that one is what the deployment serves."""
        latest = self._store.latest_hot_load(replica.deployment_id)
        if latest is None or latest.state != "COMPLETED":
            return
        state = {"STARTING": "PENDING_UPDATE"}.get(replica.state, replica.state)
        row = self._row(latest, replica)
        if (row.state, row.identity) != (state, replica.identity):
            now = self._clock()
            changed = replace(row, state=state, identity=replica.identity, error=replica.error, updated_at=now)
            self._store.put_replica(replace(changed, transitioned_at=now))

    def _row(self, hot_load: HotLoadRow, replica: Replica) -> ReplicaRow:
        for row in self._store.replicas(hot_load.id):
            if row.name == replica.name:
                return row
        now = self._clock()
        return ReplicaRow(hot_load.id, replica.name, replica.zone, "PENDING_UPDATE", replica.identity, now, now)

    def _note(self, hot_load: HotLoadRow, replica: Replica, state: str, error: str = "") -> None:
        """Write a replica's state in a hot-load, and the hot-load's own where that follows from it."""
        now = self._clock()
        row = replace(self._row(hot_load, replica), identity=replica.identity, error=error, updated_at=now)
        if row.state != state:
            row = replace(row, state=state, transitioned_at=now)
        if state == "PENDING_UPDATE":
            row = replace(row, started_at=None, finished_at=None)
        elif row.started_at is None:
            row = replace(row, started_at=now)
        if state in ("READY", "ERROR"):
            row = replace(row, finished_at=now)
        others = [other for other in self._store.replicas(hot_load.id) if other.name != row.name]
        self._store.put_replica(row, self._outcome(hot_load, [*others, row], now))

    def _outcome(self, hot_load: HotLoadRow, rows: list[ReplicaRow], now: float) -> HotLoadRow:
        """Return the hot-load as its replicas' states have it now."""
        deployment = self._store.resource("deployment", hot_load.deployment_id)
        wanted = self._replicas if deployment is None else replica_count(deployment, self._replicas)
        failed = [row for row in rows if row.state == "ERROR"]
        caught_up = [row for row in rows if row.state == "READY" and row.identity == hot_load.identity]
        if len(caught_up) == len(rows) >= wanted:
            done = condition("Ready", True, "AsExpected", "", now)
            return with_state(hot_load, "COMPLETED", now=now, conditions=[done])
        if failed and len(failed) + len(caught_up) == len(rows) >= wanted:
            reasons = "; ".join(f"{row.name}: {row.error}" for row in failed)
            problem = condition("Ready", False, "ReplicaFailed", reasons, now)
            return with_state(hot_load, "FAILED", now=now, conditions=[problem])
        if any(row.state != "PENDING_UPDATE" for row in rows):
            return with_state(hot_load, "IN_PROGRESS", now=now)
        return hot_load


def condition(kind: str, holds: bool, reason: str, message: str, now: float) -> dict[str, Any]:
    """Return a condition as it is stored; `lastUpdateTime` in seconds."""
    status = "STATUS_TRUE" if holds else "STATUS_FALSE"
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastUpdateTime": now}


def replica_count(deployment: Resource, default: int) -> int:
    """Return how many replicas a deployment is to have: what it was scaled to, else the emulator's number."""
    return int(deployment.extra.get("replicas", default))


def replica_names(deployment: Resource, default: int) -> list[str]:
    """Return the names of a deployment's replicas, in order; unique, since names of deployments are."""
    return [f"{deployment.name}-{ordinal:02d}" for ordinal in range(replica_count(deployment, default))]
