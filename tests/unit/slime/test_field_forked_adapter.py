"""A process that a trainer's rank forks has nothing of the rank's to finish at its end."""

from __future__ import annotations

from pathlib import Path

from cwtrain_slime._post_write import Adapter
from helpers.memory_scene import MemoryScene
from helpers.other_process import forked


def test_a_fork_of_a_rank_waits_for_no_hot_load_at_its_end(tmp_path: Path) -> None:
    scene = MemoryScene(tmp_path)
    adapter = Adapter(tmp_path)
    adapter._publisher = scene.publisher(wait=False)
    adapter._publisher.baseline()
    adapter._publisher.publish_directory(scene.trainer.step())
    asked = len(scene.service.calls)

    def end() -> int:
        adapter._finish()  # as at the process's exit
        return len(scene.service.calls)

    assert forked(end) == asked
    adapter._finish()
    assert adapter._publisher.state.acknowledged.identity == "run-v000001"
    scene.close()
