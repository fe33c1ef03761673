"""Rules of deployments: the spec, hot-load settings, updates, parameters."""

from __future__ import annotations

import copy
import uuid
from collections.abc import Iterator
from typing import Any

import pytest

from cwtrain_emulator.emulator import Emulator
from helpers.conformance import ABSENT, gateway_body, idle_deployment_body, refused
from helpers.emulator_api import Api


@pytest.fixture(scope="module")
def other_gateway(service: Api) -> str:
    """A second gateway, in another zone."""
    found: str = service.gateway(zones=["US-WEST-04A"])["spec"]["id"]
    return found


@pytest.fixture(scope="module")
def wide_gateway(service: Api) -> str:
    """A gateway of two zones."""
    found: str = service.gateway(zones=["US-EAST-04A", "US-WEST-04A"])["spec"]["id"]
    return found


@pytest.fixture
def made(service: Api, common_gateway: str) -> Iterator[dict[str, Any]]:
    """A deployment with hot-loads that runs nothing."""
    created = service.ok("POST", "/deployments", idle_deployment_body(common_gateway, "weights"))["deployment"]
    path = f"/deployments/{created['spec']['id']}"
    yield service.until_status(path, "deployment")
    service.call("DELETE", path)


def changed(body: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """Return a copy of `body` with the field at a dotted path set, or left out when `value` is None."""
    result = copy.deepcopy(body)
    *parents, name = path.split(".")
    inner = result
    for parent in parents:
        inner = inner.setdefault(parent, {})
    if value is None:
        inner.pop(name, None)
    else:
        inner[name] = value
    return result


# The spec ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["gatewayIds", "runtime", "resources", "model", "autoscaling"])
def test_the_required_parts(service: Api, common_gateway: str, part: str) -> None:
    """A deployment has gateways, a runtime, resources, a model and autoscaling; `traffic` may be left out."""
    body = idle_deployment_body(common_gateway, "weights", hotLoad=None)
    assert refused(service, "POST", "/deployments", changed(body, part, None)).fields == {part}
    without = service.ok("POST", "/deployments", changed(body, "traffic", None))["deployment"]
    service.ok("DELETE", f"/deployments/{without['spec']['id']}")


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("gatewayIds", []),
        ("runtime.engine", ""),
        ("runtime.engine", "triton"),
        ("runtime.version", "99.9.9"),
        ("runtime.engineConfig", {"no-such-key": "1"}),
        ("runtime.engineEnv", {"NO_SUCH_NAME": "1"}),
        ("resources.instanceType", ""),
        ("resources.gpuCount", None),
        ("resources.gpuCount", 3),
        ("resources.gpuCount", 32),
        ("model.name", "abc"),
        ("model.name", "m" * 64),
        ("model.bucket", ""),
        ("model.bucket", "two.labels"),
        ("autoscaling.min", 0),
        ("autoscaling.max", 0),
        ("autoscaling.priority", 1001),
        ("autoscaling.priority", -1),
        ("autoscaling.concurrency", 0),
        ("autoscaling.capacityClasses", ["CAPACITY_CLASS_UNSPECIFIED"]),
        ("traffic.weight", -1),
        ("traffic.weight", 1001),
        ("hotLoad.bucket", ""),
        ("hotLoad.bucket", "two.labels"),
        ("hotLoad.transitionMode", None),
        ("hotLoad.transitionMode", "TRANSITION_MODE_SYNC"),
    ],
)
def test_each_value_s_bounds(service: Api, common_gateway: str, path: str, value: Any) -> None:
    """Values outside their bounds are INVALID_ARGUMENT with the field's path."""
    answer = refused(
        service, "POST", "/deployments", changed(idle_deployment_body(common_gateway, "weights"), path, value)
    )
    assert answer.code == "INVALID_ARGUMENT"
    assert path in answer.fields


