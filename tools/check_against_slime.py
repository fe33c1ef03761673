"""Check the hook against slime's real train actor and delta writer.

    python tools/check_against_slime.py SRC

SRC is a checkout of slime (github.com/THUDM/slime). Needs torch (a CPU build), safetensors, numpy, zstandard, httpx,
xxhash and the packages of this workspace; no GPU, no Ray, no Megatron, no SGLang. Prints JSON and ends with 0 when
every version arrived and every replica holds the trainer's weights. What is slime's here and what stands in:
``trainer_code.py``.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from importlib import import_module
from typing import Any

import needed

with needed.imports():
    from cwtrain_slime._dialect import SLIME
    from trainer_code import WORLD, Handle, Life, Ray, main

HOOK = "cwtrain.integrations.slime.hook"
LIVES = (
    {
        "what": "no engines, the plain hook: slime skips its updates",
        "hook": HOOK,
        "steps": ["delta"],
        "engines": 0,
        "publishes": False,
    },
    {
        "what": "one engine, the plain hook, a tensor in two shards",
        "hook": HOOK,
        "steps": ["delta", "delta", "empty", "delta"],
        "engines": 1,
    },
    {
        "what": "no engines, made to publish all the same; a restart",
        "hook": f"{HOOK}_without_engines",
        "steps": ["delta", "delta", "empty", "delta", "delta"],
        "engines": 0,
    },
    {
        "what": "slime's default checksum, converted",
        "hook": f"{HOOK}_without_engines",
        "steps": ["delta", "delta"],
        "engines": 0,
        "args": {"update_weight_delta_checksum": "xxh3-128"},
    },
    {
        "what": "the other encoding, converted",
        "hook": f"{HOOK}_without_engines",
        "steps": ["delta", "delta"],
        "engines": 0,
        "args": {"update_weight_delta_encoding": "overwrite"},
    },
)
COMMON = {"update_weight_mode": "delta", "update_weight_transport": "disk"}


def actor(module: Any, args: Namespace, life: Life) -> Callable[[], None]:
    """Return ``update_weights`` of slime's actor, made as its ``init`` makes it for disk deltas."""
    delta: Any = import_module("slime.backends.megatron_utils.update_weight.update_weight_from_disk_delta")
    distributed_utils = import_module("slime.utils.distributed_utils")

    module.ray = delta.ray = Ray
    module.print_memory = lambda *words, **more: None
    megatron: Any = sys.modules["megatron.core"]
    mpu = megatron.mpu = delta.mpu = Namespace(
        get_data_parallel_rank=lambda with_context_parallel=False: 0,
        get_tensor_model_parallel_rank=lambda: 0,
        get_pipeline_model_parallel_rank=lambda: life.rank,
        get_pipeline_model_parallel_world_size=lambda: WORLD,
    )
    initialize: Any = import_module("slime.backends.megatron_utils.initialize")
    initialize.mpu = mpu
    # slime's own log function with a writer that remembers; it runs on the last stage alone.
    tracking: Any = next(sys.modules[name] for name in SLIME.tracking_modules if name in sys.modules)
    tracking._TensorboardAdapter = lambda args: Namespace(log=lambda data, step: life.tracked.append(step))
    distributed_utils.init_gloo_group()

    updater = delta.UpdateWeightFromDiskDelta(args, [], dict, model_name="stand-in", quantization_config=None)
    updater._iter_hf_tensors = lambda: iter(life.gathered())
    updater._record_metrics = lambda: None
    connect = updater.connect_rollout_engines

    def connected(*engines: Any, **more: Any) -> None:
        life.connected += 1
        connect(*engines, **more)

    updater.connect_rollout_engines = connected

    made = object.__new__(module.MegatronTrainRayActor)
    made.args, made.weight_updater = args, updater
    engines = [Handle() for _ in range(life.spec["engines"])]
    new = [len(engines)]  # told once; in a run one manager tells all ranks
    lock = Handle()

    class Manager(Handle):
        def __getattr__(self, name: str) -> Any:
            if name == "get_updatable_engines_and_lock":
                count, new[0] = new[0], 0
                return Namespace(remote=lambda: (list(engines), lock, count, [1] * len(engines), [], []))
            return super().__getattr__(name)

    made.rollout_manager = Manager()
    return lambda: made.update_weights()


if __name__ == "__main__":
    sys.exit(main("slime", actor, COMMON, LIVES))
