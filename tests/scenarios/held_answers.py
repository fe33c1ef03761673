"""Answers of the service that are held back while a signal ends the command that waits for them."""

from __future__ import annotations

import contextlib
import signal

from cwtrain_emulator.pytest_plugin import Faults
from helpers.emulator_api import Api
from helpers.interrupted_commands import CODES, check_hot_loads, check_resources, make_models
from scenarios import case
from scenarios.parts import emulated_scene


@case(
    "held-answers",
    shows="what a signal ended is gone on with by the command it names: hot-loads, create, wait, delete",
    seconds=(0,),
)
def held_answers(seconds):
    for number in CODES:
        with (
            emulated_scene() as scene,
            contextlib.closing(Api(scene.emulator.base_url, scene.emulator.admin_token)) as api,
        ):
            faults, folder = Faults(scene.emulator.control), scene.trainer.root
            deployment = {"spec": {"id": scene.deployment_id}}
            check_hot_loads(scene.emulator, deployment, faults, api, make_models(folder), number)
            check_resources(scene.emulator, faults, api, folder, number)
    return {"signals": [signal.Signals(number).name for number in CODES]}
