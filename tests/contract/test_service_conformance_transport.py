"""Rules of every call: tokens and roles, proto3 JSON, names of enums, times, refusals, ids of odd shape."""

from __future__ import annotations

import http.client
import json
import urllib.parse
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cwtrain_emulator.emulator import Emulator
from helpers.conformance import (
    ABSENT,
    RFC_3339,
    UUID,
    claim_body,
    gateway_body,
    idle_deployment_body,
    refusal,
    refused,
)
from helpers.emulator_api import PREFIX, Api, hot_load_body

READS = [
    "/gateways",
    f"/gateways/{ABSENT}",
    "/gateways/parameters",
    "/deployments",
    f"/deployments/{ABSENT}",
    "/deployments/parameters",
    "/capacityclaims",
    f"/capacityclaims/{ABSENT}",
    "/hotLoads",
    f"/hotLoads/{ABSENT}",
    f"/hotLoads/{ABSENT}/replicas",
]
WRITES = [
    *[("POST", f"/{kind}") for kind in ("gateways", "deployments", "capacityclaims", "hotLoads")],
    *[("PATCH", f"/{kind}/{ABSENT}") for kind in ("gateways", "deployments", "capacityclaims")],
    *[("DELETE", f"/{kind}/{ABSENT}") for kind in ("gateways", "deployments", "capacityclaims")],
    ("POST", f"/hotLoads/{ABSENT}:cancel"),
]


@pytest.fixture(scope="module")
def viewer(emulator: Emulator) -> Iterator[Api]:
    made = Api(emulator.base_url, emulator.viewer_token)
    yield made
    made.close()


def with_header(api: Api, value: str | None) -> Api:
    stranger = Api(api.base_url, None)
    if value is not None:
        stranger.session.headers["Authorization"] = value
    return stranger


# Tokens and roles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer ", "Bearer wrong", "Basic {admin}", "{admin}"])
def test_every_call_wants_a_known_bearer_token(emulator: Emulator, service: Api, header: str | None) -> None:
    """A call without a valid bearer token is UNAUTHENTICATED, whatever it asks for."""
    stranger = with_header(service, header and header.format(admin=emulator.admin_token))
    for method, path in [*(("GET", path) for path in READS), *WRITES]:
        assert refused(stranger, method, path).code == "UNAUTHENTICATED", (method, path)
    stranger.close()


def test_the_word_bearer_is_taken_in_any_case(emulator: Emulator, service: Api) -> None:
    """The scheme of an Authorization header is case-insensitive, as in all of HTTP."""
    for scheme in ("bearer", "BEARER"):
        caller = with_header(service, f"{scheme} {emulator.viewer_token}")
        assert caller.call("GET", "/gateways").status_code == 200
        caller.close()


@pytest.mark.parametrize("path", READS)
def test_a_viewer_reads(viewer: Api, service: Api, path: str) -> None:
    """Reads need the role Inference Viewer; the answer is the same as an admin's."""
    mine, theirs = viewer.call("GET", path), service.call("GET", path)
    assert mine.status_code == theirs.status_code in (200, 404)


@pytest.mark.parametrize(("method", "path"), WRITES)
def test_a_viewer_does_not_write(viewer: Api, method: str, path: str) -> None:
    """Writes need Inference Admin: PERMISSION_DENIED before anything in the body or the path is looked at."""
    for body in (None, {}, gateway_body()):
        assert refused(viewer, method, path, body).code == "PERMISSION_DENIED"


# Paths ---------------------------------------------------------------------------------------------------------------


def test_calls_are_under_the_prefix_and_nowhere_else(service: Api) -> None:
    """The paths are `/v1alpha1/inference/...`; capacity claims in lower case, hot-loads with a capital L."""
    for path in ("/hotloads", "/capacityClaims", "/nothing", "/gateways/x/y", "/Gateways"):
        assert refused(service, "GET", path).code == "NOT_FOUND", path
    for path in ("/gateways", "/v1alpha1/gateways", "/inference/gateways"):
        assert service.session.get(service.base_url + path, timeout=30).status_code == 404


