"""Tensors that a base does not have: another name of one that it has (tied embeddings), or a mistake."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

from cwtrain.errors import SnapshotError
from cwtrain.hotload.bases import TensorType
from cwtrain.snapshots._inputs import TensorInput

__all__ = ["adler32_of", "check_fits", "may_be_tied", "not_in_base", "tied_names"]

_EMBEDDINGS = ("embed", "wte", "shared")
_EXAMPLES = 5


def tied_names(one: str, other: str) -> bool:
    """Return whether models tie tensors of such names: the input embedding and what has its weights, too."""
    return one != other and any(part in name.lower() for name in (one, other) for part in _EMBEDDINGS)


def may_be_tied(name: str, kind: TensorType, held: Mapping[str, TensorType]) -> bool:
    """Return whether ``name``, which ``held`` does not have, may be another name of a matrix that it has."""
    if name in held or len(kind.shape) < 2:
        return False
    return any(known == kind and tied_names(name, other) for other, known in held.items())


def adler32_of(found: TensorInput) -> str:
    """Return the Adler-32 of a tensor's bytes."""
    value = 1
    for piece in found.pieces():
        value = zlib.adler32(piece, value)
    return f"{value:08x}"


def not_in_base(name: str, kind: TensorType, known: TensorType | None, identity: str | None) -> SnapshotError:
    """Return the error of a tensor that a delta's base has not, or has as another one."""
    base = f"{identity}, the version that the delta applies to" if identity else "the version that it applies to"
    what = f"not in it: {base}, has no tensor of that name"
    if known is not None:
        what = f"{known.dtype} {list(known.shape)} there: in {base}"
    return SnapshotError(
        f"tensor {name!r} is {kind.dtype} {list(kind.shape)}, but {what}",
        hint="give the tensors that the base has, in the same dtypes and shapes, or publish a full snapshot",
    )


def check_fits(found: Mapping[str, TensorInput], held: Mapping[str, TensorType], identity: str | None) -> set[str]:
    """Return the names in ``found`` that are tied to one that ``held`` has, and equal: they are left out.

    All tensors are in memory together, so those that share it are equal; others are compared. Raises SnapshotError for
    what fits to ``held`` neither so nor by itself, before anything is done with it.
    """
    tied: set[str] = set()
    problems: list[SnapshotError] = []
    kinds = {name: TensorType(one.dtype, one.shape, one.size_bytes) for name, one in found.items()}
    for name, kind in kinds.items():
        if held.get(name) == kind:
            continue
        others = [other for other in held if tied_names(name, other) and kinds.get(other) == kind == held[other]]
        if may_be_tied(name, kind, held) and any(_equal(found[name], found[other]) for other in others):
            tied.add(name)
        else:
            problems.append(not_in_base(name, kind, held.get(name), identity))
    missing = sorted(held.keys() - kinds.keys())
    if missing:
        shown = ", ".join(map(repr, missing[:_EXAMPLES])) + (", ..." if len(missing) > _EXAMPLES else "")
        problems.append(
            SnapshotError(
                f"{len(missing)} tensors that version {identity} has are not given: {shown}",
                hint="give all tensors, changed or not: one that is left out is not 'unchanged'",
            )
        )
    if problems:
        texts = [one.message for one in problems]
        more = f"; and {len(texts) - _EXAMPLES} more" if len(texts) > _EXAMPLES else ""
        raise SnapshotError("; ".join(texts[:_EXAMPLES]) + more, hint=problems[0].hint)
    return tied


def _equal(one: TensorInput, other: TensorInput) -> bool:
    if one.address is not None and one.address == other.address:
        return True
    return adler32_of(one) == adler32_of(other)
