from __future__ import annotations

import base64
import json
from typing import Any

import pytest

from cwtrain_rollout.parsing import BadAnswer, ReadAnswer, UnfitAnswer, Wanted, excerpt, read_answer
from cwtrain_rollout.protocol import SampleStatus
from helpers.completions_server import answer, choice


def read(made: dict[str, Any] | str, n: int = 1, prompt_tokens: int = 3, **more: Any) -> ReadAnswer:
    body = made if isinstance(made, str) else json.dumps(made)
    return read_answer(body.encode(), Wanted(n=n, prompt_tokens=prompt_tokens, **more))


def test_a_good_answer() -> None:
    got = read(answer(choice(0, (5, 6), finish_reason="length", text="ab"), prompt_tokens=3))
    assert (got.problems, got.extra) == ((), 0)
    only = got.choices[0]
    assert only.token_ids == (5, 6)
    assert only.logprobs == (-0.5, -0.5)
    assert (only.status, only.finish_reason, only.text) == (SampleStatus.TRUNCATED, "length", "ab")


def test_choices_are_matched_by_index_whatever_their_order() -> None:
    got = read(answer(choice(2, (2,)), choice(0, (0,)), choice(1, (1,))), n=3)
    assert {index: good.token_ids for index, good in got.choices.items()} == {0: (0,), 1: (1,), 2: (2,)}


def test_missing_choices_are_named_and_extra_ones_counted() -> None:
    got = read(answer(choice(0), choice(3), choice(9)), n=4)
    assert sorted(got.choices) == [0, 3]
    assert got.problems == ("choice 1 is missing", "choice 2 is missing")
    assert got.extra == 1


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"logprobs": None}, "it has no log-probs"),
        ({"logprobs": ...}, "it has no log-probs"),
        ({"logprobs": {"tokens": ["a"], "token_logprobs": [-0.1]}}, "it has 2 token ids and 1 log-probs"),
        ({"logprobs": {"token_logprobs": [-0.1] * 3}}, "it has 2 token ids and 3 log-probs"),
        ({"logprobs": {"token_logprobs": [None, -0.1]}}, "1 of its 2 log-probs are null"),
        ({"logprobs": {"token_logprobs": [-0.1, 0.7]}}, "it has the log-prob 0.7, which is above 0"),
        ({"token_ids": [], "logprobs": {"token_logprobs": []}}, "it has no tokens"),
        ({"token_ids": [1, -2]}, "it has an unexpected shape: Expected `int` >= 0 - at `$.token_ids[1]`"),
        ({"token_ids": [1, True]}, "it has an unexpected shape: Expected `int`, got `bool` - at `$.token_ids[1]`"),
        ({"logprobs": {"token_logprobs": ["-0.1", "-0.2"]}}, "it has the log-prob '-0.1', which is no number"),
        ({"logprobs": {"token_logprobs": [float("nan"), -0.1]}}, "it has the log-prob nan"),
        ({"logprobs": {"token_logprobs": [-0.1, float("-inf")]}}, "it has the log-prob -inf"),
        ({"finish_reason": "abort"}, "it ended with finish_reason 'abort'"),
        ({"finish_reason": "cancelled"}, "it ended with finish_reason 'cancelled'"),
        ({"finish_reason": None}, "it has no finish_reason"),
    ],
)
def test_one_unusable_choice_leaves_the_other(changes: dict[str, Any], problem: str) -> None:
    """B24, B25, B51, B68: missing, of another length, not finite; the choice is rejected, not the group."""
    got = read(answer(choice(0), choice(1, **changes)), n=2)
    assert sorted(got.choices) == [0]
    assert got.problems == (f"choice 1: {problem}",)


def test_an_integer_and_a_rounded_log_prob_are_fine() -> None:
    got = read(answer(choice(0, logprobs={"token_logprobs": [0, 0.0004]})))
    assert got.choices[0].logprobs == (0.0, 0.0004)


def test_floors_are_kept_and_counted() -> None:
    got = read(answer(choice(0, logprobs={"token_logprobs": [-9999.0, -0.1]})))
    assert got.choices[0].floors == 1


