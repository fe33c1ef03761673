"""The kind: shards of other nodes show late on a shared disk. Real gloo ranks, whose group gives up sooner than that.

Every limit is scaled down together; ``tools/field_outages.py`` runs the same with 5, 30 and 60 seconds, and where a
shard never shows. The disk is a stand-in that lags.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from helpers.requirements import require
from scenarios.late_shards import late_ranks, replicas_hold_the_truth


def test_ranks_wait_for_a_shard_that_shows_late(emulator: Any, deployment: dict[str, Any], tmp_path: Path) -> None:
    require("torch")
    steps = ["baseline", "delta"]
    seen = late_ranks(tmp_path, emulator, deployment, seconds=2.0, steps=steps, group_seconds=1, first="short")
    assert seen == [steps, steps]
    replicas_hold_the_truth(emulator, deployment, tmp_path)
