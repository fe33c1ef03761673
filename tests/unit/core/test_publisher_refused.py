"""What the disk refuses a publisher: an error of ours with the path and the next step, never a bare OSError."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest

from cwtrain.errors import ConfigError, SnapshotError, WaitTimeoutError
from cwtrain.events import SyncFailed
from cwtrain.hotload._publish.refused import naming_the_setting
from cwtrain.hotload.publisher import read_note
from helpers.memory_scene import MemoryScene
from helpers.publish_scene import Ear, plugins_with


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    yield made
    made.close()


def replaced(path: Path) -> None:
    """Put a directory in place of a file, and a file in place of a directory: whoever is root, neither can be used."""
    if path.is_dir():
        shutil.rmtree(path)
        path.write_text("x")
    else:
        path.unlink()
        path.mkdir()


@pytest.mark.parametrize("inside", ["journal.json", "mirror/.cwtrain-mirror/a", "mirror/.cwtrain-mirror/view-b"])
def test_a_state_directory_that_cannot_be_used_is_named_with_the_setting(scene, inside):
    """A publisher that was started again raised what the operating system had said, without a next step."""
    with scene.publisher() as publisher:
        publisher.baseline()
        publisher.publish_directory(scene.trainer.step())
        state = publisher.state_dir
    replaced(state / inside)
    ear, path = Ear(), scene.trainer.step()
    with (
        pytest.raises(ConfigError, match=re.escape(str(state / inside))) as caught,
        scene.publisher(plugins=plugins_with(ear)) as publisher,
    ):
        publisher.publish_directory(path)
    assert "CWTRAIN_HOTLOAD_STATE_DIR" in caught.value.hint
    if inside != "journal.json":  # that one is read before there is a publisher
        assert isinstance(ear.events[-1], SyncFailed)
    shutil.rmtree(state)  # as the hint says
    with scene.publisher() as publisher:
        publisher.publish_directory(path)
    scene.check_served(scene.trainer.tensors)


def test_errors_about_other_places_are_left_alone():
    def raising(error: BaseException) -> None:
        with naming_the_setting("/state"):
            raise error

    refused = PermissionError(13, "Permission denied", "/state/journal.json")
    with pytest.raises(ConfigError, match=r"/state/journal\.json: cannot be used: Permission denied"):
        raising(refused)
    for error in (
        PermissionError(13, "Permission denied", "/states/journal.json"),
        OSError(28, "No space left on device"),
        WaitTimeoutError("not in time"),
    ):
        with pytest.raises(type(error)) as caught:
            raising(error)
        assert caught.value is error


def test_a_note_that_cannot_be_read_is_named(tmp_path):
    os.mkdir(tmp_path / "cwtrain_published.json")
    with pytest.raises(SnapshotError, match=r"cwtrain_published\.json: cannot be read: Is a directory"):
        read_note(tmp_path)
