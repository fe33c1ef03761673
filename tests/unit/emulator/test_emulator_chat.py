"""Chat completions: what is refused, the byte template, and the form of the answers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cwtrain_emulator.engine.model_io import make_model
from cwtrain_emulator.engine.tokenizer import ByteTokenizer
from cwtrain_emulator.gateway.completion_request import parse_chat
from cwtrain_emulator.gateway.errors import GatewayError
from cwtrain_emulator.replica.generate import Completion, Context, RequestError, complete
from cwtrain_emulator.replica.materialise import Generation
from cwtrain_emulator.replica.serving import Served, load

VOCAB = 97
HELLO = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    root = tmp_path_factory.mktemp("chat")
    make_model(root / "checkpoint", vocab_size=VOCAB, hidden_size=6, context=3, seed=1, max_length=64)
    return load(Generation(root, "v0", ()))


def chat(served: Served, emit: Any = None, **body: Any) -> Completion:
    asked = parse_chat({"model": "tiny", "messages": HELLO, **body})
    request = {**asked.for_replica, "draws": [0], "max_model_len": None}
    return asyncio.run(complete(request, Context(lambda: served), mode="raw_logprobs", emit=emit))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "messages"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"cache_salt": "a@b"}, "cache_salt"),
        ({"stop": list("abcde")}, "stop"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_field(changes: dict[str, Any], param: str) -> None:
    with pytest.raises(GatewayError) as caught:
        parse_chat({"model": "tiny", "messages": HELLO, **changes})
    assert (caught.value.status, caught.value.param) == (400, param)


def test_the_byte_template() -> None:
    tokenizer = ByteTokenizer(vocab_size=VOCAB, byte_offset=32)
    talk = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
    assert tokenizer.decode(tokenizer.chat(talk, {})) == "[system] be [user] hi [assistant] "
    assert tokenizer.decode(tokenizer.chat(talk, {"add_generation_prompt": False})) == "[system] be [user] hi"
    going_on = [*talk, {"role": "assistant", "content": "we"}]
    assert tokenizer.decode(tokenizer.chat(going_on, {"continue_final_message": True})).endswith("[assistant] we")


def test_contents_may_come_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = parse_chat({"model": "m", "messages": [{"role": "user", "content": parts}]}).for_replica
    assert asked["prompts"][0]["messages"] == [{"role": "user", "content": "a\nb"}]


def test_the_answer_has_the_form_of_a_chat(served: Served) -> None:
    done = chat(
        served, n=2, seed=3, max_completion_tokens=4, max_tokens=9, ignore_eos=True, logprobs=True, top_logprobs=2,
        return_token_ids=True,
    )  # fmt: skip
    tokenizer = ByteTokenizer(vocab_size=VOCAB, byte_offset=32)
    assert done.prompt_token_ids == tokenizer.encode("[user] hello [assistant] ")
    assert [choice["index"] for choice in done.choices] == [0, 1]
    for choice in done.choices:
        assert choice["message"] == {"role": "assistant", "content": tokenizer.decode(choice["token_ids"])}
        assert choice["finish_reason"] == "length"
        entries = choice["logprobs"]["content"]
        assert [entry["token"].encode() for entry in entries] == [bytes(entry["bytes"]) for entry in entries]
        for entry in entries:
            best = [other["logprob"] for other in entry["top_logprobs"]]
            assert best == sorted(best, reverse=True)
            assert (len(best), best[0] >= entry["logprob"]) == (2, True)
    named = chat(served, max_tokens=1, logprobs=True, return_tokens_as_token_ids=True).choices[0]
    (entry,) = named["logprobs"]["content"]
    assert entry["token"].startswith("token_id:")
    assert entry["top_logprobs"] == []


def test_without_a_limit_an_answer_may_fill_the_context(served: Served) -> None:
    assert chat(served, ignore_eos=True).completion_tokens == 64 - len("[user] hello [assistant] ")


def test_what_the_template_cannot_take_is_the_messages_fault(served: Served) -> None:
    with pytest.raises(RequestError, match="not in the vocabulary") as caught:
        chat(served, messages=[{"role": "user", "content": "ä"}])
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_a_stream_begins_with_the_role_and_adds_up(served: Served) -> None:
    body = {"n": 2, "seed": 3, "max_tokens": 6, "ignore_eos": True, "logprobs": True, "stop": "zz"}
    whole = chat(served, **body)
    fragments: list[dict[str, Any]] = []
    chat(served, fragments.extend, stream=True, **body)
    for choice in whole.choices:
        mine = [fragment for fragment in fragments if fragment["index"] == choice["index"]]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(fragment["delta"]["content"] for fragment in mine) == choice["message"]["content"]
        entries = [entry for fragment in mine if fragment["logprobs"] for entry in fragment["logprobs"]["content"]]
        assert entries == choice["logprobs"]["content"]
        assert [fragment["finish_reason"] for fragment in mine][-1] == "length"
