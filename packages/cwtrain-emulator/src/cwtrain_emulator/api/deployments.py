"""Deployments: what a spec may say, and when one can be changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cwtrain_emulator.api.errors import Violation, failed_precondition, invalid, not_found
from cwtrain_emulator.api.resources import HOST_LABEL, Kind, Spec, delete
from cwtrain_emulator.api.service import Service
from cwtrain_emulator.api.wire import Reader, enum_json, pruned
from cwtrain_emulator.settings import ENGINES, INSTANCE_TYPES
from cwtrain_emulator.store import Resource

__all__ = ["DEPLOYMENTS", "delete_deployment", "deployment_parameters"]

_GPU_COUNTS = (1, 2, 4, 8, 16)
_MODEL_NAME_LENGTHS = (4, 63)
_LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
_HOT_LOAD_ENGINE = "dynamo-vllm"


class _Deployments(Kind):
    def parse(self, service: Service, reader: Reader, old: Resource | None) -> Spec:
        """Return the spec of a deployment."""
        gateways = [gateway_id.lower() for gateway_id in reader.texts("gatewayIds")]
        if not gateways:
            reader.problem("gatewayIds", "at least one gateway is required")
        spec: Spec = {"gatewayIds": list(dict.fromkeys(gateways))}
        spec |= pruned({"disabled": reader.flag("disabled")})
        spec["runtime"] = _runtime(reader.message("runtime", required=True))
        spec["resources"] = _resources(reader.message("resources", required=True))
        spec["model"] = _model(reader.message("model", required=True))
        spec["autoscaling"] = _autoscaling(reader.message("autoscaling", required=True))
        spec["traffic"] = _traffic(reader.message("traffic"))
        if reader.has("hotLoad"):
            spec["hotLoad"] = _hot_load(reader.message("hotLoad"))
            if spec["runtime"].get("engine") not in ("", _HOT_LOAD_ENGINE):
                reader.problem("hotLoad", f"needs the engine {_HOT_LOAD_ENGINE}")
        if old is not None and spec.get("hotLoad") != old.spec.get("hotLoad"):
            reader.problem("hotLoad", "is fixed at creation; send it unchanged")
        return spec

    def check(self, service: Service, spec: Spec, old: Resource | None) -> None:
        """Gateways must be there and of one zone for hot-loads; a running hot-load bars updates."""
        zones = _zones(service, spec["gatewayIds"])
        if "hotLoad" in spec and old is None and not service.settings.hot_load_enabled:
            raise failed_precondition("hot-load is not enabled for this organization")
        if "hotLoad" in spec and len(zones) != 1:
            raise invalid(("hotLoad", f"needs gateways of one zone; these are in {', '.join(sorted(zones))}"))
        active = None if old is None else service.store.active_hot_load(old.id)
        if active is not None:
            raise failed_precondition(
                f"hot-load {active.id} is already in progress on the deployment; update it when that has ended",
                ("HOT_LOAD", f"hot-load {active.id} has not ended"),
            )

    def check_delete(self, service: Service, resource: Resource) -> None:
        """A deployment can be deleted at any time."""


DEPLOYMENTS = _Deployments("deployment")


def delete_deployment(service: Service, deployment_id: str) -> dict[str, Any]:
    """Begin to delete a deployment; a hot-load that runs on it fails."""
    answer = delete(service, DEPLOYMENTS, deployment_id)
    active = service.store.active_hot_load(deployment_id.lower())
    if active is not None:
        service.controller.fail_hot_load(active, "DeploymentDeleted", "the deployment was deleted")
    return answer


def deployment_parameters(service: Service, gateway_ids: Sequence[str]) -> dict[str, Any]:
    """Return what a deployment may be made of, on all gateways or on the given ones."""
    known = [gateway.id for gateway in service.store.resources("gateway")]
    for gateway_id in gateway_ids:
        if gateway_id.lower() not in known:
            raise not_found("gateway", gateway_id)
    asked = [gateway_id.lower() for gateway_id in gateway_ids]
    gateways = [gateway_id for gateway_id in known if not asked or gateway_id in asked]
    return {
        "gatewayIds": gateways,
        "runtimeParameters": {
            "runtimeVersions": {name: {"versions": list(engine.versions)} for name, engine in ENGINES.items()},
            "runtimeConfigOptions": {
                name: {"allowedKeys": list(engine.config_keys)} for name, engine in ENGINES.items()
            },
            "engineEnvOptions": {name: {"allowedNames": list(engine.env_names)} for name, engine in ENGINES.items()},
        },
        "resourceParameters": {"instanceTypes": list(INSTANCE_TYPES) if gateways else []},
    }


def _zones(service: Service, gateway_ids: Sequence[str]) -> set[str]:
    zones: set[str] = set()
    missing: list[Violation] = []
    for gateway_id in gateway_ids:
        gateway = service.store.resource("gateway", gateway_id)
        if gateway is None or gateway.status == "DELETING":
            missing.append(("GATEWAY", f"gateway {gateway_id} does not exist"))
        else:
            zones.update(gateway.spec["zones"])
    if missing:
        raise failed_precondition("; ".join(what for _, what in missing), *missing)
    return zones


def _runtime(reader: Reader) -> Spec:
    name, version = reader.text("engine", required=True), reader.text("version")
    config, environment = reader.text_map("engineConfig"), reader.text_map("engineEnv")
    engine = ENGINES.get(name)
    if engine is None:
        if name:
            reader.problem("engine", f"unknown engine {name[:100]!r}; known are {', '.join(ENGINES)}")
        return {"engine": name}
    if version and version not in engine.versions:
        reader.problem("version", f"unknown version {version[:100]!r}; known are {', '.join(engine.versions)}")
    for key in config.keys() - set(engine.config_keys):
        reader.problem("engineConfig", f"unknown key {key[:100]!r}; see the deployment parameters for the allowed ones")
    for key in environment.keys() - set(engine.env_names):
        reader.problem("engineEnv", f"unknown name {key[:100]!r}; allowed are {', '.join(engine.env_names)}")
    mode = config.get("logprobs-mode", _LOGPROBS_MODES[0])
    if mode not in _LOGPROBS_MODES:
        reader.problem("engineConfig", f"logprobs-mode must be one of {', '.join(_LOGPROBS_MODES)}")
    length = config.get("max-model-len", "1")
    if not (length.isascii() and length.isdigit() and len(length) < 10 and int(length) > 0):
        reader.problem("engineConfig", "max-model-len must be a positive integer")
    spec: Spec = {"engine": name, "version": version or engine.versions[-1]}
    return spec | pruned({"engineConfig": config, "engineEnv": environment})


def _resources(reader: Reader) -> Spec:
    count = reader.integer("gpuCount")
    if count not in _GPU_COUNTS:
        reader.problem("gpuCount", f"must be one of {', '.join(map(str, _GPU_COUNTS))}")
    return {"instanceType": reader.text("instanceType", required=True), "gpuCount": count}


def _model(reader: Reader) -> Spec:
    name, bucket = reader.text("name", required=True), reader.text("bucket", required=True)
    shortest, longest = _MODEL_NAME_LENGTHS
    if name and not shortest <= len(name) <= longest:
        reader.problem("name", f"must have {shortest} to {longest} characters")
    _check_bucket(reader, bucket)
    return {"name": name, "bucket": bucket} | pruned({"path": reader.text("path")})


def _autoscaling(reader: Reader) -> Spec:
    least, most = reader.integer("min"), reader.integer("max")
    if least < 1:
        reader.problem("min", "must be at least 1")
    if most < max(least, 1):
        reader.problem("max", "must be at least 1, and not below min")
    priority, concurrency = reader.integer("priority"), reader.integer("concurrency")
    if not 0 <= priority <= 1000:
        reader.problem("priority", "must be from 0 to 1000")
    if reader.has("concurrency") and concurrency < 1:
        reader.problem("concurrency", "must be at least 1")
    classes = reader.enums("capacityClasses", "CapacityClass")
    if "UNSPECIFIED" in classes:
        reader.problem("capacityClasses", "must not be unspecified")
    shown = [enum_json("CapacityClass", member) for member in classes]
    optional = {"priority": priority, "concurrency": concurrency, "capacityClasses": shown}
    return {"min": least, "max": most} | pruned(optional)


def _traffic(reader: Reader) -> Spec:
    weight = reader.integer("weight")
    if not 0 <= weight <= 1000:
        reader.problem("weight", "must be from 0 to 1000")
    return pruned({"weight": weight})


def _hot_load(reader: Reader) -> Spec:
    bucket = reader.text("bucket", required=True)
    _check_bucket(reader, bucket)
    prefix = reader.text("pathPrefix")
    if ".." in prefix.split("/"):
        reader.problem("pathPrefix", "must have no .. segment")
    if reader.enum("transitionMode", "TransitionMode") != "ASYNC":
        reader.problem("transitionMode", "must be TRANSITION_MODE_ASYNC")
    return {"bucket": bucket} | pruned({"pathPrefix": prefix}) | {"transitionMode": "TRANSITION_MODE_ASYNC"}


def _check_bucket(reader: Reader, bucket: str) -> None:
    if bucket and not HOST_LABEL.fullmatch(bucket):
        reader.problem("bucket", "must be one host label: letters, digits and dashes, no dots")
