"""Launch lines of slime and miles with which nothing is wrong, and how to change them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

LINES: Mapping[str, Mapping[str, str | None]] = {
    "slime": {
        "--update-weight-mode": "delta",
        "--update-weight-transport": "disk",
        "--update-weight-delta-encoding": "xor",
        "--update-weight-delta-checksum": "adler32",
        "--custom-update-weight-post-write-path": "cwtrain.integrations.slime.hook_without_engines",
        "--rollout-num-gpus": "0",
        "--rollout-function-path": "my.rollouts.generate",
        "--rollout-temperature": "1",
        "--actor-num-nodes": "1",
    },
    "miles": {
        "--update-weight-transfer-mode": "disk-delta",
        "--update-weight-delta-encoding": "xor",
        "--update-weight-delta-checksum": "adler32",
        "--custom-update-weight-post-write-path": "cwtrain.integrations.miles.hook",
        "--rollout-num-gpus": "0",
        "--sglang-config": "engines.yaml",
        "--sglang-router-ip": "127.0.0.1",
        "--sglang-router-port": "30000",
        "--rollout-function-path": "my.rollouts.generate",
        "--actor-num-nodes": "1",
    },
}


def flags(trainer: str, root: Path, base: Path, changes: Mapping[str, str | None] | None = None) -> list[str]:
    """Return a launch line. ``changes`` replaces values; "-" leaves a flag out, None makes it a switch."""
    line = {
        "--hf-checkpoint": str(base),
        "--update-weight-disk-dir": str(root / "updates"),
        "--update-weight-local-checkpoint-dir": str(root / "local"),
        **LINES[trainer],
        **(changes or {}),
    }
    words = ["python3", "train.py"]
    for flag, value in line.items():
        if value != "-":
            words += [flag] if value is None else [flag, value]
    return words
