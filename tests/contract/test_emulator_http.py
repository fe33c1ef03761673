"""The emulator as a process of its own, over plain HTTP: the API, the bucket, the replicas, the endpoint."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from cwtrain_emulator.emulator import Emulator, EmulatorError
from cwtrain_emulator.engine.model_io import make_model
from cwtrain_emulator.pytest_plugin import Bucket
from helpers import numpy_model, tiny_delta
from helpers.emulator_api import PREFIX, Api, deployment_body, hot_load_body
from helpers.tiny_delta import Files, Tensor

CONTEXT = 3


@pytest.fixture(scope="module")
def api(emulator: Emulator) -> Iterator[Api]:
    made = Api(emulator.base_url, emulator.admin_token)
    yield made
    made.close()


@pytest.fixture(scope="module")
def gateway(api: Api) -> dict[str, Any]:
    return api.gateway()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """The files of a small model, vocabulary 64."""
    directory = tmp_path_factory.mktemp("model")
    make_model(directory, vocab_size=64, hidden_size=8, context=CONTEXT, seed=1, max_length=128)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def upload(bucket: Bucket, deployment: Mapping[str, Any], identity: str, files: Files) -> None:
    prefix = deployment["spec"]["hotLoad"]["pathPrefix"]
    for name, raw in files.items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"{prefix}/{identity}/{name}", Body=raw)


def changed(files: Files, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the model's tensors, and new ones of which two differ."""
    old = tiny_delta.read_tensors(files)
    return old, tiny_delta.nudged(old, seed=seed, names=["lm_head.weight", "lm_head.bias"])


def full_of(files: Files, tensors: Mapping[str, Tensor]) -> Files:
    config = json.loads(files["config.json"])
    return tiny_delta.full_snapshot(tensors, config=config)


def hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in tensors.items()}


def replica_names(api: Api, deployment_id: str) -> list[str]:
    state = api.own("/state")
    (mine,) = [entry for entry in state["deployments"] if entry["id"] == deployment_id]
    return [replica["name"] for replica in mine["replicas"]]


# The edge ------------------------------------------------------------------------------------------------------------


def test_tokens_and_roles(emulator: Emulator, api: Api) -> None:
    for token in (None, "wrong", ""):
        stranger = Api(emulator.base_url, token)
        assert stranger.refused("GET", "/gateways")[:2] == (401, 16)
        assert stranger.complete({"model": "x", "prompt": [1]}).status_code == 401
        stranger.close()
    viewer = Api(emulator.base_url, emulator.viewer_token)
    assert "items" in viewer.ok("GET", "/gateways")
    for method, path in (("POST", "/gateways"), ("DELETE", "/deployments/x"), ("PATCH", "/capacityclaims/x")):
        assert viewer.refused(method, path, {})[:2] == (403, 7)
    assert viewer.refused("POST", "/hotLoads", {})[:2] == (403, 7)
    viewer.close()


def test_only_loopback_hosts_are_served(emulator: Emulator, api: Api) -> None:
    for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[::2]"):
        assert api.call("GET", "/gateways", headers={"Host": host}).status_code == 403, host
    port = emulator.base_url.rpartition(":")[2]
    for host in ("localhost", f"localhost:{port}", "127.0.0.1", "[::1]:5"):
        assert api.call("GET", "/gateways", headers={"Host": host}).status_code == 200, host


def test_request_ids_come_back(api: Api) -> None:
    assert api.call("GET", "/gateways", headers={"X-Request-Id": "mine-1"}).headers["X-Request-Id"] == "mine-1"
    assert len(api.call("GET", "/gateways").headers["X-Request-Id"]) == 36


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"x"',
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"name": "\\ud800"}',
        b'{"name": NaN}',
        b"1" * 5000,
    ],
)
def test_malformed_bodies_are_refused_and_never_a_server_error(
    api: Api, gateway: Mapping[str, Any], body: bytes
) -> None:
    paths = ["/gateways", "/deployments", "/capacityclaims", "/hotLoads"]
    for path in [PREFIX + path for path in paths] + ["/v1/completions"]:
        answer = api.session.post(api.base_url + path, data=body, timeout=30)
        assert answer.status_code == 400, (path, answer.text)
    answer = api.session.patch(f"{api.base_url}{PREFIX}/gateways/{gateway['spec']['id']}", data=body, timeout=30)
    assert answer.status_code == 400, answer.text


