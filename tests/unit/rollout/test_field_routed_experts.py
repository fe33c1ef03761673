"""Routed experts in the formats that servers give them in: read as what they say they are, or refused by name at once.

The kind: a field that several servers fill, each in its own way. A format that says its layers is read, wherever it
stands; one that does not, or that is not for every token, is an error at the first answer and not after eight of them.
"""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cwtrain_rollout import Group, RolloutAnswerError, SamplingParams
from cwtrain_rollout.parsing import UnfitAnswer, Wanted, read_answer
from helpers.completions_server import answer, choice
from helpers.told_endpoint import ToldEndpoint, sampler

PROMPT = (5, 6, 7)
TOKENS = (8, 9)
ROWS, LAYERS, TOP_K = len(PROMPT) + len(TOKENS) - 1, 3, 2
PARAMS = SamplingParams(max_tokens=4)


def routes(rows: int = ROWS, dtype: str = "uint8") -> np.ndarray:
    return (np.arange(rows * LAYERS * TOP_K) % 120).reshape(rows, LAYERS, TOP_K).astype(dtype)


def coded(data: bytes) -> str:
    return base64.b64encode(data).decode()


def shaped(array: np.ndarray, **changes: Any) -> dict[str, Any]:
    found = {"data": coded(array.tobytes()), "shape": list(array.shape), "dtype": array.dtype.name, **changes}
    return {name: value for name, value in found.items() if value is not ...}


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return coded(file.getvalue())


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "an object": shaped,
    "a file": npy,
    "lists": lambda array: array.tolist(),
}
PLACES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "nvext": lambda given: answer(choice(0, TOKENS), nvext={"routed_experts": given}),
    "the choice": lambda given: answer(choice(0, TOKENS, routed_experts=given)),
    "the choice's meta_info": lambda given: answer(choice(0, TOKENS, meta_info={"id": "x", "routed_experts": given})),
    "the choice's sgl_ext": lambda given: answer(choice(0, TOKENS, sgl_ext={"routed_experts": given})),
    "the answer's sgl_ext": lambda given: answer(choice(0, TOKENS), sgl_ext={"routed_experts": given}),
    "the answer's sglext": lambda given: answer(choice(0, TOKENS), sglext={"routed_experts": given}),
    "the answer's meta_info": lambda given: answer(choice(0, TOKENS), meta_info={"routed_experts": given}),
}


