"""Write an object once: conditionally where the store takes it, and with a look at it after a lost answer."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from cwtrain.errors import StorageConflictError, StorageError, StorageNotFoundError, TransportError
from cwtrain.storage.claim import refuses_condition
from cwtrain.storage.store import ObjectStore

__all__ = ["Once"]

_log = logging.getLogger("cwtrain.storage")
_ATTEMPTS = 3
_PAUSE_SECONDS = 0.3


class Once:
    """The writes of one upload. ``conditional``: whether the store takes ``If-None-Match``, as far as is known."""

    def __init__(self, store: ObjectStore, *, stopped: threading.Event, conditional: bool) -> None:
        self._store = store
        self._stopped = stopped
        self._put = self._complete = conditional

    @property
    def conditional(self) -> bool:
        """Whether an object that is written by one PUT is written only where there is none, as far as is known."""
        return self._put

    def write(
        self, key: str, write: Callable[[bool], None], equal: Callable[[], bool], *, multipart: bool = False
    ) -> bool:
        """Write an object if there is none, and return whether it was this call that did.

        ``write`` is told whether to be conditional. ``equal`` returns whether the object is there and ours, and raises
        SnapshotConflictError when it is someone else's. A refusal because it is there already is no error when it is
        ours: then an earlier attempt was carried out and only its answer was lost.
        """
        for _ in range(_ATTEMPTS):
            if_absent = self._complete if multipart else self._put
            try:
                write(if_absent)
                return True
            except StorageConflictError as error:
                if equal():
                    return False
                # Nothing is there: it is gone again, or another write is under way.
                last: StorageError = error
                self._stopped.wait(_PAUSE_SECONDS)
            except StorageNotFoundError as error:
                if error.code == "NoSuchBucket" or not multipart:
                    raise
                if equal():
                    return False
                raise self._gone(key, error) from error
            except (StorageError, TransportError) as error:
                if isinstance(error, StorageError) and if_absent and refuses_condition(error):
                    self._drop_condition(error, multipart)
                    last = error
                elif _done_after_all(error, equal):
                    return False
                else:
                    raise
        raise last

    def _drop_condition(self, error: StorageError, multipart: bool) -> None:
        what = "completing a multipart upload" if multipart else "a PUT"
        if self._complete if multipart else self._put:
            _log.warning("%s takes no If-None-Match on %s (%s): writing without it", self._store.endpoint, what, error)
        self._complete = False
        self._put = self._put and multipart

    def _gone(self, key: str, error: StorageError) -> StorageError:
        return StorageError(
            f"the multipart upload of s3://{self._store.bucket}/{key} is gone, and the object is not there",
            action=error.action,
            bucket=self._store.bucket,
            key=key,
            code=error.code,
            status=error.status,
            hint="another upload of the same snapshot may have cleaned up after this one: run it again",
        )


def _done_after_all(error: StorageError | TransportError, equal: Callable[[], bool]) -> bool:
    """Return whether a write whose answer never came, or was a failure of the store, was carried out.

    Ceph answers 500 to a Complete that is repeated because the first answer was lost.
    """
    if isinstance(error, StorageError) and (error.status or 0) < 500:
        return False
    try:
        return equal()
    except (StorageError, TransportError):
        return False  # the first error says more
