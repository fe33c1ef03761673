"""The kind: files that another node has just written show late on a shared disk, wholly or in part.

A publisher looks again for a bounded time; what is there and wrong, and what never comes, is told as what it is.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from cwtrain.config import HotLoadConfig
from cwtrain.errors import SnapshotLayoutError
from cwtrain.snapshots import inspect_snapshot
from helpers.lagging_disk import LaggingDisk
from helpers.memory_scene import MemoryScene
from helpers.tiny_checkpoint import write_full
from helpers.virtual_clock import VirtualClock

INDEX = "model.safetensors.index.json"
TWO = {"a": ("F32", (2,), bytes(8)), "b": ("F32", (2,), bytes(8))}


class LaggingScene(MemoryScene):
    """A scene whose time passes when the publisher sleeps, and whose disk lags."""

    def __init__(self, root):
        super().__init__(root)
        self.time = VirtualClock()
        self.disk = LaggingDisk(self.time)

    def options(self):
        return {"clock": self.time.now, "sleep": self.disk.sleep}

    def settings(self, **values):
        return super().settings(**{"deadline": None, **values})


@pytest.fixture
def scene(tmp_path):
    made = LaggingScene(tmp_path)
    yield made
    made.close()


def shard_of(directory):
    return min(directory.glob("*.safetensors"))


def written(scene, kind, number):
    """Have the trainer write a version, a delta or a whole one."""
    delta = Path(scene.trainer.step())
    if kind == "delta":
        return delta
    shutil.rmtree(delta)
    write_full(delta, scene.trainer.tensors)
    return delta


@pytest.mark.parametrize(
    ("kind", "late", "first", "seconds"),
    [
        ("delta", "shard", "absent", 5),
        ("delta", "shard", "absent", 30),
        ("delta", "shard", "absent", 60),
        ("delta", "shard", "empty", 5),
        ("delta", "shard", "short", 60),
        ("delta", "index", "absent", 30),
        ("delta", "index", "empty", 30),
        ("delta", "index", "short", 30),
        ("full", "shard", "absent", 60),
        ("full", "shard", "short", 30),
        ("full", "config", "absent", 30),
        ("full", "config", "empty", 30),
        ("full", "index", "short", 30),
    ],
)
def test_what_shows_late_is_published_when_it_is_there(scene, kind, late, first, seconds):
    with scene.publisher() as publisher:
        publisher.baseline()
        path = written(scene, kind, 1)
        hidden = {"index": path / INDEX, "config": path / "config.json"}.get(late)
        scene.disk.hide(hidden or shard_of(path), seconds=seconds, first=first)
        began = scene.time.now()
        outcome = publisher.publish_directory(path)
        assert seconds <= scene.time.now() - began <= seconds + 2
        assert outcome.state.value == "COMPLETED"
        scene.check_served(scene.trainer.tensors)


def test_the_whole_directory_may_show_late(scene):
    with scene.publisher() as publisher:
        publisher.baseline()
        path = Path(scene.trainer.step())
        scene.disk.hide(path, seconds=20)
        assert publisher.publish_directory(path).state.value == "COMPLETED"
        scene.check_served(scene.trainer.tensors)


def test_the_base_may_show_late(scene):
    scene.disk.hide(shard_of(scene.trainer.base), seconds=30)
    with scene.publisher() as publisher:
        assert publisher.baseline().state.value == "COMPLETED"


@pytest.mark.parametrize("name", [INDEX, "model-00000-of-00001.safetensors"])
def test_what_never_shows_is_told_with_both_explanations(scene, name):
    with scene.publisher() as publisher:
        publisher.baseline()
        path = Path(scene.trainer.step())
        (shard_of(path) if name != INDEX else path / INDEX).unlink()
        began = scene.time.now()
        with pytest.raises(SnapshotLayoutError) as caught:
            publisher.publish_directory(path)
        assert scene.time.now() - began == pytest.approx(90.0), "as long as attribute caches last"
    text = str(caught.value)
    assert str(path) in text
    assert "share no disk" in text
    assert "shows the files of other nodes later" in text
    assert "CWTRAIN_HOTLOAD_FILES_WAIT" in caught.value.hint


@pytest.mark.parametrize(("settings", "most"), [({"files_wait": 0}, 0.0), ({"files_wait": 7}, 7.0)])
def test_how_long_is_a_setting(scene, settings, most):
    with scene.publisher(**settings) as publisher:
        publisher.baseline()
        path = Path(scene.trainer.step())
        shard_of(path).unlink()
        began = scene.time.now()
        with pytest.raises(SnapshotLayoutError):
            publisher.publish_directory(path)
        assert scene.time.now() - began == pytest.approx(most)
        # The time of the call bounds it as well.
        with pytest.raises(SnapshotLayoutError):
            publisher.publish_directory(path, deadline=3.0)
        assert scene.time.now() - began == pytest.approx(most + min(3.0, most))


def test_the_setting_takes_seconds_and_zero():
    assert HotLoadConfig(deployment_id="d").files_wait == 90.0
    environ = {"CWTRAIN_HOTLOAD_DEPLOYMENT_ID": "d", "CWTRAIN_HOTLOAD_FILES_WAIT": "0"}
    assert HotLoadConfig.from_env(environ).files_wait == 0.0


@pytest.mark.parametrize("damage", ["another version", "a page", "a shard too many"])
def test_what_is_whole_and_wrong_is_told_at_once(scene, damage):
    with scene.publisher() as publisher:
        publisher.baseline()
        path = Path(scene.trainer.step())
        {"another version": _other_version, "a page": _page_instead}.get(damage, _leftover)(path)
        began = scene.time.now()
        with pytest.raises(SnapshotLayoutError):
            publisher.publish_directory(path)
        assert scene.time.now() == began


def _other_version(path):
    index = json.loads((path / INDEX).read_text())
    index["metadata"]["version"] = "000077"
    (path / INDEX).write_text(json.dumps(index))


def _page_instead(path):
    shard_of(path).write_bytes(b"<html>" + b"sign in here, please. " * 40)


def _leftover(path):
    (path / "model-00007-of-00009.safetensors").write_bytes(b"x" * 100)


def test_a_file_that_comes_between_the_look_and_the_question_is_no_error(tmp_path):
    """What was missing when it was read, and is there when it is asked what is missing, has just come."""
    from cwtrain.hotload._publish.look import when_visible

    clock, looks = VirtualClock(), []
    write_full(tmp_path / "v", TWO)

    def look():
        looks.append(1)
        if len(looks) == 1:
            raise SnapshotLayoutError("it was not there")
        return inspect_snapshot(tmp_path / "v").tensors

    assert when_visible(look, tmp_path / "v", seconds=90, clock=clock.now, sleep=clock.sleep) == 2
    assert clock.slept == []


def test_a_side_file_without_bytes_is_not_published(tmp_path):
    write_full(tmp_path / "v", TWO)
    (tmp_path / "v" / "tokenizer.json").write_bytes(b"")
    with pytest.raises(SnapshotLayoutError, match=r"tokenizer\.json: has no bytes"):
        inspect_snapshot(tmp_path / "v")