def test_bodies_have_a_limit(api: Api) -> None:
    answer = api.session.post(f"{api.base_url}{PREFIX}/gateways", data=b" " * (2 << 20), timeout=30)
    assert (answer.status_code, answer.json()["code"]) == (413, 3)

    def endless() -> Iterator[bytes]:
        for _ in range(64):
            yield b" " * 65536

    answer = api.session.post(f"{api.base_url}{PREFIX}/gateways", data=endless(), timeout=30)
    assert answer.status_code == 413


@pytest.mark.parametrize("listener", ["api", "gateway"])
def test_what_is_no_http_hears_its_refusal_while_it_still_sends(
    api: Api, emulator: Emulator, gateway: Mapping[str, Any], listener: str
) -> None:
    """A connection that is closed on a sender is reset, and the reset takes the answer with it."""
    url = emulator.base_url if listener == "api" else gateway["status"]["endpoints"][0]
    origin = urllib.parse.urlsplit(url)
    with socket.create_connection((origin.hostname or "", origin.port or 0), timeout=30) as connection:
        connection.sendall(b"get /v1 HTTP/1.1\r\nHost: x\r\nX-Bad: \x00\r\nContent-Length: 4\r\n\r\n")
        said = connection.recv(1)
        for part in (b"bo", b"dy", b"and more"):
            connection.sendall(part)
        while more := connection.recv(1 << 16):
            said += more
    assert said.startswith(b"HTTP/1.1 400 ")


def test_unknown_paths_and_methods(api: Api) -> None:
    assert api.refused("GET", "/nothing")[:2] == (404, 5)
    assert api.refused("PUT", "/gateways", {})[:2] == (501, 12)
    assert api.refused("GET", "/gateways/not-a-uuid")[:2] == (404, 5)
    assert api.refused("GET", f"/hotLoads/{uuid.uuid4()}/replicas")[:2] == (404, 5)


# Resources -----------------------------------------------------------------------------------------------------------


def test_a_gateway_s_life(api: Api) -> None:
    mine = str(uuid.uuid4())
    made = api.gateway(id=mine)
    assert made["spec"]["id"] == mine
    (endpoint,) = made["status"]["endpoints"]
    assert api.session.get(f"{endpoint}/v1/models", timeout=30).json() == {"object": "list", "data": []}
    status, code, _ = api.refused("POST", "/gateways", {"id": mine})
    assert (status, code) == (409, 6)
    twin = {"name": made["spec"]["name"], "zones": ["US-EAST-04A"], "coreWeaveAuth": {}, "pathBasedRouting": {}}
    status, code, message = api.refused("POST", "/gateways", twin)
    assert (status, code) == (409, 6)
    assert made["spec"]["name"] in message
    body = {**made["spec"], "zones": ["US-EAST-04A", "US-WEST-04A"]}
    assert api.ok("PATCH", f"/gateways/{mine}", body)["gateway"]["status"]["status"] == "STATUS_UPDATING"
    assert api.until_status(f"/gateways/{mine}", "gateway")["spec"]["zones"] == ["US-EAST-04A", "US-WEST-04A"]
    assert api.ok("DELETE", f"/gateways/{mine}")["gateway"]["status"]["status"] == "STATUS_DELETING"
    api.until_gone(f"/gateways/{mine}")
    assert api.refused("DELETE", f"/gateways/{mine}")[:2] == (404, 5)


def test_a_deployment_s_life(api: Api, emulator: Emulator, gateway: Mapping[str, Any]) -> None:
    gateway_id = gateway["spec"]["id"]
    made = api.deployment(gateway_id, emulator.bucket)
    path = f"/deployments/{made['spec']['id']}"
    ids = [item["spec"]["id"] for item in api.ok("GET", f"/deployments?parentGatewayId={gateway_id}")["items"]]
    assert made["spec"]["id"] in ids
    assert api.ok("GET", f"/deployments?parentGatewayId={uuid.uuid4()}")["items"] == []
    status, _, message = api.refused("DELETE", f"/gateways/{gateway_id}")
    assert status == 400
    assert "in use" in message
    state = api.own("/state")
    (mine,) = [entry for entry in state["deployments"] if entry["id"] == made["spec"]["id"]]
    pids = [replica["pid"] for replica in mine["replicas"]]
    assert len(pids) == 2
    api.ok("DELETE", path)
    api.until_gone(path)
    until_dead(pids)
    assert not (emulator.state_dir / "replicas" / made["spec"]["id"]).exists()


