"""Everything that ``check`` can find, each under one name, and how bad it is. The how-to pages explain each name."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Any, Final

import attrs

__all__ = ["LEVELS", "Finding", "Level", "finding", "ok"]


class Level(StrEnum):
    """How bad a finding is."""

    ERROR = "error"
    """The run will not start, will not publish, or will train on wrong samples."""
    WARNING = "warning"
    """It works, and costs something or needs an eye."""


LEVELS: Final = {
    # flags
    "flag-value": Level.ERROR,
    "foreign-flag": Level.ERROR,
    "custom-config": Level.WARNING,
    "ignored": Level.WARNING,
    "not-disk": Level.ERROR,
    "full-mode": Level.WARNING,
    "no-hook": Level.ERROR,
    "no-disk-dir": Level.ERROR,
    "disk-dir-erases": Level.ERROR,
    "no-local-dir": Level.ERROR,
    "encoding": Level.ERROR,
    "checksum": Level.ERROR,
    "converted": Level.WARNING,
    "no-engines": Level.ERROR,
    "router": Level.ERROR,
    "own-engines": Level.WARNING,
    "colocate": Level.ERROR,
    "lora": Level.ERROR,
    "backend": Level.ERROR,
    "publishing-off": Level.ERROR,
    "check-equal": Level.WARNING,
    "release-train": Level.ERROR,
    "temperature": Level.ERROR,
    "top-p": Level.ERROR,
    "routing-replay": Level.ERROR,
    "rollout-function": Level.WARNING,
    # environment
    "settings": Level.ERROR,
    "run-id": Level.WARNING,
    "no-fall-back": Level.WARNING,
    "token": Level.ERROR,
    # base checkpoint and disks
    "base-missing": Level.ERROR,
    "base-invalid": Level.ERROR,
    "base-quantised": Level.WARNING,
    "resume": Level.WARNING,
    "disk-full": Level.ERROR,
    "disk-tight": Level.WARNING,
    # service
    "service": Level.ERROR,
    "no-hot-load": Level.ERROR,
    "not-ready": Level.WARNING,
    "bucket": Level.ERROR,
    "bucket-optional": Level.WARNING,
    "base-differs": Level.ERROR,
    "base-absent": Level.ERROR,
    "base-unpublished": Level.WARNING,
    "base-failed": Level.ERROR,
    "endpoint": Level.ERROR,
    "no-weights": Level.WARNING,
    "log-probs": Level.ERROR,
    "log-probs-raw": Level.WARNING,
}
"""Name of a finding to its level, in the order of the how-to pages."""


@attrs.frozen(kw_only=True)
class Finding:
    """Something that will not work, or will be ignored; ``fix`` is what to do, with the flag or variable to set."""

    name: str
    message: str
    fix: str

    @property
    def level(self) -> Level:
        """How bad it is."""
        return LEVELS[self.name]

    def to_json(self) -> dict[str, Any]:
        """Return the finding as plain JSON data."""
        return {"name": self.name, "level": self.level.value, "message": self.message, "fix": self.fix}


def finding(name: str, message: str, fix: str) -> Finding:
    """Return a finding; its name must be in ``LEVELS``."""
    if name not in LEVELS:
        raise KeyError(f"no finding is called {name!r}")
    return Finding(name=name, message=message, fix=fix)


def ok(findings: Iterable[Finding]) -> bool:
    """Return whether none of the findings is an error."""
    return all(found.level is not Level.ERROR for found in findings)
