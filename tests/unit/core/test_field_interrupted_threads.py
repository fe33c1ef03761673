"""Who interrupts an upload does not wait for requests that have no answer: neither for the threads, nor for aborts."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cwtrain.storage import Location
from cwtrain.storage._crew import Crew
from cwtrain.storage.memory import Fault, MemoryStore
from cwtrain.storage.upload import PartSizes, upload_objects
from helpers.upload_files import contents, write


@pytest.fixture
def never() -> Iterator[threading.Event]:
    """A request that has no answer, until the test is over."""
    event = threading.Event()
    yield event
    event.set()


def ends(call: Callable[[], Any], stop: type[BaseException]) -> None:
    """Assert that ``call`` ends with ``stop`` long before what it would have to wait for."""
    seen: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:
            seen.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(10)
    assert not thread.is_alive()
    assert [type(error) for error in seen] == [stop]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_a_crew_leaves_requests_behind(never: threading.Event, stop: type[BaseException]) -> None:
    busy = threading.Event()

    def request() -> None:
        busy.set()
        never.wait()

    tasks = [request]

    def interrupted() -> None:
        if busy.is_set():
            raise stop

    crew = Crew(2, on_tick=interrupted, tick_seconds=0.01, grace_seconds=600.0)
    ends(lambda: crew.run(lambda: tasks.pop() if tasks else None), stop)
    assert crew.stopped.is_set()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_upload_whose_parts_and_aborts_have_no_answer(
    never: threading.Event, stop: type[BaseException], tmp_path: Path
) -> None:
    store = MemoryStore(
        faults=[
            Fault(call="upload_part", nth=2, times=-1, action=lambda: (busy.set(), never.wait())),
            Fault(call="abort_upload", times=-1, action=never.wait),
        ]
    )
    busy = threading.Event()

    def interrupted(_: object) -> None:
        if busy.is_set():
            raise stop

    files = write(tmp_path / "snapshot", contents(2, 60_000))
    sizes = PartSizes(multipart_above_bytes=20_000, part_bytes=20_000)

    def upload() -> None:
        upload_objects(
            files,
            store=store,
            location=Location(bucket="weights", path_prefix="run"),
            identity="v0",
            on_progress=interrupted,
            sizes=sizes,
            record_directory=str(tmp_path),
        )

    ends(upload, stop)


def test_work_on_each_of_many_does_not_wait_for_what_has_no_answer(never: threading.Event) -> None:
    from cwtrain.storage._crew import each

    def work(item: int) -> int:
        if item == 2:
            raise KeyboardInterrupt
        never.wait()
        return item

    ends(lambda: each(work, [0, 1, 2, 3], threads=4), KeyboardInterrupt)
    assert each(lambda item: item * 2, [3, 1, 2], threads=2) == [6, 2, 4]
    assert each(lambda item: item, [], threads=2) == []
    with pytest.raises(ZeroDivisionError):
        each(lambda item: 1 // item, [1, 0, 2], threads=1)
