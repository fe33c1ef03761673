"""The real parts that cases are made of: an emulator with its S3 server, a deployment, a toy trainer."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from pathlib import Path

from cwtrain_emulator.emulator import Emulator
from helpers.emulator_api import Api
from helpers.publish_scene import Scene


@contextlib.contextmanager
def emulated_scene(*, replicas=1):
    """Give a ``Scene`` on an emulator of its own: a deployment, a toy trainer, publishers for them."""
    with Emulator(replicas=replicas) as emulator, tempfile.TemporaryDirectory(prefix="cwtrain-field-") as directory:
        api = Api(emulator.base_url, emulator.admin_token)
        target = {"bucket": emulator.bucket, "pathPrefix": "field", "transitionMode": "TRANSITION_MODE_ASYNC"}
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket, hotLoad=target)
        scene = Scene(emulator, deployment, api, Path(directory))
        try:
            yield scene
        finally:
            scene.close()
            api.close()


class Outage:
    """A fault that begins with the first request that it strikes, and is over so many seconds later.

    ``struck`` says how many requests it met by its end.
    """

    def __init__(self, scene, seconds, kind="status", **values):
        self.struck = 0
        self._control = scene.emulator.control
        self._seconds = seconds
        self._fault = self._control.add_fault("store", kind, caller="trainer", **values)["id"]
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self):
        while not self._over.is_set():
            if self._count():
                self._over.wait(self._seconds)
                break
            self._over.wait(0.05)
        self.struck = self._count()
        self._control.clear_faults(self._fault)

    def _count(self):
        return next((one["struck"] for one in self._control.faults() if one["id"] == self._fault), self.struck)

    def end(self):
        """End it now, if it is not over yet."""
        self._over.set()
        self._thread.join()


class Stopwatch:
    """Seconds since it was made."""

    def __init__(self):
        self._began = time.monotonic()

    @property
    def seconds(self):
        return round(time.monotonic() - self._began, 2)
