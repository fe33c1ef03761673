"""The adaptive window against the emulator, drawn: python benchmarks/window.py OUT.svg [--service SECONDS]

Needs cwtrain-rollout and cwtrain-emulator. Two replicas with 16 slots and a queue of 4 each: the window finds what they
take; then one is taken away, and given back. The last two phases begin with what the sampler knew before. Beside it,
the best of some fixed numbers. Prints JSON; draws the window, and the choices per second of each phase.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import plot

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

SLOTS, QUEUE, TOKENS = 16, 4, 8
PHASES = ((2, 100), (1, 80), (2, 80))
"""Replicas, and how many times their slots of choices are answered."""


async def main() -> None:
    """Run the phases and draw."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--service", type=float, default=0.8, help="seconds of one choice")
    options = parser.parse_args()
    from cwtrain_emulator.emulator import Emulator
    from cwtrain_emulator.engine.model_io import make_model
    from cwtrain_rollout import RolloutConfig, Sampler
    from helpers.conformance import bucket_of, put_snapshot
    from helpers.emulator_api import Api

    rate = TOKENS / options.service
    with (
        tempfile.TemporaryDirectory() as place,
        Emulator(replicas=2, slots=SLOTS, queue=QUEUE, tokens_per_second=rate) as emulator,
    ):
        api = Api(emulator.base_url, emulator.admin_token)
        deployment = api.deployment(api.gateway()["spec"]["id"], emulator.bucket)
        make_model(Path(place), vocab_size=31, hidden_size=4, context=1, seed=1, max_length=64)
        files = {path.name: path.read_bytes() for path in Path(place).iterdir()}
        put_snapshot(bucket_of(emulator), deployment, "v1", files)
        api.completed(deployment["spec"]["id"], "v1")
        config = RolloutConfig(
            base_url=emulator.gateway_url, model=deployment["spec"]["model"]["name"], api_key=emulator.admin_token
        )
        fixed = {}
        for size in (2 * SLOTS, 2 * (SLOTS + QUEUE // 2), 2 * (SLOTS + QUEUE)):
            import attrs

            run = await phase(Sampler(attrs.evolve(config, concurrency=size)), 20 * 2 * SLOTS)
            fixed[size] = run["rate"]
            print(f"fixed at {size}: {run['rate']:.1f} choices a second", file=sys.stderr)
        sampler = Sampler(config)
        runs: list[dict[str, Any]] = []
        for replicas, times in PHASES:
            while len(emulator.control.scale(deployment["spec"]["id"], replicas)) != replicas:
                await asyncio.sleep(0.1)
            runs.append({"replicas": replicas, **await phase(sampler, times * replicas * SLOTS)})
            print(f"{replicas} replicas: {runs[-1]['rate']:.1f} choices a second", file=sys.stderr)
        await sampler.aclose()
        api.close()
    best = max(fixed.values())
    found = {
        "service_seconds": options.service,
        "slots": SLOTS,
        "queue": QUEUE,
        "fixed": fixed,
        "phases": [{key: value for key, value in run.items() if key != "points"} for run in runs],
        "of_best_fixed": [run["rate"] / (best * run["replicas"] / 2) for run in runs],
    }
    print(json.dumps(found, indent=1))
    options.out.write_text(draw(runs, best))


async def phase(sampler: Any, choices: int) -> dict[str, Any]:
    """Keep the sampler busy for so many choices; the rate is that of the second half."""
    from cwtrain_rollout import Group, SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    began, before = time.monotonic(), sampler.totals.as_json()
    times: list[float] = []
    points: list[tuple[float, float]] = []
    groups = [Group(prompt=[1 + number % 20], n=1) for number in range(choices)]
    async with sampler.rollout(groups, sampling) as rollout:
        async for _ in rollout:
            times.append(time.monotonic() - began)
            points.append((times[-1], sampler.window))
    half = times[len(times) // 2 :]
    after = sampler.totals.as_json()
    sent = after["requests"] - before["requests"]
    return {
        "rate": (len(half) - 1) / (half[-1] - half[0]),
        "refused": (after["refusals"] - before["refusals"]) / sent,
        "seconds": times[-1],
        "window": sampler.window,
        "points": points,
    }


def draw(runs: Sequence[dict[str, Any]], best: float) -> str:
    """Return the window over time, with what each phase can take, as SVG."""
    width, height, left, right, top, bottom = 860, 380, 60, 20, 70, 50
    total = sum(run["seconds"] for run in runs)
    most = 1.15 * max(max(size for _, size in run["points"]) for run in runs)

    def at(seconds: float, size: float) -> tuple[float, float]:
        across = left + seconds / total * (width - left - right)
        return across, height - bottom - size / most * (height - top - bottom)

    title = "The adaptive window, as it finds what the replicas take"
    parts = [plot.text(16, 24, title, more='font-size="15" font-weight="bold"')]
    words = "blue: choices in flight; grey: slots, and slots with the queue full (each replica 16 + 4)"
    parts.append(plot.text(16, 44, words))
    start = 0.0
    path = []
    for run in runs:
        for size in (run["replicas"] * SLOTS, run["replicas"] * (SLOTS + QUEUE)):
            x, y = at(start, size)
            parts.append(plot.line(x, y, at(start + run["seconds"], size)[0], y, plot.FAINT, 'stroke-width="2"'))
        share = run["rate"] / (best * run["replicas"] / 2)
        label = f"{run['replicas']} replicas: {share:.0%} of the best fixed number, {run['refused']:.1%} refused"
        x, y = at(start, most)
        parts.append(plot.line(x, y, x, height - bottom, plot.FAINT, 'stroke-dasharray="4 4"'))
        parts.append(plot.text(x + 4, top + 4, label, more='font-size="10"'))
        path += [at(start + seconds, size) for seconds, size in run["points"]]
        start += run["seconds"]
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in path[:: max(1, len(path) // 900)])
    parts.append(f'<polyline points="{points}" fill="none" stroke="{plot.OURS}" stroke-width="2"/>')
    for seconds in range(0, int(total) + 1, max(10, int(total / 8) // 10 * 10)):
        x, y = at(seconds, 0)
        parts.append(plot.text(x, y + 18, f"{seconds} s", anchor="middle"))
    for size in range(0, int(most), 10):
        x, y = at(0, size)
        parts.append(plot.text(x - 6, y + 4, str(size), anchor="end"))
    return plot.svg(width, height, parts, title)


if __name__ == "__main__":
    asyncio.run(main())
