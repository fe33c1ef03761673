"""What is published under a run id, and what a publisher that is started again will do: for ``hotload resume-info``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import attrs

from cwtrain.errors import SnapshotError, StorageNotFoundError
from cwtrain.hotload import chain as chains
from cwtrain.hotload._publish.epochs import highest_epoch
from cwtrain.hotload._publish.names import (
    Name,
    epoch_claim,
    epoch_of_claim,
    identity_of,
    parse_identity,
    prefix_of,
)
from cwtrain.hotload.streamed import IdentityStanding, identity_standing
from cwtrain.models.service import HotLoad
from cwtrain.snapshots.manifest import parse_manifest
from cwtrain.storage import Location, ObjectStore
from cwtrain.storage.claim import read_claim

__all__ = ["PublishedVersion", "ResumeInfo", "resume_info"]


@attrs.frozen(kw_only=True)
class PublishedVersion:
    """One identity of the run."""

    identity: str
    epoch: int
    version: int
    standing: IdentityStanding
    hot_load: str | None
    """State of its newest hot-load at this deployment; None where there was none."""
    served: bool


@attrs.frozen(kw_only=True)
class ResumeInfo:
    """A run at one deployment. ``next_*`` is what a publisher with this run id does when it is started again."""

    run_id: str
    deployment_id: str
    uri: str
    versions: tuple[PublishedVersion, ...]
    """In the order of epochs and versions."""
    epochs: int
    """The highest epoch of the run, 0 without any."""
    served: str | None
    """What the deployment serves, of whatever run."""
    baseline: str
    baseline_standing: IdentityStanding
    next_epoch: int
    """Above ``epochs``, and above what only reads like an epoch: run ``<run>.2`` takes our second one."""
    next_identity: str
    next_predecessor: str
    advice: str

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        return attrs.asdict(self, value_serializer=lambda _, __, value: str(value) if _is_state(value) else value)


def _is_state(value: object) -> bool:
    return isinstance(value, IdentityStanding)


def resume_info(
    store: ObjectStore, location: Location, run: str, deployment_id: str, hot_loads: Sequence[HotLoad]
) -> ResumeInfo:
    """Return what the bucket and ``hot_loads`` (newest first) say of ``run``; nothing is written.

    Another run may be called ``<run>.2``, and its identities read like those of our second epoch: manifests, claims and
    the epochs that publishers opened tell them apart. Raises StorageError naming a refused permission.
    """
    names = _names(store, location, run)
    newest = {one.identity: one for one in reversed(hot_loads)}
    served = chains.latest_completed(hot_loads)
    versions = []
    for identity in names | {one.identity for one in hot_loads}:
        parsed = parse_identity(run, identity)
        if parsed is None or _is_of_another_run(store, location, run, identity, parsed, names):
            continue
        hot_load = newest.get(identity)
        standing = identity_standing(store, location, identity)
        if standing is IdentityStanding.FREE and hot_load is not None:
            standing = IdentityStanding.REMOVED
        versions.append(
            PublishedVersion(
                identity=identity,
                epoch=parsed.epoch,
                version=parsed.version,
                standing=standing,
                hot_load=str(hot_load.state) if hot_load is not None else None,
                served=served is not None and served.identity == identity,
            )
        )
    versions.sort(key=lambda one: (one.epoch, one.version, one.identity))
    opened = [epoch_of_claim(run, name) or 0 for name in names]
    epochs = max([*opened, *(one.epoch for one in versions)], default=0)
    baseline = identity_of(run, 1, 0)
    standing = identity_standing(store, location, baseline)
    following = highest_epoch(store, location, run, hot_loads) + 1  # as the publisher counts
    return ResumeInfo(
        run_id=run,
        deployment_id=deployment_id,
        uri=f"s3://{location.bucket}/{location.root}",
        versions=tuple(versions),
        epochs=epochs,
        served=served.identity if served is not None else None,
        baseline=baseline,
        baseline_standing=standing,
        next_epoch=following,
        next_identity=identity_of(run, following, 1),
        next_predecessor=baseline,
        advice=_advice(run, baseline, standing, following),
    )


def _names(store: ObjectStore, location: Location, run: str) -> set[str]:
    """Return what begins with the run's name: identities that have a claim, a manifest or objects, and epochs."""
    found = set()
    for folder in (location.claim_key("").removesuffix(".json"), location.manifest_key("").removesuffix(".json")):
        for one in store.list_objects(f"{folder}{run}"):
            if one.key.endswith(".json"):
                found.add(one.key.removeprefix(folder).removesuffix(".json"))
    for one in store.list_objects(f"{location.root}{run}"):
        found.add(one.key.removeprefix(location.root).partition("/")[0])
    return found


def _is_of_another_run(
    store: ObjectStore, location: Location, run: str, identity: str, parsed: Name, names: set[str]
) -> bool:
    """Return whether an identity that reads like one of ``run`` is known to be of a run that is called ``<run>.N``.

    Or, the other way round, whether it is of an epoch of a run without our ``.N``.
    """
    another = re.sub(r"-v[0-9]+(-[a-z0-9]+)?$", "", identity)
    if another == run and not re.search(r"\.[1-9][0-9]*$", run):
        return False
    said = _run_of(store, location, identity)
    if said is not None:
        return said != run
    if another == run:
        return False
    # Nothing is left of it but its hot-load, say: the one of the two that opened epochs is it.
    opened = epoch_claim(run, parsed.epoch) in names and another == prefix_of(run, parsed.epoch)
    return not opened and any(epoch_of_claim(another, name) is not None for name in names)


def _run_of(store: ObjectStore, location: Location, identity: str) -> str | None:
    """Return the run that a snapshot says it is of, None where it says none."""
    try:
        said = parse_manifest(store.get(location.manifest_key(identity)))["run_id"]
    except (StorageNotFoundError, SnapshotError, KeyError):
        claim = read_claim(store, location, identity)
        return None if claim is None else claim.run_id
    return said if isinstance(said, str) else None


def _advice(run: str, baseline: str, standing: IdentityStanding, following: int) -> str:
    if standing is IdentityStanding.PUBLISHED:
        first = f"{baseline} is published: it is compared and not uploaded again"
    elif standing is IdentityStanding.FREE:
        first = f"nothing is published: {baseline} comes first"
        if following == 1:
            return f"{first}, then {identity_of(run, 1, 1)} on it"
    else:
        first = f"{baseline} is not complete ({standing}): its upload goes on from the same checkpoint"
    return (
        f"{first}; set CWTRAIN_HOTLOAD_RUN_ID={run} and start the trainer: epoch {following} begins, and its first "
        f"delta is {identity_of(run, following, 1)} on {baseline}"
    )
