"""For all streams of answers: what counts as whole was ended by the server with ``stop`` or ``length``.

Kind: what a server gave up in a word that the client did not know was delivered as a sample.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain_rollout import Group, RolloutConfig, RolloutExhaustedError, SampleStatus, SamplingParams, evaluate_async
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.transport import Reply
from helpers.told_endpoint import ToldEndpoint, no_pause, sampler, streamed_choice

KNOWN = {"stop": SampleStatus.COMPLETED, "length": SampleStatus.TRUNCATED}
REASONS = [
    *("stop", "length", "stop", "length", "stop"),
    *("abort", "cancelled", "aborted", "canceled", "Abort", "ABORT", "cancel", "preempted", "timeout", "error"),
    *("content_filter", "tool_calls", "function_call", "eos", "eos_token", "max_tokens", "Stop", "STOP", "Length"),
    *(" stop", "stop ", "stopped", "unknown", "", None, "length\n", "repetition", "disconnect", "null"),
]
NVEXT = [None, {}, {"agent_hints": {"priority": 1}}, {"annotations": []}, {"extra_fields": ["worker_id"]}]
PARAMS = SamplingParams(max_tokens=40)

ENDS = st.tuples(st.sampled_from(REASONS), st.integers(0, 40), st.booleans())
"""How a choice ends: its reason, its tokens, and whether its end is told apart from its last token."""


class Drawn:
    """An endpoint whose choices end as they were drawn, then by `stop`. No token comes twice: each names its choice."""

    def __init__(self, ends: list[tuple[Any, int, bool]], *, stream: bool) -> None:
        self.ends, self.stream = list(ends), stream
        self.told: dict[tuple[int, ...], Any] = {}
        self.next_token = 0

    def choice(self) -> tuple[tuple[int, ...], Any, bool]:
        reason, count, apart = self.ends.pop(0) if self.ends else ("stop", 2, False)
        tokens = tuple(range(self.next_token, self.next_token + count))
        self.next_token += count
        if tokens:
            self.told[tokens] = reason
        return tokens, reason, apart

    def __call__(self, request: dict[str, Any]) -> Any:
        if self.stream and request["stream"]:
            tokens, reason, apart = self.choice()
            return streamed_choice(tokens, reason, last_event_empty=apart)
        made = []
        for index in range(request["n"]):
            tokens, reason, _ = self.choice()
            values = {"token_logprobs": [-0.5] * len(tokens)}
            made.append({"index": index, "token_ids": tokens, "logprobs": values, "finish_reason": reason})
        return {"choices": made}

    def check(self, sample: Any) -> None:
        """What counts as whole is one of our choices, to the token, and ended as it says."""
        if sample.status not in KNOWN.values():
            assert sample.status is SampleStatus.ABORTED
            assert self.told.get(sample.token_ids, sample.finish_reason) in ("abort", "cancelled")
            return
        assert KNOWN[self.told[sample.token_ids]] is sample.status
        assert sample.finish_reason == self.told[sample.token_ids]
        assert len(sample.logprobs) == len(sample.token_ids) > 0


@settings(max_examples=80, deadline=None)
@given(
    ends=st.lists(ENDS, max_size=14),
    groups=st.lists(st.tuples(st.integers(1, 3), st.sampled_from(NVEXT)), min_size=1, max_size=3),
    partial=st.booleans(),
    stream=st.booleans(),
    attempts=st.integers(1, 8),
    on_failure=st.sampled_from(["raise", "requeue", "drop"]),
)
def test_no_sample_counts_as_whole_that_the_server_gave_up(
    ends: list[Any], groups: list[Any], partial: bool, stream: bool, attempts: int, on_failure: str
) -> None:
    drawn = Drawn(ends, stream=stream)
    asked = [
        Group(prompt=[place], n=n, extra=None if nvext is None else {"nvext": nvext})
        for place, (n, nvext) in enumerate(groups)
    ]

    async def scenario() -> list[Any]:
        one = sampler(ToldEndpoint(drawn), max_attempts=attempts, on_failure=on_failure)
        async with one.rollout(asked, PARAMS, partial=partial) as rollout:
            return [group async for group in rollout]

    try:
        found = asyncio.run(scenario())
    except RolloutExhaustedError:
        assert on_failure != "drop"
        return
    for group in found:
        for sample in group.samples:
            drawn.check(sample)
        assert group.whole == all(sample.status in KNOWN.values() for sample in group.samples)
        assert group.whole or partial
    assert on_failure == "drop" or len(found) == len(asked)


@settings(max_examples=40, deadline=None)
@given(ends=st.lists(ENDS, max_size=10), attempts=st.integers(1, 4), n=st.integers(1, 3), drop=st.booleans())
def test_no_sample_is_scored_that_the_server_gave_up(ends: list[Any], attempts: int, n: int, drop: bool) -> None:
    drawn = Drawn(ends, stream=False)
    scored = []

    def score(group: Group, sample: Any) -> float:
        drawn.check(sample)
        scored.append(sample)
        return 1.0

    one = sampler(ToldEndpoint(drawn), max_attempts=attempts, on_failure="drop" if drop else "raise")
    try:
        found = asyncio.run(evaluate_async([[1], [2]], score, sampler=one, n=n))
    except RolloutExhaustedError:
        assert not drop
        assert not scored
        return
    assert all(sample.status in KNOWN.values() for sample in scored)
    assert len(scored) == n * (2 - len(found.dropped))


@settings(max_examples=40, deadline=None)
@given(ends=st.lists(st.tuples(st.sampled_from(REASONS), st.booleans()), max_size=10), attempts=st.integers(1, 4))
def test_no_chat_answer_is_given_that_the_server_gave_up(ends: list[Any], attempts: int) -> None:
    told: dict[str, Any] = {}
    script = list(ends)

    def tell(request: dict[str, Any]) -> Reply:
        reason, empty = script.pop(0) if script else ("stop", False)
        text = "" if empty else f"answer {len(told)}"
        told[text] = reason
        message = {"role": "assistant", "content": text}
        return Reply(
            status=200,
            body=json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": reason}]}).encode(),
        )

    async def scenario() -> Any:
        config = RolloutConfig(base_url="http://endpoint", model="m", max_attempts=attempts)
        one = ChatSampler(config, transport=ToldEndpoint(tell), sleep=no_pause)
        return await one.chat([[{"role": "user", "content": "hi"}]] * 2)

    try:
        found = asyncio.run(scenario())
    except RolloutExhaustedError:
        return
    for (one,) in found:
        assert one.finish_reason in KNOWN
        if one.text:
            assert told[one.text] == one.finish_reason
