"""The kinds of error are those that are documented, and each reason is told once.

The kind: a refusal of the system that leaves as another class than its page says, or as the system's own words about a
name that nobody knows; and one reason that is told by everybody who heard of it.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import errno
import os
import shutil

import pytest

from cwtrain.errors import ConfigError, HotLoadFailedError, SnapshotError
from cwtrain.hotload import WeightMirror
from cwtrain.hotload._publish.journal import Journal
from cwtrain.hotload._publish.refused import naming_the_setting
from cwtrain.hotload.delta import write_delta
from cwtrain.hotload.operations import HotLoadOperations
from cwtrain.models.service import (
    Condition,
    HotLoad,
    HotLoadReplica,
    HotLoadSpec,
    HotLoadState,
    HotLoadStatus,
)
from cwtrain.plugins import Plugins
from helpers.mirror_cases import CountingDisk, write_chain
from helpers.virtual_clock import VirtualClock


class FullDisk(CountingDisk):
    """Takes so many writes, then none: the system's error has no file name, as for a write to an open file."""

    def __init__(self, writes):
        super().__init__()
        self.left = writes

    def write(self, fd, views, offset):
        self.left -= 1
        if self.left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, views, offset)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_full_disk_below_the_state_directory_is_a_mistake_in_the_setting(tmp_path, in_place):
    """At each write that a mirror makes: as the base of a publisher, and on its own."""
    write_chain(tmp_path / "chain", 3, 1, large=1 << 12)
    state = str(tmp_path / "state")
    os.mkdir(state)
    WeightMirror.create(tmp_path / "chain/base", f"{state}/mirror").close()

    def problem(writes, *, in_state_dir=True):
        named = naming_the_setting(state) if in_state_dir else contextlib.nullcontext()
        try:
            with named, WeightMirror(f"{state}/mirror", in_place=in_place, disk=FullDisk(writes)) as mirror:
                mirror.apply_delta(tmp_path / "chain/d1")
        except (SnapshotError, ConfigError) as error:
            return error
        return None

    for writes in range(3):
        alone = problem(writes, in_state_dir=False)
        assert isinstance(alone, SnapshotError)
        assert "the disk is full" in str(alone)
        found = problem(writes)
        assert isinstance(found, ConfigError)
        assert f"{state}/mirror: the disk is full" in str(found)
        assert "CWTRAIN_HOTLOAD_STATE_DIR" in found.hint
        assert "make room" in found.hint
    assert problem(1 << 20) is None


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="only Linux has it")
def test_a_journal_on_a_full_disk_is_a_mistake_in_the_setting_and_keeps_the_last_state(tmp_path):
    made = Journal(tmp_path, run_id="run", deployment_id="d")
    saved = made.save(made.state.opened(1))
    os.symlink("/dev/full", tmp_path / "journal.json.new")
    with pytest.raises(ConfigError, match="the journal cannot be written: No space left"):
        made.save(saved.opened(2))
    assert made.state == saved
    made.close()


def test_what_is_full_elsewhere_is_not_the_settings_fault(tmp_path):
    from cwtrain.snapshots._write import require_space

    with pytest.raises(SnapshotError) as caught, naming_the_setting(str(tmp_path / "state")):
        require_space(str(tmp_path / "elsewhere/x"), 1 << 62, "it", free=lambda _: 0)
    assert not isinstance(caught.value, ConfigError)
    with pytest.raises(OSError, match="No space"), naming_the_setting(str(tmp_path / "state")):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somebody/elses/file")


def test_two_that_write_one_out_are_told_that_it_exists(tmp_path):
    """The second one ends while the first works: as two processes that both found nothing there."""
    write_chain(tmp_path, 3, 1, large=1 << 12)
    shutil.copytree(tmp_path / "base", tmp_path / "new")
    out = tmp_path / "out"

    def other(done, total):
        if not out.exists():
            write_delta(tmp_path / "base", tmp_path / "new", out, version=1, base_version=0)

    with pytest.raises(SnapshotError) as caught:
        write_delta(tmp_path / "base", tmp_path / "new", out, version=1, base_version=0, on_progress=other)
    assert f"{out}: exists" in str(caught.value)
    assert ".tmp" not in str(caught.value)
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]
    assert os.listdir(out)


class Failed:
    """A service with one hot-load that FAILED."""

    def __init__(self, message, reasons):
        when = dt.datetime(2026, 11, 30, tzinfo=dt.UTC)
        conditions = (Condition(type="Ready", status="FALSE", reason="ReplicaFailed", message=message),)
        self.found = HotLoad(
            spec=HotLoadSpec(id="h", identity="v1"),
            status=HotLoadStatus(state=HotLoadState.FAILED, conditions=conditions, created_at=when),
        )
        self.replicas = [HotLoadReplica(name=name, error_reason=reason) for name, reason in reasons.items()]

    def within(self, seconds, *, retries=True):
        return self

    def get_hot_load(self, hot_load_id):
        return self.found

    def list_hot_load_replicas(self, hot_load_id):
        return self.replicas


@pytest.mark.parametrize(
    ("message", "reasons", "told"),
    [
        ("r1: no room; r0: no room", {"r0": "no room", "r1": "no room"}, ["no room"]),
        ("r0: no room", {"r0": "no room", "r1": ""}, ["no room"]),
        ("no room", {"r0": "no room"}, ["no room"]),
        ("r0: torn; whole; r1: no room", {"r0": "torn; whole", "r1": "no room"}, ["torn; whole", "no room"]),
        ("the quota is used up; r0: no room", {"r0": "no room"}, ["the quota is used up", "no room"]),
        ("the quota is used up", {"r0": ""}, ["the quota is used up"]),
        ("", {"r0": "no room", "r1": "torn"}, ["no room", "torn"]),
    ],
)
def test_each_reason_of_a_failed_hot_load_is_told_once(message, reasons, told):
    clock = VirtualClock()
    operations = HotLoadOperations(
        client=Failed(message, reasons), deployment_id="d", plugins=Plugins(), poll_interval=1.0,
        clock=clock.now, sleep=clock.sleep,
    )  # fmt: skip
    from cwtrain.infra._poll import Deadline

    with pytest.raises(HotLoadFailedError) as caught:
        operations.follow("h", deadline=Deadline(60, clock.now), on_progress=None)
    text = str(caught.value)
    assert [text.count(reason) for reason in told] == [1] * len(told)
    for name, reason in reasons.items():
        assert not reason or name in text
