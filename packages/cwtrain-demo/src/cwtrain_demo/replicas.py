"""What the emulator's replicas hold, asked on its admin routes: the other side of ``weights_match``."""

from __future__ import annotations

from cwtrain_emulator import Emulator

__all__ = ["replica_digests"]


def replica_digests(emulator: Emulator) -> dict[str, dict[str, str]]:
    """Return for each replica the hex SHA-256 of every tensor's bytes as they lie on its disk."""
    raise NotImplementedError
