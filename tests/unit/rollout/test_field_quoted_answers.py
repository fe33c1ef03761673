"""What is quoted of answers. Kind: text was cut first and scrubbed then, so that half a key was no key any more."""

from __future__ import annotations

import asyncio
import base64
import html
import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import quote

import pytest

from cwtrain.errors import CWTrainError
from cwtrain.infra import InferenceClient
from cwtrain.storage import S3Store, s3_client
from cwtrain_rollout import Group, RolloutConfig, RolloutError, RolloutExhaustedError, Sampler, SamplingParams
from cwtrain_rollout.chat import ChatSampler
from cwtrain_rollout.transport import Reply
from helpers.completions_server import CompletionsServer, Raw, answer, choice
from helpers.scripted_http import Reply as HttpReply
from helpers.scripted_http import ScriptedServer
from helpers.told_endpoint import ToldEndpoint, no_pause, sampler

KEY = "sk-live+7f/Qx93LmZp0vT8aRw4&KdYe2HnUc6Gs5JbXo1WiNqEt="
PARAMS = SamplingParams(max_tokens=4)
PIECE = 8

SPELLED: dict[str, Callable[[str], str]] = {
    "whole": str,
    "begun": lambda key: key[:30] + "...",
    "ended": lambda key: "..." + key[-30:],
    "broken": lambda key: f"{key[:20]}\n  {key[20:]}",
    "in fours": lambda key: " ".join(key[i : i + 4] for i in range(0, len(key), 4)),
    "json": lambda key: json.dumps(key)[1:-1].replace("/", "\\/"),
    "html": html.escape,
    "url": lambda key: quote(key, safe=""),
    "url twice": lambda key: quote(quote(key, safe=""), safe=""),
    "url small": lambda key: quote(key, safe="").lower(),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of a header": lambda key: base64.b64encode(f"Bearer {key}".encode()).decode(),
    "base64 of a user": lambda key: base64.b64encode(f"me:{key}".encode()).decode(),
    "base64 for urls": lambda key: base64.urlsafe_b64encode(f"a{key}".encode()).decode().rstrip("="),
    "hex": lambda key: key.encode().hex(),
    "large": str.upper,
}


def pieces(text: str) -> Iterator[str]:
    plain = "".join(char for char in text.lower() if char.isalnum())
    return (plain[start : start + PIECE] for start in range(len(plain) - PIECE + 1))


def assert_hidden(shown: str, spelled: str) -> None:
    """No piece of the key as it was spelled, nor of the key itself, is in what is shown."""
    spelled = spelled.removeprefix(base64.b64encode(b"Bearer ").decode()[:9])
    plain = "".join(char for char in shown.lower() if char.isalnum())
    for piece in {*pieces(spelled), *pieces(KEY)}:
        assert piece not in plain, (piece, shown)


def everything(error: BaseException) -> str:
    """Return all that an error and its causes say."""
    found = []
    one: BaseException | None = error
    while one is not None:
        found += [str(one), repr(one), str(getattr(one, "hint", "")), str(getattr(one, "answer", ""))]
        found += [str(getattr(one, "last", "")), *map(str, getattr(one, "__notes__", ()))]
        one = one.__cause__ or one.__context__
    return "\n".join(found)


@pytest.mark.parametrize("before", [0, 150, 190, 196])
@pytest.mark.parametrize("how", list(SPELLED))
def test_a_refusal_shows_no_piece_of_the_key(how: str, before: int) -> None:
    spelled = SPELLED[how](KEY)
    body = ("x" * before + " " + spelled + " and more").encode()
    endpoint = ToldEndpoint(lambda request: Reply(status=401, body=body))
    with pytest.raises(RolloutError) as caught:
        sampler(endpoint, api_key=KEY).sample_groups([Group(prompt=[1])], PARAMS)
    assert_hidden(everything(caught.value), spelled)
    assert "HTTP 401" in str(caught.value)


@pytest.mark.parametrize("spaces", [300, 790, 4060])
def test_a_key_behind_much_white_space_is_hidden(spaces: int) -> None:
    endpoint = ToldEndpoint(lambda request: Reply(status=401, body=b" " * spaces + KEY.encode() + b"\n" * 9000))
    with pytest.raises(RolloutError) as caught:
        sampler(endpoint, api_key=KEY).sample_groups([Group(prompt=[1])], PARAMS)
    assert_hidden(everything(caught.value), KEY)


@pytest.mark.parametrize(
    "body",
    [
        f"<html><p>{KEY}</p>",
        json.dumps({"error": {"message": f"{'x' * 150} {KEY}"}}),
        json.dumps({"detail": f"{'x' * 160}{KEY}"}),
        json.dumps({"choices": [{"index": 0, "token_ids": [1], "finish_reason": f"{'x' * 60} {KEY}"}]}),
        json.dumps({"choices": [{"index": 0, "token_ids": [1], "logprobs": {"token_logprobs": [KEY]}}]}),
        json.dumps({"choices": KEY}),
        f"{'x' * 170}{KEY}",
    ],
)
@pytest.mark.parametrize("status", [200, 500])
def test_a_bad_answer_shows_no_piece_of_the_key(body: str, status: int, caplog: pytest.LogCaptureFixture) -> None:
    endpoint = ToldEndpoint(lambda request: Reply(status=status, body=body.encode()))
    with caplog.at_level("DEBUG", "cwtrain.rollout"), pytest.raises(RolloutExhaustedError) as caught:
        sampler(endpoint, api_key=KEY, max_attempts=2).sample_groups([Group(prompt=[1])], PARAMS)
    assert_hidden(everything(caught.value), KEY)
    assert_hidden(caplog.text, KEY)