def test_claims_and_parameters(api: Api) -> None:
    wanted = {"instanceId": "gb200-4x", "instanceCount": 2, "capacityType": 2, "zones": ["US-EAST-04A"]}
    made = api.ok("POST", "/capacityclaims", {"name": f"c-{uuid.uuid4().hex[:8]}", "resources": wanted})
    path = f"/capacityclaims/{made['capacityClaim']['spec']['id']}"
    claim = api.until_status(path, "capacityClaim")
    assert claim["status"]["allocatedInstances"] == 2
    body = {"id": claim["spec"]["id"], "resources": {**wanted, "instanceCount": 3}}
    assert api.ok("PATCH", path, body)["capacityClaim"]["spec"]["resources"]["instanceCount"] == 3
    api.ok("DELETE", path)
    api.until_gone(path)
    assert "US-EAST-04A" in api.ok("GET", "/gateways/parameters")["zones"]
    assert "US-EAST-04A" in api.ok("GET", "/capacityclaims/parameters")["zoneInstanceTypes"]
    assert "runtimeParameters" in api.ok("GET", "/deployments/parameters")


# The bucket ----------------------------------------------------------------------------------------------------------


def test_the_trainer_s_key_is_good_for_its_bucket_alone(bucket: Bucket) -> None:
    key = f"k-{uuid.uuid4()}"
    bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"x", IfNoneMatch="*")
    with pytest.raises(bucket.client.exceptions.ClientError, match="PreconditionFailed"):
        bucket.client.put_object(Bucket=bucket.name, Key=key, Body=b"x", IfNoneMatch="*")
    with pytest.raises(bucket.client.exceptions.ClientError, match="AccessDenied"):
        bucket.client.put_object(Bucket="another-bucket", Key=key, Body=b"x")
    with pytest.raises(bucket.client.exceptions.ClientError, match="AccessDenied"):
        bucket.client.create_bucket(Bucket="another-bucket")


# Hot-loads and completions -------------------------------------------------------------------------------------------


def test_full_and_delta_reach_every_replica_byte_by_byte_and_are_sampled_from(
    api: Api, deployment: dict[str, Any], bucket: Bucket, model: Files
) -> None:
    deployment_id, name = deployment["spec"]["id"], deployment["spec"]["model"]["name"]
    request = {"model": name, "prompt": [1, 2, 3], "n": 4, "max_tokens": 8, "logprobs": 0, "return_token_ids": True}
    early = api.complete(request)
    assert (early.status_code, early.json()["error"]["code"]) == (503, 503)
    assert "no weights yet" in early.json()["error"]["message"]

    upload(bucket, deployment, "v0", model)
    full = api.completed(deployment_id, "v0")
    old, new = changed(model, seed=3)
    upload(bucket, deployment, "v1", tiny_delta.delta_snapshot(old, new, version="v1", base_version="v0"))
    delta = api.completed(deployment_id, "v1", "v0")
    assert [entry["identity"] for entry in delta["spec"]["snapshotChain"]] == ["v0", "v1"]
    assert delta["spec"]["snapshotChain"][0]["hotLoadId"] == full["spec"]["id"]
    assert "finishedAt" in delta["status"]
    assert "canceledAt" not in delta["status"]

    replicas = api.ok("GET", f"/hotLoads/{delta['spec']['id']}/replicas")["replicas"]
    names = replica_names(api, deployment_id)
    assert [replica["name"] for replica in replicas] == names
    assert len(names) == 2
    assert {(replica["state"], replica["currentSnapshotIdentity"]) for replica in replicas} == {("READY", "v1")}
    for replica in names:
        assert api.own(f"/replicas/{replica}/tensors") == hashes(new)

    served = full_of(model, new)
    tensors = numpy_model.decode({key: raw for key, raw in served.items() if key.endswith(".safetensors")})
    for _ in names:
        answer = api.complete(request, headers={"X-Request-Id": f"r-{uuid.uuid4()}"})
        assert answer.status_code == 200
        for choice in answer.json()["choices"]:
            sequence = [1, 2, 3]
            for token, logprob in zip(choice["token_ids"], choice["logprobs"]["token_logprobs"], strict=True):
                assert abs(numpy_model.next_token_logprobs(tensors, sequence, CONTEXT)[token] - logprob) < 1e-5
                sequence.append(token)
        (attempt,) = api.own(f"/requests/{answer.headers['X-Request-Id']}")["attempts"]
        assert attempt["replica"] in names
        assert [choice["tokens"] for choice in attempt["choices"]] == [
            ["v1"] * len(choice["token_ids"]) for choice in answer.json()["choices"]
        ]
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == sum(len(choice["token_ids"]) for choice in answer.json()["choices"])
        assert usage["prompt_tokens"] == 3

    # Back to an earlier one: the same chain, another hot-load.
    api.completed(deployment_id, "v0")
    for replica in names:
        assert api.own(f"/replicas/{replica}/tensors") == hashes(old)
    pages = []
    token = ""
    while True:
        page = api.ok("GET", f"/hotLoads?parentDeploymentId={deployment_id}&maxPageSize=2&pageToken={token}")
        pages.append([row["spec"]["identity"] for row in page["hotLoads"]])
        token = page.get("nextPageToken", "")
        if not token:
            break
    assert pages == [["v0", "v1"], ["v0"]]
    assert api.refused("POST", f"/hotLoads/{full['spec']['id']}:cancel", {"id": full["spec"]["id"]})[:2] == (501, 12)
    first = api.ok("GET", f"/hotLoads/{full['spec']['id']}/replicas?maxPageSize=1")
    assert [replica["name"] for replica in first["replicas"]] == names[:1]
    again = f"/hotLoads/{full['spec']['id']}/replicas?maxPageSize=1&pageToken={first['nextPageToken']}"
    assert [replica["name"] for replica in api.ok("GET", again)["replicas"]] == names[1:]
    other = f"/hotLoads/{delta['spec']['id']}/replicas?pageToken={first['nextPageToken']}"
    assert api.refused("GET", other)[:2] == (400, 3)


