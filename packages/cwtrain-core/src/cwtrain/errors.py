"""Every error that cwtrain raises.

    CWTrainError                       message, hint
    ├── ConfigError (ValueError)       a setting or an argument cannot be used
    ├── PluginError
    │   ├── PluginLoadError            a plugin could not be imported (strict mode)
    │   └── PluginConflictError        two plugins offer the same name
    ├── TransportError                 no answer came
    │   ├── ConnectionFailedError      (ConnectionError)
    │   └── RequestTimeoutError        (TimeoutError)
    ├── APIError                       code, status, request_id, details
    │   ├── InvalidArgumentError · UnauthenticatedError · PermissionDeniedError · NotFoundError
    │   ├── AlreadyExistsError(differences) · FailedPreconditionError ─ HotLoadInProgressError(hot_load_id)
    │   ├── ResourceExhaustedError(retry_after) · AbortedError · UnimplementedError · OutOfRangeError
    │   ├── InternalServerError · UnavailableError · DeadlineExceededError · CanceledError
    │   └── DataLossError · UnknownError · UnexpectedAnswerError (an answer we cannot read)
    ├── StorageError                   action (the S3 permission), bucket, key, code, status, request_id
    │   ├── StorageAccessError · StorageNotFoundError · StorageRegionError
    │   └── StorageConflictError       a conditional write was refused (412)
    ├── SnapshotError (ValueError)
    │   ├── SnapshotLayoutError(problems) · SnapshotConflictError(objects)
    │   ├── SnapshotChainError · ChecksumError · SnapshotChangedError
    │   └── MirrorError                the local copy of the weights cannot be used
    │       └── MirrorLockedError · MirrorDamagedError · MirrorMissingError
    ├── HotLoadError                   hot_load
    │   ├── HotLoadFailedError · HotLoadCanceledError
    ├── LifecycleError                 resource, status
    │   ├── DeploymentFailedError · GatewayFailedError
    ├── WaitTimeoutError (TimeoutError)  last_seen
    │   └── HotLoadTimeoutError        hot_load
    └── IntegrationError
        └── UnsupportedFrameworkError(found, supported)

The message says what happened and where; ``hint`` says what to do next, with the command where there is one. ``str()``
gives the message alone; the CLI prints both, and Python's traceback shows the hint as a note.

To add an error: 1. a class here with one sentence, keyword-only extras with defaults (so that it pickles by itself);
2. its line in the tree above; 3. its row in ``docs/reference/errors.md``; 4. raise it with a hint. Tests check 2 and 3,
and pickle every class.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "APIError",
    "AbortedError",
    "AlreadyExistsError",
    "CWTrainError",
    "CanceledError",
    "ChecksumError",
    "ConfigError",
    "ConnectionFailedError",
    "DataLossError",
    "DeadlineExceededError",
    "DeploymentFailedError",
    "FailedPreconditionError",
    "GatewayFailedError",
    "HotLoadCanceledError",
    "HotLoadError",
    "HotLoadFailedError",
    "HotLoadInProgressError",
    "HotLoadTimeoutError",
    "IntegrationError",
    "InternalServerError",
    "InvalidArgumentError",
    "LifecycleError",
    "MirrorDamagedError",
    "MirrorError",
    "MirrorLockedError",
    "MirrorMissingError",
    "NotFoundError",
    "OutOfRangeError",
    "PermissionDeniedError",
    "PluginConflictError",
    "PluginError",
    "PluginLoadError",
    "RequestTimeoutError",
    "ResourceExhaustedError",
    "SnapshotChainError",
    "SnapshotChangedError",
    "SnapshotConflictError",
    "SnapshotError",
    "SnapshotLayoutError",
    "StorageAccessError",
    "StorageConflictError",
    "StorageError",
    "StorageNotFoundError",
    "StorageRegionError",
    "TransportError",
    "UnauthenticatedError",
    "UnavailableError",
    "UnexpectedAnswerError",
    "UnimplementedError",
    "UnknownError",
    "UnsupportedFrameworkError",
    "WaitTimeoutError",
]

_NEXT = "next: "


class CWTrainError(Exception):
    """Anything that cwtrain raises on purpose.

    ``hint`` is the next step in one sentence, or None. It is the last of the exception's notes, too, so that a Python
    traceback shows it.
    """

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        if hint:
            super().add_note(f"{_NEXT}{hint}")

    def add_note(self, note: str) -> None:
        """Add a note; the hint stays the last one."""
        self.__notes__ = list(self.notes)  # a new list: a copy of the error shares the one that was there
        super().add_note(note)
        if self.hint:
            super().add_note(f"{_NEXT}{self.hint}")

    @property
    def notes(self) -> tuple[str, ...]:
        """The notes that were added, without the hint."""
        return tuple(one for one in getattr(self, "__notes__", ()) if one != f"{_NEXT}{self.hint}")


class ConfigError(CWTrainError, ValueError):
    """A setting or an argument cannot be used; ``problems`` lists every one that was found."""

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class PluginError(CWTrainError):
    """A plugin is at fault."""


class PluginLoadError(PluginError):
    """A plugin could not be loaded, and ``CWTRAIN_STRICT_PLUGINS=1`` asked to stop for that."""


class PluginConflictError(PluginError):
    """Two plugins register the same name."""


class TransportError(CWTrainError):
    """No usable answer came from the other side, so what it did is unknown."""


class ConnectionFailedError(TransportError, ConnectionError):
    """The connection could not be made, or broke."""


class RequestTimeoutError(TransportError, TimeoutError):
    """The answer took longer than the request's timeout."""


