"""A restarted run counts from the beginning in a new epoch, and those who wait for its versions are told of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cwtrain.hotload.status import read_status
from helpers.memory_scene import MemoryScene


def test_the_status_of_the_base_says_which_epoch_began(tmp_path: Path) -> None:
    scene = MemoryScene(tmp_path)

    def told(publisher: Any) -> tuple[str | None, str]:
        publisher.baseline()
        status = read_status(publisher.loader.store, publisher.loader.location, scene.deployment_id)
        assert status is not None
        return status.prefix, status.identity

    first = scene.publisher()
    assert told(first) == ("run", "run-v000000")
    first.publish_directory(scene.trainer.step())
    first.finish()
    first.close()
    assert told(scene.publisher()) == ("run.2", "run-v000000")
    assert scene.hot_loads()[-1][0] == "run-v000001", "nothing of the new epoch is loaded yet"
    scene.close()
