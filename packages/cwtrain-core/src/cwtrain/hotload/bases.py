"""What the deltas of a ``SnapshotWriter`` apply to: bytes of the previous version, in memory, on the disk, in a mirror.

A base follows what is written: while a snapshot is written the new bytes replace the old ones, and ``commit`` says
whose bytes they are now. A writer that fails abandons them: what lies in memory is then half old and half new, so the
next snapshot has to be a full one, which fills the base again. A mirror keeps its old version.

Where a base was not filled by a writer, its identity is the caller's word. The next writer compares its bytes with the
manifest of that identity: before it writes anything where the base knows its ``checksums``, else in ``close``.
"""

from __future__ import annotations

import contextlib
import os
import threading
import zlib
from collections.abc import Collection, Mapping
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import attrs

from cwtrain._process import OneProcess, renew_locks_after_fork
from cwtrain.errors import SnapshotError
from cwtrain.hotload._mirror_slots import SlotWriter
from cwtrain.hotload.mirror import WeightMirror
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots.checkpoint import Checkpoint, open_checkpoint
from cwtrain.storage._buffers import fresh

__all__ = ["BaseTensors", "CheckpointBase", "MemoryBase", "MirrorBase", "TensorType"]

_LARGE = 2 << 20


@attrs.frozen
class TensorType:
    """What a tensor is, apart from its bytes. ``dtype`` is spelled as in a safetensors header (``BF16``)."""

    dtype: str
    shape: tuple[int, ...]
    size_bytes: int


@runtime_checkable
class BaseTensors(Protocol):
    """Where a writer reads old bytes and leaves new ones. ``read`` and ``write`` are called by several threads."""

    @property
    def identity(self) -> str | None:
        """The identity whose bytes it holds; None where that is not known, or nothing whole is there."""

    @property
    def shared(self) -> bool:
        """Whether it has the tensors of all ranks; otherwise it has exactly those that its own rank adds."""

    @property
    def sparse(self) -> bool:
        """Whether only what differs has to be written."""

    def types(self) -> Mapping[str, TensorType]:
        """Return what tensors there are."""

    def begin(self, *, fill: bool) -> None:
        """Get ready for a new version. ``fill``: every tensor is written, whatever is there now (a full snapshot)."""

    def declare(self, name: str, kind: TensorType) -> None:
        """Make room for a tensor, when filling."""

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the old bytes from ``start`` on."""

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Take new bytes."""

    def commit(self, identity: str, *, version: str | None = None, checksums: Mapping[str, str]) -> None:
        """Say that the new bytes are those of ``identity``. ``checksums`` are those of the tensors that changed."""

    def abandon(self) -> None:
        """Say that the new version was not written."""


