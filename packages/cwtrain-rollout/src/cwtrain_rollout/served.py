"""What a deployment serves, as the sampler knows it: one reader for all loops and threads of a sampler.

The hot-load list is read by a thread of its own, at most once in a poll interval while a rollout runs, at its start and
at its end. An API that does not answer is waited out; what is known stays known, which makes spans wider, never wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs

from cwtrain._process import NotPickled, renew_after_fork
from cwtrain.errors import (
    ConfigError,
    CWTrainError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
)
from cwtrain_rollout.errors import RolloutError, StaleWeightsError
from cwtrain_rollout.spans import History, Load, number_in, version_number

if TYPE_CHECKING:
    from cwtrain.hotload.status import BaselineStatus
    from cwtrain.infra import InferenceClient
    from cwtrain.storage import ObjectStore

__all__ = ["DeploymentSource", "FileSource", "ServedWeights", "Source"]

log = logging.getLogger("cwtrain.rollout")

_KEPT = 50
"""Hot-loads that are read at least, where there are so many: what may be waited for by name."""


class Source(Protocol):
    """Where the history of an endpoint's weights is read. Both methods block."""

    def history(self) -> History:
        """Return the hot-loads, newest first."""
        ...

    def baseline(self) -> BaselineStatus | None:
        """Return how the base of the run gets there; None where nobody says."""
        ...


