"""A thousand groups of one process open at the server at once: it answers none of them before all are there."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from pathlib import Path

from cwtrain.plugins import Plugins
from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams

SINK = Path(__file__).parents[2] / "benchmarks" / "sampler_sink.py"
GROUPS = 1000


def test_a_thousand_groups_are_open_at_once() -> None:
    """B08."""
    server = subprocess.Popen([sys.executable, str(SINK), "4"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        origin = f"http://127.0.0.1:{int(server.stdout.readline())}"
        config = RolloutConfig(base_url=origin, model="m", concurrency=GROUPS, timeout=60, max_attempts=1)
        extra = {"user": f"together-{GROUPS}"}
        groups = [Group(prompt=[number + 1], extra=extra) for number in range(GROUPS)]
        found = Sampler(config, plugins=Plugins()).sample_groups(groups, SamplingParams(max_tokens=4))
        assert [group.group for group in found] == groups
        with urllib.request.urlopen(f"{origin}/seen") as seen:
            assert json.load(seen) == {"requests": GROUPS, "peak": GROUPS}
    finally:
        server.stdin.close()
        server.wait(10)
        server.stdout.close()
