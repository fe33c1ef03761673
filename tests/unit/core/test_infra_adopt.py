"""What ALREADY_EXISTS and a busy deployment mean."""

from __future__ import annotations

import pytest

from cwtrain import errors
from cwtrain.infra import IncrementalSnapshotMetadata
from cwtrain.infra._adopt import differences
from helpers.scripted_api import ScriptedApi, deployment, exists, gateway, hot_load, not_found

SPEC = {
    "id": "d-1",
    "name": "toy",
    "gatewayIds": ["g-1", "g-2"],
    "disabled": False,
    "runtime": {"engine": "dynamo-vllm", "engineConfig": {"max-model-len": "8192"}, "engineEnv": {"HF_TOKEN": "hush"}},
    "resources": {"instanceType": "H100", "gpuCount": 1},
    "model": {"name": "toy-model", "bucket": "weights", "path": "base"},
    "autoscaling": {"min": 1, "max": 1, "capacityClasses": ["CAPACITY_CLASS_RESERVED", "CAPACITY_CLASS_ON_DEMAND"]},
    "traffic": {"weight": 0},
    "hotLoad": {"bucket": "weights", "pathPrefix": "", "transitionMode": "TRANSITION_MODE_ASYNC"},
}


def stored(**changes):
    """SPEC as a server may give it back: zero values gone, defaults filled in."""
    found = {key: value for key, value in SPEC.items() if key not in ("disabled", "traffic")}
    found["organizationId"] = "org"
    found["runtime"] = {**SPEC["runtime"], "version": "1.2.3"}
    found["resources"] = {"instanceType": "H100", "gpuCount": "1"}
    found["gatewayIds"] = ["g-2", "g-1"]
    found["autoscaling"] = {**SPEC["autoscaling"], "priority": 100, "concurrency": 4}
    found["hotLoad"] = {"bucket": "weights", "transitionMode": "ASYNC"}
    return {**found, **changes}


def test_equal_in_what_was_asked_for():
    assert differences(SPEC, stored()) == ()
    assert differences(SPEC, SPEC) == ()
    assert differences({"id": "x", "gateway_ids": ["a"]}, {"id": "x", "gatewayIds": ["a"]}) == ()
    assert differences({"resources": {"capacityType": 1}}, {"resources": {"capacityType": "CAPACITY_TYPE_X"}}) == ()
    assert differences({"a": None, "b": "", "c": [], "d": {}, "e": 0, "f": "X_UNSPECIFIED"}, {}) == ()
    assert (
        differences(
            {"weightsAndBiasesAuth": {"apiKey": "k", "serverUrl": "u"}}, {"weightsAndBiasesAuth": {"serverUrl": "u"}}
        )
        == ()
    )
    assert differences({"coreWeaveAuth": {}}, {"coreWeaveAuth": {}}) == ()


@pytest.mark.parametrize(
    ("changes", "paths"),
    [
        ({"name": "other"}, ("name",)),
        ({"disabled": True}, ("disabled",)),
        ({"gatewayIds": ["g-1"]}, ("gatewayIds",)),
        ({"gatewayIds": ["g-1", "g-3"]}, ("gatewayIds",)),
        ({"gatewayIds": None}, ("gatewayIds",)),
        ({"runtime": {}}, ("runtime.engine", "runtime.engineConfig.max-model-len", "runtime.engineEnv.HF_TOKEN")),
        ({"resources": {"instanceType": "H200", "gpuCount": 2}}, ("resources.instanceType", "resources.gpuCount")),
        ({"traffic": {"weight": 5}}, ("traffic.weight",)),
        ({"hotLoad": {"bucket": "weights", "pathPrefix": "run"}}, ("hotLoad.pathPrefix", "hotLoad.transitionMode")),
        ({"model": "toy"}, ("model.name", "model.bucket", "model.path")),
        ({"resources": {"instanceType": "H100", "gpuCount": True}}, ("resources.gpuCount",)),
        (
            {"autoscaling": {"min": 1, "max": 1, "capacityClasses": ["CAPACITY_CLASS_ON_DEMAND", "RESERVED"]}},
            ("autoscaling.capacityClasses",),
        ),
    ],
)
def test_differences_are_named_by_path_and_never_by_value(changes, paths):
    assert differences(SPEC, stored(**changes)) == paths
    assert "hush" not in str(differences(SPEC, stored(**changes)))


def test_one_of_several_kinds_counts_even_when_empty():
    asked = {"coreWeaveAuth": {}, "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"}}
    found = {"weightsAndBiasesAuth": {}, "pathBasedRouting": {}}
    assert differences(asked, found) == ("coreWeaveAuth", "bodyBasedRouting")
    assert differences(asked, None) == ("coreWeaveAuth", "bodyBasedRouting")


def api_with(found, **others):
    return ScriptedApi({"POST /deployments": [exists()], "GET /deployments/d-1": [found], **others})


