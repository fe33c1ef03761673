"""Large bodies over our own sockets: servers that behave oddly, and who is left to boto3."""

from __future__ import annotations

import contextlib
import gc
import hashlib
import socket
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.config import Config

from cwtrain.errors import ConnectionFailedError, CWTrainError, StorageAccessError, StorageError, TransportError
from cwtrain.storage import Location, S3Store, s3_client, upload_objects
from cwtrain.storage._buffers import SendingStopped
from cwtrain.storage._connection import Connection
from cwtrain.storage._wire import OwnSending
from cwtrain.storage.upload import PartSizes
from helpers.requirements import require
from helpers.s3_servers import certificate
from helpers.scripted_s3 import LOST, Answer, Request, ScriptedS3, scripted_s3
from helpers.upload_files import contents, noise, sha256, write

BUCKET = "weights"
HERE = Location(BUCKET, "rl")
SIZES = PartSizes(multipart_above_bytes=3 << 20, part_bytes=2 << 20)
ONCE = Config(retries={"total_max_attempts": 1}, read_timeout=5, connect_timeout=5)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)


class Blocks:
    """A body of our kind."""

    def __init__(self, data: bytes, block: int = 1 << 16, fail_at: int | None = None) -> None:
        self.data, self.block, self.fail_at, self.taken, self.position = data, block, fail_at, 0, 0

    def __len__(self) -> int:
        return len(self.data)

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = 0) -> int:
        self.position = offset + {0: 0, 1: self.position, 2: len(self.data)}[whence]
        return self.position

    def read(self, size: int = -1) -> bytes:
        piece = self.data[self.position :] if size < 0 else self.data[self.position : self.position + size]
        self.position += len(piece)
        return piece

    def blocks(self) -> Iterator[memoryview]:
        for begin in range(0, len(self.data), self.block):
            if self.fail_at is not None and begin >= self.fail_at:
                raise SendingStopped(StorageError("the file changed"))
            self.taken += 1
            yield memoryview(self.data)[begin : begin + self.block]


def sending(client: Any) -> OwnSending:
    session = client._endpoint.http_session
    assert isinstance(session, OwnSending)
    return session


def objects() -> dict[str, bytes]:
    return {"model-00001-of-00001.safetensors": noise(1, 5 << 20), "tokenizer.json": noise(2, 300_000), **contents(0)}


def upload(store: S3Store, tmp_path: Path, data: dict[str, bytes]) -> Any:
    return upload_objects(
        write(tmp_path / "ckpt", data),
        store=store,
        location=HERE,
        identity="v1",
        sizes=SIZES,
        record_directory=str(tmp_path / "record"),
    )


def stored(server: ScriptedS3) -> dict[str, bytes]:
    prefix = HERE.prefix("v1")
    return {key.removeprefix(prefix): body for key, (body, _) in server.objects.items() if key.startswith(prefix)}


# ---- what goes which way


def test_files_and_parts_go_over_our_sockets(tmp_path: Path) -> None:
    with scripted_s3(ScriptedS3()) as server:
        client = s3_client(server.url)
        report = upload(S3Store(client, BUCKET), tmp_path, objects())
        assert stored(server) == objects()
        assert sending(client).sent == 3 + 3, "three parts, and the small files"
        assert len(report.uploaded) == 4
        client.close()
        assert not any(sending(client)._idle.values())


