"""Between the wire and the models: tolerant in, exact out."""

from __future__ import annotations

import datetime as dt
import logging

import pytest

from cwtrain.errors import UnexpectedAnswerError
from cwtrain.infra import _wire as wire
from cwtrain.models import service as m
from helpers.scripted_api import deployment, gateway, hot_load

ENUMS = {
    m.SnapshotType: "SNAPSHOT_TYPE_",
    m.CompressionFormat: "COMPRESSION_FORMAT_",
    m.ChecksumFormat: "CHECKSUM_FORMAT_",
    m.PromptCachePolicy: "PROMPT_CACHE_POLICY_",
    m.HotLoadState: "HOT_LOAD_STATE_",
    m.ReplicaState: "HOT_LOAD_REPLICA_STATE_",
    m.TransitionMode: "TRANSITION_MODE_",
    m.ResourceStatus: "STATUS_",
    m.ConditionStatus: "STATUS_",
}
ENDS_A_WAIT = {
    m.HotLoadState: {"COMPLETED", "FAILED", "CANCELED"},
    m.ReplicaState: {"READY", "ERROR"},
    m.ResourceStatus: {"READY", "FAILED", "DELETING"},
}


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_names_in_any_case_with_and_without_prefix(kind):
    prefix = ENUMS[kind]
    for member in kind:
        for text in (member.name, prefix + member.name, member.name.lower(), (prefix + member.name).title()):
            assert wire.read_enum(kind, text) is member
        assert wire.enum_to_wire(member) == prefix + member.name


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_numbers_are_read_but_never_end_a_wait(kind):
    for number, member in enumerate(kind):
        ends = member.name in ENDS_A_WAIT.get(kind, ())
        for value in (number, str(number), float(number)):
            assert wire.read_enum(kind, value) is (kind.UNSPECIFIED if ends else member)


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("value", ["NEW_IN_2027", 99, -1, 1.5, {"a": 1}, ["READY"], "READY!", "STATUS_", "\u00e7"])
def test_unknown_values_are_unspecified_and_logged_once(kind, value, caplog):
    with caplog.at_level(logging.WARNING, "cwtrain"):
        assert wire.read_enum(kind, value) is kind.UNSPECIFIED
        assert wire.read_enum(kind, value) is kind.UNSPECIFIED
    assert len(caplog.records) <= 1  # at most: another test may have met the value before


@pytest.mark.parametrize("value", [None, "", 0, "0", "UNSPECIFIED", "HOT_LOAD_STATE_UNSPECIFIED", True])
def test_nothing_is_unspecified_and_silent(value, caplog):
    with caplog.at_level(logging.WARNING, "cwtrain"):
        assert wire.read_enum(m.HotLoadState, value) is m.HotLoadState.UNSPECIFIED
    assert not caplog.records


def test_condition_status_in_plain_words():
    assert [wire.read_enum(m.ConditionStatus, word) for word in ("True", "False", "Unknown", "STATUS_TRUE")] == [
        m.ConditionStatus.TRUE,
        m.ConditionStatus.FALSE,
        m.ConditionStatus.UNKNOWN,
        m.ConditionStatus.TRUE,
    ]


FULL_DEPLOYMENT = {
    "spec": {
        "id": "d-1",
        "name": "toy",
        "organizationId": "org",
        "gatewayIds": ["g-1", "g-2"],
        "disabled": True,
        "runtime": {"engine": "dynamo-vllm", "version": "1.0", "engineConfig": {"max-model-len": "8192"}},
        "resources": {"instanceType": "H100", "gpuCount": 1},
        "model": {"name": "toy-model", "bucket": "weights", "path": "base"},
        "hotLoad": {"bucket": "weights", "pathPrefix": "run", "transitionMode": "TRANSITION_MODE_ASYNC"},
    },
    "status": {
        "status": "STATUS_READY",
        "createdAt": "2026-01-02T03:04:05Z",
        "updatedAt": "2026-01-02T03:04:05.123456789+01:00",
        "conditions": [
            {
                "type": "Ready",
                "status": "True",
                "reason": "AsExpected",
                "zone": "US-EAST-04A",
                "lastUpdateTime": "2026-01-02t03:04:05z",
            }
        ],
    },
    "unheardOf": {"x": 1},
}


def test_a_deployment_and_its_json():
    found = wire.read(m.Deployment, FULL_DEPLOYMENT, "GET /x")
    assert found.raw is FULL_DEPLOYMENT
    assert found.hot_load == m.HotLoadTarget(
        bucket="weights", path_prefix="run", transition_mode=m.TransitionMode.ASYNC
    )
    assert found.updated_at == dt.datetime(2026, 1, 2, 2, 4, 5, 123456, tzinfo=dt.UTC)
    data = wire.deployment_to_json(found, ["gw.example.com/", "https://b"])
    assert list(data)[:11] == [
        "id",
        "name",
        "status",
        "model_name",
        "engine",
        "hot_load",
        "gateway_ids",
        "conditions",
        "endpoints",
        "rollout_base_url",
        "disabled",
    ]
    assert data["status"] == "READY"
    assert (data["model_bucket"], data["model_path"]) == ("weights", "base")
    assert data["hot_load"] == {"bucket": "weights", "path_prefix": "run", "transition_mode": "ASYNC"}
    assert data["rollout_base_url"] == "https://gw.example.com/v1"
    assert data["conditions"][0]["status"] == "TRUE"
    assert data["updated_at"] == "2026-01-02T02:04:05.123456Z"
    assert wire.deployment_to_json(found)["rollout_base_url"] is None


