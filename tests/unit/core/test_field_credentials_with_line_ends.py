"""The kind: keys with a line end, a blank or a control character, as files, secrets and shells leave them there.

They are told as that, with where they come from; and what signs a request is in no message, whoever quotes it.
"""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import botocore.exceptions
import pytest
from botocore.config import Config
from botocore.credentials import RefreshableCredentials

from cwtrain.errors import ConfigError, CWTrainError, StorageAccessError
from cwtrain.infra import InferenceClient
from cwtrain.storage import S3Store, s3_client
from cwtrain.storage._translate import translate
from helpers.scripted_s3 import Answer, ScriptedS3, aws_session, scripted_s3

KEY, SECRET, TOKEN = "AKIDEXAMPLE", "wJalrXUtnFEMI", "FwoGZXIvYXdzEBY"
ENDPOINT = "http://127.0.0.1:9"
WORDS = {"AWS_ACCESS_KEY_ID": KEY, "AWS_SECRET_ACCESS_KEY": SECRET, "AWS_SESSION_TOKEN": TOKEN}
BAD = [
    ("{}\n", "a line end"),
    ("{}\r\n", "a line end"),
    ("\n{}", "a line end"),
    ("{}\n# the key of the run", "a line end"),
    (" {}", "a blank"),
    ("{} # note", "a blank"),
    ("{} \n", "a line end"),
    ("{}\t", "a control character"),
    ("{}\x7f", "a control character"),
    ("{}\u00a0", "a character that is not ASCII"),
]


@pytest.fixture(autouse=True)
def _keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WORDS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")


def shown(error: BaseException) -> str:
    """Return all that a person may get to see of an error."""
    hint = getattr(error, "hint", "")
    return f"{error!r} {hint} " + "".join(traceback.format_exception(error))


def holds_no_secret(error: BaseException) -> None:
    text = shown(error)
    for secret in (KEY, SECRET, TOKEN, "AWS4-HMAC-SHA256", "Signature="):
        # The lines of this file that a traceback shows have names in them, not values.
        assert secret not in text, text


@pytest.mark.parametrize(
    ("name", "form", "what"),
    [(name, *one) for name in WORDS for one in (BAD if name == "AWS_ACCESS_KEY_ID" else BAD[::4])],
)
def test_a_variable_is_named_with_what_it_holds(
    name: str, form: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, form.format(WORDS[name]))
    with pytest.raises(ConfigError) as caught:
        s3_client(ENDPOINT, session=aws_session())
    assert str(caught.value).startswith(f"{name} holds {what}")
    holds_no_secret(caught.value)