@pytest.mark.parametrize("how", ["foreign client", "switched off", "proxy", "client certificate"])
def test_what_is_left_to_boto3(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with scripted_s3(ScriptedS3()) as server, scripted_s3(ScriptedS3()) as nowhere:
        if how == "switched off":
            monkeypatch.setenv("CWTRAIN_S3_OWN_SENDING", "0")
        # A proxy is asked with the whole URL: the server takes that as it comes, so it stands in for one.
        extra = {"proxy": Config(proxies={"http": server.url}), "client certificate": Config(client_cert="/x.pem")}
        at = nowhere.url if "proxy" in how else server.url
        if how == "foreign client":
            client: Any = boto3.Session().client("s3", endpoint_url=at, region_name="US-EAST-04A")
        else:
            client = s3_client(at, config=extra.get(how))
        body = Blocks(noise(1, 200_000))
        S3Store(client, BUCKET).put("x", body)
        assert body.taken == 0
        assert server.objects or "proxy" in how
        assert not nowhere.objects
        assert server.count("PutObject") == 1


def test_a_store_on_loopback_is_never_asked_through_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B10: a site's proxy variables must not break what runs on loopback; for real stores they count."""
    with scripted_s3(ScriptedS3()) as server, scripted_s3(ScriptedS3()) as proxy:
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        upload(S3Store(s3_client(server.url), BUCKET), tmp_path, objects())
        assert stored(server) == objects()
        assert not proxy.objects
        assert s3_client("https://cwobject.com").meta.config.proxies is None, "botocore then asks the environment"


def test_a_proxy_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """B10: the error says that a proxy was used and what to do about it."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    client = s3_client("http://store.invalid", config=Config(retries={"total_max_attempts": 1}))
    with pytest.raises(ConnectionFailedError, match="the proxy of the environment does not answer") as caught:
        S3Store(client, BUCKET).head("x")
    assert "NO_PROXY" in str(caught.value.hint)


def test_headers_of_event_handlers_are_sent(tmp_path: Path) -> None:
    """Server-side encryption and the like, added by a hook, is no reason to send otherwise."""
    with scripted_s3(ScriptedS3()) as server:
        client: Any = s3_client(server.url)
        seen: list[str] = []

        def encrypt(params: dict[str, Any], **_: Any) -> None:
            params["ServerSideEncryption"] = "AES256"

        client.meta.events.register("before-parameter-build.s3.PutObject", encrypt)
        client.meta.events.register("before-send.s3.PutObject", lambda request, **_: seen.append(request.url))
        S3Store(client, BUCKET).put("x", Blocks(noise(1, 200_000)))
        (request,) = server.requests
        assert request.headers["x-amz-server-side-encryption"] == "AES256"
        assert seen == [f"{server.url}/{BUCKET}/x"]
        assert sending(client).sent == 1


def test_a_handler_that_answers_itself_is_believed() -> None:
    """As libraries do that stand in for a store: nothing goes out then."""
    from botocore.awsrequest import AWSResponse

    client: Any = s3_client("http://127.0.0.1:9")
    client.meta.events.register("before-send.s3", lambda request, **_: AWSResponse(request.url, 200, {}, None))
    client.meta.events.register("before-send.s3", lambda request, **_: None)
    body = Blocks(noise(1, 200_000))
    with contextlib.suppress(CWTrainError, AttributeError):
        S3Store(client, BUCKET).put("x", body)
    assert body.taken == 0
    assert sending(client).sent == 0


# ---- signatures


@pytest.fixture(scope="module")
def crt_and_key(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    require("openssl")
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("always", [False, True])
def test_what_is_signed(
    tmp_path: Path, scheme: str, always: bool, crt_and_key: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over http a whole file is signed over its SHA-256, parts are not; everything on demand."""
    monkeypatch.setenv("AWS_CA_BUNDLE", str(crt_and_key[0]))
    if always:
        monkeypatch.setenv("CWTRAIN_S3_SIGN_PAYLOAD", "1")
    tls = None
    if scheme == "https":
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(*crt_and_key)
    with scripted_s3(ScriptedS3(), tls) as server:
        client = s3_client(server.url)
        upload(S3Store(client, BUCKET), tmp_path, objects())
        assert stored(server) == objects()
        assert sending(client).sent == 3 + len(objects()) - 1
        for request in server.requests:
            said = request.headers["x-amz-content-sha256"]
            name = request.key.removeprefix(HERE.prefix("v1"))
            if request.operation == "PutObject" and name in objects():
                whole = scheme == "http" or always
                assert said == (sha256(objects()[name]) if whole else "UNSIGNED-PAYLOAD"), name
            elif request.operation == "UploadPart":
                assert (said == "UNSIGNED-PAYLOAD") != always


def test_an_unknown_certificate(crt_and_key: tuple[Path, Path]) -> None:
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*crt_and_key)
    with scripted_s3(ScriptedS3(), tls) as server:
        with pytest.raises(TransportError, match="TLS failed"):
            S3Store(s3_client(server.url, config=ONCE), BUCKET).put("x", Blocks(b"x" * 100_000))
        S3Store(s3_client(server.url, verify=False, config=ONCE), BUCKET).put("x", Blocks(b"x" * 100_000))
        assert server.objects["x"][0] == b"x" * 100_000


# ---- credentials


def credentials_file(path: Path, key: str) -> None:
    path.write_text(
        f"[default]\naws_access_key_id = {key}\naws_secret_access_key = s{key}\naws_session_token = t{key}\n"
    )


