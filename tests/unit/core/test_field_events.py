"""Every start event has exactly one end, whatever is raised and wherever; ``seconds`` has one meaning; and every event
can be told apart in JSON, whatever its fields are called."""

from __future__ import annotations

import json
import typing

import attrs
import pytest

from cwtrain import events
from cwtrain.errors import ConfigError, ConnectionFailedError, HotLoadError, HotLoadFailedError, WaitTimeoutError
from cwtrain.events import AnyEvent, SyncCompleted, SyncFailed, SyncSkipped, SyncStarted, to_json
from cwtrain.hotload import HotLoader
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import hookimpl
from helpers.memory_scene import MemoryScene
from helpers.publish_scene import Ear, plugins_with
from helpers.toy_model import Model

RAISED = [KeyboardInterrupt(), SystemExit(143), ValueError("odd"), MemoryError(), ConfigError("ours")]
ENDS = (SyncCompleted, SyncFailed, SyncSkipped)


class Teller(MemoryScene):
    """A scene whose publishers tell `ear`, and raise `raises` when their progress comes to `at`."""

    def __init__(self, root):
        super().__init__(root)
        self.model = Model(root)
        self.ear, self.at, self.raises = Ear(), None, None
        self.plugins = plugins_with(self.ear)

    def options(self):
        return {**super().options(), "on_progress": self.progress}

    def progress(self, event):
        if self.raises is not None and self.at == ("upload" if event.upload is not None else "hot-load"):
            raised, self.raises = self.raises, None
            raise raised

    def publisher(self, **values):
        if values.get("tensor_base"):
            self.trainer.base = self.model.base
        return super().publisher(plugins=self.plugins, **values)

    def told(self):
        """Check that starts and ends come in pairs, and return the ends by their identities."""
        started, found = None, []
        for event in self.ear.events:
            if isinstance(event, SyncStarted):
                assert started is None, f"{started} has no end before {event}"
                started = event.identity
            elif isinstance(event, ENDS):
                if started is not None:
                    assert event.identity == started
                found.append((type(event).__name__, event.identity))
                started = None
        assert started is None, f"{started} has no end"
        return found


