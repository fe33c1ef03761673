"""Publish in a process of its own that kills itself (SIGKILL) at a chosen moment.

    python publish_and_die.py DEPLOYMENT CHECKPOINT IDENTITY PREVIOUS|- MOMENT

MOMENT is ``upload:N`` (when the Nth object is in the bucket), ``between`` (all objects and the index are there, no
hot-load asked for), ``accepted`` (the service took the hot-load), ``waiting`` (a replica was seen at work), ``never``.
"""

import os
import signal
import sys

from cwtrain import HotLoader, InferenceClient
from cwtrain.events import HotLoadProgressed, HotLoadRequested, SnapshotUploaded
from cwtrain.plugins import Plugins, hookimpl


def die():
    os.kill(os.getpid(), signal.SIGKILL)


class Killer:
    def __init__(self, moment):
        self.moment = moment

    @hookimpl
    def cwtrain_weight_sync(self, event):
        if (
            (self.moment == "between" and isinstance(event, SnapshotUploaded))
            or (self.moment == "accepted" and isinstance(event, HotLoadRequested))
            or (self.moment == "waiting" and isinstance(event, HotLoadProgressed) and event.replicas)
        ):
            die()

    def progress(self, event):
        kind, _, count = self.moment.partition(":")
        if kind == "upload" and event.upload is not None and event.upload.objects_done >= int(count):
            die()


def main():
    deployment, checkpoint, identity, previous, moment = sys.argv[1:]
    killer = Killer(moment)
    plugins = Plugins()
    plugins.register(killer, name="killer")
    with InferenceClient() as client:
        loader = HotLoader(client, deployment, poll_interval=0.02, plugins=plugins)
        hot_load = loader.publish(
            checkpoint,
            identity,
            previous_identity=None if previous == "-" else previous,
            on_progress=killer.progress,
            workers=1,
        )
    print(hot_load.id, hot_load.state)


if __name__ == "__main__":
    main()
