"""The hooks that a plugin may implement; ``docs/reference/hooks.md`` mirrors this module.

A hook's kind says how it is called:

- *register*: asked once; a plugin that raises is marked broken, the others stay.
- *choose*: asked in turn until one has an opinion (anything but None); what it raises reaches the caller.
- *guard*: all are asked; raising vetoes the step, and nothing was written.
- *observe*: all are told; what they raise is logged, counted and goes no further.

Within a hook the plugin that was registered last is called first; ``hookimpl(tryfirst=True)`` and ``trylast=True`` move
one. A hook that this version does not have is an error, unless its implementation is marked ``optionalhook=True``:
that is how one plugin supports two versions of core.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Final

import pluggy

if TYPE_CHECKING:
    import click

    from cwtrain.config import SettingValue
    from cwtrain.events import RolloutEvent, WeightsWritten, WeightSyncEvent
    from cwtrain.models.snapshot import Chain, PublishPlan
    from cwtrain.models.sync import (
        Integration,
        RolloutBackendFactory,
        SnapshotChoice,
        WeightSyncRequest,
        WeightSyncResult,
    )

__all__ = [
    "ENTRY_POINT_GROUP",
    "KINDS",
    "HookKind",
    "cwtrain_before_publish",
    "cwtrain_choose_snapshot",
    "cwtrain_name_snapshot",
    "cwtrain_post_write",
    "cwtrain_register_commands",
    "cwtrain_register_integration",
    "cwtrain_register_rollout_backend",
    "cwtrain_register_settings",
    "cwtrain_rollout_backend",
    "cwtrain_sync_weights",
    "cwtrain_weight_sync",
    "hookimpl",
    "hookspec",
]

PROJECT: Final = "cwtrain"
ENTRY_POINT_GROUP: Final = "cwtrain"
"""The entry-point group that plugins are found in."""

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class HookKind(StrEnum):
    """How a hook is called, and what becomes of an exception in it."""

    REGISTER = "register"
    CHOOSE = "choose"
    GUARD = "guard"
    OBSERVE = "observe"


KINDS: Final[Mapping[str, HookKind]] = {
    "cwtrain_register_integration": HookKind.REGISTER,
    "cwtrain_register_rollout_backend": HookKind.REGISTER,
    "cwtrain_register_commands": HookKind.REGISTER,
    "cwtrain_register_settings": HookKind.REGISTER,
    "cwtrain_name_snapshot": HookKind.CHOOSE,
    "cwtrain_choose_snapshot": HookKind.CHOOSE,
    "cwtrain_sync_weights": HookKind.CHOOSE,
    "cwtrain_before_publish": HookKind.GUARD,
    "cwtrain_post_write": HookKind.OBSERVE,
    "cwtrain_weight_sync": HookKind.OBSERVE,
    "cwtrain_rollout_backend": HookKind.OBSERVE,
}


@hookspec
def cwtrain_register_integration() -> Integration | Iterable[Integration]:  # type: ignore[empty-body]
    """Return the trainers that this distribution integrates.

    Asked by ``Plugins.integrations()``: ``cwtrain plugins list``, ``cwtrain doctor`` and the preflight. Two of one name
    are a ``PluginConflictError`` that names both distributions.
    """


@hookspec
def cwtrain_register_rollout_backend() -> RolloutBackendFactory | Iterable[RolloutBackendFactory]:  # type: ignore[empty-body]
    """Return named ways to sample rollouts. Asked at the first ``Plugins.rollout_backend(name)``."""


@hookspec
def cwtrain_register_commands(cli: click.Group) -> None:
    """Add commands to ``cli``, an empty group of the plugin's own whose commands are then offered beside core's.

    Asked only for ``cwtrain --help`` and for a command that core does not know. Import what a command needs inside it.
    ``click.get_current_context().meta["cwtrain.output"]()`` is where its data goes, so that it honours ``--output``:
    ``.data(value, ids=..., columns=...)`` prints plain JSON data, ``.say(text)`` a line for the person.
    """


@hookspec
def cwtrain_register_settings() -> Iterable[SettingValue]:  # type: ignore[empty-body]
    """Return the settings that this distribution reads from the environment, as they stand, secrets masked.

    Asked by ``cwtrain doctor``, which shows them beside core's own. A variable that is set, shares its first two words
    (``CWTRAIN_ROLLOUT_``) with a setting and is none is told as a mistake.
    """


@hookspec(firstresult=True)
def cwtrain_name_snapshot(written: WeightsWritten) -> str | None:
    """Return the identity to publish ``written`` under, or None for no opinion. Asked before any weights are read."""


@hookspec(firstresult=True)
def cwtrain_choose_snapshot(written: WeightsWritten, chain: Chain) -> SnapshotChoice | None:
    """Return whether to publish a full snapshot, a delta or nothing (SKIP); None for no opinion.

    Asked on rank 0 after inspection; ``chain`` is what the deployment serves now.
    """


@hookspec(firstresult=True)
def cwtrain_sync_weights(request: WeightSyncRequest) -> WeightSyncResult | None:
    """Bring the weights to the deployment and say what became of it, or return None to leave it to the next.

    Asked on rank 0. ``request.path`` is a directory, or the ``s3://`` URI of what was streamed into the bucket
    already. ``request.settings`` has ``wait``, ``version`` and ``publish``, the publisher's own way (called with a
    request). What the service says of the ``hot_load_id`` in the result is what counts. May be wrapped
    (``hookimpl(wrapper=True)``) to time or to serialise what the others do.
    """


@hookspec
def cwtrain_before_publish(plan: PublishPlan) -> None:
    """Raise to veto a publish. Asked after inspection and before the first byte is written, in a dry run, too.

    ``plan.dry_run`` says that nothing will be written.
    """


@hookspec
def cwtrain_post_write(event: WeightsWritten) -> None:
    """Hear that a trainer's files exist. Told on every rank."""


@hookspec
def cwtrain_weight_sync(event: WeightSyncEvent) -> None:
    """Hear of each step of a weight sync. Told on rank 0; keep a ``case _``, more kinds of event may come."""


@hookspec
def cwtrain_rollout_backend(event: RolloutEvent) -> None:
    """Hear of rollouts: one event for a batch, a burst of retries or an outage, never one for each request."""
