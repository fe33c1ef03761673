"""The chain that a deployment serves, with what each part of it weighs: for ``cwtrain hotload chain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from cwtrain.errors import SnapshotError, StorageNotFoundError
from cwtrain.hotload import chain as chains
from cwtrain.models.service import HotLoad
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.models.text import size
from cwtrain.snapshots.manifest import parse_manifest
from cwtrain.storage import Location, ObjectStore

__all__ = ["ChainReport", "LinkReport", "chain_report", "draw_chain"]

_BAR = 24
_PARTS = " ▏▎▍▌▋▊▉"


@attrs.frozen(kw_only=True)
class LinkReport:
    """One snapshot of the chain."""

    identity: str
    kind: SnapshotKind
    previous_identity: str | None
    hot_load_id: str
    objects: int
    """In the bucket; 0 where nothing is there any more."""
    size_bytes: int
    tensors: int | None
    """Tensors that it names, where its manifest says so."""
    version: str | int | None


@attrs.frozen(kw_only=True)
class ChainReport:
    """What a deployment serves. ``links`` are oldest first and empty while it serves the model that it began with."""

    deployment_id: str
    uri: str
    """Where the snapshots are."""
    served: str | None
    links: tuple[LinkReport, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def deltas(self) -> int:
        """How many deltas stand on the full snapshot."""
        return max(0, len(self.links) - 1)

    def to_json(self) -> dict[str, Any]:
        """Return it as plain JSON data."""
        sizes = [link.size_bytes for link in self.links]
        return {
            "deployment_id": self.deployment_id,
            "uri": self.uri,
            "served": self.served,
            "deltas": self.deltas,
            "cold_start_deltas": chains.COLD_START_DELTAS,
            "max_deltas": chains.MAX_DELTAS,
            "full_bytes": sizes[0] if sizes else 0,
            "delta_bytes": sum(sizes[1:]),
            "links": [{**attrs.asdict(link), "kind": str(link.kind)} for link in self.links],
            "warnings": list(self.warnings),
        }


def chain_report(
    store: ObjectStore, location: Location, deployment_id: str, hot_loads: Sequence[HotLoad]
) -> ChainReport:
    """Return the chain that the newest COMPLETED of ``hot_loads`` (newest first) made, weighed in the bucket.

    Raises StorageError naming a refused permission.
    """
    served = chains.latest_completed(hot_loads)
    where = f"s3://{location.bucket}/{location.root}"
    if served is None:
        return ChainReport(deployment_id=deployment_id, uri=where, served=None)
    warnings: list[str] = []
    links = [_weighed(store, location, link, warnings) for link in chains.chain_of(served, hot_loads).links]
    deltas = len(links) - 1
    if deltas > chains.COLD_START_DELTAS:
        warnings.append(
            f"{deltas} deltas: a replica that starts with no peer replays at most {chains.COLD_START_DELTAS}; "
            "publish a full snapshot soon"
        )
    if links and links[0].kind is not SnapshotKind.FULL:
        warnings.append(f"the chain does not begin with a full snapshot, as far as it is known: {links[0].identity}")
    return ChainReport(
        deployment_id=deployment_id, uri=where, served=served.identity, links=tuple(links), warnings=tuple(warnings)
    )


def _weighed(store: ObjectStore, location: Location, link: Any, warnings: list[str]) -> LinkReport:
    sizes = [one.size_bytes for one in store.list_objects(location.prefix(link.identity)) if one.size_bytes]
    if not sizes:
        warnings.append(f"{link.identity} is not in the bucket any more: no replica can start from this chain")
    manifest: dict[str, Any] = {}
    try:
        manifest = parse_manifest(store.get(location.manifest_key(link.identity)))
    except StorageNotFoundError:
        pass
    except SnapshotError as error:
        warnings.append(f"{link.identity}: {error}")
    return LinkReport(
        identity=link.identity,
        kind=link.kind,
        previous_identity=link.previous_identity,
        hot_load_id=link.hot_load_id,
        objects=len(sizes),
        size_bytes=sum(sizes),
        tensors=len(manifest["tensors"]) if "tensors" in manifest else None,
        version=manifest.get("version"),
    )


def draw_chain(report: ChainReport) -> list[str]:
    """Return the chain as lines for a person: newest last, a bar for each size."""
    if not report.links:
        return [f"{report.deployment_id} serves the model that it was made with: no hot-load has COMPLETED"]
    most = max(link.size_bytes for link in report.links) or 1
    width = max(len(link.identity) for link in report.links)
    lines = []
    for number, link in enumerate(report.links):
        mark = "●" if number == 0 else ("└" if number == len(report.links) - 1 else "├")
        kind = "full " if link.kind is SnapshotKind.FULL else "delta"
        weight = size(link.size_bytes)
        lines.append(f"{mark} {link.identity:<{width}}  {kind}  {weight:>9}  {_bar(link.size_bytes / most)}".rstrip())
    total = size(sum(link.size_bytes for link in report.links))
    lines.append(f"{report.deltas} deltas of {chains.MAX_DELTAS}, {total} in all; serves {report.served}")
    return lines


def _bar(part: float) -> str:
    eighths = round(part * _BAR * 8)
    return "█" * (eighths // 8) + _PARTS[eighths % 8].strip()
