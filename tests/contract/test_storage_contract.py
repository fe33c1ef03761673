"""One suite for the storage layer, against two independent real S3 servers, over http and TLS.

Where Ceph radosgw differs from the store that we are made for, ``CEPH_DIFFERENCES`` says so by name, and the test
expects the difference: if it goes away, the test says that too.
"""

from __future__ import annotations

import io
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import attrs
import pytest
from botocore.config import Config

from cwtrain.errors import (
    ConfigError,
    SnapshotChangedError,
    SnapshotConflictError,
    StorageAccessError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
    TransportError,
)
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.storage import Location, S3Store, check_access, plan_upload, s3_client, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.s3_servers import ADMIN, BUCKET, DOMAIN, OTHER_BUCKET, READER, REGION, TRAINER, S3Server, patched_resolver
from helpers.upload_files import contents, noise, sha256, write

CEPH_DIFFERENCES = {
    "complete_of_gone_upload": "CompleteMultipartUpload of an upload that is gone is answered 500, not 404",
    "complete_ignores_condition": "CompleteMultipartUpload ignores If-None-Match and If-Match and replaces the object",
    "put_refuses_etag": "PutObject takes the ETag that HeadObject gave for another one in If-Match",
}

SIZES = PartSizes(multipart_above_bytes=8 << 20, part_bytes=5 << 20)  # servers refuse smaller parts


