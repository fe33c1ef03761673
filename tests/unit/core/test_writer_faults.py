"""What goes wrong while a snapshot is streamed: lost answers, refusals, somebody else, a death in the middle."""

from __future__ import annotations

import datetime as dt
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import (
    ConnectionFailedError,
    SnapshotConflictError,
    SnapshotError,
    StorageAccessError,
    StorageConflictError,
    StorageError,
)
from cwtrain.hotload import (
    IdentityStanding,
    MemoryBase,
    SnapshotWriter,
    complete_streamed,
    free_identity,
    identity_standing,
)
from cwtrain.hotload.verify import verify_snapshot
from cwtrain.storage import Fault, Location, MemoryStore
from cwtrain.storage.memory import Conditions, MemoryObject
from helpers.streamed import INDEX, TINY, filled, make_state, names_in, next_state, raw, side_files, tensors_in
from helpers.streamed import write as write_with

PLACE = Location("memory", "rl")
LOST = ConnectionFailedError("the connection broke")
DENIED = StorageAccessError("s3:PutObject is refused", code="AccessDenied", status=403, action="s3:PutObject")


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    return side_files(tmp_path / "sides")


@pytest.fixture(autouse=True)
def records_of_open_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))


def huge() -> dict[str, Any]:
    """One tensor that goes in parts, and one that does not."""
    rng = np.random.default_rng(5)
    return {"huge": rng.integers(0, 256, 300_000, dtype=np.uint8), "small": rng.random(100)}


def write(store: MemoryStore, identity: str, state: dict[str, Any], **options: Any) -> Any:
    return write_with(store, PLACE, identity, state, **{"sizes": TINY, "run_id": "run", **options})


@pytest.mark.parametrize(
    ("call", "key"),
    [
        ("put", r"model-r.*safetensors"),
        ("put", r"tokenizer\.json"),
        ("put", r"_manifests/"),
        ("put", r"index\.json"),
        ("complete_upload", r"safetensors"),
    ],
)
def test_a_write_whose_answer_was_lost_was_made_all_the_same(sides: Path, call: str, key: str) -> None:
    """Looked at by its upload id; a repeat that meets 412 is the same case one request later."""
    errors = (
        LOST,
        StorageError("busy", status=503),
        StorageConflictError("it is there already", status=412, code="PreconditionFailed"),
    )
    for error in errors:
        store = MemoryStore(faults=[Fault(call=call, key=key, error=error, after=True)])
        write(store, "v1", huge(), kind="full", side_files=sides)
        assert tensors_in(store, PLACE, "v1") == {name: raw(tensor) for name, tensor in huge().items()}
        assert verify_snapshot(store, PLACE, "v1").problems == ()


@pytest.mark.parametrize(
    ("call", "key"),
    [("put", "claims"), ("put", "small|r00000-00001"), ("upload_part", ""), ("put", "_manifests"), ("put", "index")],
)
@pytest.mark.parametrize("error", [DENIED, LOST], ids=["refused", "no answer"])
def test_a_write_that_fails_stops_everything(sides: Path, call: str, key: str, error: Exception) -> None:
    """Nothing looks published, no multipart upload stays open, and the error is the first one."""
    store = MemoryStore(faults=[Fault(call=call, key=key, error=error, times=-1)])
    base = MemoryBase()
    with pytest.raises(type(error)) as caught:
        write(store, "v1", huge(), kind="full", base=base, side_files=sides)
    assert caught.value is error
    assert INDEX not in names_in(store, PLACE, "v1")
    assert store.uploads == {}
    assert base.identity is None


def test_a_part_that_fails_is_raised_by_a_later_add(sides: Path) -> None:
    """The uploader's error reaches the trainer's loop while it produces, not after it has produced everything."""
    store = MemoryStore(faults=[Fault(call="put", key="safetensors", error=DENIED, times=-1)])
    rng = np.random.default_rng(1)
    endless = {f"t{number}": rng.integers(0, 256, 60_000, dtype=np.uint8) for number in range(500)}
    asked = iter(endless.items())
    writer = SnapshotWriter(store, PLACE, "v1", kind="full", side_files=sides, sizes=TINY)
    with pytest.raises(StorageAccessError):
        writer_adds(writer, asked)
    assert next(asked, None) is not None


def writer_adds(writer: SnapshotWriter, tensors: Iterator[tuple[str, Any]]) -> None:
    for name, tensor in tensors:
        writer.add(name, tensor)


