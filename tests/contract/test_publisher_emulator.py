"""The publisher against the emulator: directories of a trainer in, weights that every replica serves out."""

from __future__ import annotations

import attrs
import pytest

from cwtrain import InferenceClient
from cwtrain.config import HotLoadConfig
from cwtrain.hotload import Publisher, PublishState
from cwtrain.models.sync import SnapshotChoice
from cwtrain.plugins import Plugins
from cwtrain.storage import s3_client
from helpers.toy_trainer import ToyTrainer, hashes


class Scene:
    """A deployment, a toy trainer, and publishers for them."""

    def __init__(self, emulator, deployment, service, root):
        self.service = service
        self.deployment_id = deployment["spec"]["id"]
        self.target = deployment["spec"]["hotLoad"]
        self.client = InferenceClient(emulator.admin_token, base_url=emulator.base_url)
        self.s3 = s3_client(
            emulator.s3_endpoint,
            region_name=emulator.region,
            aws_access_key_id=emulator.access_key_id,
            aws_secret_access_key=emulator.secret_access_key,
        )
        self.trainer = ToyTrainer(root)
        self._open = []

    def settings(self, **values):
        return HotLoadConfig(
            **{"deployment_id": self.deployment_id, "run_id": "run", "timeout": 60.0, "deadline": 90.0, **values}
        )

    def publisher(self, *, plugins=None, name="state", trainer=None, client=None, **values):
        trainer = trainer or self.trainer
        settings = self.settings(state_dir=str(trainer.root / name), **values)
        made = Publisher(
            settings,
            disk_dir=trainer.updates,
            base=trainer.base,
            client=client or self.client,
            s3=self.s3,
            plugins=plugins or Plugins(),
            poll_interval=0.02,
        )
        self._open.append(made)
        return made

    def close(self):
        for publisher in self._open:
            publisher.close()
        self.client.close()

    def hot_loads(self):
        """Identities and states, oldest first."""
        return [(one.identity, one.state.value) for one in reversed(list(self.client.list_hot_loads(self.deployment_id)))]

    def hot_load(self, identity):
        return next(one for one in self.client.list_hot_loads(self.deployment_id) if one.identity == identity)

    def replicas(self):
        state = self.service.own("/state")
        return next(one for one in state["deployments"] if one["id"] == self.deployment_id)["replicas"]

    def check_served(self, tensors):
        for replica in self.replicas():
            assert self.service.own(f"/replicas/{replica['name']}/tensors") == hashes(tensors)

    def objects(self, prefix):
        root = f"{self.target['pathPrefix']}/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.target["bucket"], Prefix=f"{root}{prefix}"
        )
        return {
            item["Key"].removeprefix(root): item["LastModified"] for page in pages for item in page.get("Contents", [])
        }


@pytest.fixture
def scene(emulator, deployment, service, tmp_path):
    made = Scene(emulator, deployment, service, tmp_path)
    yield made
    made.close()


def test_base_deltas_an_empty_version_a_full_one_and_a_cut_are_all_served(scene):
    trainer = scene.trainer
    publisher = scene.publisher(full_every=3)
    assert publisher.publish_directory(trainer.updates).state is PublishState.COMPLETED
    scene.check_served(trainer.at(0))
    kinds = []
    for kind in ("delta", "empty", "delta", "delta", "full", "delta"):
        outcome = publisher.publish_directory(trainer.step(kind))
        kinds.append((outcome.identity, outcome.kind, outcome.state))
        scene.check_served(trainer.tensors)
    full, delta, skip = SnapshotChoice.FULL, SnapshotChoice.DELTA, SnapshotChoice.SKIP
    done, skipped = PublishState.COMPLETED, PublishState.SKIPPED
    assert kinds == [
        ("run-v000001", delta, done),
        ("run-v000001", skip, skipped),
        ("run-v000003", delta, done),
        ("run-v000004", full, done),
        ("run-v000005", full, done),
        ("run-v000006", delta, done),
    ]
    assert outcome.metrics["hotload/chain_length"] == 1
    assert 0 < outcome.metrics["hotload/density"] <= 1
    assert scene.hot_load("run-v000006").previous_identity == "run-v000005"


def test_a_restart_opens_an_epoch_uploads_no_base_and_chains_to_it(scene):
    trainer = scene.trainer
    with scene.publisher() as publisher:
        publisher.baseline()
        publisher.publish_directory(trainer.step())
        publisher.publish_directory(trainer.step())
    before = scene.objects("run-v000000/")
    for name in ("state", "empty-disk"):
        trainer.restart()
        with scene.publisher(name=name) as publisher:
            publisher.publish_directory(trainer.updates)
            outcome = publisher.publish_directory(trainer.step())
        scene.check_served(trainer.tensors)
        assert scene.hot_load(outcome.identity).previous_identity == "run-v000000"
    assert outcome.identity == "run.3-v000001"
    assert scene.objects("run-v000000/") == before
    assert [name for name, _ in scene.hot_loads()].count("run-v000000") == 1