def test_verbs_that_a_path_does_not_have(service: Api) -> None:
    """Hot-loads have neither update nor delete; updates are PATCH and never PUT. Such a call is UNIMPLEMENTED."""
    for method in ("PATCH", "DELETE", "PUT"):
        assert refused(service, method, f"/hotLoads/{ABSENT}", {}).code == "UNIMPLEMENTED"
    assert refused(service, "PUT", f"/gateways/{ABSENT}", {}).code == "UNIMPLEMENTED"


ODD_IDS = [
    "x",
    " ",
    "%00",
    "%0d%0aX-Injected:%201",
    "%2e%2e",
    "%ff%fe",
    "%C3%BC%F0%9F%A6%A9",
    "a" * 4000,
    "..;",
    "'%20OR%201=1",
    ABSENT.replace("-", ""),
    f"{{{ABSENT}}}",
    f"{ABSENT}%0a",
    "-1",
    "null",
]


@pytest.mark.parametrize("odd", ODD_IDS)
@pytest.mark.parametrize("kind", ["gateways", "deployments", "capacityclaims", "hotLoads"])
def test_ids_of_odd_shape_are_not_found(emulator: Emulator, kind: str, odd: str) -> None:
    """An id that names nothing, however it looks, is NOT_FOUND (or no path at all), and harms nothing."""
    origin = urllib.parse.urlsplit(emulator.base_url)
    connection = http.client.HTTPConnection(origin.netloc, timeout=30)
    headers = {"Authorization": f"Bearer {emulator.admin_token}", "Content-Type": "application/json"}
    verbs = ["GET"] if kind == "hotLoads" else ["GET", "PATCH", "DELETE"]
    paths = [(verb, f"/{kind}/{urllib.parse.quote(odd, safe='%')}") for verb in verbs]
    if kind == "hotLoads":
        paths += [("GET", f"{paths[0][1]}/replicas"), ("POST", f"{paths[0][1]}:cancel")]
    for verb, path in paths:
        connection.request(verb, PREFIX + path, body=b"{}", headers=headers)
        answer = connection.getresponse()
        body = json.loads(answer.read())
        assert (answer.status, body["code"]) == (404, 5), (verb, path, body)
        assert answer.getheader("X-Injected") is None
    connection.close()


@pytest.mark.parametrize("odd", ["x", ABSENT.replace("-", ""), f" {ABSENT}", "x" * 5000, "ü", "../gateways", 5, {}])
def test_ids_in_bodies_must_be_uuids(service: Api, common_gateway: str, odd: Any) -> None:
    """An id that a client chooses is a UUID; anything else is an INVALID_ARGUMENT that names the field."""
    assert "id" in refused(service, "POST", "/gateways", gateway_body(id=odd)).fields
    assert "id" in refused(service, "POST", "/deployments", idle_deployment_body(common_gateway, "b", id=odd)).fields
    assert "id" in refused(service, "POST", "/capacityclaims", {**claim_body(), "id": odd}).fields
    assert "hotLoadId" in refused(service, "POST", "/hotLoads", {"hotLoadId": odd}).fields


# proto3 JSON ---------------------------------------------------------------------------------------------------------