def test_a_delta_with_a_wrong_checksum_fails_and_the_old_weights_stay(
    api: Api, deployment: dict[str, Any], bucket: Bucket, model: Files
) -> None:
    deployment_id = deployment["spec"]["id"]
    upload(bucket, deployment, "v0", model)
    api.completed(deployment_id, "v0")
    old, new = changed(model, seed=3)
    wrong = tiny_delta.delta_snapshot(old, new, version="v1", base_version="v0", sums={"lm_head.bias": "00000001"})
    upload(bucket, deployment, "v1", wrong)
    failed = api.ended(api.hot_load(deployment_id, "v1", "v0"))
    assert failed["status"]["state"] == "HOT_LOAD_STATE_FAILED"
    assert "lm_head.bias" in failed["status"]["conditions"][0]["message"]
    replicas = api.ok("GET", f"/hotLoads/{failed['spec']['id']}/replicas")["replicas"]
    assert {(replica["state"], replica["currentSnapshotIdentity"]) for replica in replicas} == {("ERROR", "v0")}
    assert "Adler-32" in replicas[0]["errorReason"]
    for replica in replica_names(api, deployment_id):
        assert api.own(f"/replicas/{replica}/tensors") == hashes(old)
    # A full snapshot mends it.
    upload(bucket, deployment, "v2", full_of(model, new))
    api.completed(deployment_id, "v2")


def test_base_weights_are_served_as_initial(
    api: Api, emulator: Emulator, gateway: dict[str, Any], bucket: Bucket, model: Files
) -> None:
    prefix = f"base-{uuid.uuid4().hex[:8]}"
    for name, raw in model.items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"{prefix}/{name}", Body=raw)
    named = f"model-{uuid.uuid4().hex[:8]}"
    made = api.deployment(
        gateway["spec"]["id"], bucket.name, model={"name": named, "bucket": bucket.name, "path": prefix}
    )
    state = api.own("/state")
    (mine,) = [entry for entry in state["deployments"] if entry["id"] == made["spec"]["id"]]
    assert {replica["identity"] for replica in mine["replicas"]} == {"initial"}
    (endpoint,) = gateway["status"]["endpoints"]
    served = [entry["id"] for entry in api.session.get(f"{endpoint}/v1/models", timeout=30).json()["data"]]
    assert named in served
    assert api.complete({"model": named, "prompt": "AB"}, origin=endpoint).status_code == 200
    api.ok("DELETE", f"/deployments/{made['spec']['id']}")


