from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from cwtrain_emulator.replica.capacity import Capacity, Full, Limits, between_tokens


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Crowd:
    """Requests that hold their slots until they are told to go."""

    def __init__(self, capacity: Capacity) -> None:
        self.capacity = capacity
        self.inside: list[str] = []
        self._doors: dict[str, asyncio.Event] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def come(self, name: str, sequences: int = 1) -> None:
        self._doors[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._stay(name, sequences))
        await settle()

    async def go(self, name: str) -> None:
        self._doors[name].set()
        await settle()

    async def _stay(self, name: str, sequences: int) -> None:
        async with self.capacity.admit(sequences):
            self.inside.append(name)
            await self._doors[name].wait()
            self.inside.remove(name)


def test_slots_count_sequences_and_the_line_keeps_its_order() -> None:
    async def work() -> None:
        crowd = Crowd(Capacity(Limits(slots=4, queue=2)))
        await crowd.come("a", 3)
        await crowd.come("b", 2)
        # There would be room for it, but b was first.
        await crowd.come("c", 1)
        assert (crowd.inside, crowd.capacity.queued) == (["a"], 2)
        with pytest.raises(Full, match="3 of 4 slots are taken and 2 requests wait"):
            async with crowd.capacity.admit(1):
                pass
        await crowd.go("a")
        assert crowd.inside == ["b", "c"]
        await crowd.go("b")
        await crowd.go("c")
        await crowd.come("huge", 99)
        assert crowd.inside == ["huge"]
        await crowd.go("huge")

    run(work())


def test_who_leaves_the_line_makes_way() -> None:
    async def work() -> None:
        crowd = Crowd(Capacity(Limits(slots=2)))
        await crowd.come("a", 1)
        await crowd.come("b", 2)
        await crowd.come("c", 1)
        crowd.tasks["b"].cancel()
        await settle()
        assert crowd.inside == ["a", "c"]
        # Cancelled in the moment in which its slots came.
        await crowd.come("d", 1)
        crowd._doors["a"].set()
        await asyncio.sleep(0)
        crowd.tasks["d"].cancel()
        await settle()
        await crowd.come("e", 1)
        assert "e" in crowd.inside
        await crowd.go("c")
        await crowd.go("e")
        assert crowd.capacity._used == 0

    run(work())


def test_no_line_at_all() -> None:
    async def work() -> None:
        crowd = Crowd(Capacity(Limits(slots=1, queue=0)))
        await crowd.come("a")
        with pytest.raises(Full):
            async with crowd.capacity.admit(1):
                pass
        await crowd.go("a")
        await crowd.come("b")
        assert crowd.inside == ["b"]
        await crowd.go("b")

    run(work())


def test_tokens_come_at_their_rate_and_an_interruption_sees_each() -> None:
    async def work() -> None:
        seen = []

        async def interruption(tokens: int) -> None:
            seen.append(tokens)

        loop = asyncio.get_running_loop()
        began = loop.time()
        async with Capacity(Limits(tokens_per_second=50)).admit(1, interruption) as turn:
            for _ in range(4):
                await between_tokens()
            timing = turn.timing()
        assert seen == [1, 2, 3, 4]
        assert loop.time() - began >= 0.079
        assert timing["prefill_time_ms"] == pytest.approx(timing["ttft_ms"] - timing["prefill_wait_time_ms"], abs=0.01)
        assert timing["total_time_ms"] >= timing["ttft_ms"] >= 19
        # Outside of a turn nothing waits.
        await between_tokens()

    run(work())
