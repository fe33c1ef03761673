"""Rules of hot-loads: what a create must say, what the service checks, the resolved chain, how one ends."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

import pytest

from cwtrain_emulator.pytest_plugin import Bucket
from helpers import tiny_delta
from helpers.conformance import ABSENT, RFC_3339, UUID, idle_deployment_body, put_snapshot, refused
from helpers.emulator_api import Api, deployment_body, hot_load_body
from helpers.tiny_delta import Files, Tensor

METADATA = {
    "previousSnapshotIdentity": "v0",
    "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
    "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
}


@pytest.fixture(scope="module")
def tensors(tiny_model: Files) -> dict[str, Tensor]:
    return tiny_delta.read_tensors(tiny_model)


@pytest.fixture(scope="module")
def newer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return tiny_delta.nudged(tensors, seed=3, names=["lm_head.weight", "lm_head.bias"])


@pytest.fixture(scope="module")
def served(
    service: Api,
    common_gateway: str,
    store: Bucket,
    tiny_model: Files,
    tensors: dict[str, Tensor],
    newer: dict[str, Tensor],
) -> dict[str, Any]:
    """A deployment that has completed v0; v1 is a delta on it that is in the bucket. Tests add hot-loads to it."""
    made = service.deployment(common_gateway, store.name)
    put_snapshot(store, made, "v0", tiny_model)
    put_snapshot(store, made, "v1", tiny_delta.delta_snapshot(tensors, newer, version="v1", base_version="v0"))
    service.completed(made["spec"]["id"], "v0")
    return made


def history(api: Api, deployment: Mapping[str, Any]) -> list[str]:
    listed = api.ok("GET", f"/hotLoads?parentDeploymentId={deployment['spec']['id']}")["hotLoads"]
    return [row["spec"]["id"] for row in listed]


def refused_create(api: Api, deployment: Mapping[str, Any], body: dict[str, Any]) -> Any:
    """Refuse a create and make sure that nothing of it is left."""
    before = history(api, deployment)
    mine = str(uuid.uuid4())
    answer = refused(api, "POST", "/hotLoads", {"hotLoadId": mine, **body})
    assert history(api, deployment) == before
    assert refused(api, "GET", f"/hotLoads/{mine}").code == "NOT_FOUND"
    return answer


# A create that works -------------------------------------------------------------------------------------------------


def test_a_full_one_from_create_to_completed(service: Api, served: dict[str, Any]) -> None:
    """A create is answered at once; COMPLETED means that every replica is READY on the identity."""
    deployment_id, mine = served["spec"]["id"], str(uuid.uuid4())
    answer = service.ok("POST", "/hotLoads", {**hot_load_body(deployment_id, "v0"), "hotLoadId": mine})
    assert set(answer) == {"hotLoad"}
    created = answer["hotLoad"]
    assert set(created) == {"spec", "status"}
    spec = created["spec"]
    assert (spec["id"], spec["deploymentId"], spec["identity"]) == (mine, deployment_id, "v0")
    assert spec["type"] == "SNAPSHOT_TYPE_FULL"
    assert spec["organizationId"] == served["spec"]["organizationId"]
    assert "incrementalSnapshotMetadata" not in spec
    assert spec["snapshotChain"] == [{"identity": "v0", "type": "SNAPSHOT_TYPE_FULL", "hotLoadId": mine}]
    assert created["status"]["state"] in ("HOT_LOAD_STATE_PENDING", "HOT_LOAD_STATE_IN_PROGRESS")
    assert not {"finishedAt", "canceledAt"} & set(created["status"])

    done = service.ended(mine)
    assert done["status"]["state"] == "HOT_LOAD_STATE_COMPLETED"
    assert done["spec"] == spec
    status = done["status"]
    for name in ("createdAt", "updatedAt", "finishedAt"):
        assert RFC_3339.fullmatch(status[name])
    assert status["createdAt"] == created["status"]["createdAt"] <= status["finishedAt"] <= status["updatedAt"]
    assert "canceledAt" not in status
    replicas = service.ok("GET", f"/hotLoads/{mine}/replicas")["replicas"]
    assert len(replicas) == 2
    for replica in replicas:
        assert (replica["state"], replica["currentSnapshotIdentity"]) == ("READY", "v0")
        assert not replica.get("errorReason")
        for name in ("transitionedAt", "startedAt", "finishedAt", "updatedAt"):
            assert RFC_3339.fullmatch(replica[name])


def test_a_delta_has_its_chain(service: Api, served: dict[str, Any]) -> None:
    """`snapshotChain` is oldest first, entry 0 the full one; each entry names the hot-load that brought it."""
    deployment_id = served["spec"]["id"]
    full = service.completed(deployment_id, "v0")
    delta = service.completed(deployment_id, "v1", "v0")
    assert delta["spec"]["incrementalSnapshotMetadata"] == METADATA
    assert delta["spec"]["snapshotChain"] == [
        {"identity": "v0", "type": "SNAPSHOT_TYPE_FULL", "hotLoadId": full["spec"]["id"]},
        {
            "identity": "v1",
            "type": "SNAPSHOT_TYPE_INCREMENTAL",
            "hotLoadId": delta["spec"]["id"],
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
        },
    ]


def test_one_identity_may_be_loaded_again(service: Api, served: dict[str, Any]) -> None:
    """Several hot-loads may target one identity, an older one too; each has an id of its own."""
    deployment_id = served["spec"]["id"]
    first, second = (service.completed(deployment_id, "v0")["spec"]["id"] for _ in range(2))
    assert UUID.fullmatch(first)
    assert first != second
    assert history(service, served)[:2] == [second, first]


def test_the_id_is_the_client_s_and_taken_for_good(service: Api, served: dict[str, Any]) -> None:
    """Creates are idempotent by `hotLoadId`: a repeat is ALREADY_EXISTS, equal or not, running or done."""
    mine = str(uuid.uuid4())
    body = {**hot_load_body(served["spec"]["id"], "v0"), "hotLoadId": mine.upper()}
    assert service.ok("POST", "/hotLoads", body)["hotLoad"]["spec"]["id"] == mine
    for _ in range(2):
        for repeat in (body, {**body, "identity": "other"}, {"hotLoadId": mine}, {**body, "deploymentId": ABSENT}):
            answer = refused(service, "POST", "/hotLoads", repeat)
            assert answer.code == "ALREADY_EXISTS"
            assert answer.details["ResourceInfo"] == {"resourceType": "hotLoad", "resourceName": mine}
        service.ended(mine)
    assert service.ok("GET", f"/hotLoads/{mine.upper()}")["hotLoad"]["spec"]["identity"] == "v0"


@pytest.mark.parametrize(
    ("sent", "shown"),
    [
        (None, None),
        ("PROMPT_CACHE_POLICY_UNSPECIFIED", None),
        (0, None),
        ("PROMPT_CACHE_POLICY_RESET_ALL", "PROMPT_CACHE_POLICY_RESET_ALL"),
        ("reset_all", "PROMPT_CACHE_POLICY_RESET_ALL"),
        (1, "PROMPT_CACHE_POLICY_RESET_ALL"),
        ("PROMPT_CACHE_POLICY_PRESERVE", "PROMPT_CACHE_POLICY_PRESERVE"),
        (2, "PROMPT_CACHE_POLICY_PRESERVE"),
    ],
)
def test_the_prompt_cache_policy_comes_back(service: Api, served: dict[str, Any], sent: Any, shown: str | None) -> None:
    """`promptCachePolicy` is RESET_ALL or PRESERVE, or is left to the server; it comes back as it was asked for."""
    body = {**hot_load_body(served["spec"]["id"], "v0"), "promptCachePolicy": sent}
    made = service.ok("POST", "/hotLoads", body)["hotLoad"]
    service.ended(made["spec"]["id"])
    assert made["spec"].get("promptCachePolicy") == shown


def test_a_hot_load_is_found_alone_in_the_list_and_without_its_replicas(service: Api, served: dict[str, Any]) -> None:
    """GET of one answers under `hotLoad`, the list under `hotLoads`, alike; replicas have a call of their own."""
    done = service.completed(served["spec"]["id"], "v0")
    assert service.ok("GET", f"/hotLoads/{done['spec']['id']}") == {"hotLoad": done}
    listed = service.ok("GET", f"/hotLoads?parentDeploymentId={served['spec']['id']}")
    assert listed["hotLoads"][0] == done
    assert "replicas" not in json.dumps(listed)


def test_cancel_is_not_implemented(service: Api, served: dict[str, Any]) -> None:
    """`:cancel` answers UNIMPLEMENTED, HTTP 501, and changes nothing; of an unknown hot-load, NOT_FOUND."""
    done = service.completed(served["spec"]["id"], "v0")
    path = f"/hotLoads/{done['spec']['id']}"
    answer = service.call("POST", f"{path}:cancel", {"id": done["spec"]["id"]})
    assert (answer.status_code, answer.json()["code"]) == (501, 12)
    assert service.ok("GET", path) == {"hotLoad": done}
    assert refused(service, "POST", f"/hotLoads/{ABSENT}:cancel", {"id": ABSENT}).code == "NOT_FOUND"


# What a create must say ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["deploymentId", "identity", "type"])
def test_required_fields(service: Api, served: dict[str, Any], field: str) -> None:
    """A create names the deployment, the identity and the type."""
    for value in (None, ""):
        answer = refused_create(service, served, {**hot_load_body(served["spec"]["id"], "v0"), field: value})
        assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {field})


@pytest.mark.parametrize("kind", [0, "SNAPSHOT_TYPE_UNSPECIFIED", "SNAPSHOT_TYPE_PARTIAL", 3, -1, True, "2"])
def test_the_type_is_full_or_incremental(service: Api, served: dict[str, Any], kind: Any) -> None:
    """The zero value of `type`, and what the enum does not have, is refused."""
    answer = refused_create(service, served, {**hot_load_body(served["spec"]["id"], "v0"), "type": kind})
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"type"})


@pytest.mark.parametrize("kind", ["SNAPSHOT_TYPE_FULL", "full", 1])
def test_the_type_in_each_spelling(service: Api, served: dict[str, Any], kind: Any) -> None:
    """`type` may come as a name in any case, with or without the prefix, or as a number."""
    made = service.ok("POST", "/hotLoads", {**hot_load_body(served["spec"]["id"], "v0"), "type": kind})["hotLoad"]
    service.ended(made["spec"]["id"])
    assert made["spec"]["type"] == "SNAPSHOT_TYPE_FULL"


@pytest.mark.parametrize("metadata", [METADATA, {}, {"previousSnapshotIdentity": ""}])
def test_a_full_one_must_not_carry_metadata(service: Api, served: dict[str, Any], metadata: dict[str, str]) -> None:
    """FULL with `incrementalSnapshotMetadata`, even an empty one, is refused."""
    body = {**hot_load_body(served["spec"]["id"], "v0"), "incrementalSnapshotMetadata": metadata}
    answer = refused_create(service, served, body)
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"incrementalSnapshotMetadata"})


def test_an_incremental_one_must_carry_metadata(service: Api, served: dict[str, Any]) -> None:
    """INCREMENTAL without `incrementalSnapshotMetadata` is refused."""
    body = {**hot_load_body(served["spec"]["id"], "v1", "v0"), "incrementalSnapshotMetadata": None}
    answer = refused_create(service, served, body)
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"incrementalSnapshotMetadata"})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(field, None) for field in METADATA],
        ("previousSnapshotIdentity", ""),
        ("previousSnapshotIdentity", "a/b"),
        ("previousSnapshotIdentity", ".."),
        ("previousSnapshotIdentity", "x" * 129),
        ("previousSnapshotIdentity", 5),
        ("compressionFormat", "COMPRESSION_FORMAT_UNSPECIFIED"),
        ("compressionFormat", "COMPRESSION_FORMAT_LZ4"),
        ("compressionFormat", 0),
        ("checksumFormat", "CHECKSUM_FORMAT_CRC32"),
        ("checksumFormat", 2),
    ],
)
def test_the_metadata_has_exactly_three_fields(service: Api, served: dict[str, Any], field: str, value: Any) -> None:
    """Predecessor, ZSTD and ADLER32: each is required, and no other value will do."""
    body = hot_load_body(served["spec"]["id"], "v1", "v0")
    body["incrementalSnapshotMetadata"] = {**METADATA, field: value}
    answer = refused_create(service, served, body)
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {f"incrementalSnapshotMetadata.{field}"})


def test_the_metadata_by_numbers(service: Api, served: dict[str, Any]) -> None:
    """The formats may come as numbers; they go out as names."""
    body = hot_load_body(served["spec"]["id"], "v1", "v0")
    body["incrementalSnapshotMetadata"] = {**METADATA, "compressionFormat": 1, "checksumFormat": "adler32"}
    service.completed(served["spec"]["id"], "v0")
    made = service.ok("POST", "/hotLoads", body)["hotLoad"]
    service.ended(made["spec"]["id"])
    assert made["spec"]["incrementalSnapshotMetadata"] == METADATA


@pytest.mark.parametrize("identity", ["a/b", "/a", "a/", "/", ".", "..", "x" * 129, "\ud800"])
def test_an_identity_is_one_path_segment(service: Api, served: dict[str, Any], identity: str) -> None:
    """An identity has 1 to 128 characters and is one path segment, neither `.` nor `..`."""
    answer = refused_create(service, served, hot_load_body(served["spec"]["id"], identity))
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"identity"})


@pytest.mark.parametrize("identity", ["x" * 128, "...", "a..b", "v 0", "ü", "%2e%2e", "a:b", "-"])
def test_other_identities_are_looked_for_in_the_bucket(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, identity: str
) -> None:
    """Any other text is an identity: it is refused for want of objects, and loads when they are there."""
    answer = refused_create(service, served, hot_load_body(served["spec"]["id"], identity))
    assert answer.code == "FAILED_PRECONDITION"
    assert "does not exist" in answer.message
    if len(identity) < 128:
        put_snapshot(store, served, identity, tiny_model)
        assert service.completed(served["spec"]["id"], identity)["spec"]["identity"] == identity


def test_initial_is_reserved(service: Api, served: dict[str, Any]) -> None:
    """`initial` names the deployment's base weights: it is no target, and no predecessor either."""
    answer = refused_create(service, served, hot_load_body(served["spec"]["id"], "initial"))
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"identity"})
    answer = refused_create(service, served, hot_load_body(served["spec"]["id"], "v1", "initial"))
    assert answer.code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION")
    assert "initial" in answer.message