@pytest.fixture(scope="module")
def sampled(emulator: Emulator, api: Api, gateway: dict[str, Any], model: Files) -> str:
    """The name of a model that is served, with processed log-probs."""
    import boto3
    from botocore.config import Config

    made = api.deployment(
        gateway["spec"]["id"],
        emulator.bucket,
        runtime={
            "engine": "dynamo-vllm",
            "engineConfig": {"logprobs-mode": "processed_logprobs", "max-model-len": "100"},
        },
    )
    client = boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        aws_access_key_id=emulator.access_key_id,
        aws_secret_access_key=emulator.secret_access_key,
        region_name=emulator.region,
        config=Config(s3={"addressing_style": "path"}),
    )
    upload(Bucket(emulator.bucket, client), made, "v0", model)
    api.completed(made["spec"]["id"], "v0")
    name: str = made["spec"]["model"]["name"]
    return name


def test_processed_log_probs_where_the_deployment_says_so(api: Api, sampled: str) -> None:
    probe = {"model": sampled, "prompt": [1], "temperature": 1.0, "top_k": 1, "max_tokens": 1, "logprobs": 0}
    assert api.complete(probe).json()["choices"][0]["logprobs"]["token_logprobs"] == [0.0]


def test_refusals_of_the_endpoint_are_openai_s(api: Api, sampled: str) -> None:
    def refusal(**body: Any) -> tuple[int, str, str]:
        answer = api.complete({"model": sampled, "prompt": [1], **body})
        error = answer.json()["error"]
        assert error["code"] == answer.status_code
        return answer.status_code, error["type"], str(error["param"])

    assert refusal(model="unknown") == (404, "NotFoundError", "model")
    assert refusal(stop_token_ids=[1, 2, 3, 4, 5]) == (400, "BadRequestError", "stop_token_ids")
    assert refusal(prompt=[64]) == (400, "BadRequestError", "prompt")
    assert refusal(prompt=[1] * 100) == (400, "BadRequestError", "prompt")
    assert refusal(prompt=[1] * 99, max_tokens=2) == (400, "BadRequestError", "max_tokens")
    chat = api.session.post(f"{api.base_url}/v1/chat/completions", json={"model": sampled, "messages": []}, timeout=30)
    assert (chat.status_code, chat.json()["error"]["param"]) == (400, "messages")


def test_tokens_in_and_out_in_every_form(api: Api, sampled: str) -> None:
    body = {
        "model": sampled, "prompt": [[1, 2], [3]], "n": 2, "max_tokens": 3, "logprobs": 1, "ignore_eos": True,
        "return_tokens_as_token_ids": True, "return_token_ids": True, "nvext": {"cache_salt": "abc"},
    }  # fmt: skip
    choices = api.complete(body).json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    for choice in choices:
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in choice["token_ids"]]
        assert choice["finish_reason"] == "length"
    single = {"model": sampled, "prompt": [1], "max_tokens": 3, "nvext": {"extra_fields": ["completion_token_ids"]}}
    answer = api.complete(single).json()
    assert len(answer["nvext"]["completion_token_ids"]) == answer["usage"]["completion_tokens"]
    assert "identity" not in answer


def test_a_session_stays_on_a_replica_and_others_take_turns(api: Api, sampled: str) -> None:
    def replica(session: str | None) -> str:
        headers = {"X-Request-Id": str(uuid.uuid4()), **({"X-Session-Id": session} if session else {})}
        api.complete({"model": sampled, "prompt": [1], "max_tokens": 1}, headers=headers)
        (attempt,) = api.own(f"/requests/{headers['X-Request-Id']}")["attempts"]
        found: str = attempt["replica"]
        return found

    assert len({replica("a-session") for _ in range(4)}) == 1
    assert len({replica(None) for _ in range(4)}) == 2


