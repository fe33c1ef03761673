"""Runs whose publisher is killed at random instants and begun again: what `kill_test.py publisher` runs."""

from __future__ import annotations

import importlib
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))


def kill_publishers(seeds: Iterable[int], ends: Counter[str], *, versions: int) -> list[str]:
    """Run the seeds, each on a deployment of its own; count how they went in ``ends``, and return what was wrong."""
    # By name: these helpers of the tests are not typed.
    api_of, scene_of, kills_of = (
        getattr(importlib.import_module(f"helpers.{module}"), name)
        for module, name in (
            ("emulator_api", "Api"),
            ("publish_scene", "Scene"),
            ("publisher_kills", "PublisherKills"),
        )
    )
    from cwtrain_emulator.emulator import Emulator

    wrong = []
    with Emulator(replicas=1) as emulator, tempfile.TemporaryDirectory(prefix="cwtrain-kills-") as directory:
        api = api_of(emulator.base_url, emulator.admin_token)
        gateway = api.gateway()["spec"]["id"]
        for seed in seeds:
            root = Path(directory) / str(seed)
            root.mkdir()
            deployment = api.deployment(
                gateway,
                emulator.bucket,
                hotLoad={
                    "bucket": emulator.bucket,
                    "pathPrefix": f"kills-{seed}",
                    "transitionMode": "TRANSITION_MODE_ASYNC",
                },
            )
            scene = scene_of(emulator, deployment, api, root)
            story = kills_of(scene, seed, versions=versions, lives=6, longest=4.0)
            try:
                story.run()
            except AssertionError as error:
                wrong.append(str(error))
                print(error, file=sys.stderr)
            finally:
                scene.close()
                emulator.control.clear_faults()
            ends.update(story.ends)
            print(f"seed {seed}: {story.ends['killed']} kills, {len(wrong)} wrong so far", flush=True)
            api.ok("DELETE", f"/deployments/{scene.deployment_id}")
            shutil.rmtree(root, ignore_errors=True)
        api.close()
    return wrong