@pytest.mark.parametrize("renewed", [True, False])
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken"])
def test_credentials_that_expire_in_the_middle(
    tmp_path: Path, renewed: bool, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B19: the store refuses from the fifth write on; with new keys on disk the upload goes on."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    keys = tmp_path / "credentials"
    credentials_file(keys, "OLD")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(keys))
    writes = 0

    def refuse(request: Request, _: int) -> Answer | None:
        nonlocal writes
        writes += request.operation in ("PutObject", "UploadPart")
        if writes == 4 and renewed:
            credentials_file(keys, "NEW")
        return Answer(403, code) if writes >= 5 and "/OLD/" in f"/{_key_of(request)}/" else None

    with scripted_s3(ScriptedS3(script=refuse)) as server:
        store = S3Store(s3_client(server.url), BUCKET)
        if not renewed:
            with pytest.raises(StorageAccessError, match="shared-credentials-file") as refused:
                upload(store, tmp_path, objects())
            assert "sOLD" not in str(refused.value)
            assert ("have expired" in str(refused.value)) == (code == "ExpiredToken")
            return
        upload(store, tmp_path, objects())
        assert stored(server) == objects()
        used = {_key_of(request) for request in server.requests}
        assert used == {"OLD", "NEW"}
        assert {request.headers["x-amz-security-token"] for request in server.requests} == {"tOLD", "tNEW"}


@pytest.mark.parametrize(
    ("status", "code", "said"),
    [
        (403, "ExpiredToken", "have expired"),
        (403, "InvalidAccessKeyId", "does not accept the credentials"),
        (403, "SignatureDoesNotMatch", "does not accept the signature"),
        (403, "RequestTimeTooSkewed", "RequestTimeTooSkewed"),
        (403, "AccessDenied", "s3:GetObject is refused"),
        (400, "AuthorizationHeaderMalformed", "does not accept the region"),
    ],
)
def test_why_an_object_may_not_be_looked_at_is_said(status: int, code: str, said: str) -> None:
    """The refusal of a HEAD has no body: it looks the same whatever the reason."""
    state = ScriptedS3(script=lambda request, _: Answer(status, code))
    with scripted_s3(state) as server:
        store = S3Store(s3_client(server.url, aws_access_key_id="a", aws_secret_access_key="b"), BUCKET)
        with pytest.raises(StorageError, match=said) as refused:
            store.head("x")
        assert code in str(refused.value)


def test_a_look_that_is_refused_for_no_reason_stays_refused() -> None:
    """Where only HEAD is refused, what a GET says changes nothing."""
    state = ScriptedS3(script=lambda request, _: Answer(403) if request.operation == "HeadObject" else None)
    with scripted_s3(state) as server:
        store = S3Store(s3_client(server.url, aws_access_key_id="a", aws_secret_access_key="b"), BUCKET)
        store.put("x", Blocks(b"x"))
        for key in ("x", "absent"):
            with pytest.raises(StorageAccessError, match="s3:GetObject is refused"):
                store.head(key)


def test_keys_in_the_program_are_the_program_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "other")
    state = ScriptedS3(script=lambda request, _: Answer(403, "ExpiredToken"))
    with scripted_s3(state) as server:
        store = S3Store(s3_client(server.url, aws_access_key_id="a", aws_secret_access_key="b"), BUCKET)
        with pytest.raises(StorageAccessError, match="explicit"):
            store.put("x", Blocks(b"x"))
        assert {_key_of(request) for request in server.requests} == {"a"}


def test_credentials_that_refresh_are_asked_at_every_request(tmp_path: Path) -> None:
    """B19: a provider's credentials with an end are renewed by botocore, also between two parts."""
    import datetime as dt

    import botocore.session
    from botocore.credentials import RefreshableCredentials

    made = 0

    def fetch() -> dict[str, str]:
        nonlocal made
        made += 1
        soon = dt.datetime.now(dt.UTC) + dt.timedelta(seconds=1)  # so close that each request asks again
        return {"access_key": f"K{made}", "secret_key": "s", "token": "t", "expiry_time": soon.isoformat()}

    core = botocore.session.Session()
    core._credentials = RefreshableCredentials.create_from_metadata(fetch(), refresh_using=fetch, method="test")
    with scripted_s3(ScriptedS3()) as server:
        client = s3_client(server.url, session=boto3.Session(botocore_session=core))
        upload(S3Store(client, BUCKET), tmp_path, objects())
        assert stored(server) == objects()
        assert len({_key_of(request) for request in server.requests if request.operation == "UploadPart"}) == 3


def _key_of(request: Request) -> str:
    return request.headers["authorization"].partition("Credential=")[2].partition("/")[0]


# ---- retries