def test_log_probs_may_be_missing_where_they_are_not_required() -> None:
    got = read(answer(choice(0, logprobs=None)), logprobs=False)
    assert (got.choices[0].token_ids, got.choices[0].logprobs) == ((7, 8), ())


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("", "empty"),
        ("  \n", "empty"),
        ("<html><body>Bad gateway</body></html>", "an HTML page: <html>"),
        ('{"choices": [{"index": 0, "tok', "not JSON"),
        ('{"choices": {}}', "unexpected shape"),
        ("[]", "unexpected shape"),
        ('{"choices": []}', "no choices"),
        ("{}", "no choices"),
        ('{"error": {"message": "engine died"}}', "error in spite of its status 200"),
        ('{"object": "error", "message": "engine died"}', "engine died"),
    ],
)
def test_answers_that_cannot_be_used_at_all(body: str, says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        read(body)


def test_an_index_twice_is_a_bad_answer() -> None:
    with pytest.raises(BadAnswer, match="two choices have the index 1"):
        read(answer(choice(0), choice(1), choice(1)), n=3)


def test_choices_without_an_index_cannot_be_told_apart() -> None:
    with pytest.raises(BadAnswer, match="no index"):
        read(answer(choice(0, index=...), choice(0, index=...)), n=2)
    assert sorted(read(answer(choice(0, index=...))).choices) == [0]


def test_another_prompt_length_is_never_accepted() -> None:
    with pytest.raises(UnfitAnswer, match="counted 4 prompt tokens where 3 were sent"):
        read(answer(choice(0), prompt_tokens=4))


def test_usage_is_not_used_for_the_answer_s_length() -> None:
    assert len(read(answer(choice(0, (1, 2, 3)), prompt_tokens=3)).choices[0].token_ids) == 3


def test_token_ids_come_from_spelled_tokens_where_the_field_is_missing() -> None:
    spelled = {"tokens": ["token_id:41", "token_id:42"], "token_logprobs": [-0.1, -0.2]}
    assert read(answer(choice(0, token_ids=None, logprobs=spelled))).choices[0].token_ids == (41, 42)


def test_token_ids_come_from_nvext_for_a_single_choice_only() -> None:
    extra = {"nvext": {"completion_token_ids": [41, 42]}}
    assert read(answer(choice(0, token_ids=None), **extra)).choices[0].token_ids == (41, 42)
    with pytest.raises(UnfitAnswer, match="no token ids"):
        read(answer(choice(0, token_ids=None), choice(1, token_ids=None), **extra), n=2)


def test_no_token_ids_at_all_names_the_setting() -> None:
    with pytest.raises(UnfitAnswer) as caught:
        read(answer(choice(0, token_ids=None)))
    assert "return_token_ids" in caught.value.hint


def test_one_choice_without_token_ids_is_asked_for_again() -> None:
    got = read(answer(choice(0), choice(1, token_ids=None)), n=2)
    assert sorted(got.choices) == [0]
    assert got.problems == ("choice 1: it has no token ids",)


def test_an_excerpt_is_short_and_one_line() -> None:
    assert excerpt(b"a\n b\t c") == "a b c"
    assert len(excerpt(b"x" * 10_000)) == 200


@pytest.mark.parametrize("reason", ["error", "content_filter", "something new"])
def test_what_the_endpoint_gave_up_is_no_sample_and_says_why(reason: str) -> None:
    got = read(answer(choice(0, finish_reason=reason), choice(1, (), finish_reason=reason, logprobs=None)), n=2)
    assert got.choices == {}
    assert got.problems == tuple(f"choice {i}: it ended with finish_reason {reason!r}" for i in (0, 1))
    assert got.given_up == (reason, reason)


def test_an_aborted_choice_is_taken_where_partial_samples_are() -> None:
    got = read(answer(choice(0, finish_reason="abort")), aborted=True)
    assert (got.choices[0].status, got.choices[0].token_ids) == (SampleStatus.ABORTED, (7, 8))


def test_log_probs_that_cannot_be_used_are_left_out_where_they_are_not_required() -> None:
    """B51: NaN, minus infinity, null and text, without taking the choice along."""
    for bad in (float("nan"), float("-inf"), None, "-0.1", 0.7):
        got = read(answer(choice(0, logprobs={"token_logprobs": [bad, -0.1]})), logprobs=False)
        assert (got.choices[0].token_ids, got.choices[0].logprobs) == ((7, 8), ())


def test_queue_times_and_identities_are_read_where_they_are() -> None:
    assert read(answer(choice(0), nvext={"timing": {"prefill_wait_time_ms": 250}})).queue_seconds == 0.25
    assert read(answer(choice(0), perf_metrics={"prefill-queue-duration": 1.5})).queue_seconds == 1.5
    assert read(answer(choice(0))).queue_seconds is None
    assert read(answer(choice(0), identity="v1", identities=["v1"])).identity == "v1"
    assert read(answer(choice(0), identities=["v1", "v2"])).identity is None


def routes(rows: int, *, start: int = 0, dtype: str = "uint16", cut: int = 0) -> dict[str, Any]:
    data = b"\1\0\2\0" * rows * 3
    encoded = base64.b64encode(data[: len(data) - cut]).decode()
    return {"nvext": {"routed_experts": {"data": encoded, "shape": [rows, 3, 2], "start": start, "dtype": dtype}}}


def test_routed_experts_line_up_with_the_tokens() -> None:
    got = read(answer(choice(0), **routes(4)), routed_experts=True)
    found = got.choices[0].routed_experts
    assert found is not None
    assert found.array().shape == (4, 3, 2)
    assert found.array()[0].tolist() == [[1, 2]] * 3


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        ({}, "it has no routed experts"),
        (routes(5), "for 5 tokens, and 4 were run"),
        (routes(4, start=1), "begin at token 1"),
        (routes(4, dtype="float32"), "of type 'float32'"),
        (routes(4, cut=1), "no uint16 array"),
        ({"nvext": {"routed_experts": {"data": "?", "shape": [4, 3, 2], "dtype": "uint8"}}}, "cannot be read"),
        ({"nvext": {"routed_experts": "x"}}, "cannot be read"),
    ],
)
def test_routed_experts_that_do_not_line_up_are_a_problem(extra: dict[str, Any], problem: str) -> None:
    got = read(answer(choice(0), **extra), routed_experts=True)
    assert not got.choices
    assert problem in got.problems[0]


def test_text_is_tokenised_again_where_that_was_asked_for() -> None:
    given = answer(choice(0, token_ids=None, logprobs=None, text="ab"))
    got = read(given, logprobs=False, token_ids=False, tokenise=lambda text: [ord(letter) for letter in text])
    assert (got.choices[0].token_ids, got.choices[0].retokenised) == ((97, 98), True)
