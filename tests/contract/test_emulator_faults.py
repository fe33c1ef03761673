"""Faults as a test sets them: each kind, seen from outside, for the API, the endpoint, the bucket and the replicas."""

from __future__ import annotations

import hashlib
import itertools
import json
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import pytest
import requests

from cwtrain_emulator.control_client import ControlError
from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.pytest_plugin import Bucket, Faults
from cwtrain_emulator.s3.client import S3Client, S3Config
from helpers import tiny_delta
from helpers.conformance import put_snapshot
from helpers.emulator_api import Api, hot_load_body

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def common_deployment(service: Api, common_gateway: str, emulator: Emulator) -> dict[str, Any]:
    return service.deployment(common_gateway, emulator.bucket)


@pytest.fixture
def served(service: Api, common_deployment: dict[str, Any], store: Bucket, tiny_model: Files) -> dict[str, Any]:
    """A deployment that serves a full snapshot, `v0`; `v1` is an identity for another. Both are new for each test."""
    mark = uuid.uuid4().hex[:8]
    made = {**common_deployment, "v0": f"{mark}-v0", "v1": f"{mark}-v1"}
    put_snapshot(store, made, made["v0"], tiny_model)
    service.completed(made["spec"]["id"], made["v0"])
    return made


def ask(
    api: Api, deployment: dict[str, Any], *, options: dict[str, Any] | None = None, **changes: Any
) -> requests.Response:
    body = {"model": deployment["spec"]["model"]["name"], "prompt": [1], "max_tokens": 4, "ignore_eos": True}
    return api.complete({**body, **changes}, **(options or {}))


def until(done: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + 60
    while not (found := done()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return found


def delta_of(served: dict[str, Any], files: Files) -> tuple[dict[str, Any], Files]:
    """Return the tensors after a small change, and the files of the delta `v1` to them."""
    old = tiny_delta.read_tensors(files)
    new = tiny_delta.nudged(old, seed=3)
    return new, tiny_delta.delta_snapshot(old, new, version=served["v1"], base_version=served["v0"])


# Rules ---------------------------------------------------------------------------------------------------------------


def test_a_rule_counts_what_it_sees_and_what_it_strikes(service: Api, faults: Faults) -> None:
    rule = faults.add("api", "status", status=503, retry_after=2, method="GET", path="gateways$", after=1, times=2)
    answers = [service.call("GET", "/gateways") for _ in range(4)]
    assert [answer.status_code for answer in answers] == [200, 503, 503, 200]
    assert answers[1].headers["Retry-After"] == "2"
    assert answers[1].json()["code"] == 14
    assert service.call("GET", "/deployments").status_code == 200
    (seen,) = faults.all()
    assert (seen["id"], seen["seen"], seen["struck"]) == (rule["id"], 4, 2)
    faults.clear(rule)
    assert faults.all() == []


def test_faults_end_before_the_deployment_of_the_test(faults: Faults, deployment: dict[str, Any]) -> None:
    """The fixture `deployment`, asked for last, is taken down first."""
    assert deployment["status"]["status"] == "STATUS_READY"
    faults.add("api", "drop")


def test_chance_is_drawn_from_a_seed(service: Api, faults: Faults) -> None:
    runs = []
    for _ in range(2):
        faults.clear()
        faults.add("api", "status", probability=0.5, seed=7)
        runs.append([service.call("GET", "/gateways").status_code for _ in range(12)])
    assert runs[0] == runs[1]
    assert set(runs[0]) == {200, 503}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({}, ["target"]),
        ({"target": "api", "kind": "slow_down"}, ["kind"]),
        ({"target": "api", "kind": "latency"}, ["seconds: is required"]),
        ({"target": "api", "kind": "status", "status": 99, "path": "(", "what": 1}, ["status", "path", "what"]),
        ({"target": "store", "kind": "denied", "permission": "s3:Everything"}, ["permission"]),
        ({"target": "replica", "kind": "die", "times": True, "tokens": 1.5}, ["times", "tokens"]),
    ],
)
def test_a_wrong_rule_is_refused_with_all_that_is_wrong(
    service: Api, faults: Faults, body: dict[str, Any], words: list[str]
) -> None:
    answer = service.session.post(f"{service.base_url}/emulator/v1/faults", json=body, timeout=30)
    assert answer.status_code == 400
    assert all(word in answer.json()["message"] for word in words), answer.text
    assert faults.all() == []


