"""What a deployment has been given, read off its hot-loads: what is served, what applies to what, how long chains are.

Pure functions over hot-loads as the service lists them (newest first).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence

from cwtrain.errors import SnapshotChainError
from cwtrain.models.service import HotLoad, HotLoadState, PromptCachePolicy, SnapshotType
from cwtrain.models.snapshot import Chain, ChainLink, SnapshotKind

__all__ = [
    "COLD_START_DELTAS",
    "MAX_DELTAS",
    "active",
    "chain_of",
    "completed",
    "extend",
    "hot_load_id",
    "latest_completed",
    "served_chain",
]

MAX_DELTAS = 128
"""Deltas on one full snapshot that the service accepts."""
COLD_START_DELTAS = 63
"""Deltas that a replica which starts with no peer can replay from storage."""

_NAMESPACE = uuid.UUID("6f2f9d2e-4a0c-5d5a-9f0e-0c7f6a2b8f11")


def active(hot_loads: Iterable[HotLoad]) -> HotLoad | None:
    """Return the unfinished hot-load, if there is one. A state that we do not know counts as unfinished."""
    return next((hot_load for hot_load in hot_loads if not hot_load.state.terminal), None)


def latest_completed(hot_loads: Iterable[HotLoad]) -> HotLoad | None:
    """Return the newest COMPLETED hot-load: what the deployment serves."""
    return next((hot_load for hot_load in hot_loads if hot_load.state is HotLoadState.COMPLETED), None)


def completed(hot_loads: Iterable[HotLoad], identity: str) -> HotLoad | None:
    """Return the newest COMPLETED hot-load of ``identity``."""
    return latest_completed(hot_load for hot_load in hot_loads if hot_load.identity == identity)


def chain_of(hot_load: HotLoad, hot_loads: Sequence[HotLoad]) -> Chain:
    """Return the chain that ``hot_load`` completed: as the service resolved it, or else followed through the list."""
    if hot_load.spec.snapshot_chain:
        links = [
            ChainLink(
                identity=entry.identity,
                kind=SnapshotKind.DELTA if entry.type is SnapshotType.INCREMENTAL else SnapshotKind.FULL,
                hot_load_id=entry.hot_load_id,
                previous_identity=before.identity if before else None,
            )
            for before, entry in zip(
                (None, *hot_load.spec.snapshot_chain[:-1]), hot_load.spec.snapshot_chain, strict=True
            )
        ]
        if links[-1].identity == hot_load.identity:
            return Chain(links=tuple(links))
    backwards: list[ChainLink] = []
    seen: set[str] = set()
    link: HotLoad | None = hot_load
    while link is not None and link.id not in seen:
        seen.add(link.id)
        backwards.append(
            ChainLink(
                identity=link.identity,
                kind=SnapshotKind.DELTA if link.previous_identity else SnapshotKind.FULL,
                hot_load_id=link.id,
                previous_identity=link.previous_identity,
            )
        )
        # The predecessor was completed before this one, so it stands further down the list.
        older = hot_loads[_position(hot_loads, link) + 1 :]
        link = completed(older, link.previous_identity) if link.previous_identity else None
    return Chain(links=tuple(reversed(backwards)))


def served_chain(hot_loads: Sequence[HotLoad]) -> Chain:
    """Return the chain of what the deployment serves."""
    served = latest_completed(hot_loads)
    return chain_of(served, hot_loads) if served is not None else Chain()


def extend(chain: Chain, identity: str) -> tuple[int, str | None]:
    """Return the deltas in ``chain`` after one more, with a warning where cold starts get into trouble.

    Raises SnapshotChainError when the service would refuse the chain.
    """
    deltas = chain.deltas + 1
    if deltas > MAX_DELTAS:
        raise SnapshotChainError(
            f"{identity} would be delta number {deltas} on {chain.links[0].identity}; "
            f"the service takes at most {MAX_DELTAS}",
            hint="publish a full snapshot instead (cwtrain.hotload.delta.write_full_snapshot writes one)",
        )
    if deltas > COLD_START_DELTAS:
        return deltas, (
            f"the chain on {chain.links[0].identity} has {deltas} deltas; a replica that starts with no peer replays "
            f"at most {COLD_START_DELTAS}, so publish a full snapshot soon"
        )
    return deltas, None


def hot_load_id(
    deployment_id: str,
    identity: str,
    snapshot_type: SnapshotType,
    previous_identity: str | None,
    policy: PromptCachePolicy,
    hot_loads: Iterable[HotLoad],
) -> str:
    """Return the id under which this piece of work is asked for.

    It is made of the work itself and of how often the identity has been through a hot-load to the end, so the same
    command after a crash asks under the same id and adopts what it began, while a wanted repeat gets a new one.
    """
    finished = sum(1 for one in hot_loads if one.identity == identity and one.state.terminal)
    name = "\n".join(
        [deployment_id, identity, snapshot_type.value, previous_identity or "", policy.value, str(finished)]
    )
    return str(uuid.uuid5(_NAMESPACE, name))


def _position(hot_loads: Sequence[HotLoad], hot_load: HotLoad) -> int:
    return next((at for at, one in enumerate(hot_loads) if one.id == hot_load.id), -1)