@pytest.fixture
def scene(tmp_path):
    made = Teller(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("at", ["upload", "hot-load"])
@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_a_directory_s_publish_has_one_end(scene, at, raised):
    publisher = scene.publisher()
    publisher.baseline()
    scene.ear.events.clear()
    scene.at, scene.raises = at, raised
    directory = scene.trainer.step()
    with pytest.raises(type(raised)):
        publisher.publish_directory(directory)
    assert scene.told() == [("SyncFailed", "run-v000001")]
    error = scene.ear.events[-1].error
    assert raised in (error, error.__cause__)
    assert type(raised).__name__ in (type(error).__name__, str(error).partition(":")[0])
    publisher.publish_directory(directory)
    assert scene.told()[-1] == ("SyncCompleted", "run-v000001")


@pytest.mark.parametrize("base", ["none", "memory", "disk"])
@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_a_publish_of_tensors_has_one_end(scene, base, raised):
    def source():
        yield from scene.model.arrays.items()
        raise raised

    publisher = scene.publisher(tensor_base=base)
    with pytest.raises(type(raised)):
        publisher.publish_tensors(source, number=1)
    assert scene.told() == [("SyncFailed", "run-v000001")]
    publisher.publish_tensors(scene.model.train(), number=1)
    assert [kind for kind, _ in scene.told()] == ["SyncFailed", "SyncCompleted"]


@pytest.mark.parametrize("raised", RAISED, ids=lambda error: type(error).__name__)
def test_a_loader_s_publish_has_one_end(scene, raised):
    loader = HotLoader(scene.client, "dep", s3=scene.store, plugins=scene.plugins, sleep=scene.clock.sleep)
    scene.at, scene.raises = "hot-load", raised
    with pytest.raises(type(raised)):
        loader.publish(scene.model.base, "one", on_progress=scene.progress)
    assert scene.told() == [("SyncFailed", "one")]


def test_outages_refused_deltas_and_empty_ones_have_one_end_each(scene):
    publisher = scene.publisher(tensor_base="memory")
    publisher.publish_tensors(scene.model.train(), number=1)
    publisher.publish_tensors(dict(scene.model.arrays), number=2)  # nothing changed
    scene.faults.add("replica", "damage", identity="run-v000003", times=1)
    publisher.publish_tensors(scene.model.train(), number=3)  # the delta FAILED, and came once more in full

    outages = [ConnectionFailedError("away"), None]

    def source():
        yield from list(tensors.items())[:2]
        if (outage := outages.pop(0)) is not None:
            raise outage
        yield from list(tensors.items())[2:]

    tensors = scene.model.train()
    publisher.publish_tensors(source, number=4)  # once more after an outage
    assert scene.told() == [
        ("SyncCompleted", "run-v000001"),
        ("SyncSkipped", "run-v000002"),
        ("SyncFailed", "run-v000003"),
        ("SyncCompleted", "run-v000003-full"),
        ("SyncFailed", "run-v000004"),
        ("SyncCompleted", "run-v000004"),
    ]


def test_what_several_ranks_began_and_never_finished_has_an_end(scene):
    publisher = scene.publisher(tensor_base="none")
    publisher.begin_tensors(number=1, base_identity=None)
    publisher.begin_tensors(number=2, base_identity=None)
    publisher.close()
    assert scene.told() == [("SyncFailed", "run-v000001"), ("SyncFailed", "run-v000002")]
    assert "was not finished" in str(scene.ear.events[-1].error)


def test_without_waiting_the_end_comes_once_it_is_seen(scene):
    publisher = scene.publisher(wait=False)
    publisher.baseline()
    for _ in range(2):
        publisher.publish_directory(scene.trainer.step())
    scene.faults.add("replica", "damage", identity="run-v000003", times=1)
    publisher.publish_directory(scene.trainer.step())
    publisher.finish()
    assert scene.told() == [
        ("SyncCompleted", "run-v000000"),
        ("SyncCompleted", "run-v000001"),
        ("SyncCompleted", "run-v000002"),
        ("SyncFailed", "run-v000003"),
        ("SyncCompleted", "run-v000003-full"),
    ]


def test_a_loader_that_does_not_wait_tells_the_end_when_it_is_asked_or_publishes_again(scene):
    scene.client.polls = 1
    loader = HotLoader(scene.client, "dep", s3=scene.store, plugins=scene.plugins, sleep=scene.clock.sleep)
    loader.wait(loader.publish(scene.model.base, "one", wait=False).id)
    left = loader.publish(scene.model.base, "two", wait=False)
    scene.client.get_hot_load(left.id)  # it ends unseen
    loader.publish(scene.model.base, "three")
    assert scene.told() == [("SyncCompleted", name) for name in ("one", "two", "three")]


def test_a_publish_whose_time_was_over_and_that_is_served_after_all_starts_once_more(scene):
    publisher = scene.publisher(timeout=10)
    publisher.baseline()
    scene.ear.events.clear()
    scene.client.polls = 10**6
    with pytest.raises(WaitTimeoutError):
        publisher.publish_directory(scene.trainer.step())
    scene.client.polls = scene.client._left[scene.client.hot_loads[0].id] = 1
    publisher.publish_directory(scene.trainer.step())
    assert scene.told() == [
        ("SyncFailed", "run-v000001"),
        ("SyncCompleted", "run-v000001"),
        ("SyncCompleted", "run-v000002"),
    ]
    assert scene.ear.kinds().count("SyncStarted") == 3


def test_a_veto_starts_nothing_and_a_failed_check_ends_nothing_twice(scene):
    class Veto:
        @hookimpl
        def cwtrain_before_publish(self, plan):
            if plan.identity == "run-v000002":
                raise ConfigError("not this one")

    publisher = scene.publisher(verify=True)
    publisher.baseline()
    publisher.publish_directory(scene.trainer.step())
    scene.plugins.register(Veto(), name="veto")
    with pytest.raises(ConfigError):
        publisher.publish_directory(scene.trainer.step())
    scene.plugins.unregister("veto")
    assert scene.told()[2:] == [("SyncFailed", None)]
    scene.client.stuck.add("r2")
    with pytest.raises(HotLoadError, match="does not serve it"):
        publisher.publish_directory(scene.trainer.updates / "weight_v000002")
    assert scene.told()[3:] == [("SyncCompleted", "run-v000002")]


@pytest.mark.parametrize("what", ["directory", "tensors", "loader"])
def test_seconds_are_those_of_the_whole_publish(scene, what):
    """The time that it takes to make the tensors, to read the files, and to load them."""
    slow = scene.clock.sleep

    class Slow:
        @hookimpl
        def cwtrain_before_publish(self, plan):
            slow(50)

    scene.plugins.register(Slow(), name="slow")
    before = scene.clock.now
    if what == "directory":
        publisher = scene.publisher()
        publisher.baseline()
    elif what == "tensors":
        scene.publisher(tensor_base="none").publish_tensors(scene.model.train(), number=1)
    else:
        options = {"clock": scene.clock, "sleep": scene.clock.sleep}
        HotLoader(scene.client, "dep", s3=scene.store, plugins=scene.plugins, **options).publish(scene.model.base, "x")
    assert scene.ear.events[-1].seconds == scene.clock.now - before >= 50


# JSON ----------------------------------------------------------------------------------------------------------------

VALUES = {
    "choice": SnapshotChoice.DELTA,
    "kind": SnapshotKind.FULL,
    "mode": events.WriteMode.FULL,
    "error": HotLoadFailedError("no", hint="h"),
    "since": events._now(),
    "first_request_at": events._now(),
}


@pytest.mark.parametrize("kind", typing.get_args(AnyEvent), ids=lambda kind: kind.__name__)
def test_the_class_s_name_is_the_kind_and_every_field_is_there(kind):
    needed = [field.name for field in attrs.fields(kind) if field.default is attrs.NOTHING]
    data = to_json(kind(**{name: VALUES.get(name, 1) for name in needed}))
    assert data["kind"] == kind.__name__
    assert len(data) == 1 + len(attrs.fields(kind))
    assert json.loads(json.dumps(data)) == data


def test_a_snapshot_s_kind_has_a_name_of_its_own():
    event = events.SnapshotInspected(identity="v", kind=SnapshotKind.DELTA, files=1, size_bytes=2)
    assert (to_json(event)["kind"], to_json(event)["snapshot_kind"]) == ("SnapshotInspected", "DELTA")