@pytest.mark.parametrize("value", [7, {"a": 1}, {"a": None}, [], "x"])
def test_engine_config_is_text_by_text(service: Api, common_gateway: str, value: Any) -> None:
    """`engineConfig` and `engineEnv` map strings to strings; numbers are refused and not converted."""
    body = changed(idle_deployment_body(common_gateway, "weights"), "runtime.engineConfig", {"max-model-len": 4096})
    assert refused(service, "POST", "/deployments", body).code == "INVALID_ARGUMENT"
    body = changed(idle_deployment_body(common_gateway, "weights"), "runtime.engineEnv", value)
    assert refused(service, "POST", "/deployments", body).code == "INVALID_ARGUMENT"


def test_what_is_asked_for_comes_back(service: Api, common_gateway: str) -> None:
    """Every part of the spec comes back; without a version the newest is taken."""
    body = idle_deployment_body(
        common_gateway,
        "weights",
        runtime={
            "engine": "dynamo-vllm",
            "engineConfig": {"max-model-len": "4096", "gpu-memory-utilization": "0.85"},
            "engineEnv": {"VLLM_LOGGING_LEVEL": "INFO"},
        },
        autoscaling={
            "min": 1,
            "max": 2,
            "priority": 10,
            "concurrency": 4,
            "capacityClasses": ["CAPACITY_CLASS_RESERVED", "CAPACITY_CLASS_ON_DEMAND"],
        },
    )
    spec = service.ok("POST", "/deployments", body)["deployment"]["spec"]
    newest = service.ok("GET", "/deployments/parameters")["runtimeParameters"]["runtimeVersions"]["dynamo-vllm"]
    assert spec["runtime"].pop("version") == newest["versions"][-1]
    assert {name: spec[name] for name in body} == body
    service.ok("DELETE", f"/deployments/{spec['id']}")


def test_gateways_must_be_there(service: Api, common_gateway: str) -> None:
    """A deployment cannot name a gateway that is not there; the refusal names each."""
    body = idle_deployment_body(common_gateway, "weights")
    answer = refused(service, "POST", "/deployments", {**body, "gatewayIds": [common_gateway, ABSENT, "x"]})
    assert answer.code == "FAILED_PRECONDITION"
    assert ABSENT in answer.message
    assert common_gateway not in answer.message


def test_lists_by_gateway(service: Api, made: dict[str, Any], other_gateway: str) -> None:
    """`parentGatewayId` lists the deployments of one gateway."""
    (gateway,) = made["spec"]["gatewayIds"]

    def ids(parent: str) -> list[str]:
        items = service.ok("GET", "/deployments", params={"parentGatewayId": parent})["items"]
        return [item["spec"]["id"] for item in items]

    assert made["spec"]["id"] in ids(gateway)
    assert made["spec"]["id"] in ids(gateway.upper())
    assert made["spec"]["id"] not in ids(other_gateway)
    assert ids(ABSENT) == []


def test_deployment_parameters(service: Api, common_gateway: str, other_gateway: str) -> None:
    """`/deployments/parameters` answers what engines take, and instance types, for all gateways or the named ones."""
    answer = service.ok("GET", "/deployments/parameters")
    assert set(answer) == {"gatewayIds", "runtimeParameters", "resourceParameters"}
    assert {common_gateway, other_gateway} <= set(answer["gatewayIds"])
    runtime = answer["runtimeParameters"]
    assert set(runtime) == {"runtimeVersions", "runtimeConfigOptions", "engineEnvOptions"}
    for engine in ("dynamo-vllm", "vllm"):
        assert runtime["runtimeVersions"][engine]["versions"]
        assert "max-model-len" in runtime["runtimeConfigOptions"][engine]["allowedKeys"]
        assert runtime["engineEnvOptions"][engine]["allowedNames"]
    assert answer["resourceParameters"]["instanceTypes"]
    named = service.ok("GET", "/deployments/parameters", params={"gatewayIds": [common_gateway, other_gateway]})
    assert set(named["gatewayIds"]) == {common_gateway, other_gateway}
    assert service.ok("GET", f"/deployments/parameters?gatewayIds={other_gateway}")["gatewayIds"] == [other_gateway]
    assert refused(service, "GET", f"/deployments/parameters?gatewayIds={ABSENT}").code == "NOT_FOUND"


