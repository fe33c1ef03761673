"""Who publishes under a run id, and in which epoch: each epoch is opened by one conditional PUT, so it has one opener.

An identity belongs to one epoch, so no two publishers can ever write under the same one: who opens a later epoch takes
the run over, and the one that had it before is refused before it sends weights. The claims are small objects,
``_claims/<run>/epoch-000002.json``, that are never replaced.
"""

from __future__ import annotations

import datetime as dt
import socket
from collections.abc import Iterable

from cwtrain.errors import SnapshotConflictError
from cwtrain.hotload._publish.names import epoch_claim, epoch_of_claim, parse_identity
from cwtrain.models.service import HotLoad
from cwtrain.storage import Location, ObjectStore
from cwtrain.storage.claim import Claim, read_claim, take_claim

__all__ = ["highest_epoch", "open_epoch", "refuse_if_taken_over"]

_TRIES = 1000


def highest_epoch(store: ObjectStore, location: Location, run: str, hot_loads: Iterable[HotLoad]) -> int:
    """Return the highest epoch of ``run`` that the bucket or the deployment's hot-loads know of, 0 without any."""
    found = 0
    folder = location.claim_key("").removesuffix(".json")
    for item in store.list_objects(f"{folder}{run}"):
        name = item.key.removeprefix(folder).removesuffix(".json")
        epoch = epoch_of_claim(run, name)
        if epoch is None and (parsed := parse_identity(run, name)) is not None:
            epoch = parsed.epoch
        found = max(found, epoch or 0)
    for hot_load in hot_loads:
        if (parsed := parse_identity(run, hot_load.identity)) is not None:
            found = max(found, parsed.epoch)
    return found


def open_epoch(store: ObjectStore, location: Location, run: str, *, first: int, owner: str, directory: str) -> int:
    """Open the first free epoch from ``first`` on, for ``owner``, and return its number."""
    claim = Claim(
        uuid=owner,
        run_id=run,
        host=socket.gethostname(),
        directory=directory,
        files={},
        created=dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
    )
    for epoch in range(max(1, first), max(1, first) + _TRIES):
        held, _ = take_claim(store, location, epoch_claim(run, epoch), claim)
        if held == claim:
            return epoch
    raise SnapshotConflictError(
        f"run {run!r} has {_TRIES} epochs that others opened", hint="set another CWTRAIN_HOTLOAD_RUN_ID"
    )


def refuse_if_taken_over(store: ObjectStore, location: Location, run: str, *, epoch: int, owner: str) -> None:
    """Raise SnapshotConflictError where somebody opened a later epoch than ``epoch``, or ``epoch`` is not ours."""
    folder = location.claim_key("").removesuffix(".json")
    listed = store.list_objects(f"{folder}{epoch_claim(run, epoch).removesuffix(f'{epoch:06d}')}")
    known = (epoch_of_claim(run, item.key.removeprefix(folder).removesuffix(".json")) for item in listed)
    # Not always the next one: who takes over goes above every identity that reads like one of the run.
    for number in sorted({epoch, *(one for one in known if one is not None and one > epoch)}):
        claim = read_claim(store, location, epoch_claim(run, number))
        if claim is not None and claim.uuid != owner:
            raise SnapshotConflictError(
                f"run {run!r} was taken over: its epoch {number} belongs to {claim.holder()}; nothing was sent",
                objects=(location.claim_key(epoch_claim(run, number)),),
                hint="two trainers publish under one CWTRAIN_HOTLOAD_RUN_ID: stop one of them, or give each its own",
            )