def test_the_emulator_s_own_routes_want_an_admin_and_are_never_struck(emulator: Emulator, faults: Faults) -> None:
    faults.add("api", "drop")
    faults.add("endpoint", "drop")
    viewer = Api(emulator.base_url, emulator.viewer_token)
    url = f"{emulator.base_url}/emulator/v1"
    for method, path in (("GET", "/faults"), ("DELETE", "/faults"), ("POST", "/reset"), ("POST", "/credentials")):
        assert viewer.session.request(method, url + path, json={}, timeout=30).status_code == 403
    viewer.close()
    assert len(faults.all()) == 2
    with pytest.raises(ControlError, match="fault fault-0 not found"):
        emulator.control.clear_faults("fault-0")


# The control plane and the endpoint ----------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["api", "endpoint"])
def test_each_kind_over_http(service: Api, served: dict[str, Any], faults: Faults, target: str) -> None:
    def call() -> requests.Response:
        return service.call("GET", "/gateways") if target == "api" else ask(service, served)

    faults.add(target, "html", times=1)
    answer = call()
    assert (answer.status_code, answer.headers["Content-Type"]) == (502, "text/html")
    assert "<html>" in answer.text
    faults.clear()

    faults.add(target, "error_body", message="it did not work", times=1)
    answer = call()
    assert answer.status_code == 200
    error = answer.json() if target == "api" else answer.json()["error"]
    assert error["message"] == "it did not work"
    faults.clear()

    faults.add(target, "latency", seconds=0.2, times=1)
    began = time.monotonic()
    assert call().status_code == 200
    assert time.monotonic() - began >= 0.2
    faults.clear()

    for kind, values in (("drop", {}), ("cut", {}), ("cut", {"bytes": 10}), ("cut", {"bytes": 10**9})):
        faults.add(target, kind, times=1, **values)
        with pytest.raises((requests.ConnectionError, requests.exceptions.ChunkedEncodingError)):
            call()
        assert call().status_code == 200
        faults.clear()

    faults.add(target, "status", status=429, retry_after="1.5", times=1)
    answer = call()
    assert (answer.status_code, answer.headers["Retry-After"]) == (429, "1.5")


def test_a_lost_answer_is_of_a_call_that_was_done_and_a_dropped_one_was_not(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, faults: Faults
) -> None:
    put_snapshot(store, served, served["v1"], tiny_model)
    body = hot_load_body(served["spec"]["id"], served["v1"]) | {"hotLoadId": str(uuid.uuid4())}
    faults.add("api", "drop", method="POST", path="hotLoads", times=1)
    with pytest.raises(requests.ConnectionError):
        service.call("POST", "/hotLoads", body)
    assert service.call("GET", f"/hotLoads/{body['hotLoadId']}").status_code == 404
    faults.add("api", "cut", method="POST", path="hotLoads", times=1)
    with pytest.raises(requests.ConnectionError):
        service.call("POST", "/hotLoads", body)
    assert service.ended(body["hotLoadId"])["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
    assert service.refused("POST", "/hotLoads", body)[:2] == (409, 6)


def test_a_stream_is_cut(service: Api, served: dict[str, Any], faults: Faults) -> None:
    faults.add("endpoint", "cut", bytes=300, times=1)
    answer = ask(service, served, options={"stream": True}, stream=True, max_tokens=8)
    assert answer.status_code == 200
    received: list[bytes] = []
    with pytest.raises(requests.exceptions.ChunkedEncodingError):
        received.extend(answer.iter_content(None))
    assert sum(map(len, received)) == 300


# The bucket ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def key() -> str:
    return f"faults-{uuid.uuid4().hex[:8]}/object"


@pytest.fixture
def one_try(emulator: Emulator) -> Any:
    """A client of the bucket that tries once."""
    import boto3
    from botocore.config import Config

    return boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        aws_access_key_id=emulator.access_key_id,
        aws_secret_access_key=emulator.secret_access_key,
        region_name=emulator.region,
        config=Config(
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            retries={"total_max_attempts": 1},
        ),
    )


def code_of(call: Callable[..., Any], **values: Any) -> tuple[int, str]:
    from botocore.exceptions import ClientError

    with pytest.raises(ClientError) as caught:
        call(**values)
    response = caught.value.response
    return response["ResponseMetadata"]["HTTPStatusCode"], response["Error"]["Code"]


