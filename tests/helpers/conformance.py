"""What the conformance tests share: refusals taken apart, snapshots in the bucket. Nothing here is the client's."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from typing import Any, NamedTuple

import requests

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.pytest_plugin import Bucket
from helpers.emulator_api import Api, deployment_body

GRPC_NUMBERS = {
    "CANCELED": 1,
    "UNKNOWN": 2,
    "INVALID_ARGUMENT": 3,
    "DEADLINE_EXCEEDED": 4,
    "NOT_FOUND": 5,
    "ALREADY_EXISTS": 6,
    "PERMISSION_DENIED": 7,
    "RESOURCE_EXHAUSTED": 8,
    "FAILED_PRECONDITION": 9,
    "ABORTED": 10,
    "OUT_OF_RANGE": 11,
    "UNIMPLEMENTED": 12,
    "INTERNAL": 13,
    "UNAVAILABLE": 14,
    "DATA_LOSS": 15,
    "UNAUTHENTICATED": 16,
}
"""The canonical codes of gRPC and their numbers."""

HTTP_OF = {
    "INVALID_ARGUMENT": {400, 413},
    "FAILED_PRECONDITION": {400, 412},
    "UNAUTHENTICATED": {401},
    "PERMISSION_DENIED": {403},
    "NOT_FOUND": {404},
    "ALREADY_EXISTS": {409},
    "ABORTED": {409},
    "RESOURCE_EXHAUSTED": {429},
    "UNIMPLEMENTED": {501},
    "UNAVAILABLE": {503},
}
"""The HTTP statuses that a code may come with. INTERNAL is not there: nothing may answer it."""

RFC_3339 = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,9})?(Z|[+-]\d\d:\d\d)")
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
ABSENT = "00000000-0000-4000-8000-000000000000"

_NAMES = {number: name for name, number in GRPC_NUMBERS.items()}


class Refusal(NamedTuple):
    """A refusal: the canonical name of its code, the message, and the details by the last part of their type."""

    code: str
    message: str
    details: dict[str, dict[str, Any]]

    @property
    def fields(self) -> set[str]:
        """The fields that a BadRequest names."""
        return {entry["field"] for entry in self.details.get("BadRequest", {}).get("fieldViolations", [])}

    @property
    def violations(self) -> list[str]:
        """The descriptions of a PreconditionFailure."""
        return [entry["description"] for entry in self.details.get("PreconditionFailure", {}).get("violations", [])]


def refusal(answer: requests.Response) -> Refusal:
    """Take a refusal apart; its body must be that of a gRPC JSON gateway, and its status that of its code."""
    assert answer.headers["Content-Type"].startswith("application/json"), answer.headers
    body = answer.json()
    assert set(body) == {"code", "message", "details"}, body
    assert isinstance(body["message"], str)
    assert body["message"]
    code = _NAMES[body["code"]]
    assert answer.status_code in HTTP_OF[code], (answer.status_code, body)
    details = {}
    for entry in body["details"]:
        prefix, _, kind = entry["@type"].rpartition(".")
        assert prefix == "type.googleapis.com/google.rpc", entry
        details[kind] = {name: value for name, value in entry.items() if name != "@type"}
    return Refusal(code, body["message"], details)


def refused(api: Api, method: str, path: str, body: Any = None, **options: Any) -> Refusal:
    """Send a call that must be refused and take the refusal apart."""
    return refusal(api.call(method, path, body, **options))


def gateway_body(**changes: Any) -> dict[str, Any]:
    """Return the body of a create, without the fields that are None in `changes`."""
    body = {
        "name": f"gw-{uuid.uuid4().hex[:8]}",
        "zones": ["US-EAST-04A"],
        "coreWeaveAuth": {},
        "bodyBasedRouting": {"apiType": "API_TYPE_OPENAI"},
        **changes,
    }
    return {name: value for name, value in body.items() if value is not None}


def claim_body(**resources: Any) -> dict[str, Any]:
    """Return the body of a create with these parts of its resources changed."""
    wanted = {
        "instanceId": "gb200-4x",
        "instanceCount": 2,
        "capacityType": "CAPACITY_TYPE_CUSTOMER",
        "zones": ["US-EAST-04A"],
        **resources,
    }
    return {"name": f"claim-{uuid.uuid4().hex[:8]}", "resources": wanted}


def idle_deployment_body(gateway_id: str, bucket: str, **changes: Any) -> dict[str, Any]:
    """Return the body of a create that starts no replica: what only looks at specs needs no processes."""
    body = {**deployment_body(gateway_id, bucket), "disabled": True, **changes}
    return {name: value for name, value in body.items() if value is not None}


def bucket_of(emulator: Emulator) -> Bucket:
    """Return the emulator's bucket with a client that has the trainer's key."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=emulator.s3_endpoint,
        aws_access_key_id=emulator.access_key_id,
        aws_secret_access_key=emulator.secret_access_key,
        region_name=emulator.region,
        config=Config(s3={"addressing_style": "path"}, request_checksum_calculation="when_required"),
    )
    return Bucket(emulator.bucket, client)


def put_snapshot(bucket: Bucket, deployment: Mapping[str, Any], identity: str, files: Mapping[str, bytes]) -> None:
    """Write a snapshot's objects where the deployment looks for them."""
    prefix = deployment["spec"]["hotLoad"].get("pathPrefix", "")
    for name, raw in files.items():
        bucket.client.put_object(Bucket=bucket.name, Key=f"{prefix}/{identity}/{name}".lstrip("/"), Body=raw)
