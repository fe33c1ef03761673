"""What a valid identity is, and which identity a trainer's version number has."""

from __future__ import annotations

import re

from cwtrain.errors import SnapshotError

__all__ = [
    "RESERVED",
    "check_identity",
    "check_previous_identity",
    "holds_version",
    "identity_for_version",
    "version_number",
]

RESERVED = frozenset({".", "..", "initial", "_manifests", "_claims", "_preflight"})
"""Names that are no snapshot: path steps, the service's name for a deployment's base weights, and our own folders."""

_IDENTITY = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DIGITS = re.compile(r"[0-9]{1,18}")  # ASCII only: str.isdigit() also takes other scripts' digits
_SPELLED = re.compile(r"(?:.*[-_])?v([0-9]{6,18})(?:-[a-z0-9]+)?")
"""weight_v000007, run-v000007, run.2-v000007-full: an identity that says its version, as trainers and publishers do."""
_ENDING = re.compile(r".*?([0-9]{1,18})")


def check_identity(identity: str) -> str:
    """Return ``identity`` if a snapshot can be published under it.

    That is 1 to 128 letters, digits, ``.``, ``_`` and ``-`` (ASCII), and none of ``RESERVED``. Raises SnapshotError.
    """
    if not isinstance(identity, str) or not _IDENTITY.fullmatch(identity):
        raise SnapshotError(
            f"{identity!r} cannot name a snapshot",
            hint="use 1 to 128 letters, digits, '.', '_' and '-', for example step_000100",
        )
    if identity in RESERVED:
        raise SnapshotError(
            f"the identity {identity!r} is reserved", hint="choose another one, for example step_000100"
        )
    return identity


def check_previous_identity(identity: str) -> str:
    """Return ``identity`` if a delta can apply to it: anything the service may have, except ``initial``.

    Raises SnapshotError.
    """
    if not isinstance(identity, str) or not identity.strip():
        raise SnapshotError(
            f"{identity!r} is no identity of a predecessor",
            hint="give the identity of the snapshot that the delta was made from",
        )
    if identity == "initial":
        raise SnapshotError(
            "a delta cannot apply to 'initial', the weights that the deployment started with",
            hint="publish the base checkpoint as a full snapshot first, then name its identity as the predecessor",
        )
    return identity


def identity_for_version(version: int) -> str:
    """Return the identity that slime's and miles' directory names suggest: ``weight_v000007`` for 7."""
    if isinstance(version, bool) or not isinstance(version, int) or version < 0:
        raise SnapshotError(f"{version!r} is no version number", hint="a version is an integer, 0 or more")
    return f"weight_v{version:06d}"


def version_number(text: object) -> int | None:
    """Return the number that ``text`` spells in ASCII digits, or None if it is anything else (``-1``, ``latest``)."""
    if isinstance(text, str) and _DIGITS.fullmatch(text):
        return int(text)
    return None


def holds_version(identity: str, base_version: str, *, version: str | int | None) -> bool | None:
    """Return whether ``identity`` holds what a delta names as its ``base_version``; None where nothing says so.

    ``version`` is what its manifest says. Without that, an identity that spells a version as trainers do
    (``run-v000007``) holds that one; any other holds the number that it ends in, or else 0: a trainer's first delta
    applies to version 0, whatever its base is called.
    """
    if base_version == identity:
        return True  # read back from a bucket, where identities stand in the place of numbers
    number = version_number(base_version)
    if version is not None:
        text = str(version)
        said = version_number(text)
        if said is None and number is not None and (spelled := _SPELLED.fullmatch(text)):
            said = int(spelled[1])
        return text == base_version if said is None or number is None else said == number
    if number is None:
        return None
    if spelled := _SPELLED.fullmatch(identity):
        return int(spelled[1]) == number
    ending = _ENDING.fullmatch(identity)
    return True if number == 0 or (ending is not None and int(ending[1]) == number) else None