def test_refusals_of_the_bucket(one_try: Any, store: Bucket, faults: Faults, key: str) -> None:
    name = store.name
    faults.add("store", "denied", permission="s3:PutObject")
    assert code_of(one_try.put_object, Bucket=name, Key=key, Body=b"x" * 300_000) == (403, "AccessDenied")
    assert code_of(one_try.create_multipart_upload, Bucket=name, Key=key) == (403, "AccessDenied")
    one_try.list_objects_v2(Bucket=name, Prefix=key)
    faults.clear()
    faults.add("store", "denied", permission="s3:ListBucket")
    assert code_of(one_try.list_objects_v2, Bucket=name) == (403, "AccessDenied")
    one_try.list_multipart_uploads(Bucket=name)
    one_try.put_object(Bucket=name, Key=key, Body=b"whole")
    faults.clear()
    faults.add("store", "denied", permission="s3:AbortMultipartUpload")
    upload = one_try.create_multipart_upload(Bucket=name, Key=key)["UploadId"]
    assert code_of(one_try.abort_multipart_upload, Bucket=name, Key=key, UploadId=upload) == (403, "AccessDenied")
    faults.clear()
    one_try.abort_multipart_upload(Bucket=name, Key=key, UploadId=upload)

    faults.add("store", "slow_down", retry_after=1, times=1)
    assert code_of(one_try.get_object, Bucket=name, Key=key) == (503, "SlowDown")
    faults.add("store", "precondition_failed", method="PUT", times=1)
    assert code_of(one_try.put_object, Bucket=name, Key=key, Body=b"y") == (412, "PreconditionFailed")
    assert one_try.get_object(Bucket=name, Key=key)["Body"].read() == b"whole"
    faults.add("store", "status", status=500, times=1)
    assert code_of(one_try.get_object, Bucket=name, Key=key) == (500, "InternalError")
    faults.add("store", "html", status=503, times=1)
    assert code_of(one_try.get_object, Bucket=name, Key=key)[0] == 503


def test_clocks_and_keys(emulator: Emulator, one_try: Any, store: Bucket, faults: Faults, key: str) -> None:
    faults.add("store", "clock_skew", seconds=7200, times=1)
    answer = requests.get(f"{emulator.s3_endpoint}/{store.name}/{key}", timeout=30)
    assert answer.status_code == 403
    assert "<Code>RequestTimeTooSkewed</Code>" in answer.text
    ahead = parsedate_to_datetime(answer.headers["Date"]) - datetime.now(UTC)
    assert 7000 < ahead.total_seconds() < 7300

    faults.add("store", "expired_credentials", access_key=f"^{emulator.access_key_id}$")
    assert code_of(one_try.put_object, Bucket=store.name, Key=key, Body=b"x") == (400, "ExpiredToken")
    import boto3
    from botocore.config import Config

    renewed = emulator.control.credentials()
    other = boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        aws_access_key_id=renewed["access_key_id"],
        aws_secret_access_key=renewed["secret_access_key"],
        region_name=emulator.region,
        config=Config(s3={"addressing_style": "path"}),
    )
    other.put_object(Bucket=store.name, Key=key, Body=b"x")
    assert code_of(other.create_bucket, Bucket="another-bucket")[1] == "AccessDenied"


def test_an_object_is_lost_from_reads_and_listings(
    service: Api, served: dict[str, Any], store: Bucket, one_try: Any, tiny_model: Files, faults: Faults
) -> None:
    put_snapshot(store, served, served["v1"], tiny_model)
    prefix = f"{served['spec']['hotLoad']['pathPrefix']}/{served['v1']}/"
    faults.add("store", "lost_object", key=rf"{served['v1']}/model-.*\.safetensors$")
    listed = one_try.list_objects_v2(Bucket=store.name, Prefix=prefix)
    names = [entry["Key"].removeprefix(prefix) for entry in listed["Contents"]]
    assert listed["KeyCount"] == len(names)
    assert sorted(names) == sorted(name for name in tiny_model if not name.endswith(".safetensors"))
    shard = next(name for name in tiny_model if name.endswith(".safetensors"))
    assert code_of(one_try.get_object, Bucket=store.name, Key=prefix + shard) == (404, "NoSuchKey")
    assert code_of(one_try.head_object, Bucket=store.name, Key=prefix + shard)[0] == 404
    # The service reads through the same door.
    status, _, message = service.refused("POST", "/hotLoads", hot_load_body(served["spec"]["id"], served["v1"]))
    assert status == 400
    assert shard in message
    faults.clear()
    service.completed(served["spec"]["id"], served["v1"])


def test_only_the_service_is_struck(
    service: Api, served: dict[str, Any], store: Bucket, one_try: Any, tiny_model: Files, faults: Faults
) -> None:
    put_snapshot(store, served, served["v1"], tiny_model)
    faults.add("store", "denied", caller="service", permission="s3:GetObject")
    assert one_try.list_objects_v2(Bucket=store.name)["KeyCount"] > 0
    answer = service.call("POST", "/hotLoads", hot_load_body(served["spec"]["id"], served["v1"]))
    assert answer.status_code in (400, 403, 503), answer.text


