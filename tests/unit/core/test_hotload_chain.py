"""Chain rules: what is served, how long chains are, and the id that makes a repeat after a crash the same work."""

import pytest

from cwtrain.errors import SnapshotChainError
from cwtrain.hotload import chain as chains
from cwtrain.models.service import (
    HotLoad,
    HotLoadSpec,
    HotLoadState,
    HotLoadStatus,
    IncrementalSnapshotMetadata,
    PromptCachePolicy,
    SnapshotChainEntry,
    SnapshotType,
)


def hot_load(identity, state="COMPLETED", previous=None, hot_load_id=None, resolved=()):
    return HotLoad(
        spec=HotLoadSpec(
            id=hot_load_id or f"id-{identity}",
            identity=identity,
            type=SnapshotType.INCREMENTAL if previous else SnapshotType.FULL,
            incremental_snapshot_metadata=IncrementalSnapshotMetadata(previous_snapshot_identity=previous)
            if previous
            else None,
            snapshot_chain=tuple(resolved),
        ),
        status=HotLoadStatus(state=HotLoadState(state)),
    )


def history(deltas):
    """A full snapshot v0 and ``deltas`` deltas on it, newest first."""
    made = [hot_load("v0")] + [hot_load(f"v{n}", previous=f"v{n - 1}") for n in range(1, deltas + 1)]
    return made[::-1]


def test_the_newest_completed_is_served_and_an_unknown_state_counts_as_unfinished():
    loads = [hot_load("c", "UNSPECIFIED"), hot_load("b", "FAILED"), hot_load("a")]
    assert chains.latest_completed(loads).identity == "a"
    assert chains.active(loads).identity == "c"
    assert chains.completed(loads, "b") is None


def test_a_chain_is_followed_through_the_list():
    loads = history(3)
    chain = chains.chain_of(loads[0], loads)
    assert [link.identity for link in chain.links] == ["v0", "v1", "v2", "v3"]
    assert chain.deltas == 3
    assert chain.head.identity == "v3"


def test_the_service_s_own_resolution_wins():
    entries = [
        SnapshotChainEntry(identity="base", type=SnapshotType.FULL),
        SnapshotChainEntry(identity="x", type=SnapshotType.INCREMENTAL),
    ]
    load = hot_load("x", previous="base", resolved=entries)
    assert [link.identity for link in chains.chain_of(load, [load]).links] == ["base", "x"]


def test_a_predecessor_published_twice_resolves_to_the_one_before_the_delta():
    """After a rollback v1 stands twice in the list; the delta v2 was made on the older one."""
    loads = [hot_load("v1", previous="v0", hot_load_id="again"), hot_load("v2", previous="v1"), *history(1)]
    assert [link.hot_load_id for link in chains.chain_of(loads[1], loads).links] == ["id-v0", "id-v1", "id-v2"]


@pytest.mark.parametrize(
    ("deltas", "warns", "refused"),
    [(61, False, False), (62, False, False), (63, True, False), (127, True, False), (128, True, True)],
)
def test_chain_limits(deltas, warns, refused):
    loads = history(deltas)
    chain = chains.chain_of(loads[0], loads)
    if refused:
        with pytest.raises(SnapshotChainError, match="at most 128"):
            chains.extend(chain, "next")
        return
    count, warning = chains.extend(chain, "next")
    assert count == deltas + 1
    assert bool(warning) is warns
    if warning:
        assert str(count) in warning


def test_the_id_is_the_work_and_how_often_it_has_ended():
    def made(loads, identity="v1", previous="v0", policy=PromptCachePolicy.UNSPECIFIED):
        return chains.hot_load_id("dep", identity, SnapshotType.INCREMENTAL, previous, policy, loads)

    base = made([])
    assert made([]) == base
    assert made([hot_load("v1", "IN_PROGRESS", previous="v0")]) == base, "an unfinished one is the one to adopt"
    assert made([hot_load("other")]) == base
    assert made([hot_load("v1", "FAILED", previous="v0")]) != base
    assert made([hot_load("v1", previous="v0")]) != base
    assert made([], previous="v9") != base
    assert made([], policy=PromptCachePolicy.RESET_ALL) != base
