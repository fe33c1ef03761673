"""The immutable upload on a store in memory: claim, compare, resume, lost answers, refusals, kills, progress."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import (
    ConfigError,
    ConnectionFailedError,
    SnapshotChangedError,
    SnapshotConflictError,
    SnapshotError,
    StorageAccessError,
    StorageConflictError,
    StorageError,
    StorageNotFoundError,
)
from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.storage import Fault, Location, MemoryStore, ObjectDigest, UploadProgress, plan_upload, upload_objects
from cwtrain.storage.memory import Conditions
from cwtrain.storage.upload import PartSizes
from helpers.upload_files import contents, describe, noise, sha256, write

HERE = Location("memory", "rl/run")
SIZES = PartSizes(multipart_above_bytes=20_000, part_bytes=8_000)


@pytest.fixture(autouse=True)
def _own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open is noted in a temporary directory: each test has one of its own."""
    import tempfile

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def upload(files: list[SnapshotFile], store: MemoryStore, **more: Any) -> Any:
    more.setdefault("sizes", SIZES)
    return upload_objects(files, store=store, location=HERE, identity=more.pop("identity", "v1"), **more)


def put(store: MemoryStore, name: str, data: bytes, metadata: dict[str, str] | None = None) -> None:
    store.put(HERE.key("v1", name), data, metadata={"cwtrain-sha256": sha256(data)} if metadata is None else metadata)


def big(seed: int = 0) -> dict[str, bytes]:
    """Two small objects, two in four parts, the index."""
    objects = contents(2, 30_000, seed)
    return {"config.json": b"{}", "tokenizer.json": noise(seed + 50, 900)} | objects


def sent(store: MemoryStore) -> list[str]:
    return [key for call, key in store.calls if call in ("put", "upload_part") and "/_claims/" not in key]


def stored(store: MemoryStore) -> dict[str, bytes]:
    prefix = HERE.prefix("v1")
    return {key.removeprefix(prefix): one.body for key, one in store.objects.items() if key.startswith(prefix)}


# ---- the straight way