# The deployment ------------------------------------------------------------------------------------------------------


def test_the_deployment_must_be_there(service: Api, served: dict[str, Any]) -> None:
    """A deployment that is not there is NOT_FOUND; an id that is no UUID is INVALID_ARGUMENT."""
    answer = refused_create(service, served, hot_load_body(ABSENT, "v0"))
    assert answer.code == "NOT_FOUND"
    assert answer.details["ResourceInfo"] == {"resourceType": "deployment", "resourceName": ABSENT}
    assert refused_create(service, served, hot_load_body("x", "v0")).fields == {"deploymentId"}


def test_the_deployment_must_have_been_created_for_hot_loads(
    service: Api, served: dict[str, Any], common_gateway: str, store: Bucket
) -> None:
    """A deployment without `hotLoad` takes none."""
    body = idle_deployment_body(common_gateway, store.name, hotLoad=None)
    plain = service.ok("POST", "/deployments", body)["deployment"]["spec"]["id"]
    service.until_status(f"/deployments/{plain}", "deployment")
    answer = refused_create(service, served, hot_load_body(plain, "v0"))
    assert answer.code == "FAILED_PRECONDITION"
    assert "hotLoad" in answer.message
    service.ok("DELETE", f"/deployments/{plain}")


def test_a_disabled_deployment_takes_none(
    service: Api, served: dict[str, Any], common_gateway: str, store: Bucket
) -> None:
    """A deployment that runs nothing can load nothing."""
    idle = service.ok("POST", "/deployments", idle_deployment_body(common_gateway, store.name))["deployment"]
    service.until_status(f"/deployments/{idle['spec']['id']}", "deployment")
    assert refused_create(service, served, hot_load_body(idle["spec"]["id"], "v0")).code == "FAILED_PRECONDITION"
    service.ok("DELETE", f"/deployments/{idle['spec']['id']}")


