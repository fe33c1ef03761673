"""The gate of an endpoint that refuses, and who may send when: admission across loops, in turn, evaluation last."""

from __future__ import annotations

import asyncio
import threading
import time

from cwtrain_rollout.admission import Admission
from cwtrain_rollout.gate import Gate
from cwtrain_rollout.window import FixedWindow


def test_retry_after_holds_back_everybody() -> None:
    gate = Gate()
    assert not gate.refused(100.0, floor=7.0)
    assert gate.wait(100.0) == 7.0
    gate.answered()
    assert gate.wait(103.0) == 4.0, "an answer to an older request does not take back what the server asked for"
    assert gate.wait(107.0) == 0.0


def test_after_five_refusals_in_a_row_one_probe_at_a_time_goes_out() -> None:
    gate = Gate()
    for second in range(4):
        gate.refused(float(second))
    assert gate.closed_since is None
    gate.refused(4.0)
    assert gate.closed_since == 4.0
    now = 4.0 + gate.wait(4.0)
    assert gate.enter()
    assert gate.probing
    # What was under way before is refused as well, and says nothing new.
    assert not gate.refused(now, probe=False)
    assert gate.probing
    pauses, told = [], []
    for _ in range(8):
        told.append(gate.refused(now, probe=True))
        pauses.append(gate.wait(now))
        now += pauses[-1]
        assert not gate.probing
        assert gate.enter()
    assert told == [True] + [False] * 7, "an outage is told once"
    assert pauses == sorted(pauses)
    assert pauses[-1] == 5.0, "so that an endpoint that comes back is found within seconds"
    assert gate.answered()
    assert gate.closed_since is None
    assert not gate.enter()


def test_a_cancelled_probe_gives_its_turn_back() -> None:
    gate = Gate()
    for second in range(5):
        gate.refused(float(second))
    assert gate.enter()
    gate.gave_up(probe=True)
    assert not gate.probing


def admission(size: int) -> Admission:
    return Admission(FixedWindow(size), time.monotonic, asyncio.sleep)


def test_first_come_first_served_and_evaluation_last() -> None:
    order: list[str] = []

    async def one(door: Admission, name: str, weight: int = 1, evaluation: bool = False) -> None:
        await door.acquire(weight, evaluation=evaluation)
        order.append(name)
        await asyncio.sleep(0)
        door.release(weight)

    async def scenario() -> None:
        door = admission(2)
        await door.acquire(2)
        waiting = [
            asyncio.create_task(one(door, "eval 1", evaluation=True)),
            asyncio.create_task(one(door, "large", 5)),
            asyncio.create_task(one(door, "train 1")),
            asyncio.create_task(one(door, "train 2")),
        ]
        await asyncio.sleep(0)
        door.release(2)
        await asyncio.gather(*waiting)
        assert door.idle()

    asyncio.run(scenario())
    assert order == ["large", "train 1", "train 2", "eval 1"], "one that is larger than the window goes alone"


def test_a_waiter_that_is_cancelled_leaves_no_hole() -> None:
    async def scenario() -> None:
        door = admission(1)
        await door.acquire(1)
        waiting = [asyncio.create_task(door.acquire(1)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        door.release(1)
        waiting[1].cancel()  # its turn came in the same moment
        await asyncio.gather(*waiting, return_exceptions=True)
        assert door.in_flight == 1
        door.release(1)
        assert door.idle()

    asyncio.run(scenario())


def test_one_window_for_several_loops_and_threads() -> None:
    """B09: waiters of other event loops are woken in their own."""
    door = admission(3)
    done: list[int] = []

    async def work() -> None:
        async def one(number: int) -> None:
            await door.acquire(1)
            await asyncio.sleep(0)
            done.append(number)
            door.release(1)

        await asyncio.gather(*[one(number) for number in range(200)])

    threads = [threading.Thread(target=lambda: asyncio.run(work())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(done) == 800
    assert door.peak == 3
    assert door.idle()
