"""Capacity claims."""

from __future__ import annotations

from typing import Any

from cwtrain_emulator.api.gateways import read_zones
from cwtrain_emulator.api.resources import Kind, Spec
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.api.wire import Reader, enum_json
from cwtrain_emulator.settings import INSTANCE_TYPES, ZONES
from cwtrain_emulator.store import Resource

__all__ = ["CLAIMS", "claim_parameters"]

_FIXED = ("instanceId", "capacityType", "zones")


class _Claims(Kind):
    def parse(self, service: Service, reader: Reader, old: Resource | None) -> Spec:
        """Return the spec of a claim; an update changes nothing but the count."""
        resources = reader.message("resources", required=True)
        count = resources.integer("instanceCount")
        if count < 1:
            resources.problem("instanceCount", "must be at least 1")
        capacity_type = resources.enum("capacityType", "CapacityType")
        if capacity_type == "UNSPECIFIED":
            resources.problem("capacityType", "is required")
        parsed: Spec = {
            "instanceId": resources.text("instanceId", required=True),
            "instanceCount": count,
            "capacityType": enum_json("CapacityType", capacity_type),
            "zones": read_zones(resources),
        }
        if old is not None:
            for name in _FIXED:
                if parsed[name] != old.spec["resources"][name]:
                    resources.problem(name, "cannot be changed")
        return {"resources": parsed}

    def status(self, service: Service, resource: Resource) -> dict[str, Any]:
        """A claim's instances are allocated once it is READY."""
        count = resource.spec["resources"]["instanceCount"]
        ready = resource.status == "READY"
        return {"allocatedInstances": count if ready else 0, "pendingInstances": 0 if ready else count}


CLAIMS = _Claims("capacityClaim")


def claim_parameters() -> dict[str, Any]:
    """Return the instances that a claim may name, by zone."""
    return {"zoneInstanceTypes": {zone: {"instanceIds": list(INSTANCE_TYPES)} for zone in ZONES}}
