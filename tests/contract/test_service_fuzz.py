"""The control plane, fuzzed by its own description: it never fails, never hangs, and says only what it describes.

The examples are the same in every run (no randomness), and bounded.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import requests
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.openapi import openapi
from helpers.conformance import (
    GRPC_NUMBERS,
    HTTP_OF,
    bucket_of,
    claim_body,
    gateway_body,
    idle_deployment_body,
    put_snapshot,
)
from helpers.emulator_api import PREFIX, Api
from helpers.openapi_values import JUNK, Document, spoiled
from helpers.tiny_delta import Files

DESCRIPTION = openapi()
OPERATIONS = {
    operation["operationId"]: (method, path) for method, path, operation in Document(DESCRIPTION).operations()
}
NAMES = {number: name for name, number in GRPC_NUMBERS.items()}
HANG_SECONDS = 30


def bounded(examples: int) -> Any:
    return settings(
        max_examples=examples,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        print_blob=False,
    )


class World(NamedTuple):
    """An emulator with one of everything. `gateway` and `running` stay as they are; the others may be changed."""

    emulator: Emulator
    api: Api
    document: Document
    gateway: str
    running: str
    hot_load: str
    changeable: dict[str, str]


@pytest.fixture(scope="module")
def world(tiny_model: Files) -> Iterator[World]:
    with Emulator(replicas=1, extra_args=["--swap-delay=0"]) as emulator:
        api = Api(emulator.base_url, emulator.admin_token)
        gateway = api.gateway()["spec"]["id"]
        deployment = api.deployment(gateway, emulator.bucket)
        put_snapshot(bucket_of(emulator), deployment, "v0", tiny_model)
        hot_load = api.completed(deployment["spec"]["id"], "v0")["spec"]["id"]
        changeable = {
            "/gateways": api.gateway()["spec"]["id"],
            "/deployments": made(api, "/deployments", idle_deployment_body(gateway, emulator.bucket)),
            "/capacityclaims": made(api, "/capacityclaims", claim_body()),
        }
        ids = (gateway, deployment["spec"]["id"], hot_load, *changeable.values())
        yield World(emulator, api, Document(DESCRIPTION, ids), gateway, deployment["spec"]["id"], hot_load, changeable)
        api.close()


def made(api: Api, path: str, body: Mapping[str, Any]) -> str:
    (resource,) = api.ok("POST", path, body).values()
    found: str = resource["spec"]["id"]
    return found


def judged(world: World, name: str, answer: requests.Response) -> Any:
    """Return an answer's content, which must be what the operation's description says."""
    method, path = OPERATIONS[name]
    operation = DESCRIPTION["paths"][path][method.lower()]
    context = f"{method} {answer.request.url} {answer.request.body!r:.2000}: {answer.status_code} {answer.text:.2000}"
    assert str(answer.status_code) in operation["responses"], context
    content = answer.json()
    schema = operation["responses"][str(answer.status_code)]["content"]["application/json"]["schema"]
    assert world.document.problems(content, schema) == [], context
    if answer.status_code != 200:
        assert answer.status_code in HTTP_OF[NAMES[content["code"]]], context
    return content


def body_bytes(body: Any) -> bytes:
    # Lone surrogates must stay as escapes: they are what a careless client sends.
    return json.dumps(body).encode()


def test_the_description_is_served_to_anyone(world: World) -> None:
    answer = requests.get(f"{world.emulator.base_url}/openapi.json", timeout=HANG_SECONDS)
    assert answer.json() == DESCRIPTION
    assert answer.headers["Content-Type"].startswith("application/json")


@pytest.mark.parametrize("name", [name for name, (method, _) in OPERATIONS.items() if method in ("POST", "PATCH")])
@bounded(20)
@given(data=st.data())
def test_writes(world: World, name: str, data: st.DataObject) -> None:
    method, path = OPERATIONS[name]
    schema = DESCRIPTION["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    fitting = world.document.values(schema)
    body = data.draw(st.one_of(fitting, spoiled(fitting), spoiled(fitting), JUNK))
    target = data.draw(st.sampled_from([*known_ids(world, path) * 4, str(uuid.UUID(int=7)), "%00"]))
    if isinstance(body, dict):
        body = settled(world, name, target, body, data)
    answer = world.api.session.request(
        method, url(world, path, target), data=body_bytes(body), timeout=HANG_SECONDS, headers=JSON
    )
    content = judged(world, name, answer)
    if answer.status_code == 200 and method == "POST":
        (resource,) = content.values()
        if path != "/hotLoads":
            world.api.ok("DELETE", f"{path}/{resource['spec']['id']}")
        else:
            world.api.ended(resource["spec"]["id"])


JSON = {"Content-Type": "application/json"}


def url(world: World, path: str, target: str, query: str = "") -> str:
    return f"{world.emulator.base_url}{PREFIX}{path.replace('{id}', target)}{query}"


def known_ids(world: World, path: str) -> list[str]:
    """The ids that a path may end with; what is changed there is changed for good."""
    if path.startswith("/hotLoads"):
        return [world.hot_load]
    return [world.changeable["/" + path.split("/")[1]]]


def settled(world: World, name: str, target: str, body: dict[str, Any], data: st.DataObject) -> dict[str, Any]:
    """Make a body likelier to get past the first checks, and never one that starts a replica."""
    likely = st.sampled_from([True, True, True, False])
    if name.startswith(("CreateDeployment", "UpdateDeployment")):
        body["disabled"] = True
        if data.draw(likely):
            body["gatewayIds"] = [world.gateway]
            body["runtime"] = {
                "engine": "dynamo-vllm",
                "engineConfig": data.draw(st.sampled_from([{}, {"seed": "1"}, None])),
            }
    if name == "UpdateDeployment" and target in world.changeable.values() and data.draw(likely):
        body.pop("name", None)
        body["hotLoad"] = world.api.ok("GET", f"/deployments/{target}")["deployment"]["spec"]["hotLoad"]
    if name.startswith("Create") and name != "CreateHotLoad" and data.draw(likely):
        body.pop("id", None)
    if name == "CreateHotLoad" and data.draw(likely):
        body.pop("hotLoadId", None)
        body["deploymentId"] = world.running
        body["identity"] = data.draw(st.sampled_from(["v0", "absent", "initial", body.get("identity")]))
    if name.startswith("Update") and data.draw(likely):
        body["id"] = target
    return body


@pytest.mark.parametrize("name", ["CreateGateway", "CreateCapacityClaim"])
@bounded(20)
@given(data=st.data())
def test_what_fits_the_description_is_accepted(world: World, name: str, data: st.DataObject) -> None:
    method, path = OPERATIONS[name]
    schema = DESCRIPTION["paths"][path][method.lower()]["requestBody"]["content"]["application/json"]["schema"]
    body = data.draw(world.document.values(schema))
    body.pop("id", None)
    body["name"] = f"fuzz-{uuid.uuid4().hex[:8]}"
    answer = world.api.session.request(method, url(world, path, ""), data=body_bytes(body), timeout=HANG_SECONDS)
    (resource,) = judged(world, name, answer).values()
    assert answer.status_code == 200, (body, answer.text)
    world.api.ok("DELETE", f"{path}/{resource['spec']['id']}")


@pytest.mark.parametrize("name", [name for name, (method, _) in OPERATIONS.items() if method == "GET"])
@bounded(20)
@given(data=st.data())
def test_reads(world: World, name: str, data: st.DataObject) -> None:
    method, path = OPERATIONS[name]
    pairs = []
    for parameter in DESCRIPTION["paths"][path][method.lower()]["parameters"]:
        if parameter["in"] == "query" and data.draw(st.booleans()):
            fitting = world.document.values(parameter["schema"])
            value = data.draw(fitting | st.text(max_size=12) | st.sampled_from(["", "0", "-1", "null", "2" * 30]))
            pairs += [(parameter["name"], part) for part in (value if isinstance(value, list) else [value])]
    pairs += data.draw(st.lists(st.tuples(st.text(max_size=6), st.text(max_size=6)), max_size=2))
    query = urllib.parse.urlencode(pairs, errors="replace")
    ids = known_ids(world, path) * 3 if "{id}" in path else ["x"]
    target = data.draw(st.sampled_from([*ids, str(uuid.UUID(int=7)), "x", "%00", "%ff", "a" * 500]))
    judged(world, name, world.api.session.get(url(world, path, target, f"?{query}"), timeout=HANG_SECONDS))


@pytest.mark.parametrize("name", [name for name, (method, _) in OPERATIONS.items() if method == "DELETE"])
def test_deletes(world: World, name: str) -> None:
    _, path = OPERATIONS[name]
    kind = path.removesuffix("/{id}")
    bodies = {
        "/gateways": gateway_body(),
        "/deployments": idle_deployment_body(world.gateway, world.emulator.bucket),
        "/capacityclaims": claim_body(),
    }
    victim = made(world.api, kind, bodies[kind])
    for target in (victim, victim, victim.upper(), world.hot_load, "x", "%00", "%2e%2e", "%ff", "a" * 5000):
        for body in (None, b"{", b"{}", b"\xff"):
            answer = world.api.session.delete(url(world, path, target), data=body, timeout=HANG_SECONDS)
            judged(world, name, answer)
    if kind == "/gateways":
        judged(world, name, world.api.session.delete(url(world, path, world.gateway), timeout=HANG_SECONDS))


_PIECES = st.sampled_from(
    ["gateways", "deployments", "hotLoads", "capacityclaims", "parameters", "replicas", ":cancel", "..", ".", "", "%2F",
     "%00", "%ff", "~", "{id}", "x" * 200, "\u00fc", "?", "#", ";", str(uuid.UUID(int=1)), PREFIX.strip("/")]
)  # fmt: skip
_METHODS = st.sampled_from(["GET", "POST", "PATCH", "DELETE", "PUT", "HEAD", "OPTIONS", "TRACE", "QUERY", "get", "X-Y"])
_HEADERS = st.dictionaries(
    st.sampled_from(["X-Request-Id", "Accept", "Content-Type", "X-HTTP-Method-Override", "Range", "Expect", "Origin"]),
    st.text(st.characters(codec="latin-1", exclude_characters="\r\n\x00"), max_size=30),
    max_size=3,
)


@bounded(80)
@given(
    method=_METHODS,
    pieces=st.lists(_PIECES, max_size=5),
    headers=_HEADERS,
    token=st.sampled_from(["admin", "viewer", "", "Bearer", "\xff", "x" * 5000]),
    body=st.binary(max_size=40),
)
@example(method="GET", pieces=["hotLoads"], headers={"Expect": "100-continue"}, token="admin", body=b"")
def test_any_request_at_all(
    world: World, method: str, pieces: list[str], headers: dict[str, str], token: str, body: bytes
) -> None:
    """Whatever comes, the answer is no failure of the server; and it comes."""
    origin = urllib.parse.urlsplit(world.emulator.base_url)
    known = {"admin": world.emulator.admin_token, "viewer": world.emulator.viewer_token}
    path = urllib.parse.quote(f"{PREFIX}/{'/'.join(pieces)}", safe="/%?#;:{}~")
    connection = http.client.HTTPConnection(origin.netloc, timeout=HANG_SECONDS)
    try:
        connection.putrequest(method, path, skip_accept_encoding=True)
        connection.putheader("Authorization", f"Bearer {known.get(token, token)}".encode("latin-1"))
        for name, value in headers.items():
            connection.putheader(name, value.encode("latin-1"))
        connection.putheader("Content-Length", str(len(body)))
        connection.endheaders(body)
        answer = connection.getresponse()
        raw = answer.read()
    finally:
        connection.close()
    assert answer.status < 500 or answer.status == 501, (method, path, answer.status, raw)
    if answer.status >= 400 and method != "HEAD" and answer.getheader("Content-Type") == "application/json":
        assert world.document.problems(json.loads(raw), {"$ref": "#/components/schemas/Refusal"}) == []


@pytest.mark.parametrize("part", ["", "POST", "POST /v1alpha1/inference/gateways HTTP/1.1\r\n", "head", "body"])
def test_a_caller_that_stops_in_the_middle_holds_up_nobody(world: World, part: str) -> None:
    """Connections that say half a request, and then nothing, leave the service as it was."""
    origin = urllib.parse.urlsplit(world.emulator.base_url)
    head = (
        f"POST {PREFIX}/gateways HTTP/1.1\r\nHost: {origin.netloc}\r\nContent-Length: 1000\r\n"
        f"Authorization: Bearer {world.emulator.admin_token}\r\n"
    )
    said = {"head": head, "body": head + '\r\n{"name":'}.get(part, part)
    assert origin.hostname is not None
    stuck = [socket.create_connection((origin.hostname, origin.port or 0), timeout=HANG_SECONDS) for _ in range(20)]
    try:
        for connection in stuck:
            connection.sendall(said.encode())
        world.api.ok("GET", "/gateways")
    finally:
        for connection in stuck:
            connection.close()
    world.api.ok("GET", "/gateways")


def test_nothing_was_logged_as_a_failure(world: World) -> None:
    """After all that the emulator still hot-loads, and its log has no traceback."""
    deadline = time.monotonic() + 60
    while world.api.call("GET", f"/deployments/{world.running}").status_code != 200:
        assert time.monotonic() < deadline
    world.api.completed(world.running, "v0")
    log = (world.emulator.state_dir / "serve.log").read_text(errors="replace")
    assert "Traceback" not in log, log[-4000:]
