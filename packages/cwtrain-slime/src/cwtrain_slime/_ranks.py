"""The ranks of a trainer in one numbered call: they beat together, and all return or all raise.

After the hook the trainer's ranks meet in a barrier of the gloo group that all of them share, and gloo gives up after
30 minutes, whatever flag is set. So while one rank publishes, which may take hours, all ranks meet in a short
collective every few seconds. It also carries the end: when one rank fails, every rank raises its error.

The group is looked up at each call: slime destroys and rebuilds it when it offloads the trainer. Only collectives that
the trainers' own writers use are used here, since both trainers wrap ``torch.distributed``.
"""

from __future__ import annotations

import logging
import pickle
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

import attrs

from cwtrain.errors import CWTrainError, IntegrationError
from cwtrain_slime._args import RunArgs

__all__ = ["BEAT_SECONDS", "TOLD_EVERY", "Ranks", "Work", "find_ranks"]

logger = logging.getLogger("cwtrain.slime")

BEAT_SECONDS: Final = 10.0
"""At most so long between two collectives; a tenth of the group's own time limit where that is shorter."""
TOLD_EVERY: Final = 60.0
"""A rank that works says so in its log at least every so many seconds."""
_GLOO_SECONDS: Final = 1800.0


class Work:
    """A piece of work in a thread of its own, so that the rank's main thread is free to beat.

    Nothing can be taken back from a thread: when another rank fails, this one raises and the thread goes on. It is a
    daemon: it never keeps a dying trainer alive.
    """

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call
        self._done = threading.Event()
        self.value: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="cwtrain-publish", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.value = self._call()
        except BaseException as exc:  # noqa: BLE001 - whatever it is, it is the other ranks' end too
            self.error = exc
        finally:
            self._done.set()

    def wait(self, seconds: float) -> bool:
        """Return whether the work is done, after at most ``seconds``."""
        return self._done.wait(seconds)

    @property
    def done(self) -> bool:
        """Whether the work has ended, well or badly."""
        return self._done.is_set()


@attrs.frozen(kw_only=True)
class Ranks:
    """The ranks that make a call together. ``group`` is None where there is no group to meet in."""

    rank: int
    size: int
    group: Any = None
    beat_seconds: float = BEAT_SECONDS
    told_every: float = TOLD_EVERY

    @property
    def meet(self) -> bool:
        """Whether the ranks can beat together; a rank alone need not."""
        return self.group is not None or self.size == 1

    def together(self, work: Work | None, *, what: str, progress: Callable[[], str] = str) -> list[Any]:
        """Return what each rank's work gave, by rank, once all are done; None for a rank without work.

        Every rank calls this. Raises the error of the lowest rank that failed, on every rank; IntegrationError when a
        rank is lost. ``what`` and ``progress()`` are words for the log.
        """
        began = told = time.monotonic()
        while True:
            done = work is None or work.wait(self.beat_seconds)
            all_done, failed = self._state(done, done and work is not None and work.error is not None, what)
            if failed or all_done:
                break
            if work is not None and not done and time.monotonic() - told >= self.told_every:
                told = time.monotonic()
                logger.info("%s goes on after %.0f s%s", what, told - began, _tail(progress()))
        value = work.value if work is not None and work.done else None
        error = work.error if work is not None and work.done else None
        outcomes = self._gathered(value, error, what)
        for rank, (_, portable) in enumerate(outcomes):
            if portable is None:
                continue
            if rank == self.rank and error is not None:
                raise error
            portable.add_note(f"rank {rank} of {self.size} failed, so all ranks stop")
            raise portable
        return [value for value, _ in outcomes]

    def _state(self, done: bool, failed: bool, what: str) -> tuple[bool, bool]:
        """Beat once and return (all are done, at least one failed)."""
        if self.group is None:
            return done, failed
        import torch
        import torch.distributed as dist

        state = torch.tensor([int(done), -int(failed)], dtype=torch.int64)
        try:
            dist.all_reduce(state, op=dist.ReduceOp.MIN, group=self.group)
        except RuntimeError as exc:
            raise self._lost(what) from exc
        return bool(state[0].item() == 1), bool(state[1].item() == -1)

    def _gathered(self, value: Any, error: BaseException | None, what: str) -> list[tuple[Any, CWTrainError | None]]:
        mine = (value, None if error is None else _portable(error))
        if self.group is None:
            return (
                [mine] if self.size == 1 else [mine if rank == self.rank else (None, None) for rank in range(self.size)]
            )
        import torch.distributed as dist

        outcomes: list[Any] = [None] * self.size
        try:
            dist.all_gather_object(outcomes, mine, group=self.group)
        except RuntimeError as exc:
            raise self._lost(what) from exc
        return outcomes

    def _lost(self, what: str) -> IntegrationError:
        return IntegrationError(
            f"rank {self.rank} of {self.size} lost the other ranks during {what}",
            hint="a trainer process died or hangs: look at the other ranks' logs for the first error, then start the "
            "run again with the same CWTRAIN_HOTLOAD_RUN_ID",
        )


def find_ranks(run: RunArgs) -> Ranks:
    """Return the ranks of this call with the trainer's present gloo group.

    Without ``torch.distributed``, or without the trainer's own group (a fork that keeps it elsewhere), the ranks cannot
    meet: then only the calling rank's work counts, and it needs a deadline.
    """
    torch = sys.modules.get("torch")
    if torch is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return Ranks(rank=run.rank, size=run.world_size)
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if size == 1:
        return Ranks(rank=rank, size=1)
    group = _gloo_group(run)
    if group is None:
        return Ranks(rank=rank, size=size)
    return Ranks(rank=rank, size=size, group=group, beat_seconds=min(BEAT_SECONDS, _limit(group) / 10))


def _gloo_group(run: RunArgs) -> Any:
    module = sys.modules.get(run.dialect.gloo_module)
    try:
        return None if module is None else module.get_gloo_group()
    except (AttributeError, RuntimeError):
        logger.warning("%s has no group of all ranks: the ranks cannot beat together", run.dialect.gloo_module)
        return None


def _limit(group: Any) -> float:
    """Return after how many seconds a collective of ``group`` gives up."""
    import torch

    try:
        return float(group._get_backend(torch.device("cpu")).options._timeout.total_seconds())
    except (AttributeError, RuntimeError):  # not public in torch; gloo's default is what it nearly always is
        return _GLOO_SECONDS


def _portable(error: BaseException) -> CWTrainError:
    """Return an error that other processes can unpickle and raise."""
    if isinstance(error, CWTrainError):
        try:
            pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
        except Exception:  # noqa: BLE001 - an attribute that does not travel: the words still do
            return CWTrainError(error.message, hint=error.hint)
        return error
    words = str(error).strip()
    return IntegrationError(f"{type(error).__name__}{': ' if words else ''}{words}")


def _tail(words: str) -> str:
    return f": {words}" if words else ""
