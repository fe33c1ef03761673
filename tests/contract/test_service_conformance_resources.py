"""Rules that gateways, deployments and capacity claims share, and those of gateways and claims alone."""

from __future__ import annotations

import datetime as dt
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from cwtrain_emulator.emulator import Emulator
from helpers.conformance import ABSENT, claim_body, gateway_body, idle_deployment_body, refusal, refused
from helpers.emulator_api import Api


@dataclass
class Kind:
    """One kind of resource, for rules that hold for each."""

    path: str
    key: str
    body: Callable[[], dict[str, Any]]
    changed: Callable[[dict[str, Any]], dict[str, Any]]

    def one(self, resource: dict[str, Any]) -> str:
        return f"{self.path}/{resource['spec']['id']}"


@pytest.fixture(params=["gateway", "deployment", "capacityClaim"])
def kind(request: pytest.FixtureRequest, common_gateway: str) -> Kind:
    if request.param == "gateway":
        return Kind("/gateways", "gateway", gateway_body, lambda spec: {**spec, "zones": ["US-WEST-04A"]})
    if request.param == "deployment":
        return Kind(
            "/deployments",
            "deployment",
            lambda: idle_deployment_body(
                common_gateway, "bucket", runtime={"engine": "dynamo-vllm", "version": "1.1.0"}
            ),
            lambda spec: {**spec, "traffic": {"weight": 7}},
        )
    return Kind(
        "/capacityclaims",
        "capacityClaim",
        claim_body,
        lambda spec: {"id": spec["id"], "resources": {**spec["resources"], "instanceCount": 9}},
    )


@pytest.fixture
def made(service: Api, kind: Kind) -> Iterator[dict[str, Any]]:
    """A READY resource of each kind."""
    created = service.ok("POST", kind.path, kind.body())[kind.key]
    yield service.until_status(kind.one(created), kind.key)
    service.call("DELETE", kind.one(created))


# All kinds -----------------------------------------------------------------------------------------------------------


def test_a_create_answers_with_the_resource_under_its_key(service: Api, kind: Kind) -> None:
    """POST answers `{"<kind>": {"spec", "status"}}`, CREATING; the spec is what was asked for, with its id."""
    body = kind.body()
    answer = service.ok("POST", kind.path, body)
    assert set(answer) == {kind.key}
    spec = answer[kind.key]["spec"]
    assert {name: spec[name] for name in body} == body
    assert answer[kind.key]["status"]["status"] == "STATUS_CREATING"
    assert service.until_status(kind.one(answer[kind.key]), kind.key)["spec"] == spec
    service.ok("DELETE", kind.one(answer[kind.key]))


