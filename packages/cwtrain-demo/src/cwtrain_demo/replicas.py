"""What the emulator's replicas hold, asked on its own routes: the other side of ``weights_match``."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterable
from urllib.parse import quote

__all__ = ["replica_digests"]

_SECONDS = 60.0


def replica_digests(base_url: str, token: str, names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Return for each replica the hex SHA-256 of every tensor's bytes as they lie on its disk now.

    These routes are the emulator's own and no part of the service, so they are asked without its client. Raises
    ``OSError`` when the emulator does not answer.
    """
    # The emulator is on this machine: a proxy of the environment has no part in it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    digests: dict[str, dict[str, str]] = {}
    for name in names:
        request = urllib.request.Request(  # noqa: S310 - the emulator's own http URL
            f"{base_url}/emulator/v1/replicas/{quote(name, safe='')}/tensors",
            headers={"Authorization": f"Bearer {token}"},
        )
        with opener.open(request, timeout=_SECONDS) as answer:
            digests[name] = json.load(answer)
    return digests