# The predecessor -----------------------------------------------------------------------------------------------------


def test_the_predecessor_must_have_completed_on_this_deployment(
    service: Api,
    served: dict[str, Any],
    common_gateway: str,
    store: Bucket,
    tensors: dict[str, Tensor],
    newer: dict[str, Tensor],
) -> None:
    """A predecessor is the identity of a COMPLETED hot-load here: not unknown, not FAILED, not another's."""
    deployment_id = served["spec"]["id"]
    answer = refused_create(service, served, hot_load_body(deployment_id, "v1", "never-loaded"))
    assert answer.code == "FAILED_PRECONDITION"
    assert "never-loaded" in answer.message

    wrong = {"lm_head.bias": "00000001"}
    delta = tiny_delta.delta_snapshot(tensors, newer, version="bad", base_version="v0", sums=wrong)
    put_snapshot(store, served, "bad", delta)
    service.completed(deployment_id, "v0")
    failed = service.ended(service.hot_load(deployment_id, "bad", "v0"))
    assert failed["status"]["state"] == "HOT_LOAD_STATE_FAILED"
    assert refused_create(service, served, hot_load_body(deployment_id, "v2", "bad")).code == "FAILED_PRECONDITION"

    # Another deployment reads the same objects, and has loaded none of them.
    body = deployment_body(common_gateway, store.name, hotLoad=served["spec"]["hotLoad"])
    other = service.ok("POST", "/deployments", body)["deployment"]["spec"]["id"]
    service.until_status(f"/deployments/{other}", "deployment")
    answer = refused_create(service, served, hot_load_body(other, "v1", "v0"))
    assert answer.code == "FAILED_PRECONDITION"
    assert "v0" in answer.message
    service.completed(other, "v0")
    service.completed(other, "v1", "v0")
    service.ok("DELETE", f"/deployments/{other}")


