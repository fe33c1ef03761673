"""Where a mirror's files lie, and its shards as they are now.

ROOT/                              the full snapshot: side files, index, and for each shard a link to
ROOT/.cwtrain-mirror/current       a link to view-a or view-b, switched by one rename
ROOT/.cwtrain-mirror/view-{a,b}/   for each shard a link to its file in
ROOT/.cwtrain-mirror/{a,b}/        the two slots
ROOT/.cwtrain-mirror/state.json    which slot counts: see ``_mirror_state``
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping

import attrs

from cwtrain.errors import MirrorDamagedError
from cwtrain.hotload._mirror_disk import Disk
from cwtrain.hotload._mirror_state import ShardState, State
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots.checkpoint import Tensor
from cwtrain.snapshots.header import Header, build_header, parse_header

__all__ = ["HIDDEN", "REBUILD", "Layout", "Shard", "digest", "read_shard"]

HIDDEN = ".cwtrain-mirror"
REBUILD = "rebuild it: WeightMirror.from_bucket(...), or WeightMirror.create(base, root, replace=True)"

_VIEWS = ("view-a", "view-b")


@attrs.frozen
class Layout:
    """The paths of the mirror at ``root``."""

    root: str

    @property
    def hidden(self) -> str:
        """The directory of everything that is not the snapshot itself."""
        return os.path.join(self.root, HIDDEN)

    @property
    def state(self) -> str:
        """The state file."""
        return os.path.join(self.hidden, "state.json")

    @property
    def mark(self) -> str:
        """It is there while other slots are being written: what the state says of them cannot be trusted then."""
        return os.path.join(self.hidden, "writing")

    @property
    def pending(self) -> str:
        """The directory of what it takes to undo an update that is being made in place."""
        return os.path.join(self.hidden, "pending")

    @property
    def current(self) -> str:
        """The link to the view that counts."""
        return os.path.join(self.hidden, "current")

    def shard(self, name: str, slot: str) -> str:
        """Return the path of a shard's file."""
        return os.path.join(self.hidden, slot, name)

    def make(self, disk: Disk, shards: list[str]) -> None:
        """Make the directories, and the links in the root."""
        for name in ("a", "b", *_VIEWS):
            disk.mkdir(os.path.join(self.hidden, name))
        for shard in shards:
            disk.symlink(os.path.join(HIDDEN, "current", shard), os.path.join(self.root, shard))

    def show(self, disk: Disk, state: State) -> None:
        """Let the root show the version of ``state``, by one rename after the links were made."""
        active = _read_link(self.current)
        if active in _VIEWS and self._shows(active, state):
            return
        view = _VIEWS[1] if active == _VIEWS[0] else _VIEWS[0]
        for name, shard in state.shards.items():
            link, leads_to = os.path.join(self.hidden, view, name), _leads_to(name, shard)
            if _read_link(link) != leads_to:
                disk.symlink(leads_to, link)
        disk.symlink(view, self.current)

    def _shows(self, view: str, state: State) -> bool:
        return all(
            _read_link(os.path.join(self.hidden, view, name)) == _leads_to(name, shard)
            for name, shard in state.shards.items()
        )


def _leads_to(name: str, shard: ShardState) -> str:
    return os.path.join("..", shard.slot, name)


def _read_link(path: str) -> str | None:
    try:
        return os.readlink(path)
    except OSError:
        return None


@attrs.frozen(kw_only=True)
class Shard:
    """A shard of the current version: its header, and what the state says of it."""

    name: str
    header: Header
    state: ShardState

    @property
    def checksums(self) -> dict[str, str]:
        """Adler-32 of each tensor, in the order of the data."""
        return {name: self.header.metadata[name] for name in self.header.tensors}

    def tensors(self, kind: type[Tensor] = Tensor) -> list[Tensor]:
        """Return the tensors in the order of the data."""
        return [
            kind(
                name=name,
                dtype=info.dtype,
                shape=info.shape,
                size_bytes=info.size_bytes,
                offset=self.header.data_start + info.begin,
                file=self.header,
            )
            for name, info in self.header.tensors.items()
        ]

    def metadata(self, changed: Mapping[str, str]) -> dict[str, str]:
        """Return the header's metadata with the checksums of ``changed`` replaced."""
        metadata = dict(self.header.metadata)
        metadata.update((name, changed[name]) for name in self.header.tensors if name in changed)
        return metadata

    def head(self, metadata: Mapping[str, str]) -> bytes:
        """Return the header with this metadata: as long as it was."""
        head = build_header(
            ((name, info.dtype, info.shape, info.size_bytes) for name, info in self.header.tensors.items()), metadata
        )
        if len(head) != self.header.data_start:
            raise MirrorDamagedError(f"{self.header.path}: its header is not one that a mirror writes", hint=REBUILD)
        return head

    def written(self, fd: int, path: str, metadata: Mapping[str, str], state: ShardState) -> Shard:
        """Return the shard as it is in the open file at ``path``, whose header has this metadata."""
        status = os.fstat(fd)
        header = attrs.evolve(
            self.header,
            path=path,
            metadata=metadata,
            file_bytes=status.st_size,
            mtime_ns=status.st_mtime_ns,
            inode=status.st_ino,
            device=status.st_dev,
        )
        return Shard(name=self.name, header=header, state=state)


def digest(head: bytes) -> str:
    """Return what the state records of a header."""
    return hashlib.sha256(head).hexdigest()


def read_shard(layout: Layout, name: str, state: ShardState) -> Shard:
    """Return the shard that ``state`` describes. Raises MirrorDamagedError if the file is not that."""
    path = layout.shard(name, state.slot)
    try:
        with RegularFile(path) as file:
            header = parse_header(file)
            head = file.read(0, header.data_start)
    except ValueError as error:
        raise MirrorDamagedError(f"{path}: the mirror is damaged: {error}", hint=REBUILD) from error
    if digest(head) != state.head:
        raise MirrorDamagedError(
            f"{path}: the mirror is damaged: the shard is of another version than the mirror's state says", hint=REBUILD
        )
    return Shard(name=name, header=header, state=state)
