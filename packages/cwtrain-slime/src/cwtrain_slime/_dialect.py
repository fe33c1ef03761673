"""The two dialects in one table: what slime and miles call the same thing, and where in the trainer it lives.

Names and defaults were read in slime 0.3.1 (624b824a) and miles 0.1.0 (31f1ca96). Nothing here imports a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final

import attrs

__all__ = ["FLAGS", "MILES", "SLIME", "Dialect", "Flag", "Kind", "dialect_of"]


class Kind(StrEnum):
    """How a flag's value is written on the command line."""

    SWITCH = "switch"
    TEXT = "text"
    NUMBER = "number"
    WORDS = "words"


@attrs.frozen(kw_only=True)
class Flag:
    """One setting of the trainer. ``slime`` and ``miles`` are its flags, None where the trainer has none.

    ``defaults`` maps a dialect's name to its default; a dialect that is not in it has None (False for a switch).
    """

    name: str
    slime: str | None
    miles: str | None
    kind: Kind = Kind.TEXT
    defaults: Mapping[str, Any] = attrs.field(factory=dict)

    def spelled(self, dialect: str) -> str | None:
        """Return the flag in a dialect, None where it has none."""
        return self.slime if dialect == "slime" else self.miles

    def default(self, dialect: str) -> Any:
        """Return the default in a dialect."""
        return self.defaults.get(dialect, False if self.kind is Kind.SWITCH else None)


def _both(name: str, flag: str, kind: Kind = Kind.TEXT, default: Any = None) -> Flag:
    defaults = {} if default is None else {"slime": default, "miles": default}
    return Flag(name=name, slime=flag, miles=flag, kind=kind, defaults=defaults)


FLAGS: Final = (
    # How weights leave the trainer.
    Flag(
        name="mode",
        slime="--update-weight-mode",
        miles="--update-weight-transfer-mode",
        defaults={"slime": "full", "miles": "broadcast"},
    ),
    Flag(name="transport", slime="--update-weight-transport", miles=None, defaults={"slime": "nccl"}),
    _both("hook", "--custom-update-weight-post-write-path"),
    _both("disk_dir", "--update-weight-disk-dir"),
    _both("local_checkpoint_dir", "--update-weight-local-checkpoint-dir"),
    _both("encoding", "--update-weight-delta-encoding", default="xor"),
    _both("checksum", "--update-weight-delta-checksum", default="xxh3-128"),
    Flag(name="keep_files", slime="--update-weight-disk-keep-files", miles=None, kind=Kind.SWITCH),
    Flag(name="release_train", slime="--release-train", miles=None, kind=Kind.SWITCH),
    Flag(name="skip_weight_update", slime=None, miles="--debug-skip-weight-update", kind=Kind.SWITCH),
    _both("debug_train_only", "--debug-train-only", Kind.SWITCH),
    _both("debug_rollout_only", "--debug-rollout-only", Kind.SWITCH),
    _both("check_equal", "--check-weight-update-equal", Kind.SWITCH),
    _both("train_backend", "--train-backend", default="megatron"),
    # The weights.
    _both("hf_checkpoint", "--hf-checkpoint"),
    _both("load", "--load"),
    _both("custom_config", "--custom-config-path"),
    Flag(name="lora_rank", slime=None, miles="--lora-rank", kind=Kind.NUMBER, defaults={"miles": 0}),
    Flag(name="lora_adapters", slime=None, miles="--multi-lora-n-adapters", kind=Kind.NUMBER, defaults={"miles": 0}),
    # Engines.
    _both("colocate", "--colocate", Kind.SWITCH),
    _both("rollout_num_gpus", "--rollout-num-gpus", Kind.NUMBER),
    _both("engine_addresses", "--rollout-external-engine-addrs", Kind.WORDS),
    Flag(name="rollout_external", slime=None, miles="--rollout-external", kind=Kind.SWITCH),
    _both("sglang_config", "--sglang-config"),
    _both("router_ip", "--sglang-router-ip"),
    _both("router_port", "--sglang-router-port", Kind.NUMBER),
    # Rollouts.
    _both("rollout_function", "--rollout-function-path"),
    _both("temperature", "--rollout-temperature", Kind.NUMBER, 1.0),
    _both("top_p", "--rollout-top-p", Kind.NUMBER, 1.0),
    _both("top_k", "--rollout-top-k", Kind.NUMBER, -1),
    _both("use_rollout_logprobs", "--use-rollout-logprobs", Kind.SWITCH),
    _both("use_tis", "--use-tis", Kind.SWITCH),
    _both("routing_replay", "--use-rollout-routing-replay", Kind.SWITCH),
)
"""Every setting of a trainer that says whether, or how, its weights reach a deployment."""


@attrs.frozen(kw_only=True)
class Dialect:
    """A trainer: its name, where its parts lie, and the flags that make it publish."""

    name: str
    documented_hook: str
    gloo_module: str
    """Module with ``get_gloo_group()``, the group of all ranks; the trainer may rebuild the group, not the function."""
    tracking_modules: tuple[str, ...]
    """Modules with ``log(args, metrics, step_key)``, the newest version's first; the first that is loaded counts."""
    main_rank: tuple[str, str] | None = None
    """(module, function) that says on which rank the tracker runs; None where the tracking module knows."""
    needed: Mapping[str, str]
    """The settings that make the trainer write deltas and call the hook, by their names in ``FLAGS``."""

    def flag(self, name: str) -> str:
        """Return how this trainer spells the setting ``name``."""
        spelled = next(flag for flag in FLAGS if flag.name == name).spelled(self.name)
        if spelled is None:
            raise KeyError(f"{self.name} has no flag for {name}")
        return spelled


SLIME: Final = Dialect(
    name="slime",
    documented_hook="cwtrain.integrations.slime.hook",
    gloo_module="slime.utils.distributed_utils",
    tracking_modules=("slime.observability.logging_utils", "slime.utils.logging_utils"),
    main_rank=("slime.backends.megatron_utils.initialize", "is_megatron_main_rank"),
    needed={"mode": "delta", "transport": "disk"},
)
MILES: Final = Dialect(
    name="miles",
    documented_hook="cwtrain.integrations.miles.hook",
    gloo_module="miles.utils.distributed_utils",
    tracking_modules=("miles.utils.tracking_utils.tracking",),
    needed={"mode": "disk-delta"},
)


def dialect_of(args: Any) -> Dialect:
    """Return whose namespace ``args`` is: each trainer has one flag that the other does not know."""
    return MILES if hasattr(args, "update_weight_transfer_mode") else SLIME
