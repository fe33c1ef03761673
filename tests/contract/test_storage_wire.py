"""What real servers do not show: bodies kept with their framing, lost answers, refusals at a chosen request."""

from __future__ import annotations

import os
import ssl
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from cwtrain.errors import (
    SnapshotChangedError,
    StorageAccessError,
    StorageError,
    StorageRegionError,
    TransportError,
)
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.storage import Location, S3Store, s3_client, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.requirements import require
from helpers.s3_servers import certificate
from helpers.scripted_s3 import LOST, Answer, Request, Script, ScriptedS3, scripted_s3
from helpers.upload_files import contents, noise, sha256, write

BUCKET = "weights"
ZONE = "US-EAST-04A"
HERE = Location(BUCKET, "rl")
SIZES = PartSizes(multipart_above_bytes=3 << 20, part_bytes=2 << 20)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", ZONE)


@pytest.fixture(scope="module")
def crt_and_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    require("openssl")
    return certificate(tmp_path_factory.mktemp("tls"))


def store_at(server: ScriptedS3, **config: Any) -> S3Store:
    return S3Store(s3_client(server.url, config=Config(**config)), BUCKET)


def objects() -> dict[str, bytes]:
    return {"model-00001-of-00001.safetensors": noise(1, 5 << 20), **contents(0)}


def upload(server: ScriptedS3, tmp_path: Path, data: dict[str, bytes], **more: Any) -> Any:
    store = more.pop("store", None) or store_at(server)
    files = more.pop("files", None) or write(tmp_path / "ckpt", data)
    return upload_objects(
        files,
        store=store,
        location=HERE,
        identity="v1",
        sizes=SIZES,
        record_directory=str(tmp_path / "record"),
        **more,
    )


def stored(server: ScriptedS3) -> dict[str, bytes]:
    prefix = HERE.prefix("v1")
    return {key.removeprefix(prefix): body for key, (body, _) in server.objects.items() if key.startswith(prefix)}


# ---- B07


@pytest.mark.parametrize("trouble", ["keeps framing", "refuses framing"])
def test_no_checksum_trailers_over_tls(
    tmp_path: Path, crt_and_key: tuple[Path, Path], trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B07: newer boto3 frames bodies over TLS; some stores keep the frames inside the object, some answer 411."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(crt_and_key[0]))
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*crt_and_key)
    state = ScriptedS3(decode=False, refuse_chunked=trouble == "refuses framing")
    with scripted_s3(state, tls) as server:
        plain = boto3.Session().client("s3", endpoint_url=server.url, region_name=ZONE)
        # The server must show the bug to boto3's defaults, or this test shows nothing.
        if state.refuse_chunked:
            with pytest.raises(plain.exceptions.ClientError, match="MissingContentLength"):
                plain.put_object(Bucket=BUCKET, Key="plain", Body=noise(1, 1000))
        else:
            plain.put_object(Bucket=BUCKET, Key="plain", Body=noise(1, 1000))
            assert server.objects["plain"][0] != noise(1, 1000)

        data = objects() | {"tokenizer.json": noise(2, 1000)}
        data[INDEX_NAME] = data.pop(INDEX_NAME)
        upload(server, tmp_path, data)
        assert stored(server) == data
        own_session = s3_client(server.url, session=boto3.Session())
        own_session.put_object(Bucket=BUCKET, Key="own", Body=noise(1, 1000))
        assert server.objects["own"][0] == noise(1, 1000)


def test_framing_that_was_asked_for_is_found_out(
    tmp_path: Path, crt_and_key: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B07: where the user turned checksums on, what such a store keeps is compared and refused."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(crt_and_key[0]))
    monkeypatch.setenv("AWS_REQUEST_CHECKSUM_CALCULATION", "when_supported")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*crt_and_key)
    with scripted_s3(ScriptedS3(decode=False), tls) as server:
        with pytest.raises(StorageError, match="bytes were sent and the store kept"):
            upload(server, tmp_path, contents(1, 1000), workers=1)
        assert INDEX_NAME not in stored(server)


def test_an_unknown_certificate(crt_and_key: tuple[Path, Path]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*crt_and_key)
    with scripted_s3(ScriptedS3(), tls) as server:
        with pytest.raises(TransportError, match="TLS failed") as refused:
            store_at(server, retries={"total_max_attempts": 1}).head("x")
        assert "AWS_CA_BUNDLE" in (refused.value.hint or "")
        S3Store(s3_client(server.url, verify=str(crt_and_key[0])), BUCKET).put("x", b"")


# ---- B36


def test_a_refused_region_is_named_with_its_source() -> None:
    """B36: the message has the region that was used, where it came from, and the one that the store expects."""

    def refuse(request: Request, _: int) -> Answer | None:
        extra = "<Region>US-WEST-01A</Region>" if request.operation != "HeadBucket" else ""
        return Answer(400, "AuthorizationHeaderMalformed", extra)

    with scripted_s3(ScriptedS3(script=refuse)) as server:
        with pytest.raises(StorageRegionError) as refused:
            list(store_at(server).list_objects(""))
        for part in (ZONE, "AWS_REGION", "US-WEST-01A", f"s3://{BUCKET}"):
            assert part in str(refused.value)
        with pytest.raises(StorageRegionError, match="the store expects 'US-WEST-01A'"):
            store_at(server).head("x")
    silent = ScriptedS3(script=lambda request, _: Answer(400) if request.operation == "HeadObject" else None)
    with scripted_s3(silent) as server, pytest.raises(StorageRegionError, match="without saying why"):
        store_at(server).head("x")