@attrs.define
class DeploymentSource:
    """The hot-load list of a deployment (role Viewer), and the status object in its bucket (s3:GetObject)."""

    deployment_id: str
    client: InferenceClient | None = None
    store: ObjectStore | None = None
    """The bucket; None makes one from the environment at first use."""
    _no_status: bool = False

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process reads the same deployment by; it makes its own way to the bucket."""
        return {"deployment_id": self.deployment_id, "client": self.client}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def history(self) -> History:
        """Return the newest hot-loads, down to the newest COMPLETED one at least."""
        loads: list[Load] = []
        completed = False
        for hot_load in self._client().list_hot_loads(self.deployment_id, page_size=_KEPT):
            loads.append(Load(id=hot_load.id, identity=hot_load.identity, state=str(hot_load.state)))
            completed = completed or loads[-1].completed
            if completed and len(loads) >= _KEPT:
                break
        return History(tuple(loads))

    def baseline(self) -> BaselineStatus | None:
        """Return what the publisher wrote; None without a bucket, an object, or leave to read it."""
        if self._no_status:
            return None
        try:
            target = self._client().get_deployment(self.deployment_id).hot_load
            if target is None or not target.bucket:
                self._no_status = True
                return None
            from cwtrain.hotload.status import read_status
            from cwtrain.storage import Location, S3Store, s3_client

            if self.store is None:
                self.store = S3Store(s3_client(), target.bucket)
            return read_status(self.store, Location(target.bucket, target.path_prefix), self.deployment_id)
        except CWTrainError as exc:
            self._no_status = True
            log.info("The status of a run's base cannot be read, and is not waited for: %s", exc)
            return None

    def _client(self) -> InferenceClient:
        if self.client is None:
            from cwtrain.infra import InferenceClient

            try:
                self.client = InferenceClient()
            except ConfigError as exc:
                raise ConfigError(
                    f"The hot-loads of deployment {self.deployment_id} cannot be read: {exc}",
                    hint="set COREWEAVE_API_TOKEN to a token with the role Inference Viewer: without the hot-load list "
                    "no sample can say which weights made it",
                ) from exc
        return self.client


@attrs.frozen
class FileSource:
    """A file that names what is served, for endpoints without the API.

    Its first line is what all replicas serve, ``IDENTITY [ID]``; a second line, in the same form, is what is being
    loaded. An identity that comes back needs another ID each time. Whoever loads weights replaces the file before and
    after; one that is empty is being written, and is read again.
    """

    path: Path

    def history(self) -> History:
        """Return what the file says; raises ``ConfigError`` for an unreadable one, ``RolloutError`` for a blank one."""
        try:
            lines = [line.split() for line in self.path.read_text(encoding="utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as exc:
            why = "it is no UTF-8 text" if isinstance(exc, UnicodeDecodeError) else exc.strerror or type(exc).__name__
            raise ConfigError(
                f"CWTRAIN_ROLLOUT_SERVED_IDENTITY_FILE={str(self.path)!r} cannot be read: {why}",
                hint="whoever loads weights writes it",
            ) from exc
        if not lines:
            # Written in place just now: read as "nothing is served" it would make samples exact that are not.
            raise RolloutError(
                f"CWTRAIN_ROLLOUT_SERVED_IDENTITY_FILE={str(self.path)!r} is empty",
                hint="whoever loads weights writes a new file and renames it to this one",
            )
        states = ["COMPLETED", "IN_PROGRESS"]
        loads = [
            Load(id=words[-1], identity=words[0], state=state) for words, state in zip(lines, states, strict=False)
        ]
        return History(tuple(reversed(loads)))

    def baseline(self) -> BaselineStatus | None:
        """Nobody says."""
        return None


class ServedWeights(NotPickled):
    """The history of one endpoint's weights, read as little as will do. ``poll`` is in seconds.

    May be used from several event loops and threads; in a forked process it reads by itself.
    """

    _instead = "give it the sampler, which pickles, or make another one of the same source"

    def __init__(
        self,
        source: Source,
        *,
        poll: float,
        patience: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        number: Callable[[str], int | None] = version_number,
    ) -> None:
        self.source, self.poll, self.number = source, poll, number
        self._patience, self._clock, self._sleep = patience, clock, sleep
        # Reentrant: a read that is done already calls back where it was begun.
        self._lock = threading.RLock()
        self._thread: ThreadPoolExecutor | None = None
        self._running: Future[History] | None = None
        self._begun = float("-inf")
        self._since = float("-inf")
        self._history: History | None = None
        self._begun_epoch: str | None = None
        self._changed_at = float("-inf")
        self.reads = 0
        renew_after_fork(self, ServedWeights._leave)

    @property
    def known(self) -> History:
        """What was read last; a new read is begun in the background when that is a poll interval ago."""
        with self._lock:
            if self._running is None and self._clock() - self._begun >= self.poll:
                self._start()
            return self._history or History()

    def changed_lately(self, seconds: float) -> bool:
        """Whether a hot-load is under way, or ended so many seconds ago."""
        with self._lock:
            unsettled = self._history is not None and not self._history.settled
            return unsettled or self._clock() - self._changed_at < seconds

    def due(self, interval: float | None = None) -> float:
        """Return the seconds until a read may begin so long (by default a poll interval) after the last one did."""
        return max(0.0, self._begun + (self.poll if interval is None else interval) - self._clock())

    def read_since(self, since: float) -> bool:
        """Whether a read that began at ``since`` or later has ended well."""
        with self._lock:
            return self._history is not None and self._since >= since

    async def fresh(self, since: float) -> History:
        """Return the history from a read that began at ``since`` or later, beginning one where there is none.

        Raises ``RolloutError`` when none succeeds in time, and at once when the token may not read.
        """
        first_failure: float | None = None
        for attempt in itertools.count():
            with self._lock:
                if self._history is not None and self._since >= since:
                    return self._history
                running = self._running or self._start()
            try:
                await asyncio.shield(asyncio.wrap_future(running))
            except (ConfigError, UnauthenticatedError, PermissionDeniedError, NotFoundError):
                raise
            except CWTrainError as exc:
                now = self._clock()
                first_failure = now if first_failure is None else first_failure
                if now - first_failure > self._patience:
                    raise RolloutError(
                        f"What is served could not be read for {now - first_failure:.0f} s: {exc}",
                        hint="the API must answer for the hot-load list: without it no sample can say which weights "
                        "made it",
                    ) from exc
                await self._sleep(min(self.poll, 0.5 * 2 ** min(attempt, 5)))
        raise AssertionError("a count has no end")

    async def ready(self, minimum: int | str | None, *, settled: bool = False, recent: float = 0.0) -> History:
        """Wait until the run's base is served, then ``minimum``, then (with ``settled``) until nothing changes.

        What was read up to ``recent`` seconds ago will do. (A rollout that began with what was known before its
        trainer published would have the salt of the older weights.)

        Raises ``StaleWeightsError`` by name when what is waited for failed, or is not served in time.
        """
        began = self._clock()
        history = await self.fresh(began - recent)
        base = await asyncio.to_thread(self.source.baseline)
        history = self._told(base, history)
        while True:
            waiting = self._missing(history, base, minimum, settled=settled)
            if waiting is None:
                return history
            if self._clock() - began > self._patience:
                served = history.served.identity if history.served else None
                hint = "look at: cwtrain hotload list --deployment ID; CWTRAIN_ROLLOUT_DEADLINE is the patience"
                if isinstance(minimum, int) and history.epoch:
                    hint = f"a number is a version of the newest epoch, {history.epoch}-v...; {hint}"
                raise StaleWeightsError(
                    f"{waiting} after {self._patience:g} s; served is {served or 'no hot-load yet'}",
                    wanted=None if minimum is None else str(minimum),
                    served=served,
                    hint=hint,
                )
            await self._sleep(max(0.01, self.due()))
            history = await self.fresh(self._clock())
            if base is not None and base.state == "publishing":
                base = await asyncio.to_thread(self.source.baseline)
                history = self._told(base, history)

    def _told(self, base: BaselineStatus | None, history: History) -> History:
        """Note which epoch the publisher says it has begun, and return the history with it."""
        if base is None or base.prefix is None:
            return history
        with self._lock:
            self._begun_epoch = base.prefix
            if self._history is not None:
                self._history = attrs.evolve(self._history, begun=base.prefix)
        return attrs.evolve(history, begun=base.prefix)

    def _missing(
        self, history: History, base: BaselineStatus | None, minimum: int | str | None, *, settled: bool
    ) -> str | None:
        """Return what is waited for, in words; None when there is nothing to wait for."""
        served = history.served
        if base is not None:
            # A run that begins again has a base older than what its first attempt left behind: only its own identity,
            # or the publisher's word, says that it is there.
            if base.state == "publishing" and (served is None or served.identity != base.identity):
                return f"the base {base.identity!r} of the run is not served"
            if base.state == "failed" and not _made_good(history, base):
                raise StaleWeightsError(
                    f"The base {base.identity!r} of the run was not published: {base.error or base.state}",
                    wanted=base.identity,
                    served=history.served.identity if history.served else None,
                    hint=base.hint
                    or f"look at the trainer's log on {base.host}: it publishes the base at its first call",
                )
        if minimum is not None and not history.serves_at_least(minimum, self.number):
            found = history.find(minimum, self.number)
            if found is not None and found.failed:
                raise StaleWeightsError(
                    f"Version {minimum!r} will not be served: hot-load {found.id} of {found.identity!r} "
                    f"is {found.state}",
                    wanted=str(minimum),
                    served=history.served.identity if history.served else None,
                    hint=f"look at: cwtrain hotload status {found.id}",
                )
            return f"version {minimum!r} is not served"
        newest = history.newest
        if settled and newest is not None and not newest.completed and not newest.failed:
            return f"hot-load {newest.id} of {newest.identity!r} is still {newest.state}"
        return None

    def _start(self) -> Future[History]:
        """Begin a read; the lock is held."""
        self._begun = began = self._clock()
        self.reads += 1
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="cwtrain-served")
        running = self._running = self._thread.submit(self.source.history)

        def done(read: Future[History]) -> None:
            with self._lock:
                self._running = None
                if not read.cancelled() and read.exception() is None:
                    if self._history is not None and self._history.loads[:1] != read.result().loads[:1]:
                        self._changed_at = self._clock()
                    self._history = attrs.evolve(read.result(), begun=self._begun_epoch)
                    self._since = began

        running.add_done_callback(done)
        return running

    def close(self) -> None:
        """End the reader's thread after the read that it is at; a later read begins another one.

        That read is let end: rollouts of other event loops may wait for it.
        """
        with self._lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown(wait=False)

    def _leave(self) -> Any:
        """Forget the reader's thread and the read that it is at: they are another process's."""
        left = self._thread, self._running
        self._lock, self._thread, self._running = threading.RLock(), None, None
        self._begun = float("-inf")
        return left


def _made_good(history: History, base: BaselineStatus) -> bool:
    """Whether a base that failed is served in spite of that, or something of its epoch that was made after it."""
    served = history.served
    if served is None or not history.serves_at_least(base.identity):
        return False
    return (
        served.identity == base.identity or base.prefix is None or number_in(base.prefix, served.identity) is not None
    )