# Hot-load settings ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["..", "../run", "run/../step", "run/..", "/../x"])
def test_a_path_prefix_does_not_climb(service: Api, common_gateway: str, prefix: str) -> None:
    """`pathPrefix` has no `..` segment."""
    body = changed(idle_deployment_body(common_gateway, "weights"), "hotLoad.pathPrefix", prefix)
    assert refused(service, "POST", "/deployments", body).fields == {"hotLoad.pathPrefix"}


@pytest.mark.parametrize("prefix", [None, "", "runs/model", "model..v2", "...", "a b/ü"])
def test_other_path_prefixes_are_taken(service: Api, common_gateway: str, prefix: str | None) -> None:
    """`pathPrefix` may be left out, which is the same as empty; dots within a segment are text like any other."""
    body = changed(idle_deployment_body(common_gateway, "weights"), "hotLoad.pathPrefix", prefix)
    spec = service.ok("POST", "/deployments", body)["deployment"]["spec"]
    assert spec["hotLoad"].get("pathPrefix", "") == (prefix or "")
    service.ok("DELETE", f"/deployments/{spec['id']}")


def test_hot_loads_need_the_engine_dynamo_vllm(service: Api, common_gateway: str) -> None:
    """`hotLoad` needs the engine `dynamo-vllm`; another engine serves without it."""
    body = idle_deployment_body(common_gateway, "weights", runtime={"engine": "vllm"})
    assert refused(service, "POST", "/deployments", body).fields == {"hotLoad"}
    without = service.ok("POST", "/deployments", changed(body, "hotLoad", None))["deployment"]
    assert "hotLoad" not in without["spec"]
    service.ok("DELETE", f"/deployments/{without['spec']['id']}")


def test_hot_loads_need_gateways_of_one_zone(
    service: Api, common_gateway: str, other_gateway: str, wide_gateway: str
) -> None:
    """`hotLoad` needs gateways of one zone: neither one gateway of two zones nor two of different ones."""
    for gateways in ([wide_gateway], [common_gateway, other_gateway]):
        body = idle_deployment_body(common_gateway, "weights", gatewayIds=gateways)
        answer = refused(service, "POST", "/deployments", body)
        assert (answer.code, answer.fields) == ("INVALID_ARGUMENT", {"hotLoad"})
        without = service.ok("POST", "/deployments", changed(body, "hotLoad", None))["deployment"]
        service.ok("DELETE", f"/deployments/{without['spec']['id']}")


def test_an_organization_without_hot_loads_is_told_so() -> None:
    """Where hot-loads are off, a create with `hotLoad` says that they are not enabled for this organization."""
    with Emulator(replicas=1, extra_args=["--no-hot-load"]) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        gateway = api.gateway()["spec"]["id"]
        body = idle_deployment_body(gateway, emulator.bucket)
        answer = refused(api, "POST", "/deployments", body)
        assert answer.code == "FAILED_PRECONDITION"
        assert "hot-load is not enabled for this organization" in answer.message
        api.ok("POST", "/deployments", changed(body, "hotLoad", None))
        api.close()


# Updates -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("hotLoad", None),
        ("hotLoad.bucket", "others"),
        ("hotLoad.pathPrefix", "others"),
        ("hotLoad.pathPrefix", None),
        ("hotLoad", {}),
    ],
)
def test_hot_load_settings_are_for_good(service: Api, made: dict[str, Any], path: str, value: Any) -> None:
    """`hotLoad` is set at creation and sent unchanged in every PATCH: left out or changed, it is refused."""
    answer = refused(service, "PATCH", f"/deployments/{made['spec']['id']}", changed(made["spec"], path, value))
    assert answer.code == "INVALID_ARGUMENT"
    assert "hotLoad" in answer.fields
    assert service.ok("GET", f"/deployments/{made['spec']['id']}")["deployment"]["spec"] == made["spec"]


