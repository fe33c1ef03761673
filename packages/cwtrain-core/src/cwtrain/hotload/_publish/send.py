"""One attempt to bring a snapshot into the deployment, and what is done about outages: nothing else repeats."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import attrs

from cwtrain._waiting import Deadline
from cwtrain.config import HotLoadConfig
from cwtrain.errors import (
    CWTrainError,
    FailedPreconditionError,
    HotLoadCanceledError,
    HotLoadError,
    HotLoadFailedError,
    HotLoadInProgressError,
)
from cwtrain.hotload import chain as chains
from cwtrain.hotload._plugin import PUBLISH
from cwtrain.hotload._publish.decide import reload_first
from cwtrain.hotload._writer_receipts import WrittenSnapshot
from cwtrain.hotload.loader import HotLoader
from cwtrain.hotload.mirror import WeightMirror
from cwtrain.hotload.progress import OnProgress, ProgressEvent
from cwtrain.infra._retry import is_retryable
from cwtrain.infra._status import retry_floor
from cwtrain.models.service import HotLoad, HotLoadState
from cwtrain.models.sync import WeightSyncRequest, WeightSyncResult

__all__ = ["Budget", "Sender", "ended_badly"]

T = TypeVar("T")

_log = logging.getLogger("cwtrain.hotload")

Budget = Deadline
"""The time of one call."""


@attrs.define
class Sender:
    """What sends and waits, for one publisher. ``on_progress`` is told what goes on."""

    loader: HotLoader
    settings: HotLoadConfig
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    on_progress: OnProgress | None = None
    replicas: int | None = None
    """How many replicas the last hot-load had, as far as they were seen."""

    @contextlib.contextmanager
    def within(self, budget: Budget) -> Iterator[None]:
        """Have everything that is asked for in one call over when its time is: of the API, and of the store."""
        whole = self.loader
        self.loader = whole.within(budget)
        try:
            yield
        finally:
            self.loader = whole

    # -- outages ---------------------------------------------------------------------------------------------------

    def through_outages(self, call: Callable[[], T], budget: Budget, what: str) -> T:
        """Return what ``call`` returns, made again while the service or the store does not answer.

        For as long as TIMEOUT for one outage, and no longer than ``budget``. Every call here goes on where the last one
        stopped, so it can be made again. Anything but an outage is raised at once.
        """
        began: float | None = None
        while True:
            try:
                return call()
            except CWTrainError as error:
                if not is_retryable(error):
                    raise
                now = self.clock()
                began = now if began is None else began
                left = min(budget.left(), self.settings.timeout - (now - began))
                if not budget.left():
                    raise budget.over(what, error) from error
                if left <= 0:
                    raise
                _log.warning("%s: no usable answer, trying again for %.0f s: %s", what, min(left, 1e9), error)
                self.sleep(min(max(self.loader.poll_interval, retry_floor(error)), left))

    # -- what the service has --------------------------------------------------------------------------------------

    def hot_loads(self, budget: Budget, *, until: Callable[[HotLoad], bool] = lambda _: False) -> list[HotLoad]:
        """Return the deployment's hot-loads, newest first, as far back as the first for which ``until`` is true.

        What is looked for is nearly always on the first page, however many versions a run has published.
        """

        def look() -> list[HotLoad]:
            found: list[HotLoad] = []
            for hot_load in self.loader.asking.list_hot_loads(self.loader.deployment_id):
                found.append(hot_load)
                if until(hot_load):
                    break
            return found

        return self.through_outages(look, budget, "listing the hot-loads")

    def hot_loads_to(self, identity: str | None, budget: Budget) -> list[HotLoad]:
        """Return the hot-loads back to the newest COMPLETED one of ``identity``, or all that its chain needs."""

        def reached(hot_load: HotLoad) -> bool:
            completed = hot_load.state is HotLoadState.COMPLETED
            return completed and (identity is None or hot_load.identity == identity)

        found = self.hot_loads(budget, until=reached)
        if identity is not None and found and reached(found[-1]) and not found[-1].spec.snapshot_chain:
            return self.hot_loads(budget)  # the service does not say the chain: it is followed through the list
        return found

    def wait(self, hot_load_id: str, budget: Budget) -> HotLoad:
        """Return a hot-load that has COMPLETED. Raises as ``HotLoader.wait``."""

        def attempt() -> HotLoad:
            return self.loader.wait(hot_load_id, timeout=self.settings.timeout, on_progress=self._watch(budget))

        return self.through_outages(attempt, budget, "waiting for a hot-load")

    # -- sending ---------------------------------------------------------------------------------------------------

    def publish(
        self,
        request: WeightSyncRequest,
        *,
        version: int | None,
        wait: bool,
        budget: Budget,
        written: WrittenSnapshot | None = None,
        mirror: WeightMirror | None = None,
    ) -> HotLoad:
        """Have ``request`` done, by a plugin or by core, and return the hot-load as the service has it.

        With ``wait`` it is COMPLETED. ``written``: the snapshot that is in the bucket already, ``request.path`` says
        where. ``mirror`` is the open one whose directory ``request.path`` is.
        Raises what ``HotLoader.publish`` raises.
        """
        done: list[HotLoad] = []

        def core(asked: WeightSyncRequest) -> WeightSyncResult:
            started = self.clock()
            if written is not None:
                same = (asked.identity, asked.previous_identity) == (written.identity, written.previous_identity)
                hot_load = self.trigger(
                    written if same else asked.identity,  # a plugin may ask for another one
                    previous_identity=asked.previous_identity,
                    wait=wait,
                    budget=budget,
                )
            else:
                own = mirror if asked.path == request.path else None
                hot_load = self._publish(asked, own or asked.path, version=version, wait=wait, budget=budget)
            done.append(hot_load)
            return WeightSyncResult(identity=hot_load.identity, hot_load_id=hot_load.id, seconds=self.clock() - started)

        asked = attrs.evolve(request, settings={**request.settings, "wait": wait, "version": version, PUBLISH: core})
        result = self.loader.plugins.sync_weights(asked)
        if done and result is not None and result.hot_load_id == done[-1].id:
            return done[-1]
        return self._done_by_plugin(request, result, wait=wait, budget=budget)

    def trigger(
        self, snapshot: str | WrittenSnapshot, *, previous_identity: str | None, wait: bool, budget: Budget
    ) -> HotLoad:
        """Hot-load what is in the bucket already, an identity or what was written under it; return the hot-load."""
        identity = snapshot.identity if isinstance(snapshot, WrittenSnapshot) else snapshot

        def attempt() -> HotLoad:
            budget.check(f"about to ask for the hot-load of {identity}")
            return self.loader.trigger(
                snapshot,
                previous_identity=previous_identity,
                prompt_cache_policy=self.settings.prompt_cache_policy,
                wait=wait,
                timeout=self.settings.timeout,
                on_progress=self._watch(budget),
            )

        return self._chained(attempt, previous_identity, budget, f"hot-loading {identity}")

    def _publish(
        self,
        request: WeightSyncRequest,
        checkpoint: str | os.PathLike[str],
        *,
        version: int | None,
        wait: bool,
        budget: Budget,
    ) -> HotLoad:
        def attempt() -> HotLoad:
            budget.check(f"about to publish {request.identity}")
            return self.loader.publish(
                checkpoint,
                request.identity,
                previous_identity=request.previous_identity,
                prompt_cache_policy=self.settings.prompt_cache_policy,
                wait=wait,
                timeout=self.settings.timeout,
                on_progress=self._watch(budget),
                workers=self.settings.upload_workers,
                version=version,
                base_version=request.settings.get("base_version"),
            )

        return self._chained(attempt, request.previous_identity, budget, f"publishing {request.identity}")

    def _chained(self, attempt: Callable[[], HotLoad], previous: str | None, budget: Budget, what: str) -> HotLoad:
        """Return what ``attempt`` does; where the deployment refuses the chain, load ``previous`` again before it."""
        try:
            return self.through_outages(attempt, budget, what)
        except HotLoadInProgressError:
            raise
        except FailedPreconditionError as error:
            served = chains.latest_completed(self.hot_loads(budget))
            if not reload_first(previous, served.identity if served else None, refused=True):
                raise
            assert previous is not None
            _log.warning(
                "the deployment refuses a chain through %s, which it does not serve now (%s): that is hot-loaded again "
                "first",
                previous,
                error,
            )
            self.through_outages(
                lambda: self.loader.rollback(
                    previous,
                    prompt_cache_policy=self.settings.prompt_cache_policy,
                    timeout=self.settings.timeout,
                    on_progress=self._watch(budget),
                ),
                budget,
                f"hot-loading {previous} again",
            )
            return self.through_outages(attempt, budget, what)

    def _done_by_plugin(
        self, request: WeightSyncRequest, result: WeightSyncResult | None, *, wait: bool, budget: Budget
    ) -> HotLoad:
        """Return the hot-load of which a plugin says that it did the work: what the service says counts."""
        if result is None or result.hot_load_id is None:
            raise HotLoadError(
                f"a plugin took {request.identity} over and names no hot-load: it does not count as published",
                hint="let cwtrain_sync_weights return None, or a WeightSyncResult with the hot_load_id",
            )
        found = next((one for one in self.hot_loads(budget) if one.id == result.hot_load_id), None)
        if found is None or found.identity != request.identity:
            raise HotLoadError(
                f"a plugin says that hot-load {result.hot_load_id} brought {request.identity}, and the deployment has "
                f"{'no such hot-load' if found is None else f'it for {found.identity}'}",
                hint="let cwtrain_sync_weights publish the identity that it is asked for",
            )
        if found.state in (HotLoadState.FAILED, HotLoadState.CANCELED) or (wait and not found.state.terminal):
            return self.wait(found.id, budget)
        return found

    def _watch(self, budget: Budget) -> OnProgress:
        """Return what stops an upload whose time is over, and passes everything on."""

        def tell(event: ProgressEvent) -> None:
            if event.upload is not None:
                budget.check(f"still {event.summary()}")
            elif event.hot_load is not None and event.total:
                self.replicas = event.total
            if self.on_progress is not None:
                self.on_progress(event)

        return tell


def ended_badly(error: CWTrainError) -> bool:
    """Return whether the service says that a hot-load FAILED or was CANCELED."""
    return isinstance(error, (HotLoadFailedError, HotLoadCanceledError))
