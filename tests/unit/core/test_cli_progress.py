"""What a person sees of a publish that goes on, away from a terminal; and what still runs when it is stopped."""

from __future__ import annotations

import pytest

from cwtrain.cli._output import LiveTable, ProgressLine, say
from cwtrain.cli._running import watch
from cwtrain.events import HotLoadProgressed, HotLoadRequested, SyncSkipped
from cwtrain.hotload import ProgressEvent
from cwtrain.models.service import HotLoad, HotLoadReplica, HotLoadSpec, HotLoadState, HotLoadStatus, ReplicaState
from cwtrain.plugins import get_plugins
from cwtrain.storage import UploadProgress
from helpers.virtual_clock import VirtualClock


def hot_load(state):
    return HotLoad(spec=HotLoadSpec(id="h", identity="v1"), status=HotLoadStatus(state=HotLoadState(state)))


def event(state, ready=0, **more):
    replicas = tuple(
        HotLoadReplica(name=str(n), state=ReplicaState.READY, current_snapshot_identity="v1" if n < ready else "v0")
        for n in range(2)
    )
    return ProgressEvent(hot_load=hot_load(state), replicas=replicas, **more)


def upload(sent, rate=0.0):
    return ProgressEvent(
        upload=UploadProgress(
            sent_bytes=sent, total_bytes=10_000_000, seconds=9.0, objects_done=1, objects=2, bytes_per_second=rate
        )
    )


@pytest.fixture
def clock():
    return VirtualClock()


def told(capfd):
    return capfd.readouterr().err.splitlines()


def test_a_line_for_each_change_of_state(capfd, clock):
    with ProgressLine(clock=clock.now) as line:
        for _ in range(3):
            line.event(event("PENDING"))
            clock.sleep(5)
        line.event(event("IN_PROGRESS"))
        line.event(event("IN_PROGRESS", ready=1))
        assert len(told(capfd)) == 3
        for _ in range(13):
            clock.sleep(5)
            line.event(event("IN_PROGRESS", ready=1))
        assert told(capfd) == []
        line.event(event("IN_PROGRESS", ready=1, problem="503"))
        assert "last poll failed: 503" in told(capfd)[0]
        line.event(event("COMPLETED", ready=2))
        assert told(capfd) == ["hot-load h (v1): COMPLETED, 2/2 replicas, 0 s"]


def test_an_upload_is_told_with_rate_and_remaining_time(capfd, clock):
    with ProgressLine(clock=clock.now) as line:
        line.event(upload(1_000_000, rate=3e6))
        line.event(upload(2_000_000, rate=3e6))
        line.event(upload(10_000_000, rate=3e6))
        assert told(capfd) == [
            "uploading: 1/2 objects, 976.6 KiB of 9.5 MiB, 2.9 MiB/s, 3 s left",
            "uploading: 1/2 objects, 9.5 MiB of 9.5 MiB",
        ]


def test_quiet_says_nothing(capfd, clock):
    with ProgressLine(quiet=True, clock=clock.now) as line:
        line.event(event("PENDING"))
    with LiveTable(("a",), quiet=True) as table:
        table.row(1)
    say("no", quiet=True)
    assert told(capfd) == []


def test_a_table_away_from_a_terminal_is_a_line_for_each_row(capfd):
    with LiveTable(("step", "reward")) as table:
        table.row(1, 0.5)
        table.row(2, "")
    assert told(capfd) == ["step 1  reward 0.5", "step 2"]


def test_what_goes_on_is_known_from_the_request_to_the_end():
    running = ["before"]
    watch(running)
    plugins = get_plugins()
    before = dict(plugins.failures)
    try:
        plugins.notify(SyncSkipped(reason="nothing"))
        assert running == ["before"]
        plugins.notify(HotLoadRequested(hot_load_id="h", identity="v1"))
        assert running == ["hot-load h goes on; follow it with: cwtrain hotload wait h"]
        moved = {"replicas_done": 0, "replicas": 2, "elapsed": 1.0}
        plugins.notify(HotLoadProgressed(hot_load_id="other", state="PENDING", waiting_on="other", **moved))
        plugins.notify(HotLoadProgressed(hot_load_id="h", state="A_NEW_STATE", **moved))
        plugins.notify(HotLoadProgressed(hot_load_id="h", state="IN_PROGRESS", **moved))
        assert running == ["hot-load h goes on; follow it with: cwtrain hotload wait h"]
        plugins.notify(HotLoadProgressed(hot_load_id="h", state="COMPLETED", **moved))
        assert running == []
        watch(running)
        assert plugins.failures == before
    finally:
        plugins.unregister("cwtrain.cli")


def test_what_is_there_already_is_compared_not_sent(capfd, clock):
    comparing = UploadProgress(sent_bytes=0, total_bytes=0, seconds=0.5, objects_done=0, objects=6)
    with ProgressLine(clock=clock.now) as line:
        line.event(ProgressEvent(upload=comparing))
        line.event(upload(5_000_000))
    lines = told(capfd)
    assert lines[0] == "uploading: comparing 6 objects with what is in the bucket"
    assert lines[1].startswith("uploading: 1/2 objects, 4.8 MiB of 9.5 MiB")
