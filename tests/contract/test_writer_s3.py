"""The streaming writer against a real S3 server: four processes together, refusals, and a kill in the middle."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

from cwtrain.errors import StorageAccessError
from cwtrain.hotload import IdentityStanding, MemoryBase, free_identity, identity_standing
from cwtrain.hotload.verify import verify_snapshot
from cwtrain.storage import Location, S3Store
from helpers.s3_servers import BUCKET, READER, S3Server
from helpers.streamed import INDEX, make_state, names_in, next_state, raw, side_files, tensors_in, write
from helpers.write_rank import SIZES, Job, states

_RANK = str(Path(__file__).resolve().parents[1] / "helpers" / "write_rank.py")


@pytest.fixture
def bucket(seaweedfs_server: S3Server) -> Iterator[S3Store]:
    client = seaweedfs_server.client()
    yield S3Store(client, BUCKET)
    client.close()


@pytest.fixture
def job(seaweedfs_server: S3Server, tmp_path: Path) -> Job:
    side_files(tmp_path / "sides")
    return Job(endpoint=seaweedfs_server.endpoint, prefix=f"writer/{uuid.uuid4().hex[:8]}", directory=str(tmp_path))


def start(job: Job) -> subprocess.Popen[str]:
    environ = {**os.environ, "TMPDIR": job.directory}
    command = [sys.executable, _RANK, json.dumps(attrs.asdict(job))]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environ)


def run(jobs: list[Job]) -> list[tuple[int, str]]:
    children = [start(one) for one in jobs]
    try:
        return [(child.wait(timeout=120), child.stderr.read() if child.stderr else "") for child in children]
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stderr:
                child.stderr.close()


def test_four_processes_publish_one_snapshot(bucket: S3Store, job: Job, tmp_path: Path) -> None:
    """Equal, tensor by tensor, to what one process writes; each rank's shards carry its number."""
    done = run([attrs.evolve(job, rank=rank, ranks=4, versions=2) for rank in range(4)])
    assert done == [(0, "")] * 4
    place, (first, second) = Location(BUCKET, job.prefix), states(2)
    base = MemoryBase()
    write(bucket, place, "one0", first, kind="full", base=base, side_files=tmp_path / "sides", sizes=SIZES)
    write(bucket, place, "one1", second, kind="delta", base=base, sizes=SIZES)
    assert tensors_in(bucket, place, "v0") == tensors_in(bucket, place, "one0")
    together, alone = (tensors_in(bucket, place, identity, first) for identity in ("v1", "one1"))
    assert together == alone == {name: raw(tensor) for name, tensor in second.items()}
    indexes = [json.loads(bucket.get(place.key(identity, INDEX))) for identity in ("v1", "one1")]
    assert indexes[0]["weight_map"].keys() == indexes[1]["weight_map"].keys()
    ranks = {name.split("-")[1] for name in names_in(bucket, place, "v0") if name.endswith(".safetensors")}
    assert ranks == {"r00000", "r00001", "r00002", "r00003"}
    for identity in ("v0", "v1"):
        assert verify_snapshot(bucket, place, identity).problems == ()


def test_the_requests_of_the_second_delta(bucket: S3Store, job: Job, tmp_path: Path) -> None:
    """What a real server was found to do in the first publish is not asked again: five requests for one shard."""
    place, base = Location(BUCKET, job.prefix), MemoryBase()
    state = make_state(1)
    write(bucket, place, "v0", state, kind="full", base=base, side_files=tmp_path / "sides")
    made: list[str] = []
    bucket._client.meta.events.register("before-call.s3", lambda model, **_: made.append(model.name))
    state = next_state(state, 2)
    write(bucket, place, "v1", state, kind="delta", base=base)
    assert made == ["ListObjectsV2", "PutObject", "PutObject", "PutObject", "PutObject"]
    assert verify_snapshot(bucket, place, "v1").problems == ()


def test_one_rank_that_fails_fails_all_four(bucket: S3Store, job: Job) -> None:
    """Each rank ends with the reason of the one that failed, and nothing looks published."""
    jobs = [attrs.evolve(job, rank=rank, ranks=4, fails_at=0 if rank == 2 else None) for rank in range(4)]
    for code, said in run(jobs):
        assert code == 1
        assert "v0 is not published: rank 2 failed: SnapshotError: tensor" in said
    place = Location(BUCKET, job.prefix)
    assert INDEX not in names_in(bucket, place, "v0")
    assert identity_standing(bucket, place, "v0") is IdentityStanding.ABANDONED
    assert list(bucket.list_uploads(place.root)) == []


@pytest.mark.parametrize(("operation", "at"), [("UploadPart", 2), ("PutObject", 3), ("CompleteMultipartUpload", 1)])
def test_a_kill_in_the_middle_of_the_stream(
    bucket: S3Store, job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, at: int
) -> None:
    """The identity is abandoned, its open uploads are aborted, and the version goes out under ``-r2``."""
    ((code, _),) = run([attrs.evolve(job, dies_at=(operation, at))])
    assert code == -signal.SIGKILL
    place = Location(BUCKET, job.prefix)
    assert INDEX not in names_in(bucket, place, "v0")
    assert identity_standing(bucket, place, "v0") is IdentityStanding.ABANDONED
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # where the dead process noted what it had open
    assert free_identity(bucket, place, "v0", run_id="run") == "v0-r2"
    assert list(bucket.list_uploads(place.root)) == []
    ((code, said),) = run([attrs.evolve(job, identity="v0-r2-")])
    assert (code, said) == (0, "")
    assert verify_snapshot(bucket, place, "v0-r2-0").problems == ()


def test_credentials_that_may_not_write(seaweedfs_server: S3Server, job: Job, tmp_path: Path) -> None:
    client = seaweedfs_server.client(READER)
    with pytest.raises(StorageAccessError, match="s3:PutObject"):
        write(
            S3Store(client, BUCKET),
            Location(BUCKET, job.prefix),
            "v0",
            make_state(1),
            kind="full",
            side_files=tmp_path / "sides",
        )
    client.close()
