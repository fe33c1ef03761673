"""The metrics of one publish, under ``hotload/``: numbers that a trainer's tracker takes as they are."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

__all__ = ["Measures", "metrics"]

_PHASES = {
    "inspect_seconds": "inspect_seconds",
    "upload_seconds": "upload_seconds",
    "accept_seconds": "accept_seconds",
    "first_replica_seconds": "first_replica_seconds",
    "last_replica_seconds": "last_replica_seconds",
    "encode_seconds": "encode_seconds",
    "uploaded_bytes": "uploaded_bytes",
    "bytes": "bytes",
}


@attrs.define(kw_only=True)
class Measures:
    """What was measured on the way, filled in as it becomes known. Seconds, bytes and counts."""

    mirror_seconds: float | None = None
    verify_seconds: float | None = None
    total_seconds: float = 0.0
    changed_tensors: int | None = None
    total_tensors: int | None = None
    changed_bytes: int | None = None
    """Bytes that differ; where only tensors are known, bytes of the tensors that differ."""
    total_bytes: int | None = None
    replicas: int | None = None
    chain_length: int | None = None
    """Deltas on the full snapshot in the chain of what is served after this."""
    chain_cut: bool = False
    timings: Mapping[str, float] = attrs.field(factory=dict)
    """A hot-load's own (``HotLoad.timings``)."""


def metrics(measures: Measures) -> dict[str, float]:
    """Return the measures by name. What is not known is left out.

    | name | is |
    | --- | --- |
    | ``hotload/total_seconds`` | the whole call |
    | ``hotload/{mirror,inspect,encode,upload,accept,first_replica,last_replica,verify}_seconds`` | its phases |
    | ``hotload/bytes``, ``hotload/uploaded_bytes`` | bytes of the snapshot; of them sent, the rest was there |
    | ``hotload/changed_tensors``, ``hotload/total_tensors`` | tensors in the delta, tensors of the model |
    | ``hotload/density`` | changed bytes by all bytes; of whole tensors where only those are known |
    | ``hotload/ratio`` | bytes of the model by bytes of the snapshot |
    | ``hotload/replicas`` | replicas that serve it |
    | ``hotload/chain_length`` | deltas in the chain now |
    | ``hotload/chain_cut`` | 1 where a full snapshot took the place of a delta |
    """
    found: dict[str, float | int | None] = {
        "total_seconds": measures.total_seconds,
        "mirror_seconds": measures.mirror_seconds,
        "verify_seconds": measures.verify_seconds,
        "changed_tensors": measures.changed_tensors,
        "total_tensors": measures.total_tensors,
        "replicas": measures.replicas,
        "chain_length": measures.chain_length,
        "chain_cut": float(measures.chain_cut),
    }
    for source, name in _PHASES.items():
        found[name] = measures.timings.get(source)
    if measures.total_bytes:
        if measures.changed_bytes is not None:
            found["density"] = measures.changed_bytes / measures.total_bytes
        if sent := measures.timings.get("bytes"):
            found["ratio"] = measures.total_bytes / sent
    return {f"hotload/{name}": float(value) for name, value in found.items() if value is not None}
