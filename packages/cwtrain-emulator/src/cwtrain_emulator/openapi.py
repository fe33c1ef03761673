"""The control plane as an OpenAPI document, which the emulator serves at ``/openapi.json``.

It describes what this emulator takes and answers, so that generic tools can call it; the service's own document is the
one in CoreWeave's API reference. Fields of answers that have their zero value may be left out, so hardly any is
required.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from cwtrain_emulator.api.app import PREFIX
from cwtrain_emulator.api.wire import ENUMS
from cwtrain_emulator.settings import ENGINES, INSTANCE_TYPES, ZONES

__all__ = ["openapi"]

Schema = dict[str, Any]

_RESOURCE_STATUSES = ("UNSPECIFIED", "CREATING", "UPDATING", "DELETING", "ERROR", "FAILED", "READY")
_CONDITION_STATUSES = ("UNSPECIFIED", "TRUE", "FALSE", "UNKNOWN")
_HOT_LOAD_STATES = ("UNSPECIFIED", "PENDING", "IN_PROGRESS", "COMPLETED", "FAILED", "CANCELED")
_REPLICA_STATES = ("UNSPECIFIED", "PENDING_UPDATE", "UPDATING", "READY", "ERROR")

_TEXT: Schema = {"type": "string"}
_UUID: Schema = {"type": "string", "format": "uuid"}
_TIME: Schema = {"type": "string", "format": "date-time"}
_FLAG: Schema = {"type": "boolean"}
_HOST_LABEL: Schema = {"type": "string", "pattern": "^[a-zA-Z0-9]([a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?$"}
_EMPTY: Schema = {"type": "object", "properties": {}, "additionalProperties": False}


def openapi() -> dict[str, Any]:
    """Return the document; the same at every call, and safe to change."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "CoreWeave Dedicated Inference, as cwtrain-emulator offers it",
            "version": "v1alpha1",
        },
        "servers": [{"url": PREFIX}],
        "security": [{"bearerAuth": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"bearerAuth": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


# Schemas -------------------------------------------------------------------------------------------------------------


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(properties: Mapping[str, Schema], required: Sequence[str] = ()) -> Schema:
    made: Schema = {"type": "object", "properties": dict(properties), "additionalProperties": False}
    return {**made, "required": list(required)} if required else made


def _list(items: Schema, *, least: int = 0) -> Schema:
    made: Schema = {"type": "array", "items": items}
    return {**made, "minItems": least} if least else made


def _whole(least: int = 0, most: int = 2**31 - 1) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _text(least: int = 0, most: int | None = None) -> Schema:
    made: Schema = {**_TEXT, **({"minLength": least} if least else {})}
    return made if most is None else {**made, "maxLength": most}


def _choice(values: Sequence[str], prefix: str = "") -> Schema:
    return {"type": "string", "enum": [prefix + value for value in values]}


def _sent(enum: str, *, zero: bool = False) -> Schema:
    """An enum of a request: a name (any case and no prefix will do, too) or a number."""
    prefix, members = ENUMS[enum]
    first = 0 if zero else 1
    return {"anyOf": [_choice(members[first:], prefix), _whole(first, len(members) - 1)]}


def _shown(enum: str) -> Schema:
    """An enum of an answer: its name."""
    prefix, members = ENUMS[enum]
    return _choice(members, prefix)


def _texts(names: Sequence[str]) -> Schema:
    return {"type": "object", "propertyNames": {"enum": sorted(names)}, "additionalProperties": _TEXT}


def _schemas() -> dict[str, Schema]:
    condition = _object(
        {
            "type": _TEXT,
            "status": _choice(_CONDITION_STATUSES, "STATUS_"),
            "reason": _TEXT,
            "message": _TEXT,
            "zone": _TEXT,
            "lastUpdateTime": _TIME,
        },
        ["type", "status"],
    )
    status: dict[str, Schema] = {
        "status": _choice(_RESOURCE_STATUSES, "STATUS_"),
        "conditions": _list(_ref("Condition")),
        "createdAt": _TIME,
        "updatedAt": _TIME,
    }
    refusal = _object(
        {
            "code": _whole(1, 16),
            "message": _text(1),
            "details": _list({"type": "object", "properties": {"@type": _TEXT}, "required": ["@type"]}),
        },
        ["code", "message", "details"],
    )
    return {
        "Condition": condition,
        "Refusal": refusal,
        **_gateway_schemas(status),
        **_deployment_schemas(status),
        **_claim_schemas(status),
        **_hot_load_schemas(),
    }


def _resource(spec: str, status: Mapping[str, Schema]) -> Schema:
    shown = _object(status, ["status", "createdAt", "updatedAt"])
    return _object({"spec": _ref(spec), "status": shown}, ["spec", "status"])


def _gateway_schemas(status: Mapping[str, Schema]) -> dict[str, Schema]:
    wandb = {"serverUrl": _text(1), "enableUsageReports": _FLAG, "enableRateLimiting": _FLAG}
    header = _object({"headerName": _text(1, 100)}, ["headerName"])
    endpoint = _object({"additionalDns": _list(_TEXT), "allowedSourceIpRanges": _list(_TEXT)})
    shared: dict[str, Schema] = {
        "name": _HOST_LABEL,
        "zones": _list(_choice(ZONES), least=1),
        "endpointConfiguration": endpoint,
    }
    sent_wandb = {**_object({**wandb, "apiKey": _TEXT}), "dependentRequired": {"apiKey": ["serverUrl"]}}
    auths: dict[str, Schema] = {"coreWeaveAuth": _EMPTY, "weightsAndBiasesAuth": sent_wandb}
    routings: dict[str, Schema] = {
        "bodyBasedRouting": _object({"apiType": _sent("ApiType", zero=True)}),
        "headerBasedRouting": header,
        "pathBasedRouting": _EMPTY,
    }
    shown: dict[str, Schema] = {
        **auths,
        **routings,
        "weightsAndBiasesAuth": _object(wandb),
        "bodyBasedRouting": _object({"apiType": _shown("ApiType")}),
    }

    def sent(identity: dict[str, Schema], required: Sequence[str]) -> Schema:
        return {
            "allOf": [
                _open({**shared, **identity}, required),
                {"oneOf": [_open({name: schema}, [name]) for name, schema in auths.items()]},
                {"oneOf": [_open({name: schema}, [name]) for name, schema in routings.items()]},
            ]
        }

    return {
        "GatewaySpec": _object({"id": _UUID, "organizationId": _TEXT, **shared, **shown}, ["id", "name", "zones"]),
        "Gateway": _resource("GatewaySpec", {**status, "endpoints": _list({"type": "string", "format": "uri"})}),
        "GatewayCreate": sent({"id": _UUID}, ["name", "zones"]),
        "GatewayUpdate": sent({"id": _UUID}, ["id", "zones"]),
        "GatewayParameters": _object({"zones": _list(_TEXT)}, ["zones"]),
    }


def _open(properties: Mapping[str, Schema], required: Sequence[str]) -> Schema:
    """A part of a request's body; fields that are unknown are ignored."""
    return {"type": "object", "properties": dict(properties), "required": list(required)}


def _deployment_schemas(status: Mapping[str, Schema]) -> dict[str, Schema]:
    keys = {key for engine in ENGINES.values() for key in engine.config_keys}
    names = {name for engine in ENGINES.values() for name in engine.env_names}
    runtime: dict[str, Schema] = {
        "engine": _choice(list(ENGINES)),
        "version": _TEXT,
        "engineConfig": _texts(sorted(keys)),
        "engineEnv": _texts(sorted(names)),
    }
    resources = _object(
        {"instanceType": _text(1), "gpuCount": {"type": "integer", "enum": [1, 2, 4, 8, 16]}},
        ["instanceType", "gpuCount"],
    )
    model = _object({"name": _text(4, 63), "bucket": _HOST_LABEL, "path": _TEXT}, ["name", "bucket"])
    autoscaling: dict[str, Schema] = {
        "min": _whole(1),
        "max": _whole(1),
        "priority": _whole(0, 1000),
        "concurrency": _whole(1),
    }
    traffic = _object({"weight": _whole(0, 1000)})
    hot_load: dict[str, Schema] = {"bucket": _HOST_LABEL, "pathPrefix": _TEXT}
    shared: dict[str, Schema] = {
        "name": _HOST_LABEL,
        "gatewayIds": _list(_UUID, least=1),
        "disabled": _FLAG,
        "resources": resources,
        "model": model,
        "traffic": traffic,
    }

    def spec(classes: Schema, mode: Schema) -> dict[str, Schema]:
        return {
            **shared,
            "runtime": _object(runtime, ["engine"]),
            "autoscaling": _object({**autoscaling, "capacityClasses": _list(classes)}, ["min", "max"]),
            "hotLoad": _object({**hot_load, "transitionMode": mode}, ["bucket", "transitionMode"]),
        }

    shown = {
        "id": _UUID,
        "organizationId": _TEXT,
        **spec(_shown("CapacityClass"), _shown("TransitionMode")),
    }
    sent = {"id": _UUID, **spec(_sent("CapacityClass"), _sent("TransitionMode"))}
    required = ["gatewayIds", "runtime", "resources", "model", "autoscaling"]
    by_engine = {"type": "object", "additionalProperties": {"type": "object"}}
    parameters = _object(
        {
            "gatewayIds": _list(_UUID),
            "runtimeParameters": _object(
                {"runtimeVersions": by_engine, "runtimeConfigOptions": by_engine, "engineEnvOptions": by_engine}
            ),
            "resourceParameters": _object({"instanceTypes": _list(_TEXT)}),
        }
    )
    return {
        "DeploymentSpec": _object(shown, ["id", "name", *required]),
        "Deployment": _resource("DeploymentSpec", status),
        "DeploymentCreate": _open(sent, ["name", *required]),
        "DeploymentUpdate": _open(sent, ["id", *required]),
        "DeploymentParameters": parameters,
    }


def _claim_schemas(status: Mapping[str, Schema]) -> dict[str, Schema]:
    def resources(capacity_type: Schema) -> Schema:
        return _object(
            {
                "instanceId": {**_text(1), "examples": list(INSTANCE_TYPES)},
                "instanceCount": _whole(1),
                "capacityType": capacity_type,
                "zones": _list(_choice(ZONES), least=1),
            },
            ["instanceId", "instanceCount", "capacityType", "zones"],
        )

    counts = {"allocatedInstances": _whole(), "pendingInstances": _whole()}
    identity: dict[str, Schema] = {"id": _UUID, "name": _HOST_LABEL}
    sent = {**identity, "resources": resources(_sent("CapacityType"))}
    shown = {**identity, "organizationId": _TEXT, "resources": resources(_shown("CapacityType"))}
    by_zone = {"type": "object", "additionalProperties": _object({"instanceIds": _list(_TEXT)})}
    return {
        "CapacityClaimSpec": _object(shown, ["id", "name", "resources"]),
        "CapacityClaim": _resource("CapacityClaimSpec", {**status, **counts}),
        "CapacityClaimCreate": _open(sent, ["name", "resources"]),
        "CapacityClaimUpdate": _open(sent, ["id", "resources"]),
        "CapacityClaimParameters": _object({"zoneInstanceTypes": by_zone}, ["zoneInstanceTypes"]),
    }


def _hot_load_schemas() -> dict[str, Schema]:
    identity = {**_text(1, 128), "pattern": "^[^/]+$", "not": {"enum": [".", ".."]}}
    target = {**identity, "not": {"enum": [".", "..", "initial"]}}

    def metadata(compression: Schema, checksum: Schema) -> Schema:
        fields = {
            "previousSnapshotIdentity": identity,
            "compressionFormat": compression,
            "checksumFormat": checksum,
        }
        return _object(fields, list(fields))

    entry = _object(
        {
            "identity": identity,
            "type": _shown("SnapshotType"),
            "hotLoadId": _UUID,
            "compressionFormat": _shown("CompressionFormat"),
            "checksumFormat": _shown("ChecksumFormat"),
        },
        ["identity", "type", "hotLoadId"],
    )
    spec = _object(
        {
            "id": _UUID,
            "deploymentId": _UUID,
            "organizationId": _TEXT,
            "identity": identity,
            "type": _shown("SnapshotType"),
            "incrementalSnapshotMetadata": metadata(_shown("CompressionFormat"), _shown("ChecksumFormat")),
            "promptCachePolicy": _shown("PromptCachePolicy"),
            "snapshotChain": _list(entry, least=1),
        },
        ["id", "deploymentId", "identity", "type", "snapshotChain"],
    )
    status = _object(
        {
            "state": _choice(_HOT_LOAD_STATES, "HOT_LOAD_STATE_"),
            "createdAt": _TIME,
            "updatedAt": _TIME,
            "finishedAt": _TIME,
            "canceledAt": _TIME,
            "conditions": _list(_ref("Condition")),
        },
        ["state", "createdAt", "updatedAt"],
    )
    replica = _object(
        {
            "name": _TEXT,
            "zone": _TEXT,
            "state": _choice(_REPLICA_STATES),
            "currentSnapshotIdentity": _TEXT,
            "errorReason": _TEXT,
            "transitionedAt": _TIME,
            "startedAt": _TIME,
            "finishedAt": _TIME,
            "updatedAt": _TIME,
        },
        ["name", "state"],
    )
    common: dict[str, Schema] = {
        "deploymentId": _UUID,
        "hotLoadId": _UUID,
        "identity": target,
        "promptCachePolicy": _sent("PromptCachePolicy", zero=True),
    }
    full = _open({**common, "type": _choice(["SNAPSHOT_TYPE_FULL"])}, ["deploymentId", "identity", "type"])
    incremental = _open(
        {
            **common,
            "type": _choice(["SNAPSHOT_TYPE_INCREMENTAL"]),
            "incrementalSnapshotMetadata": metadata(_sent("CompressionFormat"), _sent("ChecksumFormat")),
        },
        ["deploymentId", "identity", "type", "incrementalSnapshotMetadata"],
    )
    return {
        "HotLoad": _object({"spec": spec, "status": status}, ["spec", "status"]),
        "HotLoadReplica": replica,
        "HotLoadCreate": {"oneOf": [full, incremental]},
        "HotLoadCancel": _open({"id": _UUID}, ["id"]),
    }


# Paths ---------------------------------------------------------------------------------------------------------------

_ID: Schema = {"name": "id", "in": "path", "required": True, "schema": _UUID}
_PAGING: list[Schema] = [
    {"name": "maxPageSize", "in": "query", "schema": _whole()},
    {"name": "pageToken", "in": "query", "schema": _TEXT},
]


def _operation(
    name: str,
    answer: Schema,
    refusals: Sequence[int],
    *,
    parameters: Sequence[Schema] = (),
    body: str | None = None,
) -> dict[str, Any]:
    refused = {"description": "refused", "content": {"application/json": {"schema": _ref("Refusal")}}}
    operation: dict[str, Any] = {
        "operationId": name,
        "parameters": list(parameters),
        "responses": {
            "200": {"description": "done", "content": {"application/json": {"schema": answer}}},
            **{str(status): refused for status in sorted({401, *refusals})},
        },
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": _ref(body)}}}
    return operation


def _paths() -> dict[str, Any]:
    updated = {"name": "updatedAfter", "in": "query", "schema": _TIME}
    parent = {"name": "parentGatewayId", "in": "query", "schema": _UUID}
    gateways = {"name": "gatewayIds", "in": "query", "schema": _list(_UUID)}
    of_deployment = {"name": "parentDeploymentId", "in": "query", "schema": _UUID}
    hot_load = _object({"hotLoad": _ref("HotLoad")}, ["hotLoad"])

    def page(key: str, schema: str) -> Schema:
        return _object({key: _list(_ref(schema)), "nextPageToken": _TEXT}, [key])

    return {
        **_kind_paths("/gateways", "Gateway", "gateway", [updated]),
        **_kind_paths("/deployments", "Deployment", "deployment", [updated, parent], [gateways]),
        **_kind_paths("/capacityclaims", "CapacityClaim", "capacityClaim", [updated]),
        "/hotLoads": {
            "get": _operation("ListHotLoads", page("hotLoads", "HotLoad"), [400], parameters=[of_deployment, *_PAGING]),
            "post": _operation("CreateHotLoad", hot_load, [400, 403, 404, 409, 413, 503], body="HotLoadCreate"),
        },
        "/hotLoads/{id}": {"get": _operation("GetHotLoad", hot_load, [404], parameters=[_ID])},
        "/hotLoads/{id}/replicas": {
            "get": _operation(
                "ListHotLoadReplicas", page("replicas", "HotLoadReplica"), [400, 404], parameters=[_ID, *_PAGING]
            )
        },
        "/hotLoads/{id}:cancel": {
            "post": _operation(
                "CancelHotLoad", hot_load, [400, 403, 404, 413, 501], parameters=[_ID], body="HotLoadCancel"
            )
        },
    }


def _kind_paths(
    path: str, schema: str, key: str, filters: Sequence[Schema], choices: Sequence[Schema] = ()
) -> dict[str, Any]:
    one = _object({key: _ref(schema)}, [key])
    all_of_them = _object({"items": _list(_ref(schema))}, ["items"])
    create, update, parameters = f"{schema}Create", f"{schema}Update", f"{schema}Parameters"
    return {
        path: {
            "get": _operation(f"List{schema}s", all_of_them, [400], parameters=filters),
            "post": _operation(f"Create{schema}", one, [400, 403, 409, 413], body=create),
        },
        f"{path}/parameters": {
            "get": _operation(f"Get{parameters}", _ref(parameters), [404], parameters=choices),
        },
        f"{path}/{{id}}": {
            "get": _operation(f"Get{schema}", one, [404], parameters=[_ID]),
            "patch": _operation(f"Update{schema}", one, [400, 403, 404, 413], parameters=[_ID], body=update),
            "delete": _operation(f"Delete{schema}", one, [400, 403, 404], parameters=[_ID]),
        },
    }