def keys_of(value: Any) -> Iterator[str]:
    """Give every key of a JSON value, those of maps of strings (the user's own) aside."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key
            if key not in ("engineConfig", "engineEnv"):
                yield from keys_of(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner)


def test_names_are_lower_camel_case_and_times_rfc_3339(service: Api, common_gateway: str) -> None:
    """Answers have lowerCamelCase names and RFC 3339 times; a resource is a spec and a status."""
    gateway = service.ok("GET", f"/gateways/{common_gateway}")["gateway"]
    deployment = service.ok("POST", "/deployments", idle_deployment_body(common_gateway, "bucket"))["deployment"]
    claim = service.ok("POST", "/capacityclaims", claim_body())["capacityClaim"]
    for resource in (gateway, deployment, claim):
        assert set(resource) == {"spec", "status"}
        assert UUID.fullmatch(resource["spec"]["id"])
        assert resource["spec"]["organizationId"]
        for key in keys_of(resource):
            assert key[0].islower(), key
            assert "_" not in key, key
        status = resource["status"]
        times = [status["createdAt"], status["updatedAt"], *(c["lastUpdateTime"] for c in status["conditions"])]
        for moment in times:
            assert RFC_3339.fullmatch(moment), moment
    service.ok("DELETE", f"/deployments/{deployment['spec']['id']}")
    service.ok("DELETE", f"/capacityclaims/{claim['spec']['id']}")


def test_either_spelling_of_a_field_is_taken(service: Api) -> None:
    """A reader of proto3 JSON takes a field by its lowerCamelCase name and by its own, snake_case one."""
    body = {**gateway_body(coreWeaveAuth=None, bodyBasedRouting=None), "core_weave_auth": {}}
    made = service.ok("POST", "/gateways", {**body, "header_based_routing": {"header_name": "X-Model"}})["gateway"]
    assert made["spec"]["coreWeaveAuth"] == {}
    assert made["spec"]["headerBasedRouting"] == {"headerName": "X-Model"}
    service.ok("DELETE", f"/gateways/{made['spec']['id']}")


def test_null_is_absent_and_unknown_fields_are_ignored(service: Api) -> None:
    """A null is a field that is left out; a field that no message has changes nothing and does not come back."""
    body = {**gateway_body(), "id": None, "endpointConfiguration": None, "weightsAndBiasesAuth": None}
    made = service.ok("POST", "/gateways", {**body, "colour": "red", "status": {"status": "STATUS_READY"}})["gateway"]
    assert not {"colour", "status", "endpointConfiguration", "weightsAndBiasesAuth"} & set(made["spec"])
    assert made["status"]["status"] == "STATUS_CREATING"
    service.ok("DELETE", f"/gateways/{made['spec']['id']}")


@pytest.mark.parametrize(
    "form",
    ["CAPACITY_TYPE_MANAGED", "capacity_type_managed", "Capacity_Type_Managed", "MANAGED", "managed", "mAnAgEd", 2],
)
def test_enums_come_in_as_names_or_numbers_and_go_out_as_names(service: Api, form: str | int) -> None:
    """An enum may come as a name, in any case, with or without the prefix, or as a number; it goes out as a name."""
    made = service.ok("POST", "/capacityclaims", claim_body(capacityType=form))["capacityClaim"]
    assert made["spec"]["resources"]["capacityType"] == "CAPACITY_TYPE_MANAGED"
    service.ok("DELETE", f"/capacityclaims/{made['spec']['id']}")


@pytest.mark.parametrize("form", ["CAPACITY_TYPE_GIFT", "", "2x", 3, -1, 2**40, 1.5, True, [], {}, "UNSPECIFIED", 0])
def test_other_values_of_an_enum_are_refused(service: Api, form: Any) -> None:
    """A name or a number that the enum does not have, and its zero where a value is needed, are INVALID_ARGUMENT."""
    answer = refused(service, "POST", "/capacityclaims", claim_body(capacityType=form))
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"resources.capacityType"})


@pytest.mark.parametrize("count", [3, "3", 3.0])
def test_integers_may_come_as_strings(service: Api, count: Any) -> None:
    """A reader of proto3 JSON takes an integer as a number, with or without a zero fraction, or as a string."""
    made = service.ok("POST", "/capacityclaims", claim_body(instanceCount=count))["capacityClaim"]
    assert made["spec"]["resources"]["instanceCount"] == 3
    service.ok("DELETE", f"/capacityclaims/{made['spec']['id']}")


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"name": 5}, {"name"}),
        ({"zones": "US-EAST-04A"}, {"zones"}),
        ({"zones": [1]}, {"zones[0]", "zones"}),
        ({"coreWeaveAuth": "yes"}, {"coreWeaveAuth"}),
        ({"endpointConfiguration": []}, {"endpointConfiguration"}),
        ({"name": "\ud800"}, {"name"}),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused(service: Api, body: dict[str, Any], fields: set[str]) -> None:
    """A field of the wrong JSON type is INVALID_ARGUMENT; the refusal names it."""
    answer = refused(service, "POST", "/gateways", gateway_body(**body))
    assert answer.code == "INVALID_ARGUMENT"
    assert answer.fields <= fields
    assert answer.fields


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff", b"{'a': 1}", b'{"a": NaN}' * 2])
def test_a_body_that_is_no_json_object_is_refused(service: Api, raw: bytes) -> None:
    """A write's body is one JSON object."""
    for path in ("/gateways", "/deployments", "/capacityclaims", "/hotLoads"):
        answer = service.session.post(service.base_url + PREFIX + path, data=raw, timeout=30)
        assert refusal(answer).code == "INVALID_ARGUMENT"