def test_streams(api: Api, sampled: str) -> None:
    body = {
        "model": sampled,
        "prompt": [1, 2],
        "max_tokens": 5,
        "seed": 7,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    whole = api.complete(body).json()
    answer = api.complete({**body, "stream": True, "stream_options": {"include_usage": True}}, stream=True)
    lines = [line[6:] for line in answer.iter_lines() if line.startswith(b"data: ")]
    assert lines[-1] == b"[DONE]"
    events = [json.loads(line) for line in lines[:-1]]
    assert events[-1]["usage"] == whole["usage"]
    text = "".join(choice["text"] for event in events for choice in event["choices"])
    assert text == whole["choices"][0]["text"]
    tokens = [token for event in events for choice in event["choices"] for token in choice["token_ids"]]
    assert tokens == whole["choices"][0]["token_ids"]
    refusal = api.complete({**body, "stream": True, "prompt": [64]})
    assert (refusal.status_code, refusal.json()["error"]["param"]) == (400, "prompt")


# Kills and restarts --------------------------------------------------------------------------------------------------


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with contextlib.suppress(OSError):
        # A zombie whose parent has not looked yet is dead.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def until_dead(pids: list[int]) -> None:
    deadline = time.monotonic() + 20
    while running := [pid for pid in pids if alive(pid)]:
        assert time.monotonic() < deadline, f"still running: {running}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Return the process ids of all descendants."""
    listing = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = {int(line.split()[0]): int(line.split()[1]) for line in listing.splitlines()}
    found = [pid]
    for parent in found:
        found += [child for child, its_parent in parents.items() if its_parent == parent]
    return found[1:]


def boto3_bucket(emulator: Emulator) -> Bucket:
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        aws_access_key_id=emulator.access_key_id,
        aws_secret_access_key=emulator.secret_access_key,
        region_name=emulator.region,
        config=Config(s3={"addressing_style": "path"}),
    )
    return Bucket(emulator.bucket, client)


def test_a_kill_loses_nothing_and_leaves_no_orphan(tmp_path: Path, model: Files) -> None:
    """Killed in the middle of a hot-load and started again on the same state, it finishes that hot-load."""
    with Emulator(tmp_path / "state", report_identity=True) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        gateway = api.gateway()
        made = api.deployment(gateway["spec"]["id"], emulator.bucket)
        deployment_id, name = made["spec"]["id"], made["spec"]["model"]["name"]
        bucket = boto3_bucket(emulator)
        upload(bucket, made, "v0", model)
        api.completed(deployment_id, "v0")
        old, new = changed(model, seed=3)
        upload(bucket, made, "v1", tiny_delta.delta_snapshot(old, new, version="v1", base_version="v0"))
        # A replica that stands still keeps the hot-load on its way: no other, no update.
        os.kill(api.own("/state")["deployments"][0]["replicas"][1]["pid"], signal.SIGSTOP)
        mine = str(uuid.uuid4())
        api.hot_load(deployment_id, "v1", "v0", hotLoadId=mine)
        status, code, message = api.refused("POST", "/hotLoads", hot_load_body(deployment_id, "v1", "v0"))
        assert (status, code) == (400, 9)
        assert "already in progress" in message
        assert api.refused("POST", "/hotLoads", hot_load_body(deployment_id, "x") | {"hotLoadId": mine})[:2] == (409, 6)
        body = deployment_body(gateway["spec"]["id"], emulator.bucket, **made["spec"])
        assert "already in progress" in api.refused("PATCH", f"/deployments/{deployment_id}", body)[2]

        descendants = children(emulator.pid)
        assert len(descendants) >= 3
        env, base_url = emulator.env, emulator.base_url
        emulator.kill()
        until_dead(descendants)
        emulator.start()
        assert (emulator.env, emulator.base_url) == (env, base_url)

        ended = api.ended(mine)
        assert ended["status"]["state"] == "HOT_LOAD_STATE_COMPLETED", ended
        assert api.until_status(f"/gateways/{gateway['spec']['id']}", "gateway") == gateway
        assert api.ok("GET", f"/deployments/{deployment_id}")["deployment"]["spec"] == made["spec"]
        for replica in replica_names(api, deployment_id):
            assert api.own(f"/replicas/{replica}/tensors") == hashes(new)
        assert api.complete({"model": name, "prompt": [1], "max_tokens": 1}).json()["identity"] == "v1"
        history = api.ok("GET", f"/hotLoads?parentDeploymentId={deployment_id}")["hotLoads"]
        assert [row["spec"]["identity"] for row in history] == ["v1", "v0"]
        client = boto3_bucket(emulator).client
        listed = client.list_objects_v2(Bucket=emulator.bucket)["Contents"]
        assert len(listed) == len(model) + 2
        for entry in listed:
            read = client.get_object(Bucket=emulator.bucket, Key=entry["Key"])["Body"].read()
            assert len(read) == entry["Size"]
        secret_files = [emulator.state_dir / "keys.json", emulator.state_dir / "s3" / "s3.json"]
        assert {path.stat().st_mode & 0o777 for path in secret_files} == {0o600}

        # A replica that is killed comes back with the identity that was completed last.
        victim = api.own("/state")["deployments"][0]["replicas"][0]
        os.kill(victim["pid"], signal.SIGKILL)
        deadline = time.monotonic() + 30
        while True:
            found = api.own(f"/replicas/{victim['name']}")
            if found["pid"] not in (0, victim["pid"]) and found["identity"] == "v1":
                break
            assert time.monotonic() < deadline, found
            time.sleep(0.02)
        descendants = children(emulator.pid)
        api.close()
    until_dead(descendants)


