"""Check the hook against miles' real train actor and delta writer.

    python tools/check_against_miles.py SRC

SRC is a checkout of miles (github.com/radixark/miles). Needs torch (a CPU build), safetensors, numpy, zstandard, httpx,
xxhash and the packages of this workspace; no GPU, no Ray, no Megatron, no SGLang. Prints JSON and ends with 0 when
every version arrived and every replica holds the trainer's weights. What is miles' here and what stands in:
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
    from trainer_code import WORLD, Handle, Life, Ray, main

HOOK = "cwtrain.integrations.miles.hook"
LIVES = (
    {"what": "no engines, a replicated tensor", "hook": HOOK, "steps": ["delta", "delta", "empty", "delta"]},
    {
        "what": "slime's path, miles' default checksum, converted; a restart",
        "hook": "cwtrain.integrations.slime.hook",
        "steps": ["delta", "delta"],
        "args": {"update_weight_delta_checksum": "xxh3-128"},
    },
    {
        "what": "the other encoding, converted; a restart",
        "hook": HOOK,
        "steps": ["delta", "empty", "delta"],
        "args": {"update_weight_delta_encoding": "overwrite"},
    },
)
COMMON = {
    "update_weight_transfer_mode": "disk-delta",
    "check_weight_update_equal": False,
    "ci_test": False,
    "debug_skip_weight_update": False,
    "pause_generation_mode": "retract",
    "rematerialize_param_from_master_weight": False,
    "lora_rank": 0,
    "lora_adapter_path": None,
    "multi_lora": False,
    "multi_lora_n_adapters": 0,
}


def actor(module: Any, args: Namespace, life: Life) -> Callable[[], None]:
    """Return ``update_weights`` of miles' actor, made as its ``init`` makes it for disk deltas."""
    delta: Any = import_module("miles.backends.megatron_utils.update_weight.update_weight_from_distributed.delta")
    distributed_utils = import_module("miles.utils.distributed_utils")

    module.ray = delta.ray = Ray
    module.print_memory = lambda *words, **more: None
    first = Namespace(rank=0, size=1)
    delta.get_parallel_state = lambda: Namespace(intra_dp_cp=first, tp=first, pp=Namespace(rank=life.rank, size=WORLD))
    distributed_utils.init_gloo_group()
    # miles' own log function with a backend that remembers; it runs on the last stage alone.
    if life.rank == WORLD - 1:
        tracking: Any = import_module("miles.utils.tracking_utils.tracking")
        tracking._manager._backends.append(Namespace(log=lambda metrics, step, step_key: life.tracked.append(step)))

    updater = delta.UpdateWeightFromDiskDelta(args, [], dict, model_name="stand-in", quantization_config=None)
    updater._for_each_hf_bucket = lambda bucket: bucket(life.gathered(), None)
    updater._record_metrics = lambda: None
    connect = updater.connect_rollout_engines

    def connected(*engines: Any, **more: Any) -> None:
        life.connected += 1
        connect(*engines, **more)

    updater.connect_rollout_engines = connected

    made = object.__new__(module.MegatronTrainRayActor)
    made.args, made.weight_updater = args, updater
    made._heartbeat = Namespace(bump=lambda: None)
    made.rollout_manager = Handle()
    info = Namespace(
        rollout_engines=[],
        rollout_engine_lock=Handle(),
        has_new_engines=False,
        engine_gpu_counts=[],
        engine_gpu_offsets=[],
    )
    return lambda: made.update_weights(info)


if __name__ == "__main__":
    sys.exit(main("miles", actor, COMMON, LIVES))
