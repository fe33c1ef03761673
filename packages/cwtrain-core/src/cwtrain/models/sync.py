"""What a trainer asks for between two steps, as plain data for plugins."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Any

import attrs

__all__ = ["Integration", "RolloutBackendFactory", "SnapshotChoice", "WeightSyncRequest", "WeightSyncResult"]


class SnapshotChoice(StrEnum):
    """What is published for a written version."""

    FULL = "FULL"
    DELTA = "DELTA"
    SKIP = "SKIP"


@attrs.frozen(kw_only=True)
class Integration:
    """A trainer that an installed distribution integrates.

    ``name`` is the trainer's, ``distribution`` the package that brings it, ``documented`` the dotted path users
    configure, ``status`` says in one line what works today.
    """

    name: str
    distribution: str
    documented: str
    status: str


@attrs.frozen(kw_only=True)
class RolloutBackendFactory:
    """A named way to sample rollouts; ``create(**settings)`` gives the backend."""

    name: str
    distribution: str
    create: Callable[..., Any] = attrs.field(repr=False)
    help: str = ""


@attrs.frozen(kw_only=True)
class WeightSyncRequest:
    """Bring the weights at ``path`` into ``deployment_id`` as ``identity``."""

    deployment_id: str
    path: str
    identity: str
    choice: SnapshotChoice
    previous_identity: str | None = None
    timeout: float | None = None
    """Seconds, or None for the loader's own."""
    settings: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class WeightSyncResult:
    """What became of a request."""

    identity: str
    hot_load_id: str | None
    seconds: float
