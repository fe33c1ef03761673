"""Answers of any kind: read, or refused by the two errors that there are for it, never anything else."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain_rollout.parsing import BadAnswer, ReadAnswer, UnfitAnswer, Wanted, read_answer

NUMBERS = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 2**70), st.floats(), st.sampled_from([-9999.0, 0.0004, 0.7]), st.text()
)
LISTS = st.one_of(st.none(), st.lists(NUMBERS, max_size=4), st.text(max_size=3))
LOGPROBS = st.one_of(
    st.none(),
    st.fixed_dictionaries(
        {}, optional={"tokens": st.one_of(LISTS, st.just(["token_id:4", "token_id:-5"])), "token_logprobs": LISTS}
    ),
    st.text(max_size=3),
)
CHOICES = st.fixed_dictionaries(
    {},
    optional={
        "index": NUMBERS,
        "text": st.one_of(st.none(), st.text(max_size=4)),
        "finish_reason": st.one_of(NUMBERS, st.sampled_from(["stop", "length", "abort", "error"])),
        "token_ids": LISTS,
        "logprobs": LOGPROBS,
    },
)
ANSWERS = st.fixed_dictionaries(
    {},
    optional={
        "choices": st.one_of(st.lists(st.one_of(CHOICES, NUMBERS), max_size=4), NUMBERS),
        "usage": st.one_of(st.none(), st.fixed_dictionaries({"prompt_tokens": NUMBERS}), NUMBERS),
        "nvext": st.one_of(
            st.none(), st.fixed_dictionaries({}, optional={"completion_token_ids": LISTS, "routed_experts": LISTS})
        ),
        "error": st.one_of(st.none(), st.text(max_size=3)),
        "identity": NUMBERS,
        "identities": LISTS,
    },
)


def check(body: bytes, wanted: Wanted) -> None:
    try:
        read = read_answer(body, wanted)
    except (BadAnswer, UnfitAnswer):
        return
    assert isinstance(read, ReadAnswer)
    for index, good in read.choices.items():
        assert 0 <= index < wanted.n
        assert all(type(token) is int and token >= 0 for token in good.token_ids)
        assert len(good.logprobs) in (0, len(good.token_ids))
        assert all(math.isfinite(value) and value <= 1e-3 for value in good.logprobs)
        if wanted.logprobs and good.status in ("COMPLETED", "TRUNCATED"):
            assert good.token_ids
            assert len(good.logprobs) == len(good.token_ids)
    assert len(read.choices) + len(read.problems) == wanted.n


@settings(max_examples=300, deadline=None)
@given(answer=ANSWERS, n=st.integers(1, 4), logprobs=st.booleans(), routed=st.booleans())
def test_an_answer_of_any_shape_is_read_or_refused(answer: Any, n: int, logprobs: bool, routed: bool) -> None:
    check(json.dumps(answer).encode(), Wanted(n=n, prompt_tokens=3, logprobs=logprobs, routed_experts=routed))


@settings(max_examples=150, deadline=None)
@given(raw=st.binary(max_size=60), cut=st.integers(0, 200), place=st.integers(0, 199), byte=st.integers(0, 255))
def test_bytes_of_any_kind_are_refused(raw: bytes, cut: int, place: int, byte: int) -> None:
    good = json.dumps(
        {
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "token_ids": [1, 2],
                    "logprobs": {"token_logprobs": [-0.5, -0.25]},
                }
            ]
        }
    ).encode()
    check(raw, Wanted())
    check(good[:cut], Wanted())
    spoilt = bytearray(good)
    spoilt[place % len(good)] = byte
    check(bytes(spoilt), Wanted())


def test_what_is_nested_too_deeply_is_refused() -> None:
    check(b'{"choices": ' + b"[" * 100_000, Wanted())
    check(b'{"error": ' + b"[" * 5000 + b"]" * 5000 + b', "choices": [{"index": 0, "token_ids": [NaN]}]}', Wanted())