# Refusals ------------------------------------------------------------------------------------------------------------


def test_a_refusal_names_every_problem_at_once(service: Api) -> None:
    """A BadRequest has one entry for each field that is wrong; the message says them all, too."""
    answer = refused(service, "POST", "/gateways", {"name": "-", "zones": ["MOON"]})
    assert answer.code == "INVALID_ARGUMENT"
    assert answer.fields == {
        "name",
        "zones",
        "coreWeaveAuth|weightsAndBiasesAuth",
        "bodyBasedRouting|headerBasedRouting|pathBasedRouting",
    }
    for field in answer.fields:
        assert field in answer.message


def test_what_is_not_there_is_told_with_resource_info(service: Api) -> None:
    """NOT_FOUND carries a ResourceInfo with the kind and the id."""
    for kind, path in (("gateway", "gateways"), ("deployment", "deployments"), ("capacityClaim", "capacityclaims")):
        for method in ("GET", "PATCH", "DELETE"):
            answer = refused(service, method, f"/{path}/{ABSENT}", {} if method == "PATCH" else None)
            assert answer.code == "NOT_FOUND"
            assert answer.details["ResourceInfo"] == {"resourceType": kind, "resourceName": ABSENT}
    for tail in ("", "/replicas"):
        answer = refused(service, "GET", f"/hotLoads/{ABSENT}{tail}")
        assert answer.details["ResourceInfo"] == {"resourceType": "hotLoad", "resourceName": ABSENT}


def test_what_is_there_already_is_told_with_resource_info(service: Api, common_gateway: str) -> None:
    """ALREADY_EXISTS is HTTP 409 and carries a ResourceInfo with the id that is taken."""
    answer = refused(service, "POST", "/gateways", gateway_body(id=common_gateway))
    assert answer.code == "ALREADY_EXISTS"
    assert answer.details["ResourceInfo"] == {"resourceType": "gateway", "resourceName": common_gateway}


def test_a_precondition_is_told_with_its_violations(service: Api) -> None:
    """FAILED_PRECONDITION carries a PreconditionFailure that says what must change first."""
    answer = refused(service, "POST", "/deployments", idle_deployment_body(ABSENT, "bucket"))
    assert answer.code == "FAILED_PRECONDITION"
    assert any(ABSENT in violation for violation in answer.violations)


def test_an_unimplemented_call_says_so(service: Api) -> None:
    """UNIMPLEMENTED is HTTP 501, so that no client's retry policy takes it for a server that is down."""
    answer = service.call("PUT", "/gateways", {})
    assert (answer.status_code, answer.json()["code"]) == (501, 12)


def test_tokens_never_come_back(emulator: Emulator, service: Api) -> None:
    """No refusal repeats the caller's token."""
    token = emulator.admin_token
    for answer in (
        service.call("GET", f"/gateways/{ABSENT}"),
        service.call("POST", "/gateways", {"name": "-"}),
        with_header(service, f"Bearer {token}x").call("GET", "/gateways"),
    ):
        assert token not in answer.text
        assert token not in str(answer.headers)


def test_each_answer_has_a_request_id(service: Api) -> None:
    """An answer carries `X-Request-Id`: the caller's, or a fresh one; refusals too."""
    mine = str(uuid.uuid4())
    for path in ("/gateways", f"/gateways/{ABSENT}"):
        assert service.call("GET", path, headers={"X-Request-Id": mine}).headers["X-Request-Id"] == mine
        first, second = (service.call("GET", path).headers["X-Request-Id"] for _ in range(2))
        assert first != second


def test_a_create_of_a_hot_load_is_judged_field_by_field(service: Api) -> None:
    """The same holds for hot-loads: every field that is wrong is named."""
    body = {**hot_load_body("x", "a/b"), "promptCachePolicy": "SOMETIMES", "type": None}
    assert refused(service, "POST", "/hotLoads", body).fields == {
        "deploymentId",
        "identity",
        "promptCachePolicy",
        "type",
    }
