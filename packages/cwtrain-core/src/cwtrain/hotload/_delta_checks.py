"""What writers of snapshots check before, and after, they write."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any

from cwtrain.errors import ChecksumError, ConfigError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._model_rules import quantisation_difference, wrapped_names
from cwtrain.snapshots.checkpoint import Checkpoint, Tensor, raise_problems
from cwtrain.snapshots.identity import version_number
from cwtrain.snapshots.index import is_delta
from cwtrain.snapshots.inspect import Inspection, scan

__all__ = ["check_same_tensors", "compare", "keep", "scan_full", "versions"]

_log = logging.getLogger("cwtrain.hotload")
_EXAMPLES = 5


def versions(version: int | str, base_version: int | str) -> tuple[str, str]:
    """Return both numbers as a delta has them; ConfigError where they are none, or in the wrong order."""
    numbers = []
    for key, value in (("version", version), ("base_version", base_version)):
        number = version_number(str(value)) if isinstance(value, int | str) and not isinstance(value, bool) else None
        if number is None:
            raise ConfigError(f"{key}={value!r} is not a version number", hint="give an integer, 0 or more")
        numbers.append(number)
    if numbers[0] <= numbers[1]:
        raise ConfigError(
            f"version {numbers[0]} is not above base_version {numbers[1]}", hint="number versions upwards"
        )
    return f"{numbers[0]:06d}", f"{numbers[1]:06d}"


def check_same_tensors(old: Checkpoint, new: Checkpoint) -> None:
    """Refuse two checkpoints that are not the same model: a tensor that comes or goes is never 'unchanged'."""
    problems, hints = [], []
    gone = [name for name in old.tensors if name not in new.tensors]
    come = [name for name in new.tensors if name not in old.tensors]
    for names, here, there in ((gone, old, new), (come, new, old)):
        if names:
            problems.append(
                f"{_list(names)} {'is' if len(names) == 1 else 'are'} in {here.path}, but not in {there.path}"
            )
    if problems:
        hints.append("a delta needs the same tensors on both sides")
    if any("lm_head" in name or "embed" in name for name in (*gone, *come)):
        hints.append(
            "with tied embeddings (tie_word_embeddings) one side may store lm_head.weight and the other not: write the "
            "one that has more with write_full_snapshot(names=...) of the other's names, and start from that"
        )
    differing = []
    for name, tensor in new.tensors.items():
        other = old.tensors.get(name)
        if other is not None and (other.dtype, other.shape) != (tensor.dtype, tensor.shape):
            differing.append(
                f"tensor {name!r} is {other.dtype} {list(other.shape)} in {old.path}, "
                f"but {tensor.dtype} {list(tensor.shape)} in {new.path}"
            )
    problems += differing[:_EXAMPLES]
    if len(differing) > _EXAMPLES:
        problems.append(f"{len(differing) - _EXAMPLES} more tensors differ in dtype or shape")
    if differing:
        hints.append(
            "the base must be byte for byte what the deployment has: export the new one in its dtypes and shapes"
        )
    if wrapped := wrapped_names(new.tensors):
        problems.append(wrapped)
    mine, theirs = _config(new), _config(old)
    if mine is not None and theirs is not None and (trouble := quantisation_difference(mine, theirs, old.path)):
        _log.warning("%s: %s", new.path, trouble)
    raise_problems(f"{old.path} and {new.path}", problems, hint="; ".join(hints) or None)


def _config(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """Return ``config.json`` beside the tensors, None where there is none that can be read: a delta needs none."""
    try:
        with open(os.path.join(checkpoint.path, "config.json"), "rb") as file:
            value = json.loads(file.read())
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def _list(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_EXAMPLES]))
    if len(names) == 1:
        return f"tensor {shown}"
    return f"{len(names)} tensors ({shown}{', ...' if len(names) > _EXAMPLES else ''})"


def scan_full(path: str | os.PathLike[str]) -> Inspection:
    """Return the inspection of a full checkpoint; SnapshotLayoutError if it is something else."""
    source = os.path.abspath(os.fspath(path))
    found = scan(source, previous_identity=source, allow_empty_delta=True, any_names=True)
    assert found.index is not None  # scan() raised otherwise
    if is_delta(found.index):
        raise_problems(source, [f"{INDEX_NAME}: this is a delta; a full snapshot is written from a full checkpoint"])
    return found


def compare(place: str, found: Mapping[str, str], recorded: Mapping[str, str]) -> None:
    """Raise ChecksumError that names all tensors whose bytes do not have the recorded checksum."""
    wrong = [name for name, value in found.items() if recorded.get(name, value) != value]
    if not wrong:
        return
    lines = [
        f"tensor {name!r} has the Adler-32 {found[name]}, expected is {recorded[name]}" for name in wrong[:_EXAMPLES]
    ]
    if len(wrong) > _EXAMPLES:
        lines.append(f"and {len(wrong) - _EXAMPLES} more tensors")
    raise ChecksumError(
        f"{place}: {lines[0]}" if len(lines) == 1 else f"{place}:" + "".join(f"\n  - {line}" for line in lines),
        tensor=wrong[0],
        hint="the file is damaged, or the checksums are of another version",
    )


def keep(checkpoint: Checkpoint, names: Iterable[str] | None, checksums: Mapping[str, str] | None) -> dict[str, Tensor]:
    """Return the tensors of these names (None: all); ConfigError if one is not there, or has no checksum given."""
    kept = dict(checkpoint.tensors)
    if names is not None:
        wanted = {names} if isinstance(names, str) else set(names)
        if unknown := sorted(wanted - kept.keys()):
            raise ConfigError(f"names= has {_list(unknown)}, which {checkpoint.path} does not have")
        if not wanted:
            raise ConfigError("names= is empty", hint="name the tensors to keep, or leave names= out to keep all")
        kept = {name: tensor for name, tensor in kept.items() if name in wanted}
    if checksums is not None and (missing := [name for name in kept if name not in checksums]):
        raise ConfigError(f"checksums= has none for {_list(missing)}", hint="give all, or none: then they are computed")
    return kept
