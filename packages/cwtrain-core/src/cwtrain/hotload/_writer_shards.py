"""Streamed shards: what the encoders make goes into one object after the other, with its header at the end.

Shards grow with what was sent: the first ones are small, so that sending begins early and little is left to be sent
when the last tensor is there; later ones are as large as one PUT may be.
"""

from __future__ import annotations

from collections.abc import Callable

from cwtrain.hotload.bases import TensorType
from cwtrain.snapshots._codec import EncodedTensor
from cwtrain.snapshots.header import build_header
from cwtrain.storage.stream import StreamedObject, StreamUpload

__all__ = ["ShardSink"]

_FIRST_BYTES = 1 << 20
_TAIL = 8
"""A shard has at most one part in this many of what was sent before it, or the size of the first ones."""


class ShardSink:
    """A sink for a ``Pipeline``; ``kind_of`` says what a tensor is.

    A shard ends with the tensor that fills it. In a full snapshot, whose tensors have known sizes, a large tensor
    begins a shard of its own.
    """

    def __init__(
        self,
        upload: StreamUpload,
        *,
        rank: int,
        full: bool,
        most_bytes: int,
        kind_of: Callable[[str], TensorType],
        large_bytes: int,
        fixed: bool = False,
    ) -> None:
        self.weight_map: dict[str, str] = {}
        self.results: dict[str, EncodedTensor] = {}
        self.total_bytes = 0
        """Bytes of all shards that are finished, headers included."""
        self.large_bytes = large_bytes
        """A tensor above this size has a shard of its own, whose header is wanted before its bytes."""
        self._upload, self._rank, self._full, self._kind_of = upload, rank, full, kind_of
        self._most, self._fixed = most_bytes, fixed
        self._count = 0
        self._object: StreamedObject | None = None
        self._alone = False
        self._members: list[tuple[str, EncodedTensor]] = []

    def begin_tensor(self, name: str, *, checksum: str | None = None) -> None:
        """Begin another shard if the tensor would make this one too large."""
        if self._full and self._object is not None:
            size = self._kind_of(name).size_bytes
            if checksum is not None or self._object.size_bytes + size > max(self._most, self._target()):
                self._end_shard()
        if checksum is not None:
            self._begin(head=self._full_head({name: checksum}))
            self._alone = True

    def write(self, piece: bytes | memoryview) -> None:
        """Take the next piece of the current tensor."""
        self._current().write(piece)

    def end_tensor(self, name: str, encoded: EncodedTensor) -> None:
        """Note that a tensor is done."""
        self.results[name] = encoded
        if not (self._full or encoded.frame_bytes):
            return
        self._members.append((name, encoded))
        if self._alone or self._current().size_bytes >= self._target():
            self._end_shard()

    def finish(self) -> None:
        """End the last shard."""
        if self._members:
            self._end_shard()

    def _target(self) -> int:
        if self._fixed:
            return self._most
        return min(self._most, max(_FIRST_BYTES, self.total_bytes // _TAIL))

    def _current(self) -> StreamedObject:
        return self._object or self._begin()

    def _begin(self, *, head: bytes | None = None) -> StreamedObject:
        name = f"model-r{self._rank:05d}-{self._count:05d}.safetensors"
        self._object = self._upload.begin(name, head=head)
        self._count += 1
        return self._object

    def _full_head(self, sums: dict[str, str]) -> bytes:
        kinds = [(name, self._kind_of(name)) for name in sums]
        tensors = ((name, kind.dtype, kind.shape, kind.size_bytes) for name, kind in kinds)
        return build_header(tensors, {"format": "pt", **sums})

    def _end_shard(self) -> None:
        shard = self._current()
        sums = {name: encoded.checksum for name, encoded in self._members}
        if self._full:
            head = self._full_head(sums)
        else:
            frames = [(name, encoded.frame_bytes) for name, encoded in self._members]
            head = build_header(((name, "U8", (size,), size) for name, size in frames), sums)
        shard.finish(head)
        self.total_bytes += shard.size_bytes
        self.weight_map.update(dict.fromkeys(sums, shard.name))
        self._object, self._members, self._alone = None, [], False
