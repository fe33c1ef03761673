"""A user's program, never run: strict mypy over it says whether users get the types that the documentation shows."""

from __future__ import annotations

from typing import Any, assert_type

import cwtrain
from cwtrain import HotLoader, InferenceClient, SnapshotWriter, inspect_snapshot, upload_snapshot
from cwtrain.errors import CWTrainError, HotLoadInProgressError, SnapshotConflictError
from cwtrain.hotload import (
    BaseTensors,
    HotLoadFailedError,
    HotLoadTimeoutError,
    MemoryBase,
    ProgressEvent,
    ShardReceipt,
    WrittenSnapshot,
)
from cwtrain.hotload.delta import DeltaStats, checkpoint_checksums, write_delta, write_full_snapshot
from cwtrain.infra import (
    Deployment,
    Gateway,
    HotLoad,
    HotLoadReplica,
    HotLoadState,
    ReplicaState,
    SnapshotType,
    lifecycle,
    s3_client,
    token_from_env,
)
from cwtrain.models.snapshot import LocalSnapshot, PublishPlan


def show(event: ProgressEvent) -> None:
    """Print one line of progress."""
    assert_type(event.summary(), str)
    assert_type(event.hot_load, HotLoad | None)
    assert_type(event.elapsed, float)


def publish(path: str) -> str:
    """Publish a checkpoint and return the state's name."""
    with InferenceClient() as client:
        loader = HotLoader(client, deployment_id="<uuid>")
        try:
            hot_load = loader.publish(path, identity="step_000100", on_progress=show)
        except HotLoadInProgressError as error:
            assert_type(error.hot_load_id, str | None)
            raise
        except (HotLoadFailedError, HotLoadTimeoutError, SnapshotConflictError) as error:
            assert_type(error.hint, str | None)
            raise
        except CWTrainError as error:
            assert_type(error.message, str)
            raise
        assert_type(hot_load, HotLoad)
        assert_type(hot_load.state, HotLoadState)
        assert_type(loader.publish(path, "step_000100", dry_run=True), PublishPlan)
        assert_type(loader.wait(hot_load.id, timeout=60.0), HotLoad)
        assert_type(loader.rollback("step_000001"), HotLoad)
        return hot_load.state.name


def manage(client: InferenceClient, spec: dict[str, Any]) -> None:
    """Use the calls of the service."""
    deployment = client.create_deployment(spec)
    assert_type(deployment, Deployment)
    assert_type(client.list_deployments(), list[Deployment])
    assert_type(client.create_gateway(spec), Gateway)
    for hot_load in client.list_hot_loads(deployment.id):
        assert_type(hot_load, HotLoad)
        replicas = client.list_hot_load_replicas(hot_load.id)
        assert_type(replicas, list[HotLoadReplica])
        assert_type(replicas[0].state, ReplicaState)
    created = client.create_hot_load(deployment.id, "step_000001", snapshot_type=SnapshotType.FULL)
    assert_type(created, HotLoad)
    assert_type(lifecycle.wait_for_deployment(client, deployment.id), Deployment)
    for endpoint in lifecycle.endpoints(client, deployment):
        assert_type(lifecycle.rollout_base_url(endpoint), str)


def stream(loader: HotLoader, tensors: dict[str, bytes]) -> None:
    """Publish from memory."""
    base: BaseTensors = MemoryBase()
    with SnapshotWriter(loader.store, loader.location, "step_000002", kind="full", base=base, side_files=".") as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor, dtype="BF16", shape=[len(tensor) // 2])
        receipt = writer.close()
        assert_type(receipt, ShardReceipt)
        written = writer.finalise([receipt])
    assert_type(written, WrittenSnapshot)
    assert_type(written.empty, bool)
    assert_type(base.identity, str | None)


def look(path: str) -> None:
    """Use what works without the service."""
    snapshot = inspect_snapshot(path)
    assert_type(snapshot, LocalSnapshot)
    assert_type(snapshot.total_bytes, int)
    checksums = checkpoint_checksums(path)
    assert_type(checksums["model.embed_tokens.weight"], str)
    assert_type(token_from_env(), str)
    assert_type(cwtrain.__version__, str)
    print(upload_snapshot, write_delta, write_full_snapshot, DeltaStats, s3_client("https://object-store.example"))