def test_one_and_all_show_the_same(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """GET of one answers under the kind's key, GET of all under `items`, without a page token."""
    assert set(service.ok("GET", kind.one(made))) == {kind.key}
    listed = service.ok("GET", kind.path)
    assert set(listed) == {"items"}
    assert [item for item in listed["items"] if item["spec"]["id"] == made["spec"]["id"]] == [made]


def test_the_id_may_be_the_client_s_and_is_good_in_any_case(service: Api, kind: Kind) -> None:
    """A create takes the client's UUID for good; a UUID is the same in upper and in lower case."""
    mine = str(uuid.uuid4())
    created = service.ok("POST", kind.path, {**kind.body(), "id": mine.upper()})[kind.key]
    assert created["spec"]["id"] == mine
    assert service.ok("GET", f"{kind.path}/{mine.upper()}")[kind.key]["spec"]["id"] == mine
    service.ok("DELETE", f"{kind.path}/{mine}")


def test_a_taken_id_is_already_exists_whatever_else_is_asked(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """Creates are idempotent by id: a repeat, equal or not, is ALREADY_EXISTS and changes nothing."""
    taken = made["spec"]["id"]
    for body in (made["spec"], {**kind.body(), "id": taken}, {"id": taken.upper()}):
        answer = refused(service, "POST", kind.path, body)
        assert answer.code == "ALREADY_EXISTS"
        assert answer.details["ResourceInfo"]["resourceName"] == taken
    assert service.ok("GET", kind.one(made))[kind.key] == made


def test_a_taken_name_is_already_exists_and_the_id_stays_free(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """A name is one resource's: another create of it is ALREADY_EXISTS, and GET of the new id says NOT_FOUND."""
    mine = str(uuid.uuid4())
    answer = refused(service, "POST", kind.path, {**kind.body(), "id": mine, "name": made["spec"]["name"]})
    assert answer.code == "ALREADY_EXISTS"
    assert made["spec"]["name"] in answer.message
    assert mine not in answer.message
    assert refused(service, "GET", f"{kind.path}/{mine}").code == "NOT_FOUND"


@pytest.mark.parametrize("name", [None, "", "-x", "x-", "a.b", "a b", "a_b", "x" * 64, "é", "a/b"])
def test_a_name_is_a_host_label(service: Api, kind: Kind, name: str | None) -> None:
    """A name is required and is one host label: 1 to 63 letters, digits and dashes, no dash at either end."""
    assert "name" in refused(service, "POST", kind.path, {**kind.body(), "name": name}).fields


def test_an_update_is_the_whole_spec_with_its_id(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """PATCH replaces the spec; it repeats the path's id, and answers UPDATING until it is READY."""
    for wrong in (None, "", ABSENT, "x"):
        answer = refused(service, "PATCH", kind.one(made), {**kind.changed(made["spec"]), "id": wrong})
        assert answer.code == "INVALID_ARGUMENT"
        assert "id" in answer.fields
    body = kind.changed(made["spec"])
    answer = service.ok("PATCH", kind.one(made), body)
    assert set(answer) == {kind.key}
    assert answer[kind.key]["status"]["status"] == "STATUS_UPDATING"
    assert {name: answer[kind.key]["spec"][name] for name in body} == body
    after = service.until_status(kind.one(made), kind.key)
    assert after["spec"] == {**made["spec"], **body}
    assert after["status"]["createdAt"] == made["status"]["createdAt"]
    assert after["status"]["updatedAt"] > made["status"]["updatedAt"]


def test_an_update_without_a_part_of_the_spec_is_refused(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """There is no field mask: a PATCH that carries only some fields is short of the required ones."""
    answer = refused(service, "PATCH", kind.one(made), {"id": made["spec"]["id"], "name": made["spec"]["name"]})
    assert answer.code == "INVALID_ARGUMENT"
    assert service.ok("GET", kind.one(made))[kind.key]["spec"] == made["spec"]


def test_a_name_is_for_good(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """`name` cannot be changed by an update; what only the service sets is not taken from the caller."""
    assert refused(service, "PATCH", kind.one(made), {**made["spec"], "name": "another"}).fields == {"name"}
    after = service.ok("PATCH", kind.one(made), {**made["spec"], "organizationId": "mine"})[kind.key]
    assert after["spec"]["organizationId"] == made["spec"]["organizationId"]


def test_a_list_of_what_changed_lately(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """`updatedAfter` leaves out what was last updated at that time or before."""

    def listed(after: str) -> bool:
        items = service.ok("GET", kind.path, params={"updatedAfter": after})["items"]
        return made["spec"]["id"] in [item["spec"]["id"] for item in items]

    updated = made["status"]["updatedAt"]
    moment = dt.datetime.fromisoformat(updated)
    before, later = (moment + dt.timedelta(seconds=seconds) for seconds in (-1, 1))
    assert listed(before.isoformat())
    assert listed(before.astimezone(dt.timezone(dt.timedelta(hours=5))).isoformat())
    assert listed(before.strftime("%Y-%m-%dT%H:%M:%SZ").lower())
    assert listed(before.strftime("%Y-%m-%dT%H:%M:%S.123456789Z"))
    assert not listed(later.isoformat())
    for wrong in ("yesterday", "12", "2026-13-01T00:00:00Z"):
        assert refused(service, "GET", kind.path, params={"updatedAfter": wrong}).fields == {"updatedAfter"}


def test_a_delete_answers_the_last_state_and_the_resource_is_deleting_until_it_is_gone(
    service: Api, kind: Kind, made: dict[str, Any]
) -> None:
    """DELETE answers with the resource; GET then says DELETING until NOT_FOUND; there is no DELETED."""
    answer = service.ok("DELETE", kind.one(made))
    assert set(answer) == {kind.key}
    assert answer[kind.key]["spec"] == made["spec"]
    assert answer[kind.key]["status"]["status"] == "STATUS_DELETING"
    deadline = time.monotonic() + 60
    while (found := service.call("GET", kind.one(made))).status_code == 200:
        assert time.monotonic() < deadline
        assert found.json()[kind.key]["status"]["status"] == "STATUS_DELETING"
    for method in ("GET", "DELETE"):
        assert refused(service, method, kind.one(made)).code == "NOT_FOUND"
    assert made["spec"]["id"] not in [item["spec"]["id"] for item in service.ok("GET", kind.path)["items"]]


def test_a_delete_may_be_repeated(service: Api, kind: Kind, made: dict[str, Any]) -> None:
    """A repeat of a DELETE whose answer was lost is answered like the first, until it is NOT_FOUND."""
    first = service.ok("DELETE", kind.one(made))[kind.key]
    second = service.call("DELETE", kind.one(made))
    if second.status_code == 200:
        assert second.json()[kind.key] == first
    else:
        assert refusal(second).code == "NOT_FOUND"
    service.until_gone(kind.one(made))


def test_a_deleted_id_and_name_are_free_again(service: Api, kind: Kind) -> None:
    """Once GET says NOT_FOUND, the same create works again."""
    body = {**kind.body(), "id": str(uuid.uuid4())}
    path = f"{kind.path}/{body['id']}"
    for _ in range(2):
        service.ok("POST", kind.path, body)
        service.until_status(path, kind.key)
        service.ok("DELETE", path)
        service.until_gone(path)


# Gateways ------------------------------------------------------------------------------------------------------------


def test_a_gateway_has_endpoints_once_it_is_ready(service: Api) -> None:
    """`status.endpoints` is empty while the gateway is CREATING and names its URLs when it is READY."""
    created = service.ok("POST", "/gateways", gateway_body())["gateway"]
    assert not created["status"].get("endpoints")
    path = f"/gateways/{created['spec']['id']}"
    (endpoint,) = service.until_status(path, "gateway")["status"]["endpoints"]
    assert endpoint.startswith("http://127.0.0.1:")
    service.ok("DELETE", path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"zones": []}, "zones"),
        ({"zones": None}, "zones"),
        ({"coreWeaveAuth": None}, "coreWeaveAuth|weightsAndBiasesAuth"),
        ({"weightsAndBiasesAuth": {}}, "coreWeaveAuth|weightsAndBiasesAuth"),
        ({"bodyBasedRouting": None}, "bodyBasedRouting|headerBasedRouting|pathBasedRouting"),
        ({"pathBasedRouting": {}}, "bodyBasedRouting|headerBasedRouting|pathBasedRouting"),
        (
            {"headerBasedRouting": {"headerName": "X-Model"}},
            "bodyBasedRouting|headerBasedRouting|pathBasedRouting",
        ),
        ({"bodyBasedRouting": {"apiType": "API_TYPE_OTHER"}}, "bodyBasedRouting.apiType"),
        ({"bodyBasedRouting": None, "headerBasedRouting": {}}, "headerBasedRouting.headerName"),
        ({"bodyBasedRouting": None, "headerBasedRouting": {"headerName": "x" * 101}}, "headerBasedRouting.headerName"),
        ({"coreWeaveAuth": None, "weightsAndBiasesAuth": {"apiKey": "k"}}, "weightsAndBiasesAuth.serverUrl"),
    ],
)
def test_a_gateway_s_spec(service: Api, changes: dict[str, Any], field: str) -> None:
    """A gateway has at least one zone, exactly one kind of authentication and exactly one of routing."""
    answer = refused(service, "POST", "/gateways", gateway_body(**changes))
    assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {field})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"bodyBasedRouting": None, "headerBasedRouting": {"headerName": "X-Model"}},
        {"bodyBasedRouting": None, "pathBasedRouting": {}},
        {"coreWeaveAuth": None, "weightsAndBiasesAuth": {"serverUrl": "https://wandb.example"}},
        {"endpointConfiguration": {"additionalDns": ["a.example"], "allowedSourceIpRanges": ["10.0.0.0/8"]}},
        {"zones": ["US-EAST-04A", "US-WEST-04A"]},
    ],
)
def test_a_gateway_of_each_shape(service: Api, changes: dict[str, Any]) -> None:
    """Each authentication, routing and endpoint configuration comes back as it was asked for."""
    body = gateway_body(**changes)
    made = service.ok("POST", "/gateways", body)["gateway"]
    assert {name: made["spec"][name] for name in body} == body
    service.ok("DELETE", f"/gateways/{made['spec']['id']}")


