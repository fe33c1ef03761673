"""The hook with the real publisher, on one rank against the emulator: real bug reports of the trainers' users."""

from __future__ import annotations

import json
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import CWTrainError, SnapshotChainError
from cwtrain.events import SnapshotUploaded, SyncStarted
from cwtrain.hotload.publisher import PublishOutcome, PublishState
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import Plugins, hookimpl
from cwtrain_slime._args import RunArgs
from cwtrain_slime._post_write import Adapter
from helpers.tiny_checkpoint import write_delta_by_hand
from helpers.toy_trainer import ToyTrainer, hashes

Hook = Callable[[str | Path], PublishOutcome]


class Scene:
    """A toy trainer, a deployment, and the hook of one process."""

    def __init__(self, root: Path, emulator: Any, deployment: dict[str, Any]) -> None:
        self.trainer = ToyTrainer(root)
        self.plugins = Plugins()
        self._control, self._deployment = emulator.control, deployment
        self.restart()

    def restart(self) -> None:
        """Begin anew, as a new process of the trainer."""
        self.adapter = Adapter(self.trainer.updates, plugins=self.plugins)
        self.args = Namespace(
            update_weight_mode="delta",
            update_weight_disk_dir=str(self.trainer.updates),
            hf_checkpoint=str(self.trainer.base),
            rank=0,
            world_size=1,
        )

    def hook(self, path: str | Path) -> PublishOutcome:
        outcome = self.adapter.post_write(RunArgs.of(self.args), str(path))
        assert outcome is not None
        return outcome

    def end(self) -> None:
        if self.adapter._publisher is not None:
            self.adapter._publisher.close()

    def everyone_has(self, number: int) -> bool:
        """Return whether every replica holds a version's bytes."""
        states = self._control.call("GET", "/state")["deployments"]
        (state,) = [one for one in states if one["id"] == self._deployment["spec"]["id"]]
        held = [self._control.call("GET", f"/replicas/{one['name']}/tensors") for one in state["replicas"]]
        return bool(held) and all(one == hashes(self.trainer.at(number)) for one in held)


@pytest.fixture
def scene(
    emulator: Any, deployment: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Scene]:
    settings = {**emulator.env, "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"]}
    for name, value in {**settings, "CWTRAIN_HOTLOAD_RUN_ID": "run"}.items():
        monkeypatch.setenv(name, value)
    made = Scene(tmp_path, emulator, deployment)
    yield made
    made.end()


def test_experts_under_fused_names_are_refused(scene: Scene) -> None:
    """B15: the trainer exports `experts.gate_up_proj`, which the base does not have: named, nothing is published."""
    scene.hook(scene.trainer.updates)
    before = scene.trainer.at(0)
    fused = "model.layers.0.mlp.experts.gate_up_proj"
    old, new = ({**before, fused: ("BF16", (2, 2), raw)} for raw in (bytes(8), bytes(range(8))))
    path = write_delta_by_hand(scene.trainer.updates / "weight_v000001", old, new)
    with pytest.raises(CWTrainError, match="gate_up_proj"):
        scene.hook(path)
    assert scene.everyone_has(0)


def test_a_base_that_is_not_what_the_deltas_start_from(scene: Scene) -> None:
    """B27: the delta is of another base's bytes: the checksum says so before anything is sent."""
    scene.hook(scene.trainer.updates)
    dtype, shape, raw = scene.trainer.at(0)["norm.weight"]
    other = {**scene.trainer.at(0), "norm.weight": (dtype, shape, bytes(len(raw)))}
    changed = {**other, "norm.weight": (dtype, shape, b"\x01" * len(raw))}
    path = write_delta_by_hand(scene.trainer.updates / "weight_v000001", other, changed)
    with pytest.raises(CWTrainError, match=r"norm\.weight"):
        scene.hook(path)
    assert scene.everyone_has(0)


def test_a_directory_that_vanishes_while_it_is_published(scene: Scene) -> None:
    """B18: an error names the file, no half snapshot is triggered, and the same call completes from a whole one."""
    scene.hook(scene.trainer.updates)
    path = Path(scene.trainer.step())
    kept = scene.trainer.root / "kept"
    shutil.copytree(path, kept)

    class Cleaner:
        @hookimpl
        def cwtrain_weight_sync(self, event: Any) -> None:
            if isinstance(event, SyncStarted):
                shutil.rmtree(path, ignore_errors=True)

    scene.plugins.register(Cleaner(), name="cleaner")
    with pytest.raises(CWTrainError, match="safetensors"):
        scene.hook(path)
    assert scene.everyone_has(0)
    scene.end()
    scene.plugins = Plugins()
    scene.restart()
    shutil.copytree(kept, path)
    outcome = scene.hook(path)
    assert (outcome.state, outcome.number) == (PublishState.COMPLETED, 1)
    assert scene.everyone_has(1)


