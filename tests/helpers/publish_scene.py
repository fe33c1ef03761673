"""A deployment of the emulator, a toy trainer, and publishers between them."""

from __future__ import annotations

from cwtrain import InferenceClient
from cwtrain.config import HotLoadConfig
from cwtrain.hotload import Publisher
from cwtrain.plugins import Plugins, hookimpl
from cwtrain.storage import s3_client
from helpers.toy_trainer import ToyTrainer, hashes


class Ear:
    """A plugin that hears everything."""

    def __init__(self):
        self.written = []
        self.events = []

    @hookimpl
    def cwtrain_post_write(self, event):
        self.written.append(event)

    @hookimpl
    def cwtrain_weight_sync(self, event):
        self.events.append(event)

    def kinds(self, *, but=()):
        return [type(event).__name__ for event in self.events if type(event).__name__ not in but]


def plugins_with(*plugins):
    """Return a set of plugins of its own."""
    made = Plugins()
    for number, plugin in enumerate(plugins):
        made.register(plugin, name=f"test-{number}")
    return made


class Scene:
    """A deployment, a toy trainer, and publishers for them."""

    def __init__(self, emulator, deployment, service, root):
        self.service = service
        self.deployment_id = deployment["spec"]["id"]
        self.target = deployment["spec"]["hotLoad"]
        self.emulator = emulator
        self.client, self.s3 = self.clients()
        self.seen_objects = {}
        self.trainer = ToyTrainer(root)
        self._open = []

    def clients(self):
        """Return new clients of the service and of the store."""
        emulator = self.emulator
        s3 = s3_client(
            emulator.s3_endpoint,
            region_name=emulator.region,
            aws_access_key_id=emulator.access_key_id,
            aws_secret_access_key=emulator.secret_access_key,
        )
        return InferenceClient(emulator.admin_token, base_url=emulator.base_url), s3

    def options(self):
        """What its publishers are made with besides."""
        return {}

    def settings(self, **values):
        return HotLoadConfig(
            **{"deployment_id": self.deployment_id, "run_id": "run", "timeout": 60.0, "deadline": 90.0, **values}
        )

    def publisher(self, *, plugins=None, name="state", trainer=None, client=None, tensor_base=None, **values):
        trainer = trainer or self.trainer
        settings = self.settings(state_dir=str(trainer.root / name), **values)
        made = Publisher(
            settings,
            disk_dir=trainer.updates,
            base=trainer.base,
            client=client or self.client,
            s3=self.s3,
            plugins=plugins or Plugins(),
            tensor_base=tensor_base,
            poll_interval=0.02,
            **self.options(),
        )
        self._open.append(made)
        return made

    def impatient_client(self):
        """Return a client whose calls give up at once."""
        return InferenceClient(self.emulator.admin_token, base_url=self.emulator.base_url, retry_seconds=0.0)

    def close(self):
        for publisher in self._open:
            publisher.close()
        self.client.close()

    def hot_loads(self):
        """Identities and states, oldest first."""
        return [
            (one.identity, one.state.value) for one in reversed(list(self.client.list_hot_loads(self.deployment_id)))
        ]

    def hot_load(self, identity):
        return next(one for one in self.client.list_hot_loads(self.deployment_id) if one.identity == identity)

    def replicas(self):
        state = self.service.own("/state")
        return next(one for one in state["deployments"] if one["id"] == self.deployment_id)["replicas"]

    def check_served(self, tensors):
        for replica in self.replicas():
            assert self.service.own(f"/replicas/{replica['name']}/tensors") == hashes(tensors)

    def served_bytes_are(self, held, hot_loads):
        """Return whether every replica serves an identity with the bytes that it must hold.

        It is the newest hot-load's where that is COMPLETED; after one that failed, replicas may differ.
        """
        done = not hot_loads or hot_loads[0].state.value == "COMPLETED"
        wanted = {hot_loads[0].identity} if hot_loads and done else {one.identity for one in hot_loads}
        for replica in self.replicas():
            identity = replica["identity"]
            if identity in ("", "initial"):
                if hot_loads and done:
                    return False
            elif identity not in wanted or self.service.own(f"/replicas/{replica['name']}/tensors") != held[identity]:
                return False
        return True

    def objects(self, prefix):
        root = f"{self.target['pathPrefix']}/"
        pages = self.s3.get_paginator("list_objects_v2").paginate(
            Bucket=self.target["bucket"], Prefix=f"{root}{prefix}"
        )
        return {
            item["Key"].removeprefix(root): item["LastModified"] for page in pages for item in page.get("Contents", [])
        }