# The objects ---------------------------------------------------------------------------------------------------------

INDEX = tiny_delta.INDEX


def without(files: Files, *names: str) -> Files:
    return {name: raw for name, raw in files.items() if name not in names}


def with_index(files: Files, **changes: Any) -> Files:
    index = json.loads(files[INDEX])
    return {**files, INDEX: json.dumps({**index, **changes}).encode()}


def test_the_objects_of_a_full_one_are_checked_at_once(
    service: Api, served: dict[str, Any], store: Bucket, tiny_model: Files, tensors: dict[str, Tensor]
) -> None:
    """At request time: the index is there and readable, every file that it names exists, so does `config.json`."""
    shard = next(name for name in tiny_model if name.endswith(".safetensors"))
    delta = tiny_delta.delta_snapshot(tensors, tiny_delta.nudged(tensors, seed=1), version="full-4", base_version="v0")
    cases = [
        (without(tiny_model, INDEX), INDEX),
        (without(tiny_model, shard), shard),
        (without(tiny_model, "config.json"), "config.json"),
        ({**tiny_model, INDEX: b"{"}, INDEX),
        ({**delta, "config.json": b"{}"}, "delta"),
        (with_index(tiny_model, weight_map={}), INDEX),
        (with_index(tiny_model, weight_map={"a": "../v0/x.safetensors"}), INDEX),
    ]
    for number, (files, named) in enumerate(cases):
        put_snapshot(store, served, f"full-{number}", files)
        answer = refused_create(service, served, hot_load_body(served["spec"]["id"], f"full-{number}"))
        assert answer.code == "FAILED_PRECONDITION"
        assert named in answer.message, (number, answer)


