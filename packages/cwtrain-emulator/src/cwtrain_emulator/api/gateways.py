"""Gateways: what a spec may say, and when one can be deleted."""

from __future__ import annotations

from typing import Any

from cwtrain_emulator.api.errors import failed_precondition
from cwtrain_emulator.api.resources import Kind, Spec
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.api.wire import Reader, enum_json, pruned
from cwtrain_emulator.settings import ZONES
from cwtrain_emulator.store import Resource

__all__ = ["GATEWAYS", "gateway_parameters"]

_AUTHS = ("coreWeaveAuth", "weightsAndBiasesAuth")
_ROUTINGS = ("bodyBasedRouting", "headerBasedRouting", "pathBasedRouting")
_MAX_HEADER_NAME = 100


class _Gateways(Kind):
    def parse(self, service: Service, reader: Reader, old: Resource | None) -> Spec:
        """Return the spec of a gateway."""
        spec: Spec = {
            "zones": read_zones(reader),
            **_one_of(reader, _AUTHS, "authentication", _auth),
            **_one_of(reader, _ROUTINGS, "routing", _routing),
        }
        if reader.has("endpointConfiguration"):
            endpoint = reader.message("endpointConfiguration")
            spec["endpointConfiguration"] = pruned(
                {
                    "additionalDns": endpoint.texts("additionalDns"),
                    "allowedSourceIpRanges": endpoint.texts("allowedSourceIpRanges"),
                }
            )
        return spec

    def check_delete(self, service: Service, resource: Resource) -> None:
        """A gateway stays while deployments use it."""
        users = [row for row in service.store.resources("deployment") if resource.id in row.spec["gatewayIds"]]
        if users:
            raise failed_precondition(
                f"gateway {resource.id} is in use by {len(users)} deployment(s)",
                *(("DEPLOYMENT", f"deployment {row.id} ({row.name}) uses the gateway") for row in users[:20]),
            )

    def status(self, service: Service, resource: Resource) -> dict[str, Any]:
        """A gateway's endpoints are there once it is up."""
        return {"endpoints": service.endpoints(resource)}


GATEWAYS = _Gateways("gateway")


def gateway_parameters() -> dict[str, Any]:
    """Return the zones that a gateway may be in."""
    return {"zones": list(ZONES)}


def read_zones(reader: Reader) -> list[str]:
    """Return the zones of a gateway or a claim: at least one, known, no repeats."""
    zones = reader.texts("zones")
    if not zones:
        reader.problem("zones", "at least one zone is required")
    for zone in zones:
        if zone not in ZONES:
            reader.problem("zones", f"unknown zone {zone[:100]!r}; known are {', '.join(ZONES)}")
    return list(dict.fromkeys(zones))


def _one_of(reader: Reader, names: tuple[str, ...], what: str, parse: Any) -> Spec:
    given = [name for name in names if reader.has(name)]
    if len(given) != 1:
        reader.problem("|".join(names), f"exactly one {what} is required")
        return {}
    return {given[0]: parse(given[0], reader.message(given[0]))}


def _auth(name: str, reader: Reader) -> Spec:
    if name == "coreWeaveAuth":
        return {}
    if reader.has("apiKey") and not reader.text("serverUrl"):
        reader.problem("serverUrl", "is required with apiKey")
    # The key itself is a secret, which no answer shows.
    return pruned(
        {
            "serverUrl": reader.text("serverUrl"),
            "enableUsageReports": reader.flag("enableUsageReports"),
            "enableRateLimiting": reader.flag("enableRateLimiting"),
        }
    )


def _routing(name: str, reader: Reader) -> Spec:
    if name == "bodyBasedRouting":
        api_type = reader.enum("apiType", "ApiType")
        return pruned({"apiType": enum_json("ApiType", api_type)})
    if name == "headerBasedRouting":
        header = reader.text("headerName", required=True)
        if len(header) > _MAX_HEADER_NAME:
            reader.problem("headerName", f"must have at most {_MAX_HEADER_NAME} characters")
        return {"headerName": header}
    return {}