@pytest.mark.parametrize("state", ["STATUS_CREATING", "STATUS_READY", "STATUS_ERROR", "STATUS_NEW", None])
def test_b28_our_own_earlier_try_is_adopted(state):
    """B28: same id and same request: returned as created, whatever it has become short of its end."""
    found = {"deployment": {"spec": stored(), "status": {"status": state}}}
    assert api_with(found).client().create_deployment(SPEC).id == "d-1"


@pytest.mark.parametrize("state", ["STATUS_FAILED", "STATUS_DELETING"])
def test_b28_an_earlier_try_that_has_come_to_its_end(state):
    """B28: FAILED (or being deleted) is said, with the reason."""
    condition = {"type": "Ready", "status": "False", "message": "no capacity"}
    found = {"deployment": {"spec": stored(), "status": {"status": state, "conditions": [condition]}}}
    with pytest.raises(errors.DeploymentFailedError, match="no capacity") as caught:
        api_with(found).client().create_deployment(SPEC)
    assert state.removeprefix("STATUS_") in str(caught.value)


def test_b28_gateways_and_claims_follow_the_same_rules():
    """B28: every create."""
    api = ScriptedApi(
        {
            "POST /gateways": [exists()],
            "GET /gateways/g-1": [gateway("g-1"), gateway("g-1", "STATUS_FAILED"), gateway("g-1", name="x")],
            "POST /capacityclaims": [exists()],
            "GET /capacityclaims/c-1": [{"capacityClaim": {"spec": {"id": "c-1", "name": "y"}}}],
        }
    )
    client = api.client()
    asked = {"id": "g-1", "name": "gate"}
    assert client.create_gateway(asked).id == "g-1"
    with pytest.raises(errors.GatewayFailedError):
        client.create_gateway(asked)
    with pytest.raises(errors.AlreadyExistsError, match="name"):
        client.create_gateway(asked)
    with pytest.raises(errors.AlreadyExistsError, match="name") as caught:
        client.create_capacity_claim({"id": "c-1", "name": "mine"})
    assert "get_capacity_claim('c-1')" in caught.value.hint


def test_404_means_that_the_name_is_taken():
    api = api_with(
        not_found(),
        **{
            "GET /deployments": [
                {"items": [deployment("d-8", name="x")["deployment"], deployment("d-9")["deployment"]]}
            ]
        },
    )
    with pytest.raises(
        errors.AlreadyExistsError, match=r"the name 'toy' is taken by deployment d-9 \(READY\)"
    ) as caught:
        api.client().create_deployment({"name": "toy", "id": "d-1"})
    assert caught.value.differences == ("name",)
    assert "cwtrain deployment get d-9" in caught.value.hint
    assert (caught.value.code, caught.value.status) == ("already_exists", 409)


@pytest.mark.parametrize("answer", [{"items": []}, (403, {"code": 7, "message": "no"})])
def test_the_holder_of_the_name_may_be_out_of_sight(answer):
    api = api_with(not_found(), **{"GET /deployments": [answer]})
    with pytest.raises(errors.AlreadyExistsError, match="cannot see"):
        api.client().create_deployment({"name": "toy", "id": "d-1"})


# Hot-loads -----------------------------------------------------------------------------------------------------------

DELTA = IncrementalSnapshotMetadata(previous_snapshot_identity="s1")
ASK = {"snapshot_type": "INCREMENTAL", "incremental": DELTA, "hot_load_id": "h-1"}
WIRE_DELTA = {
    "type": "SNAPSHOT_TYPE_INCREMENTAL",
    "incrementalSnapshotMetadata": {
        "previousSnapshotIdentity": "s1",
        "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
        "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
    },
}


def taken(found):
    return ScriptedApi({"POST /hotLoads": [exists()], "GET /hotLoads/h-1": [found]}).client()


@pytest.mark.parametrize("state", ["HOT_LOAD_STATE_PENDING", "HOT_LOAD_STATE_COMPLETED", "HOT_LOAD_STATE_NEW", 4])
@pytest.mark.parametrize("policy", [None, "PROMPT_CACHE_POLICY_PRESERVE", "PROMPT_CACHE_POLICY_RESET_ALL"])
def test_b28_a_hot_load_of_our_id_and_request_is_adopted(state, policy):
    """B28: equal in deployment, identity, type, metadata, and policy where one was asked for."""
    found = hot_load("h-1", state, "s2", **WIRE_DELTA, promptCachePolicy=policy)
    assert taken(found).create_hot_load("d-1", "s2", **ASK).id == "h-1"


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"deploymentId": "d-2"}, "deployment_id"),
        ({"identity": "s3"}, "identity"),
        ({"type": "SNAPSHOT_TYPE_FULL"}, "type"),
        ({"incrementalSnapshotMetadata": None}, "incremental_snapshot_metadata"),
        ({"incrementalSnapshotMetadata": {"previousSnapshotIdentity": "s0"}}, "incremental_snapshot_metadata"),
        ({"promptCachePolicy": "PROMPT_CACHE_POLICY_PRESERVE"}, "prompt_cache_policy"),
    ],
)
def test_b28_a_hot_load_of_our_id_and_another_request_is_a_conflict(change, field):
    """B28: the fields that differ are named."""
    found = hot_load("h-1", identity="s2", **WIRE_DELTA, promptCachePolicy="PROMPT_CACHE_POLICY_RESET_ALL")
    found["hotLoad"]["spec"].update(change)
    with pytest.raises(errors.AlreadyExistsError, match=field) as caught:
        taken(found).create_hot_load("d-1", "s2", **ASK, prompt_cache_policy="RESET_ALL")
    assert caught.value.differences == (field,)