@pytest.mark.parametrize("name", ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"])
def test_a_file_is_named(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {"aws_access_key_id": KEY, "aws_secret_access_key": SECRET, "aws_session_token": TOKEN}
    values[name] += " # note"
    for variable in WORDS:
        monkeypatch.delenv(variable)
    file = tmp_path / "credentials"
    file.write_text("[default]\n" + "".join(f"{key} = {value}\n" for key, value in values.items()))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    with pytest.raises(ConfigError, match="that comes from 'shared-credentials-file' holds a blank") as caught:
        s3_client(ENDPOINT, session=aws_session())
    holds_no_secret(caught.value)


@pytest.mark.parametrize("name", ["aws_access_key_id", "aws_secret_access_key", "aws_session_token"])
@pytest.mark.parametrize("how", ["arguments", "session"])
def test_keys_that_the_program_gives_are_looked_at_too(name: str, how: str) -> None:
    given: dict[str, Any] = {
        "aws_access_key_id": KEY,
        "aws_secret_access_key": SECRET,
        "aws_session_token": TOKEN,
    }
    given[name] += "\n"
    with pytest.raises(ConfigError, match="holds a line end") as caught:
        s3_client(
            ENDPOINT,
            **({**given, "session": aws_session()} if how == "arguments" else {"session": aws_session(**given)}),
        )
    holds_no_secret(caught.value)


def test_keys_that_are_fetched_are_looked_at_before_they_sign() -> None:
    """Such as those of a role or a process: nobody fetches them before the first request."""
    with scripted_s3(ScriptedS3()) as server:
        client = s3_client(server.url, session=aws_session())
        fetched = {
            "access_key": f"{KEY}\n",
            "secret_key": SECRET,
            "token": TOKEN,
            "expiry_time": "2999-01-01T00:00:00Z",
        }
        client._request_signer._credentials = RefreshableCredentials.create_from_metadata(
            fetched, refresh_using=lambda: fetched, method="custom-process"
        )
        with pytest.raises(
            ConfigError, match="the access key that comes from 'custom-process' holds a line end"
        ) as caught:
            S3Store(client, "weights").head("a")
        assert server.requests == []
    holds_no_secret(caught.value)


def test_a_client_of_the_users_own_tells_no_signature() -> None:
    """There the HTTP library refuses the header, and quotes all of it."""
    client = aws_session().client(
        "s3",
        endpoint_url=ENDPOINT,
        region_name="x",
        aws_access_key_id=f"{KEY}\n",
        aws_secret_access_key=SECRET,
        config=Config(s3={"addressing_style": "path"}, retries={"total_max_attempts": 1}),
    )
    with pytest.raises(CWTrainError, match="holds a line end or a control character") as caught:
        S3Store(client, "weights").head("a")
    assert "credentials" in str(caught.value.hint)
    holds_no_secret(caught.value)


AUTHORIZATION = (
    f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/x/s3/aws4_request, SignedHeaders=host;x-amz-date, "
    "Signature=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef"
)


@pytest.mark.parametrize(
    "text",
    [
        f"Invalid header value b'{AUTHORIZATION}'",
        f"bad request line: Authorization: {AUTHORIZATION}",
        f"cannot open http://h/b/k?X-Amz-Credential={KEY}%2F2026&X-Amz-Signature=0123456789abcdef&X-Amz-Expires=9",
        f"Authorization: AWS {KEY}:0123456789abcdefghijABCDEFGHIJ=",
    ],
)
def test_what_signs_a_request_is_in_no_message(text: str) -> None:
    errors: list[Exception] = [
        botocore.exceptions.HTTPClientError(error=ValueError(text)),
        botocore.exceptions.EndpointConnectionError(endpoint_url=text),
        botocore.exceptions.ClientError({"Error": {"Code": "InvalidRequest", "Message": text}}, "PutObject"),
    ]
    for error in errors:
        found = translate(error, action="s3:PutObject", bucket="b", key="k")
        said = f"{found} {found.hint}"
        assert KEY not in said
        assert "0123456789abcdef" not in said


def test_a_store_that_echoes_the_header_is_not_quoted() -> None:
    said = f"<Message>The authorization header is malformed: {AUTHORIZATION}</Message>"
    script = lambda request, before: Answer(403, "AccessDenied", said)  # noqa: E731
    with scripted_s3(ScriptedS3(script=script)) as server, pytest.raises(StorageAccessError) as caught:
        S3Store(s3_client(server.url, session=aws_session()), "weights").put("a", b"x")
    assert "is malformed" in str(caught.value)
    assert "Signature" not in str(caught.value)
    assert KEY not in str(caught.value)


TOKENS = pytest.mark.parametrize("token", ["tok\nen-1234567", "tok en-1234567", "tok\x01en-1234567"])


@TOKENS
def test_tokens_are_told_alike(token: str) -> None:
    with pytest.raises(ConfigError) as caught:
        InferenceClient(token, base_url="http://127.0.0.1:9")
    assert "1234567" not in shown(caught.value).replace(repr(token), "")


@TOKENS
def test_tokens_of_an_emulator_are_told_alike(token: str) -> None:
    emulator = pytest.importorskip("cwtrain_emulator.control_client")
    with pytest.raises(emulator.ControlError, match="token") as refused:
        emulator.Control("http://127.0.0.1:9", token).faults()
    assert "1234567" not in str(refused.value)


@pytest.mark.parametrize("name", WORDS)
def test_the_emulator_says_so_of_another_stores_keys(name: str) -> None:
    emulator = pytest.importorskip("cwtrain_emulator.s3.client")
    with pytest.raises(ValueError, match=f"{name} holds a line end") as caught:
        emulator.credentials_from_env({**WORDS, name: f"{WORDS[name]}\n"})
    assert WORDS[name] not in str(caught.value)
