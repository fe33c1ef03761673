"""The service's parts in one object, which every handler gets."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from cwtrain_emulator.api.controller import Controller
from cwtrain_emulator.faults import FaultBook
from cwtrain_emulator.keys import Keys
from cwtrain_emulator.replica.pool import Pool
from cwtrain_emulator.s3.client import S3Client
from cwtrain_emulator.settings import Settings
from cwtrain_emulator.store import Resource, Store

__all__ = ["Service", "gateway_zones"]


@dataclass
class Service:
    """What the handlers work with. `bucket_reader` has the service's own key: it lists and reads, no more.

    `clear_bucket` deletes every object and says how many there were; None where the store is not the emulator's own.
    `spare_keys` are the trainer's further keys, which are given out one after the other.
    """

    settings: Settings
    keys: Keys
    store: Store
    controller: Controller
    pool: Pool
    bucket_reader: S3Client
    clock: Callable[[], float]
    host: str = "127.0.0.1"
    base_url: str = ""
    s3_endpoint: str = ""
    faults: FaultBook = field(default_factory=FaultBook)
    clear_bucket: Callable[[], Awaitable[int]] | None = None
    spare_keys: list[tuple[str, str]] = field(default_factory=list)
    create_locks: defaultdict[str, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))

    def role_of(self, token: str) -> str | None:
        """Return ``admin``, ``viewer`` or None for a bearer token."""
        return self._roles().get(token)

    def _roles(self) -> dict[str, str]:
        return {self.keys.admin_token: "admin", self.keys.viewer_token: "viewer"}

    def endpoints(self, gateway: Resource) -> list[str]:
        """Return where a gateway can be reached, once it is up."""
        port = gateway.extra.get("port")
        return [f"http://{self.host}:{port}"] if port and gateway.status in ("READY", "UPDATING") else []


def gateway_zones(store: Store, deployment: Resource) -> list[str]:
    """Return the zones of a deployment's gateways, sorted."""
    zones: set[str] = set()
    for gateway_id in deployment.spec["gatewayIds"]:
        gateway = store.resource("gateway", gateway_id)
        if gateway is not None:
            zones.update(gateway.spec["zones"])
    return sorted(zones)