@pytest.mark.parametrize("conditions", [Conditions.REFUSED, Conditions.IGNORED])
@pytest.mark.parametrize("part", ["everywhere", "on completion"])
def test_a_store_without_conditional_writes_is_served(
    sides: Path, caplog: pytest.LogCaptureFixture, conditions: Conditions, part: str
) -> None:
    if part == "everywhere":
        store = MemoryStore(conditions=conditions)
    else:
        store = MemoryStore(complete_conditions=conditions)
    with caplog.at_level(logging.WARNING, "cwtrain.storage"):
        write(store, "v1", huge(), kind="full", side_files=sides)
    assert verify_snapshot(store, PLACE, "v1").problems == ()
    told = [record.getMessage() for record in caplog.records if "If-None-Match" in record.getMessage()]
    # A Complete that ignores the condition cannot be told from one that takes it: the claim is what protects there.
    assert bool(told) is ((part, conditions) != ("on completion", Conditions.IGNORED))


def test_a_store_that_keeps_no_metadata(sides: Path) -> None:
    """Then what was sent is compared by its bytes."""
    fault = Fault(call="put", key="model-r", error=LOST, after=True)
    store = MemoryStore(keep_metadata=False, faults=[fault])
    write(store, "v1", make_state(1), kind="full", side_files=sides)
    assert verify_snapshot(store, PLACE, "v1").problems == ()


def test_a_frame_larger_than_memory_is_read_back_for_its_hash(sides: Path) -> None:
    """SHA-256 begins with the header, which is known last: what cannot be kept until then is read from the store."""
    rng = np.random.default_rng(1)
    old, new = ({"huge": rng.integers(0, 256, 900_000, dtype=np.uint8)} for _ in range(2))
    store = MemoryStore()
    base = MemoryBase()
    shard = "model-r00000-00000.safetensors"
    write(store, "v0", old, kind="full", base=base, side_files=sides)
    # A whole tensor's checksum can be counted first: then the header is known before the data, and nothing is kept.
    assert ("stream", PLACE.key("v0", shard)) not in store.calls
    write(store, "v1", new, kind="delta", base=base)
    assert ("stream", PLACE.key("v1", shard)) in store.calls
    for identity, before, state in (("v0", None, old), ("v1", old, new)):
        assert tensors_in(store, PLACE, identity, before) == {"huge": raw(state["huge"])}
        assert verify_snapshot(store, PLACE, identity).problems == ()


# -- somebody else -----------------------------------------------------------------------------------------------------


def test_an_identity_that_is_claimed_is_refused_before_any_byte(sides: Path) -> None:
    """Two writers under one identity: the second sends nothing, nor does it harm the first."""
    store = MemoryStore()
    with SnapshotWriter(store, PLACE, "v1", kind="full", side_files=sides, sizes=TINY, run_id="first") as first:
        first.add("a", np.zeros(100_000, np.uint8))
        first.close()
        before = dict(store.objects)
        with pytest.raises(SnapshotConflictError, match="claimed by run 'first'") as caught:
            write(store, "v1", huge(), kind="full", side_files=sides, run_id="second")
        assert caught.value.objects == ("_claims/v1.json",)
        # Nor is the same run's second process the same writer.
        with pytest.raises(SnapshotConflictError, match="claimed by run 'first'"):
            write(store, "v1", huge(), kind="full", side_files=sides, run_id="first")
        assert store.objects == before
        first.finalise([first.close()])
    assert verify_snapshot(store, PLACE, "v1").problems == ()


def test_objects_without_a_claim_are_not_written_over(sides: Path) -> None:
    store = MemoryStore()
    store.put(PLACE.key("v1", "model-00001.safetensors"), b"older")
    with pytest.raises(SnapshotConflictError, match=r"model-00001\.safetensors \(it stands there without a claim\)"):
        write(store, "v1", huge(), kind="full", side_files=sides)
    assert PLACE.claim_key("v1") not in store.objects
    store.put(PLACE.prefix("v2"), b"")  # a folder, as consoles make them
    write(store, "v2", huge(), kind="full", side_files=sides)


@pytest.mark.parametrize("key", ["model-r00000-00000.safetensors", INDEX])
def test_an_object_that_somebody_else_writes_meanwhile(sides: Path, key: str) -> None:
    full_key = PLACE.key("v1", key)
    theirs = MemoryObject(body=b"theirs", modified=dt.datetime.now(dt.UTC))
    intrude = Fault(call="put", key=re.escape(key), action=lambda: store.objects.update({full_key: theirs}))
    store = MemoryStore(faults=[intrude])
    with pytest.raises(SnapshotConflictError, match="written by someone else meanwhile"):
        write(store, "v1", make_state(1), kind="full", side_files=sides)
    assert store.objects[full_key] is theirs


# -- a writer that dies ------------------------------------------------------------------------------------------------


