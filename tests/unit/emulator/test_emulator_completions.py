"""A completions request: what is refused, and what a replica makes of the rest."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain_emulator.engine.model_io import load_model, make_model, save_model
from cwtrain_emulator.gateway.completion_request import parse_completion
from cwtrain_emulator.gateway.errors import GatewayError
from cwtrain_emulator.replica.generate import Completion, Context, RequestError, complete
from cwtrain_emulator.replica.materialise import Generation
from cwtrain_emulator.replica.serving import Served, load
from helpers import numpy_model

VOCAB, CONTEXT = 97, 3
"""All printable ASCII, and the end token 96."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return make_served(tmp_path_factory.mktemp("served"), "v0", seed=1)


def make_served(root: Path, identity: str, *, seed: int, bias: dict[int, float] | None = None, **extra: Any) -> Served:
    """Return a served model; `bias` makes some tokens likely, `extra` goes into generation_config.json."""
    checkpoint = root / "checkpoint"
    make_model(checkpoint, vocab_size=VOCAB, hidden_size=6, context=CONTEXT, seed=seed, max_length=64)
    model = load_model(checkpoint)
    for token, value in (bias or {}).items():
        model.tensors["lm_head.bias"][token] = value
    save_model(checkpoint, model)
    if extra:
        (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": VOCAB - 1, **extra}))
    return load(Generation(root, identity, ()))


def run(
    served: Served, *, mode: str = "raw_logprobs", emulator_seed: int = 0, draw: int = 0, **body: Any
) -> Completion:
    body = {"model": "tiny", "prompt": [1, 2, 3], **body}
    request = parse_completion(body).for_replica
    draws = [draw + number for number in range(len(request["prompts"]))]
    ready = {**request, "draws": draws, "max_model_len": None}
    return asyncio.run(complete(ready, Context(lambda: served, emulator_seed), mode=mode))


def ids(done: Completion) -> list[list[int]]:
    return [choice["token_ids"] for choice in done.choices]


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], "a"]}, "prompt"),
        ({"model": ""}, "model"),
        ({"model": 5}, "model"),
        ({"n": 0}, "n"),
        ({"n": 1.5}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"seed": "x"}, "seed"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"stop": ["a", ""]}, "stop"),
        ({"stop": list("abcde")}, "stop"),
        ({"stop_token_ids": [1, 2, 3, 4, 5]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"stream": "yes"}, "stream"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logit_bias": {"1": 5}}, "logit_bias"),
        ({"nvext": []}, "nvext"),
        ({"nvext": {"cache_salt": "a/b"}}, "nvext.cache_salt"),
        ({"nvext": {"cache_salt": "x" * 129}}, "nvext.cache_salt"),
        ({"nvext": {"extra_fields": "timing"}}, "nvext.extra_fields"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_completion({"model": "tiny", "prompt": [1], **changes})
    assert (caught.value.status, caught.value.param) == (400, param)
    assert caught.value.body["error"]["code"] == 400


def test_neutral_values_and_unknown_fields_are_fine() -> None:
    neutral = {"top_p": 1.0, "top_k": -1, "min_p": 0, "repetition_penalty": 1.0, "best_of": 1, "echo": False}
    asked = parse_completion({"model": "tiny", "prompt": "a", "user": "me", "nvext": {"cache_salt": "s"}, **neutral})
    assert asked.cache_salt == "s"
    assert asked.for_replica["prompts"] == ["a"]
    assert asked.for_replica["n"] == 1


def test_log_probs_are_those_of_the_page_s_formula(served: Served) -> None:
    tensors = numpy_model.read_tensors(served.generation.checkpoint)
    done = run(served, n=3, max_tokens=8, logprobs=0, return_token_ids=True, temperature=0.8, ignore_eos=True)
    for choice in done.choices:
        assert len(choice["token_ids"]) == len(choice["logprobs"]["token_logprobs"]) == 8
        sequence = [1, 2, 3]
        for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
            expected = numpy_model.next_token_logprobs(tensors, sequence, CONTEXT)
            assert abs(expected[token] - logprob) < 1e-5
            sequence.append(token)


def test_processed_log_probs_are_those_of_what_was_sampled_from(served: Served) -> None:
    tensors = numpy_model.read_tensors(served.generation.checkpoint)
    done = run(
        served, mode="processed_logprobs", max_tokens=4, logprobs=0, return_token_ids=True, temperature=0.5, top_k=7
    )
    sequence = [1, 2, 3]
    choice = done.choices[0]
    for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
        scaled = numpy_model.next_token_logprobs(tensors, sequence, CONTEXT) / 0.5
        kept = np.sort(scaled)[-7:]
        assert abs(scaled[token] - np.log(np.exp(kept).sum()) - logprob) < 1e-5
        sequence.append(token)


def test_the_probe_tells_the_mode(served: Served) -> None:
    probe = {"temperature": 1.0, "top_k": 1, "max_tokens": 1, "logprobs": 0}
    assert run(served, mode="processed_logprobs", **probe).choices[0]["logprobs"]["token_logprobs"] == [0.0]
    assert run(served, **probe).choices[0]["logprobs"]["token_logprobs"][0] < -0.1


def test_top_log_probs_and_names(served: Served) -> None:
    done = run(served, max_tokens=2, logprobs=3, return_tokens_as_token_ids=True, return_token_ids=True)
    shown = done.choices[0]["logprobs"]
    assert shown["tokens"] == [f"token_id:{token}" for token in done.choices[0]["token_ids"]]
    for name, logprob, tops in zip(shown["tokens"], shown["token_logprobs"], shown["top_logprobs"], strict=True):
        assert tops[name] == logprob
        assert len(tops) in (3, 4)
    text = run(served, max_tokens=2, logprobs=1, ignore_eos=True).choices[0]
    assert "".join(text["logprobs"]["tokens"]) == text["text"]
    assert text["logprobs"]["text_offset"] == [0, 1]


def test_unseeded_requests_repeat_from_run_to_run_and_differ_among_themselves(served: Served) -> None:
    body = {"n": 4, "max_tokens": 6, "return_token_ids": True, "ignore_eos": True}
    first = ids(run(served, **body))
    assert ids(run(served, **body)) == first
    assert len({tuple(tokens) for tokens in first}) == 4
    assert ids(run(served, draw=1, **body)) != first
    assert ids(run(served, emulator_seed=1, **body)) != first
    other = Served(**{**served.__dict__, "identity": "v1"})
    assert ids(run(other, **body)) != first


def test_a_seed_decides_alone(served: Served) -> None:
    body = {"n": 2, "max_tokens": 6, "return_token_ids": True, "ignore_eos": True, "seed": 5}
    first = ids(run(served, **body))
    assert ids(run(served, draw=9, emulator_seed=3, **body)) == first
    assert first[0] != first[1]
    assert ids(run(served, **{**body, "seed": 6})) != first
    assert ids(run(served, **{**body, "n": 1})) == first[:1]


def test_stop_tokens_end_an_answer_and_are_part_of_it(tmp_path: Path) -> None:
    served = make_served(tmp_path, "v0", seed=1, bias={33: 100.0})
    ended = run(served, max_tokens=5, stop_token_ids=[33], logprobs=0, return_token_ids=True).choices[0]
    assert (ended["finish_reason"], ended["stop_reason"], ended["token_ids"]) == ("stop", 33, [33])
    assert ended["text"] == ""
    assert len(ended["logprobs"]["token_logprobs"]) == 1
    shown = run(served, max_tokens=5, stop_token_ids=[33], include_stop_str_in_output=True).choices[0]
    assert shown["text"] == "A"
    longer = run(served, max_tokens=5, stop_token_ids=[33], min_tokens=3, return_token_ids=True).choices[0]
    assert 33 not in longer["token_ids"][:3]


def test_the_end_token_ends_an_answer_unless_it_is_ignored(tmp_path: Path) -> None:
    served = make_served(tmp_path, "v0", seed=1, bias={VOCAB - 1: 100.0})
    ended = run(served, max_tokens=5, return_token_ids=True).choices[0]
    assert (ended["finish_reason"], ended["stop_reason"], ended["token_ids"]) == ("stop", None, [VOCAB - 1])
    ignored = run(served, max_tokens=5, return_token_ids=True, ignore_eos=True).choices[0]
    assert (ignored["finish_reason"], len(ignored["token_ids"]), ignored["text"]) == ("length", 5, "")


def test_stop_texts_cut_the_text_and_not_the_tokens(served: Served) -> None:
    whole = run(served, max_tokens=12, ignore_eos=True, seed=3).choices[0]["text"]
    stop = whole[4:6]
    cut = run(served, max_tokens=12, ignore_eos=True, seed=3, stop=[stop], return_token_ids=True).choices[0]
    assert (cut["text"], cut["stop_reason"], len(cut["token_ids"])) == (whole[: whole.find(stop)], stop, 6)
    kept = run(served, max_tokens=12, ignore_eos=True, seed=3, stop=stop, include_stop_str_in_output=True).choices[0]
    assert kept["text"] == whole[:6]


def test_several_prompts_number_their_choices_on(served: Served) -> None:
    done = run(served, prompt=[[1, 2], [3]], n=2, max_tokens=2, return_token_ids=True, ignore_eos=True)
    assert [choice["index"] for choice in done.choices] == [0, 1, 2, 3]
    assert [choice["prompt_token_ids"] for choice in done.choices] == [[1, 2], [1, 2], [3], [3]]
    assert (done.prompt_tokens, done.completion_tokens) == (3, 8)
    text = run(served, prompt="AB", max_tokens=1, return_token_ids=True)
    assert text.choices[0]["prompt_token_ids"] == [33, 34]


@pytest.mark.parametrize(
    ("changes", "status", "said"),
    [
        ({"prompt": [VOCAB]}, 400, "out of vocabulary"),
        ({"prompt": ""}, 400, "empty"),
        ({"prompt": "é"}, 400, "not in the vocabulary"),
        ({"prompt": [1] * 64}, 400, "maximum context length is 64"),
        ({"prompt": [1] * 60, "max_tokens": 5}, 400, "'max_tokens' is too large: 5"),
    ],
)
def test_what_the_model_cannot_take(served: Served, changes: dict[str, Any], status: int, said: str) -> None:
    with pytest.raises(RequestError, match=said) as caught:
        run(served, **changes)
    assert caught.value.status == status


def test_a_missing_max_tokens_is_16_or_what_is_left(served: Served) -> None:
    assert run(served, ignore_eos=True).completion_tokens == 16
    assert run(served, prompt=[1] * 60, ignore_eos=True).completion_tokens == 4


def test_fields_left_out_come_from_the_snapshot_s_generation_config(tmp_path: Path) -> None:
    served = make_served(tmp_path, "v0", seed=1, temperature=0.0, max_new_tokens=3)
    left_out = run(served, n=2, return_token_ids=True, ignore_eos=True)
    assert ids(left_out)[0] == ids(left_out)[1]
    assert left_out.completion_tokens == 6
    sent = run(served, n=2, return_token_ids=True, ignore_eos=True, temperature=1.0, max_tokens=8)
    assert ids(sent)[0] != ids(sent)[1]


def test_a_swap_in_the_middle_goes_on_with_the_new_weights(tmp_path: Path) -> None:
    old = make_served(tmp_path / "old", "v0", seed=1)
    new = make_served(tmp_path / "new", "v1", seed=2, bias={5: 100.0})
    request = parse_completion({"model": "m", "prompt": [1, 2], "max_tokens": 6, "return_token_ids": True})
    ready = {**request.for_replica, "draws": [0], "max_model_len": None, "ignore_eos": True}
    # The first look is at the beginning of the request; then there is one before each token.
    moments = itertools.chain([old] * 3, itertools.repeat(new))
    done = asyncio.run(complete(ready, Context(lambda: next(moments)), mode="raw_logprobs"))
    # The second token was sampled with the old weights and read with the new ones.
    (record,) = done.record
    assert record["runs"] == [["v0", 2], ["v1", 4]]
    assert record["kv"] == [["v0", 3], ["v1", 4]]
    assert (record["prompt_tokens"], record["window"], record["cached_tokens"]) == (2, CONTEXT, 0)
    assert done.choices[0]["token_ids"][2:] == [5, 5, 5, 5]


def test_weights_of_another_shape_end_what_is_running(tmp_path: Path, served: Served) -> None:
    make_model(tmp_path / "checkpoint", vocab_size=VOCAB, hidden_size=7, context=CONTEXT, seed=1)
    other = load(Generation(tmp_path, "v1", ()))
    request = parse_completion({"model": "m", "prompt": [1, 2], "max_tokens": 6, "return_token_ids": True})
    ready = {**request.for_replica, "draws": [0], "max_model_len": None, "ignore_eos": True}
    moments = itertools.chain([served] * 3, itertools.repeat(other))
    done = asyncio.run(complete(ready, Context(lambda: next(moments)), mode="raw_logprobs"))
    assert (done.choices[0]["finish_reason"], len(done.choices[0]["token_ids"])) == ("abort", 2)


def test_other_models_are_served_by_a_refusal(tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(RequestError, match="'llama'") as caught:
        run(load(Generation(tmp_path, "v0", ())))
    assert caught.value.status == 501


@pytest.mark.parametrize("stop", [None, "xyz"])
def test_fragments_add_up_to_the_whole(served: Served, stop: str | None) -> None:
    body = {"prompt": [1, 2], "n": 2, "max_tokens": 9, "logprobs": 1, "return_token_ids": True, "seed": 4, "stop": stop}
    whole = run(served, **body)
    request = parse_completion({"model": "m", "stream": True, **body}).for_replica
    fragments: list[dict[str, Any]] = []
    asyncio.run(
        complete(
            {**request, "draws": [0], "max_model_len": None},
            Context(lambda: served),
            mode="raw_logprobs",
            emit=fragments.extend,
        )
    )
    for choice in whole.choices:
        mine = [fragment for fragment in fragments if fragment["index"] == choice["index"]]
        assert "".join(fragment["text"] for fragment in mine) == choice["text"]
        assert [token for fragment in mine for token in fragment["token_ids"]] == choice["token_ids"]
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        logprobs = [value for fragment in mine for value in fragment["logprobs"]["token_logprobs"]]
        assert logprobs == choice["logprobs"]["token_logprobs"]
