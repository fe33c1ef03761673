"""A run whose publisher is killed at random instants goes on, on the same disk and on an empty one.

`python tools/kill_test.py publisher --seeds 200` runs more of it.
"""

from __future__ import annotations

import pytest

from helpers.emulator_api import Api
from helpers.publish_scene import Scene
from helpers.publisher_kills import PublisherKills


@pytest.fixture
def scene(emulator, deployment, tmp_path):
    api = Api(emulator.base_url, emulator.admin_token)
    made = Scene(emulator, deployment, api, tmp_path)
    yield made
    made.close()
    api.close()


@pytest.mark.parametrize("seed", range(12))
def test_killed_anywhere_it_goes_on_and_nothing_wrong_is_ever_served(scene, seed):
    """B29, B47, B48: no clean-up code runs when a process is killed, and none is needed."""
    PublisherKills(scene, seed, versions=4, lives=2, longest=0.6).run()
