"""Streamed answers of the emulator in frames of every kind: long lines, names, comments, line ends, held back.

What is sampled does not depend on how its bytes are framed on the way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from cwtrain.plugins import Plugins
from cwtrain_rollout import Group, Sampler, SamplingParams
from helpers.served_policy import Served, serve

PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def served(emulator: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    yield from serve(emulator, tmp_path_factory.mktemp("frames"), {"logprobs-mode": "processed_logprobs"})


def sampled(served: Served) -> tuple[list[tuple[Any, ...]], int]:
    one = Sampler(served.config, plugins=Plugins())

    async def scenario() -> list[tuple[Any, ...]]:
        async with one, one.rollout([Group(prompt=[5, 6, 7], n=2, seed=4)], PARAMS, partial=True) as rollout:
            (group,) = [group async for group in rollout]
            return [(sample.token_ids, sample.logprobs, sample.text, sample.status) for sample in group.samples]

    return asyncio.run(scenario()), one.totals.requests


@pytest.mark.parametrize(
    "faults",
    [
        [("frames", {"bytes": 3 << 20})],
        [("frames", {"ends": "crlf", "comment": "keep-alive"})],
        [("frames", {"ends": "cr", "bytes": 100_000})],
        [("frames", {"event": "llm_metrics", "note": '{"input_tokens": 3}'})],
        [("frames", {"event": "token_ids", "note": "[1, 2]", "comment": "ping", "ends": "crlf", "bytes": 3 << 20})],
        [("hold", {"seconds": 0.1}), ("frames", {"event": "ping", "note": ""})],
    ],
    ids=["long lines", "CR LF", "CR", "notes", "all at once", "held back"],
)
def test_a_sample_is_the_same_in_every_frame(served: Served, emulator: Any, faults: list[tuple[str, Any]]) -> None:
    emulator.control.clear_faults()
    expected = sampled(served)
    for kind, values in faults:
        emulator.control.add_fault("endpoint", kind, path="completions$", **values)
    try:
        assert sampled(served) == expected
        assert [fault["struck"] for fault in emulator.control.faults()] == [2] * len(faults)
    finally:
        emulator.control.clear_faults()


def test_an_error_s_event_in_a_stream_is_asked_again(served: Served, emulator: Any) -> None:
    emulator.control.clear_faults()
    expected, _ = sampled(served)
    emulator.control.add_fault("endpoint", "frames", path="completions$", event="error", note="engine died", times=1)
    try:
        assert sampled(served) == (expected, 3)
    finally:
        emulator.control.clear_faults()
