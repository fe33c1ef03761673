"""The store in memory answers as the real ones do (their suite is tests/contract/test_storage_contract.py)."""

from __future__ import annotations

import pytest

from cwtrain.errors import StorageAccessError, StorageConflictError, StorageError, StorageNotFoundError
from cwtrain.storage import Fault, MemoryStore, ObjectStore
from cwtrain.storage.memory import Conditions


def test_it_is_an_object_store() -> None:
    store: ObjectStore = MemoryStore("b")
    assert store.bucket == "b"
    assert store.endpoint != MemoryStore("b").endpoint
    assert store.max_connections > 0


def test_objects() -> None:
    store = MemoryStore()
    store.put("a/2", b"0123456789", metadata={"Key": "v"})
    store.put("a/1", b"")
    info = store.head("a/2")
    assert info is not None
    assert (info.size_bytes, info.metadata) == (10, {"key": "v"})
    assert [one.key for one in store.list_objects("a/")] == ["a/1", "a/2"]
    assert store.get("a/2") == b"0123456789"
    assert b"".join(store.stream("a/2", offset=3, length=4)) == b"3456"
    assert b"".join(store.stream("a/2", offset=8)) == b"89"
    assert store.head("a") is None
    with pytest.raises(StorageNotFoundError):
        store.get("a")


@pytest.mark.parametrize(
    ("conditions", "error"),
    [(Conditions.HONOURED, StorageConflictError), (Conditions.REFUSED, StorageError), (Conditions.IGNORED, None)],
)
def test_conditions(conditions: Conditions, error: type[Exception] | None) -> None:
    store = MemoryStore(conditions=conditions)
    store.put("k", b"first")
    if error is None:
        store.put("k", b"second", if_absent=True)
        assert store.get("k") == b"second"
    else:
        with pytest.raises(error):
            store.put("k", b"second", if_absent=True)
        assert store.get("k") == b"first"


def test_multipart() -> None:
    store = MemoryStore()
    upload_id = store.create_upload("k", metadata={"a": "b"})
    second = store.upload_part("k", upload_id, 2, b"cd")
    first = store.upload_part("k", upload_id, 1, b"ab")
    assert [one.upload_id for one in store.list_uploads("k")] == [upload_id]
    with pytest.raises(StorageError, match="a part of"):
        store.complete_upload("k", upload_id, [second, first])
    store.complete_upload("k", upload_id, [first, second], if_absent=True)
    assert store.get("k") == b"abcd"
    with pytest.raises(StorageNotFoundError):
        store.complete_upload("k", upload_id, [first, second])
    with pytest.raises(StorageNotFoundError):
        store.abort_upload("k", upload_id)
    late = store.create_upload("k")
    etag = store.upload_part("k", late, 1, b"x")
    with pytest.raises(StorageConflictError):
        store.complete_upload("k", late, [etag], if_absent=True)
    assert late in store.uploads, "a refused Complete leaves the upload open"


def test_faults_and_permissions() -> None:
    met: list[int] = []
    store = MemoryStore(
        denied=["s3:ListBucket"],
        faults=[
            Fault(call="put", key="^a", error=StorageError("second and third"), nth=2, times=2),
            Fault(call="put", key="^a", action=lambda: met.append(1), times=-1, after=True),
        ],
    )
    results = []
    for _ in range(4):
        try:
            store.put("a", b"")
            results.append(True)
        except StorageError:
            results.append(False)
    store.put("b", b"")
    assert results == [True, False, False, True]
    assert met == [1, 1]
    with pytest.raises(StorageAccessError) as refused:
        store.list_objects("")
    assert refused.value.action == "s3:ListBucket"
    assert store.calls[-1] == ("list_objects", "")
