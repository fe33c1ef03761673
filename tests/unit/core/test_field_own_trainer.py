"""What the page about a trainer of one's own says of numbers and of resuming, for each place of the base."""

from __future__ import annotations

import pytest

from helpers.memory_scene import MemoryScene
from helpers.publish_scene import plugins_with
from helpers.toy_model import Model


@pytest.fixture
def scene(tmp_path):
    made = MemoryScene(tmp_path)
    made.model = Model(tmp_path)
    made.trainer.base = made.model.base
    yield made
    made.close()


def told(outcome):
    return outcome.identity, outcome.kind.value


def test_numbers(scene):
    publisher = scene.publisher(tensor_base="memory", plugins=plugins_with())
    publisher.baseline()

    def publish(number):
        return told(publisher.publish_tensors(scene.model.train(), number=number))

    assert publish(1) == ("run-v000001", "DELTA")  # on the base
    assert publish(5) == ("run-v000005", "DELTA")  # a gap does no harm
    with pytest.raises(ValueError, match="broken"):
        publisher.publish_tensors(_broken, number=6)
    assert publish(6)[0] == "run-v000006"  # the same number again, after an error
    assert publish(6)[0] == "run.2-v000006"  # and after it was published: begun anew
    assert publish(2)[0] == "run.3-v000002"  # as with a lower one


def _broken():
    raise ValueError("broken")
    yield


@pytest.mark.parametrize(("base", "kind"), [("disk", "DELTA"), ("memory", "FULL"), ("none", "FULL")])
def test_a_restart_without_the_baseline_goes_on_with_its_numbers(scene, base, kind):
    with scene.publisher(tensor_base=base) as publisher:
        publisher.baseline()
        publisher.publish_tensors(scene.model.train(), number=1)
    with scene.publisher(tensor_base=base) as publisher:
        assert told(publisher.publish_tensors(scene.model.train(), number=2)) == ("run-v000002", kind)
    scene.check_served(scene.model.tensors)


@pytest.mark.parametrize("base", ["disk", "memory"])
def test_a_restart_with_the_baseline_begins_an_epoch_on_it_and_uploads_it_no_more(scene, base):
    with scene.publisher(tensor_base=base) as publisher:
        publisher.baseline()
        publisher.publish_tensors(scene.model.train(), number=1)
    uploaded = scene.objects("run-v000000/")
    with scene.publisher(tensor_base=base) as publisher:
        publisher.baseline()
        assert told(publisher.publish_tensors(scene.model.train(), number=1)) == ("run.2-v000001", "DELTA")
    assert scene.hot_load("run.2-v000001").previous_identity == "run-v000000"
    assert scene.objects("run-v000000/") == uploaded
    scene.check_served(scene.model.tensors)
