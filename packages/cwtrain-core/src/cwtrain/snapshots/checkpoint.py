"""A full checkpoint as a place where tensors lie: the base of a delta, or the weights to make one from."""

from __future__ import annotations

import os
from collections.abc import Mapping

import attrs

from cwtrain.errors import SnapshotLayoutError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._files import RegularFile, list_directory
from cwtrain.snapshots._shards import Shards, read_shards
from cwtrain.snapshots.header import Header, TensorInfo, read_header
from cwtrain.snapshots.index import is_delta, read_index

__all__ = ["Checkpoint", "Tensor", "open_checkpoint", "raise_problems"]

SINGLE_NAME = "model.safetensors"


@attrs.frozen(kw_only=True)
class Tensor:
    """One tensor of a checkpoint: its type, and the range of the file that holds its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    offset: int
    """Where it begins in the file, in bytes."""
    file: Header = attrs.field(repr=False)

    def open(self) -> RegularFile:
        """Return the file, open; SnapshotChangedError if it is not the one whose header was read."""
        file = RegularFile(self.file.path)
        try:
            self.check(file)
        except BaseException:
            file.close()
            raise
        return file

    def check(self, file: RegularFile) -> None:
        """Raise SnapshotChangedError if ``file`` changed since its header was read."""
        header = self.file
        file.check_unchanged(size_bytes=header.file_bytes, mtime_ns=header.mtime_ns, inode=header.inode)


@attrs.frozen(kw_only=True)
class Checkpoint:
    """All tensors of a full checkpoint by name, in the order in which they lie in its files."""

    path: str
    tensors: Mapping[str, Tensor] = attrs.field(repr=False)

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.size_bytes for tensor in self.tensors.values())


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the tensors of the full checkpoint at ``path``: a directory, or one ``.safetensors`` file.

    Only headers are read. Unlike ``inspect_snapshot`` it asks for neither ``config.json`` nor a tidy directory. Raises
    SnapshotLayoutError with everything that is wrong.
    """
    place = os.path.abspath(os.fspath(path))
    if not os.path.isdir(place) and place.endswith(".safetensors"):
        header = read_header(place)
        return Checkpoint(path=place, tensors=_in_file(header, header.tensors))
    problems: list[str] = []
    listing = list_directory(place)
    if INDEX_NAME not in listing and SINGLE_NAME in listing:
        header = read_header(os.path.join(place, SINGLE_NAME))
        return Checkpoint(path=place, tensors=_in_file(header, header.tensors))
    if INDEX_NAME not in listing:
        problems.append(f"{INDEX_NAME}: is not there, nor is {SINGLE_NAME}; give the directory of a full checkpoint")
        raise_problems(place, problems)
    try:
        index = read_index(os.path.join(place, INDEX_NAME))
    except SnapshotLayoutError as error:
        raise_problems(place, error.problems)
        raise
    if is_delta(index):
        raise_problems(place, [f"{INDEX_NAME}: this is a delta; give the directory of a full checkpoint"])
    shards = read_shards(place, index["weight_map"], listing, problems)
    raise_problems(place, problems)
    return checkpoint_of(shards)


def checkpoint_of(shards: Shards) -> Checkpoint:
    """Return the tensors of shards that fit together."""
    tensors: dict[str, Tensor] = {}
    for name, shard, tensor in shards.tensors():
        tensors.update(_in_file(shards.headers[shard], {name: tensor}))
    return Checkpoint(path=shards.directory, tensors=tensors)


def _in_file(header: Header, tensors: Mapping[str, TensorInfo]) -> dict[str, Tensor]:
    return {
        name: Tensor(
            name=name,
            dtype=info.dtype,
            shape=info.shape,
            size_bytes=info.size_bytes,
            offset=header.data_start + info.begin,
            file=header,
        )
        for name, info in tensors.items()
    }


def raise_problems(place: str, problems: list[str] | tuple[str, ...], *, hint: str | None = None) -> None:
    """Raise SnapshotLayoutError that lists all ``problems`` of ``place``, if there are any."""
    if not problems:
        return
    shown = list(problems[:50])
    if len(problems) > len(shown):
        shown.append(f"and {len(problems) - len(shown)} more")
    if len(shown) == 1:
        message = f"{place}: {shown[0]}"
    else:
        message = f"{place}: {len(problems)} problems:" + "".join(f"\n  - {problem}" for problem in shown)
    raise SnapshotLayoutError(message, problems=problems, hint=hint)