def test_a_bucket_that_is_listed_but_not_read_is_told_from_one_that_is_read(
    emulator: Emulator, store: Bucket, one_try: Any, faults: Faults, key: str
) -> None:
    """A store that was killed lists its objects before it can read them; the emulator waits for the second."""
    access, secret = emulator.access_key_id, emulator.secret_access_key
    client = S3Client(S3Config(emulator.s3_endpoint, access, secret, emulator.region), attempts=1)
    # The first in the listing: what other tests left may be empty, and of what is empty nothing is read.
    one_try.put_object(Bucket=store.name, Key=f"!{key}", Body=b"bytes")
    faults.add("store", "status", status=500, method="GET", path=f"/{store.name}/.")
    assert one_try.list_objects_v2(Bucket=store.name)["KeyCount"] > 0
    assert not client.can_read(store.name)
    faults.clear()
    assert client.can_read(store.name)
    client.close()


def test_connections_to_the_bucket(one_try: Any, store: Bucket, faults: Faults, key: str) -> None:
    from botocore.exceptions import BotoCoreError

    name, body = store.name, b"0123456789" * 1000
    faults.add("store", "drop", times=1)
    with pytest.raises(BotoCoreError):
        one_try.put_object(Bucket=name, Key=key, Body=body)
    assert code_of(one_try.head_object, Bucket=name, Key=key)[0] == 404
    # The answer is lost, and the object is there.
    faults.add("store", "cut", method="PUT", times=1)
    with pytest.raises(BotoCoreError):
        one_try.put_object(Bucket=name, Key=key, Body=body)
    assert one_try.get_object(Bucket=name, Key=key)["Body"].read() == body
    faults.add("store", "cut", method="GET", bytes=100, times=1)
    with pytest.raises(BotoCoreError):
        one_try.get_object(Bucket=name, Key=key)["Body"].read()
    faults.add("store", "error_body", times=1)
    assert b"<Error>" in one_try.get_object(Bucket=name, Key=key)["Body"].read()


def test_bandwidth_is_throttled_both_ways(one_try: Any, store: Bucket, faults: Faults, key: str) -> None:
    body = bytes(100_000)
    faults.add("store", "throttle", bytes_per_second=400_000)
    began = time.monotonic()
    one_try.put_object(Bucket=store.name, Key=key, Body=body)
    sent = time.monotonic()
    assert one_try.get_object(Bucket=store.name, Key=key)["Body"].read() == body
    assert sent - began >= 0.25
    assert time.monotonic() - sent >= 0.25


def test_large_and_many_requests_pass_unchanged(one_try: Any, store: Bucket, key: str) -> None:
    body = bytes(range(256)) * (6 << 12)
    upload = one_try.create_multipart_upload(Bucket=store.name, Key=key)["UploadId"]
    parts = []
    for number in (1, 2):
        part = {"Bucket": store.name, "Key": key, "UploadId": upload, "PartNumber": number}
        parts.append({"PartNumber": number, "ETag": one_try.upload_part(Body=body, **part)["ETag"]})
    one_try.complete_multipart_upload(
        Bucket=store.name, Key=key, UploadId=upload, MultipartUpload={"Parts": parts}, IfNoneMatch="*"
    )
    assert one_try.get_object(Bucket=store.name, Key=key)["Body"].read() == body * 2
    part = one_try.get_object(Bucket=store.name, Key=key, Range="bytes=10-19")["Body"].read()
    assert part == body[10:20]
    for number in range(50):
        one_try.put_object(Bucket=store.name, Key=f"{key}/{number}", Body=b"" if number % 2 else b"x")
    pages = one_try.get_paginator("list_objects_v2").paginate(
        Bucket=store.name, Prefix=f"{key}/", PaginationConfig={"PageSize": 20}
    )
    found = list(itertools.chain.from_iterable(page["Contents"] for page in pages))
    assert len(found) == 50


# Replicas ------------------------------------------------------------------------------------------------------------


def replicas_of(service: Api, deployment: dict[str, Any]) -> list[dict[str, Any]]:
    (mine,) = [entry for entry in service.own("/state")["deployments"] if entry["id"] == deployment["spec"]["id"]]
    found: list[dict[str, Any]] = mine["replicas"]
    return found