def streamed(given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return an answer as a stream: its tokens one by one, the rest in the last event."""
    (last,) = given["choices"]
    values = last["logprobs"]["token_logprobs"]
    first = choice(0, TOKENS[:1], finish_reason=None, logprobs={"token_logprobs": values[:1]})
    last = {**last, "token_ids": list(TOKENS[1:]), "logprobs": {"token_logprobs": values[1:]}}
    return [answer(first), {**given, "choices": [last]}]


def sampled(endpoint: ToldEndpoint, *groups: Group, stream: bool = False) -> list[Any]:
    one = sampler(endpoint, routed_experts=True, concurrency=1)

    async def scenario() -> list[Any]:
        async with one, one.rollout(groups or [Group(prompt=PROMPT)], PARAMS, partial=stream) as rollout:
            return [sample async for group in rollout for sample in group.samples]

    return asyncio.run(scenario())


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", PLACES)
def test_every_format_is_read_wherever_it_stands(place: str, form: str, stream: bool) -> None:
    made = PLACES[place](FORMS[form](routes()))
    endpoint = ToldEndpoint(lambda request: streamed(made) if stream else made)
    (sample,) = sampled(endpoint, stream=stream)
    assert len(endpoint.requests) == 1
    assert sample.routed_experts.shape == (ROWS, LAYERS, TOP_K)
    assert np.array_equal(sample.routed_experts.array(), routes())


@pytest.mark.parametrize("dtype", ["uint8", "int8", "uint16", "int16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("form", ["an object", "a file"])
def test_ids_of_every_width_are_read(form: str, dtype: str) -> None:
    given = routes(dtype=dtype)
    (sample,) = sampled(ToldEndpoint(lambda request: PLACES["the choice"](FORMS[form](given))))
    assert (sample.routed_experts.dtype, sample.routed_experts.data) == (dtype, given.tobytes())
    assert np.array_equal(sample.routed_experts.array(), given)


@pytest.mark.parametrize("dtype", [..., "torch.uint8", "|u1"])
def test_a_type_that_is_spelled_otherwise_or_left_out_is_found(dtype: Any) -> None:
    (sample,) = sampled(ToldEndpoint(lambda request: PLACES["the choice"](shaped(routes(), dtype=dtype))))
    assert (sample.routed_experts.dtype, sample.routed_experts.data) == ("uint8", routes().tobytes())


@pytest.mark.parametrize("form", FORMS)
def test_the_prompt_s_routes_may_stand_apart(form: str) -> None:
    """vLLM 0.21: those of the prompt beside the choices, those of the answer in each."""
    whole, before = routes(), len(PROMPT)
    made = answer(
        choice(0, TOKENS, routed_experts=FORMS[form](whole[before:])), prompt_routed_experts=FORMS[form](whole[:before])
    )
    for stream in (False, True):
        (sample,) = sampled(ToldEndpoint(lambda request: streamed(made) if request["stream"] else made), stream=stream)
        assert np.array_equal(sample.routed_experts.array(), whole)


@pytest.mark.parametrize("counted", [len(PROMPT), len(PROMPT) + 5, None])
def test_with_fields_of_the_caller_s_own_the_server_s_count_is_right(counted: int | None) -> None:
    """An image's placeholder becomes many tokens; other fields add none."""
    rows = (counted or len(PROMPT)) + len(TOKENS) - 1
    made = {**PLACES["nvext"](shaped(routes(rows)))}
    if counted is not None:
        made["usage"] = {"prompt_tokens": counted}
    group = Group(prompt=PROMPT, extra={"multi_modal_data": {"image": ["data:,"]}})
    endpoint = ToldEndpoint(lambda request: made)
    (sample,) = sampled(endpoint, group)
    assert len(endpoint.requests) == 1
    assert sample.routed_experts.shape == (rows, LAYERS, TOP_K)


def test_a_prompt_that_became_shorter_is_refused_with_fields_of_the_caller_s_own_too() -> None:
    made = {**PLACES["nvext"](shaped(routes())), "usage": {"prompt_tokens": len(PROMPT) - 1}}
    group = Group(prompt=PROMPT, extra={"mine": 1})
    endpoint = ToldEndpoint(lambda request: made)
    with pytest.raises(RolloutAnswerError, match="it changed the prompt"):
        sampled(endpoint, group)
    assert len(endpoint.requests) == 1


UNFIT = {
    "none": (answer(choice(0, TOKENS)), "no routed experts"),
    "null": (PLACES["nvext"](None), "no routed experts"),
    "SGLang's": (
        PLACES["the choice's meta_info"](coded(routes(dtype="int32").tobytes())),
        "without a shape, as SGLang",
    ),
    "SGLang's beside": (PLACES["the answer's sgl_ext"](coded(routes(dtype="int32").tobytes())), "without a shape"),
    "no base64": (PLACES["the choice"]("what is this"), "cannot be read"),
    "a number": (PLACES["the choice"](7), "cannot be read"),
    "two layers of lists": (PLACES["the choice"]([[1]]), "cannot be read"),
    "ragged lists": (PLACES["the choice"]([[[1]], [[1, 2]]]), "cannot be read"),
    "huge ids": (PLACES["the choice"]([[[1 << 40]]]), "cannot be read"),
    "ids below 0": (PLACES["the choice"](shaped(routes(dtype="int32") - 50)), "ids below 0"),
    "lists with ids below 0": (PLACES["nvext"]([[[-1]]] * ROWS), "ids below 0"),
    "floats": (PLACES["the choice"](shaped(routes(dtype="float32"))), "of type 'float32'"),
    "big-endian": (PLACES["the choice"](npy(routes(dtype=">i4"))), "of type '>i4'"),
    "objects": (PLACES["the choice"](shaped(routes(), dtype="object")), "of type 'object'"),
    "no type": (PLACES["the choice"](shaped(routes(), dtype="what")), "of type 'what'"),
    "a flat shape": (
        PLACES["the choice"](shaped(routes(), shape=[ROWS * LAYERS * TOP_K])),
        "not [tokens, layers, top_k]",
    ),
    "another shape": (PLACES["the choice"](shaped(routes(), shape=[ROWS, LAYERS, 7])), "no uint8 array of shape"),
    "a huge shape": (PLACES["the choice"](shaped(routes(), shape=[1 << 40] * 3)), "no uint8 array of shape"),
    "a late start": (PLACES["nvext"](shaped(routes(), start=2)), "begin at token 2"),
    "too few": (PLACES["the choice"](npy(routes(ROWS - 2))), f"for {ROWS - 2} tokens, and {ROWS} were run"),
    "too many": (PLACES["the choice"](routes(ROWS + 1).tolist()), f"for {ROWS + 1} tokens, and {ROWS} were run"),
    "a file that is cut": (PLACES["the choice"](coded(base64.b64decode(npy(routes()))[:-3])), "bytes"),
    "a file's head that is cut": (PLACES["the choice"](coded(b"\x93NUMPY\x01")), "cannot be read"),
    "a file of columns": (PLACES["the choice"](npy(np.asfortranarray(routes()))), "Fortran"),
}


@pytest.mark.parametrize("extra", [None, {"mine": 1}], ids=["plain", "with extra"])
@pytest.mark.parametrize("name", UNFIT)
def test_what_cannot_be_used_is_an_error_by_name_at_the_first_answer(name: str, extra: Any) -> None:
    made, words = UNFIT[name]
    endpoint = ToldEndpoint(lambda request: made)
    with pytest.raises(RolloutAnswerError) as caught:
        sampled(endpoint, Group(prompt=PROMPT, extra=extra))
    assert len(endpoint.requests) == 1
    assert words in str(caught.value)
    assert "routed experts" in str(caught.value)
    assert "enable-return-routed-experts" in (caught.value.hint or "")


@pytest.mark.parametrize(
    "head",
    [
        "{'descr': '|u1', 'fortran_order': False, 'shape': (1099511627776, 3, 2)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (4, 3, 2)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (-4, 3, -2)}",
        "{'descr': '|u1', 'fortran_order': False, 'shape': (4, 3",
        "__import__('os').getpid()",
        "(" * 3000,
        "",
    ],
)
def test_a_file_s_head_is_believed_only_as_far_as_its_bytes_go(head: str) -> None:
    data = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head.encode() + routes().tobytes()
    made = json.dumps(PLACES["the choice"](coded(data))).encode()
    read = read_answer(made, Wanted(prompt_tokens=3, routed_experts=True))
    assert not read.choices
    assert "its routed experts" in read.problems[0]


def test_one_answer_without_them_among_good_ones_is_asked_again() -> None:
    good, bad = PLACES["nvext"](shaped(routes())), answer(choice(0, TOKENS))
    script = [good, bad, good]
    one, two = sampled(ToldEndpoint(lambda request: script.pop(0)), Group(prompt=PROMPT), Group(prompt=PROMPT))
    assert script == []
    assert one.routed_experts == two.routed_experts


def test_an_answer_that_is_read_patiently_keeps_them() -> None:
    """One bad choice of an answer costs the others nothing: their routes are there, too."""
    broken = choice(1, TOKENS, logprobs={"token_logprobs": [None, -1.0]})
    given = answer(choice(0, TOKENS, routed_experts=npy(routes())), broken)
    read = read_answer(json.dumps(given).encode(), Wanted(n=2, prompt_tokens=3, routed_experts=True))
    (good,) = read.choices.values()
    assert good.routed_experts is not None
    assert np.array_equal(good.routed_experts.array(), routes())


def test_nobody_reads_them_where_they_are_not_wanted() -> None:
    for made, _ in UNFIT.values():
        read = read_answer(json.dumps(made).encode(), Wanted(prompt_tokens=3))
        assert [good.routed_experts for good in read.choices.values()] == [None]
    with pytest.raises(UnfitAnswer):
        read_answer(json.dumps({**made, "usage": {"prompt_tokens": 2}}).encode(), Wanted(prompt_tokens=3))
