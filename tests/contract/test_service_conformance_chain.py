"""How long a chain of deltas may be.

A hundred hot-loads take too long to run, so the emulator is started on a state that already remembers them; the deltas
that a replica replays are real, and what is judged are answers and replicas alone.
"""

from __future__ import annotations

import shutil
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from cwtrain_emulator.emulator import Emulator
from cwtrain_emulator.pytest_plugin import Bucket
from cwtrain_emulator.store import HotLoadRow, Store
from helpers import tiny_delta
from helpers.conformance import bucket_of, put_snapshot, refused
from helpers.emulator_api import Api, hot_load_body
from helpers.tiny_delta import Files


class History(NamedTuple):
    """An emulator with three deployments, by the number of deltas that the last hot-load of each has in its chain."""

    api: Api
    deployments: dict[int, dict[str, Any]]


def put_deltas(store: Bucket, deployment: dict[str, Any], base: Files, numbers: range) -> None:
    """Write deltas v1 after v0, v2 after v1 and so on, those of `numbers`."""
    tensors = tiny_delta.read_tensors(base)
    for number in range(1, numbers.stop):
        newer = tiny_delta.nudged(tensors, seed=number, names=["lm_head.bias"])
        if number in numbers:
            here, before = f"v{number}", f"v{number - 1}"
            put_snapshot(
                store, deployment, here, tiny_delta.delta_snapshot(tensors, newer, version=here, base_version=before)
            )
        tensors = newer


def completed_row(deployment: dict[str, Any], deltas: int) -> HotLoadRow:
    """The row of a COMPLETED hot-load of v<deltas>, whose chain begins with v0."""
    hot_load = deployment["spec"]["hotLoad"]
    chain = [
        {
            "identity": f"v{number}",
            "type": "INCREMENTAL" if number else "FULL",
            "bucket": hot_load["bucket"],
            "prefix": f"{hot_load['pathPrefix']}/v{number}/",
            "hot_load_id": str(uuid.UUID(int=number)),
            "digest": f"digest-{number}",
        }
        for number in range(deltas + 1)
    ]
    made = str(uuid.uuid4())
    body = hot_load_body(deployment["spec"]["id"], f"v{deltas}", f"v{deltas - 1}")
    return HotLoadRow(
        id=made,
        deployment_id=body["deploymentId"],
        identity=body["identity"],
        state="COMPLETED",
        spec={**body, "id": made},
        chain=chain,
        created_at=1e9,
        updated_at=1e9,
        finished_at=1e9,
    )


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory, tiny_model: Files) -> Iterator[History]:
    directory = tmp_path_factory.mktemp("long-chains")
    emulator = Emulator(directory, replicas=1)
    with emulator:
        api, store = Api(emulator.base_url, emulator.admin_token), bucket_of(emulator)
        gateway = api.gateway()["spec"]["id"]
        deployments = {deltas: api.deployment(gateway, store.name) for deltas in (63, 127, 128)}
        put_snapshot(store, deployments[63], "v0", tiny_model)
        put_deltas(store, deployments[63], tiny_model, range(1, 65))
        put_deltas(store, deployments[127], tiny_model, range(128, 129))
        put_deltas(store, deployments[128], tiny_model, range(129, 130))
    # The replicas begin anew, as on a new machine.
    shutil.rmtree(directory / "replicas")
    rows = Store(directory / "state.sqlite3")
    for deltas, deployment in deployments.items():
        rows.add_hot_load(completed_row(deployment, deltas), [])
    rows.close()
    with emulator:
        yield History(api, deployments)
        api.close()


def until_replica(api: Api, deployment: dict[str, Any], state: str) -> dict[str, Any]:
    """Poll until the deployment's replica is in a state."""
    deadline = time.monotonic() + 60
    while True:
        (entry,) = [row for row in api.own("/state")["deployments"] if row["id"] == deployment["spec"]["id"]]
        for replica in entry["replicas"]:
            if replica["state"] == state:
                found: dict[str, Any] = replica
                return found
        assert time.monotonic() < deadline, entry
        time.sleep(0.02)


def test_a_replica_without_a_disk_replays_63_deltas(history: History) -> None:
    """A replica that starts with no peer replays 63 deltas from the bucket; the 64th then goes onto what it has."""
    deployment = history.deployments[63]
    assert until_replica(history.api, deployment, "READY")["identity"] == "v63"
    done = history.api.completed(deployment["spec"]["id"], "v64", "v63")
    assert len(done["spec"]["snapshotChain"]) == 65


def test_a_replica_without_a_disk_replays_no_more(history: History) -> None:
    """A longer chain is beyond such a replica, which says so; the deployment is there, and a full one would mend it."""
    deployment = history.deployments[128]
    replica = until_replica(history.api, deployment, "ERROR")
    assert "128 deltas" in replica["error"]
    assert "63" in replica["error"]
    path = f"/deployments/{deployment['spec']['id']}"
    assert history.api.ok("GET", path)["deployment"]["status"]["status"] == "STATUS_READY"


def test_a_chain_takes_128_deltas(history: History) -> None:
    """128 deltas after a full one are accepted (this replica, whose disk was lost, then fails to replay them)."""
    deployment = history.deployments[127]
    until_replica(history.api, deployment, "ERROR")
    ended = history.api.ended(history.api.hot_load(deployment["spec"]["id"], "v128", "v127"))
    chain = ended["spec"]["snapshotChain"]
    assert [entry["identity"] for entry in chain] == [f"v{number}" for number in range(129)]
    assert [entry["type"] for entry in chain] == ["SNAPSHOT_TYPE_FULL", *["SNAPSHOT_TYPE_INCREMENTAL"] * 128]
    assert ended["status"]["state"] == "HOT_LOAD_STATE_FAILED"


def test_a_chain_takes_no_more(history: History) -> None:
    """One more is refused: `resolved snapshot chain is too long`."""
    deployment_id = history.deployments[128]["spec"]["id"]
    answer = refused(history.api, "POST", "/hotLoads", hot_load_body(deployment_id, "v129", "v128"))
    assert answer.code == "FAILED_PRECONDITION"
    assert "resolved snapshot chain is too long" in answer.message


def test_a_full_one_begins_a_new_chain(history: History, tiny_model: Files) -> None:
    """After a full one the chain is one long; a delta on an earlier identity has that one's chain, not the last's."""
    api, deployment = history.api, history.deployments[63]
    deployment_id = deployment["spec"]["id"]
    assert len(api.completed(deployment_id, "v0")["spec"]["snapshotChain"]) == 1
    assert len(api.completed(deployment_id, "v1", "v0")["spec"]["snapshotChain"]) == 2
    assert len(api.completed(deployment_id, "v2", "v1")["spec"]["snapshotChain"]) == 3