@attrs.define(eq=False)
class Reach:
    """A server through one of its endpoints."""

    server: S3Server
    endpoint: str
    own: bool = True
    """Whether large bodies go over our own sockets; else boto3 sends everything."""
    _clients: dict[Any, Any] = attrs.field(factory=dict)

    def client(self, keys: tuple[str, str] = TRAINER, **kwargs: Any) -> Any:
        """A client of the test's own, to register events on."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("CWTRAIN_S3_OWN_SENDING", str(int(self.own)))
            return self.server.client(keys, endpoint=self.endpoint, **kwargs)

    def store(self, bucket: str = BUCKET, keys: tuple[str, str] = TRAINER) -> S3Store:
        """A store on a client that the tests share: making one takes a tenth of a second."""
        if keys not in self._clients:
            self._clients[keys] = self.client(keys)
        return S3Store(self._clients[keys], bucket)

    def differs(self, name: str) -> bool:
        assert name in CEPH_DIFFERENCES
        return self.server.name == "ceph"


def _reach(request: pytest.FixtureRequest) -> Reach:
    name, scheme, *boto3 = request.param.split("-")
    server: S3Server = request.getfixturevalue(f"{name}_server")
    endpoint = server.endpoint if scheme == "http" else server.tls_endpoint
    assert endpoint is not None
    return Reach(server, endpoint, own=not boto3)


@pytest.fixture(params=["seaweedfs-http", "seaweedfs-tls", "ceph-http", "ceph-tls"], scope="session")
def reach(request: pytest.FixtureRequest) -> Reach:
    return _reach(request)


@pytest.fixture(
    params=["seaweedfs-http", "seaweedfs-tls", "ceph-http", "ceph-tls", "seaweedfs-tls-boto3", "ceph-http-boto3"],
    scope="session",
)
def reach_each_way(request: pytest.FixtureRequest) -> Reach:
    """For uploads of files, whose bytes go over our own sockets, or through boto3 where those are switched off."""
    return _reach(request)


@pytest.fixture(params=["seaweedfs-http", "ceph-http"], scope="session")
def reach_http(request: pytest.FixtureRequest) -> Reach:
    """For what takes long and is the same over TLS."""
    return _reach(request)


@pytest.fixture
def location() -> Location:
    return Location(BUCKET, f"rl/{uuid.uuid4().hex[:8]}")


@pytest.fixture
def record(tmp_path: Path) -> str:
    return str(tmp_path / "record")


def everything(store: S3Store, location: Location) -> dict[str, int]:
    return {one.key: one.size_bytes for one in store.list_objects(location.root)}


def count_requests(client: Any) -> list[tuple[str, dict[str, str]]]:
    """Return a list that grows with every request: the operation and its headers."""
    seen: list[tuple[str, dict[str, str]]] = []

    def note(request: Any, event_name: str, **_: Any) -> None:
        seen.append((event_name.rpartition(".")[2], {k.lower(): _text(v) for k, v in request.headers.items()}))

    client.meta.events.register("before-send.s3", note)
    return seen


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


# ---- single calls


def test_objects_keep_bytes_and_metadata(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "a b+c%d.bin")
    data = noise(1, 3_000_000)
    store.put(key, data, metadata={"cwtrain-sha256": sha256(data)})
    info = store.head(key)
    assert info is not None
    assert (info.size_bytes, info.metadata) == (len(data), {"cwtrain-sha256": sha256(data)})
    assert store.get(key) == data
    assert b"".join(store.stream(key, offset=1_500_000, length=10)) == data[1_500_000:1_500_010]
    assert b"".join(store.stream(key, offset=2_999_990)) == data[-10:]
    assert store.head(location.key("v1", "nothing")) is None
    with pytest.raises(StorageNotFoundError):
        store.get(location.key("v1", "nothing"))


def test_empty_objects(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "empty")
    store.put(key, b"", if_absent=True)
    assert store.get(key) == b""


def test_a_second_conditional_put_is_refused(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "x")
    store.put(key, b"first", if_absent=True)
    with pytest.raises(StorageConflictError) as refused:
        store.put(key, b"second", if_absent=True)
    assert refused.value.status == 412
    assert store.get(key) == b"first"


def test_of_many_conditional_puts_one_wins(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "race")
    gate = threading.Barrier(8)

    def attempt(number: int) -> bool:
        gate.wait()
        try:
            store.put(key, str(number).encode(), if_absent=True)
        except StorageConflictError:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(attempt, range(8)))
    assert won.count(True) == 1
    assert store.get(key) == str(won.index(True)).encode()


def test_listing_goes_over_all_pages(reach: Reach, location: Location) -> None:
    client = reach.client()
    client.meta.events.register("before-parameter-build.s3.ListObjectsV2", lambda params, **_: _set(params, MaxKeys=10))
    client.meta.events.register(
        "before-parameter-build.s3.ListMultipartUploads", lambda params, **_: _set(params, MaxUploads=2)
    )
    requests = count_requests(client)
    store = S3Store(client, BUCKET)
    keys = [location.key("many", f"{number:04d}") for number in range(25)]
    for key in keys:
        store.put(key, b"")
    assert [one.key for one in store.list_objects(location.prefix("many"))] == keys
    assert [name for name, _ in requests].count("ListObjectsV2") == 3
    uploads = {store.create_upload(key) for key in keys[:5]}
    assert {one.upload_id for one in store.list_uploads(location.prefix("many"))} == uploads
    for upload in list(store.list_uploads(location.prefix("many"))):
        store.abort_upload(upload.key, upload.upload_id)


def _set(params: dict[str, Any], **values: Any) -> None:
    params.update(values)


def test_multipart(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "big")
    parts = [noise(1, 5 << 20), noise(2, 100)]
    upload_id = store.create_upload(key, metadata={"cwtrain-sha256": "ab"})
    assert [one.upload_id for one in store.list_uploads(key)] == [upload_id]
    etags = [store.upload_part(key, upload_id, number, part) for number, part in enumerate(parts, 1)]
    assert store.head(key) is None
    store.complete_upload(key, upload_id, etags, if_absent=True)
    assert store.get(key) == b"".join(parts)
    info = store.head(key)
    assert info is not None
    assert info.metadata == {"cwtrain-sha256": "ab"}
    assert list(store.list_uploads(key)) == []


def test_completing_over_an_object_is_refused(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "taken")
    upload_id = store.create_upload(key)
    etag = store.upload_part(key, upload_id, 1, b"second")
    store.put(key, b"first")
    if reach.differs("complete_ignores_condition"):
        store.complete_upload(key, upload_id, [etag], if_absent=True)
        assert store.get(key) == b"second"
        return
    with pytest.raises(StorageConflictError):
        store.complete_upload(key, upload_id, [etag], if_absent=True)
    assert store.get(key) == b"first"
    store.abort_upload(key, upload_id)


def test_an_aborted_upload_is_gone(reach: Reach, location: Location) -> None:
    store, key = reach.store(), location.key("v1", "aborted")
    upload_id = store.create_upload(key)
    etag = store.upload_part(key, upload_id, 1, b"bytes")
    store.abort_upload(key, upload_id)
    assert list(store.list_uploads(key)) == []
    with pytest.raises(StorageNotFoundError):
        store.upload_part(key, upload_id, 1, b"bytes")
    with pytest.raises(StorageError) as refused:
        S3Store(reach.client(config=Config(retries={"total_max_attempts": 1})), BUCKET).complete_upload(
            key, upload_id, [etag]
        )
    assert refused.value.status == (500 if reach.differs("complete_of_gone_upload") else 404)


def test_refusals_name_permission_and_place(reach: Reach, location: Location) -> None:
    store, key = reach.store(BUCKET, READER), location.key("v1", "x")
    with pytest.raises(StorageAccessError, match="s3:PutObject") as refused:
        store.put(key, b"x")
    assert (refused.value.action, refused.value.bucket, refused.value.key) == ("s3:PutObject", BUCKET, key)
    assert BUCKET in (refused.value.hint or "")
    with pytest.raises(StorageAccessError, match="s3:ListBucket"):
        list(reach.store(OTHER_BUCKET).list_objects(""))


def test_a_wrong_secret_names_the_region_that_signed(reach: Reach) -> None:
    store = reach.store(BUCKET, (ADMIN[0], "not-the-secret"))
    with pytest.raises(StorageAccessError, match=f"region '{REGION}' from the argument region_name") as refused:
        store.get("x")
    assert "not-the-secret" not in str(refused.value)


def test_an_unknown_key_is_told_from_a_refusal(reach: Reach, location: Location) -> None:
    with pytest.raises(StorageAccessError) as refused:
        check_access(reach.store(BUCKET, ("nobody", "nothing12345")), location)
    assert "credentials" in str(refused.value)


def test_a_missing_bucket_is_named(reach: Reach) -> None:
    store = reach.store("no-such-bucket", ADMIN)
    with pytest.raises(StorageNotFoundError, match="no-such-bucket"):
        list(store.list_objects(""))


# ---- access check


def test_access_check_of_a_trainer_leaves_nothing(reach: Reach, location: Location) -> None:
    report = check_access(reach.store(), location)
    assert (report.ok, report.refused) == (True, ())
    assert [check.action for check in report.checks] == [
        "s3:ListBucket",
        "s3:GetObject",
        "s3:PutObject",
        "s3:AbortMultipartUpload",
        "s3:ListBucketMultipartUploads",
    ]
    assert everything(reach.store(), location) == {}
    assert list(reach.store(BUCKET, ADMIN).list_uploads(location.root)) == []


def test_access_check_of_a_reader_names_what_is_missing(reach: Reach, location: Location) -> None:
    report = check_access(reach.client(READER), location)
    assert report.refused == ("s3:PutObject",)
    with pytest.raises(StorageAccessError, match="s3:PutObject"):
        report.raise_for_refused()


def test_access_check_of_a_stranger_names_everything_at_once(reach: Reach) -> None:
    report = check_access(reach.client(READER), Location(OTHER_BUCKET, "x"))
    assert report.refused[0] == "s3:ListBucket"
    assert "s3:PutObject" in report.refused


# ---- uploads


def snapshot(seed: int = 0) -> dict[str, bytes]:
    big = {"model-00003-of-00003.safetensors": noise(seed + 9, (12 << 20) + 17)}
    small = contents(2, 200_000, seed)
    index = small.pop(INDEX_NAME)
    return small | big | {INDEX_NAME: index}


def test_upload_repeat_and_readback(reach_each_way: Reach, location: Location, tmp_path: Path, record: str) -> None:
    reach = reach_each_way
    objects = snapshot()
    files = write(tmp_path / "ckpt", objects)
    client = reach.client()
    store = S3Store(client, BUCKET)
    requests = count_requests(client)
    seen: list[int] = []
    report = upload_objects(
        files,
        store=store,
        location=location,
        identity="v1",
        sizes=SIZES,
        record_directory=record,
        on_progress=lambda progress: seen.append(progress.sent_bytes),
    )
    assert report.uploaded == tuple(objects)
    assert report.uri == f"s3://{BUCKET}/{location.path_prefix}/v1"
    for name, data in objects.items():
        info = store.head(location.key("v1", name))
        assert info is not None
        assert (info.metadata or {})["cwtrain-sha256"] == sha256(data) == report.digests[name].sha256
        assert store.get(location.key("v1", name)) == data
    assert seen[-1] == report.uploaded_bytes == sum(map(len, objects.values()))
    sent = [headers for name, headers in requests if name in ("PutObject", "UploadPart")]
    assert len(sent) >= 8
    signed = {headers["x-amz-content-sha256"] for headers in sent} - {"UNSIGNED-PAYLOAD"}
    whole = {sha256(data) for data in objects.values() if len(data) <= SIZES.multipart_above_bytes}
    assert signed == (whole if reach.endpoint.startswith("http:") else set()), "parts are not signed"
    assert (client._endpoint.http_session.sent if reach.own else 0) == (len(objects) + 2 if reach.own else 0)
    assert not any("trailer" in name or "checksum" in name for headers in sent for name in headers)
    writes = [name for name, _ in requests if name in ("PutObject", "CompleteMultipartUpload")]
    assert writes[:2] == ["PutObject", "PutObject"], "the claim, and the probe of its condition, come first"

    requests.clear()
    again = upload_objects(files, store=store, location=location, identity="v1", sizes=SIZES, record_directory=record)
    assert (again.uploaded, again.reused, again.uploaded_bytes) == ((), tuple(objects), 0)
    assert {name for name, _ in requests} == {"ListObjectsV2", "HeadObject"}


def test_signed_payloads_on_demand(
    reach_each_way: Reach, location: Location, tmp_path: Path, record: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reach = reach_each_way
    monkeypatch.setenv("CWTRAIN_S3_SIGN_PAYLOAD", "1")
    client = reach.client()
    requests = count_requests(client)
    objects = snapshot(5)
    store = S3Store(client, BUCKET)
    report = upload_objects(
        write(tmp_path / "ckpt", objects),
        store=store,
        location=location,
        identity="v1",
        sizes=SIZES,
        record_directory=record,
    )
    assert len(report.uploaded) == len(objects)
    hashes = {h["x-amz-content-sha256"] for name, h in requests if name in ("PutObject", "UploadPart")}
    assert "UNSIGNED-PAYLOAD" not in hashes
    assert all(store.get(location.key("v1", name)) == data for name, data in objects.items())


def test_a_partial_upload_is_completed(reach: Reach, location: Location, tmp_path: Path, record: str) -> None:
    objects = snapshot(20)
    files = write(tmp_path / "ckpt", objects)
    store = reach.store()
    names = list(objects)
    for name in names[:2]:
        store.put(location.key("v1", name), objects[name], metadata={"cwtrain-sha256": sha256(objects[name])})
    store.put(location.prefix("v1"), b"")  # a folder marker
    plan = plan_upload(files, store=store, location=location, identity="v1")
    assert (plan.existing, plan.missing, plan.conflicts) == (tuple(names[:2]), tuple(names[2:]), ())
    report = upload_objects(files, store=store, location=location, identity="v1", sizes=SIZES, record_directory=record)
    assert (report.reused, report.uploaded) == (tuple(names[:2]), tuple(names[2:]))


def hang_up_before_the_body(reach: Reach, key: str, metadata: dict[str, str], size_bytes: int) -> None:
    """Ask to write an object, get leave to send its bytes, and be gone."""
    signed = urlsplit(
        reach.client().generate_presigned_url(
            "put_object", Params={"Bucket": BUCKET, "Key": key, "Metadata": metadata}, HttpMethod="PUT"
        )
    )
    plain = socket.create_connection((signed.hostname, signed.port), 10)
    if signed.scheme == "https":
        plain = ssl.create_default_context(cafile=reach.server.ca_bundle).wrap_socket(
            plain, server_hostname=signed.hostname
        )
    with plain:
        said = "".join(f"x-amz-meta-{name}: {value}\r\n" for name, value in metadata.items())
        plain.sendall(
            f"PUT {signed.path}?{signed.query} HTTP/1.1\r\nHost: {signed.netloc}\r\n{said}"
            f"Content-Length: {size_bytes}\r\nExpect: 100-continue\r\n\r\n".encode()
        )
        assert plain.recv(100).startswith(b"HTTP/1.1 100"), "the server asks for the body"


def test_an_object_that_never_got_its_bytes_is_brought(
    reach: Reach, location: Location, tmp_path: Path, record: str
) -> None:
    """Killed between the head and the body of a PUT: SeaweedFS keeps an empty object, Ceph none. A repeat completes."""
    objects = contents(2, 300_000)
    files, store = write(tmp_path / "c", objects), reach.store()
    given: dict[str, Any] = {"store": store, "location": location, "identity": "v1", "record_directory": record}

    def stop(_: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        upload_objects(files, before_index=stop, **given)
    torn = files[1]
    key = location.key("v1", torn.name)
    hang_up_before_the_body(reach, key, {"cwtrain-sha256": sha256(objects[torn.name])}, torn.size_bytes)
    if reach.server.name == "seaweedfs":
        until_empty(store, key)
    upload_objects(files, **given)
    assert {name: store.get(location.key("v1", name)) for name in objects} == objects


def until_empty(store: S3Store, key: str) -> None:
    deadline = time.monotonic() + 20
    while store.get(key):
        assert time.monotonic() < deadline, "SeaweedFS keeps no empty object any more: say so in plan.stand"
        time.sleep(0.02)


@pytest.mark.parametrize("call", ["put", "complete_upload"])
def test_only_the_object_that_was_seen_is_replaced(reach: Reach, location: Location, call: str) -> None:
    store, key = reach.store(), location.key("v1", "x")

    def replace(data: bytes, if_match: str) -> None:
        if call == "put":
            store.put(key, data, if_match=if_match)
            return
        upload_id = store.create_upload(key)
        etags = [store.upload_part(key, upload_id, 1, data)]
        try:
            store.complete_upload(key, upload_id, etags, if_match=if_match)
        except StorageConflictError:
            store.abort_upload(key, upload_id)
            raise

    store.put(key, b"first")
    first = store.head(key)
    assert first is not None
    assert first.etag is not None
    if call == "put" and reach.differs("put_refuses_etag"):
        with pytest.raises(StorageConflictError):
            replace(b"second", first.etag)
        assert store.get(key) == b"first"
        return
    replace(b"second", first.etag)
    assert store.get(key) == b"second"
    if call == "complete_upload" and reach.differs("complete_ignores_condition"):
        replace(b"third", first.etag)
        assert store.get(key) == b"third"
        return
    with pytest.raises(StorageConflictError):
        replace(b"third", first.etag)
    assert store.get(key) == b"second"


def test_every_conflict_is_named_and_nothing_written(reach: Reach, location: Location, tmp_path: Path) -> None:
    """B59: what is equal is decided by our SHA-256 alone; an ETag, a size or no metadata prove nothing."""
    objects = contents(3, 1000)
    files = write(tmp_path / "ckpt", objects)
    store = reach.store()
    one, two, three = (name for name in objects if name.endswith(".safetensors"))
    store.put(location.key("v1", one), noise(77, 1000), metadata={"cwtrain-sha256": sha256(noise(77, 1000))})
    store.put(location.key("v1", two), objects[two])  # the same bytes, so the same ETag, but it says nothing
    store.put(location.key("v1", three), objects[three][:-1])
    store.put(location.key("v1", "pytorch_model.bin"), b"")
    before = everything(store, location)
    with pytest.raises(SnapshotConflictError) as refused:
        upload_objects(files, store=store, location=location, identity="v1")
    assert set(refused.value.objects) == {one, two, three, "pytorch_model.bin"}
    assert everything(store, location) == before


def test_who_loses_the_claim_sends_nothing(reach: Reach, location: Location, tmp_path: Path) -> None:
    objects = contents(2, 1000)
    store = reach.store()

    def stop(_: Any) -> None:
        raise InterruptedError

    first = write(tmp_path / "first", objects)
    with pytest.raises(InterruptedError):
        upload_objects(first, store=store, location=location, identity="v1", run_id="run-a", before_index=stop)
    before = everything(store, location)
    assert location.claim_key("v1") in before
    client = reach.client()
    requests = count_requests(client)
    second = write(tmp_path / "second", objects)
    with pytest.raises(SnapshotConflictError, match="run-a") as refused:
        upload_objects(second, store=S3Store(client, BUCKET), location=location, identity="v1", run_id="run-b")
    assert refused.value.objects == ("_claims/v1.json",)
    assert "PutObject" not in {name for name, _ in requests}
    report = upload_objects(second, store=store, location=location, identity="v1", run_id="run-a")
    assert report.uploaded == (INDEX_NAME,)


def test_two_uploads_of_one_identity_at_once(reach: Reach, location: Location, tmp_path: Path) -> None:
    """Two runs with different weights: one publishes, the other writes nothing at all."""
    gate = threading.Barrier(2)

    def attempt(number: int) -> str:
        files = write(tmp_path / f"run-{number}", contents(4, 50_000, seed=100 * number))
        store = reach.store()
        gate.wait()
        try:
            upload_objects(files, store=store, location=location, identity="v1", run_id=f"run-{number}")
        except SnapshotConflictError as error:
            return str(error)
        return "published"

    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(attempt, range(2)))
    assert results.count("published") == 1, results
    winner = results.index("published")
    store = reach.store()
    for name, data in contents(4, 50_000, seed=100 * winner).items():
        assert store.get(location.key("v1", name)) == data


def test_a_refused_upload_names_the_permission(reach: Reach, location: Location, tmp_path: Path) -> None:
    store = reach.store(BUCKET, READER)
    with pytest.raises(StorageAccessError, match="s3:PutObject"):
        upload_objects(write(tmp_path / "c", contents()), store=store, location=location, identity="v1")


def upload_and_die(reach: Reach, location: Location, directory: Path, record: str, *arguments: str) -> Any:
    environ = {
        **os.environ,
        "CW_S3_ENDPOINT": reach.endpoint,
        "AWS_REGION": REGION,
        "AWS_ACCESS_KEY_ID": TRAINER[0],
        "AWS_SECRET_ACCESS_KEY": TRAINER[1],
    }
    script = Path(__file__).parents[1] / "helpers" / "upload_and_die.py"
    command = [sys.executable, str(script), str(directory), BUCKET, location.path_prefix, record, *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("name", "ended"), [("SIGINT", -signal.SIGINT), ("SIGTERM", 143)])
def test_interrupted(reach_http: Reach, location: Location, tmp_path: Path, record: str, name: str, ended: int) -> None:
    """B23: Ctrl-C and SIGTERM during part 2 leave no open upload."""
    write(tmp_path / "ckpt", snapshot(30))
    done = upload_and_die(reach_http, location, tmp_path / "ckpt", record, name, "1", "UploadPart")
    assert done.returncode == ended, done.stderr
    store = reach_http.store()
    assert list(store.list_uploads(location.root)) == []
    assert store.head(location.key("v1", INDEX_NAME)) is None


@pytest.mark.parametrize("after", [2, 6, 11])
def test_killed_and_run_again(reach_http: Reach, location: Location, tmp_path: Path, record: str, after: int) -> None:
    """SIGKILL when a number of requests is out: the same command again completes and sends nothing twice."""
    reach, objects = reach_http, snapshot(40)
    files = write(tmp_path / "ckpt", objects)
    done = upload_and_die(reach, location, tmp_path / "ckpt", record, "SIGKILL", str(after))
    assert done.returncode == -signal.SIGKILL, done.stderr
    store = reach.store()
    there = {name for name in objects if store.head(location.key("v1", name))}
    assert INDEX_NAME not in there
    report = upload_objects(files, store=store, location=location, identity="v1", sizes=SIZES, record_directory=record)
    assert set(report.reused) == there
    assert set(report.uploaded) == set(objects) - there
    assert all(store.get(location.key("v1", name)) == data for name, data in objects.items())
    assert list(store.list_uploads(location.root)) == [], "what the killed process left open was aborted"


def test_more_workers_than_connections(
    reach: Reach, location: Location, tmp_path: Path, record: str, caplog: pytest.LogCaptureFixture
) -> None:
    """B40: connections are pooled for every worker, and threads stay within the workers."""
    caplog.set_level("DEBUG", "urllib3.connectionpool")
    most = 0

    def watch(_: object) -> None:
        nonlocal most
        most = max(most, sum(thread.name.startswith("cwtrain-upload") for thread in threading.enumerate()))

    files = write(tmp_path / "ckpt", snapshot(60) | contents(24, 30_000))
    store = S3Store(reach.client(), BUCKET)
    upload_objects(
        files,
        store=store,
        location=location,
        identity="v1",
        workers=16,
        sizes=SIZES,
        record_directory=record,
        on_progress=watch,
    )
    opened = [one for one in caplog.messages if one.startswith(("Starting new HTTP", "Resetting dropped"))]
    assert not [one for one in caplog.messages if "pool is full" in one]
    assert most <= 16
    assert len(opened) <= 17, "one connection for each worker, and one for the caller's thread"

    caplog.clear()
    narrow = S3Store(reach.client(max_pool_connections=3), BUCKET)
    upload_objects(files, store=narrow, location=location, identity="v2", workers=16, sizes=SIZES)
    assert "make the client with max_pool_connections=16" in caplog.text
    assert not [one for one in caplog.messages if "pool is full" in one]


@pytest.mark.parametrize("kind", ["same size", "truncate"])
def test_a_file_that_changes_while_it_goes_out(
    reach_each_way: Reach, location: Location, tmp_path: Path, record: str, kind: str
) -> None:
    """B21: noticed at once, and nothing is left that could be taken for the snapshot."""
    reach = reach_each_way
    files = write(tmp_path / "ckpt", snapshot(70))
    path = tmp_path / "ckpt" / "model-00003-of-00003.safetensors"

    def change(**_: Any) -> None:
        if kind == "truncate":
            os.truncate(path, 2 << 20)
        else:
            with path.open("r+b") as file:
                file.seek(8 << 20)
                file.write(b"Z" * 1024)

    client = reach.client()
    client.meta.events.register("before-send.s3.UploadPart", change)
    store = S3Store(client, BUCKET)
    with pytest.raises(SnapshotChangedError, match="model-00003-of-00003"):
        upload_objects(files, store=store, location=location, identity="v1", sizes=SIZES, record_directory=record)
    assert list(store.list_uploads(location.root)) == []
    assert store.head(location.key("v1", INDEX_NAME)) is None


def test_a_file_whose_sha256_is_known(reach: Reach, location: Location, tmp_path: Path, record: str) -> None:
    """Read once, its parts one after the other; a SHA-256 that is not the file's never becomes an object."""
    objects = snapshot(90)
    files = [attrs.evolve(file, sha256=sha256(objects[file.name])) for file in write(tmp_path / "ckpt", objects)]
    store = reach.store()
    report = upload_objects(files, store=store, location=location, identity="v1", sizes=SIZES, record_directory=record)
    assert report.uploaded == tuple(objects)
    assert all(store.get(location.key("v1", name)) == data for name, data in objects.items())
    wrong = [attrs.evolve(file, sha256=sha256(b"") if "00003-of" in file.name else file.sha256) for file in files]
    with pytest.raises(SnapshotChangedError, match="00003-of"):
        upload_objects(wrong, store=store, location=location, identity="v2", sizes=SIZES, record_directory=record)
    assert store.head(location.key("v2", "model-00003-of-00003.safetensors")) is None
    assert list(store.list_uploads(location.root)) == []


