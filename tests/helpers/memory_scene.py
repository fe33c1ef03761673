"""The same scene as `publish_scene`, without a server: a service and a bucket in memory, on a clock of its own.

What is served is made again from the bucket, chain by chain, so its bytes can be compared all the same.
"""

from __future__ import annotations

import hashlib
import re
import tempfile

import attrs

from cwtrain.hotload import WeightMirror
from cwtrain.models.service import HotLoadState
from cwtrain.snapshots.checkpoint import open_checkpoint
from cwtrain.storage import Location, MemoryStore
from helpers.fake_service import Clock, FakeService
from helpers.publish_scene import Scene
from helpers.toy_trainer import ToyTrainer, hashes


class MemoryService(FakeService):
    """A service whose engine fails hot-loads of some identities."""

    def __init__(self):
        super().__init__(polls=1)
        self.damaged = []  # [pattern, times left or None]

    def get_hot_load(self, hot_load_id):
        found = next(one for one in self.hot_loads if one.id == hot_load_id)
        self.outcome = HotLoadState.COMPLETED
        for rule in self.damaged if not found.state.terminal else ():
            if rule[1] != 0 and re.fullmatch(rule[0], found.identity):
                rule[1] = None if rule[1] is None else rule[1] - 1
                self.outcome = HotLoadState.FAILED
                break
        return super().get_hot_load(hot_load_id)


class MemoryFaults:
    """The one fault of the emulator that these tests need."""

    def __init__(self, service):
        self._service = service

    def add(self, target, kind, *, identity, times=None):
        assert (target, kind) == ("replica", "damage")
        self._service.damaged.append([identity, times])

    def clear(self):
        self._service.damaged.clear()


class MemoryScene(Scene):
    """A deployment, a toy trainer, and publishers for them, all in this process."""

    def __init__(self, root):
        self.service = self.client = MemoryService()
        self.deployment_id = "dep"
        self.store = self.s3 = MemoryStore("weights")
        self.location = Location("weights", "run")
        self.trainer = ToyTrainer(root)
        self.clock = self.clock_for_publishers = Clock()
        self.faults = MemoryFaults(self.service)
        self._open = []

    def options(self):
        return {"clock": self.clock_for_publishers, "sleep": self.clock.sleep}

    def close(self):
        for publisher in self._open:
            publisher.close()

    def check_served(self, tensors):
        served = next(one for one in self.service.hot_loads if one.state is HotLoadState.COMPLETED)
        with tempfile.TemporaryDirectory() as place:
            WeightMirror.from_bucket(
                f"{place}/mirror", store=self.store, location=self.location, identity=served.identity
            ).close()
            found = {}
            for name, tensor in open_checkpoint(f"{place}/mirror").tensors.items():
                with tensor.open() as file:
                    found[name] = hashlib.sha256(file.read(tensor.offset, tensor.size_bytes)).hexdigest()
        assert found == hashes(tensors)

    def objects(self, prefix):
        root = self.location.root
        return {one.key.removeprefix(root): one.modified for one in self.store.list_objects(f"{root}{prefix}")}

    def replace_deployment(self):
        """Have another deployment on the same bucket and prefix."""
        self.service = self.client = MemoryService()
        self.deployment_id = "dep-2"
        self.service.deployment = attrs.evolve(self.service.deployment, id="dep-2")