def test_a_replica_is_stuck_until_the_fault_is_cleared(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, faults: Faults
) -> None:
    put_snapshot(store, served, served["v1"], tiny_model)
    name = replicas_of(service, served)[1]["name"]
    faults.add("replica", "stuck", replica=f"^{name}$", identity=served["v1"])
    mine = service.hot_load(served["spec"]["id"], served["v1"])

    def states() -> dict[str, str]:
        listed = service.ok("GET", f"/hotLoads/{mine}/replicas")["replicas"]
        return {entry["name"]: entry["state"] for entry in listed}

    until(lambda: sorted(states().values()) == ["READY", "UPDATING"], "the other replica is ready")
    assert states()[name] == "UPDATING"
    assert service.ok("GET", f"/hotLoads/{mine}")["hotLoad"]["status"]["state"] == "HOT_LOAD_STATE_IN_PROGRESS"
    faults.clear()
    assert service.ended(mine)["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"


def test_a_replica_is_slow(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, faults: Faults
) -> None:
    put_snapshot(store, served, served["v1"], tiny_model)
    slow = faults.add("replica", "slow", seconds=0.3, times=1)
    began = time.monotonic()
    service.completed(served["spec"]["id"], served["v1"])
    assert time.monotonic() - began >= 0.3
    assert faults.struck(slow) == 1
    faults.add("replica", "slow", on="request", seconds=0.2, times=1)
    began = time.monotonic()
    assert ask(service, served).status_code == 200
    assert time.monotonic() - began >= 0.2


@pytest.mark.parametrize("kind", ["delta", "full", "full with checksums"])
def test_damaged_bytes_fail_the_checksum_and_the_old_weights_stay(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, faults: Faults, kind: str
) -> None:
    new, files = delta_of(served, tiny_model)
    if kind != "delta":
        config = json.loads(tiny_model["config.json"])
        files = tiny_delta.full_snapshot(new, config=config, checksums=kind == "full with checksums")
    put_snapshot(store, served, served["v1"], files)
    previous = served["v0"] if kind == "delta" else None
    faults.add("replica", "damage", replica="-01$", times=1)
    failed = service.ended(service.hot_load(served["spec"]["id"], served["v1"], previous))
    assert failed["status"]["state"] == "HOT_LOAD_STATE_FAILED"
    listed = service.ok("GET", f"/hotLoads/{failed['spec']['id']}/replicas")["replicas"]
    assert [(entry["state"], entry["currentSnapshotIdentity"]) for entry in listed] == [
        ("READY", served["v1"]),
        ("ERROR", served["v0"]),
    ]
    if kind != "full":
        assert "Adler-32" in listed[1]["errorReason"]
    # The bucket was right all the time: once more, and it works.
    service.completed(served["spec"]["id"], served["v1"], previous)


def test_a_replica_dies_in_the_middle_of_an_apply_and_comes_back(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, faults: Faults
) -> None:
    new, files = delta_of(served, tiny_model)
    put_snapshot(store, served, served["v1"], files)
    before = {entry["name"]: entry["pid"] for entry in replicas_of(service, served)}
    rule = faults.add("replica", "die", identity=served["v1"], replica="-00$", times=1)
    service.completed(served["spec"]["id"], served["v1"], served["v0"])
    assert faults.struck(rule) == 1
    hashes = {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in new.items()}
    changed = 0
    for entry in replicas_of(service, served):
        assert service.own(f"/replicas/{entry['name']}/tensors") == hashes
        changed += entry["pid"] != before[entry["name"]]
    assert changed == 1


def test_a_replica_that_dies_each_time_fails_the_hot_load(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, faults: Faults
) -> None:
    put_snapshot(store, served, served["v1"], delta_of(served, tiny_model)[1])
    faults.add("replica", "die", identity=served["v1"], replica="-00$")
    failed = service.ended(service.hot_load(served["spec"]["id"], served["v1"], served["v0"]))
    assert failed["status"]["state"] == "HOT_LOAD_STATE_FAILED"
    assert "died 3 times" in failed["status"]["conditions"][0]["message"]


def test_a_replica_dies_in_the_middle_of_a_request(service: Api, served: dict[str, Any], faults: Faults) -> None:
    faults.add("replica", "die", on="request", tokens=2, times=1)
    answer = ask(service, served, max_tokens=20)
    assert answer.status_code == 503
    assert "died" in answer.json()["error"]["message"]
    assert ask(service, served).status_code == 200
    until(
        lambda: all(entry["identity"] == served["v0"] for entry in replicas_of(service, served)), "the replica is back"
    )
    stuck = faults.add("replica", "stuck", on="request", times=1)
    with pytest.raises(requests.Timeout):
        service.session.post(
            f"{service.base_url}/v1/completions",
            json={"model": served["spec"]["model"]["name"], "prompt": [1]},
            timeout=0.3,
        )
    assert faults.struck(stuck) == 1
    assert ask(service, served).status_code == 200