class MemoryBase(OneProcess):
    """The bytes of the last version in this process: as much memory as the tensors have, and no more while writing.

    It begins empty: write a full snapshot with it first. Or fill it from what the deployment serves already
    (``load``). After a failure it is empty again, if anything was written to it by then.
    """

    _instead = "make one there, and fill it with a full snapshot or with load()"

    def __init__(self) -> None:
        self._types: dict[str, TensorType] = {}
        self._data: dict[str, memoryview] = {}
        self._identity: str | None = None
        self._before: str | None = None
        self._touched = False
        self._types_before = self._types
        self._loaded: dict[str, str] | None = None

    def __repr__(self) -> str:
        return f"MemoryBase({len(self._types)} tensors, {self.size_bytes} bytes, identity={self._identity!r})"

    @property
    def identity(self) -> str | None:
        """The identity whose bytes it holds."""
        return self._identity

    @property
    def checksums(self) -> Mapping[str, str] | None:
        """Adler-32 of each tensor where ``load`` read them; None where a writer filled it."""
        return self._loaded

    @property
    def written(self) -> bool:
        """Whether a writer filled it, which knows what it wrote."""
        return self._loaded is None

    @property
    def shared(self) -> bool:
        """False: each rank keeps what it adds."""
        return False

    @property
    def sparse(self) -> bool:
        """True: what is not written stays."""
        return True

    @property
    def size_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(kind.size_bytes for kind in self._types.values())

    def types(self) -> Mapping[str, TensorType]:
        """Return what tensors there are."""
        return self._types

    def load(self, path: str | os.PathLike[str], identity: str, *, names: Collection[str] | None = None) -> None:
        """Read the full checkpoint at ``path``, which is what ``identity`` holds; ``names`` says which tensors."""
        # One name is one tensor: `in` would look for its parts.
        names = (names,) if isinstance(names, str) else names
        with CheckpointBase(path, identity) as source:
            self.begin(fill=True)
            sums: dict[str, str] = {}
            for name, kind in source.types().items():
                if names is None or name in names:
                    self.declare(name, kind)
                    source.read(name, 0, self._data[name])
                    sums[name] = f"{zlib.adler32(self._data[name]):08x}"
        self.commit(identity, checksums={})
        self._loaded = sums

    def begin(self, *, fill: bool) -> None:
        """Get ready for a new version. Raises ConfigError in a forked process, which shares its memory."""
        self._check_process()
        self._before, self._identity = self._identity, None
        self._touched, self._types_before = False, self._types
        if fill:
            # Buffers of tensors that are there already are used again: the memory is never taken twice.
            self._types = {}

    def declare(self, name: str, kind: TensorType) -> None:
        """Make room for a tensor."""
        self._touched = True
        held = self._data.get(name)
        if held is None or len(held) != kind.size_bytes:
            self._data.pop(name, None)
            large = kind.size_bytes >= _LARGE
            self._data[name] = memoryview(fresh(kind.size_bytes, shared=True) if large else bytearray(kind.size_bytes))
        self._types[name] = kind

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the old bytes from ``start`` on."""
        into[:] = self._data[name][start : start + len(into)]

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Take new bytes."""
        self._touched = True
        self._data[name][start : start + len(data)] = data

    def commit(self, identity: str, *, version: str | None = None, checksums: Mapping[str, str]) -> None:
        """Say that the bytes are those of ``identity``."""
        for name in self._data.keys() - self._types.keys():
            del self._data[name]
        self._identity, self._loaded = identity, None

    def abandon(self) -> None:
        """Forget what the bytes are, unless they are still the old ones."""
        if self._touched:
            self._types = {}
        else:
            self._identity, self._types = self._before, self._types_before


class CheckpointBase:
    """A full checkpoint on the disk, which stays as it is: every delta on it holds all that changed since.

    Several ranks may read the same one. ``identity`` is what was published of it.
    """

    def __init__(self, path: str | os.PathLike[str] | Checkpoint, identity: str | None) -> None:
        self._checkpoint = path if isinstance(path, Checkpoint) else open_checkpoint(path)
        self._identity = identity
        self._types = _types(self._checkpoint)
        self._files: dict[str, RegularFile] = {}
        self._lock = threading.Lock()
        renew_locks_after_fork(self, "_lock")

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process reads the same files by."""
        return {"path": self._checkpoint, "identity": self._identity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    def __repr__(self) -> str:
        return f"CheckpointBase({self._checkpoint.path!r}, identity={self._identity!r})"

    def __enter__(self) -> CheckpointBase:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its files."""
        with self._lock:
            for file in self._files.values():
                file.close()
            self._files.clear()

    @property
    def identity(self) -> str | None:
        """The identity whose bytes it holds."""
        return self._identity

    @property
    def shared(self) -> bool:
        """True: it has all tensors."""
        return True

    @property
    def sparse(self) -> bool:
        """True: nothing is written."""
        return True

    def types(self) -> Mapping[str, TensorType]:
        """Return what tensors there are."""
        return self._types

    def begin(self, *, fill: bool) -> None:
        """Do nothing: it stays as it is. Raises SnapshotError where it would have to be filled."""
        if fill:
            raise SnapshotError(
                f"{self._checkpoint.path}: a checkpoint on the disk is not changed by writing a full snapshot",
                hint="write the full snapshot without a base, or keep the base in a MemoryBase or a MirrorBase",
            )

    def declare(self, name: str, kind: TensorType) -> None:
        """Do nothing."""

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes from ``start`` on. Raises SnapshotChangedError when the file changed."""
        tensor = self._checkpoint.tensors[name]
        with self._lock:
            file = self._files.get(tensor.file.path)
            if file is None:
                file = self._files[tensor.file.path] = tensor.open()
        file.read_views(tensor.offset + start, [into])

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Do nothing."""

    def commit(self, identity: str, *, version: str | None = None, checksums: Mapping[str, str]) -> None:
        """Look once more whether the files are those whose headers were read. Raises SnapshotChangedError."""
        self._check()

    def abandon(self) -> None:
        """Close the files."""
        self.close()

    def _check(self) -> None:
        with self._lock:
            for tensor in self._checkpoint.tensors.values():
                if file := self._files.get(tensor.file.path):
                    tensor.check(file)
        self.close()


