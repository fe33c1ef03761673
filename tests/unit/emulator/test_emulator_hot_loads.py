"""The rules of the control plane, on a store and a bucket in memory, with no replica."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest

from cwtrain_emulator.api import resources
from cwtrain_emulator.api.claims import CLAIMS
from cwtrain_emulator.api.controller import Controller, replica_names
from cwtrain_emulator.api.deployments import DEPLOYMENTS, deployment_parameters
from cwtrain_emulator.api.errors import ApiError
from cwtrain_emulator.api.gateways import GATEWAYS
from cwtrain_emulator.api.hot_loads import cancel_hot_load, create_hot_load, list_hot_loads
from cwtrain_emulator.api.service import Service, gateway_zones
from cwtrain_emulator.keys import Keys
from cwtrain_emulator.replica.pool import Pool, Replica
from cwtrain_emulator.settings import Settings
from cwtrain_emulator.store import HotLoadRow, ReplicaRow, Resource, Store, with_state
from helpers import tiny_delta
from helpers.memory_bucket import MemoryBucket
from helpers.tiny_delta import Tensor

BASE: dict[str, Tensor] = {"a": ("BF16", [4], bytes(8)), "b": ("F32", [2], bytes(8))}
NEW = tiny_delta.nudged(BASE, seed=1)
METADATA = {
    "previousSnapshotIdentity": "v0",
    "compressionFormat": "COMPRESSION_FORMAT_ZSTD",
    "checksumFormat": "CHECKSUM_FORMAT_ADLER32",
}


class NoReplicas:
    """A pool without processes; ``loads`` has what replicas were told."""

    def __init__(self) -> None:
        self.replicas: dict[str, Replica] = {}
        self.loads: list[tuple[str, str, int]] = []
        self.on_hello: Callable[[Replica], None] = lambda replica: None

    def add(self, name: str, *, zone: str, deployment_id: str, ordinal: int) -> Replica:
        replica = self.replicas[name] = Replica(name, zone, deployment_id, ordinal, writer=cast("Any", object()))
        self.on_hello(replica)
        return replica

    def get(self, name: str) -> Replica | None:
        return self.replicas.get(name)

    def of_deployment(self, deployment_id: str) -> list[Replica]:
        return [replica for replica in self.replicas.values() if replica.deployment_id == deployment_id]

    def load(self, replica: Replica, load_id: str, chain: Any, **how: Any) -> None:
        replica.load_id = load_id
        self.loads.append((replica.name, load_id, len(chain)))

    async def remove(self, name: str, *, keep_files: bool) -> None:
        self.replicas.pop(name, None)


class NoListeners:
    def open(self, gateway_id: str, preferred_port: int | None) -> int:
        return preferred_port or 1234

    def close(self, gateway_id: str) -> None:
        pass


class Plane:
    """A control plane whose clock stands still until it is moved."""

    def __init__(self, tmp_path: Path, **settings: Any) -> None:
        self.now = 1000.0
        self.bucket = MemoryBucket()
        self.pool = NoReplicas()
        self.store = Store(":memory:")
        self.settings = Settings(state_dir=tmp_path, **settings)
        self.controller = Controller(
            self.store,
            replicas=self.settings.replicas,
            zones_of=lambda deployment: gateway_zones(self.store, deployment),
            clock=lambda: self.now,
            root=tmp_path / "replicas",
        )
        self.controller.pool = cast("Pool", self.pool)
        self.pool.on_hello = self.controller.restore
        self.controller.listeners = NoListeners()
        self.service = Service(
            settings=self.settings,
            keys=Keys.load_or_create(tmp_path),
            store=self.store,
            controller=self.controller,
            pool=cast("Pool", self.pool),
            bucket_reader=self.bucket,  # type: ignore[arg-type]
            clock=lambda: self.now,
        )

    def settle(self) -> None:
        self.now += 1
        self.controller.reconcile()

    def report(self, state: str, identity: str, *, load_id: str = "restore", error: str = "") -> None:
        """Every replica says the same."""
        for replica in self.pool.replicas.values():
            replica.state, replica.identity, replica.load_id, replica.error = state, identity, load_id, error
            self.controller.replica_changed(replica)

    def hot_load(self, **body: Any) -> dict[str, Any]:
        answer = asyncio.run(create_hot_load(self.service, body))
        found: dict[str, Any] = answer["hotLoad"]
        return found


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.store.close()


def gateway_body(**changes: Any) -> dict[str, Any]:
    body = {"name": "gw", "zones": ["US-EAST-04A"], "coreWeaveAuth": {}, "bodyBasedRouting": {"apiType": 1}}
    return {**body, **changes}


def deployment_body(*gateways: str, **changes: Any) -> dict[str, Any]:
    body = {
        "name": "dep",
        "gatewayIds": list(gateways),
        "runtime": {"engine": "dynamo-vllm", "engineConfig": {"max-model-len": "512"}},
        "resources": {"instanceType": "gb200-4x", "gpuCount": 4},
        "model": {"name": "tiny", "bucket": "w", "path": "base"},
        "autoscaling": {
            "min": 1,
            "max": 2,
            "priority": 10,
            "concurrency": 4,
            "capacityClasses": ["CAPACITY_CLASS_RESERVED"],
        },
        "traffic": {"weight": 100},
        "hotLoad": {"bucket": "w", "pathPrefix": "runs", "transitionMode": "TRANSITION_MODE_ASYNC"},
    }
    return {**body, **changes}


def ready_deployment(plane: Plane, **changes: Any) -> str:
    gateway = resources.create(plane.service, GATEWAYS, gateway_body())["gateway"]["spec"]["id"]
    created = resources.create(plane.service, DEPLOYMENTS, deployment_body(gateway, **changes))["deployment"]
    plane.settle()
    plane.report("READY", "")
    plane.settle()
    found: str = created["spec"]["id"]
    assert plane.store.resource("deployment", found).status == "READY"  # type: ignore[union-attr]
    return found


def refused(call: Any, *args: Any, **kwargs: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args, **kwargs)
    return caught.value


def fields(error: ApiError) -> set[str]:
    return {entry["field"] for detail in error.details for entry in detail.get("fieldViolations", [])}


# Resources -----------------------------------------------------------------------------------------------------------


def test_resources_take_a_moment_and_go_through_their_states(plane: Plane) -> None:
    created = resources.create(plane.service, GATEWAYS, gateway_body())["gateway"]
    assert created["status"]["status"] == "STATUS_CREATING"
    assert "endpoints" not in created["status"]
    plane.settle()
    found = resources.shown(plane.service, GATEWAYS, resources.find(plane.service, GATEWAYS, created["spec"]["id"]))
    assert found["status"]["status"] == "STATUS_READY"
    assert found["status"]["endpoints"] == ["http://127.0.0.1:1234"]
    assert found["spec"]["bodyBasedRouting"] == {"apiType": "API_TYPE_OPENAI"}
    deleted = resources.delete(plane.service, GATEWAYS, created["spec"]["id"])["gateway"]
    assert deleted["status"]["status"] == "STATUS_DELETING"
    assert resources.delete(plane.service, GATEWAYS, created["spec"]["id"])["gateway"]["status"] == deleted["status"]
    plane.settle()
    assert refused(resources.find, plane.service, GATEWAYS, created["spec"]["id"]).code == "NOT_FOUND"


def test_ids_are_taken_before_anything_else_is_looked_at_and_names_are_unique(plane: Plane) -> None:
    mine = str(uuid.uuid4())
    resources.create(plane.service, GATEWAYS, gateway_body(id=mine.upper()))
    again = refused(resources.create, plane.service, GATEWAYS, {"id": mine})
    assert (again.code, again.status, again.body["code"]) == ("ALREADY_EXISTS", 409, 6)
    assert again.details[0]["resourceName"] == mine
    named = refused(resources.create, plane.service, GATEWAYS, gateway_body())
    assert named.code == "ALREADY_EXISTS"
    assert "name gw" in named.message


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"id": "x"}, {"id"}),
        ({"name": "-bad"}, {"name"}),
        ({"zones": []}, {"zones"}),
        ({"zones": ["MOON"]}, {"zones"}),
        ({"weightsAndBiasesAuth": {}}, {"coreWeaveAuth|weightsAndBiasesAuth"}),
        ({"bodyBasedRouting": None}, {"bodyBasedRouting|headerBasedRouting|pathBasedRouting"}),
        ({"bodyBasedRouting": None, "headerBasedRouting": {}}, {"headerBasedRouting.headerName"}),
        ({"name": 5, "zones": "x", "endpointConfiguration": {"additionalDns": [1]}},
         {"name", "zones", "endpointConfiguration.additionalDns[0]"}),
    ],
)  # fmt: skip
def test_a_gateway_s_problems_are_all_named(plane: Plane, changes: dict[str, Any], wrong: set[str]) -> None:
    error = refused(resources.create, plane.service, GATEWAYS, gateway_body(**changes))
    assert error.code == "INVALID_ARGUMENT"
    assert fields(error) == wrong


@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        ({"gatewayIds": []}, {"gatewayIds"}),
        ({"runtime": {"engine": "x"}}, {"runtime.engine", "hotLoad"}),
        ({"runtime": {"engine": "vllm"}}, {"hotLoad"}),
        ({"runtime": {"engine": "dynamo-vllm", "version": "0", "engineConfig": {"k": "v", "max-model-len": "0",
          "logprobs-mode": "raw_logits"}, "engineEnv": {"PATH": "/"}}},
         {"runtime.version", "runtime.engineConfig", "runtime.engineEnv"}),
        ({"resources": {"gpuCount": 3}}, {"resources.gpuCount", "resources.instanceType"}),
        ({"model": {"name": "abc", "bucket": "a.b"}}, {"model.name", "model.bucket"}),
        ({"autoscaling": {"min": 2, "max": 1, "priority": 1001, "concurrency": 0, "capacityClasses": [0]}},
         {"autoscaling.max", "autoscaling.priority", "autoscaling.concurrency", "autoscaling.capacityClasses"}),
        ({"autoscaling": None}, {"autoscaling"}),
        ({"traffic": {"weight": -1}}, {"traffic.weight"}),
        ({"hotLoad": {"bucket": "w", "pathPrefix": "a/../b", "transitionMode": 0}},
         {"hotLoad.pathPrefix", "hotLoad.transitionMode"}),
    ],
)  # fmt: skip
def test_a_deployment_s_problems_are_all_named(plane: Plane, changes: dict[str, Any], wrong: set[str]) -> None:
    gateway = resources.create(plane.service, GATEWAYS, gateway_body())["gateway"]["spec"]["id"]
    error = refused(resources.create, plane.service, DEPLOYMENTS, deployment_body(gateway, **changes))
    assert error.code == "INVALID_ARGUMENT"
    assert fields(error) == wrong


def test_hot_loads_need_gateways_of_one_zone_that_exist_and_the_organization_s_leave(tmp_path: Path) -> None:
    plane = Plane(tmp_path, hot_load_enabled=False)
    one = resources.create(plane.service, GATEWAYS, gateway_body())["gateway"]["spec"]["id"]
    two = resources.create(plane.service, GATEWAYS, gateway_body(name="g2", zones=["US-WEST-04A"]))["gateway"]["spec"]
    error = refused(resources.create, plane.service, DEPLOYMENTS, deployment_body(one))
    assert error.message == "hot-load is not enabled for this organization"
    error = refused(resources.create, plane.service, DEPLOYMENTS, deployment_body(one, str(uuid.uuid4())))
    assert error.code == "FAILED_PRECONDITION"
    assert "does not exist" in error.message
    created = resources.create(plane.service, DEPLOYMENTS, deployment_body(one, two["id"], hotLoad=None))
    assert "hotLoad" not in created["deployment"]["spec"]
    plane.store.close()


def test_two_zones_are_too_many_for_hot_loads(plane: Plane) -> None:
    two = resources.create(plane.service, GATEWAYS, gateway_body(zones=["US-EAST-04A", "US-WEST-04A"]))
    error = refused(resources.create, plane.service, DEPLOYMENTS, deployment_body(two["gateway"]["spec"]["id"]))
    assert fields(error) == {"hotLoad"}


def test_updates_carry_the_whole_spec_and_what_is_fixed_stays(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    gateway_id = plane.store.resources("gateway")[0].id

    def update(**changes: Any) -> dict[str, Any]:
        body = deployment_body(gateway_id, **{"id": deployment_id, **changes})
        found: dict[str, Any] = resources.update(plane.service, DEPLOYMENTS, deployment_id, body)["deployment"]
        return found

    assert fields(refused(update, hotLoad=None)) == {"hotLoad"}
    assert fields(refused(update, hotLoad={"bucket": "w2", "transitionMode": 1})) == {"hotLoad"}
    assert fields(refused(update, name="other")) == {"name"}
    assert fields(refused(update, id=str(uuid.uuid4()))) == {"id"}
    changed = update(traffic={"weight": 7})
    assert changed["status"]["status"] == "STATUS_UPDATING"
    assert changed["spec"]["traffic"] == {"weight": 7}
    plane.settle()
    assert plane.store.resource("deployment", deployment_id).status == "READY"  # type: ignore[union-attr]
    assert refused(resources.delete, plane.service, GATEWAYS, gateway_id).code == "FAILED_PRECONDITION"


def test_a_disabled_deployment_has_no_replicas(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    gateway_id = plane.store.resources("gateway")[0].id
    body = deployment_body(gateway_id, id=deployment_id, disabled=True)

    async def disable() -> None:
        resources.update(plane.service, DEPLOYMENTS, deployment_id, body)
        plane.settle()
        await asyncio.sleep(0)

    asyncio.run(disable())
    assert plane.pool.replicas == {}
    plane.bucket.put("w", "runs/v0/", tiny_delta.full_snapshot(BASE))
    error = refused(plane.hot_load, deploymentId=deployment_id, identity="v0", type=1)
    assert "is disabled" in error.message


def test_a_claim_is_allocated_when_ready_and_only_its_count_changes(plane: Plane) -> None:
    wanted = {
        "instanceId": "gb200-4x",
        "instanceCount": 2,
        "capacityType": "CAPACITY_TYPE_MANAGED",
        "zones": ["US-EAST-04A"],
    }
    created = resources.create(plane.service, CLAIMS, {"name": "claim", "resources": wanted})["capacityClaim"]
    claim_id = created["spec"]["id"]
    assert created["status"]["pendingInstances"] == 2
    plane.settle()
    claim = resources.shown(plane.service, CLAIMS, resources.find(plane.service, CLAIMS, claim_id))
    assert claim["status"]["allocatedInstances"] == 2

    def update(**changes: Any) -> dict[str, Any]:
        body = {"id": claim_id, "resources": {**wanted, **changes}}
        found: dict[str, Any] = resources.update(plane.service, CLAIMS, claim_id, body)["capacityClaim"]
        return found

    assert update(instanceCount=5)["spec"]["resources"]["instanceCount"] == 5
    error = refused(update, capacityType=1, zones=["US-WEST-04A"], instanceId="x", instanceCount=0)
    assert fields(error) == {f"resources.{name}" for name in ("capacityType", "zones", "instanceId", "instanceCount")}


def test_lists_filter_by_time_and_by_gateway(plane: Plane) -> None:
    resources.create(plane.service, GATEWAYS, gateway_body())
    plane.now += 100
    late = resources.create(plane.service, GATEWAYS, gateway_body(name="late"))["gateway"]["spec"]["id"]
    after = {"updatedAfter": "1970-01-01T00:17:30Z"}
    assert [row["spec"]["id"] for row in resources.listed(plane.service, GATEWAYS, after)["items"]] == [late]
    assert fields(refused(resources.listed, plane.service, GATEWAYS, {"updatedAfter": "soon"})) == {"updatedAfter"}


def test_parameters_name_what_a_spec_may_say(plane: Plane) -> None:
    assert deployment_parameters(plane.service, [])["resourceParameters"] == {"instanceTypes": []}
    gateway_id = resources.create(plane.service, GATEWAYS, gateway_body())["gateway"]["spec"]["id"]
    found = deployment_parameters(plane.service, [gateway_id])
    assert found["gatewayIds"] == [gateway_id]
    runtime = found["runtimeParameters"]
    assert runtime["runtimeVersions"].keys() == {"dynamo-vllm", "vllm"}
    assert "logprobs-mode" in runtime["runtimeConfigOptions"]["dynamo-vllm"]["allowedKeys"]
    assert refused(deployment_parameters, plane.service, [str(uuid.uuid4())]).code == "NOT_FOUND"


# Hot-loads -----------------------------------------------------------------------------------------------------------


def test_a_hot_load_is_complete_when_every_replica_is_ready_on_its_identity(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v0/", tiny_delta.full_snapshot(BASE))
    mine = str(uuid.uuid4())
    created = plane.hot_load(deploymentId=deployment_id, hotLoadId=mine, identity="v0", type="SNAPSHOT_TYPE_FULL")
    assert created["status"]["state"] == "HOT_LOAD_STATE_PENDING"
    assert created["spec"]["snapshotChain"] == [{"identity": "v0", "type": "SNAPSHOT_TYPE_FULL", "hotLoadId": mine}]
    assert plane.pool.loads[-2:] == [("dep-00", mine, 1), ("dep-01", mine, 1)]

    def state() -> str:
        return plane.store.hot_load(mine).state  # type: ignore[union-attr]

    first, second = plane.pool.replicas.values()
    for replica, news, identity, expected in (
        (first, "UPDATING", "", "IN_PROGRESS"),
        (first, "READY", "v0", "IN_PROGRESS"),
        (second, "UPDATING", "", "IN_PROGRESS"),
        (second, "READY", "v0", "COMPLETED"),
    ):
        replica.state, replica.identity = news, identity
        plane.controller.replica_changed(replica)
        assert state() == expected
    assert {row.state for row in plane.store.replicas(mine)} == {"READY"}
    again = refused(plane.hot_load, deploymentId=deployment_id, hotLoadId=mine, identity="other", type=1)
    assert again.code == "ALREADY_EXISTS"


def test_a_hot_load_fails_with_the_replicas_reasons(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v0/", tiny_delta.full_snapshot(BASE))
    mine = plane.hot_load(deploymentId=deployment_id, identity="v0", type=1)["spec"]["id"]
    first, second = plane.pool.replicas.values()
    first.state, first.error = "ERROR", "tensor 'a' has Adler-32 0"
    plane.controller.replica_changed(first)
    assert plane.store.hot_load(mine).state == "IN_PROGRESS"  # type: ignore[union-attr]
    second.state, second.identity = "READY", "v0"
    plane.controller.replica_changed(second)
    row = plane.store.hot_load(mine)
    assert row is not None
    assert row.state == "FAILED"
    assert "dep-00: tensor 'a' has Adler-32 0" in row.conditions[0]["message"]


@pytest.mark.parametrize(
    ("body", "wrong"),
    [
        ({}, {"deploymentId", "identity", "type"}),
        ({"deploymentId": "x", "identity": "a/b", "type": 0}, {"deploymentId", "identity", "type"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "initial", "type": 1}, {"identity"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "..", "type": 9}, {"identity", "type"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "x" * 129, "type": 1, "hotLoadId": "y"},
         {"identity", "hotLoadId"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "v1", "type": 1, "incrementalSnapshotMetadata": METADATA},
         {"incrementalSnapshotMetadata"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "v1", "type": 2}, {"incrementalSnapshotMetadata"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "v1", "type": 2, "incrementalSnapshotMetadata": {}},
         {f"incrementalSnapshotMetadata.{name}" for name in METADATA}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "v0", "type": 2, "incrementalSnapshotMetadata": METADATA},
         {"incrementalSnapshotMetadata.previousSnapshotIdentity"}),
        ({"deploymentId": str(uuid.UUID(int=1)), "identity": "v0", "type": 1, "promptCachePolicy": "KEEP"},
         {"promptCachePolicy"}),
    ],
)  # fmt: skip
def test_a_request_s_problems_are_all_named(plane: Plane, body: dict[str, Any], wrong: set[str]) -> None:
    error = refused(plane.hot_load, **body)
    assert (error.code, fields(error)) == ("INVALID_ARGUMENT", wrong)


def test_a_hot_load_needs_its_deployment_with_hot_loads_and_ready(plane: Plane) -> None:
    missing = refused(plane.hot_load, deploymentId=str(uuid.uuid4()), identity="v0", type=1)
    assert missing.code == "NOT_FOUND"
    without = ready_deployment(plane, hotLoad=None)
    assert "created without hotLoad" in refused(plane.hot_load, deploymentId=without, identity="v0", type=1).message
    gateway_id = plane.store.resources("gateway")[0].id
    created = resources.create(plane.service, DEPLOYMENTS, deployment_body(gateway_id, name="dep2"))["deployment"]
    error = refused(plane.hot_load, deploymentId=created["spec"]["id"], identity="v0", type=1)
    assert "STATUS_CREATING" in error.message


def test_one_hot_load_at_a_time_and_no_update_meanwhile(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v0/", tiny_delta.full_snapshot(BASE))
    first = plane.hot_load(deploymentId=deployment_id, identity="v0", type=1)["spec"]["id"]
    error = refused(plane.hot_load, deploymentId=deployment_id, identity="v0", type=1)
    assert (error.code, error.status) == ("FAILED_PRECONDITION", 400)
    assert "already in progress" in error.message
    assert first in error.message
    body = deployment_body(plane.store.resources("gateway")[0].id, id=deployment_id)
    error = refused(resources.update, plane.service, DEPLOYMENTS, deployment_id, body)
    assert "already in progress" in error.message


def _completed(plane: Plane, deployment_id: str, *identities: str) -> None:
    """Put completed hot-loads of a full snapshot and deltas on it into the store."""
    chain: list[dict[str, Any]] = []
    for identity in identities:
        kind = "INCREMENTAL" if chain else "FULL"
        entry = {"identity": identity, "type": kind, "bucket": "w", "prefix": f"runs/{identity}/", "digest": "d"}
        hot_load_id = str(uuid.uuid4())
        chain = [*chain, {**entry, "hot_load_id": hot_load_id}]
        row = HotLoadRow(hot_load_id, deployment_id, identity, "PENDING", {"id": hot_load_id}, chain, 1.0, 1.0)
        plane.store.add_hot_load(with_state(row, "COMPLETED", now=2.0), [])


def _delta_request(deployment_id: str, identity: str, previous: str) -> dict[str, Any]:
    metadata = {**METADATA, "previousSnapshotIdentity": previous}
    return {"deploymentId": deployment_id, "identity": identity, "type": 2, "incrementalSnapshotMetadata": metadata}


def test_a_delta_s_predecessor_is_a_completed_hot_load_of_this_deployment(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v2/", tiny_delta.delta_snapshot(BASE, NEW, version="v2", base_version="v1"))
    for previous in ("v1", "initial"):
        error = refused(plane.hot_load, **_delta_request(deployment_id, "v2", previous))
        assert "is not a completed hot-load" in error.message
    _completed(plane, deployment_id, "v0", "v1")
    chain = plane.hot_load(**_delta_request(deployment_id, "v2", "v1"))["spec"]["snapshotChain"]
    assert [entry["identity"] for entry in chain] == ["v0", "v1", "v2"]
    assert chain[0].keys() == {"identity", "type", "hotLoadId"}
    assert chain[2]["compressionFormat"] == "COMPRESSION_FORMAT_ZSTD"


def test_a_chain_has_at_most_128_deltas(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    identities = [f"v{number}" for number in range(129)]
    _completed(plane, deployment_id, *identities)
    plane.bucket.put("w", "runs/n/", tiny_delta.delta_snapshot(BASE, NEW, version="n", base_version="v128"))
    error = refused(plane.hot_load, **_delta_request(deployment_id, "n", "v128"))
    assert (error.code, error.message.startswith("resolved snapshot chain is too long")) == (
        "FAILED_PRECONDITION",
        True,
    )
    plane.bucket.put("w", "runs/n/", tiny_delta.delta_snapshot(BASE, NEW, version="n", base_version="v127"))
    assert len(plane.hot_load(**_delta_request(deployment_id, "n", "v127"))["spec"]["snapshotChain"]) == 129


def _without(files: Mapping[str, bytes], name: str) -> dict[str, bytes]:
    return {key: raw for key, raw in files.items() if key != name}


FULL = tiny_delta.full_snapshot(BASE)
DELTA = tiny_delta.delta_snapshot(BASE, NEW, version="v1", base_version="v0")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "model.safetensors.index.json does not exist"),
        (_without(FULL, "config.json"), "config.json does not exist"),
        (_without(FULL, "model-00002-of-00002.safetensors"), "model-00002-of-00002.safetensors, which the index names"),
        ({**FULL, tiny_delta.INDEX: b"<html>"}, "is not JSON"),
        ({**FULL, tiny_delta.INDEX: b'{"weight_map": {"a": "../x.safetensors"}}'}, "is not in a .safetensors file"),
        ({**FULL, tiny_delta.INDEX: b'{"weight_map": {}}'}, "names no tensor"),
        (DELTA, "the metadata is a delta's"),
    ],
)
def test_a_full_snapshot_s_objects_are_checked_at_request_time(
    plane: Plane, files: dict[str, bytes], said: str
) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v1/", files)
    error = refused(plane.hot_load, deploymentId=deployment_id, identity="v1", type=1)
    assert error.code == "FAILED_PRECONDITION"
    assert said in error.message


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"version": "1"}, "version is '1', expected 'v1'"),
        ({"base_version": "000000"}, "base_version is '000000', expected 'v0'"),
        ({"metadata": {"delta_encoding": "overwrite"}}, "delta_encoding is 'overwrite'"),
        ({"metadata": {"compression_format": "lz4"}}, "compression_format is 'lz4'"),
        ({"metadata": {"checksum_format": "blake3"}}, "checksum_format is 'blake3'"),
        ({"names": []}, "names no tensor"),
    ],
)
def test_a_delta_s_metadata_is_checked_at_request_time(plane: Plane, options: dict[str, Any], said: str) -> None:
    deployment_id = ready_deployment(plane)
    _completed(plane, deployment_id, "v0")
    files = tiny_delta.delta_snapshot(BASE, NEW, **{"version": "v1", "base_version": "v0", **options})
    plane.bucket.put("w", "runs/v1/", files)
    error = refused(plane.hot_load, **_delta_request(deployment_id, "v1", "v0"))
    assert error.code == "FAILED_PRECONDITION"
    assert said in error.message


def test_a_bucket_that_the_service_may_not_read_is_said_so(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.closed.add("w")
    error = refused(plane.hot_load, deploymentId=deployment_id, identity="v1", type=1)
    assert "the service cannot read s3://w/runs/v1/" in error.message


def test_cancel_is_not_implemented(plane: Plane) -> None:
    assert refused(cancel_hot_load, plane.service, str(uuid.uuid4())).code == "NOT_FOUND"
    deployment_id = ready_deployment(plane)
    _completed(plane, deployment_id, "v0")
    row = plane.store.latest_hot_load(deployment_id)
    assert row is not None
    error = refused(cancel_hot_load, plane.service, row.id)
    assert (error.code, error.status, error.number) == ("UNIMPLEMENTED", 501, 12)


def test_pages_of_hot_loads(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    _completed(plane, deployment_id, "v0", "v1", "v2")
    mine = {"parentDeploymentId": deployment_id, "maxPageSize": "2"}
    first = list_hot_loads(plane.service, mine)
    assert len(first["hotLoads"]) == 2
    second = list_hot_loads(plane.service, {**mine, "pageToken": first["nextPageToken"]})
    assert len(second["hotLoads"]) == 1
    assert "nextPageToken" not in second
    unfiltered = {"pageToken": first["nextPageToken"]}
    assert fields(refused(list_hot_loads, plane.service, unfiltered)) == {"pageToken"}


# Replicas that come and go -------------------------------------------------------------------------------------------


def test_a_restarted_replica_returns_to_the_last_completed_identity_and_then_to_the_running_hot_load(
    plane: Plane,
) -> None:
    deployment_id = ready_deployment(plane)
    _completed(plane, deployment_id, "v0")
    plane.bucket.put("w", "runs/v1/", FULL)
    mine = plane.hot_load(deploymentId=deployment_id, identity="v1", type=1)["spec"]["id"]
    first = plane.pool.replicas["dep-00"]
    first.state = "UPDATING"
    plane.controller.replica_changed(first)
    # It dies (the pool says so by a replica without a connection), and its next process says hello.
    first.state, first.load_id, first.restored, first.writer = "STARTING", "", False, None
    plane.controller.replica_changed(first)
    assert [row.state for row in plane.store.replicas(mine)] == ["PENDING_UPDATE", "PENDING_UPDATE"]
    first.writer = cast("Any", object())
    plane.controller.restore(first)
    assert plane.pool.loads[-1] == ("dep-00", "restore", 1)
    first.state, first.identity = "READY", "v0"
    plane.controller.replica_changed(first)
    assert plane.pool.loads[-1] == ("dep-00", mine, 1)
    assert plane.store.replicas(mine)[0].identity == "v0"


def test_after_a_restart_no_replica_counts_as_ready_before_it_says_so_again(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v1/", FULL)
    mine = plane.hot_load(deploymentId=deployment_id, identity="v1", type=1)["spec"]["id"]
    first = plane.pool.replicas["dep-00"]
    first.state, first.identity = "READY", "v1"
    plane.controller.replica_changed(first)
    # The service starts again: the replicas are new processes.
    plane.pool.replicas.clear()
    plane.controller.start(cast("Pool", plane.pool), NoListeners())
    first, second = plane.pool.replicas.values()
    second.state, second.load_id = "READY", "restore"
    plane.controller.replica_changed(second)
    second.state, second.identity, second.load_id = "READY", "v1", mine
    plane.controller.replica_changed(second)
    assert plane.store.hot_load(mine).state == "IN_PROGRESS"  # type: ignore[union-attr]
    assert [(row.name, row.state) for row in plane.store.replicas(mine)] == [
        ("dep-00", "PENDING_UPDATE"),
        ("dep-01", "READY"),
    ]
    first.state, first.load_id = "READY", "restore"
    plane.controller.replica_changed(first)
    first.state, first.identity, first.load_id = "READY", "v1", mine
    plane.controller.replica_changed(first)
    assert plane.store.hot_load(mine).state == "COMPLETED"  # type: ignore[union-attr]


def test_a_replica_that_keeps_dying_over_a_hot_load_fails_it(plane: Plane) -> None:
    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v1/", FULL)
    mine = plane.hot_load(deploymentId=deployment_id, identity="v1", type=1)["spec"]["id"]
    first, second = plane.pool.replicas.values()
    for _ in range(3):
        first.state, first.load_id = "UPDATING", mine
        plane.controller.replica_changed(first)
        first.state, first.load_id, first.writer = "STARTING", "", None
        plane.controller.replica_changed(first)
        first.state, first.load_id, first.writer = "READY", "restore", cast("Any", object())
        plane.controller.replica_changed(first)
    second.state, second.identity = "READY", "v1"
    plane.controller.replica_changed(second)
    row = plane.store.hot_load(mine)
    assert row is not None
    assert row.state == "FAILED"
    assert "dep-00: the replica died 3 times while it loaded v1" in row.conditions[0]["message"]


def test_a_deleted_deployment_ends_its_hot_load(plane: Plane) -> None:
    from cwtrain_emulator.api.deployments import delete_deployment

    deployment_id = ready_deployment(plane)
    plane.bucket.put("w", "runs/v1/", FULL)
    mine = plane.hot_load(deploymentId=deployment_id, identity="v1", type=1)["spec"]["id"]
    delete_deployment(plane.service, deployment_id)
    row = plane.store.hot_load(mine)
    assert row is not None
    assert (row.state, row.conditions[0]["reason"]) == ("FAILED", "DeploymentDeleted")


def test_base_weights_that_cannot_be_loaded_are_an_error_that_a_hot_load_mends(plane: Plane) -> None:
    gateway_id = resources.create(plane.service, GATEWAYS, gateway_body())["gateway"]["spec"]["id"]
    created = resources.create(plane.service, DEPLOYMENTS, deployment_body(gateway_id))["deployment"]
    plane.settle()
    plane.report("ERROR", "", error="listing failed")
    plane.settle()

    def status() -> str:
        return plane.store.resource("deployment", created["spec"]["id"]).status  # type: ignore[union-attr]

    assert status() == "ERROR"
    plane.bucket.put("w", "runs/v1/", FULL)
    mine = plane.hot_load(deploymentId=created["spec"]["id"], identity="v1", type=1)["spec"]["id"]
    plane.report("READY", "v1", load_id=mine)
    plane.settle()
    assert status() == "READY"


def test_a_restore_that_failed_is_tried_again_a_while_later(plane: Plane) -> None:
    ready_deployment(plane)
    seen = []
    for _ in range(5):
        plane.report("ERROR", "", error="the bucket does not answer")
        plane.settle()
        seen.append(len(plane.pool.loads))
    # Two replicas are told at the start, and again every two seconds.
    assert seen == [4, 4, 6, 6, 8]


def test_names_of_replicas() -> None:
    deployment = Resource("deployment", "id", "Dep", {}, "READY", 1.0, 1.0)
    assert replica_names(deployment, 2) == ["Dep-00", "Dep-01"]
    assert ReplicaRow("h", "Dep-00", "z", "READY", "v", 1.0, 1.0).error == ""
