"""Begin a baseline in a process of its own, say so, and leave as soon as standard input has a line.

python baseline_and_leave.py DEPLOYMENT ROOT
"""

import sys

from cwtrain.config import HotLoadConfig
from cwtrain.hotload import Publisher
from cwtrain.plugins import Plugins
from helpers.toy_trainer import ToyTrainer


def main():
    deployment, root = sys.argv[1:]
    trainer = ToyTrainer(root)
    settings = HotLoadConfig(deployment_id=deployment, run_id="run", state_dir=f"{root}/state")
    publisher = Publisher(settings, disk_dir=trainer.updates, base=trainer.base, plugins=Plugins(), poll_interval=0.02)
    outcome = publisher.baseline(wait_seconds=0.2)
    print(outcome.state.value, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
