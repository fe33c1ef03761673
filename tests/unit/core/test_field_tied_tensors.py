"""A state dict is published as the trainer's library gives it, and what does not fit costs nothing but a message.

The kind: names and places that a caller cannot help (a second name of the same tensor, a directory that is never used)
were errors, and an error cost what later versions stand on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain.config import HotLoadConfig
from cwtrain.errors import ConfigError, SnapshotError
from cwtrain.hotload import HotLoader, MemoryBase, Publisher, SnapshotWriter
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import Plugins
from cwtrain.storage import MemoryStore
from helpers.fake_service import Clock
from helpers.replica_bytes import LoadingService
from helpers.streamed import TINY, side_files
from helpers.tiny_checkpoint import write_full

EMBED, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"


class World:
    """A base checkpoint without the tied name, as it is saved, and a publisher of tensors."""

    def __init__(self, root: Path, where: str) -> None:
        self.store, self.clock = MemoryStore("weights"), Clock()
        self.service = LoadingService(self.store, root / "replica")
        self.embed, self.norm = np.arange(24, dtype=np.float32).reshape(6, 4), np.ones(4, np.float32)
        tensors = {name: ("F32", value.shape, value.tobytes()) for name, value in self.plain().items()}
        self.base = write_full(root / "base", tensors, shards=1)
        config = HotLoadConfig(
            deployment_id="dep", run_id="run", timeout=60.0, full_every=20, state_dir=str(root / "state")
        )
        self.publisher = Publisher(
            config,
            disk_dir=root,
            base=self.base,
            client=self.service,
            s3=self.store,
            plugins=Plugins(),
            tensor_base=where,
            clock=self.clock,
            sleep=self.clock.sleep,
        )
        self.publisher.baseline(wait_seconds=60)

    def plain(self) -> dict[str, Any]:
        return {EMBED: self.embed, NORM: self.norm}

    def step(self) -> None:
        self.embed = self.embed + np.float32(1)

    def serves(self) -> bool:
        held = self.service.held[self.service.hot_loads[0].identity]
        return {name: raw for name, (_, _, raw) in held.items()} == {
            name: value.tobytes() for name, value in self.plain().items()
        }


@pytest.fixture(params=["memory", "disk"])
def world(tmp_path: Path, request: Any) -> Any:
    made = World(tmp_path, request.param)
    yield made
    made.publisher.close()


@pytest.mark.parametrize("form", ["same memory", "copy", "function", "function of copies"])
def test_a_name_that_is_tied_to_an_equal_one_is_left_out(world: World, form: str) -> None:
    for number in (1, 2):
        world.step()
        tied = world.embed if form in ("same memory", "function") else world.embed.copy()
        tensors = {**world.plain(), HEAD: tied}
        given = (lambda: iter(tensors.items())) if form.startswith("function") else tensors  # noqa: B023
        done = world.publisher.publish_tensors(given, number=number)
        assert done.kind is SnapshotChoice.DELTA
        assert world.serves()


def test_a_head_of_its_own_is_refused_in_words_and_the_base_survives(world: World) -> None:
    world.step()
    world.publisher.publish_tensors(world.plain(), number=1)
    world.step()
    before = dict(world.store.objects)
    with pytest.raises(SnapshotError, match=r"lm_head\.weight") as caught:
        world.publisher.publish_tensors({**world.plain(), HEAD: world.embed * 2}, number=2)
    assert "run-v000001, the version that the delta applies to, has no tensor of that name" in str(caught.value)
    assert "Base(" not in str(caught.value)
    assert world.store.objects == before
    done = world.publisher.publish_tensors(world.plain(), number=2)
    assert done.kind is SnapshotChoice.DELTA, "the base was kept"
    assert world.serves()


@pytest.mark.parametrize("wrong", ["dtype", "shape", "missing", "told", "wrapped"])
def test_whatever_is_refused_costs_no_base(world: World, wrong: str) -> None:
    world.step()
    world.publisher.publish_tensors(world.plain(), number=1)
    world.step()
    tensors, options = world.plain(), {}
    match wrong:
        case "dtype":
            tensors[NORM] = np.ones(4, np.float64)
        case "shape":
            tensors[NORM] = np.ones(5, np.float32)
        case "missing":
            del tensors[NORM]
        case "told":
            options = {"dtype": "BF16"}
        case "wrapped":
            tensors["base_model.model.lora_A.weight"] = tensors.pop(NORM)
    before = dict(world.store.objects)
    with pytest.raises(SnapshotError) as caught:
        world.publisher.publish_tensors(tensors, number=2, **options)
    assert "Base(" not in str(caught.value)
    assert world.store.objects == before
    assert world.publisher.publish_tensors(world.plain(), number=2).kind is SnapshotChoice.DELTA
    assert world.serves()


def test_dtypes_of_tensors_that_are_not_there_are_refused(world: World) -> None:
    with pytest.raises(ConfigError, match=r"modle\.embed"):
        world.publisher.publish_tensors(world.plain(), number=1, dtype={"modle.embed": "BF16"})


def test_a_writer_leaves_out_what_is_tied_and_refuses_what_is_not(tmp_path: Path) -> None:
    store, sides = MemoryStore("weights"), side_files(tmp_path / "sides")
    service = LoadingService(store, tmp_path / "replica")
    loader = HotLoader(service, "dep", s3=store, plugins=Plugins())
    embed = np.arange(12, dtype=np.float32).reshape(3, 4)
    base = MemoryBase()

    def write(identity: str, kind: str, tensors: dict[str, Any]) -> Any:
        with SnapshotWriter(
            store, loader.location, identity, kind=kind, base=base, side_files=sides, sizes=TINY
        ) as writer:
            for name, tensor in tensors.items():
                writer.add(name, tensor)
            return writer.finalise([writer.close()])

    write("v0", "full", {EMBED: embed, "bias": np.zeros(4, np.float32)})
    same = {EMBED: embed + 1, "bias": np.zeros(4, np.float32)}
    written = write("v1", "delta", {**same, HEAD: embed + 1})
    assert set(written.checksums) == {EMBED, "bias"}
    with pytest.raises(SnapshotError, match=r"'other\.bias' is F32"):  # equal zeros are no tie
        write("v2", "delta", {**same, "other.bias": np.zeros(4, np.float32)})
    assert base.identity == "v1", "nothing was written into it"
    with pytest.raises(SnapshotError, match=r"'lm_head\.weight' is F32"):
        write("v2", "delta", {**same, HEAD: embed})
    assert not [key for key in store.objects if "v2" in key]


def test_a_full_snapshot_that_is_refused_at_its_first_tensor_keeps_the_base(tmp_path: Path) -> None:
    store, sides = MemoryStore("weights"), side_files(tmp_path / "sides")
    location = HotLoader(LoadingService(store, tmp_path / "r"), "dep", s3=store, plugins=Plugins()).location
    base = MemoryBase()
    with SnapshotWriter(store, location, "v0", kind="full", base=base, side_files=sides) as writer:
        writer.add("a", np.ones(4, np.float32))
        writer.finalise([writer.close()])
    with (
        pytest.raises(SnapshotError),
        SnapshotWriter(store, location, "v1", kind="full", base=base, side_files=sides) as writer,
    ):
        writer.add("a", np.ones(4, np.float16), dtype="BF16")
    assert base.identity == "v0"
    with SnapshotWriter(store, location, "v2", kind="delta", base=base) as writer:
        writer.add("a", np.zeros(4, np.float32))
        assert writer.finalise([writer.close()]).changed_tensors == 1


def test_a_publisher_of_tensors_needs_no_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store, clock = MemoryStore("weights"), Clock()
    with Publisher(
        HotLoadConfig(deployment_id="dep", run_id="grpo-7", timeout=60.0),
        base=side_files(tmp_path / "sides"),
        client=LoadingService(store, tmp_path / "replica"),
        s3=store,
        plugins=Plugins(),
        tensor_base="memory",
        clock=clock,
        sleep=clock.sleep,
    ) as publisher:
        done = publisher.publish_tensors({"a": np.ones((2, 2), np.float32)}, number=1)
        assert done.identity == "grpo-7-v000001"
        assert publisher.state_dir == tmp_path / "grpo-7-hotload"
    assert (tmp_path / "grpo-7-hotload" / "journal.json").exists()
