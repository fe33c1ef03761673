"""What one call of the trainer's hook means, and who does what about it.

    hook(args, <disk dir>, engines)                 rank 0 alone: the base checkpoint; bounded, no collective
    hook(args, <disk dir>/weight_v000007, engines)  every rank: rank 0 publishes, all beat together, all end alike

All decisions (full or delta, epochs, what an empty version is) are the publisher's. Here are only the ranks.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import attrs

from cwtrain.config import HotLoadConfig
from cwtrain.errors import CWTrainError
from cwtrain.events import WeightsWritten, WriteMode
from cwtrain.hotload._publish.look import not_visible
from cwtrain.hotload.publisher import Publisher, PublishOutcome, weight_v_number
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.plugins import Plugins, get_plugins
from cwtrain_slime._args import RunArgs
from cwtrain_slime._checkpoints import SavedCheckpoints
from cwtrain_slime._parts import (
    Part,
    PartsSender,
    Send,
    Spread,
    headers,
    late_for_rank_0,
    local_shards,
    refuse_mirror,
    send,
    spread_of,
)
from cwtrain_slime._ranks import Ranks, Work, find_ranks
from cwtrain_slime._talk import Done, Talk
from cwtrain_slime._tracking import track

if TYPE_CHECKING:
    from cwtrain.hotload.progress import ProgressEvent

__all__ = ["Adapter", "MakePublisher", "adapter_of"]

logger = logging.getLogger("cwtrain.slime")

MakePublisher = Callable[..., Publisher]

APART_SECONDS: Final = 1500.0
"""What a call may take where the ranks cannot beat together: the others stand in a barrier of 30 minutes."""


_LOOK_SECONDS: Final = 1.0
_TELL_SECONDS: Final = 30.0


@attrs.frozen(kw_only=True)
class _Files:
    """What the ranks see of a version: who sends which shard, and what rank 0 still lacks after ``waited`` seconds."""

    spread: Spread | None = None
    late: Sequence[str] = ()
    waited: float = 0.0


class Adapter:
    """One disk directory of a trainer, in one process. ``make`` makes the publisher on the rank that publishes."""

    def __init__(
        self,
        disk_dir: Path,
        *,
        make: MakePublisher = Publisher,
        plugins: Plugins | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.disk_dir = disk_dir
        self._make = make
        self._plugins = plugins
        self._clock = clock
        self._sleep = sleep
        self._publisher: Publisher | None = None
        self._parts = PartsSender()
        self._run_id: str | None = None
        self._saved: SavedCheckpoints | None = None
        self._progress = ""
        self._ending = False
        self._process = os.getpid()

    # -- the two calls -------------------------------------------------------------------------------------------------

    def post_write(self, run: RunArgs, version_dir: str) -> PublishOutcome | None:
        """Publish what the trainer wrote, and return what was done; None on a rank that is not told.

        Raises the same error on every rank of a numbered call; a baseline call raises on rank 0.
        """
        if os.path.realpath(version_dir) == os.path.realpath(self.disk_dir):
            return self._baseline(run)
        return self._numbered(run, find_ranks(run), version_dir)

    def _baseline(self, run: RunArgs) -> PublishOutcome | None:
        """Have the base published, for a bounded time. The other ranks stand in a barrier: nothing here is shared."""
        if run.rank != 0:
            return None
        publisher = self._made(run)
        wait = min(publisher.settings.baseline_wait, APART_SECONDS)
        try:
            outcome = publisher.baseline(wait_seconds=wait)
        except BaseException:
            self._drop()
            raise
        if _changes_hands(run) and not publisher.baseline_running:
            self._drop()
        return outcome

    def _numbered(self, run: RunArgs, ranks: Ranks, version_dir: str) -> PublishOutcome | None:
        what = f"the publish of {Path(version_dir).name}"
        if not ranks.meet:
            logger.warning(
                "the ranks cannot beat together (no group of all ranks): rank 0 has %.0f s for each version",
                APART_SECONDS,
            )
        if ranks.rank != 0:
            self._notify(run, ranks, version_dir)
        files = self._files(run, ranks, version_dir, what)
        spread = files.spread
        parts: list[Part] = []
        if spread is not None:
            found = ranks.together(Work(lambda: headers(version_dir, ranks.rank, spread)), what=what)
            parts = [part for some in found for part in some]
        talk: Talk | None = None
        if ranks.rank == 0:
            deadline = None if ranks.meet else APART_SECONDS
            talk = Talk(lambda talk: self._publish(run, ranks, version_dir, deadline, talk, files, parts))
        outcome = self._follow(ranks, version_dir, talk, what)
        if outcome is not None:
            logger.info("version %d: %s as %s (%s)", outcome.number, outcome.state, outcome.identity, outcome.kind)
            track(run, outcome.metrics, version=outcome.number)
        return outcome

    # -- every rank ----------------------------------------------------------------------------------------------------

    def _files(self, run: RunArgs, ranks: Ranks, version_dir: str, what: str) -> _Files:
        """Return who has which file, once rank 0 sees all that the others see, or has waited for it long enough.

        Every look is a collective, so the ranks beat meanwhile, and what any of them sees late is seen anew.
        """
        if ranks.size == 1 or not ranks.meet:
            return _Files()
        seen = ranks.together(Work(lambda: local_shards(version_dir)), what=what)
        late = late_for_rank_0(seen)
        if not late:
            return _Files()
        asking = Work(lambda: self._patience(run, seen)) if ranks.rank == 0 else None
        seconds: float = ranks.together(asking, what=what)[0]
        began, told = self._clock(), float("-inf")
        over = seconds <= 0
        while late and not over:
            if ranks.rank == 0 and self._clock() - told >= _TELL_SECONDS:
                told = self._clock()
                logger.warning(
                    "%s: rank 0 does not see all of %s: a shared disk may show it late, so it is looked for for up to "
                    "%.0f s more",
                    version_dir,
                    ", ".join(late[:3]),
                    began + seconds - told,
                )
            looking = Work(partial(self._look_again, version_dir, began + seconds))
            seen = ranks.together(looking, what=f"the wait for files of {Path(version_dir).name}")
            late, over = late_for_rank_0(seen), seen[0]["over"]
        return _Files(spread=spread_of(seen), late=late, waited=seconds)

    def _look_again(self, version_dir: str, until: float) -> dict[str, Any]:
        self._sleep(max(0.0, min(_LOOK_SECONDS, until - self._clock())))
        return {**local_shards(version_dir), "over": self._clock() >= until}

    def _patience(self, run: RunArgs, seen: Sequence[Mapping[str, Any]]) -> float:
        """Return for how many seconds rank 0 looks for files that others see.

        Where each rank can send its own shards, only on a disk that is known to be shared: the index is rank 0's, so
        it is where another rank sees it.
        """
        settings = self._settings(run)
        has_index = [INDEX_NAME in one["shards"] for one in seen]
        alone = not (run.full_mode or settings.keeps_mirror or settings.full_every > 0)
        return 0.0 if alone and has_index[0] and not any(has_index[1:]) else settings.files_wait

    def _follow(self, ranks: Ranks, version_dir: str, talk: Talk | None, what: str) -> PublishOutcome | None:
        """Beat until rank 0 is done, doing what it asks for on the way."""
        try:
            while True:
                work = Work(talk.next) if talk is not None else None
                said = ranks.together(work, what=what, progress=lambda: self._progress)[0]
                if isinstance(said, Done):
                    outcome: PublishOutcome = said.value
                    return outcome
                if not isinstance(said, Send):
                    return None  # a rank that is not told: the ranks cannot meet
                sending = partial(send, version_dir, ranks.rank, said)
                answers = ranks.together(Work(sending), what=f"sending the shards of {said.identity}")
                if talk is not None:
                    talk.answer(answers)
        except BaseException:
            if talk is not None:
                talk.give_up()
            raise

    def _notify(self, run: RunArgs, ranks: Ranks, version_dir: str) -> None:
        """Tell plugins that the files exist; on rank 0 the publisher does."""
        plugins = self._plugins if self._plugins is not None else get_plugins()
        plugins.notify(
            WeightsWritten(
                framework=run.dialect.name,
                path=version_dir,
                mode=WriteMode.FULL if run.full_mode else WriteMode.DELTA,
                version=weight_v_number(Path(version_dir)),
                rank=ranks.rank,
                world_size=ranks.size,
            )
        )

    # -- rank 0 --------------------------------------------------------------------------------------------------------

    def _publish(
        self,
        run: RunArgs,
        ranks: Ranks,
        version_dir: str,
        deadline: float | None,
        talk: Talk,
        files: _Files,
        parts: list[Part],
    ) -> PublishOutcome:
        spread = files.spread
        try:
            publisher = self._made(run, world_size=ranks.size)
            if files.late:
                refuse_mirror(
                    publisher.settings,
                    full_mode=run.full_mode,
                    late=files.late,
                    version_dir=version_dir,
                    waited=files.waited,
                )
            if INDEX_NAME in files.late:
                raise not_visible(version_dir, files.late, files.waited)
            if spread is None:
                outcome = publisher.publish_directory(version_dir, deadline=deadline)
            else:
                with self._parts.sending(Path(version_dir), parts, talk, spread, publisher) as directory:
                    outcome = publisher.publish_directory(directory, deadline=deadline)
            self._note(publisher)
            if _changes_hands(run):
                self._drop()
            return outcome
        except BaseException:
            self._drop()
            raise

    def _note(self, publisher: Publisher) -> None:
        """Write beside a checkpoint that the trainer has just saved which snapshot has the same weights."""
        found = self._saved.new() if self._saved is not None else None
        if found is None:
            return
        try:
            publisher.note_checkpoint(found[0], step=found[1])
        except CWTrainError as exc:
            logger.warning("no note beside %s: %s", found[0], exc)

    def _made(self, run: RunArgs, *, world_size: int | None = None) -> Publisher:
        """Return the publisher, made at the first call: only then the environment is looked at."""
        if self._saved is None:
            self._saved = SavedCheckpoints(run.raw)
        if self._publisher is None:
            settings = self._settings(run)
            plugins = self._plugins if self._plugins is not None else get_plugins()
            name = f"cwtrain.{run.dialect.name}.parts:{self.disk_dir}"
            if plugins.plugin(name) is None:
                plugins.register(self._parts, name=name, distribution=f"cwtrain-{run.dialect.name}")
            self._publisher = self._make(
                settings,
                disk_dir=self.disk_dir,
                base=run.hf_checkpoint,
                framework=run.dialect.name,
                world_size=world_size if world_size is not None else run.world_size,
                plugins=plugins,
                on_progress=self._heard,
            )
            # Without a setting the id has the time in it: the next publisher of this process is of the same run.
            self._run_id = self._publisher.run_id
            if not settings.wait and not self._ending:
                self._ending = True
                atexit.register(self._finish)
        return self._publisher

    def _settings(self, run: RunArgs) -> HotLoadConfig:
        if self._publisher is not None:
            return self._publisher.settings
        settings = HotLoadConfig.from_env(run_id=self._run_id)
        if run.full_mode and settings.mirror is None:
            # Every version is whole: there is nothing that a mirror could be needed for.
            settings = attrs.evolve(settings, mirror=False, full_every=0)
        return settings

    def _heard(self, event: ProgressEvent) -> None:
        self._progress = event.summary()

    def _drop(self) -> None:
        """Let go of the publisher after an error: another process may take the run over, or this one begin anew."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()

    def _finish(self) -> None:
        """With WAIT=0 wait for the last hot-load as the process ends; one that is killed leaves it to the service.

        A process that was forked from it (a loader of data) has nothing to wait for.
        """
        if self._publisher is None or os.getpid() != self._process:
            return
        try:
            self._publisher.finish(deadline=self._publisher.settings.timeout)
        except CWTrainError as exc:
            logger.error("the last version: %s; %s", exc, exc.hint)


def _changes_hands(run: RunArgs) -> bool:
    """Return whether another process may have to go on: miles' fault-tolerant trainer retries an update in one.

    The process that failed lives on there, so it must not hold what belongs to the run between two calls.
    """
    return run.dialect.name == "miles" and os.environ.get("MILES_EXPERIMENTAL_FT_TRAINER", "") not in ("", "0")


_ADAPTERS: dict[Path, Adapter] = {}


def adapter_of(run: RunArgs) -> Adapter:
    """Return this process' adapter for the run's disk directory."""
    key = Path(os.path.realpath(run.disk_dir))
    if key not in _ADAPTERS:
        _ADAPTERS[key] = Adapter(run.disk_dir)
    return _ADAPTERS[key]
