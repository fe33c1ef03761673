"""What faults do inside of a replica's process: stand still, take longer, damage bytes, die."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cwtrain_emulator.replica.materialise import Sabotage

__all__ = ["Misfortunes"]

Rule = Mapping[str, Any]

_DIE = Sabotage(die=True)


class Misfortunes:
    """The faults that strike one replica. Lives on its event loop."""

    def __init__(self) -> None:
        self._released: set[str] = set()
        self._changed = asyncio.Condition()

    async def release(self, fault_ids: Iterable[str]) -> None:
        """Let what stands still because of these faults go on."""
        async with self._changed:
            self._released.update(fault_ids)
            self._changed.notify_all()

    async def before(self, faults: Sequence[Rule]) -> None:
        """Wait as long as the faults want it."""
        for fault in faults:
            if fault["kind"] == "slow":
                await asyncio.sleep(fault["seconds"])
            elif fault["kind"] == "stuck":
                async with self._changed:
                    while fault["id"] not in self._released:
                        await self._changed.wait()
            elif fault["kind"] == "die" and fault["on"] == "request" and fault["tokens"] == 0:
                _DIE.half_way()

    def sabotage(self, faults: Sequence[Rule]) -> Sabotage:
        """Return what the faults do to a load."""
        kinds = {fault["kind"] for fault in faults}
        return Sabotage(damage="damage" in kinds, die="die" in kinds)

    def after_tokens(self, faults: Sequence[Rule], tokens: int, *, over: bool = False) -> None:
        """Die if a fault wants it after so many tokens, or at the latest when the request is over."""
        for fault in faults:
            if fault["kind"] == "die" and (over or tokens >= fault["tokens"]):
                _DIE.half_way()