class APIError(CWTrainError):
    """The service refused a call.

    ``code`` is the canonical gRPC code in lower case (``not_found``), ``status`` the HTTP status, ``request_id`` what
    support asks for, ``details`` the typed details of the answer, as plain data.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        details: Iterable[Mapping[str, Any]] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.status = status
        self.request_id = request_id
        self.details: tuple[dict[str, Any], ...] = tuple(dict(detail) for detail in details)


class InvalidArgumentError(APIError):
    """The service says that the request is malformed (400)."""


class UnauthenticatedError(APIError):
    """The token is missing, wrong or expired (401)."""


class PermissionDeniedError(APIError):
    """The token's roles do not allow the call (403)."""


class NotFoundError(APIError):
    """The named resource does not exist (404)."""


class AlreadyExistsError(APIError):
    """The id or the name is taken by something else; ``differences`` names the fields that differ from ours."""

    def __init__(
        self,
        message: str,
        *,
        differences: Sequence[str] = (),
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        details: Iterable[Mapping[str, Any]] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, status=status, request_id=request_id, details=details, hint=hint)
        self.differences = tuple(differences)


class FailedPreconditionError(APIError):
    """The resource's state does not allow the call (400 or 412)."""


class HotLoadInProgressError(FailedPreconditionError):
    """Another hot-load of the deployment is unfinished; ``hot_load_id`` names it."""

    def __init__(
        self,
        message: str,
        *,
        hot_load_id: str | None = None,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        details: Iterable[Mapping[str, Any]] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, status=status, request_id=request_id, details=details, hint=hint)
        self.hot_load_id = hot_load_id


class ResourceExhaustedError(APIError):
    """A quota or rate limit is used up (429); ``retry_after`` is the server's pause in seconds, if it named one."""

    def __init__(
        self,
        message: str,
        *,
        retry_after: float | None = None,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        details: Iterable[Mapping[str, Any]] = (),
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, status=status, request_id=request_id, details=details, hint=hint)
        self.retry_after = retry_after


class AbortedError(APIError):
    """The service gave the call up because of another one at the same time."""


class OutOfRangeError(APIError):
    """A value lies outside what the resource has."""


class UnimplementedError(APIError):
    """The service does not offer this call (501)."""


class InternalServerError(APIError):
    """The service failed inside (500)."""


class UnavailableError(APIError):
    """The service cannot answer now (502, 503)."""


class DeadlineExceededError(APIError):
    """The service ran out of its own time (408, 504)."""


class CanceledError(APIError):
    """The service says that the call was canceled (499)."""


class DataLossError(APIError):
    """The service reports lost or damaged data."""


class UnknownError(APIError):
    """The service failed without saying how."""


class UnexpectedAnswerError(APIError):
    """The service answered something that is not in its contract: no JSON, a missing key, an empty id."""