def test_a_repeated_request_is_signed_anew_and_sent_whole(tmp_path: Path) -> None:
    def trouble(request: Request, before: int) -> Answer | str | None:
        if request.operation in ("UploadPart", "PutObject"):
            return [Answer(503, "SlowDown"), None, LOST, None, Answer(500, "InternalError"), None][before % 6]
        return None

    with scripted_s3(ScriptedS3(script=trouble)) as server:
        upload(S3Store(s3_client(server.url), BUCKET), tmp_path, objects())
        assert stored(server) == objects()
        assert server.uploads == {}


# ---- servers that behave oddly


@contextlib.contextmanager
def raw_server(*conversations: Callable[[socket.socket], None]) -> Iterator[str]:
    """Answer the n-th connection with the n-th conversation, the last one for all that follow."""
    listener = socket.create_server(("127.0.0.1", 0))
    errors: list[BaseException] = []

    def serve() -> None:
        number = 0
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            sock.settimeout(20)
            with sock:
                try:
                    conversations[min(number, len(conversations) - 1)](sock)
                except (OSError, EOFError):
                    pass
                except BaseException as error:
                    errors.append(error)
            number += 1

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(20)
    assert not errors


def head_of(sock: socket.socket) -> dict[str, str]:
    data = b""
    while b"\r\n\r\n" not in data:
        block = sock.recv(1)
        if not block:
            raise EOFError
        data += block
    lines = data.decode().split("\r\n")[1:]
    return {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


def body_of(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        block = sock.recv(size - len(data))
        if not block:
            raise EOFError
        data += block
    return data


OK = b'HTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n'


def put(url: str, body: Blocks, *, config: Config = ONCE) -> str:
    client: Any = s3_client(url, config=config)
    try:
        return S3Store(client, BUCKET).upload_part("x", "upload", 1, body)
    finally:
        client.close()


def test_no_word_about_the_expectation_is_no_trouble() -> None:
    """After a second of silence the body is sent; the server is not asked again."""
    heads = []

    def talk(sock: socket.socket) -> None:
        while True:
            heads.append(head_of(sock))
            body_of(sock, int(heads[-1]["content-length"]))
            sock.sendall(OK)

    with raw_server(talk) as url:
        client: Any = s3_client(url, config=ONCE)
        store = S3Store(client, BUCKET)
        for _ in range(2):
            assert store.upload_part("x", "u", 1, Blocks(noise(1, 300_000))) == '"e"'
        client.close()
    assert ["expect" in head for head in heads] == [True, False]


def test_a_late_leave_to_go_on() -> None:
    def talk(sock: socket.socket) -> None:
        size = int(head_of(sock)["content-length"])
        body_of(sock, 100_000)
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body_of(sock, size - 100_000)
        sock.sendall(OK)

    with raw_server(talk) as url:
        assert put(url, Blocks(noise(1, 30 << 20))) == '"e"'


def error_answer(status: int, code: str) -> bytes:
    body = f"<Error><Code>{code}</Code></Error>".encode()
    return f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


def test_a_refusal_before_the_body_spares_it() -> None:
    def talk(sock: socket.socket) -> None:
        head_of(sock)
        sock.sendall(error_answer(403, "AccessDenied"))
        assert not sock.recv(1), "the connection is not used for anything else"

    body = Blocks(noise(1, 300_000))
    with raw_server(talk) as url, pytest.raises(StorageAccessError, match="AccessDenied"):
        put(url, body)
    assert body.taken == 0


def test_a_refusal_in_the_middle_is_read() -> None:
    """A store that has enough answers and hangs up: what it said counts, not the broken pipe."""

    def talk(sock: socket.socket) -> None:
        head_of(sock)
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        body_of(sock, 1 << 20)
        sock.sendall(error_answer(400, "EntityTooLarge"))
        with contextlib.suppress(OSError):
            while sock.recv(1 << 16):
                pass

    body = Blocks(noise(1, 64 << 20), block=1 << 20)
    with raw_server(talk) as url, pytest.raises(StorageError, match="EntityTooLarge"):
        put(url, body)
    assert body.taken < 64


@pytest.mark.parametrize(
    "answer",
    [
        b'HTTP/1.1 200 OK\r\nETag: "e"\r\nTransfer-Encoding: chunked\r\n\r\n4;x=y\r\n<R/>\r\n0\r\nTrailer: x\r\n\r\n',
        b'HTTP/1.1 200 OK\r\nETag: "e"\r\n\r\n<R>until the end</R>',
        b'HTTP/1.0 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n',
        b'HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 200 OK\r\nETag: "e"\r\nContent-Length: 0\r\n\r\n',
        b'HTTP/1.1 200 OK\r\nETag:"e"\r\nConnection: close\r\nContent-Length: 4\r\n\r\n<R/>',
    ],
    ids=["chunks", "until the end", "HTTP/1.0", "interim answer", "close"],
)
def test_answers_of_all_kinds(answer: bytes) -> None:
    def talk(sock: socket.socket) -> None:
        body_of(sock, int(head_of(sock)["content-length"]))
        for begin in range(0, len(answer), 7):
            sock.sendall(answer[begin : begin + 7])

    with raw_server(talk) as url:
        assert put(url, Blocks(noise(1, 1000))) == '"e"'


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nab",
        b"SSH-2.0-OpenSSH_9\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X-Long: " + b"y" * (300 << 10),
    ],
    ids=["nothing", "cut", "no HTTP", "bad length", "bad chunk", "endless head"],
)
def test_answers_that_are_none(answer: bytes) -> None:
    def talk(sock: socket.socket) -> None:
        body_of(sock, int(head_of(sock)["content-length"]))
        sock.sendall(answer)

    with raw_server(talk) as url, pytest.raises(TransportError):
        put(url, Blocks(noise(1, 1000)))


