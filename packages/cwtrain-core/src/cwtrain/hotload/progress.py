"""What a long publish tells its caller while it goes on."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import attrs

from cwtrain.models.service import HotLoad, HotLoadReplica
from cwtrain.models.text import duration, size

if TYPE_CHECKING:
    from cwtrain.storage import UploadProgress

__all__ = ["OnProgress", "ProgressEvent"]


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


def _age(hot_load: HotLoad) -> str:
    created = hot_load.status.created_at
    if created is None:
        return ""
    if created.tzinfo is None:
        created = created.replace(tzinfo=dt.UTC)
    seconds = max(0.0, (dt.datetime.now(dt.UTC) - created).total_seconds())
    return f", {duration(round(seconds))} old"
