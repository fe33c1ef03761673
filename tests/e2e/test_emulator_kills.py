"""A few rounds of `tools/emulator_kills.py`: kills at seeded moments, and nothing is lost."""

from __future__ import annotations

from pathlib import Path

import emulator_kills


def test_five_kills_lose_nothing(tmp_path: Path) -> None:
    with emulator_kills.campaign(tmp_path / "state") as campaign:
        for seed in (3, 7, 11, 12, 19):
            campaign.round(seed)
    assert campaign.killed == {"service": 2, "replica": 2, "store": 1}