def test_a_key_is_not_shown(service: Api) -> None:
    """The key of another service is taken and never answered."""
    auth = {"apiKey": "secret-key", "serverUrl": "https://wandb.example"}
    answer = service.call("POST", "/gateways", gateway_body(coreWeaveAuth=None, weightsAndBiasesAuth=auth))
    assert answer.status_code == 200
    assert "secret-key" not in answer.text
    service.ok("DELETE", f"/gateways/{answer.json()['gateway']['spec']['id']}")


def test_a_gateway_in_use_cannot_be_deleted(service: Api, emulator: Emulator) -> None:
    """A gateway stays while deployments use it: FAILED_PRECONDITION that names them; afterwards it goes."""
    gateway = service.ok("POST", "/gateways", gateway_body())["gateway"]["spec"]["id"]
    body = idle_deployment_body(gateway, emulator.bucket)
    deployment = service.ok("POST", "/deployments", body)["deployment"]["spec"]["id"]
    answer = refused(service, "DELETE", f"/gateways/{gateway}")
    assert answer.code == "FAILED_PRECONDITION"
    assert any(deployment in violation for violation in answer.violations)
    assert service.ok("GET", f"/gateways/{gateway}")["gateway"]["status"]["status"] != "STATUS_DELETING"
    service.ok("DELETE", f"/deployments/{deployment}")
    service.until_gone(f"/deployments/{deployment}")
    service.ok("DELETE", f"/gateways/{gateway}")
    service.until_gone(f"/gateways/{gateway}")