def test_hot_load_settings_cannot_be_added(service: Api, common_gateway: str) -> None:
    """A deployment that was created without `hotLoad` never gets it."""
    body = idle_deployment_body(common_gateway, "weights")
    made = service.ok("POST", "/deployments", changed(body, "hotLoad", None))["deployment"]
    path = f"/deployments/{made['spec']['id']}"
    assert refused(service, "PATCH", path, {**made["spec"], "hotLoad": body["hotLoad"]}).fields == {"hotLoad"}
    service.ok("DELETE", path)


def test_hot_load_settings_may_be_spelled_differently(service: Api, made: dict[str, Any]) -> None:
    """Unchanged means the same value: an enum's number, or a zero value that is there, is no change."""
    hot_load = {**made["spec"]["hotLoad"], "transitionMode": 1}
    path = f"/deployments/{made['spec']['id']}"
    after = service.ok("PATCH", path, {**made["spec"], "hotLoad": hot_load})["deployment"]
    assert after["spec"]["hotLoad"] == made["spec"]["hotLoad"]


def test_an_update_replaces_everything_else(service: Api, made: dict[str, Any]) -> None:
    """An update carries the whole spec: what it leaves out goes back to its zero value."""
    path = f"/deployments/{made['spec']['id']}"
    body = changed(changed(made["spec"], "traffic", None), "autoscaling.concurrency", None)
    after = service.ok("PATCH", path, body)["deployment"]["spec"]
    assert not after.get("traffic")
    assert "concurrency" not in after["autoscaling"]
    assert after["model"] == made["spec"]["model"]


def test_a_gateway_in_an_update_must_be_there_too(service: Api, made: dict[str, Any]) -> None:
    """The rules of a create hold for an update."""
    path = f"/deployments/{made['spec']['id']}"
    answer = refused(service, "PATCH", path, {**made["spec"], "gatewayIds": [ABSENT]})
    assert answer.code == "FAILED_PRECONDITION"


def test_the_engine_of_hot_loads_stays(service: Api, made: dict[str, Any], wide_gateway: str) -> None:
    """A deployment with `hotLoad` cannot be updated to another engine, nor to gateways of two zones."""
    path = f"/deployments/{made['spec']['id']}"
    assert refused(service, "PATCH", path, {**made["spec"], "runtime": {"engine": "vllm"}}).fields == {"hotLoad"}
    assert refused(service, "PATCH", path, {**made["spec"], "gatewayIds": [wide_gateway]}).fields == {"hotLoad"}


def test_a_deployment_is_disabled_and_enabled_by_an_update(
    service: Api, common_gateway: str, emulator: Emulator
) -> None:
    """`disabled` switches a deployment off and on again; the rest of it stays."""
    made = service.ok("POST", "/deployments", idle_deployment_body(common_gateway, emulator.bucket))["deployment"]
    path = f"/deployments/{made['spec']['id']}"
    assert service.until_status(path, "deployment")["spec"]["disabled"] is True
    service.ok("PATCH", path, {**made["spec"], "disabled": False})
    running = service.until_status(path, "deployment")
    assert not running["spec"].get("disabled")
    assert running["spec"]["name"] == made["spec"]["name"]
    service.ok("DELETE", path)


def test_deployments_of_one_model_name(service: Api, common_gateway: str) -> None:
    """Deployments may share `model.name`, whose traffic they split by weight; their own names differ."""
    model = f"model-{uuid.uuid4().hex[:8]}"
    made = []
    for weight in (30, 70):
        body = idle_deployment_body(common_gateway, "weights", traffic={"weight": weight})
        body["model"]["name"] = model
        made.append(service.ok("POST", "/deployments", body)["deployment"]["spec"]["id"])
    for deployment in made:
        service.ok("DELETE", f"/deployments/{deployment}")


def test_a_gateway_that_is_being_deleted_takes_no_deployment(service: Api) -> None:
    """A gateway that is DELETING is not there for a new deployment."""
    gateway = service.ok("POST", "/gateways", gateway_body())["gateway"]["spec"]["id"]
    service.ok("DELETE", f"/gateways/{gateway}")
    answer = refused(service, "POST", "/deployments", idle_deployment_body(gateway, "weights"))
    assert answer.code == "FAILED_PRECONDITION"
    assert gateway in answer.message