def test_everything_arrives_and_the_index_is_last(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    report = upload(write(tmp_path / "c", objects), store)
    assert stored(store) == objects
    assert report.uri == "s3://memory/rl/run/v1"
    assert report.uploaded == tuple(objects)
    assert report.digests == {name: ObjectDigest(len(data), sha256(data)) for name, data in objects.items()}
    assert all(
        one.metadata == {"cwtrain-sha256": sha256(one.body)}
        for key, one in store.objects.items()
        if "/_claims/" not in key
    )
    assert sent(store)[-1] == HERE.key("v1", INDEX_NAME)
    writes = [(call, key) for call, key in store.calls if call in ("put", "create_upload", "upload_part")]
    assert writes[0] == writes[1] == ("put", HERE.claim_key("v1")), "the claim and its probe come before anything else"
    assert store.uploads == {}


def test_a_head_and_ranges_make_an_object(tmp_path: Path) -> None:
    data = noise(3, 50_000)
    (tmp_path / "shard").write_bytes(data)
    plain = describe(tmp_path / "shard")
    head = noise(4, 1234)
    ranges = ((40_000, 9_000), (0, 25_000), (30_000, 0), (30_000, 1))
    size = len(head) + 34_001
    shard = SnapshotFile(
        name="model-00001-of-00001.safetensors",
        size_bytes=size,
        path=plain.path,
        head=head,
        ranges=ranges,
        file_bytes=plain.file_bytes,
        mtime_ns=plain.mtime_ns,
        inode=plain.inode,
        device=plain.device,
    )
    index = SnapshotFile(name=INDEX_NAME, size_bytes=2, head=b"{}")
    store = MemoryStore()
    upload([shard, index], store)
    wanted = head + data[40_000:49_000] + data[:25_000] + data[30_000:30_001]
    assert stored(store) == {shard.name: wanted, INDEX_NAME: b"{}"}


def test_ranges_that_do_not_add_up(tmp_path: Path) -> None:
    with pytest.raises(SnapshotError, match="head and ranges make 3 bytes, not 4"):
        upload([SnapshotFile(name=INDEX_NAME, size_bytes=4, head=b"{ }")], MemoryStore())


def test_two_objects_of_one_name(tmp_path: Path) -> None:
    one = write(tmp_path / "c", {"config.json": b"{}"})
    with pytest.raises(SnapshotError, match=r"config\.json"):
        upload(one + one, MemoryStore())


def test_empty_files_go_up(tmp_path: Path) -> None:
    objects = {"merges.txt": b"", INDEX_NAME: b""}
    store = MemoryStore()
    upload(write(tmp_path / "c", objects), store)
    assert stored(store) == objects


def test_before_index_sees_every_digest(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    seen: list[dict[str, ObjectDigest]] = []

    def before(digests: Any) -> None:
        assert set(stored(store)) == set(objects) - {INDEX_NAME}
        seen.append(dict(digests))

    files = write(tmp_path / "c", objects)
    upload(files, store, before_index=before)
    assert list(seen[0]) == list(objects)
    assert seen[0][INDEX_NAME].sha256 == sha256(objects[INDEX_NAME])
    upload(files, store, before_index=lambda digests: seen.append(dict(digests)))
    assert seen[1] == seen[0], "also when everything is there"


def test_an_error_before_the_index_leaves_none(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no manifest")

    store = MemoryStore()
    with pytest.raises(RuntimeError, match="no manifest"):
        upload(write(tmp_path / "c", big()), store, before_index=fail)
    assert INDEX_NAME not in stored(store)


@pytest.mark.parametrize("workers", [1, 2, 3, 16])
def test_threads_stay_within_the_workers(tmp_path: Path, workers: int) -> None:
    """B40: all requests and all hashing of an upload happen in at most ``workers`` threads."""
    names: set[str] = set()
    lock = threading.Lock()
    at_once = 0
    most = 0

    class Watched(MemoryStore):
        def upload_part(self, key: str, upload_id: str, number: int, body: Any) -> str:
            nonlocal at_once, most
            with lock:
                names.add(threading.current_thread().name)
                at_once += 1
                most = max(most, at_once)
            try:
                return super().upload_part(key, upload_id, number, body)
            finally:
                with lock:
                    at_once -= 1

    objects = contents(6, 40_000)
    store = Watched()
    upload(write(tmp_path / "c", objects), store, workers=workers)
    assert stored(store) == objects
    assert most <= workers
    assert len(names) <= workers


def test_more_workers_than_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B40: never more requests at once than the client has connections."""
    store = MemoryStore(max_connections=2)
    upload(write(tmp_path / "c", big()), store, workers=50)
    assert "max_pool_connections=50" in caplog.text


def test_parts_stay_below_ten_thousand() -> None:
    sizes = PartSizes()
    mib = 1 << 20
    assert sizes.of(128 * mib) == 128 * mib
    assert sizes.of(128 * mib + 1) == 64 * mib
    assert sizes.of(10_000 * 64 * mib) == 64 * mib
    huge = 10_000 * 64 * mib + 1
    assert sizes.of(huge) == 65 * mib
    assert -(-huge // sizes.of(huge)) <= 10_000


@pytest.mark.parametrize(("argument", "value"), [("workers", 0), ("max_bytes_per_second", 0)])
def test_arguments_that_make_no_sense(argument: str, value: int) -> None:
    with pytest.raises(ConfigError, match=argument):
        upload([], MemoryStore(), **{argument: value})


# ---- progress and bandwidth


def test_progress_is_in_bytes_and_in_the_caller_s_thread(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    seen: list[UploadProgress] = []

    def note(progress: UploadProgress) -> None:
        assert threading.current_thread() is threading.main_thread()
        seen.append(progress)

    put(store, "config.json", objects["config.json"])
    upload(write(tmp_path / "c", objects), store, on_progress=note)
    last = seen[-1]
    assert last.sent_bytes == last.total_bytes == sum(map(len, objects.values())) - 2
    assert (last.objects_done, last.objects) == (5, 5)
    assert last.remaining_seconds == 0.0


def test_an_error_in_on_progress_stops_the_upload(tmp_path: Path) -> None:
    def fail(_: object) -> None:
        raise KeyError("drawing failed")

    store = MemoryStore()
    with pytest.raises(KeyError):
        upload(write(tmp_path / "c", big()), store, on_progress=fail)
    assert store.uploads == {}
    assert INDEX_NAME not in stored(store)


# ---- what is there already


def test_a_matching_partial_upload_is_completed(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    names = list(objects)
    for name in names[1:3]:
        put(store, name, objects[name])
    store.put(HERE.prefix("v1"), b"")
    store.calls.clear()
    report = upload(write(tmp_path / "c", objects), store)
    assert report.reused == tuple(names[1:3])
    assert report.uploaded == (names[0], *names[3:])
    assert report.reused_bytes == sum(len(objects[name]) for name in names[1:3])
    assert not {HERE.key("v1", name) for name in names[1:3]} & set(sent(store))


def test_a_complete_snapshot_is_not_written_to(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    upload(write(tmp_path / "c", objects), store)
    store.calls.clear()
    report = upload(write(tmp_path / "elsewhere", objects), store, run_id="another run")
    assert report.uploaded == ()
    assert {call for call, _ in store.calls} == {"list_objects", "head"}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ("same length", "other bytes of the same length"),
        ("other length", "5001 bytes there and 5000 here"),
        ("no metadata", "cannot be verified"),
        ("foreign metadata", "cannot be verified"),
        ("wrong metadata", "other bytes"),
        ("extra object", "no part of this snapshot"),
        ("extra below", "no part of this snapshot"),
        ("filled marker", "no part of this snapshot"),
    ],
)
def test_anything_else_is_a_conflict(tmp_path: Path, change: str, why: str) -> None:
    """B59: the same object is one with our SHA-256; neither size nor ETag says so, and silence is a conflict."""
    objects, store = contents(2, 5000), MemoryStore()
    name = "model-00001-of-00002.safetensors"
    data = objects[name]
    if change == "same length":
        put(store, name, noise(99, 5000))
    elif change == "other length":
        put(store, name, data + b"x")
    elif change == "no metadata":
        put(store, name, data, {})
    elif change == "foreign metadata":
        put(store, name, data, {"mtime": "1", "sha256": sha256(data)})
    elif change == "wrong metadata":
        put(store, name, data, {"cwtrain-sha256": sha256(b"")})
    elif change == "filled marker":
        store.put(HERE.prefix("v1"), b"x")
        name = "the object that is the prefix itself"
    else:
        name = "other.bin" if change == "extra object" else "sub/x"
        put(store, name, b"x")
    before = dict(store.objects)
    files = write(tmp_path / "c", objects)
    plan = plan_upload(files, store=store, location=HERE, identity="v1")
    assert plan.conflicts == (name,)
    with pytest.raises(SnapshotConflictError, match=why) as refused:
        upload(files, store)
    assert refused.value.objects == (name,)
    assert "another identity" in (refused.value.hint or "")
    assert store.objects == before, "nothing was written"


def test_metadata_names_in_any_case(tmp_path: Path) -> None:
    """B59: a gateway may change the case of metadata names and of hex digits."""
    objects, store = contents(1), MemoryStore()
    for name, data in objects.items():
        put(store, name, data, {"Cwtrain-Sha256": sha256(data).upper()})
    assert upload(write(tmp_path / "c", objects), store).uploaded == ()


@pytest.mark.parametrize("where", ["argument", "bucket"])
def test_the_manifest_vouches_for_objects_without_metadata(tmp_path: Path, where: str) -> None:
    objects, store = contents(2), MemoryStore(keep_metadata=False)
    names = list(objects)
    for name in names[:2]:
        put(store, name, objects[name])
    manifest = {name: ObjectDigest(len(data), sha256(data)) for name, data in objects.items()}
    more = {}
    if where == "argument":
        more["manifest"] = manifest
    else:
        listed = {name: {"size": one.size_bytes, "sha256": one.sha256} for name, one in manifest.items()}
        store.put(HERE.manifest_key("v1"), json.dumps({"schema_version": 1, "objects": listed}).encode())
    files = write(tmp_path / "c", objects)
    assert upload(files, store, **more).reused == tuple(names[:2])
    put(store, names[1], noise(1, len(objects[names[1]])))
    manifest[names[1]] = ObjectDigest(len(objects[names[1]]), sha256(b"other"))
    with pytest.raises(SnapshotConflictError):
        upload(files, store, manifest=manifest)


def test_a_manifest_that_cannot_be_read(tmp_path: Path) -> None:
    objects, store = contents(1), MemoryStore(keep_metadata=False)
    put(store, "config.json", b"{}")
    store.put(HERE.manifest_key("v1"), b"<html>")
    with pytest.raises(SnapshotConflictError, match="cannot be verified"):
        upload(write(tmp_path / "c", objects), store)


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    put(store, "config.json", objects["config.json"])
    before = dict(store.objects)
    plan = plan_upload(write(tmp_path / "c", objects), store=store, location=HERE, identity="v1")
    assert plan.existing == ("config.json",)
    assert plan.missing == tuple(list(objects)[1:])
    assert plan.upload_bytes == sum(map(len, objects.values())) - 2
    assert plan.existing_bytes == 2
    assert store.objects == before


# ---- the claim


def interrupted(files: list[SnapshotFile], store: MemoryStore, **more: Any) -> None:
    """An upload that ends after everything but the index."""

    def stop(_: object) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        upload(files, store, before_index=stop, **more)


def claim(store: MemoryStore) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(store.objects[HERE.claim_key("v1")].body)
    return data


def test_what_a_claim_says(tmp_path: Path) -> None:
    objects, store = contents(1), MemoryStore()
    files = write(tmp_path / "c", objects)
    upload(files, store, run_id="run-7")
    said = claim(store)
    assert (said["run_id"], said["directory"]) == ("run-7", str(tmp_path / "c"))
    assert said["files"]["config.json"] == {"size_bytes": 2, "mtime_ns": files[0].mtime_ns}
    assert said["uuid"]
    assert said["host"]


def test_the_same_directory_goes_on_under_the_claim(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    files = write(tmp_path / "c", objects)
    interrupted(files, store, run_id="one")
    before = claim(store)
    report = upload(files, store, run_id="two")
    assert report.uploaded == (INDEX_NAME,)
    assert claim(store) == before, "a claim is never replaced"


def test_the_same_run_goes_on_under_the_claim(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    interrupted(write(tmp_path / "a", objects), store, run_id="one")
    assert upload(write(tmp_path / "b", objects), store, run_id="one").uploaded == (INDEX_NAME,)


# ---- objects that never got their bytes


@pytest.mark.parametrize("size", [5_000, 30_000], ids=["single put", "parts"])
@pytest.mark.parametrize("conditions", list(Conditions))
def test_our_own_object_without_its_bytes_is_written_again(tmp_path: Path, size: int, conditions: Conditions) -> None:
    """SeaweedFS keeps an empty object of a PUT whose sender is gone before the body: the repeat brings the bytes."""
    objects, store = contents(2, size), MemoryStore(conditions=conditions)
    files = write(tmp_path / "c", objects)
    interrupted(files, store)
    torn = "model-00002-of-00002.safetensors"
    put(store, torn, b"", {"cwtrain-sha256": sha256(objects[torn])})
    plan = plan_upload(files, store=store, location=HERE, identity="v1")
    assert (plan.conflicts, plan.missing) == ((), (torn, INDEX_NAME))
    report = upload(files, store)
    assert report.uploaded == (torn, INDEX_NAME)
    assert stored(store) == objects
    assert not store.uploads


@pytest.mark.parametrize("change", ["another SHA-256", "no metadata", "another's claim", "the index is there"])
def test_what_may_be_someone_s_is_not_written_again(tmp_path: Path, change: str) -> None:
    objects, store = contents(2, 5_000), MemoryStore()
    files = write(tmp_path / "c", objects)
    if change == "the index is there":
        upload(files, store)
    else:
        interrupted(files if change != "another's claim" else write(tmp_path / "d", objects), store)
    torn = "model-00002-of-00002.safetensors"
    said = {"another SHA-256": {"cwtrain-sha256": sha256(b"")}, "no metadata": {}}
    put(store, torn, b"", said.get(change, {"cwtrain-sha256": sha256(objects[torn])}))
    before = dict(store.objects)
    with pytest.raises(SnapshotConflictError, match="0 bytes there and 5000 here"):
        upload(files, store)
    assert store.objects == before, "nothing was written"


def test_what_takes_its_place_first_is_a_conflict(tmp_path: Path) -> None:
    """The write is conditional on the object that was seen."""
    objects, torn = contents(1, 5_000), "model-00001-of-00001.safetensors"
    fault = Fault(call="put", key=torn, nth=3, action=lambda: put(store, torn, b"others"))
    store = MemoryStore(faults=[fault])
    files = write(tmp_path / "c", objects)
    interrupted(files, store)
    put(store, torn, b"", {"cwtrain-sha256": sha256(objects[torn])})
    with pytest.raises(SnapshotConflictError, match="by someone else"):
        upload(files, store)
    assert stored(store)[torn] == b"others"
    assert INDEX_NAME not in stored(store)


@pytest.mark.parametrize("run_id", [None, "two"])
def test_anyone_else_stops_before_a_byte_is_sent(tmp_path: Path, run_id: str | None) -> None:
    objects, store = big(), MemoryStore()
    interrupted(write(tmp_path / "a", objects), store, run_id="one")
    store.calls.clear()
    files = write(tmp_path / "b", objects)
    plan = plan_upload(files, store=store, location=HERE, identity="v1", run_id=run_id)
    assert plan.conflicts == ("_claims/v1.json",)
    with pytest.raises(SnapshotConflictError, match="run 'one'") as refused:
        upload(files, store, run_id=run_id)
    assert refused.value.objects == ("_claims/v1.json",)
    assert sent(store) == []


def test_a_lost_race_for_the_claim(tmp_path: Path) -> None:
    """Two uploads look, see nothing, and one claims first."""
    objects = big()
    mine = write(tmp_path / "mine", objects)
    theirs = write(tmp_path / "theirs", big(5))
    other: list[BaseException] = []

    def overtake() -> None:
        try:
            interrupted(theirs, store, run_id="theirs")
        except BaseException as error:
            other.append(error)

    store = MemoryStore(faults=[Fault(call="put", key="_claims", action=overtake)])
    with pytest.raises(SnapshotConflictError, match="run 'theirs'"):
        upload(mine, store, run_id="mine")
    assert other == []
    assert stored(store) == {name: data for name, data in big(5).items() if name != INDEX_NAME}


def test_other_sizes_or_times_are_someone_else(tmp_path: Path) -> None:
    objects, store = big(), MemoryStore()
    interrupted(write(tmp_path / "c", objects), store)
    (tmp_path / "c" / "tokenizer.json").write_bytes(noise(1, 901))
    files = [describe(tmp_path / "c" / name) for name in objects]
    with pytest.raises(SnapshotConflictError) as refused:
        upload(files, store)
    assert set(refused.value.objects) == {"_claims/v1.json", "tokenizer.json"}


def test_a_generated_index_is_told_by_its_bytes() -> None:
    store = MemoryStore()
    interrupted([SnapshotFile(name=INDEX_NAME, size_bytes=2, head=b"{}")], store)
    with pytest.raises(SnapshotConflictError):
        upload([SnapshotFile(name=INDEX_NAME, size_bytes=2, head=b"[]")], store)


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"schema_version": 99}'])
def test_a_claim_that_cannot_be_read_is_someone_s(tmp_path: Path, body: bytes) -> None:
    store = MemoryStore()
    store.put(HERE.claim_key("v1"), body)
    with pytest.raises(SnapshotConflictError, match="unreadable"):
        upload(write(tmp_path / "c", contents()), store, run_id="one")


# ---- stores with less


def test_a_store_that_refuses_conditions_is_served_and_warned_about(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    objects, store = big(), MemoryStore(conditions=Conditions.REFUSED)
    upload(write(tmp_path / "c", objects), store)
    assert stored(store) == objects
    assert [record.message.count("If-None-Match") for record in caplog.records] == [1], "one warning"


@pytest.mark.parametrize(("status", "code"), [(400, "InvalidArgument"), (400, "400"), (501, "NotImplemented")])
def test_only_completing_refuses_conditions(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, status: int, code: str
) -> None:
    refused = StorageError("header not supported", status=status, code=code)

    class Half(MemoryStore):
        def complete_upload(self, key: str, upload_id: str, etags: Any, *, if_absent: bool = False) -> None:
            if if_absent:
                raise refused
            super().complete_upload(key, upload_id, etags)

    objects, store = big(), Half()
    upload(write(tmp_path / "c", objects), store, workers=1)
    assert stored(store) == objects
    assert len(caplog.records) == 1
    assert "completing a multipart upload" in caplog.text


def test_a_400_about_something_else_is_an_error(tmp_path: Path) -> None:
    broken = StorageError("the digest is wrong", status=400, code="BadDigest")
    store = MemoryStore(faults=[Fault(call="put", key="_claims", error=broken)])
    with pytest.raises(StorageError, match="digest"):
        upload(write(tmp_path / "c", contents()), store)
    assert store.objects == {}


def test_a_store_that_ignores_conditions_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    objects, store = big(), MemoryStore(conditions=Conditions.IGNORED)
    upload(write(tmp_path / "c", objects), store)
    assert stored(store) == objects
    assert "ignores If-None-Match" in caplog.text


def test_a_claim_is_respected_where_conditions_are_refused(tmp_path: Path) -> None:
    store = MemoryStore(conditions=Conditions.REFUSED)
    interrupted(write(tmp_path / "a", big()), store, run_id="one")
    with pytest.raises(SnapshotConflictError, match="run 'one'"):
        upload(write(tmp_path / "b", big()), store, run_id="two")


def test_a_store_without_metadata_is_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    upload(write(tmp_path / "c", big()), MemoryStore(keep_metadata=False))
    assert sum("user metadata" in record.message for record in caplog.records) == 1


def test_a_store_that_changes_bodies_is_found_out(tmp_path: Path) -> None:
    """B07: what was kept is compared with what was sent, so framing inside an object cannot pass."""

    class Framing(MemoryStore):
        def _write(self, key: str, body: bytes, metadata: Any) -> None:
            super()._write(key, b"4\r\n" + body + b"\r\n0\r\n" if key.endswith(".safetensors") else body, metadata)

    with pytest.raises(StorageError, match="30000 bytes were sent and the store kept 30008"):
        upload(write(tmp_path / "c", big()), Framing())


# ---- lost answers


_BROKEN = ConnectionFailedError("the connection broke")
_BUSY = StorageError("try again", status=503, code="SlowDown")
_THERE = StorageConflictError("it is there", status=412, code="PreconditionFailed")
_GONE = StorageNotFoundError("no such upload", status=404, code="NoSuchUpload")


@pytest.mark.parametrize(
    ("call", "error"),
    [(call, error) for call in ("put", "complete_upload") for error in (_BROKEN, _BUSY, _THERE)]
    + [("complete_upload", _GONE)],
)
def test_an_answer_that_was_lost(tmp_path: Path, call: str, error: Exception) -> None:
    """The store did it, and the client learnt something else: the object is looked at."""
    objects = big()
    store = MemoryStore(faults=[Fault(call=call, key="safetensors$|tokenizer", error=error, after=True, times=-1)])
    report = upload(write(tmp_path / "c", objects), store)
    assert stored(store) == objects
    assert report.uploaded == tuple(objects)
    assert store.uploads == {}


def test_a_lost_answer_to_the_claim(tmp_path: Path) -> None:
    lost = StorageConflictError("it is there", status=412, code="PreconditionFailed")
    store = MemoryStore(faults=[Fault(call="put", key="_claims", error=lost, after=True)])
    assert upload(write(tmp_path / "c", big()), store).reused == ()


@pytest.mark.parametrize("size", [900, 30_000], ids=["put", "multipart"])
def test_someone_else_s_object_under_our_key(tmp_path: Path, size: int) -> None:
    """A 412 whose object is not ours is a conflict, whoever wrote it."""
    objects = {"model-00001-of-00001.safetensors": noise(1, size), INDEX_NAME: b"{}"}
    key = HERE.key("v1", "model-00001-of-00001.safetensors")
    call = "put" if size < 20_000 else "complete_upload"

    def overtake() -> None:
        MemoryStore.put(store, key + "", noise(2, size), metadata={"cwtrain-sha256": sha256(noise(2, size))})

    store = MemoryStore(faults=[Fault(call=call, key="safetensors", action=overtake)])
    with pytest.raises(SnapshotConflictError, match="written by someone else") as refused:
        upload(write(tmp_path / "c", objects), store)
    assert refused.value.objects == ("model-00001-of-00001.safetensors",)
    assert INDEX_NAME not in stored(store)
    assert store.uploads == {}


def test_an_upload_that_someone_aborted(tmp_path: Path) -> None:
    store: MemoryStore

    def abort() -> None:
        store.uploads.clear()

    store = MemoryStore(faults=[Fault(call="complete_upload", action=abort)])
    with pytest.raises(StorageError, match="is gone, and the object is not there") as gone:
        upload(write(tmp_path / "c", big()), store)
    assert "run it again" in (gone.value.hint or "")


def test_a_write_under_way_is_waited_for(tmp_path: Path) -> None:
    """409 ConditionalRequestConflict: nothing is there yet, so it is tried again."""
    busy = StorageConflictError("under way", status=409, code="ConditionalRequestConflict")
    objects = big()
    store = MemoryStore(faults=[Fault(call="put", key="tokenizer", error=busy)])
    upload(write(tmp_path / "c", objects), store)
    assert stored(store) == objects


# ---- refusals stop everything (B23)


def test_the_first_refusal_stops_the_rest(tmp_path: Path) -> None:
    """B23: UploadPart is refused for ever: nothing stays open, and what was queued is not sent."""
    refused = StorageError("part 2 is refused", status=400, code="InvalidRequest")
    objects = contents(12, 60_000)
    store = MemoryStore(faults=[Fault(call="upload_part", error=refused, nth=2, times=-1)])
    with pytest.raises(StorageError, match="part 2 is refused"):
        upload(write(tmp_path / "c", objects), store, workers=2)
    assert store.uploads == {}
    assert [call for call, _ in store.calls].count("upload_part") < 10
    assert list((tmp_path / "tmp").rglob("*.json")) == [], "no record of open uploads is left"


def test_a_refused_abort_does_not_hide_the_first_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """B23: without s3:AbortMultipartUpload the first error is raised, and what stays open is logged with its id."""
    refused = StorageError("part 2 is refused", status=400, code="InvalidRequest")
    store = MemoryStore(
        denied=["s3:AbortMultipartUpload"], faults=[Fault(call="upload_part", error=refused, nth=2, times=-1)]
    )
    files = write(tmp_path / "c", contents(1, 60_000))
    with pytest.raises(StorageError, match="part 2 is refused"):
        upload(files, store, workers=1)
    (left,) = store.uploads
    assert left in caplog.text
    assert HERE.key("v1", "model-00001-of-00001.safetensors") in caplog.text

    # A retry does not collect more of them: once it may, it aborts what this run left open.
    store.denied.clear()
    with pytest.raises(StorageError, match="part 2 is refused"):
        upload(files, store, workers=1)
    assert store.uploads == {}


@pytest.mark.parametrize("signal", [KeyboardInterrupt, SystemExit])
def test_an_interruption_aborts(tmp_path: Path, signal: type[BaseException]) -> None:
    """B23: Ctrl-C, and a SIGTERM that is turned into SystemExit, during part 2."""
    reached = threading.Event()
    objects = contents(3, 60_000)
    store = MemoryStore(faults=[Fault(call="upload_part", nth=2, action=reached.set)])

    def interrupt(_: object) -> None:
        reached.wait(10)
        raise signal

    with pytest.raises(signal):
        upload(write(tmp_path / "c", objects), store, on_progress=interrupt, workers=2)
    assert store.uploads == {}
    assert INDEX_NAME not in stored(store)


def test_access_that_is_refused_names_the_permission(tmp_path: Path) -> None:
    store = MemoryStore(denied=["s3:PutObject"])
    with pytest.raises(StorageAccessError, match="s3:PutObject"):
        upload(write(tmp_path / "c", contents()), store)
    store = MemoryStore(denied=["s3:ListBucket"])
    with pytest.raises(StorageAccessError, match="s3:ListBucket"):
        upload(write(tmp_path / "c", contents()), store)


def test_old_open_uploads_are_aborted_and_young_ones_left(tmp_path: Path) -> None:
    import datetime as dt

    now = dt.datetime.now(dt.UTC)
    times = iter([now - dt.timedelta(days=2), now - dt.timedelta(hours=1), now - dt.timedelta(days=2)])
    store = MemoryStore(clock=lambda: next(times, now))
    old = store.create_upload(HERE.key("v0", "model.safetensors"))
    young = store.create_upload(HERE.key("v0", "model.safetensors"))
    elsewhere = store.create_upload("other/prefix/model.safetensors")
    upload(write(tmp_path / "c", big()), store)
    assert old not in store.uploads
    assert set(store.uploads) == {young, elsewhere}


def test_listing_open_uploads_is_optional(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = MemoryStore(denied=["s3:ListBucketMultipartUploads"])
    upload(write(tmp_path / "c", big()), store)
    assert caplog.records == []


# ---- kills


class Killed(BaseException):
    """The process is gone."""


class Dying:
    """A process that dies at its n-th request, before the store hears of it or before it hears of the answer.

    Nothing it does later reaches the store, not even an abort.
    """

    def __init__(self, store: MemoryStore, at: int, after: bool) -> None:
        self._store, self._at, self._after = store, at, after
        self._count = 0
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> Any:
        target = getattr(self._store, name)
        if not callable(target):
            return target

        def call(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                self._count += 1
                count = self._count
            if count > self._at or (count == self._at and not self._after):
                if name == "abort_upload":
                    raise ConnectionFailedError("nobody is there to send it")
                raise Killed
            answer = target(*args, **kwargs)
            if count == self._at:
                raise Killed
            return answer

        return call


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("workers", [1, 3])
def test_killed_between_any_two_requests(tmp_path: Path, workers: int, after: bool) -> None:
    """Running it again completes, sends nothing twice, and leaves nothing open, also what it never learnt the id of."""
    objects = big()
    files = write(tmp_path / "c", objects)
    reference = MemoryStore()
    upload(files, reference, workers=workers)
    requests = len(reference.calls)
    for at in range(1, requests + 1):
        store = MemoryStore()
        dying = Dying(store, at, after)
        with pytest.raises(Killed):
            upload(files, dying, workers=workers)  # type: ignore[arg-type]
        there = set(stored(store))
        assert INDEX_NAME not in there or there == set(objects), "the index is never there without the rest"
        report = upload(files, store, workers=workers)
        assert set(report.reused) == there
        assert stored(store) == objects
        assert store.uploads == {}, f"killed at request {at}"


def test_files_that_change_before_the_upload(tmp_path: Path) -> None:
    files = write(tmp_path / "c", contents())
    (tmp_path / "c" / "config.json").write_bytes(b"{ }")
    store = MemoryStore()
    with pytest.raises(SnapshotChangedError, match=r"config\.json") as changed:
        upload(files, store)
    assert changed.value.file == str(tmp_path / "c" / "config.json")
    assert INDEX_NAME not in stored(store)


def test_a_bandwidth_limit_holds() -> None:
    from cwtrain.storage._meter import Meter

    now = 0.0
    waited: list[float] = []

    def wait(seconds: float) -> None:
        nonlocal now
        waited.append(seconds)
        now += seconds

    meter = Meter(stopped=threading.Event(), max_bytes_per_second=1000, clock=lambda: now, wait=wait)
    for _ in range(10):
        meter.add(500)
    assert now == pytest.approx(5.0)
    assert meter.sent_bytes == 5000
    assert meter.bytes_per_second() == pytest.approx(1000)
    meter.add(-500)
    assert meter.sent_bytes == 4500
    assert meter.block_bytes == 16 << 10


def test_a_limited_upload_sends_the_same(tmp_path: Path) -> None:
    objects, store = contents(1, 100), MemoryStore()
    upload(write(tmp_path / "c", objects), store, max_bytes_per_second=1e9)
    assert stored(store) == objects
