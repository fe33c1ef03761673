"""What a trainer's directory holds: told by its content, never by the order of calls."""

from __future__ import annotations

import hashlib
import logging
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import attrs

from cwtrain.errors import SnapshotLayoutError
from cwtrain.hotload._publish.decide import Seen
from cwtrain.hotload._publish.state import WriteKind
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots.identity import version_number
from cwtrain.snapshots.index import is_delta
from cwtrain.snapshots.inspect import late_files, scan

__all__ = ["Look", "NumberOf", "content_of", "look_at", "not_visible", "shown", "weight_v_number", "when_visible"]

_log = logging.getLogger("cwtrain.hotload")

T = TypeVar("T")

_LOOK_SECONDS = 1.0
_TELL_SECONDS = 30.0

NumberOf = Callable[[Path], int | None]
"""From a directory to the version that its name says, or None."""

_WEIGHT_V = re.compile(r"weight_v([0-9]{6,18})")


@attrs.frozen(kw_only=True)
class Look:
    """A directory, read as far as its headers."""

    path: str
    kind: WriteKind
    number: int | None = None
    base_number: int | None = None
    checksums: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    """A delta's checksum of each tensor, in whatever format its writer uses."""
    foreign: str = ""
    """What the service does not take in this delta, in words; empty where it takes it as it is."""
    content: str = ""
    """Digest of names and checksums of a delta; a full snapshot's is found out when it is needed."""
    tensors: int = 0
    size_bytes: int = 0
    """Bytes of the tensors as they lie in the directory."""

    def seen(self, content: str | None = None) -> Seen:
        """Return it as what is decided about. Only for numbered directories."""
        assert self.number is not None
        return Seen(
            kind=self.kind,
            number=self.number,
            base_number=self.base_number,
            content=self.content if content is None else content,
        )


def weight_v_number(path: Path) -> int | None:
    """Return the number in a directory name like ``weight_v000007``, or None."""
    found = _WEIGHT_V.fullmatch(path.name)
    return int(found[1]) if found else None


def content_of(checksums: Mapping[str, str]) -> str:
    """Return one digest of the names and checksums of tensors: equal means equal bytes.

    Shard files cannot be compared: their headers' order is another in each process of the trainer.
    """
    lines = "".join(f"{name}\0{value}\n" for name, value in sorted(checksums.items()))
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


def look_at(
    path: str | os.PathLike[str],
    *,
    disk_dir: str | os.PathLike[str],
    number: int | None = None,
    number_of: NumberOf = weight_v_number,
) -> Look:
    """Return what lies at ``path``.

    The directory that holds the others (``disk_dir``) is a baseline call. Otherwise the index decides: a delta, a delta
    without tensors, or a full snapshot. ``number`` is what the trainer calls the version; without it ``number_of``
    reads the directory's name, and a delta's own index says it too.

    Raises SnapshotLayoutError for anything else, with everything that is wrong.
    """
    place = os.path.realpath(os.fspath(path))
    if place == os.path.realpath(os.fspath(disk_dir)):
        return Look(path=place, kind=WriteKind.BASELINE)
    # Named or not, what the delta applies to is decided later: any identity will do here.
    found = scan(place, allow_empty_delta=True, previous_identity="-", foreign_formats=True)
    assert found.index is not None  # scan() raised otherwise
    named = number if number is not None else number_of(Path(place))
    size = sum(tensor.size_bytes for _, _, tensor in found.shards.tensors()) if found.shards else 0
    if not is_delta(found.index):
        if named is None:
            raise _refused(place, "is a full snapshot, and nothing says which version: its name has no number")
        return Look(path=place, kind=WriteKind.FULL, number=named, tensors=_count(found.index), size_bytes=size)
    version = version_number(found.versions.version)
    base = version_number(found.versions.base_version)
    if version is None or base is None:
        raise _refused(
            place,
            f"is a delta whose version {found.versions.version!r} or base_version {found.versions.base_version!r} is "
            "not a number in digits",
        )
    if named is not None and named != version:
        raise _refused(place, f"is version {named} by its name, and version {version} by its index")
    metadata = found.index["metadata"]
    foreign = [
        f"{key} {metadata[key]!r}"
        for key, taken in (("delta_encoding", "xor"), ("checksum_format", "adler32"))
        if metadata[key] != taken
    ]
    empty = not found.index["weight_map"]
    return Look(
        path=place,
        kind=WriteKind.EMPTY if empty else WriteKind.DELTA,
        number=version,
        base_number=base,
        checksums=dict(found.checksums),
        foreign="" if empty else " and ".join(foreign),
        content=content_of(found.checksums),
        tensors=_count(found.index),
        size_bytes=size,
    )


def when_visible(
    look: Callable[[], T],
    place: str | os.PathLike[str],
    *,
    seconds: float,
    clock: Callable[[], float],
    sleep: Callable[[float], None],
) -> T:
    """Return what ``look`` returns, made again for up to ``seconds`` while files of ``place`` are not there or short.

    On a shared disk the files of another node may show as late as its attribute cache is long. What is there and wrong
    is raised at once; what is still missing at the end is raised with both explanations.
    """
    began, told = clock(), -math.inf
    while True:
        try:
            return look()
        except SnapshotLayoutError as error:
            late = late_files(place)
            if not late:
                return look()  # the last file has come since; or the directory is wrong, and stays so
            now = clock()
            left = began + seconds - now
            if left <= 0:
                raise not_visible(place, late, seconds, problems=error.problems) from error
            if now - told >= _TELL_SECONDS:
                told = now
                _log.warning(
                    "%s: %s not there, or not whole: a shared disk may show it late, so it is looked for for up to "
                    "%.0f s more",
                    os.fspath(place),
                    shown(late),
                    left,
                )
        sleep(min(_LOOK_SECONDS, left))


def not_visible(
    place: str | os.PathLike[str], late: Sequence[str], seconds: float, *, problems: Sequence[str] = ()
) -> SnapshotLayoutError:
    """Return the error for files that a directory lacks after it was looked at for ``seconds``."""
    problems = list(problems) or [f"{name}: is not there, or not whole" for name in late]
    return SnapshotLayoutError(
        f"{os.fspath(place)}: {shown(late)} not there, or not whole, also when looked at again for {seconds:g} s: "
        "either the nodes share no disk (or the trainer has not written it), or the shared disk shows the files of "
        f"other nodes later than that ({'; '.join(problems[:3])})",
        problems=problems,
        hint="put the directory on a file system that all nodes share; where it is one, set CWTRAIN_HOTLOAD_FILES_WAIT "
        "above the seconds of its attribute cache (NFS: acdirmax), or mount it with a shorter one",
    )


def shown(names: Sequence[str]) -> str:
    """Return a few names, with the right verb behind them."""
    few = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{few} {'is' if len(names) == 1 else 'are'}"


def _count(index: Mapping[str, object]) -> int:
    weight_map = index.get("weight_map")
    return len(weight_map) if isinstance(weight_map, Mapping) else 0


def _refused(place: str, what: str) -> SnapshotLayoutError:
    problem = f"{INDEX_NAME}: {what}"
    return SnapshotLayoutError(
        f"{place}: {problem}",
        problems=[problem],
        hint="give the publisher the version (number=), or name directories like weight_v000007",
    )
