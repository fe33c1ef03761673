"""Hot-loads as operations: asked for once, waited for to the end, explained when they end badly."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

from cwtrain.errors import (
    APIError,
    CWTrainError,
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
from cwtrain.infra._poll import Deadline, poll
from cwtrain.infra._retry import is_retryable
from cwtrain.infra.lifecycle import wait_for_deployment
from cwtrain.models.service import HotLoad, HotLoadReplica, HotLoadState, ResourceStatus
from cwtrain.waits import waiting

if TYPE_CHECKING:
    from cwtrain.infra.client import InferenceClient
    from cwtrain.plugins import Plugins

__all__ = ["HotLoadOperations", "ServedReport", "goes_on", "warn_about_stragglers"]

_Seen: TypeAlias = "tuple[HotLoad, tuple[HotLoadReplica, ...]]"

_log = logging.getLogger("cwtrain.hotload")
_LAST_LOOK_SECONDS = 1.0
"""What a look may take that is made when the time is over."""


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

    def run(
        self,
        work: Work,
        *,
        wait: bool,
        timeout: float | Deadline,
        on_progress: OnProgress | None,
        known: Sequence[HotLoad] | None = None,
    ) -> HotLoad:
        """Have ``work`` done by a hot-load: ours that is there already, or a new one when the deployment is free.

        ``known`` are the deployment's hot-loads, newest first, where the caller has just listed them.
        """
        deadline = timeout if isinstance(timeout, Deadline) else Deadline(timeout, self.clock)
        asked: list[str] = []
        try:
            hot_load = self._accepted(work, deadline, on_progress, known, asked)
            accepted = deadline.spent()
            if wait:
                hot_load = self.follow(hot_load.id, deadline=deadline, on_progress=on_progress, known=hot_load)
        except BaseException as stop:
            # An interrupt. The id is ours, so it can be named although the service may not have answered yet.
            if asked and not isinstance(stop, Exception):
                stop.add_note(goes_on(asked[0], sure=False))
            raise
        return attrs.evolve(hot_load, timings={**hot_load.timings, "accept_seconds": accepted})

    def _accepted(
        self,
        work: Work,
        deadline: Deadline,
        on_progress: OnProgress | None,
        known: Sequence[HotLoad] | None,
        asked: list[str],
    ) -> HotLoad:
        """Return the hot-load that does ``work``, once the service has taken it; ``asked`` gets the id before that."""
        what = f"waiting for the service to take the hot-load of {work.identity}"
        with waiting(what, seconds=deadline.left(), clock=self.clock):
            hot_load = self._request(work, deadline, on_progress, known, asked)
        asked[:] = [hot_load.id]
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
        return hot_load

    def _request(
        self,
        work: Work,
        deadline: Deadline,
        on_progress: OnProgress | None,
        known: Sequence[HotLoad] | None,
        asked: list[str],
    ) -> HotLoad:
        hot_load_id: str | None = None
        while True:
            listed, known = known, None
            try:
                client = self.client.within(max(deadline.left(), min(self.poll_interval, _LAST_LOOK_SECONDS)))
                hot_loads = list(client.list_hot_loads(self.deployment_id)) if listed is None else listed
                if (done := self.done(work, hot_loads)) is not None:
                    if on_progress is not None:
                        on_progress(ProgressEvent(hot_load=done, already_served=True))
                    return done
                # Made once: whatever happens to the answers below, this call asks under this id and no other.
                hot_load_id = hot_load_id or chains.hot_load_id(
                    self.deployment_id, work.identity, work.type, work.previous_identity, work.policy, hot_loads
                )
                unfinished = chains.active(hot_loads)
                if unfinished is not None and (unfinished.id == hot_load_id or work.same_as(unfinished)):
                    return unfinished
                if unfinished is not None:
                    self.wait_for_other(unfinished, deadline=deadline, on_progress=on_progress)
                if not deadline.left():
                    raise _not_asked_for(work, deadline)
                asked[:] = [hot_load_id]
                return client.create_hot_load(
                    self.deployment_id,
                    work.identity,
                    snapshot_type=work.type,
                    incremental=work.metadata,
                    prompt_cache_policy=work.policy,
                    hot_load_id=hot_load_id,
                )
            except HotLoadInProgressError as error:
                asked.clear()  # refused: nothing of ours was taken
                if not deadline.left():
                    raise _not_accepted(work, hot_load_id, deadline, error) from error
                if listed is not None:
                    continue  # it began since they were listed
            except (TransportError, APIError) as error:
                # Whether the service took it is unknown; the id makes asking again safe.
                if not is_retryable(error):
                    raise
                if not deadline.left():
                    raise _not_accepted(work, hot_load_id, deadline, error) from error
            self.sleep(min(self.poll_interval, deadline.left()))

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

    def follow(
        self, hot_load_id: str, *, deadline: Deadline, on_progress: OnProgress | None, known: HotLoad | None = None
    ) -> HotLoad:
        """Return the hot-load once it is COMPLETED; raise what became of it otherwise. See ``HotLoader.wait``.

        ``known`` is what the service has just said of it: one that has ended is not asked for again.
        """
        teller = _Teller(self, on_progress)
        try:
            hot_load, replicas = self._poll(hot_load_id, deadline, teller, known)
        except WaitTimeoutError as error:
            raise HotLoadTimeoutError(
                f"hot-load {hot_load_id} did not finish within {deadline.seconds:g} s and goes on; "
                f"last seen: {error.last_seen}",
                hot_load=teller.hot_load,
                last_seen=error.last_seen,
                hint=f"follow it with `cwtrain hotload wait {hot_load_id}`; the next publish waits for it",
            ) from error
        if hot_load.state is not HotLoadState.COMPLETED:
            raise _ended_badly(hot_load, replicas)
        warn_about_stragglers(hot_load, replicas)
        return attrs.evolve(hot_load, timings=teller.timings())

    def wait_for_other(self, other: HotLoad, *, deadline: Deadline, on_progress: OnProgress | None) -> None:
        """Return once ``other``, a hot-load that stands in the way, has ended, well or not."""
        _log.warning("waiting for hot-load %s of %s, which is %s", other.id, other.identity, other.state)
        try:
            self._poll(other.id, deadline, _Teller(self, on_progress, waiting_on=True))
        except WaitTimeoutError as error:
            raise HotLoadTimeoutError(
                f"hot-load {other.id} of {other.identity} was still unfinished after {deadline.seconds:g} s, so ours "
                f"was not asked for; last seen: {error.last_seen}",
                hot_load=other,
                last_seen=error.last_seen,
                hint=f"follow it with `cwtrain hotload wait {other.id}`, then run the same command again",
            ) from error

    def _poll(self, hot_load_id: str, deadline: Deadline, teller: _Teller, known: HotLoad | None = None) -> _Seen:
        def fetch() -> _Seen:
            try:
                client = self.client.within(max(deadline.left(), min(self.poll_interval, _LAST_LOOK_SECONDS)))
                return self._look(client, hot_load_id, known, must_live=not teller.waiting_on)
            except (TransportError, APIError) as error:
                if is_retryable(error):
                    teller.outage(str(error))
                raise

        return poll(
            fetch,
            done=lambda seen: seen[0].state.terminal,
            timeout=deadline,
            poll_interval=self.poll_interval,
            describe=_in_words,
            what=f"hot-load {hot_load_id}" + (", which is another one's, to end" if teller.waiting_on else " to end"),
            on_progress=lambda seen, _: teller.seen(*seen),
            eager=True,
            clock=self.clock,
            sleep=self.sleep,
        )

    def _look(self, client: InferenceClient, hot_load_id: str, known: HotLoad | None, *, must_live: bool) -> _Seen:
        hot_load = known if known is not None and known.state.terminal else client.get_hot_load(hot_load_id)
        replicas: tuple[HotLoadReplica, ...] = ()
        try:
            replicas = tuple(client.list_hot_load_replicas(hot_load_id))
        except NotFoundError:
            pass  # one that was only just accepted may have none yet
        except (TransportError, APIError) as error:
            # The outcome stands even when the replicas cannot be asked.
            if not (hot_load.state.terminal and is_retryable(error)):
                raise
        if must_live and not hot_load.state.terminal:
            self._require_alive(client)
        return hot_load, replicas

    def _require_alive(self, client: InferenceClient) -> None:
        """Raise when the deployment has FAILED or is going away: a hot-load of it would never end."""
        if client.get_deployment(self.deployment_id).status in (ResourceStatus.FAILED, ResourceStatus.DELETING):
            wait_for_deployment(client, self.deployment_id, timeout=1.0, just_created=False, sleep=self.sleep)


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


class _Teller:
    """Tells the caller and the plugins what a wait sees, and keeps its times."""

    def __init__(self, owner: HotLoadOperations, on_progress: OnProgress | None, *, waiting_on: bool = False) -> None:
        self.waiting_on = waiting_on
        self.hot_load: HotLoad | None = None
        self._owner = owner
        self._on_progress = on_progress
        self._began = owner.clock()
        self._replicas: tuple[HotLoadReplica, ...] = ()
        self._mark: tuple[object, ...] = ()
        self._first_replica: float | None = None
        self._elapsed = 0.0

    def seen(self, hot_load: HotLoad, replicas: tuple[HotLoadReplica, ...]) -> None:
        self.hot_load, self._replicas = hot_load, replicas
        event = self._event()
        self._elapsed = event.elapsed
        if event.ready and self._first_replica is None:
            self._first_replica = event.elapsed
        mark = (hot_load.state, event.ready, event.total)
        if mark != self._mark:
            self._mark = mark
            self._owner.plugins.notify(
                HotLoadProgressed(
                    hot_load_id=hot_load.id,
                    state=hot_load.state.value,
                    replicas_done=event.ready,
                    replicas=event.total,
                    elapsed=event.elapsed,
                    waiting_on=hot_load.id if self.waiting_on else None,
                    run_id=self._owner.run_id,
                )
            )
        if self._on_progress is not None:
            self._on_progress(event)

    def outage(self, problem: str) -> None:
        if self._on_progress is not None:
            self._on_progress(self._event(problem))

    def timings(self) -> dict[str, float]:
        first = self._elapsed if self._first_replica is None else self._first_replica
        return {"first_replica_seconds": first, "last_replica_seconds": self._elapsed}

    def _event(self, problem: str | None = None) -> ProgressEvent:
        return ProgressEvent(
            hot_load=None if self.waiting_on else self.hot_load,
            waiting_on=self.hot_load if self.waiting_on else None,
            replicas=self._replicas,
            elapsed=self._owner.clock() - self._began,
            problem=problem,
        )


def goes_on(hot_load_id: str, *, sure: bool = True) -> str:
    """Return what to tell who stops while the service works on a hot-load; not ``sure``: it may not have taken it."""
    does = "goes on" if sure else "may go on at the service"
    return f"hot-load {hot_load_id} {does}; follow it with: cwtrain hotload wait {hot_load_id}"


def _in_words(seen: _Seen) -> str:
    hot_load, replicas = seen
    ready = sum(replica.caught_up(hot_load.identity) for replica in replicas)
    state = hot_load.state.value
    if hot_load.state is HotLoadState.UNSPECIFIED:
        state = hot_load.status.state_text or "without a state"
    return f"{hot_load.identity} is {state}, {ready} of {len(replicas)} replicas serve it"


def _not_asked_for(work: Work, deadline: Deadline) -> HotLoadTimeoutError:
    return HotLoadTimeoutError(
        f"the hot-load of {work.identity} was not asked for: the {deadline.seconds:g} s were over before",
        hint="run the same command again, which goes on with what is in the bucket",
    )


def _not_accepted(work: Work, hot_load_id: str | None, deadline: Deadline, error: CWTrainError) -> HotLoadTimeoutError:
    return HotLoadTimeoutError(
        f"the hot-load of {work.identity} was not accepted within {deadline.seconds:g} s; last seen: {error}",
        last_seen=str(error),
        hint="the service may have taken it all the same: run the same command again, which goes on with it"
        + (f" (or look: cwtrain hotload status {hot_load_id})" if hot_load_id else ""),
    )


def _ended_badly(hot_load: HotLoad, replicas: Sequence[HotLoadReplica]) -> HotLoadError:
    text = "; ".join(_reasons(hot_load, replicas)) or "the service gives no reason"
    canceled = hot_load.state is HotLoadState.CANCELED
    return (HotLoadCanceledError if canceled else HotLoadFailedError)(
        f"hot-load {hot_load.id} of {hot_load.identity} ended as {hot_load.state}: {text}",
        hot_load=hot_load,
        hint="the deployment may serve either version on some replicas: publish again, or go back with "
        "`cwtrain hotload rollback`",
    )


def _reasons(hot_load: HotLoad, replicas: Sequence[HotLoadReplica]) -> list[str]:
    """Return why a hot-load ended, each reason once: a condition repeats what its replicas say, and they each other."""
    of_replicas: dict[str, list[str]] = {}
    for replica in replicas:
        if replica.error_reason:
            of_replicas.setdefault(replica.error_reason, []).append(replica.name)
    found = []
    for condition in hot_load.status.conditions:
        message = condition.message
        for reason, names in of_replicas.items():
            for name in names:
                message = message.replace(f"{name}: {reason}", "")
        parts = [part.strip() for part in message.split(";")]
        message = "" if message in of_replicas else "; ".join(one for one in parts if one and one not in of_replicas)
        if condition.message or condition.reason:
            found.append(f"{condition.type or 'condition'}: {condition.reason} {message}".strip())
    for reason, names in of_replicas.items():
        found.append(f"{'replicas' if len(names) > 1 else 'replica'} {', '.join(names)}: {reason}")
    return list(dict.fromkeys(found))
