"""The object store as the rest of cwtrain sees it: a Protocol of small calls.

Every method raises the errors of ``cwtrain.errors``: StorageNotFoundError, StorageAccessError (naming the permission),
StorageConflictError for a refused conditional write, StorageError otherwise, TransportError when no answer came.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import attrs

__all__ = ["Body", "ObjectInfo", "ObjectStore", "OpenUpload", "SizedStream"]


class SizedStream(Protocol):
    """A stream of known length that can be rewound and read again."""

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, none at the end."""

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move and return the position."""

    def tell(self) -> int:
        """Return the position."""

    def __len__(self) -> int: ...


Body = bytes | SizedStream
"""What is written: bytes, or a stream that is rewound when a request is repeated."""


@attrs.frozen(kw_only=True)
class ObjectInfo:
    """An object as a listing or a HEAD shows it. A listing has no ``metadata`` (None)."""

    key: str
    size_bytes: int
    modified: dt.datetime | None = None
    metadata: Mapping[str, str] | None = None
    """User metadata, names in lower case whatever the store made of them."""
    etag: str | None = None
    """The store's name for this state of the object, good for a condition and nothing else; None in a listing."""


@attrs.frozen(kw_only=True)
class OpenUpload:
    """A multipart upload that was neither completed nor aborted."""

    key: str
    upload_id: str
    started: dt.datetime | None = None


class ObjectStore(Protocol):
    """One bucket. All methods may be called from several threads."""

    @property
    def bucket(self) -> str:
        """The bucket's name."""

    @property
    def endpoint(self) -> str:
        """Where it is, for messages and to tell two stores apart."""

    @property
    def max_connections(self) -> int:
        """How many calls can run at the same time."""

    def head(self, key: str) -> ObjectInfo | None:
        """Return what is known of an object, None when it is not there."""

    def list_objects(self, prefix: str) -> Iterator[ObjectInfo]:
        """Return all objects whose keys begin with ``prefix``, in the order of their keys."""

    def get(self, key: str) -> bytes:
        """Return a small object's bytes. Raises StorageNotFoundError."""

    def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Iterator[bytes]:
        """Return an object's bytes in blocks, from ``offset`` on. Raises StorageNotFoundError."""

    def put(
        self,
        key: str,
        body: Body,
        *,
        metadata: Mapping[str, str] | None = None,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Write an object.

        Raises StorageConflictError with ``if_absent`` when there is one, with ``if_match`` when there is another one
        than that of this ETag.
        """

    def delete(self, key: str) -> None:
        """Remove an object; one that is not there is no error."""

    def create_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        """Begin a multipart upload and return its id."""

    def upload_part(self, key: str, upload_id: str, number: int, body: Body) -> str:
        """Send part ``number`` (from 1) and return its ETag."""

    def complete_upload(
        self,
        key: str,
        upload_id: str,
        etags: Sequence[str],
        *,
        if_absent: bool = False,
        if_match: str | None = None,
    ) -> None:
        """Make the object of its parts. Raises StorageNotFoundError when the upload is gone, else as ``put``."""

    def abort_upload(self, key: str, upload_id: str) -> None:
        """Drop an upload and its parts. Raises StorageNotFoundError when it is gone."""

    def list_uploads(self, prefix: str) -> Iterator[OpenUpload]:
        """Return the open uploads whose keys begin with ``prefix``."""
