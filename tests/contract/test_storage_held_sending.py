"""Held files over our own sockets: sent by the kernel over http, read over https, signed over their SHA-256 by both."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from botocore.config import Config

from cwtrain.errors import SnapshotChangedError, SnapshotError, StorageError, TransportError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage import Location, S3Store, s3_client, upload_objects
from cwtrain.storage._source import Source
from cwtrain.storage.upload import PartSizes
from helpers.requirements import require
from helpers.s3_servers import certificate
from helpers.scripted_s3 import LOST, Request, ScriptedS3, scripted_s3
from helpers.upload_files import contents, noise, sha256, write

BUCKET = "weights"
HERE = Location(BUCKET, "rl")
SIZES = PartSizes(multipart_above_bytes=3 << 20, part_bytes=2 << 20)
BIG, SMALL = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def sendfile(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many bytes the kernel was asked to send, at each call."""
    asked: list[int] = []
    real = os.sendfile

    def counting(out: int, fd: int, offset: int, count: int) -> int:
        asked.append(count)
        return real(out, fd, offset, count)

    monkeypatch.setattr(os, "sendfile", counting)
    return asked


def objects() -> dict[str, bytes]:
    return {BIG: noise(1, 5 << 20), SMALL: noise(2, (2 << 20) + 13), **contents(0)}


def held(directory: Path) -> list[SnapshotFile]:
    files = write(directory, objects())
    return [attrs.evolve(file, held=file.name in (BIG, SMALL)) for file in files]


def upload(url: str, files: list[SnapshotFile], directory: Path, **more: Any) -> None:
    client = s3_client(url, **more)
    try:
        upload_objects(
            files,
            store=S3Store(client, BUCKET),
            location=HERE,
            identity="v1",
            sizes=SIZES,
            workers=1,
            record_directory=str(directory),
        )
    finally:
        client.close()


def stored(server: ScriptedS3) -> dict[str, bytes]:
    prefix = HERE.prefix("v1")
    return {key.removeprefix(prefix): body for key, (body, _) in server.objects.items() if key.startswith(prefix)}


@pytest.fixture(scope="module")
def crt_and_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    require("openssl")
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_they_arrive_whole_and_signed(
    tmp_path: Path,
    scheme: str,
    crt_and_key: tuple[Path, Path],
    sendfile: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_CA_BUNDLE", str(crt_and_key[0]))
    tls = None
    if scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*crt_and_key)
    with scripted_s3(ScriptedS3(), tls) as server:
        upload(server.url, held(tmp_path / "c"), tmp_path)
        assert stored(server) == objects()
        assert bool(sendfile) == (scheme == "http")
        assert max(sendfile, default=0) <= 1 << 20, "in blocks: progress is told, and an upload can be stopped"
        (put,) = [one for one in server.requests if one.operation == "PutObject" and one.key.endswith(SMALL)]
        assert put.headers["x-amz-content-sha256"] == sha256(objects()[SMALL]), "the store compares, over https too"


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_that_cannot_is_read(tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "sendfile", refuse)
    with scripted_s3(ScriptedS3()) as server:
        upload(server.url, held(tmp_path / "c"), tmp_path)
        assert stored(server) == objects()


@pytest.mark.parametrize("cannot", [True, False], ids=["read", "sendfile"])
def test_a_disk_that_fails_is_told_as_that_and_at_once(
    tmp_path: Path, cannot: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is no trouble of the line: nothing is sent again, and a publisher does not wait for it to pass."""
    asked: list[int] = []

    def broken(*_: int) -> int:
        asked.append(1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def refuse(*_: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "sendfile", refuse if cannot else broken)
    with scripted_s3(ScriptedS3()) as server:
        files = [file for file in held(tmp_path / "c") if file.name != BIG]
        if cannot:
            monkeypatch.setattr(os, "pread", broken)
        with pytest.raises(SnapshotError, match=f"{SMALL} cannot be read: Input/output error"):
            upload(server.url, files, tmp_path)
        assert asked == [1]
        assert stored(server) == {}


def test_a_part_whose_answer_was_lost_is_sent_again(tmp_path: Path) -> None:
    lost: list[Request] = []

    def script(request: Request, before: int) -> str | None:
        if request.operation == "UploadPart" and not lost:
            lost.append(request)
            return LOST
        return None

    with scripted_s3(ScriptedS3(script)) as server:
        upload(server.url, held(tmp_path / "c"), tmp_path)
        assert lost
        assert stored(server) == objects()


def test_a_file_that_is_cut_while_the_kernel_sends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B21: what was hashed is not there any more: an error, and no index."""
    files = held(tmp_path / "c")
    real = os.sendfile

    def cutting(out: int, fd: int, offset: int, count: int) -> int:
        if offset >= 1 << 20:
            os.truncate(tmp_path / "c" / SMALL, 1 << 20)
            os.truncate(tmp_path / "c" / BIG, 1 << 20)
        return real(out, fd, offset, count)

    monkeypatch.setattr(os, "sendfile", cutting)
    with scripted_s3(ScriptedS3()) as server:
        with pytest.raises(SnapshotChangedError, match="changed after it was inspected"):
            upload(server.url, files, tmp_path)
        assert stored(server) == {}
        assert not server.uploads


def test_bytes_that_change_unseen_are_refused_by_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a disk gave other bytes the second time: no time shows it, the signature does."""
    files = [file for file in held(tmp_path / "c") if file.name != BIG]
    (tmp_path / "other").write_bytes(noise(3, 3 << 20))
    other = os.open(tmp_path / "other", os.O_RDONLY)
    real = os.sendfile
    monkeypatch.setattr(os, "sendfile", lambda out, fd, offset, count: real(out, other, offset, count))
    with scripted_s3(ScriptedS3()) as server:
        with pytest.raises(StorageError, match="XAmzContentSHA256Mismatch"):
            upload(server.url, files, tmp_path)
        assert stored(server) == {}
    os.close(other)


def test_a_server_that_takes_no_more(tmp_path: Path) -> None:
    gate = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.recv(1 << 16)
            sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            gate.wait(20)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    (file,) = write(tmp_path / "c", {BIG: noise(1, 32 << 20)})
    source = Source(attrs.evolve(file, held=True), part_bytes=32 << 20, stopped=threading.Event())
    source.learn()
    config = Config(retries={"total_max_attempts": 1}, read_timeout=0.3, connect_timeout=5)
    client = s3_client(f"http://127.0.0.1:{listener.getsockname()[1]}", config=config)
    with pytest.raises(TransportError, match="no answer in time"), source.body(0, on_bytes=lambda _: None) as body:
        S3Store(client, BUCKET).put("x", body)
    gate.set()
    thread.join(20)
    source.close()
    client.close()
    listener.close()