def test_one_state_directory_has_one_emulator(emulator: Emulator) -> None:
    second = Emulator(emulator.state_dir)
    with pytest.raises(EmulatorError, match="another emulator runs on the state directory"):
        second.start()


_HOLDER = """
import sys, time
from cwtrain_emulator import Emulator
with Emulator() as emulator:
    print(emulator.pid, emulator.state_dir, flush=True)
    time.sleep(600)
"""


def test_a_killed_user_leaves_neither_processes_nor_files() -> None:
    holder = subprocess.Popen([sys.executable, "-c", _HOLDER], stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        pid, _, state_dir = holder.stdout.readline().strip().partition(" ")
        processes = [int(pid), *children(int(pid))]
        assert len(processes) >= 2
    finally:
        holder.kill()
        holder.wait()
        if holder.stdout is not None:
            holder.stdout.close()
    until_dead(processes)
    deadline = time.monotonic() + 10
    while os.path.exists(state_dir):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_serve_prints_exports_and_ends_cleanly_on_a_signal(number: signal.Signals, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cwtrain_emulator", "serve", "--env", f"--state-dir={tmp_path / 'state'}"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    exports = dict(process.stdout.readline().strip().removeprefix("export ").split("=", 1) for _ in range(6))
    assert exports.keys() == {
        "COREWEAVE_API_URL", "COREWEAVE_API_TOKEN", "CW_S3_ENDPOINT", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY",
        "AWS_REGION",
    }  # fmt: skip
    api = Api(exports["COREWEAVE_API_URL"], exports["COREWEAVE_API_TOKEN"])
    assert api.ok("GET", "/gateways") == {"items": []}
    api.close()
    descendants = children(process.pid)
    process.send_signal(number)
    rest, log = process.communicate(timeout=20)
    assert (process.returncode, rest) == (0, "")
    assert exports["COREWEAVE_API_TOKEN"] not in log
    assert "Traceback" not in log
    until_dead(descendants)


def test_a_port_that_is_taken_and_a_missing_key_are_said_so(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EmulatorError, match=r"port \d+ on 127\.0\.0\.1 is taken"):
            Emulator(tmp_path / "a", port=taken.getsockname()[1]).start()
    with pytest.raises(EmulatorError, match="AWS_ACCESS_KEY_ID"):
        Emulator(tmp_path / "b", s3_endpoint="http://127.0.0.1:1").start()
    environ = {**os.environ, "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b"}
    with pytest.raises(EmulatorError, match=r"the bucket cwtrain-weights at http://127\.0\.0\.1:1 cannot be listed"):
        Emulator(tmp_path / "c", s3_endpoint="http://127.0.0.1:1", environ=environ).start()


def test_an_external_store_can_be_used(emulator: Emulator, bucket: Bucket, model: Files) -> None:
    environ = {
        **os.environ,
        "AWS_ACCESS_KEY_ID": emulator.access_key_id,
        "AWS_SECRET_ACCESS_KEY": emulator.secret_access_key,
    }
    with Emulator(s3_endpoint=emulator.s3_endpoint, bucket=bucket.name, environ=environ) as other:
        assert other.s3_endpoint == emulator.s3_endpoint
        api = Api(other.base_url, other.admin_token)
        made = api.deployment(api.gateway()["spec"]["id"], other.bucket)
        upload(bucket, made, "v0", model)
        api.completed(made["spec"]["id"], "v0")
        api.close()