@pytest.mark.parametrize(
    ("state", "cls"), [("FAILED", errors.HotLoadFailedError), ("CANCELED", errors.HotLoadCanceledError)]
)
def test_b28_an_earlier_hot_load_that_ended_badly(state, cls):
    """B28: an adopted failure is an error with its reason."""
    found = hot_load("h-1", state, "s2", message="shard 3 is missing", **WIRE_DELTA)
    with pytest.raises(cls, match="shard 3 is missing") as caught:
        taken(found).create_hot_load("d-1", "s2", **ASK)
    assert caught.value.hot_load.id == "h-1"


def test_a_hot_load_id_that_cannot_be_seen():
    with pytest.raises(errors.AlreadyExistsError, match="cannot see"):
        taken(not_found()).create_hot_load("d-1", "s2", **ASK)


REFUSALS = [
    (400, {"code": 9, "message": "a hot-load is already in progress"}),
    (412, {"code": "failed_precondition", "message": "try later"}),
    (409, {"code": 10, "message": "conflict"}),
    (409, "the operation was aborted"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: str(refusal[1])[:30])
@pytest.mark.parametrize(
    "state", ["HOT_LOAD_STATE_PENDING", "HOT_LOAD_STATE_IN_PROGRESS", "HOT_LOAD_STATE_NEW", None, 3]
)
def test_b58_any_refusal_for_the_state_is_decided_by_the_active_hot_load(refusal, state):
    """B58: whatever the wording, the hot-load in the way is looked for and named."""
    api = ScriptedApi(
        {
            "POST /hotLoads": [refusal],
            "GET /hotLoads": [{"hotLoads": [hot_load("h-9", state, "s1")["hotLoad"], hot_load("h-8")["hotLoad"]]}],
        }
    )
    with pytest.raises(errors.HotLoadInProgressError, match="hot-load h-9 of 's1'") as caught:
        api.client().create_hot_load("d-1", "s2", **ASK)
    assert caught.value.hot_load_id == "h-9"
    assert caught.value.hint == "wait for it with: cwtrain hotload wait h-9"
    assert api.calls[-1].query == {"parentDeploymentId": ["d-1"]}


def test_b28_a_lost_answer_and_then_busy_with_our_own():
    """B28: the refused second try meets the hot-load that the first one made."""
    ours = hot_load("h-1", "HOT_LOAD_STATE_IN_PROGRESS", "s2", **WIRE_DELTA)
    api = ScriptedApi({"POST /hotLoads": [(502, ""), REFUSALS[0]], "GET /hotLoads": [{"hotLoads": [ours["hotLoad"]]}]})
    assert api.client().create_hot_load("d-1", "s2", **ASK).id == "h-1"
    assert api.log == ["POST /hotLoads", "POST /hotLoads", "GET /hotLoads"]


@pytest.mark.parametrize("refusal", REFUSALS[1:], ids=lambda refusal: str(refusal[1])[:30])
def test_without_an_active_hot_load_the_refusal_stands(refusal):
    api = ScriptedApi({"POST /hotLoads": [refusal], "GET /hotLoads": [{"hotLoads": [hot_load("h-8")["hotLoad"]]}]})
    with pytest.raises((errors.FailedPreconditionError, errors.AbortedError)) as caught:
        api.client().create_hot_load("d-1", "s2", **ASK)
    assert not isinstance(caught.value, errors.HotLoadInProgressError)
    assert len(api.calls) == 2


def test_b58_the_one_in_the_way_has_just_ended():
    """B58: refused as busy, and nothing is active any more: asked once more, with the same id."""
    api = ScriptedApi(
        {"POST /hotLoads": [REFUSALS[0], hot_load("h-1", "PENDING", "s2")], "GET /hotLoads": [{"hotLoads": []}]}
    )
    assert api.client().create_hot_load("d-1", "s2", **ASK).id == "h-1"
    assert [call.body["hotLoadId"] for call in api.calls if call.body] == ["h-1", "h-1"]
    api = ScriptedApi({"POST /hotLoads": [REFUSALS[0]], "GET /hotLoads": [{"hotLoads": []}]})
    with pytest.raises(errors.FailedPreconditionError, match="in progress"):
        api.client().create_hot_load("d-1", "s2", **ASK)
    assert len(api.calls) == 4


def test_when_the_list_cannot_be_read_the_refusal_stands():
    api = ScriptedApi({"POST /hotLoads": [REFUSALS[0]], "GET /hotLoads": [(403, {"code": 7, "message": "no"})]})
    with pytest.raises(errors.FailedPreconditionError, match="in progress"):
        api.client().create_hot_load("d-1", "s2", **ASK)
