"""What makes an index and its shards a delta that the service takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from cwtrain.errors import SnapshotError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots._checksums import ADLER32, CHECKSUM_FORMATS, digits_of, well_formed
from cwtrain.snapshots._shards import Shards
from cwtrain.snapshots.identity import check_previous_identity, version_number

_EXAMPLES = 20


@attrs.frozen(kw_only=True)
class _Format:
    key: str
    value: str
    fix: str
    foreign: tuple[str, ...] = ()
    """Other values that we can read, though the service does not take them."""


_CONVERT = "`cwtrain snapshot convert` rewrites it where the base is at hand"
_FORMATS = (
    _Format(
        key="delta_encoding",
        value="xor",
        fix=f"start the trainer (slime, miles) with --update-weight-delta-encoding xor; {_CONVERT}",
        foreign=("overwrite",),
    ),
    _Format(key="compression_format", value="zstd", fix="write the delta with zstd, one frame for each tensor"),
    _Format(
        key="checksum_format",
        value="adler32",
        fix=f"start the trainer (slime, miles) with --update-weight-delta-checksum adler32; {_CONVERT}",
        foreign=tuple(name for name in CHECKSUM_FORMATS if name != ADLER32),
    ),
)


@attrs.frozen(kw_only=True)
class Versions:
    """What a delta's index says of itself, and which snapshot it applies to."""

    version: str | None = None
    base_version: str | None = None
    previous_identity: str | None = None


def check_formats(metadata: Mapping[str, Any], problems: list[str], *, foreign: bool = False) -> str | None:
    """Check encoding, compression and checksum; return the checksum's name if it is one that we can read.

    With ``foreign`` what the service does not take is fine, as long as we can read it.
    """
    for item in _FORMATS:
        found = metadata.get(item.key)
        if found == item.value or (foreign and found in item.foreign):
            continue
        what = f"is {found!r}" if item.key in metadata else "is missing"
        if foreign:
            known = " or ".join(map(repr, (item.value, *item.foreign)))
            problems.append(f"{INDEX_NAME}: {item.key} {what}; only {known} can be read")
        else:
            problems.append(f"{INDEX_NAME}: {item.key} {what}, the service takes only {item.value!r}; {item.fix}")
    name = metadata.get("checksum_format")
    return name if name == ADLER32 or (foreign and name in CHECKSUM_FORMATS) else None


def check_versions(
    metadata: Mapping[str, Any],
    *,
    previous_identity: str | None,
    identity_for_version: Callable[[int], str | None],
    problems: list[str],
) -> Versions:
    """Check version and base_version and find the predecessor; an explicit one wins."""
    texts: dict[str, str | None] = {}
    for key in ("version", "base_version"):
        value = metadata.get(key)
        texts[key] = value if isinstance(value, str) and value else None
        if texts[key] is None:
            what = f"is {value!r}" if key in metadata else "is missing"
            problems.append(f'{INDEX_NAME}: {key} {what}; a delta has a string there, like "000007"')
    version, base = texts["version"], texts["base_version"]
    number, base_number = version_number(version), version_number(base)
    if version is not None and base is not None:
        if number is not None and base_number is not None and number <= base_number:
            problems.append(
                f"{INDEX_NAME}: version {version} is not above base_version {base}; a delta leads from an older "
                "version to a newer one: write it again with the right numbers"
            )
        elif version == base:
            problems.append(
                f"{INDEX_NAME}: version and base_version are both {version!r}; a delta cannot be its own base"
            )
    if previous_identity is None:
        give = "or give the predecessor: previous_identity= (--previous-identity)"
        for key, text in texts.items():
            if text is not None and version_number(text) is None:
                problems.append(f"{INDEX_NAME}: {key} {text!r} is not a number in digits; write one, {give}")
        if base_number is not None:
            previous_identity = identity_for_version(base_number)
    if previous_identity is not None:
        try:
            check_previous_identity(previous_identity)
        except SnapshotError as error:
            problems.append(f"previous_identity: {error.message}; {error.hint}")
    return Versions(version=version, base_version=base, previous_identity=previous_identity)


def check_blobs(shards: Shards, problems: list[str]) -> None:
    """Check that each tensor of a delta is a vector of compressed bytes."""
    wrong = []
    for name, shard, tensor in shards.tensors():
        if tensor.dtype != "U8" or tensor.shape != (tensor.size_bytes,):
            wrong.append(
                f"{shard}: tensor {name!r} is {tensor.dtype} {list(tensor.shape)}, not a U8 vector of frame bytes"
            )
        elif not tensor.size_bytes:
            wrong.append(f"{shard}: tensor {name!r} has no bytes, not even an empty zstd frame")
    problems.extend(f"{text}; write the delta again" for text in wrong[:_EXAMPLES])
    if len(wrong) > _EXAMPLES:
        problems.append(f"{len(wrong) - _EXAMPLES} more tensors are no frames")


def read_checksums(shards: Shards, problems: list[str], algorithm: str = ADLER32) -> dict[str, str]:
    """Return the recorded checksum of each tensor; a missing or malformed one is a problem."""
    found: dict[str, str] = {}
    wrong = []
    digits = digits_of(algorithm)
    for name, shard, _ in shards.tensors():
        text = shards.headers[shard].metadata.get(name)
        if text is None:
            wrong.append(f"{shard}: tensor {name!r} has no checksum in __metadata__")
        elif not well_formed(algorithm, text):
            wrong.append(f"{shard}: the checksum {text!r} of tensor {name!r} is not {digits} lower-case hex digits")
        else:
            found[name] = text
    fix = "write it as '%08x' of the Adler-32 of the tensor's (new) bytes" if algorithm == ADLER32 else "write it again"
    problems.extend(f"{text}; {fix}" for text in wrong[:_EXAMPLES])
    if len(wrong) > _EXAMPLES:
        problems.append(f"{len(wrong) - _EXAMPLES} more tensors have no good checksum")
    return found
