"""The access check, locations, and a record of open uploads, without any server."""

from __future__ import annotations

import datetime as dt
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from cwtrain.errors import ConfigError, StorageAccessError, StorageError, StorageNotFoundError, TransportError
from cwtrain.storage import Fault, Location, MemoryStore, check_access
from cwtrain.storage._open_uploads import UploadRecord, abort_left_open

HERE = Location("memory", "rl")


@pytest.fixture(autouse=True)
def records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where checks note what they have open: not with those of other tests."""
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_everything_allowed_and_nothing_left() -> None:
    store = MemoryStore()
    report = check_access(store, HERE)
    assert report.ok
    assert report.refused == ()
    report.raise_for_refused()
    assert (store.objects, store.uploads) == ({}, {})
    assert tuple(call for call, key in store.calls if key.startswith("rl/_preflight/")) == (
        "head",
        "create_upload",
        "upload_part",
        "abort_upload",
        "list_uploads",
    )


@pytest.mark.parametrize(
    ("denied", "refused"),
    [
        ({"s3:ListBucket"}, ("s3:ListBucket",)),
        ({"s3:GetObject"}, ("s3:GetObject",)),
        ({"s3:PutObject"}, ("s3:PutObject",)),
        ({"s3:AbortMultipartUpload"}, ("s3:AbortMultipartUpload",)),
        ({"s3:GetObject", "s3:PutObject"}, ("s3:GetObject", "s3:PutObject")),
        ({"s3:ListBucket", "s3:GetObject"}, ("s3:ListBucket",)),
        ({"s3:ListBucketMultipartUploads"}, ()),
    ],
)
def test_every_refused_permission_is_named(denied: set[str], refused: tuple[str, ...]) -> None:
    """B23 asks that the abort permission is tried and named too."""
    report = check_access(MemoryStore(denied=denied), HERE)
    assert report.refused == refused
    assert report.ok == (not refused)
    if refused:
        with pytest.raises(StorageAccessError) as error:
            report.raise_for_refused()
        assert all(action in str(error.value) for action in refused)
    optional = report.checks[-1]
    assert (optional.action, optional.required) == ("s3:ListBucketMultipartUploads", False)
    assert optional.allowed is ("s3:ListBucketMultipartUploads" not in denied)


def test_what_is_no_matter_of_permission_is_raised() -> None:
    gone = StorageNotFoundError("no bucket", code="NoSuchBucket", status=404)
    with pytest.raises(StorageNotFoundError):
        check_access(MemoryStore(faults=[Fault(call="list_objects", error=gone)]), HERE)
    keys = StorageAccessError("unknown key", code="InvalidAccessKeyId", status=403)
    with pytest.raises(StorageAccessError, match="unknown key"):
        check_access(MemoryStore(faults=[Fault(call="list_objects", error=keys)]), HERE)
    missing = StorageError("no such call", code="NotImplemented", status=501)
    report = check_access(MemoryStore(faults=[Fault(call="list_uploads", error=missing)]), HERE)
    assert report.ok
    assert report.checks[-1].allowed is None


class Repeating(MemoryStore):
    """A client that asks twice, as one does whose first answer is lost: the store has acted both times."""

    def create_upload(self, key: str, *, metadata: Mapping[str, str] | None = None) -> str:
        super().create_upload(key, metadata=metadata)
        return super().create_upload(key, metadata=metadata)

    def abort_upload(self, key: str, upload_id: str) -> None:
        super().abort_upload(key, upload_id)
        super().abort_upload(key, upload_id)


def test_nothing_is_left_where_answers_are_lost() -> None:
    store = Repeating()
    assert check_access(store, HERE).ok
    assert store.uploads == {}


def test_what_a_check_left_open_that_did_not_come_to_its_end_is_aborted_by_the_next(records: Path) -> None:
    for error in (TransportError("the answer is lost"), KeyboardInterrupt()):
        store = MemoryStore(faults=[Fault(call="create_upload", error=error, after=True)])
        with pytest.raises(type(error)):
            check_access(store, HERE)
        assert len(store.uploads) == 1
        assert check_access(store, HERE).ok
        assert store.uploads == {}
    assert [path.name for path in records.rglob("*") if path.is_file()] == []


def test_what_may_not_be_aborted_is_aborted_once_it_may() -> None:
    store = MemoryStore(denied={"s3:AbortMultipartUpload"})
    assert not check_access(store, HERE).ok
    assert len(store.uploads) == 1
    store.denied.clear()
    assert check_access(store, HERE).ok
    assert store.uploads == {}


@pytest.mark.parametrize("prefix", ["rl", ""])
def test_what_a_check_left_open_elsewhere_is_aborted_after_a_day(prefix: str) -> None:
    now = dt.datetime.now(dt.UTC)
    clock = iter([now - dt.timedelta(hours=25), now - dt.timedelta(hours=23), now])
    store = MemoryStore(clock=lambda: next(clock))
    where = Location("memory", prefix)
    old, young = (store.create_upload(where.preflight_key(name)) for name in ("old", "young"))
    assert check_access(store, where).ok
    assert set(store.uploads) == {young}, old


def test_location() -> None:
    where = Location("weights", "/rl/run-7/")
    assert where.path_prefix == "rl/run-7"
    assert where.key("v1", "config.json") == "rl/run-7/v1/config.json"
    assert where.uri("v1") == "s3://weights/rl/run-7/v1"
    assert where.claim_key("v1") == "rl/run-7/_claims/v1.json"
    assert where.manifest_key("v1") == "rl/run-7/_manifests/v1.json"
    assert where.preflight_key("x") == "rl/run-7/_preflight/x"
    assert Location("weights").key("v1", "x") == "v1/x"
    assert Location("weights").uri("v1") == "s3://weights/v1"
    assert pickle.loads(pickle.dumps(where)) == where


@pytest.mark.parametrize(("bucket", "prefix"), [("", "x"), ("b", "a/../b"), ("b", "..")])
def test_locations_that_cannot_be(bucket: str, prefix: str) -> None:
    with pytest.raises(ConfigError):
        Location(bucket, prefix)


# ---- the record of open uploads

_DIES = """
import sys
from cwtrain.storage import Location, MemoryStore
from cwtrain.storage._open_uploads import UploadRecord
class Store(MemoryStore):
    endpoint = "memory:same"