def test_a_store_checks_a_single_put_over_http(reach_http: Reach, location: Location) -> None:
    """What the signature of a whole file is for: other bytes than those that were hashed are refused by the store.

    SeaweedFS does not look, so it is never the only guard: the bytes that are sent are hashed here as well.
    """

    class Lying:
        sha256 = sha256(b"other")

        def __init__(self) -> None:
            self.file = io.BytesIO(noise(1, 200_000))

        def __len__(self) -> int:
            return 200_000

        def __getattr__(self, name: str) -> Any:
            return getattr(self.file, name)

        def blocks(self) -> Any:
            yield self.file.getvalue()

    body: Any = Lying()
    if reach_http.server.name == "seaweedfs":
        reach_http.store().put(location.key("v1", "x"), body)
        return
    with pytest.raises(StorageError, match="400"):
        reach_http.store().put(location.key("v1", "x"), body)
    assert reach_http.store().head(location.key("v1", "x")) is None


# ---- addressing (SeaweedFS only: it answers for buckets in the host name)


@pytest.fixture
def named(seaweedfs_server: S3Server) -> S3Server:
    return seaweedfs_server


def test_buckets_go_into_the_host_name(named: S3Server, location: Location, tmp_path: Path, record: str) -> None:
    assert named.virtual_endpoint is not None
    client = named.client(endpoint=named.virtual_endpoint)
    urls: list[str] = []
    client.meta.events.register("before-send.s3", lambda request, **_: urls.append(request.url))
    objects = snapshot(80)
    with patched_resolver() as asked:
        report = upload_objects(
            write(tmp_path / "ckpt", objects),
            store=S3Store(client, BUCKET),
            location=location,
            identity="v1",
            sizes=SIZES,
            record_directory=record,
        )
    assert report.uploaded == tuple(objects)
    port = named.virtual_endpoint.rpartition(":")[2]
    assert {url.split("/")[2] for url in urls} == {f"{BUCKET}.{DOMAIN}:{port}"}
    assert not any(url.split("/")[3].startswith(BUCKET) for url in urls)
    assert set(asked) == {f"{BUCKET}.{DOMAIN}"}
    by_path = S3Store(named.client(), BUCKET)
    assert all(by_path.get(location.key("v1", name)) == data for name, data in objects.items())