def test_a_refused_signature_names_the_region() -> None:
    """B36: SignatureDoesNotMatch may be the key or the region; both are said."""
    state = ScriptedS3(script=lambda request, _: Answer(403, "SignatureDoesNotMatch"))
    with scripted_s3(state) as server, pytest.raises(StorageAccessError, match=f"region '{ZONE}' from AWS_REGION"):
        store_at(server).get("x")


# ---- lost answers


@pytest.mark.parametrize("operation", ["PutObject", "UploadPart", "CompleteMultipartUpload", "CreateMultipartUpload"])
def test_an_answer_that_is_lost(tmp_path: Path, operation: str) -> None:
    """The store did it and hung up; the repeated request is refused (412, 404), and the object is found to be ours."""

    def lose(request: Request, before: int) -> str | None:
        return LOST if request.operation == operation and before in (0, 3) else None

    with scripted_s3(ScriptedS3(script=lose)) as server:
        report = upload(server, tmp_path, objects(), workers=1)
        assert stored(server) == objects()
        assert report.uploaded == tuple(objects())
        # An upload whose id never arrived cannot be aborted by it: it is found by its age.
        assert len(server.uploads) == (1 if operation == "CreateMultipartUpload" else 0)


def test_slow_down_is_ridden_out(tmp_path: Path) -> None:
    def busy(request: Request, before: int) -> Answer | None:
        return Answer(503, "SlowDown") if request.operation == "UploadPart" and before == 0 else None

    with scripted_s3(ScriptedS3(script=busy)) as server:
        upload(server, tmp_path, objects())
        assert stored(server) == objects()


# ---- B23


def _refuse(operation: str, status: int = 400) -> Script:
    def script(request: Request, before: int) -> Answer | None:
        return Answer(status, "InvalidRequest") if request.operation == operation and before else None

    return script


def test_a_refused_part_leaves_nothing_open(tmp_path: Path) -> None:
    """B23: UploadPart 2 answers 400 for ever, and so does a retry of the whole."""
    files = write(tmp_path / "ckpt", objects())
    with scripted_s3(ScriptedS3(script=_refuse("UploadPart"))) as server:
        for _ in range(2):
            with pytest.raises(StorageError, match="InvalidRequest") as refused:
                upload(server, tmp_path, {}, files=files, workers=1)
            assert refused.value.action == "s3:PutObject"
            assert server.uploads == {}
        assert server.count("AbortMultipartUpload") == 2
        assert INDEX_NAME not in stored(server)


def test_a_refused_abort_is_only_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B23: the user sees why the upload failed, not why cleaning up failed."""

    def script(request: Request, before: int) -> Answer | None:
        if request.operation == "AbortMultipartUpload":
            return Answer(403, "AccessDenied")
        return Answer(400, "InvalidRequest") if request.operation == "UploadPart" else None

    with scripted_s3(ScriptedS3(script=script)) as server:
        with pytest.raises(StorageError, match="InvalidRequest"):
            upload(server, tmp_path, objects())
        (left,) = server.uploads
        assert left in caplog.text
        assert "model-00001-of-00001.safetensors" in caplog.text


# ---- B21 over a socket


@pytest.mark.parametrize("kind", ["same size", "append", "truncate"])
def test_a_file_that_changes_while_it_goes_out(tmp_path: Path, kind: str) -> None:
    """B21: noticed inside the request, which is given up at once instead of being repeated or waited for."""
    path = tmp_path / "ckpt" / "model-00001-of-00001.safetensors"

    def change(**_: Any) -> None:
        if kind == "same size":
            with path.open("r+b") as file:
                file.seek(3 << 20)
                file.write(b"Z" * 1024)
        elif kind == "append":
            with path.open("ab") as file:
                file.write(b"more")
        else:
            os.truncate(path, 1 << 20)

    with scripted_s3(ScriptedS3()) as server:
        client = s3_client(server.url)
        client.meta.events.register("before-send.s3.UploadPart", change)
        with pytest.raises(SnapshotChangedError) as changed:
            upload(server, tmp_path, objects(), store=S3Store(client, BUCKET))
        assert changed.value.file == str(path)
        assert server.uploads == {}
        assert stored(server).keys() <= {"config.json"}


# ---- B40


def test_connections_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B40: 64 workers with multipart: at most one connection each, none thrown away."""
    caplog.set_level("DEBUG", "urllib3")
    data = {f"model-{n:05d}-of-00003.safetensors": noise(n, 7 << 20) for n in range(3)} | contents(0)
    for number in range(40):
        data = {f"extra-{number}.json": b"{}"} | data
    with scripted_s3(ScriptedS3()) as server:
        upload(server, tmp_path, data, workers=64)
        connections = {request.connection for request in server.requests}
        assert len(connections) <= 65
        assert len(server.requests) > len(connections)
        assert "Connection pool is full" not in caplog.text
        assert sha256(stored(server)["model-00000-of-00003.safetensors"]) == sha256(noise(0, 7 << 20))
