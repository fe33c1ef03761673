"""InferenceClient: each call's method, path, query and body; ids; lists; pickling. In memory."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from cwtrain import errors
from cwtrain.infra import (
    CapacityClaim,
    Deployment,
    Gateway,
    HotLoad,
    HotLoadReplica,
    IncrementalSnapshotMetadata,
    InferenceClient,
    PromptCachePolicy,
    SnapshotType,
)
from helpers.scripted_api import TOKEN, ScriptedApi, deployment, gateway, hot_load

CLAIM = {"capacityClaim": {"spec": {"id": "c-1", "name": "mine"}, "status": {"status": "STATUS_READY"}}}
DELTA = IncrementalSnapshotMetadata(previous_snapshot_identity="s1")


def pages(key, one):
    return {key: list(one.values())}


CALLS = {
    "create_gateway": ("POST /gateways", gateway(), lambda c: c.create_gateway({"id": "g-1", "name": "gate"}), Gateway),
    "get_gateway": ("GET /gateways/g-1", gateway(), lambda c: c.get_gateway("g-1"), Gateway),
    "list_gateways": ("GET /gateways", pages("items", gateway()), lambda c: c.list_gateways(), Gateway),
    "update_gateway": ("PATCH /gateways/g-1", gateway(), lambda c: c.update_gateway("g-1", {"name": "x"}), Gateway),
    "delete_gateway": ("DELETE /gateways/g-1", gateway(), lambda c: c.delete_gateway("g-1"), Gateway),
    "create_deployment": (
        "POST /deployments",
        deployment(),
        lambda c: c.create_deployment({"id": "d-1", "name": "toy"}),
        Deployment,
    ),
    "get_deployment": ("GET /deployments/d-1", deployment(), lambda c: c.get_deployment("d-1"), Deployment),
    "list_deployments": ("GET /deployments", pages("items", deployment()), lambda c: c.list_deployments(), Deployment),
    "update_deployment": (
        "PATCH /deployments/d-1",
        deployment(),
        lambda c: c.update_deployment("d-1", {"hotLoad": {"bucket": "b"}}),
        Deployment,
    ),
    "delete_deployment": ("DELETE /deployments/d-1", deployment(), lambda c: c.delete_deployment("d-1"), Deployment),
    "create_capacity_claim": (
        "POST /capacityclaims",
        CLAIM,
        lambda c: c.create_capacity_claim({"id": "c-1", "name": "mine"}),
        CapacityClaim,
    ),
    "get_capacity_claim": ("GET /capacityclaims/c-1", CLAIM, lambda c: c.get_capacity_claim("c-1"), CapacityClaim),
    "list_capacity_claims": (
        "GET /capacityclaims",
        pages("items", CLAIM),
        lambda c: c.list_capacity_claims(),
        CapacityClaim,
    ),
    "update_capacity_claim": (
        "PATCH /capacityclaims/c-1",
        CLAIM,
        lambda c: c.update_capacity_claim("c-1", {"instanceCount": 2}),
        CapacityClaim,
    ),
    "delete_capacity_claim": (
        "DELETE /capacityclaims/c-1",
        CLAIM,
        lambda c: c.delete_capacity_claim("c-1"),
        CapacityClaim,
    ),
    "create_hot_load": (
        "POST /hotLoads",
        hot_load(),
        lambda c: c.create_hot_load("d-1", "s", snapshot_type="FULL"),
        HotLoad,
    ),
    "get_hot_load": ("GET /hotLoads/h-1", hot_load(), lambda c: c.get_hot_load("h-1"), HotLoad),
    "list_hot_loads": ("GET /hotLoads", pages("hotLoads", hot_load()), lambda c: c.list_hot_loads(), HotLoad),
    "list_hot_load_replicas": (
        "GET /hotLoads/h-1/replicas",
        {"replicas": [{"name": "r"}]},
        lambda c: c.list_hot_load_replicas("h-1"),
        HotLoadReplica,
    ),
    "cancel_hot_load": ("POST /hotLoads/h-1:cancel", hot_load(), lambda c: c.cancel_hot_load("h-1"), HotLoad),
}
each_call = pytest.mark.parametrize(("rule", "answer", "call", "kind"), CALLS.values(), ids=CALLS)


@each_call
def test_method_path_and_result(rule, answer, call, kind):
    api = ScriptedApi({rule: [answer]})
    result = call(api.client())
    result = result if isinstance(result, kind) else next(iter(result))
    assert isinstance(result, kind)
    assert result.raw
    assert api.log == [rule]
    assert api.calls[0].headers["authorization"] == f"Bearer {TOKEN}"
    assert api.calls[0].headers["accept"] == "application/json"
    assert api.calls[0].headers["user-agent"].startswith("cwtrain/")


def exhaust(result):
    return list(result) if hasattr(result, "__next__") else result


@each_call
@pytest.mark.parametrize("bad", [{"unexpected": 1}, {"error": "x"}, {"spec": {"id": "d-1"}}, [], "text", 17, None])
def test_a_reply_without_the_expected_key_is_an_error(rule, answer, call, kind, bad):
    key = next(iter(answer))
    for reply in (bad, {key: "odd"}, {key: 3}):
        with pytest.raises(errors.UnexpectedAnswerError):
            exhaust(call(ScriptedApi({rule: [reply]}).client()))


@each_call
def test_an_empty_reply_or_id_is_an_error_and_never_an_empty_object(rule, answer, call, kind):
    key = next(iter(answer))
    if isinstance(answer[key], list):
        assert exhaust(call(ScriptedApi({rule: [{}]}).client())) == []  # proto3 leaves out an empty list
        bad = [{key: [{}]}, {key: [{"spec": {"id": ""}}]}, {key: [None]}]
        bad = bad[2:] if kind is HotLoadReplica else bad
    else:
        bad = [{key: None}, {key: {}}, {key: {"spec": {}}}, {key: {"spec": {"id": ""}}}]
        bad += [] if rule.startswith("DELETE") else [{}]
    for reply in bad:
        with pytest.raises(errors.UnexpectedAnswerError):
            exhaust(call(ScriptedApi({rule: [reply]}).client()))


def test_a_delete_without_a_last_state():
    import httpx

    for reply in ({}, httpx.Response(204), httpx.Response(200)):
        assert ScriptedApi({"DELETE /deployments/d-1": [reply]}).client().delete_deployment("d-1") is None


BAD_IDS = ["", " ", "a/b", "/", "..", ".", None, 7, "\ud800"]


@pytest.mark.parametrize("bad", BAD_IDS, ids=repr)
def test_ids_that_are_no_path_segment_are_refused_before_any_call(bad):
    api = ScriptedApi({})
    client = api.client()
    for call in (
        lambda: client.get_gateway(bad),
        lambda: client.update_gateway(bad, {}),
        lambda: client.delete_gateway(bad),
        lambda: client.get_deployment(bad),
        lambda: client.update_deployment(bad, {}),
        lambda: client.delete_deployment(bad),
        lambda: client.get_capacity_claim(bad),
        lambda: client.update_capacity_claim(bad, {}),
        lambda: client.delete_capacity_claim(bad),
        lambda: client.get_hot_load(bad),
        lambda: client.list_hot_load_replicas(bad),
        lambda: client.cancel_hot_load(bad),
        lambda: client.create_hot_load(bad, "s", snapshot_type="FULL"),
        lambda: client.create_hot_load("d", bad, snapshot_type="FULL"),
        lambda: client.create_hot_load("d", "s", snapshot_type="FULL", hot_load_id=bad or "a/b"),
    ):
        with pytest.raises(errors.ConfigError):
            call()
    assert api.calls == []


@pytest.mark.parametrize(
    ("uid", "path"),
    [
        ("a b", "a%20b"),
        ("a%2Fb", "a%252Fb"),
        ("a?x=1", "a%3Fx%3D1"),
        ("a#b", "a%23b"),
        ("\u00e7", "%C3%A7"),
        ("a:cancel", "a%3Acancel"),
    ],
)
def test_ids_are_percent_encoded(uid, path):
    api = ScriptedApi({f"GET /deployments/{path}": [deployment(uid)]})
    assert api.client().get_deployment(uid).id == uid
    api = ScriptedApi({f"POST /hotLoads/{path}:cancel": [hot_load(uid)]})
    assert api.client().cancel_hot_load(uid).id == uid


# Bodies and queries --------------------------------------------------------------------------------------------------


def test_create_bodies_are_the_spec_with_an_id():
    api = ScriptedApi({"POST /deployments": [lambda call: deployment(call.body["id"])]})
    spec = {"name": "toy", "gatewayIds": ["g"], "hotLoad": {"bucket": "b", "transitionMode": "TRANSITION_MODE_ASYNC"}}
    made = api.client().create_deployment(spec)
    assert str(uuid.UUID(made.id)) == made.id
    assert api.calls[0].body == {"id": made.id, **spec}
    assert "id" not in spec


def test_update_deployment_sends_the_whole_spec_with_id_and_hot_load():
    stored = deployment("d-1", hotLoad={"bucket": "b", "pathPrefix": "run", "transitionMode": "TRANSITION_MODE_ASYNC"})
    api = ScriptedApi({"GET /deployments/d-1": [stored], "PATCH /deployments/d-1": [stored]})
    client = api.client()
    for left_out in ({"name": "toy", "disabled": True}, {"name": "toy", "disabled": True, "hotLoad": None}):
        client.update_deployment("d-1", left_out)
        assert api.log[-2:] == ["GET /deployments/d-1", "PATCH /deployments/d-1"]
        assert api.calls[-1].body == {
            "id": "d-1",
            "name": "toy",
            "disabled": True,
            "hotLoad": stored["deployment"]["spec"]["hotLoad"],
        }
    client.update_deployment("d-1", {"id": "d-1", "hotLoad": {"bucket": "b"}})
    assert api.calls[-1].body == {"id": "d-1", "hotLoad": {"bucket": "b"}}
    assert len(api.calls) == 5
    with pytest.raises(errors.ConfigError, match=r"'d-2'.*'d-1'"):
        client.update_deployment("d-1", {"id": "d-2"})


def test_update_deployment_without_hot_load_anywhere():
    api = ScriptedApi({"GET /deployments/d-1": [deployment()], "PATCH /deployments/d-1": [deployment()]})
    api.client().update_deployment("d-1", {"name": "toy"})
    assert api.calls[-1].body == {"id": "d-1", "name": "toy"}


def test_other_updates():
    api = ScriptedApi({"PATCH /gateways/g-1": [gateway()], "PATCH /capacityclaims/c-1": [CLAIM]})
    client = api.client()
    client.update_gateway("g-1", {"name": "gate", "zones": ["z"]})
    client.update_capacity_claim("c-1", {"instanceCount": 3})
    assert [call.body for call in api.calls] == [
        {"id": "g-1", "name": "gate", "zones": ["z"]},
        {"id": "c-1", "resources": {"instanceCount": 3}},
    ]


def test_hot_load_bodies_are_exactly_as_specified():
    api = ScriptedApi({"POST /hotLoads": [lambda call: hot_load(call.body["hotLoadId"])]})
    client = api.client()
    client.create_hot_load("d-1", "s2", snapshot_type=SnapshotType.FULL, hot_load_id="h-1")
    assert api.calls[-1].body == {
        "deploymentId": "d-1",
        "hotLoadId": "h-1",
        "identity": "s2",
        "type": "SNAPSHOT_TYPE_FULL",
    }
    client.create_hot_load(
        "d-1",
        "s2",
        snapshot_type="INCREMENTAL",
        incremental=DELTA,
        prompt_cache_policy=PromptCachePolicy.RESET_ALL,
    )
    assert api.calls[-1].body == {
        "deploymentId": "d-1",
        "hotLoadId": str(uuid.UUID(api.calls[-1].body["hotLoadId"])),
        "identity": "s2",
        "type": "SNAPSHOT_TYPE_INCREMENTAL",
        "promptCachePolicy": "PROMPT_CACHE_POLICY_RESET_ALL",
        "incrementalSnapshotMetadata": {
            "previousSnapshotIdentity": "s1",
            "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
            "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
        },
    }
    client.create_hot_load("d-1", "s2", snapshot_type="FULL", prompt_cache_policy="PRESERVE")
    assert api.calls[-1].body["promptCachePolicy"] == "PROMPT_CACHE_POLICY_PRESERVE"


@pytest.mark.parametrize(
    "settings",
    [
        {"snapshot_type": "FULL", "incremental": DELTA},
        {"snapshot_type": "INCREMENTAL"},
        {"snapshot_type": "UNSPECIFIED"},
        {"snapshot_type": "PARTIAL"},
        {"snapshot_type": "FULL", "prompt_cache_policy": "KEEP"},
        {"snapshot_type": "INCREMENTAL", "incremental": IncrementalSnapshotMetadata(previous_snapshot_identity="")},
    ],
)
def test_hot_loads_that_make_no_sense_are_refused_before_any_call(settings):
    api = ScriptedApi({})
    with pytest.raises(errors.ConfigError):
        api.client().create_hot_load("d-1", "s", **settings)
    assert api.calls == []


def test_cancel_sends_the_id_and_says_that_it_is_not_there_yet():
    api = ScriptedApi({"POST /hotLoads/h-1:cancel": [(501, {"code": 12, "message": "unimplemented"})]})
    with pytest.raises(errors.UnimplementedError) as caught:
        api.client().cancel_hot_load("h-1")
    assert api.calls[0].body == {"id": "h-1"}
    assert len(api.calls) == 1
    assert "wait" in caught.value.hint


def test_queries():
    api = ScriptedApi(
        {
            "GET /gateways": [{"items": []}],
            "GET /deployments": [{"items": []}],
            "GET /capacityclaims": [{"items": []}],
            "GET /hotLoads": [{"hotLoads": []}],
            "GET /hotLoads/h-1/replicas": [{"replicas": []}],
            "GET /deployments/parameters": [{"gatewayIds": []}],
            "GET /gateways/parameters": [{"zones": ["z"]}],
            "GET /capacityclaims/parameters": [{}],
        }
    )
    client = api.client()
    at = dt.datetime(2026, 1, 2, 4, 4, 5, tzinfo=dt.timezone(dt.timedelta(hours=1)))
    client.list_gateways(updated_after=at)
    client.list_deployments(gateway_id="g-1", updated_after="2026-01-02T03:04:05Z")
    client.list_capacity_claims()
    list(client.list_hot_loads("d-1", page_size=7))
    list(client.list_hot_loads())
    client.list_hot_load_replicas("h-1", page_size=1000)
    client.get_deployment_parameters(["g-1", "g-2"])
    client.get_deployment_parameters("g-1")
    client.get_deployment_parameters()
    assert client.get_gateway_parameters() == {"zones": ["z"]}
    assert client.get_capacity_claim_parameters() == {}
    assert [call.query for call in api.calls] == [
        {"updatedAfter": ["2026-01-02T03:04:05Z"]},
        {"parentGatewayId": ["g-1"], "updatedAfter": ["2026-01-02T03:04:05Z"]},
        {},
        {"parentDeploymentId": ["d-1"], "maxPageSize": ["7"]},
        {},
        {"maxPageSize": ["1000"]},
        {"gatewayIds": ["g-1", "g-2"]},
        {"gatewayIds": ["g-1"]},
        {},
        {},
        {},
    ]
    for bad in (-1, True, 1.5):
        with pytest.raises(errors.ConfigError, match="page_size"):
            client.list_hot_loads("d-1", page_size=bad)  # at once, not at the first item
    with pytest.raises(errors.ConfigError, match="time zone"):
        client.list_gateways(updated_after=dt.datetime(2026, 1, 2))


def test_a_spec_that_is_no_json_is_refused():
    client = ScriptedApi({}).client()
    for spec in ({"id": "g", "x": object()}, {"id": "g", "x": float("nan")}, [], {"id": "a/b"}, {"id": 7}):
        with pytest.raises(errors.ConfigError):
            client.create_gateway(spec)


def test_another_id_than_ours_is_logged(caplog):
    api = ScriptedApi({"POST /gateways": [gateway("other")]})
    assert api.client().create_gateway({"id": "mine", "name": "x"}).id == "other"
    assert "other instead of ours, mine" in caplog.text


# The client itself ---------------------------------------------------------------------------------------------------


def test_settings_come_from_the_environment():
    os.environ["COREWEAVE_API_TOKEN"] = " from-env\n"
    os.environ["COREWEAVE_API_URL"] = "http://127.0.0.1:7/"
    os.environ["CWTRAIN_API_HEADERS"] = '{"X-Test": "yes"}'
    api = ScriptedApi({"GET /gateways": [{"items": []}]})
    with api.client(token=None) as client:
        client.list_gateways()
        assert client.base_url == "http://127.0.0.1:7"
    assert api.calls[0].headers["authorization"] == "Bearer from-env"
    assert api.calls[0].headers["x-test"] == "yes"
    assert api.calls[0].headers["host"] == "127.0.0.1:7"


@pytest.mark.parametrize(
    "settings",
    [
        {"base_url": "https://api.coreweave.com/v1alpha1/inference"},
        {"base_url": "ftp://x"},
        {"timeout": 0},
        {"timeout": float("inf")},
        {"timeout": float("nan")},
        {"retry_seconds": -1},
        {"retry_seconds": float("inf")},
        {"headers": {"Authorization": "Basic x"}},
        {"verify": "/no/such/file.pem"},
        {"token": "a b"},
    ],
)
def test_settings_that_cannot_be_used(settings):
    with pytest.raises(errors.ConfigError):
        InferenceClient(**{"token": "t", **settings})


def test_b43_a_401_names_the_source_and_never_the_token():
    """B43: which of the sources was used, in every way to give a token; a quoted token is pointed out."""
    api = ScriptedApi({"GET /gateways": [lambda call: (401, {"message": f"bad: {call.headers['authorization']}"})]})
    os.environ["CW_API_TOKEN"] = '"quoted-token"'
    for settings, source in (
        ({"token": "given-token"}, "the token argument"),
        ({"token": "given-token", "token_source": "--token"}, "--token"),
        ({"token": None}, "CW_API_TOKEN"),
    ):
        with pytest.raises(errors.UnauthenticatedError) as caught:
            api.client(**settings).list_gateways()
        assert f"the token came from {source}" in str(caught.value)
        assert "-token" not in str(caught.value).replace("--token", "")
        assert ("quote" in caught.value.hint) == (settings["token"] is None)


def test_neither_repr_nor_errors_show_secrets():
    api = ScriptedApi({"GET /gateways": [(500, "hush-hush tok-a1b2c3d4e5f6")]})
    client = api.client(headers={"X-Key": "hush-hush"}, retry_seconds=0)
    with pytest.raises(errors.InternalServerError) as caught:
        client.list_gateways()
    for text in (repr(client), str(client), str(caught.value), repr(client._config), repr(client.__getstate__())):
        assert TOKEN not in text
        assert "hush" not in text


def test_it_pickles_with_all_it_needs_but_the_token_which_is_read_again():
    os.environ["COREWEAVE_API_TOKEN"] = "here"
    client = InferenceClient(base_url="http://127.0.0.1:9", timeout=3, headers={"A": "b"}, retry_seconds=7)
    assert b"here" not in pickle.dumps(client)
    for again in (pickle.loads(pickle.dumps(client)), pickle.loads(pickle.dumps(client.within(2)))):
        assert again._config == client._config
        assert again._config.token == "here"
        assert (again.base_url, repr(again)) == (client.base_url, repr(client))
    assert (again._limits.timeout, again._limits.retry.seconds) == (2, 2)
    assert pickle.loads(pickle.dumps(client))._limits == client._limits


def test_closed_is_closed():
    api = ScriptedApi({"GET /gateways": [{"items": []}]})
    with api.client() as client:
        client.list_gateways()
        view = client.within(5)
    for shut in (client, view):
        with pytest.raises(errors.ConfigError, match="closed"):
            shut.list_gateways()
    client.close()


def test_within_bounds_a_call():
    api = ScriptedApi({"GET /gateways": [(503, "busy")]})
    client = api.client()
    for seconds, retries, at_most in ((5, True, 5), (0, True, 0), (100, True, 60), (100, False, 0)):
        began = api.clock.seconds
        with pytest.raises(errors.UnavailableError):
            client.within(seconds, retries=retries).list_gateways()
        assert api.clock.seconds - began == pytest.approx(at_most)


def test_threads_share_a_client():
    api = ScriptedApi({f"GET /deployments/d-{n}": [deployment(f"d-{n}")] for n in range(40)})
    with api.client() as client, ThreadPoolExecutor(8) as pool:
        assert [one.id for one in pool.map(client.get_deployment, [f"d-{n}" for n in range(40)])] == [
            f"d-{n}" for n in range(40)
        ]


def test_http_to_another_machine_is_warned_about(caplog):
    InferenceClient("t", base_url="http://127.0.0.1:1").close()
    assert not caplog.records
    InferenceClient("t", base_url="http://api.example.com").close()
    InferenceClient("t", base_url="https://api.example.com", verify=False).close()
    assert ["not encrypted" in record.getMessage() for record in caplog.records] == [True, False]
    assert "TLS checks are off" in caplog.text


def test_raw_is_what_the_service_said():
    answer = deployment("d-1", unheardOf=[1, {"x": None}])
    found = ScriptedApi({"GET /deployments/d-1": [answer]}).client().get_deployment("d-1")
    assert json.dumps(found.raw) == json.dumps(answer["deployment"])
