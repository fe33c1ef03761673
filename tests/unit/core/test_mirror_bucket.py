"""A mirror made from the bucket's chain: every byte compared with its manifest, every gap told."""

import json

import attrs
import pytest

from cwtrain.errors import ChecksumError, SnapshotChainError, SnapshotError, StorageAccessError
from cwtrain.hotload import WeightMirror, inspect_snapshot
from cwtrain.hotload.upload import upload_with_manifest
from cwtrain.storage import Fault, Location, MemoryStore
from helpers import snapshot_files as sf
from helpers.mirror_cases import write_chain

LOCATION = Location("memory", "rl")


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    directory = tmp_path_factory.mktemp("chain")
    models = write_chain(directory, 6, 3, large=5000)
    store = MemoryStore()
    previous = None
    for name in ("base", "d1", "d2", "d3"):
        snapshot = inspect_snapshot(directory / name, previous_identity=previous)
        upload_with_manifest(snapshot, store=store, location=LOCATION, identity=f"run-{name}")
        previous = f"run-{name}"
    return models, store.objects


@pytest.fixture
def store(published):
    store = MemoryStore()
    store.objects = dict(published[1])
    return store


def change(store, key, edit):
    store.objects[key] = attrs.evolve(store.objects[key], body=edit(store.objects[key].body))


@pytest.mark.parametrize(("identity", "version", "holds"), [("run-base", "run-base", 0), ("run-d3", "000003", 3)])
def test_it_is_what_was_published(tmp_path, published, store, identity, version, holds):
    with WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity=identity) as mirror:
        assert mirror.version == version
        assert sf.read_checkpoint(mirror.path) == published[0][holds]
        assert inspect_snapshot(mirror.path, verify="full").checksums == mirror.checksums
    assert [path.name for path in tmp_path.iterdir()] == ["m"]
    with WeightMirror.from_bucket(
        tmp_path / "m", store=store, location=LOCATION, identity="run-d1", version="17"
    ) as mirror:
        assert mirror.version == "17"
        assert sf.read_checkpoint(mirror.path) == published[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_b29_gaps_loops_and_damage_are_told(tmp_path, store):
    """B29: a chain that is not whole is never replayed from its middle."""

    def fetch(identity="run-d3"):
        WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity=identity).close()

    whole = dict(store.objects)
    del store.objects["rl/_manifests/run-d2.json"]
    with pytest.raises(SnapshotChainError, match=r"run-d2, which run-d3 stands on, has no manifest"):
        fetch()
    store.objects = dict(whole)
    del store.objects["rl/run-d2/model.safetensors.index.json"]
    with pytest.raises(SnapshotChainError, match=r"run-d2 is not whole: model\.safetensors\.index\.json"):
        fetch()
    store.objects = dict(whole)
    shard = "rl/run-d1/model-00000-of-00001.safetensors"
    change(store, shard, lambda body: body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(ChecksumError, match=shard):
        fetch()
    store.objects = dict(whole)
    change(store, shard, lambda body: body + b"\0" * 100)
    with pytest.raises(ChecksumError, match=shard):
        fetch()
    store.objects = dict(whole)

    def circle(body):
        return json.dumps({**json.loads(body), "previous_identity": "run-d3"}).encode()

    change(store, "rl/_manifests/run-d1.json", circle)
    with pytest.raises(SnapshotChainError, match="circle at run-d3"):
        fetch()
    store.objects = dict(whole)

    def outside(body):
        manifest = json.loads(body)
        manifest["objects"]["../../x.json"] = manifest["objects"]["config.json"]
        return json.dumps(manifest).encode()

    change(store, "rl/_manifests/run-base.json", outside)
    store.objects["rl/run-base/../../x.json"] = store.objects["rl/run-base/config.json"]
    with pytest.raises(SnapshotError, match=r"names an object '\.\./\.\./x\.json'"):
        fetch()
    with pytest.raises(SnapshotChainError, match="run-d9 cannot be fetched: it has no manifest"):
        fetch("run-d9")
    assert list(tmp_path.iterdir()) == []


def test_b19_credentials_that_run_out_leave_the_mirror_as_it_was(tmp_path, published):
    """B19: whatever the store raises comes through, the old mirror stays, and the same call works once they are new."""
    expired = StorageAccessError("the credentials have expired (ExpiredToken)", code="ExpiredToken", status=403)
    store = MemoryStore(faults=[Fault(call="stream", key="run-d2/model", error=expired)])
    store.objects = dict(published[1])
    WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity="run-d1").close()
    with pytest.raises(StorageAccessError, match="ExpiredToken"):
        WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity="run-d3")
    with WeightMirror(tmp_path / "m") as mirror:
        assert mirror.version == "000001"
    with WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity="run-d3") as mirror:
        assert sf.read_checkpoint(mirror.path) == published[0][3]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_mirror_gives_way_only_to_a_whole_one(tmp_path, published, store):
    WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity="run-d1").close()
    for spoiled in ("run-base/model-00001-of-00003.safetensors", "run-d3/model-00000-of-00001.safetensors"):
        store.objects = dict(published[1])
        change(store, f"rl/{spoiled}", lambda body: body[:-1])
        with pytest.raises(ChecksumError):
            WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity="run-d3")
    with WeightMirror(tmp_path / "m") as mirror:
        assert mirror.version == "000001"
        assert sf.read_checkpoint(mirror.path) == published[0][1]
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_the_mirror_itself_is_what_cuts_a_chain(tmp_path, published, store):
    with WeightMirror.from_bucket(tmp_path / "m", store=store, location=LOCATION, identity="run-d2") as mirror:
        snapshot = inspect_snapshot(mirror.snapshot_path)
        report = upload_with_manifest(snapshot, store=store, location=LOCATION, identity="run-d2-full")
        assert {name for name in report.uploaded if "/" in name or name.startswith(".")} == set()
        sums = mirror.checksums
    with WeightMirror.from_bucket(
        tmp_path / "n", store=store, location=LOCATION, identity="run-d2-full", version="000002"
    ) as copy:
        assert copy.checksums == sums
        assert sf.read_checkpoint(copy.path) == published[0][2]