EVERYTHING = {"s3:GetObject", "s3:ListBucket", "s3:PutObject", "s3:AbortMultipartUpload"}


class Died(BaseException):
    """Stands for SIGKILL."""


def dead_at(call: str, key: str, *, sides: Path) -> MemoryStore:
    """Return a store in which a writer of ``v1`` stopped for good at a call: from then on nothing of it arrives."""
    died = Fault(call=call, key=key, action=lambda: store.denied.update(EVERYTHING), error=Died())
    store = MemoryStore(faults=[died])
    with pytest.raises(Died):
        write(store, "v1", huge(), kind="full", side_files=sides, upload_workers=1)
    store.denied.clear()
    return store


@pytest.mark.parametrize(("call", "key"), [("put", "r00000-00001"), ("upload_part", ""), ("put", "_manifests")])
def test_an_abandoned_upload_is_left_and_its_version_gets_another_identity(sides: Path, call: str, key: str) -> None:
    store = dead_at(call, key, sides=sides)
    assert identity_standing(store, PLACE, "v1") is IdentityStanding.ABANDONED
    assert free_identity(store, PLACE, "v1", run_id="run") == "v1-r2"
    write(store, "v1-r2", huge(), kind="full", side_files=sides)
    assert verify_snapshot(store, PLACE, "v1-r2").problems == ()
    assert INDEX not in names_in(store, PLACE, "v1")
    with pytest.raises(SnapshotConflictError, match=r"v1-r2 is taken.*it is published"):
        free_identity(store, PLACE, "v1", run_id="run")


def test_the_third_attempt_is_r3(sides: Path) -> None:
    store = MemoryStore()
    for identity in ("v1", "v1-r2"):
        store.put(PLACE.claim_key(identity), json.dumps({"schema_version": 1}).encode())
    with pytest.raises(SnapshotConflictError, match="unreadable claim"):
        free_identity(store, PLACE, "v1", run_id="run")
    for identity in ("v1", "v1-r2"):
        del store.objects[PLACE.claim_key(identity)]
        with SnapshotWriter(store, PLACE, identity, kind="full", side_files=sides, run_id="run") as writer:
            writer._upload.claim()
    assert free_identity(store, PLACE, "v1", run_id="run") == "v1-r3"
    with pytest.raises(SnapshotConflictError, match="claimed by run 'run'"):
        free_identity(store, PLACE, "v1", run_id="another")
    assert free_identity(store, PLACE, "fresh", run_id="run") == "fresh"


@pytest.mark.parametrize("kind", ["full", "delta"])
def test_an_upload_that_lacks_only_its_index_is_completed(sides: Path, kind: str) -> None:
    """It died between manifest and index: everything is there, so nothing has to be sent again."""
    store = MemoryStore()
    state = make_state(1)
    options: dict[str, Any] = {"kind": "full", "side_files": sides}
    if kind == "delta":
        options = {"kind": "delta", "base": filled(MemoryBase(), store, PLACE, state, sides)}
        state = next_state(state, 2)
    write(store, "v1", state, **options)
    index = store.objects.pop(PLACE.key("v1", INDEX))
    assert identity_standing(store, PLACE, "v1") is IdentityStanding.COMPLETABLE
    with pytest.raises(SnapshotConflictError, match="lacks only its index"):
        free_identity(store, PLACE, "v1", run_id="run")
    assert complete_streamed(store, PLACE, "v1") == PLACE.uri("v1")
    assert store.objects[PLACE.key("v1", INDEX)].body == index.body
    assert identity_standing(store, PLACE, "v1") is IdentityStanding.PUBLISHED
    assert verify_snapshot(store, PLACE, "v1").problems == ()


def test_what_cannot_be_completed_is_not(sides: Path) -> None:
    store = MemoryStore()
    with pytest.raises(SnapshotError, match="no manifest of a streamed upload"):
        complete_streamed(store, PLACE, "v1")
    write(store, "v1", make_state(1), kind="full", side_files=sides)
    del store.objects[PLACE.key("v1", INDEX)]
    key = PLACE.key("v1", "model-r00000-00000.safetensors")
    body = store.objects[key].body
    name = b"embed.weight" if b"embed.weight" in body else b"layers.0.weight"
    store.put(key, body.replace(name, b"X" + name[1:]))
    with pytest.raises(SnapshotError, match="its shards are not what its manifest says"):
        complete_streamed(store, PLACE, "v1")
    assert INDEX not in names_in(store, PLACE, "v1")
    del store.objects[key]
    with pytest.raises(SnapshotError, match=r"model-r00000-00000\.safetensors is not as its manifest says"):
        complete_streamed(store, PLACE, "v1")
