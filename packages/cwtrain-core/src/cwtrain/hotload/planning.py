"""What a publish would do, found out before the first byte is written."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cwtrain.errors import SnapshotChainError, SnapshotConflictError
from cwtrain.hotload import chain as chains
from cwtrain.hotload.upload import files_for_upload
from cwtrain.hotload.work import Work
from cwtrain.models.service import Deployment, HotLoad, ResourceStatus
from cwtrain.models.snapshot import INDEX_NAME, LocalSnapshot, PublishPlan, SnapshotFile, SnapshotKind
from cwtrain.snapshots._files import RegularFile
from cwtrain.snapshots._model_rules import name_differences, quantisation_difference
from cwtrain.storage import Location, ObjectStore, plan_upload

__all__ = ["check_predecessor", "differences", "plan_publish", "some"]

_log = logging.getLogger("cwtrain.hotload")


def plan_publish(
    snapshot: LocalSnapshot,
    work: Work,
    *,
    deployment: Deployment,
    location: Location,
    store: ObjectStore,
    hot_loads: Sequence[HotLoad],
    run_id: str | None = None,
    upload_next: bool = False,
) -> PublishPlan:
    """Return the plan of publishing ``snapshot`` as ``work`` on top of ``hot_loads`` (newest first), for ``run_id``.

    ``upload_next``: the upload follows, and looks at the claim itself.

    Raises SnapshotChainError when the delta cannot be resolved, SnapshotConflictError when the identity holds other
    content. Nothing is written.
    """
    identity = work.identity
    warnings = list(snapshot.warnings)
    if deployment.status is not ResourceStatus.READY:
        warnings.append(f"deployment {deployment.id} is {deployment.status}, not READY")
    deltas, reason = 0, "the directory is a full checkpoint"
    if snapshot.kind is SnapshotKind.DELTA:
        deltas, more = check_predecessor(snapshot, identity, hot_loads)
        warnings += more
        reason = f"the directory is a delta on {snapshot.previous_identity}"
    uploads = plan_upload(
        files_for_upload(snapshot, identity),
        store=store,
        location=location,
        identity=identity,
        run_id=run_id,
        claim_next=upload_next,
    )
    if uploads.conflicts:
        raise SnapshotConflictError(
            f"{location.uri(identity)} holds other content than {snapshot.path}: {some(uploads.conflicts)}",
            objects=uploads.conflicts,
            hint="identities are immutable: publish under a new one",
        )
    unfinished = chains.active(hot_loads)
    for warning in warnings:
        _log.warning("%s", warning)
    return PublishPlan(
        deployment_id=deployment.id,
        identity=identity,
        kind=snapshot.kind,
        reason=reason,
        bucket=location.bucket,
        path_prefix=location.path_prefix,
        uri=location.uri(identity),
        files=tuple(file.name for file in snapshot.files),
        total_bytes=snapshot.total_bytes,
        upload_bytes=uploads.upload_bytes,
        existing=tuple(uploads.existing),
        previous_identity=snapshot.previous_identity,
        chain_deltas=deltas,
        prompt_cache_policy=work.policy.value,
        waiting_on=unfinished.id if unfinished and not work.same_as(unfinished) else None,
        warnings=tuple(warnings),
    )


def check_predecessor(snapshot: LocalSnapshot, identity: str, hot_loads: Sequence[HotLoad]) -> tuple[int, list[str]]:
    """Return the deltas in the chain after ``identity``, with warnings. Raises SnapshotChainError."""
    previous = snapshot.previous_identity
    if not previous:
        raise SnapshotChainError(
            f"{snapshot.path} is a delta, and what it applies to is not known",
            hint="give previous_identity (--previous-identity), the identity that the deployment serves",
        )
    predecessor = chains.completed(hot_loads, previous)
    if predecessor is None:
        seen = next((one for one in hot_loads if one.identity == previous), None)
        served = chains.latest_completed(hot_loads)
        if seen is None or seen.state.terminal:
            raise SnapshotChainError(
                f"{identity} applies to {previous}, which this deployment has not completed "
                f"({'its hot-load is ' + seen.state.value if seen else 'no hot-load of it'}); "
                f"it serves {served.identity if served else 'its base weights'}",
                hint="publish the predecessor first, or publish a full snapshot",
            )
        return 0, [f"the predecessor {previous} is still being hot-loaded ({seen.state}); it is waited for"]
    chain = chains.chain_of(predecessor, hot_loads)
    deltas, warning = chains.extend(chain, identity)
    warnings = [warning] if warning else []
    served = chains.latest_completed(hot_loads)
    if served is not None and served.identity not in (previous, identity):
        warnings.append(
            f"the deployment serves {served.identity}, not the predecessor {previous}: replicas rebuild the chain"
        )
    return deltas, warnings


def differences(snapshot: LocalSnapshot, manifest: Mapping[str, Any], read: Callable[[str], bytes]) -> list[str]:
    """Return how a full snapshot differs from a published one, of ``manifest``, in all but its weights.

    Tensors that the other does not have or has more of, a quantisation of its own, another tokenizer or configuration.
    ``read`` gets a side file of the other one; only a ``config.json`` that differs is read.
    """
    what = str(manifest.get("identity"))
    if not manifest.get("tensors"):
        return []
    found = [name_differences(snapshot.index["weight_map"], manifest["tensors"], f"{what}, which is served")]
    theirs = {name: one for name, one in manifest["objects"].items() if not _is_weights(name)}
    mine = {file.name: file for file in snapshot.files if not _is_weights(file.name) and file.path is not None}
    changed = [name for name in sorted(mine.keys() & theirs.keys()) if not _same(mine[name], theirs[name])]
    if "config.json" in changed:
        here, there = _object(_read(mine["config.json"])), _object(read("config.json"))
        found.append(quantisation_difference(here, there, what))
    for names, how in (
        (changed, "differ from those of"),
        (sorted(mine.keys() - theirs.keys()), "are not in"),
        (sorted(theirs.keys() - mine.keys()), "are missing, and are in"),
    ):
        if names:
            found.append(
                f"files beside the weights: {some(names)} {how} {what}, the full snapshot that is served: replicas may "
                "tokenize, or end answers, in another way from here on"
            )
    return [text for text in found if text]


def _is_weights(name: str) -> bool:
    return name == INDEX_NAME or name.endswith(".safetensors")


def _read(file: SnapshotFile) -> bytes:
    assert file.path is not None
    with RegularFile(file.path, label=file.name) as source:
        return source.read(0, source.size_bytes)


def _same(file: SnapshotFile, other: Mapping[str, Any]) -> bool:
    return bool(file.size_bytes == other["size"] and hashlib.sha256(_read(file)).hexdigest() == other["sha256"])


def _object(raw: bytes) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def some(names: Sequence[str], most: int = 5) -> str:
    """Return the first few of ``names`` for a message."""
    text = ", ".join(names[:most])
    return f"{text}, and {len(names) - most} more" if len(names) > most else text
