"""Applying what a delta holds for a tensor to its old bytes, part by part, on one thread."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

import attrs

from cwtrain.snapshots._checksums import Hasher, label_of
from cwtrain.snapshots._decoder import Decoder, FrameReader, ReadInto, read_exactly
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._frames import FrameError
from cwtrain.snapshots._overwrite import OverwriteDecoder, OverwriteReader
from cwtrain.snapshots._spans import Part
from cwtrain.snapshots._xor import xor_into
from cwtrain.snapshots._zstd import Library
from cwtrain.snapshots.changes import Change
from cwtrain.snapshots.checkpoint import Tensor


@attrs.frozen(kw_only=True)
class Wrong:
    """Why a tensor cannot be what the delta's writer had: its frame is ``damaged``, or its checksum another one."""

    text: str
    damaged: bool


def mismatch(found: str, change: Change) -> Wrong:
    """Return what to say of new bytes whose checksum is ``found``."""
    label = label_of(change.algorithm)
    return Wrong(text=f"on this base it has the {label} {found}, recorded is {change.checksum}", damaged=False)


class Blobs:
    """The shards of a delta that are read from, opened when they are needed."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._files: dict[str, tuple[Tensor, RegularFile]] = {}

    def reader(self, blob: Tensor) -> ReadInto:
        """Return what reads the frame ``blob``."""
        path = blob.file.path
        if path not in self._files:
            self._files[path] = (blob, self._stack.enter_context(blob.open()))
        file, begin = self._files[path][1], blob.offset
        return lambda offset, view: file.read_into(begin + offset, view)

    def check(self) -> None:
        """Raise SnapshotChangedError if a shard changed since its header was read."""
        for blob, file in self._files.values():
            blob.check(file)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()


class Patcher:
    """One worker's decoders. A tensor's parts come in order, and all of one tensor before those of another.

    ``make_hashers`` has the checksums that are computed and compared here; others are left to the caller.
    """

    def __init__(self, library: Library | None, make_hashers: Mapping[str, Callable[[], Hasher]]) -> None:
        self._decoder, self._overwrite = Decoder(library), OverwriteDecoder(library)
        self._make_hashers = make_hashers
        self._reader: FrameReader | OverwriteReader | None = None
        self._hasher: Hasher | None = None
        self._wrong: Wrong | None = None

    def patch(
        self, change: Change, part: Part, size: int, old: memoryview, new: memoryview, blobs: Blobs
    ) -> Wrong | None:
        """Make the new bytes of a part of a tensor of ``size`` bytes from the old ones.

        Returns what is wrong with the change, if anything; then ``new`` holds nothing of use.
        """
        last = part.start + part.length == size
        try:
            if part.start == 0:
                self._begin(change, part, size, new, blobs)
            if self._wrong is not None:
                return self._wrong
            if isinstance(self._reader, OverwriteReader):
                new[:] = old
                self._reader.patch(new, part.start)
            else:
                if self._reader is not None:
                    read_exactly(self._reader, new, done=part.start, size=size)
                xor_into(new, old)
            if last and self._reader is not None:
                self._reader.finish()
        except FrameError as error:
            self._wrong = Wrong(text=f"its frame {error}", damaged=True)
            return self._wrong
        if self._hasher is not None:
            self._hasher.update(new)
            if last and (found := self._hasher.hexdigest()) != change.checksum:
                self._wrong = mismatch(found, change)
        return self._wrong

    def _begin(self, change: Change, part: Part, size: int, new: memoryview, blobs: Blobs) -> None:
        """Open a tensor's frame, or decode it at once if the tensor is a single part."""
        self._reader = self._hasher = self._wrong = None
        if change.algorithm in self._make_hashers:
            self._hasher = self._make_hashers[change.algorithm]()
        read_into, length = blobs.reader(change.blob), change.blob.size_bytes
        if change.encoding == "overwrite":
            self._reader = self._overwrite.open(read_into, length, size=size)
        elif part.length < size:
            self._reader = self._decoder.open(read_into, length, size=size)
        else:
            self._decoder.fill(read_into, length, new)