def test_gateway_parameters(service: Api) -> None:
    """`/gateways/parameters` answers the zones; a zone that is not among them is refused."""
    answer = service.ok("GET", "/gateways/parameters")
    assert set(answer) == {"zones"}
    assert "US-EAST-04A" in answer["zones"]
    assert refused(service, "POST", "/gateways", gateway_body(zones=["MOON-01A"])).fields == {"zones"}


# Capacity claims -----------------------------------------------------------------------------------------------------


def test_a_claim_tells_what_it_has(service: Api) -> None:
    """A claim's status adds `allocatedInstances` and `pendingInstances`; together they are what was asked for."""
    created = service.ok("POST", "/capacityclaims", claim_body(instanceCount=4))["capacityClaim"]
    status = created["status"]
    assert (status.get("allocatedInstances", 0), status.get("pendingInstances", 0)) == (0, 4)
    path = f"/capacityclaims/{created['spec']['id']}"
    status = service.until_status(path, "capacityClaim")["status"]
    assert (status.get("allocatedInstances", 0), status.get("pendingInstances", 0)) == (4, 0)
    service.ok("DELETE", path)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"instanceCount": 0}, "instanceCount"),
        ({"instanceCount": -1}, "instanceCount"),
        ({"instanceCount": 2**31}, "instanceCount"),
        ({"instanceId": ""}, "instanceId"),
        ({"capacityType": None}, "capacityType"),
        ({"zones": []}, "zones"),
        ({"zones": ["MOON-01A"]}, "zones"),
    ],
)
def test_a_claim_s_resources(service: Api, changes: dict[str, Any], field: str) -> None:
    """A claim names an instance type, at least one instance, its capacity type and at least one zone."""
    answer = refused(service, "POST", "/capacityclaims", claim_body(**changes))
    assert answer.code == "INVALID_ARGUMENT"
    assert f"resources.{field}" in answer.fields


@pytest.mark.parametrize(
    ("field", "value"),
    [("instanceId", "gd-8xh100ib-i128"), ("capacityType", "CAPACITY_TYPE_MANAGED"), ("zones", ["US-WEST-04A"])],
)
def test_only_the_count_of_a_claim_changes(service: Api, field: str, value: Any) -> None:
    """PATCH of a claim is `{id, resources}`: the count changes, instance type, capacity type and zones do not."""
    made = service.ok("POST", "/capacityclaims", claim_body())["capacityClaim"]
    path = f"/capacityclaims/{made['spec']['id']}"
    body = {"id": made["spec"]["id"], "resources": {**made["spec"]["resources"], field: value}}
    assert refused(service, "PATCH", path, body).fields == {f"resources.{field}"}
    service.ok("DELETE", path)


def test_claim_parameters(service: Api) -> None:
    """`/capacityclaims/parameters` answers the instance types of each zone."""
    answer = service.ok("GET", "/capacityclaims/parameters")
    assert set(answer) == {"zoneInstanceTypes"}
    assert answer["zoneInstanceTypes"]["US-EAST-04A"]["instanceIds"]