def test_a_hot_load_and_its_json():
    raw = hot_load(
        type="SNAPSHOT_TYPE_INCREMENTAL",
        incrementalSnapshotMetadata={
            "previousSnapshotIdentity": "step_000001",
            "compressionFormat": 1,
            "checksumFormat": "adler32",
        },
        promptCachePolicy="PROMPT_CACHE_POLICY_RESET_ALL",
        snapshotChain=[
            {"identity": "step_000001", "type": "SNAPSHOT_TYPE_FULL", "hotLoadId": "h-0"},
            {"identity": "step_000002", "type": 2, "hotLoadId": "h-1", "compressionFormat": "ZSTD"},
        ],
    )["hotLoad"]
    found = wire.read(m.HotLoad, raw, "GET /x")
    assert (found.id, found.identity, found.state, found.previous_identity) == (
        "h-1",
        "step_000002",
        m.HotLoadState.COMPLETED,
        "step_000001",
    )
    assert found.spec.incremental_snapshot_metadata == m.IncrementalSnapshotMetadata(
        previous_snapshot_identity="step_000001"
    )
    assert [entry.type.name for entry in found.spec.snapshot_chain] == ["FULL", "INCREMENTAL"]
    data = wire.hot_load_to_json(found)
    assert set(data) == {"spec", "status"}
    assert data["spec"]["prompt_cache_policy"] == "RESET_ALL"
    assert data["status"]["state"] == "COMPLETED"
    assert "state_text" not in data["status"]


def test_claims_gateways_and_unknown_states_in_json():
    claim = {
        "spec": {
            "id": "c-1",
            "name": "mine",
            "resources": {"instanceId": "H100", "instanceCount": "2", "capacityType": "CAPACITY_TYPE_CUSTOMER"},
        },
        "status": {"status": "STATUS_DREAMING", "allocatedInstances": 1, "pendingInstances": "1"},
    }
    data = wire.claim_to_json(wire.read(m.CapacityClaim, claim, "GET /x"))
    assert (data["instance_count"], data["allocated_instances"], data["pending_instances"]) == (2, 1, 1)
    assert (data["status"], data["status_text"]) == ("UNSPECIFIED", "STATUS_DREAMING")
    gate = wire.read(m.Gateway, gateway(endpoints=["a"])["gateway"], "GET /x")
    assert wire.gateway_to_json(gate)["endpoints"] == ["a"]


@pytest.mark.parametrize(
    "status", [None, {}, {"status": None}, {"status": 0}, {"conditions": None}, {"createdAt": "0001-01-01T00:00:00Z"}]
)
def test_zero_values_may_be_left_out_or_null(status):
    for spec in ({"id": "d-1"}, {"id": "d-1", "hotLoad": {}, "gatewayIds": None, "model": None, "runtime": {}}):
        found = wire.read(m.Deployment, {"spec": spec, "status": status}, "GET /x")
        assert (found.status, found.hot_load, found.gateway_ids, found.conditions) == (
            m.ResourceStatus.UNSPECIFIED,
            None,
            (),
            (),
        )
        assert found.created_at is None


@pytest.mark.parametrize("time", ["yesterday", 17, "", "2026-13-01T00:00:00Z", {}])
def test_a_time_that_cannot_be_read_stops_nothing(time):
    assert wire.read(m.Deployment, {"spec": {"id": "d"}, "status": {"createdAt": time}}, "GET /x").created_at is None


@pytest.mark.parametrize(
    ("kind", "data", "said"),
    [
        (m.Deployment, {}, "the deployment in it has no id"),
        (m.Deployment, deployment(uid=""), "the deployment in it has no id"),
        (m.HotLoad, {"spec": {}}, "the hot-load in it has no id"),
        (m.CapacityClaim, {"spec": {"name": "x"}}, "the capacity-claim in it has no id"),
        (m.Deployment, "d-1", "an object is expected, not str"),
        (m.Deployment, None, "an object is expected, not NoneType"),
        (m.Deployment, {"spec": []}, "spec must be an object, not list"),
        (m.Deployment, {"spec": {"id": "d", "gatewayIds": "g-1"}}, "gatewayIds must be a list"),
        (m.Deployment, {"spec": {"id": {"x": 1}}}, "at id"),
        (m.Deployment, {"spec": {"id": "d", "disabled": "false"}}, "at disabled"),
        (m.Deployment, {"spec": {"id": "d"}, "status": {"conditions": [{"type": []}]}}, "conditions[0].type"),
        (m.CapacityClaim, {"spec": {"id": "c", "resources": {"instanceCount": 1.5}}}, "at instance_count"),
        (
            m.HotLoad,
            {"spec": {"id": "h", "snapshotChain": [{"hotLoadId": ["h"]}]}},
            "spec.snapshot_chain[0].hot_load_id",
        ),
    ],
)
def test_what_cannot_be_read_says_where(kind, data, said):
    with pytest.raises(UnexpectedAnswerError) as caught:
        wire.read(kind, data, "GET /things/1")
    assert "unexpected answer to GET /things/1: " in str(caught.value)
    assert said in str(caught.value)
