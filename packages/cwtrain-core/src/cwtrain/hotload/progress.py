"""What a publish tells: its caller while it goes on, and plugins when it starts and when it has ended."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

import attrs

from cwtrain.errors import CWTrainError, HotLoadError
from cwtrain.events import SyncCompleted, SyncFailed, SyncSkipped, SyncStarted
from cwtrain.models.service import HotLoad, HotLoadReplica, HotLoadState
from cwtrain.models.text import duration, size

if TYPE_CHECKING:
    from cwtrain.plugins import Plugins
    from cwtrain.storage import UploadProgress

__all__ = ["OnProgress", "ProgressEvent", "SyncEvents", "failure"]


@attrs.frozen(kw_only=True)
class ProgressEvent:
    """A step of a publish.

    While files are sent, ``upload`` holds byte counts and ``hot_load`` is None. Afterwards ``hot_load`` is the state
    last seen, ``replicas`` its replicas (``ready`` of ``total`` serve the identity), ``elapsed`` the seconds since the
    hot-load was asked for. ``waiting_on`` is another, unfinished hot-load that has to end first.
    """

    hot_load: HotLoad | None = None
    replicas: tuple[HotLoadReplica, ...] = ()
    elapsed: float = 0.0
    waiting_on: HotLoad | None = None
    upload: UploadProgress | None = None
    already_served: bool = False
    """Whether every replica served the identity before: nothing was sent, and no hot-load was asked for."""
    problem: str | None = None
    """The last poll's failure, when the service could not be asked; None when it answered."""

    @property
    def ready(self) -> int:
        """How many replicas serve the identity."""
        target = self.waiting_on or self.hot_load
        return sum(replica.caught_up(target.identity) for replica in self.replicas) if target else 0

    @property
    def total(self) -> int:
        """How many replicas there are, as far as the service says."""
        return len(self.replicas)

    def summary(self) -> str:
        """Return the event in one line for people."""
        if self.upload is not None:
            if not self.upload.total_bytes:  # not known yet what has to be sent, or nothing has
                return f"uploading: comparing {self.upload.objects} objects with what is in the bucket"
            return (
                f"uploading: {self.upload.objects_done}/{self.upload.objects} objects, "
                f"{size(self.upload.sent_bytes)} of {size(self.upload.total_bytes)}"
            )
        if self.already_served and self.hot_load is not None:
            return f"{self.hot_load.identity} is served already, by hot-load {self.hot_load.id}: there is nothing to do"
        if self.waiting_on is not None:
            other = self.waiting_on
            text = f"waiting for hot-load {other.id} ({other.identity}, {other.state}{_age(other)})"
        elif self.hot_load is not None:
            text = f"hot-load {self.hot_load.id} ({self.hot_load.identity}): {self.hot_load.state}"
        else:
            text = "waiting"
        if self.total:
            text += f", {self.ready}/{self.total} replicas"
        text += f", {duration(round(self.elapsed))}"
        return f"{text}; last poll failed: {self.problem}" if self.problem else text


OnProgress: TypeAlias = Callable[[ProgressEvent], None]


@attrs.define
class SyncEvents:
    """The start of each publish of one loader, and its one end: completed, failed or skipped, whatever was raised.

    What is left to the service (``wait=False``) is open until somebody sees how it ended. What failed here and is found
    served later (its time was over, say) starts once more. ``began`` is on the clock, when the publish was asked for.
    """

    plugins: Callable[[], Plugins]
    run_id: str | None
    clock: Callable[[], float]
    count: int = attrs.field(default=0, init=False)
    """How many have started: each tells its own end."""
    _open: dict[str, _Started] = attrs.field(factory=dict, init=False)
    _last: _Started | None = attrs.field(default=None, init=False)

    def started(self, event: SyncStarted, *, began: float) -> None:
        """Tell that a publish starts."""
        self.count += 1
        self._start(event, began)

    def _start(self, event: SyncStarted, began: float) -> None:
        self._open[event.identity] = _Started(event, began)
        self.plugins().notify(event)

    def completed(self, hot_load: HotLoad, *, version: int | None = None) -> None:
        """Tell that all replicas serve it, unless that was told. Another process may have started it."""
        identity = hot_load.identity
        last = self._last if identity not in self._open else None
        if last is not None and last.event.identity == identity:
            if last.served:
                return
            self._start(attrs.evolve(last.event, at=dt.datetime.now(dt.UTC)), last.began)
        ended = self._end(identity, served=True)
        self.plugins().notify(
            SyncCompleted(
                identity=identity,
                hot_load_id=hot_load.id,
                seconds=_service_seconds(hot_load) if ended is None else self.clock() - ended.began,
                version=version,
                run_id=self.run_id,
            )
        )

    def failed(self, error: BaseException, *, identity: str, version: int | None = None) -> None:
        """Tell that it ended with ``error``, unless its end was told."""
        if identity in self._open or self._last is None or self._last.event.identity != identity:
            self._end(identity)
            self.plugins().notify(failure(error, identity=identity, version=version, run_id=self.run_id))

    def skipped(self, reason: str, *, identity: str, version: int | None = None) -> None:
        """Tell that there was nothing to publish after all."""
        self._end(identity)
        self.plugins().notify(SyncSkipped(reason=reason, identity=identity, version=version, run_id=self.run_id))

    def seen(self, hot_load: HotLoad, *, error: BaseException | None = None) -> None:
        """Tell the end of what was left to the service, where ``hot_load`` is that; ``error`` is what it raised."""
        found = self._open.get(hot_load.identity)
        if found is None or not hot_load.state.terminal:
            return
        if hot_load.state is HotLoadState.COMPLETED:
            self.completed(hot_load, version=found.event.version)
        else:
            why = error or HotLoadError(f"hot-load {hot_load.id} of {hot_load.identity} ended as {hot_load.state}")
            self.failed(why, identity=hot_load.identity, version=found.event.version)

    def listed(self, hot_loads: Sequence[HotLoad]) -> None:
        """Look for ends among ``hot_loads``, newest first."""
        for identity in list(self._open):
            if (newest := next((one for one in hot_loads if one.identity == identity), None)) is not None:
                self.seen(newest)

    def _end(self, identity: str, *, served: bool = False) -> _Started | None:
        found = self._open.pop(identity, None)
        if found is not None:
            self._last = attrs.evolve(found, served=served)
        return found


@attrs.frozen
class _Started:
    event: SyncStarted
    began: float
    served: bool = False


def failure(
    error: BaseException, *, identity: str | None = None, version: int | None = None, run_id: str | None = None
) -> SyncFailed:
    """Return the event of ``error``, which is told as one of ours whatever it is."""
    ours = error
    if not isinstance(ours, CWTrainError):
        ours = CWTrainError(f"{type(error).__name__}: {error}".removesuffix(": "))
        ours.__cause__ = error
    return SyncFailed(error=ours, identity=identity, version=version, run_id=run_id)


def _service_seconds(hot_load: HotLoad) -> float:
    began, ended = hot_load.status.created_at, hot_load.status.finished_at
    return max(0.0, (ended - began).total_seconds()) if began and ended else 0.0


def _age(hot_load: HotLoad) -> str:
    created = hot_load.status.created_at
    if created is None:
        return ""
    if created.tzinfo is None:
        created = created.replace(tzinfo=dt.UTC)
    seconds = max(0.0, (dt.datetime.now(dt.UTC) - created).total_seconds())
    return f", {duration(round(seconds))} old"