record = UploadRecord(Store(), Location("memory", "rl"), "v1", directory=sys.argv[1])
record.opened("rl/v1/a", sys.argv[2])
record.opened("rl/v1/b", "closed")
with record.opening("rl/v1/c"):
    pass  # it is killed before it learns the id
record.closed("closed")
"""


class Same(MemoryStore):
    @property
    def endpoint(self) -> str:
        return "memory:same"


def test_what_a_dead_process_left_open_is_aborted(tmp_path: Path) -> None:
    store = Same()
    left, unknown = store.create_upload("rl/v1/a"), store.create_upload("rl/v1/c")
    other_key = store.create_upload("rl/v1/c2")
    directory = str(tmp_path / "records")
    subprocess.run([sys.executable, "-c", _DIES, directory, left], check=True)
    (name,) = os.listdir(directory)
    noted = json.loads((tmp_path / "records" / name).read_text())
    assert noted.pop(left) == "rl/v1/a"
    assert list(noted.values()) == ["rl/v1/c"], "asked for, and no id known"
    other = UploadRecord(store, HERE, "v2", directory=directory)
    abort_left_open(other, store, HERE, "v2")
    assert set(store.uploads) == {left, unknown, other_key}, "of another identity"
    record = UploadRecord(store, HERE, "v1", directory=directory)
    abort_left_open(record, store, HERE, "v1")
    assert set(store.uploads) == {other_key}
    assert os.listdir(directory) == []


def test_what_a_living_upload_has_open_stays(tmp_path: Path) -> None:
    store = Same()
    running = UploadRecord(store, HERE, "v1", directory=str(tmp_path / "records"))
    upload_id = store.create_upload("rl/v1/a")
    running.opened("rl/v1/a", upload_id)
    abort_left_open(UploadRecord(store, HERE, "v1", directory=str(tmp_path / "records")), store, HERE, "v1")
    assert set(store.uploads) == {upload_id}
    running.close()
    abort_left_open(UploadRecord(store, HERE, "v1", directory=str(tmp_path / "records")), store, HERE, "v1")
    assert store.uploads == {}


def test_a_record_that_is_not_ours_is_not_believed(tmp_path: Path) -> None:
    store = Same()
    upload_id = store.create_upload("rl/v1/a")
    shared = tmp_path / "records"
    ended = UploadRecord(store, HERE, "v1", directory=str(shared))
    ended.opened("rl/v1/a", upload_id)
    ended.close()
    shared.chmod(0o777)
    abort_left_open(UploadRecord(store, HERE, "v1", directory=str(shared)), store, HERE, "v1")
    assert set(store.uploads) == {upload_id}


def test_no_record_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    record = UploadRecord(MemoryStore(), HERE, "v1", directory=str(tmp_path / "file" / "below"))
    record.opened("k", "u")
    record.closed("u")
    assert list(record.abandoned()) == []
    record.close()
