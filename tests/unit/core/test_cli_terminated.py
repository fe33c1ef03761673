"""SIGTERM ends a command wherever it arrives, inside an event loop too."""

from __future__ import annotations

import asyncio
import gc
import os
import signal

import click
import pytest

from cwtrain.cli import main
from cwtrain.cli._errors import TERMINATED
from cwtrain.cli._root import root


@pytest.fixture(params=["callback", "task", "task of its own"])
def looping(request: pytest.FixtureRequest):
    """Add a command that gets SIGTERM in the middle of a callback, or of a task, of its event loop."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        done = loop.create_future()

        def hit() -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            for _ in range(1000):
                pass
            done.set_result(None)

        async def hit_in_task() -> None:
            hit()

        if request.param == "task":
            await asyncio.gather(hit_in_task(), return_exceptions=True)
        elif request.param == "task of its own":
            writer = asyncio.ensure_future(hit_in_task())
            await done  # nobody awaits the writer: its exception would be lost
            writer.cancel()
        else:
            loop.call_soon(hit)
        await asyncio.wait([done], timeout=5)

    @click.command()
    def loops() -> None:
        asyncio.run(run())

    root.add_command(loops, "loops")
    yield
    del root.commands["loops"]


def test_sigterm_in_an_event_loop_ends_the_command(looping: None, caplog: pytest.LogCaptureFixture) -> None:
    gc.collect()  # what other tests left tells of itself now
    caplog.clear()
    assert main(["loops"]) == TERMINATED
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