class MirrorBase(OneProcess):
    """A ``WeightMirror``, which advances with each snapshot in the same pass: one rank, on the disk, kept by a kill.

    The mirror's version becomes the snapshot's ``version`` (or its identity) once the index is in the bucket. Its
    tensors are those of the model; a full snapshot may change all of them, but none may come or go.
    """

    _instead = "close the mirror here, and open it there: MirrorBase(WeightMirror(root), identity)"

    def __init__(self, mirror: WeightMirror, identity: str | None) -> None:
        self._mirror = mirror
        self._identity = identity
        self._written = False
        self._inner = CheckpointBase(mirror._checkpoint(), identity)
        self._tensors = mirror._checkpoint().tensors
        self._stack = ExitStack()
        self._target: SlotWriter | None = None

    def __repr__(self) -> str:
        return f"MirrorBase({self._mirror!r}, identity={self._identity!r})"

    @property
    def identity(self) -> str | None:
        """The identity whose bytes it holds."""
        return self._identity

    @property
    def checksums(self) -> Mapping[str, str]:
        """Adler-32 of each tensor."""
        return self._mirror.checksums

    @property
    def written(self) -> bool:
        """Whether a writer brought it to its version, which knows what it wrote."""
        return self._written

    @property
    def shared(self) -> bool:
        """True: it has all tensors."""
        return True

    @property
    def sparse(self) -> bool:
        """False: the next version lies in files of its own."""
        return False

    def types(self) -> Mapping[str, TensorType]:
        """Return what tensors there are."""
        return self._inner.types()

    def begin(self, *, fill: bool) -> None:
        """Open the files of the next version. Raises SnapshotError where the disk has no room for it."""
        self._mirror._check_usable()
        shards = list(self._mirror._shards.values())
        self._target = self._stack.enter_context(self._mirror._writing(shards, frozenset(self._tensors)))

    def declare(self, name: str, kind: TensorType) -> None:
        """Check that the mirror has such a tensor. Raises SnapshotError."""
        if self.types().get(name) != kind:
            raise SnapshotError(
                f"tensor {name!r} is {kind.dtype} {list(kind.shape)}, which {self._mirror.path} does not have",
                hint="make the mirror again from a full snapshot of this model",
            )

    def read(self, name: str, start: int, into: memoryview) -> None:
        """Fill ``into`` with the old bytes from ``start`` on."""
        self._inner.read(name, start, into)

    def write(self, name: str, start: int, data: memoryview) -> None:
        """Take new bytes."""
        assert self._target is not None
        self._target.write(self._tensors[name], start, [data], [])

    def commit(self, identity: str, *, version: str | None = None, checksums: Mapping[str, str]) -> None:
        """Let the new version count, on the disk."""
        held = self._mirror.checksums
        changed = {name: value for name, value in checksums.items() if held[name] != value}
        assert self._target is not None
        done = self._target.finish(changed, frozenset(changed))
        self._stack.close()
        self._target = None
        self._inner.close()
        self._mirror._switch(version if version is not None else identity, done)
        self._inner = CheckpointBase(self._mirror._checkpoint(), identity)
        self._tensors = self._mirror._checkpoint().tensors
        self._identity, self._written = identity, True

    def abandon(self) -> None:
        """Keep the old version."""
        self._inner.close()
        if self._target is None:
            return
        self._target = None
        with contextlib.suppress(_AbandonedError), self._stack:
            raise _AbandonedError


class _AbandonedError(Exception):
    """Tells the mirror that its next version was not written."""


def _types(checkpoint: Checkpoint) -> dict[str, TensorType]:
    return {
        name: TensorType(tensor.dtype, tensor.shape, tensor.size_bytes) for name, tensor in checkpoint.tensors.items()
    }
