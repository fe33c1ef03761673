"""What `serve` is told: one frozen object, made from the command line or from `Emulator`'s arguments."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["ENGINES", "INSTANCE_TYPES", "ZONES", "Settings"]

ZONES = ("US-EAST-02A", "US-EAST-04A", "US-EAST-06A", "US-WEST-01A", "US-WEST-04A", "EU-SOUTH-01A")
"""Zones that a gateway or a claim may name."""

INSTANCE_TYPES = ("gd-8xh100ib-i128", "gd-8xh200ib-i128", "gb200-4x", "H100_80GB_SXM5")
"""Instance types that the parameters calls name; a deployment may ask for any other, too."""

_CONFIG_KEYS = (
    "block-size",
    "data-parallel-size",
    "dtype",
    "enable-chunked-prefill",
    "enable-expert-parallel",
    "enable-prefix-caching",
    "enforce-eager",
    "generation-config",
    "gpu-memory-utilization",
    "kv-cache-dtype",
    "logprobs-mode",
    "max-logprobs",
    "max-model-len",
    "max-num-batched-tokens",
    "max-num-seqs",
    "pipeline-parallel-size",
    "quantization",
    "reasoning-parser",
    "seed",
    "tensor-parallel-size",
    "tokenizer-mode",
    "tool-call-parser",
    "trust-remote-code",
)
_ENV_NAMES = ("VLLM_LOGGING_LEVEL", "VLLM_USE_DEEP_GEMM", "VLLM_ATTENTION_BACKEND", "NCCL_DEBUG")


@dataclass(frozen=True)
class Engine:
    """One engine that a deployment may name: versions (newest last), engineConfig keys, engineEnv names."""

    versions: tuple[str, ...]
    config_keys: tuple[str, ...] = _CONFIG_KEYS
    env_names: tuple[str, ...] = _ENV_NAMES


ENGINES = {"dynamo-vllm": Engine(("1.0.0", "1.1.0")), "vllm": Engine(("0.19.0", "0.20.0"))}
"""Engines by name; hot-loads need ``dynamo-vllm``."""


@dataclass(frozen=True)
class Settings:
    """How one emulator runs. Seconds are floats; `port` 0 takes a free one (the last one of this state, if free).

    `slots`, `queue` and `tokens_per_second` limit each replica (None: no limit); `retry_after` goes into its refusals.
    `engine` ``transformers`` runs Hugging Face models; those of the numpy engine are run by that one in any case.
    """

    state_dir: Path
    host: str = "127.0.0.1"
    port: int = 0
    replicas: int = 2
    seed: int = 0
    bucket: str = "cwtrain-weights"
    region: str = "US-EAST-04A"
    s3_endpoint: str | None = None
    report_identity: bool = False
    hot_load_enabled: bool = True
    transition_seconds: float = 0.05
    swap_delay_seconds: float = 0.01
    engine: str = "numpy"
    slots: int | None = None
    queue: int | None = None
    tokens_per_second: float | None = None
    retry_after: str | None = None
    max_body_bytes: int = 1 << 20
    max_completion_body_bytes: int = 32 << 20
    keep_state: bool = True
    environ: dict[str, str] = field(default_factory=dict, repr=False)
