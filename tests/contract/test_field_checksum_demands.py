"""The kind: a check that says ok, and a publish that the store then refuses. A bucket that demands checksums.

The check sends what a publish sends; the refusal names the setting; and with the setting every way of sending works.
"""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import StorageError
from cwtrain.storage import Location, MemoryStore, S3Store, check_access, s3_client, upload_objects
from cwtrain.storage.memory import Fault
from cwtrain.storage.upload import PartSizes
from helpers.requirements import require
from helpers.run_cli import run
from helpers.s3_servers import certificate
from helpers.scripted_s3 import Answer, Request, ScriptedS3, aws_session, scripted_s3
from helpers.streamed import TINY, make_state, side_files
from helpers.streamed import write as write_streamed
from helpers.upload_files import contents, noise, write

SETTING = "AWS_REQUEST_CHECKSUM_CALCULATION"
HERE = Location("weights", "rl")
TEXT = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock parameters"


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")


@pytest.fixture(scope="module")
def crt_and_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    require("openssl")
    return certificate(tmp_path_factory.mktemp("tls"))


def demands(request: Request, before: int) -> Answer | None:
    """Refuse what comes without a checksum of its own, in a header or behind the body."""
    if request.operation not in ("PutObject", "UploadPart"):
        return None
    names = {*request.headers, *request.headers.get("x-amz-trailer", "").split(",")}
    if "content-md5" in names or any(name.startswith("x-amz-checksum-") for name in names):
        return None
    return Answer(400, "InvalidRequest", f"<Message>{TEXT}</Message>")


@pytest.mark.parametrize(
    ("way", "what"),
    [
        ("own sockets", "files"),
        ("boto3 sends", "files"),
        ("payloads signed", "files"),
        ("TLS", "files"),
        ("own sockets", "streamed"),
        ("TLS", "streamed"),
    ],
)
def test_with_the_setting_every_way_of_sending_works(
    way: str, what: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, crt_and_key: tuple[Path, Path]
) -> None:
    monkeypatch.setenv(SETTING, "when_supported")
    if way == "boto3 sends":
        monkeypatch.setenv("CWTRAIN_S3_OWN_SENDING", "0")
    if way == "payloads signed":
        monkeypatch.setenv("CWTRAIN_S3_SIGN_PAYLOAD", "1")
    tls = None
    if way == "TLS":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*crt_and_key)
    with scripted_s3(ScriptedS3(script=demands), tls) as server:
        store = S3Store(
            s3_client(server.url, session=aws_session(), verify=str(crt_and_key[0]) if tls else None), "weights"
        )
        assert check_access(store, HERE).ok
        if what == "files":
            data = {"model-00001-of-00001.safetensors": noise(1, 3 << 20), **contents(0)}
            sizes = PartSizes(multipart_above_bytes=2 << 20, part_bytes=1 << 20)
            files = write(tmp_path / "ckpt", data)
            record = str(tmp_path / "record")
            upload_objects(files, store=store, location=HERE, identity="v1", sizes=sizes, record_directory=record)
            assert {key: server.objects[HERE.key("v1", key)][0] for key in data} == data
        else:
            state, beside = make_state(1), side_files(tmp_path / "side")
            write_streamed(store, HERE, "v1", state, kind="full", side_files=beside, sizes=TINY)
            assert server.count("UploadPart") > 1
            assert HERE.key("v1", "model.safetensors.index.json") in server.objects
        store._client.close()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("InvalidRequest", TEXT),
        ("InvalidRequest", "Content-MD5 HTTP header is required for Put Part requests with Object Lock parameters"),
        ("MissingContentMD5", "Missing required header for this request: Content-Md5."),
        ("InvalidArgument", "x-amz-checksum-* headers must be given"),
    ],
)
def test_the_check_meets_the_demand_and_names_the_setting(code: str, message: str) -> None:
    def refuse(request: Request, before: int) -> Answer | None:
        return Answer(400, code, f"<Message>{message}</Message>") if demands(request, before) else None

    with scripted_s3(ScriptedS3(script=refuse)) as server:
        store = S3Store(s3_client(server.url, session=aws_session()), "weights")
        for call in (lambda: check_access(store, HERE), lambda: store.put("a", b"x")):
            with pytest.raises(StorageError, match="demands checksums") as caught:
                call()
            assert f"{SETTING}=when_supported" in str(caught.value.hint)
            assert caught.value.code == code
        assert server.uploads == {}, "what the check began is not left behind"


def test_another_refusal_of_a_body_is_no_demand() -> None:
    said = Answer(400, "BadDigest", "<Message>The Content-MD5 you specified did not match what we received.</Message>")
    with scripted_s3(ScriptedS3(script=lambda request, before: said)) as server:
        with pytest.raises(StorageError) as caught:
            S3Store(s3_client(server.url, session=aws_session()), "weights").put("a", b"x")
        assert SETTING not in str(caught.value.hint)


def test_who_has_set_it_is_not_told_to_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SETTING, "when_supported")
    said = Answer(400, "InvalidRequest", f"<Message>{TEXT}</Message>")
    with (
        scripted_s3(ScriptedS3(script=lambda request, before: said)) as server,
        pytest.raises(StorageError, match="demands checksums") as caught,
    ):
        S3Store(s3_client(server.url, session=aws_session()), "weights").put("a", b"x")
    assert "is set already" in str(caught.value.hint)


def test_a_part_that_may_not_be_written_is_a_permission(tmp_path: Path) -> None:
    store = MemoryStore(faults=[Fault(call="upload_part", error=_denied())])
    report = check_access(store, Location("memory", "rl"))
    assert report.refused == ("s3:PutObject",)
    assert store.uploads == {}


def _denied() -> Exception:
    from cwtrain.errors import StorageAccessError

    return StorageAccessError("no", code="AccessDenied", status=403)


def test_the_command_says_so_before_a_publish_does(emulator: Any, deployment: dict[str, Any], faults: Any) -> None:
    faults.add("store", "checksum_required", caller="trainer")
    check = ["hotload", "check", "--deployment", deployment["spec"]["id"]]
    refused = run(*check, env=emulator.env)
    assert refused.code == 1
    assert f"{SETTING}=when_supported" in refused.err
    fine = run(*check, env={**emulator.env, SETTING: "when_supported"})
    assert fine.code == 0, fine.err
    assert "PUT" in fine.data["not_tried"][0]
