"""Hot-loads as operations: asked for once, waited for to the end, explained when they end badly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.errors import (
    APIError,
    HotLoadCanceledError,
    HotLoadError,
    HotLoadFailedError,
    HotLoadInProgressError,
    HotLoadTimeoutError,
    NotFoundError,
    TransportError,
    WaitTimeoutError,
)
from cwtrain.events import HotLoadProgressed, HotLoadRequested
from cwtrain.hotload import chain as chains
from cwtrain.hotload.progress import OnProgress, ProgressEvent
from cwtrain.hotload.work import Work
from cwtrain.infra._poll import is_outage, poll
from cwtrain.infra.lifecycle import wait_for_deployment
from cwtrain.models.service import HotLoad, HotLoadReplica, HotLoadState, ResourceStatus

if TYPE_CHECKING:
    from cwtrain.infra.client import InferenceClient
    from cwtrain.plugins import Plugins

__all__ = ["HotLoadOperations", "ServedReport", "warn_about_stragglers"]

_log = logging.getLogger("cwtrain.hotload")


@attrs.frozen(kw_only=True)
class ServedReport:
    """Which replicas serve an identity; ``served`` is True only when every one does and there is at least one."""

    identity: str
    hot_load_id: str
    served: bool
    replicas: tuple[HotLoadReplica, ...]

    @property
    def behind(self) -> tuple[HotLoadReplica, ...]:
        """The replicas that do not serve it."""
        return tuple(replica for replica in self.replicas if not replica.caught_up(self.identity))


@attrs.frozen(kw_only=True)
class HotLoadOperations:
    """The hot-loads of one deployment: ask for one, follow it, say what is served. Times are seconds."""

    client: InferenceClient
    deployment_id: str
    plugins: Plugins
    poll_interval: float
    run_id: str | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def run(self, work: Work, *, wait: bool, timeout: float, on_progress: OnProgress | None) -> HotLoad:
        """Have ``work`` done by a hot-load: ours that is there already, or a new one when the deployment is free."""
        started = self.clock()
        deadline = started + timeout
        hot_load = self._request(work, deadline=deadline, limit=timeout, on_progress=on_progress)
        accepted = self.clock() - started
        _log.info(
            "hot-load %s: %s %s on %s, prompt cache policy %s",
            hot_load.id,
            work.type,
            work.identity,
            work.previous_identity or "nothing",
            work.policy,
        )
        self.plugins.notify(
            HotLoadRequested(
                hot_load_id=hot_load.id,
                identity=work.identity,
                previous_identity=work.previous_identity,
                run_id=self.run_id,
            )
        )
        if wait:
            hot_load = self.follow(hot_load.id, deadline=deadline, limit=timeout, on_progress=on_progress)
        return attrs.evolve(hot_load, timings={**hot_load.timings, "accept_seconds": accepted})

    def _request(self, work: Work, *, deadline: float, limit: float, on_progress: OnProgress | None) -> HotLoad:
        hot_loads = list(self.client.list_hot_loads(self.deployment_id))
        if (done := self.done(work, hot_loads)) is not None:
            return done
        # Made once: whatever happens to the answers below, this call asks under this id and no other.
        hot_load_id = chains.hot_load_id(
            self.deployment_id, work.identity, work.type, work.previous_identity, work.policy, hot_loads
        )
        unfinished = chains.active(hot_loads)
        while True:
            if unfinished is not None:
                if unfinished.id == hot_load_id or work.same_as(unfinished):
                    return unfinished
                self.wait_for_other(unfinished, deadline=deadline, limit=limit, on_progress=on_progress)
            try:
                return self.client.create_hot_load(
                    self.deployment_id,
                    work.identity,
                    snapshot_type=work.type,
                    incremental=work.metadata,
                    prompt_cache_policy=work.policy,
                    hot_load_id=hot_load_id,
                )
            except HotLoadInProgressError as error:
                if self.clock() >= deadline:
                    raise self._timed_out(work, hot_load_id, limit, str(error)) from error
                unfinished = chains.active(self.client.list_hot_loads(self.deployment_id))
            except (TransportError, APIError) as error:
                # Whether the service took it is unknown. The id makes asking again safe.
                if not is_outage(error):
                    raise
                if self.clock() + self.poll_interval >= deadline:
                    raise self._timed_out(work, hot_load_id, limit, str(error)) from error
                unfinished = None
            if unfinished is None:
                self.sleep(min(self.poll_interval, max(0.0, deadline - self.clock())))

    def _timed_out(self, work: Work, hot_load_id: str, limit: float, seen: str) -> HotLoadTimeoutError:
        return HotLoadTimeoutError(
            f"hot-load {hot_load_id} of {work.identity} was not accepted within {limit:g} s; last: {seen}",
            last_seen=seen,
            hint=f"the service may have taken it: look with `cwtrain hotload status {hot_load_id}`, or run the same "
            "command again, which goes on with it",
        )

    def done(self, work: Work, hot_loads: Sequence[HotLoad]) -> HotLoad | None:
        """Return the hot-load that has done ``work`` already, where every replica still serves it."""
        newest = hot_loads[0] if hot_loads else None
        if newest is None or newest.state is not HotLoadState.COMPLETED or not work.same_as(newest):
            return None
        return newest if self.served(newest).served else None

    def served(self, hot_load: HotLoad) -> ServedReport:
        """Ask the replicas of ``hot_load`` what each serves."""
        replicas = tuple(self.client.list_hot_load_replicas(hot_load.id))
        return ServedReport(
            identity=hot_load.identity,
            hot_load_id=hot_load.id,
            served=bool(replicas) and all(replica.caught_up(hot_load.identity) for replica in replicas),
            replicas=replicas,
        )

    def follow(self, hot_load_id: str, *, deadline: float, limit: float, on_progress: OnProgress | None) -> HotLoad:
        """Return the hot-load once it is COMPLETED; raise what became of it otherwise. See ``HotLoader.wait``."""
        began = self.clock()
        try:
            hot_load, replicas, firsts = self._poll(
                hot_load_id, deadline=deadline, on_progress=on_progress, describe=f"hot-load {hot_load_id}"
            )
        except WaitTimeoutError as error:
            raise HotLoadTimeoutError(
                f"hot-load {hot_load_id} did not finish within {limit:g} s and goes on; last: {error.last_seen}",
                last_seen=error.last_seen,
                hint=f"follow it with `cwtrain hotload wait {hot_load_id}`; the next publish waits for it",
            ) from error
        if hot_load.state is HotLoadState.COMPLETED:
            warn_about_stragglers(hot_load, replicas)
            timings = {"last_replica_seconds": self.clock() - began, **firsts}
            return attrs.evolve(hot_load, timings=timings)
        raise _ended_badly(hot_load, replicas)

    def wait_for_other(self, other: HotLoad, *, deadline: float, limit: float, on_progress: OnProgress | None) -> None:
        """Return once ``other``, a hot-load that stands in the way, has ended, well or not."""
        _log.warning("waiting for hot-load %s of %s, which is %s", other.id, other.identity, other.state)
        try:
            self._poll(
                other.id, deadline=deadline, on_progress=on_progress, waiting_on=True, describe=f"hot-load {other.id}"
            )
        except WaitTimeoutError as error:
            raise HotLoadTimeoutError(
                f"hot-load {other.id} of {other.identity} was still unfinished after {limit:g} s, so ours was not "
                f"asked for; last: {error.last_seen}",
                hot_load=other,
                last_seen=error.last_seen,
                hint=f"follow it with `cwtrain hotload wait {other.id}`, then run the same command again",
            ) from error

    def _poll(
        self,
        hot_load_id: str,
        *,
        deadline: float,
        on_progress: OnProgress | None,
        describe: str,
        waiting_on: bool = False,
    ) -> tuple[HotLoad, tuple[HotLoadReplica, ...], dict[str, float]]:
        began = self.clock()
        firsts: dict[str, float] = {}
        last: list[tuple[Any, ...]] = [()]
        known: list[HotLoad | None] = [None]

        def fetch() -> tuple[HotLoad, tuple[HotLoadReplica, ...]]:
            hot_load = known[0] = self.client.get_hot_load(hot_load_id)
            replicas: tuple[HotLoadReplica, ...] = ()
            try:
                replicas = tuple(self.client.list_hot_load_replicas(hot_load_id))
            except NotFoundError:
                pass  # a hot-load that was only just accepted may have none yet
            except (TransportError, APIError) as error:
                # The outcome stands even when the replicas cannot be asked.
                if not hot_load.state.terminal or not is_outage(error):
                    raise
            if not hot_load.state.terminal and not waiting_on:
                self._require_alive()
            return hot_load, replicas

        def tell(seen: tuple[HotLoad, tuple[HotLoadReplica, ...]] | None, problem: str | None) -> None:
            hot_load, replicas = seen if seen is not None else (known[0], ())
            event = ProgressEvent(
                hot_load=None if waiting_on else hot_load,
                waiting_on=hot_load if waiting_on else None,
                replicas=replicas,
                elapsed=self.clock() - began,
                problem=problem,
            )
            if event.ready:
                firsts.setdefault("first_replica_seconds", event.elapsed)
            mark = (hot_load.state if hot_load else None, event.ready, event.total)
            if hot_load is not None and mark != last[0]:
                last[0] = mark
                self.plugins.notify(
                    HotLoadProgressed(
                        hot_load_id=hot_load.id,
                        state=hot_load.state.value,
                        replicas_done=event.ready,
                        replicas=event.total,
                        elapsed=event.elapsed,
                        waiting_on=hot_load.id if waiting_on else None,
                        run_id=self.run_id,
                    )
                )
            if on_progress is not None:
                on_progress(event)

        hot_load, replicas = poll(
            fetch,
            done=lambda seen: seen[0].state.terminal,
            timeout=max(0.001, deadline - self.clock()),
            poll_interval=self.poll_interval,
            describe=lambda seen: f"{describe}: {_seen(*seen)}",
            on_progress=tell,
            clock=self.clock,
            sleep=self.sleep,
        )
        return hot_load, replicas, firsts

    def _require_alive(self) -> None:
        """Raise when the deployment has FAILED or is going away: a hot-load of it would never end."""
        if self.client.get_deployment(self.deployment_id).status in (ResourceStatus.FAILED, ResourceStatus.DELETING):
            wait_for_deployment(self.client, self.deployment_id, timeout=1.0, poll_interval=self.poll_interval)


def warn_about_stragglers(hot_load: HotLoad, replicas: Sequence[HotLoadReplica]) -> None:
    """Log each replica that contradicts a hot-load which says COMPLETED."""
    if hot_load.state is not HotLoadState.COMPLETED:
        return
    for replica in replicas:
        if not replica.caught_up(hot_load.identity):
            _log.warning(
                "hot-load %s is COMPLETED, but replica %s is %s on %s",
                hot_load.id,
                replica.name,
                replica.state_text or replica.state.value,
                replica.current_snapshot_identity or "an unknown identity",
            )


def _seen(hot_load: HotLoad, replicas: Sequence[HotLoadReplica]) -> str:
    ready = sum(replica.caught_up(hot_load.identity) for replica in replicas)
    state = hot_load.state.value if hot_load.state.value != "UNSPECIFIED" else hot_load.status.state_text or "no state"
    return f"{hot_load.identity} is {state}, {ready} of {len(replicas)} replicas serve it"


def _ended_badly(hot_load: HotLoad, replicas: Sequence[HotLoadReplica]) -> HotLoadError:
    reasons = [
        f"{condition.type or 'condition'}: {condition.reason} {condition.message}".strip()
        for condition in hot_load.status.conditions
        if condition.message or condition.reason
    ]
    reasons += [f"replica {replica.name}: {replica.error_reason}" for replica in replicas if replica.error_reason]
    text = "; ".join(reasons) or "the service gives no reason"
    canceled = hot_load.state is HotLoadState.CANCELED
    return (HotLoadCanceledError if canceled else HotLoadFailedError)(
        f"hot-load {hot_load.id} of {hot_load.identity} ended as {hot_load.state}: {text}",
        hot_load=hot_load,
        hint="the deployment may serve either version on some replicas: publish again, or go back with "
        "`cwtrain hotload rollback`",
    )
