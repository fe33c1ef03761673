"""What was found out about a store while it was used, so that a run's later uploads do not ask it again.

It belongs to one bucket behind one client (``S3Store.learned``), and ends with the client. Only what was seen to be
right is kept: a store that ignores a condition, or whose answer never came, is asked again by the next upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from cwtrain.storage.store import ObjectStore

__all__ = ["PARTS", "PUT", "Learned", "learned_of"]

PUT = "put"
"""The way of an object that goes by one PUT of a stream, be it a file or memory: what is sent around its bytes depends
on the client alone."""
PARTS = "parts"
"""The way of an object that goes in parts."""
_HOUR_SECONDS = 3600.0


class Learned:
    """What is known of one store. Several threads may use it: two that find out the same at once do no harm."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.conditional = False
        """Whether a PUT with ``If-None-Match`` was seen to be refused because the object was there."""
        self.clock = clock
        self._ways: set[str] = set()
        self._told: set[str] = set()
        self._cleaned: dict[str, float] = {}
        self.answered = False
        """Whether the store has ever answered in a useful way."""

    def keeps(self, way: str) -> bool:
        """Return whether the store was seen to keep exactly the bytes of an object that was sent in this way."""
        return way in self._ways

    def kept(self, way: str, size_bytes: int) -> None:
        """Note that it kept exactly the ``size_bytes`` of an object sent in this way; an empty one shows nothing."""
        if size_bytes:
            self._ways.add(way)

    def tell(self, what: str) -> bool:
        """Return whether ``what`` is to be said now: once for each store."""
        if what in self._told:
            return False
        self._told.add(what)
        return True

    def time_to_clean(self, prefix: str) -> bool:
        """Return whether old uploads under ``prefix`` are to be looked for now: once in an hour."""
        now = self.clock()
        self._cleaned = {key: at for key, at in self._cleaned.items() if now - at < _HOUR_SECONDS}
        if prefix in self._cleaned:
            return False
        self._cleaned[prefix] = now
        return True


def learned_of(store: ObjectStore) -> Learned:
    """Return what is known of ``store``; nothing of one that has no place for it (``learned``)."""
    known = getattr(store, "learned", None)
    return known if isinstance(known, Learned) else Learned()
