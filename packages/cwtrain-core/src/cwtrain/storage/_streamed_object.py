"""One streamed object: its blocks, its parts, and when they are sent; see ``stream``."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from cwtrain.errors import StorageError
from cwtrain.storage._buffers import SendingStopped
from cwtrain.storage._hands import Hands

if TYPE_CHECKING:
    from cwtrain.storage.stream import StreamUpload

__all__ = ["StreamSizes", "StreamedObject", "sha256_of"]

_MIB = 1 << 20
_MOST_PARTS = 10_000
_READ_BLOCK = 1 << 20


@attrs.frozen(kw_only=True)
class StreamSizes:
    """``pool_bytes`` of memory in blocks; objects up to ``single_bytes`` by one PUT, larger ones in parts."""

    pool_bytes: int = 192 * _MIB
    block_bytes: int = 4 * _MIB
    part_bytes: int = 16 * _MIB
    """At least 5 MiB, which S3 asks for; a multiple of the block."""
    single_bytes: int = 64 * _MIB
    """At least ``part_bytes``, and less than half the pool."""


class StreamedObject:
    """One object; see ``StreamUpload.begin``."""

    def __init__(
        self, upload: StreamUpload, name: str, key: str, sizes: StreamSizes, hands: Hands, head: bytes | None
    ) -> None:
        self.name = name
        self.key = key
        self.size_bytes = 0
        """Bytes that were written; with the head, once it is finished."""
        self.upload_id: str | None = None
        self.given_up = False
        self.open = True
        self._upload = upload
        self._hands = hands
        self._sizes = sizes
        self._per_part = sizes.part_bytes // sizes.block_bytes
        self._blocks: list[memoryview] = []  # of the part that grows; before there are parts, of everything
        self._fill = 0  # bytes in the last one
        self._parts: list[list[memoryview]] = []  # full ones, as long as they are kept
        self._sent: list[bool] = []
        self._etags: list[str] = []
        self._left = 0
        # With a head that is known from the beginning, parts are hashed in order as they come, and none is kept.
        self._state: Any = None if head is None else hashlib.sha256(head)
        self._turn = 0
        self._keep = head is None
        self._hashed = False
        self._opening = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of memory that it holds on to."""
        return sum(len(block) for part in self._parts for block in part) + sum(map(len, self._blocks))

    @property
    def keeps(self) -> bool:
        """Whether what was sent is kept until it can be hashed."""
        return self._keep

    @property
    def in_parts(self) -> bool:
        """Whether it is too large for one PUT."""
        return bool(self._etags)

    def write(self, data: bytes | memoryview) -> None:
        """Append ``data``, which may be changed afterwards. Waits while the pool is in use."""
        view = memoryview(data)
        self.size_bytes += len(view)
        while view:
            if not self._blocks or self._fill == self._sizes.block_bytes:
                self._next_block()
            count = min(len(view), self._sizes.block_bytes - self._fill)
            self._blocks[-1][self._fill : self._fill + count] = view[:count]
            self._fill += count
            view = view[count:]

    def finish(self, head: bytes) -> None:
        """Put ``head`` before everything and send what is left, in the background."""
        self._upload.check()
        self.size_bytes += len(head)
        if self._blocks:
            self._blocks[-1] = self._blocks[-1][: self._fill]
        if not self._parts:
            self._hands.submit(partial(self._put, [head, *self._blocks]))
            return
        if self._blocks:
            self._end_part()
        self._hands.submit(partial(self._send_first, head))

    def _next_block(self) -> None:
        full = len(self._blocks)
        if self._parts:
            if full == self._per_part:
                self._end_part()
        elif full * self._sizes.block_bytes >= self._sizes.single_bytes:
            blocks, self._blocks = self._blocks, []
            for begin in range(0, full, self._per_part):
                self._blocks = blocks[begin : begin + self._per_part]
                if len(self._blocks) == self._per_part:
                    self._end_part()
        self._blocks.append(self._upload._take_block(self))
        self._fill = 0

    def _end_part(self) -> None:
        """Let the part that grew be sent; the first one is held back."""
        number = len(self._parts)
        if number == _MOST_PARTS:
            raise StorageError(
                f"{self.name} needs more than {_MOST_PARTS} parts", key=self.key, hint="give a larger part_bytes"
            )
        with self._hands.changed:
            self._parts.append(self._blocks)
            self._sent.append(False)
            self._etags.append("")
            self._left += 1
        self._blocks = []
        if number:
            self._hands.submit(partial(self._send_part, number))
        elif self._state is not None:
            self._hands.submit(partial(self._hash_in_turn, 0))

    def keep_no_more(self) -> None:
        """Give back what was sent, from now on at once; the object is read back for its SHA-256. Under the lock."""
        self._keep = False
        for number, sent in enumerate(self._sent):
            if sent:
                self._release(number)

    def _release(self, number: int) -> None:
        blocks, self._parts[number] = self._parts[number], []
        self._upload._give_back([_whole(block) for block in blocks])

    # -- in background threads -------------------------------------------------------------------------------------

    def _put(self, pieces: list[bytes | memoryview]) -> None:
        once = self._upload._begun()
        sha256 = sha256_of(pieces)
        body = self._upload._body(pieces, sha256)

        def write(if_absent: bool) -> None:
            self._upload.store.put(self.key, body, metadata=self._upload._metadata(sha256), if_absent=if_absent)

        written = once.write(self.key, write, lambda: self._upload._ours(self, sha256))
        self._upload._arrived(self, sha256, looked=not written)
        self._upload._give_back([_whole(piece) for piece in pieces[1:] if isinstance(piece, memoryview)])
        self._blocks = []

    def _opened(self) -> str:
        """Return the id of the multipart upload, begun by whoever comes first."""
        self._upload._begun()
        with self._opening:
            if self.upload_id is None:
                record = self._upload._record
                with record.opening(self.key) as asked:
                    upload_id = self._upload.store.create_upload(self.key, metadata=self._upload._metadata(None))
                    record.opened(self.key, upload_id, asked)
                self.upload_id = upload_id
            return self.upload_id

    def _hash_in_turn(self, number: int) -> None:
        """Hash a part after those before it: their tasks came before this one."""
        with self._hands.changed:
            self._hands.changed.wait_for(lambda: self._turn == number or self._hands.stopped.is_set())
            if self._hands.stopped.is_set():
                raise SendingStopped
        _feed(self._state, self._parts[number])
        with self._hands.changed:
            self._turn += 1
            self._hands.changed.notify_all()

    def _send_part(self, number: int) -> None:
        if self._state is not None:
            self._hash_in_turn(number)
        self._send(number, self._parts[number])
        with self._hands.changed:
            if not self._keep or self._hashed:
                self._release(number)

    def _send_first(self, head: bytes) -> None:
        """Hash everything, now that the header is known, and send the first part."""
        sha256 = None
        with self._hands.changed:
            whole = self._keep
        if whole:
            sha256 = sha256_of([head, *(block for part in self._parts for block in part)])
            with self._hands.changed:
                self._hashed = True
                for number, sent in enumerate(self._sent):
                    if sent:
                        self._release(number)
        with self._hands.changed:
            # Sent last: whoever reads a part list sees that it is not complete.
            self._hands.changed.wait_for(lambda: self._left == 1 or self._hands.stopped.is_set())
        self._upload.check()
        if self._state is not None:
            sha256 = self._state.hexdigest()
        self._send(0, [memoryview(head), *self._parts[0]])
        with self._hands.changed:
            self._release(0)
        self._complete(sha256)

    def _send(self, number: int, pieces: list[memoryview]) -> None:
        upload_id = self._opened()
        etag = self._upload.store.upload_part(self.key, upload_id, number + 1, self._upload._body(pieces))
        with self._hands.changed:
            self._etags[number] = etag
            self._sent[number] = True
            self._left -= 1
            self._hands.changed.notify_all()
        if self.given_up:
            self._upload._abort(self)  # this part arrived after the abort, and would be kept

    def _complete(self, sha256: str | None) -> None:
        upload_id = self.upload_id
        assert upload_id is not None
        store = self._upload.store

        def write(if_absent: bool) -> None:
            store.complete_upload(self.key, upload_id, self._etags, if_absent=if_absent)

        once = self._upload._begun()
        written = once.write(self.key, write, lambda: self._upload._ours(self, sha256), multipart=True)
        if written:
            self._upload._record.closed(upload_id)
        else:
            self._upload._abort(self)  # the object is there; a refused Complete leaves the upload open
        self.upload_id = None
        self._upload._arrived(self, sha256, looked=not written)


def _whole(block: memoryview) -> memoryview:
    """Return the block that ``block`` is the beginning of."""
    return memoryview(block.obj)


def sha256_of(pieces: Sequence[bytes | memoryview]) -> str:
    """Return the SHA-256 of the pieces one after the other."""
    state = hashlib.sha256()
    _feed(state, pieces)
    return state.hexdigest()


def _feed(state: Any, pieces: Sequence[bytes | memoryview]) -> None:
    for piece in pieces:
        for begin in range(0, len(piece), _READ_BLOCK):
            state.update(piece[begin : begin + _READ_BLOCK])
