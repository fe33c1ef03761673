"""Number of source files in which code runs for one publish, one version and one group.

A reader of the code follows exactly these files. The budgets are what it takes today: they are lowered, never raised.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cwtrain.hotload import HotLoader
from cwtrain.plugins import Plugins
from cwtrain.storage import MemoryStore
from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams
from helpers.completions_server import CompletionsServer
from helpers.fake_service import Clock, FakeService
from helpers.memory_scene import MemoryScene
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand, write_full
from helpers.toy_model import Model

PACKAGES = Path(__file__).resolve().parents[2] / "packages"
BUDGETS = {"publish of a delta": 50, "version from a directory": 86, "version from tensors": 70, "sampled group": 18}


def files_run(call: Callable[[], Any]) -> list[str]:
    """Return the product's files in which a function ran during the call, in any thread; imports do not count."""
    found = set()

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            found.add(frame.f_code.co_filename)

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    places = (Path(name) for name in found if name.endswith(".py"))
    return sorted(str(place.relative_to(PACKAGES)) for place in places if place.is_relative_to(PACKAGES))


def within_budget(what: str, files: list[str]) -> None:
    assert len(files) <= BUDGETS[what], f"{what}: {len(files)} files, budget {BUDGETS[what]}\n" + "\n".join(files)


def test_one_publish_of_a_delta_directory(tmp_path):
    write_full(tmp_path / "full")
    clock = Clock()
    loader = HotLoader(
        FakeService(), "dep", s3=MemoryStore("weights"), plugins=Plugins(), clock=clock, sleep=clock.sleep
    )
    loader.publish(str(tmp_path / "full"), identity="run-v000000")
    delta = write_delta_by_hand(tmp_path / "delta", tiny_tensors(0), tiny_tensors(1))
    files = files_run(lambda: loader.publish(delta, identity="run-v000001", previous_identity="run-v000000"))
    within_budget("publish of a delta", files)


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    yield made
    made.close()


def test_one_version_of_a_publisher_from_a_directory(scene):
    publisher = scene.publisher()
    publisher.baseline()
    publisher.publish_directory(scene.trainer.step())
    second = scene.trainer.step()
    within_budget("version from a directory", files_run(lambda: publisher.publish_directory(second)))


def test_one_version_of_a_publisher_from_tensors(scene, tmp_path):
    model = Model(tmp_path)
    scene.trainer.base = model.base
    publisher = scene.publisher(tensor_base="memory")
    publisher.baseline()
    publisher.publish_tensors(model.train(), number=1)
    weights = model.train()
    within_budget("version from tensors", files_run(lambda: publisher.publish_tensors(weights, number=2)))


def test_one_sampled_group():
    with CompletionsServer() as server:
        sampler = Sampler(RolloutConfig(base_url=server.url, model="policy"))
        group, sampling = [Group(prompt=[1, 2, 3], n=4)], SamplingParams(max_tokens=4)
        sampler.sample_groups(group, sampling)
        within_budget("sampled group", files_run(lambda: sampler.sample_groups(group, sampling)))
