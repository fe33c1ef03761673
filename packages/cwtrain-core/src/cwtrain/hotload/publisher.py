"""The one state machine behind every trainer: from "the trainer wrote this directory" to weights that are served.

    from cwtrain.config import HotLoadConfig
    from cwtrain.hotload import Publisher

    publisher = Publisher(HotLoadConfig.from_env(), disk_dir="/ckpt/updates", base="/ckpt/base")
    publisher.baseline()                                   # publishes the base once, in a thread
    publisher.publish_directory("/ckpt/updates/weight_v000001")
    publisher.finish()

**States.** Two numbers are kept apart. *Written* is the trainer's last version; the mirror follows it. *Acknowledged*
is the last identity whose hot-load COMPLETED, with the written versions that have its bytes. Between them a publish is
*pending*: begun (its identity is taken), accepted (the hot-load is known), then acknowledged or refused.

    baseline call ──> epoch opened ──> base PUBLISHING ──> base acknowledged
    numbered call ──> settled ──> placed (next, same, new epoch) ──> mirrored, written ──> decided
        full | delta ──> began ──> accepted ──> acknowledged        (WAIT=0 returns at accepted; the next call settles)
                                          └──> refused ──> a delta once more in full, else an error
        skip ──> an empty version has the bytes of what is acknowledged

**Journal.** Every arrow is written to ``STATE_DIR/journal.json`` before what follows it, so a process that is killed
anywhere goes on: each step is safe to repeat, and what became of a pending hot-load is asked of the service.

**Where what is decided:** ``_publish/decide.py`` (full, delta or nothing; where a version stands; what the base needs;
chains through older snapshots), ``_publish/names.py`` (identities), ``_publish/epochs.py`` (who may publish). All other
modules of ``_publish`` do what was decided. Metrics are those of ``cwtrain.hotload._publish.report``.

One process at a time works with a STATE_DIR, on the one rank that publishes. Nothing here is a collective: adapters let
their other ranks wait. Every method raises a ``CWTrainError`` with a hint.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from cwtrain._process import OneProcess
from cwtrain.config import HotLoadConfig
from cwtrain.errors import HotLoadError
from cwtrain.events import WeightsWritten, WriteMode
from cwtrain.hotload._plugin import with_defaults
from cwtrain.hotload._publish.arguments import base_place, baseline_wait, named_tensors, version_of
from cwtrain.hotload._publish.baseline import Baseline, check_base
from cwtrain.hotload._publish.follow import Follower
from cwtrain.hotload._publish.housekeeping import PublishedNote, note_of, read_note, write_note
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.look import NumberOf, look_at, weight_v_number, when_visible
from cwtrain.hotload._publish.names import default_run_id, identity_of
from cwtrain.hotload._publish.numbered import Numbered
from cwtrain.hotload._publish.opening import Opening
from cwtrain.hotload._publish.outcome import PublishOutcome, PublishState
from cwtrain.hotload._publish.plan import TensorBase, TensorPlan, Tensors
from cwtrain.hotload._publish.refused import naming_the_setting
from cwtrain.hotload._publish.send import Budget, Sender
from cwtrain.hotload._publish.state import State, WriteKind
from cwtrain.hotload._publish.tensors import TensorFeed
from cwtrain.hotload.loader import HotLoader
from cwtrain.hotload.progress import OnProgress, failure
from cwtrain.models.sync import SnapshotChoice

if TYPE_CHECKING:
    from cwtrain.hotload.writer import WrittenSnapshot
    from cwtrain.infra.client import InferenceClient
    from cwtrain.plugins import Plugins
    from cwtrain.storage import Location, ObjectStore

__all__ = [
    "PublishOutcome",
    "PublishState",
    "PublishedNote",
    "Publisher",
    "TensorBase",
    "TensorPlan",
    "read_note",
    "weight_v_number",
]

_log = logging.getLogger("cwtrain.hotload")

T = TypeVar("T")

_MODES = {
    WriteKind.BASELINE: WriteMode.ROOT,
    WriteKind.DELTA: WriteMode.DELTA,
    WriteKind.EMPTY: WriteMode.DELTA,
    WriteKind.FULL: WriteMode.FULL,
}


class Publisher(OneProcess):
    """Publishes a trainer's versions to one deployment; made once, on the one rank that publishes.

    ``disk_dir`` is the directory that holds the trainer's version directories, ``base`` the checkpoint that its first
    delta applies to (``--hf-checkpoint``). A publisher of tensors needs no ``disk_dir``: without one and STATE_DIR its
    state lies in ``<run>-hotload`` in the working directory. ``number_of`` reads the version from a directory's name
    (by default ``weight_v000007``). ``tensor_base`` makes it a publisher of tensors: ``memory``, ``disk`` or ``none``
    says where the base of the next delta lives, and no mirror is kept beside it. ``framework`` and ``world_size`` are
    for the events. ``client`` is an ``InferenceClient``, ``s3`` a boto3 client or an object store; both are made from
    the environment without them. ``on_progress`` hears of uploads and hot-loads. ``poll_interval`` is in seconds.

    Raises ConfigError for settings that do not fit together, MirrorLockedError naming the process that works with the
    same STATE_DIR. Every call raises ConfigError where something in STATE_DIR cannot be read or written.
    """

    _instead = "close it here and make one there: Publisher(settings, disk_dir=...) goes on where this one stopped"

    def __init__(
        self,
        settings: HotLoadConfig,
        *,
        disk_dir: str | os.PathLike[str] | None = None,
        base: str | os.PathLike[str] | None = None,
        framework: str = "own",
        world_size: int = 1,
        client: InferenceClient | None = None,
        s3: Any = None,
        plugins: Plugins | None = None,
        number_of: NumberOf = weight_v_number,
        tensor_base: TensorBase | str | None = None,
        poll_interval: float = 5.0,
        on_progress: OnProgress | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        where = base_place(tensor_base)
        self.settings = settings
        self.base = None if base is None else os.path.realpath(os.fspath(base))
        self.run_id = settings.run_id or _stamped("run" if disk_dir is None else os.path.realpath(os.fspath(disk_dir)))
        # Without a trainer's directory the run's name, here, stands for one: the state lies beside it.
        self.disk_dir = os.path.realpath(self.run_id if disk_dir is None else os.fspath(disk_dir))
        self._framework = framework
        self._world_size = world_size
        self._number_of = number_of
        self._clock = clock
        self._sleep = sleep
        if client is None:
            from cwtrain.infra.client import InferenceClient

            client = InferenceClient()
        if plugins is None:
            from cwtrain.plugins import get_plugins

            plugins = get_plugins()
        self._plugins = plugins
        self._defaults = with_defaults(plugins)
        loader = HotLoader(
            client,
            settings.deployment_id,
            s3=s3,
            poll_interval=poll_interval,
            timeout=settings.timeout,
            plugins=plugins,
            run_id=self.run_id,
            clock=clock,
            sleep=sleep,
        )
        self.loader = loader
        self._journal = Journal(
            settings.state_dir or f"{self.disk_dir}-hotload", run_id=self.run_id, deployment_id=settings.deployment_id
        )
        self._follower = None
        if settings.keeps_mirror and (tensor_base is None or settings.mirror):
            self._follower = Follower(self._journal, where=self._where, log=_log.warning)
        self._sender = Sender(loader, settings, clock, sleep, on_progress)
        opening = Opening(self._journal, self._follower, self._sender, self.base)
        self._numbered = Numbered(
            settings, self._journal, self._follower, self._sender, self.disk_dir, self.base, clock, opening
        )
        self._feed = TensorFeed(self._numbered, where)
        self._mutex = threading.Lock()
        self._closed = False
        self._baseline_ended: threading.Event | None = None
        self._baseline_error: BaseException | None = None
        self._baseline_told: BaseException | None = None

    def __repr__(self) -> str:
        return f"Publisher(run_id={self.run_id!r}, deployment_id={self.settings.deployment_id!r})"

    # -- what it knows ---------------------------------------------------------------------------------------------

    @property
    def state(self) -> State:
        """What the journal says: epoch, written, acknowledged, pending."""
        return self._journal.state

    @property
    def state_dir(self) -> Path:
        """Where journal and mirror lie."""
        return Path(self._journal.root)

    @property
    def baseline_running(self) -> bool:
        """Whether the base checkpoint is still on its way."""
        self._check_process()
        return self._baseline_ended is not None and not self._baseline_ended.is_set()

    # -- what a trainer calls --------------------------------------------------------------------------------------

    def baseline(self, *, wait_seconds: float | None = None) -> PublishOutcome:
        """Have the base checkpoint served, and return after at most BASELINE_WAIT (or ``wait_seconds``).

        What can be checked at once is. The publish then goes on in a thread; the first numbered call waits for it, and
        rollouts read how it goes from the status object (``cwtrain.hotload.status``). Opens an epoch. The same run
        started again finds the base published and equal, and uploads nothing.

        Raises what has gone wrong by then; a later failure is raised by the first numbered call, and the next one
        begins the base anew.
        """
        wait = baseline_wait(self.settings.baseline_wait if wait_seconds is None else wait_seconds)
        with self._called(tell=False):
            self._plugins.notify(self._event(WriteKind.BASELINE, self.disk_dir, None))
            return self._start_baseline(wait)

    def publish_directory(
        self,
        path: str | os.PathLike[str],
        *,
        number: int | None = None,
        deadline: float | None = None,
    ) -> PublishOutcome:
        """Publish what the trainer wrote at ``path``, and say what was done.

        What it is follows from its content: ``disk_dir`` itself is a baseline call; otherwise a delta, an empty one or
        a full snapshot. ``number`` is the trainer's version, where its name does not say it. ``deadline`` bounds the
        call in seconds, upload included, where DEADLINE does not say so; joining the baseline is not counted. The
        directory is read until this returns, and not afterwards. Files that a shared disk shows late, or in part, are
        looked for again for FILES_WAIT seconds.

        The same call made again, after an error or in a new process, goes on where it stopped.

        Raises SnapshotLayoutError, SnapshotChainError, SnapshotConflictError, StorageError naming a refused permission,
        HotLoadFailedError, WaitTimeoutError; ConfigError where settings do not fit what was written.
        """
        number = None if number is None else version_of(number)
        with self._called(number):
            began = self._clock()
            look = self._visible(
                lambda: look_at(path, disk_dir=self.disk_dir, number=number, number_of=self._number_of),
                path,
                self._budget(deadline).left(),
            )
            waited = self._clock() - began
            self._plugins.notify(self._event(look.kind, look.path, look.number))
            if look.kind is WriteKind.BASELINE:
                return self._start_baseline(baseline_wait(self.settings.baseline_wait))
            self._join()
            event = self._event(look.kind, look.path, look.number)
            with self._timed(deadline, used=waited) as budget:
                return self._numbered.run(look, event, budget)

    def publish_tensors(
        self,
        tensors: Tensors,
        *,
        number: int,
        dtype: str | Mapping[str, str] | None = None,
        deadline: float | None = None,
    ) -> PublishOutcome:
        """Publish named tensors as version ``number``, encoded and uploaded while the next one is produced.

        ``tensors`` is a mapping, or a function that gives (name, tensor) pairs anew at each call: a delta that fails in
        the engine is published once more in full. All tensors of the model, changed or not; numpy arrays, torch
        tensors, or anything with the buffer protocol. ``dtype`` says what those are that do not say it themselves, all
        of them or by name: 16-bit words of numpy may be ``BF16``. A tensor with another dtype of its own is refused.
        Nothing is written to the disk but the base of the
        next delta where ``tensor_base`` is ``disk``. Config and tokenizer come from ``base``.

        Raises ConfigError where there is no room for the base of the next delta, and as ``publish_directory``.
        """
        number, given = version_of(number), named_tensors(tensors, dtype)
        with self._called(number):
            event = self._event(WriteKind.FULL, "", number)
            self._plugins.notify(event)
            self._join()
            with self._timed(deadline) as budget:
                return self._feed.publish(given, number, event, budget)

    def begin_tensors(self, *, number: int, base_identity: str | None) -> TensorPlan | PublishOutcome:
        """Decide how version ``number``, which several ranks write together, is published; on rank 0.

        ``base_identity`` is what the bases of *all* ranks hold (``BaseTensors.identity``), None where one holds nothing
        whole. The plan goes to all ranks, each of which writes by it (see ``TensorPlan``). Where a plugin skips the
        version, its outcome is returned instead. Raises as ``publish_directory``.
        """
        number = version_of(number)
        with self._called(number):
            event = self._event(WriteKind.FULL, "", number)
            self._plugins.notify(event)
            self._join()
            with self._timed(None) as budget:
                self._feed.place(number, budget)
                return self._feed.begin(number, event, budget, held=base_identity)

    def finish_tensors(
        self, plan: TensorPlan, written: WrittenSnapshot, *, deadline: float | None = None
    ) -> PublishOutcome:
        """Have the deployment load what rank 0 finalised by ``plan``, and say what was done.

        Raises HotLoadFailedError where the engine did not take it: ``begin_tensors`` with ``base_identity=None`` then
        publishes the same version in full.
        """
        with self._called(plan.number), self._timed(deadline) as budget:
            return self._feed.finish(plan, written, budget)

    def finish(self, *, deadline: float | None = None) -> None:
        """Wait for what is still on its way: the baseline, and with WAIT=0 the last hot-load.

        Raises HotLoadError where what the trainer wrote last is not served and cannot be brought.
        """
        with self._called(tell=False):
            self._join(again=False)
            budget = Budget(deadline, self._clock, name="deadline")
            with self._sender.within(budget):
                self._numbered.finish(budget)

    def close(self) -> None:
        """Let another process work with STATE_DIR. Waits for nothing; can be called twice.

        A baseline that is still on its way goes on, and STATE_DIR is let go when it ends. Does nothing in a forked
        process: there is nothing of its own.
        """
        if self._in_fork:
            return
        self._closed = True
        if not self.baseline_running:
            self._let_go()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def note_checkpoint(self, directory: str | os.PathLike[str], *, step: int) -> str:
        """Write (step, version, identity) beside the trainer's checkpoint in ``directory``, and return the file's path.

        ``read_note`` reads it: a resume then starts from the snapshot that has the checkpoint's weights. Raises
        HotLoadError while nothing is published.
        """
        self._check_process()
        return write_note(directory, note_of(self.state, step=step))

    # -- inside ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _called(self, number: int | None = None, *, tell: bool = True) -> Iterator[None]:
        """One call at a time, none after ``close`` (another process may work with STATE_DIR then). ``tell`` plugins."""
        self._check_process()
        with self._mutex:
            syncs = self.loader.syncs
            before = syncs.count
            try:
                if self._closed:
                    raise HotLoadError(
                        f"the publisher of run {self.run_id} is closed: it gave up {self.state_dir}",
                        hint="make another Publisher with the same CWTRAIN_HOTLOAD_RUN_ID: it goes on where this one "
                        "stopped",
                    )
                with naming_the_setting(self._journal.root):
                    yield
            except BaseException as error:
                failed = self._defaults.last_failure
                told = failed is not None and error in (failed, failed.__cause__)
                if tell and not told and syncs.count == before:
                    self._plugins.notify(failure(error, version=number, run_id=self.run_id))
                raise

    def _visible(self, look: Callable[[], T], place: str | os.PathLike[str], most: float) -> T:
        """Return what ``look`` sees of ``place``, given time to show: FILES_WAIT, or ``most`` seconds."""
        seconds = min(self.settings.files_wait, most)
        return when_visible(look, place, seconds=seconds, clock=self._clock, sleep=self._sleep)

    @contextlib.contextmanager
    def _timed(self, deadline: float | None, *, used: float = 0.0) -> Iterator[Budget]:
        """Give the time of one call, with which everything ends that it asks for: DEADLINE, or the caller's."""
        budget = self._budget(deadline, used=used)
        with self._sender.within(budget):
            yield budget

    def _budget(self, deadline: float | None, *, used: float = 0.0) -> Budget:
        seconds = self.settings.deadline if self.settings.deadline is not None else deadline
        return Budget(seconds, self._clock, name="deadline", used=used)

    def _where(self) -> tuple[ObjectStore, Location]:
        loader = self._sender.loader
        return loader.store, loader.location

    def _let_go(self) -> None:
        if self._follower is not None:
            self._follower.close()
        self._feed.close()
        self._journal.close()

    def _start_baseline(self, wait_seconds: float) -> PublishOutcome:
        if self._baseline_ended is not None:
            self._baseline_ended.wait()
        self._baseline_ended, self._baseline_error = None, None
        mirror_path = self._journal.mirror_path if self._follower else None
        snapshot = self._visible(lambda: check_base(self.base, mirror_path=mirror_path), self.base or "", wait_seconds)
        baseline = Baseline(self.base, self.settings, self._journal, self._follower, self._sender)
        ended = threading.Event()

        def work() -> None:
            try:
                baseline.run(snapshot)
            except BaseException as error:  # noqa: BLE001 - raised by whoever waits for the thread
                self._baseline_error = error
                _log.error("the base checkpoint could not be published: %s", error)
            finally:
                ended.set()
            if self._closed:
                self._let_go()

        # A daemon: a process whose main thread has ended must not stay for it. Nothing is lost, the next start goes on.
        # Waited for by the event: a Ctrl-C within Thread.join() leaves a running thread marked as ended (CPython 3.11).
        self._baseline_ended = ended
        try:
            threading.Thread(target=work, name="cwtrain-baseline", daemon=True).start()
        except RuntimeError:  # no thread can be had
            ended.set()
            raise
        running = not ended.wait(wait_seconds)
        if running:
            _log.warning(
                "the base checkpoint is still being published after %.0f s; the first version waits for it",
                wait_seconds,
            )
        else:
            self._raise_baseline_error()
        state = self.state
        return PublishOutcome(
            identity=state.acknowledged.identity if state.acknowledged else identity_of(self.run_id, 1, 0),
            kind=SnapshotChoice.FULL,
            number=0,
            epoch=state.epoch,
            state=PublishState.PUBLISHING if running else PublishState.COMPLETED,
        )

    def _join(self, *, again: bool = True) -> None:
        """Wait for the baseline's thread, and raise what became of it; ``again``: once, then it is begun anew."""
        if self._baseline_ended is not None:
            self._baseline_ended.wait()
            self._baseline_ended = None
        if again and self._baseline_error is not None and self._baseline_error is self._baseline_told:
            self._start_baseline(threading.TIMEOUT_MAX)
        self._raise_baseline_error()

    def _raise_baseline_error(self) -> None:
        self._baseline_told = self._baseline_error
        if self._baseline_error is not None:
            raise self._baseline_error

    def _event(self, kind: WriteKind, path: str, number: int | None) -> WeightsWritten:
        return WeightsWritten(
            framework=self._framework,
            path=path,
            mode=_MODES[kind],
            version=number,
            world_size=self._world_size,
            run_id=self.run_id,
        )


def _stamped(disk_dir: str) -> str:
    run = default_run_id(disk_dir, dt.datetime.now(dt.UTC))
    _log.warning(
        "CWTRAIN_HOTLOAD_RUN_ID is not set: this run is %s, and a restart will be another run that publishes its base "
        "again. Set it to go on after a restart",
        run,
    )
    return run