@pytest.mark.parametrize("bucket", ["has.dots", "Capital", "under_score", "ab", "-dash", "x" * 64])
def test_a_bucket_that_is_no_host_label_is_refused_by_name(named: S3Server, bucket: str) -> None:
    client = named.client(endpoint=named.virtual_endpoint)
    with pytest.raises(ConfigError, match=bucket):
        S3Store(client, bucket)
    calls: list[Callable[[], object]] = [
        lambda: client.put_object(Bucket=bucket, Key="x", Body=b""),
        lambda: client.list_objects_v2(Bucket=bucket),
        lambda: client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": "x"}),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=bucket):
            call()


def test_addresses_take_the_path(named: S3Server) -> None:
    client = named.client()
    urls: list[str] = []
    client.meta.events.register("before-send.s3", lambda request, **_: urls.append(request.url))
    S3Store(client, BUCKET).head("x")
    assert urls == [f"{named.endpoint}/{BUCKET}/x"]


def test_a_store_that_is_not_there(tmp_path: Path) -> None:
    client = s3_client(
        "http://127.0.0.1:9",
        region_name=REGION,
        aws_access_key_id="a",
        aws_secret_access_key="b",
        config=Config(retries={"total_max_attempts": 1}),
    )
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:9"):
        S3Store(client, BUCKET).get("x")
