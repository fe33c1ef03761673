"""Hold a deployment: create it, hand it out, and delete it on every way out. See ``lifecycle.running_deployment``."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

from cwtrain.errors import APIError, CWTrainError, LifecycleError, NotFoundError, TransportError, UnexpectedAnswerError
from cwtrain.infra import _adopt
from cwtrain.infra._poll import poll
from cwtrain.infra._requests import with_id
from cwtrain.infra._retry import is_retryable
from cwtrain.infra.client import InferenceClient
from cwtrain.models.service import Deployment

__all__ = ["Sigterm", "held"]

LATE_CREATE_SECONDS = 10.0
"""How long a create whose answer was lost may take to show up at the service."""

SIGTERM_EXIT = 143

logger = logging.getLogger("cwtrain.infra")


@contextmanager
def held(
    client: InferenceClient,
    spec: Mapping[str, Any],
    *,
    wait: Callable[[str], Deployment],
    delete: Callable[[str], bool],
    on_created: Callable[[Deployment], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Deployment]:
    """Create a deployment, yield what ``wait(id)`` returns, and ``delete(id)`` on every way out."""
    tenure = _Tenure(client, with_id(spec), delete, clock, sleep)
    with Sigterm() as sigterm:
        try:
            created = tenure.create()
            if on_created is not None:
                on_created(created)
            yield wait(created.id)
        except BaseException as error:
            with sigterm.deferred():
                tenure.end(error)
            raise
        with sigterm.deferred():
            tenure.end(None)


class _Tenure:
    """What we know of one deployment: surely ours, perhaps ours (a create without an answer), or not."""

    def __init__(
        self,
        client: InferenceClient,
        asked: Mapping[str, Any],
        delete: Callable[[str], bool],
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._client = client
        self._asked = asked
        self._id = str(asked["id"])
        self._delete = delete
        self._clock = clock
        self._sleep = sleep
        self._ours: bool | None = False  # None: perhaps
        self._process = os.getpid()

    def create(self) -> Deployment:
        self._ours = None
        try:
            created = self._client.create_deployment(self._asked)
        except LifecycleError:  # an earlier try of ours, which has failed
            self._ours = True
            raise
        except (TransportError, UnexpectedAnswerError):
            raise
        except APIError as error:
            if not is_retryable(error):  # a plain refusal, or someone else's deployment
                self._ours = False
            raise
        except CWTrainError:  # nothing was sent
            self._ours = False
            raise
        self._ours, self._id = True, created.id
        return created

    def end(self, error: BaseException | None) -> None:
        """Delete the deployment. ``error`` is what ended the block; a failed delete adds a note to it.

        A process that was forked in the block and leaves it, too, deletes nothing.
        """
        if self._ours is False or self._process != os.getpid():
            return
        try:
            if self._ours or self._has_shown_up():
                self._delete(self._id)
        except BaseException as failure:
            warning = (
                f"deployment {self._id} may still run and hold GPUs; "
                f"delete it with: cwtrain deployment delete {self._id}"
            )
            logger.error("%s (%s)", warning, failure)
            if error is None or not isinstance(failure, CWTrainError):
                failure.add_note(warning)
                raise
            error.add_note(f"{warning} ({failure})")

    def _has_shown_up(self) -> bool:
        """Return whether the create without an answer made our deployment. Another one under that id is not ours."""

        def look() -> Deployment | None:
            try:
                return self._client.within(LATE_CREATE_SECONDS).get_deployment(self._id)
            except NotFoundError:
                return None

        def nothing(found: Deployment | None, seen: str, spent: float) -> CWTrainError:
            return _NotThere(seen) if seen == "NOT_FOUND" else CWTrainError(f"no answer in {spent:.0f} s: {seen}")

        try:
            found = poll(
                look,
                done=lambda found: found is not None,
                timeout=LATE_CREATE_SECONDS,
                poll_interval=1.0,
                describe=lambda found: "found" if found else "NOT_FOUND",
                what=f"deployment {self._id} to show up",
                timeout_error=nothing,
                clock=self._clock,
                sleep=self._sleep,
            )
        except _NotThere:
            return False
        return found is not None and not _adopt.differences(self._asked, found.raw.get("spec"))


class _NotThere(CWTrainError):
    """The deployment did not show up. Never leaves this module."""


class Sigterm:
    """SIGTERM as a way out of the block; the handler from before is put back at the end, and called if it came.

    In the main thread, SIGTERM leaves the block with ``SystemExit(143)``, or with what the handler from before raises.
    An ignored SIGTERM stays ignored; in other threads nothing is installed.
    """

    def __init__(self) -> None:
        self._before: Any = None
        self._installed = False
        self._deferring = False
        self._came = False

    def __enter__(self) -> Sigterm:
        before = signal.getsignal(signal.SIGTERM)
        main = threading.current_thread() is threading.main_thread()
        if main and before is not None and before is not signal.SIG_IGN:
            self._before, self._installed = before, True
            signal.signal(signal.SIGTERM, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._installed:
            return
        self._installed = False
        signal.signal(signal.SIGTERM, self._before)
        if self._came:
            if callable(self._before):
                self._before(signal.SIGTERM, None)
            raise SystemExit(SIGTERM_EXIT)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let SIGTERM wait until the block has ended."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        again, self._came = self._came, True
        if not (again or self._deferring):
            raise SystemExit(SIGTERM_EXIT)