def test_a_version_that_never_reached_the_hook(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """B29: the chain has a hole. Without a mirror it is refused; a restart goes on from the base."""
    monkeypatch.setenv("CWTRAIN_HOTLOAD_FULL_EVERY", "0")
    scene.hook(scene.trainer.updates)
    scene.hook(scene.trainer.step())
    scene.trainer.step()
    with pytest.raises(SnapshotChainError) as caught:
        scene.hook(scene.trainer.step())
    assert "CWTRAIN_HOTLOAD_RUN_ID" in str(caught.value.hint)
    assert scene.everyone_has(1)
    scene.trainer.restart()
    scene.restart()
    scene.hook(scene.trainer.updates)
    outcome = scene.hook(scene.trainer.step())
    assert outcome.identity == "run.2-v000001"
    assert scene.everyone_has(1)


def test_a_delta_that_fails_in_the_engine_comes_in_full(scene: Scene, faults: Any) -> None:
    """B05: nothing is done before it is COMPLETED; the version arrives in full, the next one as a delta on it."""
    scene.hook(scene.trainer.updates)
    faults.add("replica", "damage", identity="run-v000001")
    outcome = scene.hook(scene.trainer.step())
    assert (outcome.kind, outcome.identity) == (SnapshotChoice.FULL, "run-v000001-full")
    assert scene.everyone_has(1)
    outcome = scene.hook(scene.trainer.step())
    assert (outcome.kind, outcome.identity) == (SnapshotChoice.DELTA, "run-v000002")
    assert scene.everyone_has(2)


def test_a_first_call_that_is_a_numbered_full_checkpoint(scene: Scene) -> None:
    """As newer versions of slime may begin: no baseline call, a full checkpoint at any number, then deltas."""
    uploads: list[str] = []

    class Ear:
        @hookimpl
        def cwtrain_weight_sync(self, event: Any) -> None:
            if isinstance(event, SnapshotUploaded):
                uploads.append(event.identity)

    scene.plugins.register(Ear(), name="ear")
    scene.trainer.tensors = scene.trainer.at(0)
    first = scene.hook(scene.trainer.step("full", number=7))
    second = scene.hook(scene.trainer.step())
    empty = scene.hook(scene.trainer.step("empty"))
    assert (first.kind, second.kind, empty.kind) == (SnapshotChoice.FULL, SnapshotChoice.DELTA, SnapshotChoice.SKIP)
    assert uploads == ["run-v000007", "run-v000008"]
    assert scene.everyone_has(9)


def test_full_checkpoints_that_vanish_after_the_hook(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """B18: slime's full mode has no baseline call, and deletes each directory as the hook returns, with WAIT=0 too."""
    monkeypatch.setenv("CWTRAIN_HOTLOAD_WAIT", "0")
    scene.args.update_weight_mode = "full"
    for number in (1, 2):
        path = scene.trainer.step("full")
        outcome = scene.hook(path)
        assert (outcome.number, outcome.kind) == (number, SnapshotChoice.FULL)
        shutil.rmtree(path)
    scene.adapter._finish()
    assert scene.everyone_has(2)


def test_the_same_version_again_is_not_published_twice(scene: Scene) -> None:
    scene.hook(scene.trainer.updates)
    path = scene.trainer.step()
    assert scene.hook(path).identity == scene.hook(path).identity == "run-v000001"
    assert json.loads(Path(path, "model.safetensors.index.json").read_text())["metadata"]["version"] == "000001"
    assert os.path.isdir(path), "the trainer's directories stay"


def test_a_retry_on_another_cell_of_miles(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process lives on while another one begins with a baseline call of its own, in the middle of the run."""
    monkeypatch.setenv("MILES_EXPERIMENTAL_FT_TRAINER", "1")
    del scene.args.update_weight_mode
    scene.args.update_weight_transfer_mode = "disk-delta"
    scene.hook(scene.trainer.updates)
    for number in (1, 2):
        assert scene.hook(scene.trainer.step()).identity == f"run-v{number:06d}"
    left = scene.adapter
    scene.trainer.restart()
    scene.restart()
    scene.args.update_weight_transfer_mode = "disk-delta"
    del scene.args.update_weight_mode
    scene.hook(scene.trainer.updates)
    assert scene.hook(scene.trainer.step()).identity == "run.2-v000001"
    assert scene.everyone_has(1)
    assert left is not scene.adapter