def test_a_connection_that_was_closed_meanwhile_is_not_used() -> None:
    """A server that closes idle connections costs no attempt."""

    def once(sock: socket.socket) -> None:
        body_of(sock, int(head_of(sock)["content-length"]))
        sock.sendall(OK)

    with raw_server(once) as url:
        client: Any = s3_client(url, config=ONCE)
        store = S3Store(client, BUCKET)
        for _ in range(3):
            assert store.upload_part("x", "u", 1, Blocks(noise(1, 1000))) == '"e"'
            (line,) = sending(client)._idle.values()
            while line and line[0].usable():  # until its end has arrived
                pass
        client.close()


@pytest.mark.parametrize("before", [False, True])
def test_a_client_that_nobody_closes_leaves_no_socket(before: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client is a cycle: its connections are closed before the collector comes to their sockets, in any order."""
    warned: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda said: warned.append(said.exc_value))
    client: Any = s3_client("http://127.0.0.1:9")
    gc.collect()
    gc.disable()
    try:
        ours, other = socket.socketpair()
        own = OwnSending(sending(client).theirs, connect_timeout=1, read_timeout=1)
        own._put_back(("http", "127.0.0.1", 9), Connection(ours), True)
        around: list[Any] = [own]
        around.append(around)
        own.around = around  # type: ignore[attr-defined]
        if before:  # which leaves the objects in another order
            gc.collect()
        del own, around, ours
        gc.collect()
    finally:
        gc.enable()
    assert warned == []
    assert other.recv(1) == b""
    other.close()


def test_a_server_that_says_nothing() -> None:
    gate = threading.Event()

    def talk(sock: socket.socket) -> None:
        gate.wait(20)

    config = Config(retries={"total_max_attempts": 1}, read_timeout=0.2, connect_timeout=5)
    with raw_server(talk) as url:
        with pytest.raises(TransportError, match="no answer in time"):
            put(url, Blocks(noise(1, 1000)), config=config)
        gate.set()


def test_a_body_that_stops_closes_the_connection() -> None:
    received: list[int] = []

    def talk(sock: socket.socket) -> None:
        head_of(sock)
        sock.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        count = 0
        while block := sock.recv(1 << 16):
            count += len(block)
        received.append(count)

    with raw_server(talk) as url, pytest.raises(SendingStopped):
        put(url, Blocks(noise(1, 1 << 20), fail_at=500_000))
    assert received[0] < 1 << 20


def test_a_body_of_another_length_is_found_out() -> None:
    class Short(Blocks):
        def __len__(self) -> int:
            return len(self.data) + 1

    def talk(sock: socket.socket) -> None:
        body_of(sock, int(head_of(sock)["content-length"]))
        sock.sendall(OK)

    with raw_server(talk) as url, pytest.raises(TransportError):
        put(url, Short(noise(1, 1000)))


def test_a_store_that_checks_what_was_signed_refuses_other_bytes() -> None:
    """Over http a single PUT is signed over its SHA-256, so a byte that is changed on the way is refused."""

    class Lying(Blocks):
        sha256 = hashlib.sha256(b"other").hexdigest()

    with scripted_s3(ScriptedS3()) as server:
        with pytest.raises(StorageError, match="XAmzContentSHA256Mismatch"):
            S3Store(s3_client(server.url, config=ONCE), BUCKET).put("x", Lying(noise(1, 100_000)))
        assert server.objects == {}