def test_the_objects_of_a_delta_are_checked_at_once(
    service: Api, served: dict[str, Any], store: Bucket, tensors: dict[str, Tensor], newer: dict[str, Tensor]
) -> None:
    """A delta's index says xor, zstd and adler32, and names both identities; all problems are told."""
    wrong = {
        "version": "000001",
        "base_version": "000000",
        "delta_encoding": "sub",
        "compression_format": "lz4",
        "checksum_format": "crc32",
    }
    service.completed(served["spec"]["id"], "v0")
    for number, (name, value) in enumerate(wrong.items()):
        identity = f"delta-{number}"
        files = tiny_delta.delta_snapshot(tensors, newer, version=identity, base_version="v0", metadata={name: value})
        put_snapshot(store, served, identity, files)
        answer = refused_create(service, served, hot_load_body(served["spec"]["id"], identity, "v0"))
        assert answer.code == "FAILED_PRECONDITION"
        assert name in answer.message
        assert value in answer.message
    files = tiny_delta.delta_snapshot(tensors, newer, version="x", base_version="y", metadata=wrong)
    put_snapshot(store, served, "delta-all", files)
    answer = refused_create(service, served, hot_load_body(served["spec"]["id"], "delta-all", "v0"))
    assert all(name in answer.message for name in wrong)
    # And a full one is no delta.
    answer = refused_create(service, served, hot_load_body(served["spec"]["id"], "v0", "v1"))
    assert answer.code == "FAILED_PRECONDITION"


# How it ends ---------------------------------------------------------------------------------------------------------


def test_a_failure_says_why_and_a_full_one_mends_it(
    service: Api, served: dict[str, Any], store: Bucket, tensors: dict[str, Tensor], newer: dict[str, Tensor]
) -> None:
    """The engine checks Adler-32 after a delta: ERROR with a reason, the old weights, FAILED with a condition."""
    deployment_id = served["spec"]["id"]
    wrong = {"lm_head.weight": "00000001"}
    delta = tiny_delta.delta_snapshot(tensors, newer, version="broken", base_version="v0", sums=wrong)
    put_snapshot(store, served, "broken", delta)
    service.completed(deployment_id, "v0")
    failed = service.ended(service.hot_load(deployment_id, "broken", "v0"))
    assert failed["status"]["state"] == "HOT_LOAD_STATE_FAILED"
    assert RFC_3339.fullmatch(failed["status"]["finishedAt"])
    unmet = [entry for entry in failed["status"]["conditions"] if entry["status"] != "STATUS_TRUE"]
    assert any("lm_head.weight" in entry["message"] for entry in unmet)
    for replica in service.ok("GET", f"/hotLoads/{failed['spec']['id']}/replicas")["replicas"]:
        assert (replica["state"], replica["currentSnapshotIdentity"]) == ("ERROR", "v0")
        assert "lm_head.weight" in replica["errorReason"]
    service.completed(deployment_id, "v0")
    service.completed(deployment_id, "v1", "v0")
