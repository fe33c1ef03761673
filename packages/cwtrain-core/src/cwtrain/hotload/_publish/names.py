"""From a run, an epoch and a version to an identity, and back: the one place that spells them.

run-v000007            version 7 of the first epoch
run.2-v000007          version 7 of the second
run-v000007-full       the same version as a full snapshot, where the plain name is taken
run-v000007-r2         a second try, where a streamed upload of the first one died
"""

from __future__ import annotations

import datetime as dt
import os
import re

import attrs

from cwtrain.config.hotload import clean_run_id

__all__ = [
    "Name",
    "default_run_id",
    "epoch_claim",
    "epoch_of_claim",
    "identity_of",
    "is_baseline",
    "parse_identity",
    "prefix_of",
]


@attrs.frozen(kw_only=True)
class Name:
    """What an identity of a run says."""

    epoch: int
    version: int
    suffix: str = ""
    """``full``, ``r2`` and so on, or empty."""


def default_run_id(disk_dir: str | os.PathLike[str], now: dt.datetime) -> str:
    """Return ``<disk directory's name>-<UTC stamp>``, for a run that has no id of its own."""
    name = os.path.basename(os.path.abspath(os.fspath(disk_dir))) or "run"
    stamp = now.astimezone(dt.UTC).strftime("%Y%m%dT%H%M%S")
    return clean_run_id(f"{name[:64]}-{stamp}")


def prefix_of(run: str, epoch: int) -> str:
    """Return what all identities of an epoch begin with; epochs are counted from 1."""
    return run if epoch <= 1 else f"{run}.{epoch}"


def identity_of(run: str, epoch: int, version: int, suffix: str = "") -> str:
    """Return the identity of a version."""
    return f"{prefix_of(run, epoch)}-v{version:06d}" + (f"-{suffix}" if suffix else "")


def epoch_claim(run: str, epoch: int) -> str:
    """Return under which name an epoch is claimed, beside the claims of identities: no identity has a slash."""
    return f"{run}/epoch-{epoch:06d}"


def epoch_of_claim(run: str, name: str) -> int | None:
    """Return the number of the epoch that ``epoch_claim`` gave this name, or None."""
    found = re.fullmatch(rf"{re.escape(run)}/epoch-([0-9]{{6,18}})", name)
    return int(found[1]) if found else None


def parse_identity(run: str, identity: str) -> Name | None:
    """Return what ``identity`` says if it is one of ``run``, else None.

    Another run may be called ``<run>.2``: its identities read like those of our second epoch. That costs a number, not
    more: epochs are opened under the whole run id (see ``epochs.py``).
    """
    found = re.fullmatch(rf"{re.escape(run)}(?:\.([1-9][0-9]{{0,8}}))?-v([0-9]{{6,18}})(?:-([a-z0-9]+))?", identity)
    if found is None:
        return None
    epoch, version, suffix = found.groups()
    return Name(epoch=int(epoch or 1), version=int(version), suffix=suffix or "")


def is_baseline(identity: str) -> bool:
    """Return whether ``identity`` is the version 0 of a run, whichever it is."""
    return re.fullmatch(r".+-v0{6,18}(?:-[a-z0-9]+)?", identity) is not None