@pytest.mark.parametrize("status", [200, 401, 500])
def test_a_chat_s_error_shows_no_piece_of_the_key(status: int) -> None:
    async def scenario() -> None:
        told = ToldEndpoint(lambda request: Reply(status=status, body=f"{'x' * 165} {KEY}".encode()))
        config = RolloutConfig(base_url="http://endpoint", model="m", api_key=KEY, max_attempts=2)
        with pytest.raises(RolloutError) as caught:
            await ChatSampler(config, transport=told, sleep=no_pause).chat([[{"role": "user", "content": "a"}]])
        assert_hidden(everything(caught.value), KEY)

    asyncio.run(scenario())


# What an answer that cannot be used is like ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (200, '{"detail": "Not allowed"}', "application/json"),
        (200, '{"choices": [], "detail": "Not allowed"}', "application/json"),
        (200, "<html>Not allowed</html>", "text/html; charset=utf-8"),
        (200, "Not allowed", "text/plain"),
        (500, "Not allowed", "text/plain"),
        (403, "Not allowed", "text/x-gateway"),
    ],
)
def test_an_answer_that_cannot_be_used_is_quoted_with_its_content_type(status: int, body: str, kind: str) -> None:
    with CompletionsServer(rest=Raw(status, body, headers={"Content-Type": kind})) as server:
        one = Sampler(RolloutConfig(base_url=server.url, model="m", max_attempts=2), sleep=no_pause)
        with pytest.raises(RolloutError) as caught:
            one.sample_groups([Group(prompt=[1])], PARAMS)
    assert "Not allowed" in str(caught.value)
    assert kind in str(caught.value)


def test_a_stream_without_choices_is_quoted() -> None:
    async def scenario() -> None:
        one = sampler(ToldEndpoint(lambda request: [{"detail": "Not allowed"}]), max_attempts=2)
        async with one.rollout([Group(prompt=[1])], PARAMS, partial=True) as rollout:
            with pytest.raises(RolloutExhaustedError, match="Not allowed"):
                await anext(rollout)

    asyncio.run(scenario())


def test_what_is_quoted_has_no_control_characters() -> None:
    endpoint = ToldEndpoint(lambda request: Reply(status=400, body=b"a\x1b[31mred\0\x07b"))
    with pytest.raises(RolloutError) as caught:
        sampler(endpoint).sample_groups([Group(prompt=[1])], PARAMS)
    assert str(caught.value).isprintable()


def test_words_that_are_no_part_of_the_key_stay() -> None:
    endpoint = ToldEndpoint(lambda request: Reply(status=401, body=b"the key sk-live of this account is not allowed"))
    with pytest.raises(RolloutError, match="the key sk-live of this account is not allowed"):
        sampler(endpoint, api_key=KEY).sample_groups([Group(prompt=[1])], PARAMS)


def test_good_answers_are_recorded_without_the_key(tmp_path: Any) -> None:
    file = tmp_path / "record"
    told = Raw(200, json.dumps(answer(choice(0, text=f"you sent {KEY}"))))
    with CompletionsServer(rest=told) as server:
        one = Sampler(RolloutConfig(base_url=server.url, model="m", api_key=KEY, record=str(file)))
        one.sample_groups([Group(prompt=[1])], PARAMS)
    assert_hidden(file.read_text(), KEY)


# Core ------------------------------------------------------------------------------------------------------------

TOKEN = KEY.replace("&", "x")


@pytest.mark.parametrize("before", [0, 470, 4090])
@pytest.mark.parametrize("status", [200, 401])
@pytest.mark.parametrize("how", ["whole", "begun", "broken", "base64 of a header", "hex", "url"])
def test_an_error_of_the_api_shows_no_piece_of_the_token(how: str, status: int, before: int) -> None:
    spelled = SPELLED[how](TOKEN)
    fill = " " * before if before > 1000 else "x" * before
    reply = HttpReply(status, fill + spelled, headers={"Content-Type": f"text/{spelled.split()[0]}"})
    with ScriptedServer([reply]) as server:
        client = InferenceClient(TOKEN, base_url=server.url, retry_seconds=0)
        with client, pytest.raises(CWTrainError) as caught:
            client.get_deployment("d")
    assert_hidden(everything(caught.value), spelled)


def test_an_answer_of_the_api_that_is_no_object_is_quoted() -> None:
    with (
        ScriptedServer([HttpReply(200, ["Not allowed"])]) as server,
        InferenceClient("token", base_url=server.url, retry_seconds=0) as client,
        pytest.raises(CWTrainError) as caught,
    ):
        client.get_deployment("d")
    assert "Not allowed" in str(caught.value)
    assert "application/json" in str(caught.value)


@pytest.mark.parametrize(("how", "before"), [("whole", 480), ("begun", 0), ("broken", 0)])
def test_an_error_of_the_store_shows_no_piece_of_the_secret_key(how: str, before: int) -> None:
    spelled = html.escape(SPELLED[how](KEY))
    body = f"<Error><Code>SignatureDoesNotMatch</Code><Message>{'x' * before} {spelled}</Message></Error>"
    with ScriptedServer([HttpReply(403, body, headers={"Content-Type": "application/xml"})]) as server:
        client = s3_client(server.url, region_name="US-EAST-04A", aws_access_key_id="AK", aws_secret_access_key=KEY)
        with pytest.raises(CWTrainError) as caught:
            S3Store(client, "bucket").get("key")
    assert_hidden(str(caught.value), SPELLED[how](KEY))