class StorageError(CWTrainError):
    """The object store refused or failed.

    ``action`` is the S3 permission that the call needs (``s3:PutObject``), ``bucket`` and ``key`` say where, ``code``
    and ``status`` are the store's own code and HTTP status, ``request_id`` is what its support asks for,
    ``retry_after`` the pause in seconds that it asks for, if it named one.
    """

    def __init__(
        self,
        message: str,
        *,
        action: str | None = None,
        bucket: str | None = None,
        key: str | None = None,
        code: str | None = None,
        status: int | None = None,
        request_id: str | None = None,
        retry_after: float | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.action = action
        self.bucket = bucket
        self.key = key
        self.code = code
        self.status = status
        self.request_id = request_id
        self.retry_after = retry_after


class StorageAccessError(StorageError):
    """The credentials do not allow the action, or there are none."""


class StorageNotFoundError(StorageError):
    """The bucket or the object does not exist."""


class StorageRegionError(StorageError):
    """The region is missing or is not the bucket's."""


class StorageConflictError(StorageError):
    """A conditional write found that the object is already there (412)."""


class SnapshotError(CWTrainError, ValueError):
    """A snapshot cannot be used as it is."""


class SnapshotLayoutError(SnapshotError):
    """The directory is no snapshot; ``problems`` lists everything that is wrong, with file and fix."""

    def __init__(self, message: str, *, problems: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.problems = tuple(problems)


class SnapshotConflictError(SnapshotError):
    """The identity is taken by other content; ``objects`` names what differs. Nothing was written."""

    def __init__(self, message: str, *, objects: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.objects = tuple(objects)


class SnapshotChainError(SnapshotError):
    """The delta cannot be resolved on this deployment: predecessor unknown, not completed, or chain too long."""


class ChecksumError(SnapshotError):
    """Bytes do not match their checksum, or a compressed frame is damaged; ``tensor`` names where."""

    def __init__(self, message: str, *, tensor: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.tensor = tensor


class SnapshotChangedError(SnapshotError):
    """A file changed while it was read: what was sent may be a mixture and is not used; ``file`` names it."""

    def __init__(self, message: str, *, file: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.file = file


class MirrorError(SnapshotError):
    """The local copy of the weights cannot be used, or not in this way."""


class MirrorLockedError(MirrorError):
    """Another process works with the mirror; the message names it."""


class MirrorDamagedError(MirrorError):
    """The mirror's files are not those of a version: it has to be made again, from the bucket or a checkpoint."""


class MirrorMissingError(MirrorError):
    """There is no mirror in that place: it has to be made first."""


class HotLoadError(CWTrainError):
    """A hot-load did not end well; ``hot_load`` is the last known state of it (a ``HotLoad``), if any."""

    def __init__(self, message: str, *, hot_load: Any = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.hot_load = hot_load


class HotLoadFailedError(HotLoadError):
    """The hot-load ended as FAILED."""


class HotLoadCanceledError(HotLoadError):
    """The hot-load ended as CANCELED."""


class LifecycleError(CWTrainError):
    """A deployment or gateway cannot reach the awaited state; ``resource`` is its last known state, if any."""

    def __init__(self, message: str, *, resource: Any = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.resource = resource


class DeploymentFailedError(LifecycleError):
    """The deployment is FAILED, or is being deleted while it was awaited."""


class GatewayFailedError(LifecycleError):
    """The gateway is FAILED, or is being deleted while it was awaited."""


class WaitTimeoutError(CWTrainError, TimeoutError):
    """Time ran out; ``last_seen`` says what was true then. The awaited work may still go on at the service."""

    def __init__(self, message: str, *, last_seen: str | None = None, hint: str | None = None) -> None:
        super().__init__(message, hint=hint)
        self.last_seen = last_seen


class HotLoadTimeoutError(WaitTimeoutError):
    """The hot-load did not finish in time and goes on at the service; ``hot_load`` is its last known state."""

    def __init__(
        self, message: str, *, hot_load: Any = None, last_seen: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, last_seen=last_seen, hint=hint)
        self.hot_load = hot_load


class IntegrationError(CWTrainError):
    """A trainer's adapter cannot do what was asked."""


class UnsupportedFrameworkError(IntegrationError):
    """The trainer's version or set-up is not one that the adapter knows."""

    def __init__(
        self, message: str, *, found: str | None = None, supported: str | None = None, hint: str | None = None
    ) -> None:
        super().__init__(message, hint=hint)
        self.found = found
        self.supported = supported
