"""Decoding what inspection found: every frame, every checksum, in bounded memory."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from cwtrain.errors import ChecksumError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._shards import Shards
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor, checkpoint_of, open_checkpoint, raise_problems
from cwtrain.snapshots.index import is_delta

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["decode_delta", "tensor_checksum", "verify_delta", "verify_full"]

_EXAMPLES = 20


def verify_full(shards: Shards, checksums: Mapping[str, str]) -> None:
    """Compare each tensor of a full snapshot with its Adler-32. Raises ChecksumError that names all wrong ones."""
    wrong: dict[str, str] = {}
    buffer = bytearray(1 << 20)
    for name, tensor in checkpoint_of(shards).tensors.items():
        found = tensor_checksum(tensor, buffer=buffer)
        if found != checksums[name]:
            wrong[name] = f"its bytes have the Adler-32 {found}, recorded is {checksums[name]}"
    _raise_wrong(shards.directory, wrong, hint="the file is damaged, or the checksum is of other bytes; save it again")


def tensor_checksum(tensor: Tensor, *, buffer: bytearray | None = None) -> str:
    """Return the Adler-32 of a tensor's bytes, 8 hex digits."""
    value = 1
    with tensor.open() as file:
        for block in file.blocks(tensor.offset, tensor.size_bytes, buffer=buffer):
            value = zlib.adler32(block, value)
        tensor.check(file)
    return f"{value:08x}"


def verify_delta(shards: Shards, checksums: Mapping[str, str], *, base: str | os.PathLike[str] | None) -> None:
    """Decode each frame of a delta and, with ``base``, compare the result with its Adler-32.

    Raises SnapshotLayoutError for tensors that the base does not have, ChecksumError that names all wrong frames.
    """
    from cwtrain.snapshots import _codec

    root = open_checkpoint(base) if base is not None else None
    blobs = checkpoint_of(shards).tensors
    if root is not None:
        _check_known(shards.directory, blobs, root)
    wrong: dict[str, str] = {}
    damaged = False
    for name, blob in blobs.items():
        value = 1
        try:
            for piece in _new_pieces(_codec, blob, root.tensors[name] if root else None):
                value = zlib.adler32(piece, value)
        except _codec.FrameError as error:
            wrong[name] = f"its frame {error}"
            damaged = True
            continue
        if root is not None and f"{value:08x}" != checksums[name]:
            wrong[name] = f"on this base it has the Adler-32 {value:08x}, recorded is {checksums[name]}"
    hint = "the delta is damaged; write it again"
    if root is not None and not damaged:
        hint = f"{root.path} is not the base that the delta was made from, or the delta is damaged"
    _raise_wrong(shards.directory, wrong, hint=hint)


def _check_known(place: str, blobs: Mapping[str, Tensor], base: Checkpoint) -> None:
    unknown = [name for name in blobs if name not in base.tensors]
    problems = [f"tensor {name!r} is not in the base {base.path}" for name in unknown]
    raise_problems(
        place,
        problems,
        hint="the delta was made from another base; with tied embeddings one side may store lm_head and the other not",
    )


def _new_pieces(codec: ModuleType, blob: Tensor, old: Tensor | None) -> Iterator[bytes | bytearray]:
    """Yield the new bytes of a tensor piece by piece; without ``old`` what the frame decodes to."""
    with blob.open() as file:

        def read_frame(offset: int, view: memoryview) -> None:
            file.read_into(blob.offset + offset, view)

        pieces: Iterator[bytes] = codec.decode_frame(
            read_frame, blob.size_bytes, size=None if old is None else old.size_bytes
        )
        yield from pieces if old is None else _xor_pieces(codec, pieces, old)
        blob.check(file)


def _xor_pieces(codec: ModuleType, pieces: Iterator[bytes], old: Tensor) -> Iterator[bytearray]:
    done = 0
    with old.open() as file:
        for piece in pieces:
            new = bytearray(piece)
            before = bytearray(len(piece))
            file.read_into(old.offset + done, memoryview(before))
            codec.xor_into(memoryview(new), memoryview(before))
            done += len(piece)
            yield new
        old.check(file)


def decode_delta(
    base: str | os.PathLike[str] | Checkpoint, delta: str | os.PathLike[str]
) -> Iterator[tuple[str, bytes]]:
    """Yield (name, new bytes) of each tensor that the delta directory ``delta`` changes on ``base``.

    One tensor is in memory at a time. Raises what inspection raises, and ChecksumError for the first wrong tensor; what
    was yielded before is right.
    """
    from cwtrain.snapshots import _codec
    from cwtrain.snapshots.inspect import scan

    root = base if isinstance(base, Checkpoint) else open_checkpoint(base)
    # Named or not, the predecessor is `base`: so the delta may carry identities instead of numbers.
    found = scan(os.path.abspath(os.fspath(delta)), allow_empty_delta=True, previous_identity=root.path)
    assert found.index is not None  # scan() raised otherwise
    assert found.shards is not None
    if not is_delta(found.index):
        raise_problems(found.path, [f"{INDEX_NAME}: this is a full snapshot, give the directory of a delta"])
    shards = found.shards
    blobs = checkpoint_of(shards).tensors
    _check_known(found.path, blobs, root)
    for name, blob in blobs.items():
        try:
            new = b"".join(_new_pieces(_codec, blob, root.tensors[name]))
        except _codec.FrameError as error:
            _raise_wrong(found.path, {name: f"its frame {error}"}, hint="the delta is damaged; write it again")
            raise
        value = f"{zlib.adler32(new):08x}"
        if value != found.checksums[name]:
            text = f"on this base it has the Adler-32 {value}, recorded is {found.checksums[name]}"
            _raise_wrong(found.path, {name: text}, hint=f"{root.path} is not the base that the delta was made from")
        yield name, new


def _raise_wrong(place: str, wrong: Mapping[str, str], *, hint: str) -> None:
    if not wrong:
        return
    lines = [f"tensor {name!r}: {text}" for name, text in list(wrong.items())[:_EXAMPLES]]
    if len(wrong) > _EXAMPLES:
        lines.append(f"and {len(wrong) - _EXAMPLES} more tensors")
    joined = lines[0] if len(lines) == 1 else "".join(f"\n  - {line}" for line in lines)
    raise ChecksumError(f"{place}: {joined}", tensor=next(iter(wrong)), hint=hint)
