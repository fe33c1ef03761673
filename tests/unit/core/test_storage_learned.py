"""What a run's later uploads do not ask a store again, and what they ask all the same."""

from __future__ import annotations

import datetime as dt
import gc
from pathlib import Path
from typing import Any

import pytest

from cwtrain.errors import SnapshotConflictError, StorageError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage import (
    Fault,
    Location,
    MemoryStore,
    S3Store,
    UploadReport,
    plan_upload,
    s3_client,
    upload_objects,
)
from cwtrain.storage import s3_store as module
from cwtrain.storage._learned import PUT, Learned, learned_of
from cwtrain.storage.claim import read_claim
from cwtrain.storage.memory import Conditions
from cwtrain.storage.upload import PartSizes
from helpers.streamed import INDEX, TINY, make_state, side_files
from helpers.streamed import write as write_streamed
from helpers.upload_files import contents, write

HERE = Location("memory", "rl")
CLAIM, MANIFEST = HERE.claim_key, HERE.manifest_key


@pytest.fixture(autouse=True)
def _own_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is open is noted in a temporary directory: each test has one of its own."""
    import tempfile

    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


def upload(files: list[SnapshotFile], store: MemoryStore, identity: str, **more: Any) -> UploadReport:
    return upload_objects(files, store=store, location=more.pop("location", HERE), identity=identity, **more)


def calls(store: MemoryStore, since: int = 0) -> list[tuple[str, str]]:
    return store.calls[since:]


def count(store: MemoryStore, call: str, since: int = 0) -> int:
    return sum(made == call for made, _ in calls(store, since))


# ---- whether the store takes conditions


def test_a_store_that_honours_conditions_is_probed_once(tmp_path: Path) -> None:
    store, files = MemoryStore(), write(tmp_path / "c", contents())
    for identity in ("v1", "v2", "v3"):
        upload(files, store, identity)
    puts = [key for call, key in store.calls if call == "put" and key.startswith("rl/_claims/")]
    assert puts == [CLAIM("v1"), CLAIM("v1"), CLAIM("v2"), CLAIM("v3")]


def test_a_claim_that_was_refused_shows_the_same(tmp_path: Path) -> None:
    """A run that is started again meets its own claim: that is a probe as good as any."""
    files, store = write(tmp_path / "c", contents()), MemoryStore()
    upload(files, store, "v1", run_id="run")
    del store.objects[HERE.key("v1", INDEX)]
    store.learned = Learned()  # another process
    upload(files, store, "v1", run_id="run")
    assert store.learned.conditional


@pytest.mark.parametrize("conditions", [Conditions.IGNORED, Conditions.REFUSED])
def test_a_store_that_does_not_is_asked_each_time_and_warned_about_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, conditions: Conditions
) -> None:
    store, files = MemoryStore(conditions=conditions), write(tmp_path / "c", contents())
    for identity in ("v1", "v2"):
        upload(files, store, identity)
    puts = [key for call, key in store.calls if call == "put" and key.startswith("rl/_claims/")]
    assert puts == [CLAIM("v1"), CLAIM("v1"), CLAIM("v2"), CLAIM("v2")]
    assert len([one for one in caplog.records if "If-None-Match" in one.message]) == 1
    assert not store.learned.conditional


def test_a_store_that_stops_taking_conditions_is_probed_again(tmp_path: Path) -> None:
    refused = StorageError("not implemented", status=501, code="NotImplemented")
    store = MemoryStore(faults=[Fault(call="put", key="_claims/v2", error=refused)])
    files = write(tmp_path / "c", contents())
    upload(files, store, "v1")
    assert store.learned.conditional
    upload(files, store, "v2")
    assert not store.learned.conditional


def test_who_loses_the_claim_still_stops(tmp_path: Path) -> None:
    """What is remembered makes no race possible: the conditional PUT itself decides, after one look or none."""
    store, files = MemoryStore(), write(tmp_path / "a", contents())
    upload(files, store, "v1", run_id="one")
    assert plan_upload(files, store=store, location=HERE, identity="v2", run_id="one").existing == ()
    other = write(tmp_path / "b", contents(seed=9))
    upload(other, store, "v2", run_id="two")
    before = dict(store.objects)
    for free in (True, False):
        with pytest.raises(SnapshotConflictError):
            upload(files, store, "v2", run_id="one", free=free)
    for name in contents():
        store.delete(HERE.key("v2", name))
    with pytest.raises(SnapshotConflictError, match="run 'two'") as caught:
        upload(files, store, "v2", run_id="one", free=True)
    assert caught.value.objects == ("_claims/v2.json",)
    assert {key: one for key, one in before.items() if "/v2/" not in key} == store.objects


def test_our_own_claim_is_met_after_a_look_that_was_left_out(tmp_path: Path) -> None:
    """Objects of an earlier attempt that arrived since the look are compared, and kept."""
    store, files = MemoryStore(), write(tmp_path / "a", contents())
    upload(files, store, "v1")
    upload(files, store, "v2")
    store.delete(HERE.key("v2", INDEX))
    report = upload(files, store, "v2", free=True)
    assert report.uploaded == (INDEX,)


def test_a_foreign_claim_survives_a_store_that_ignores_conditions(tmp_path: Path) -> None:
    """There the look before is all there is: it is never left out."""
    store, files = MemoryStore(conditions=Conditions.IGNORED), write(tmp_path / "a", contents())
    upload(files, store, "v1", run_id="one")
    upload(write(tmp_path / "b", contents()), store, "v2", run_id="two")
    for name in contents():
        store.delete(HERE.key("v2", name))
    with pytest.raises(SnapshotConflictError, match="run 'two'"):
        upload(files, store, "v2", run_id="one", free=True)
    held = read_claim(store, HERE, "v2")
    assert held is not None
    assert held.run_id == "two"


# ---- what the store kept


def test_the_first_upload_looks_at_every_object_and_later_ones_at_none(tmp_path: Path) -> None:
    store, files = MemoryStore(), write(tmp_path / "c", contents())
    upload(files, store, "v1")
    assert sorted(key for call, key in store.calls if call == "head") == sorted(
        HERE.key("v1", name) for name in contents()
    )
    since = len(store.calls)
    upload(files, store, "v2")
    assert count(store, "head", since) == 0


def test_an_object_in_parts_is_always_looked_at(tmp_path: Path) -> None:
    """Ceph completes a multipart upload without the condition, so another's object may stand there."""
    store, files = MemoryStore(), write(tmp_path / "c", contents(2, 30_000))
    sizes = PartSizes(multipart_above_bytes=20_000, part_bytes=8_000)
    upload(files, store, "v1", sizes=sizes)
    since = len(store.calls)
    upload(files, store, "v2", sizes=sizes)
    heads = [key for call, key in calls(store, since) if call == "head"]
    assert sorted(heads) == [HERE.key("v2", f"model-{number:05d}-of-00002.safetensors") for number in (1, 2)]


@pytest.mark.parametrize("conditions", [Conditions.IGNORED, Conditions.REFUSED])
def test_every_object_is_looked_at_where_a_put_may_replace_one(tmp_path: Path, conditions: Conditions) -> None:
    store, files = MemoryStore(conditions=conditions), write(tmp_path / "c", contents())
    upload(files, store, "v1")
    since = len(store.calls)
    upload(files, store, "v2")
    assert count(store, "head", since) == len(files)


class Framing(MemoryStore):
    """Keeps the framing of a stream's request inside the object."""

    def put(self, key: str, body: Any, **more: Any) -> None:
        plain = isinstance(body, bytes)
        super().put(key, body if plain else b"4\r\n" + body.read() + b"\r\n0\r\n", **more)


def test_a_store_that_keeps_framing_is_never_believed(tmp_path: Path) -> None:
    """B07: framing inside an object is found in the first upload to a store, and in each one after it."""
    store, files = Framing(), write(tmp_path / "c", contents())
    for identity in ("v1", "v2"):
        with pytest.raises(StorageError, match="bytes were sent and the store kept"):
            upload(files, store, identity)
    sides = side_files(tmp_path / "sides")
    with pytest.raises(StorageError, match="bytes were sent and the store kept"):
        write_streamed(store, HERE, "v3", make_state(1), kind="full", side_files=sides)
    assert not store.learned.keeps(PUT)


def test_an_empty_object_speaks_for_no_other() -> None:
    learned = Learned()
    learned.kept(PUT, 0)
    assert not learned.keeps(PUT)


def test_a_store_without_metadata_is_warned_about_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store, files = MemoryStore(keep_metadata=False), write(tmp_path / "c", contents())
    for identity in ("v1", "v2"):
        upload(files, store, identity)
    assert sum("user metadata" in record.message for record in caplog.records) == 1


# ---- what others left open


def test_old_uploads_are_looked_for_once_in_an_hour(tmp_path: Path) -> None:
    days_ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    now = [0.0]
    store, files = MemoryStore(clock=lambda: days_ago), write(tmp_path / "c", contents())
    store.learned = Learned(clock=lambda: now[0])
    store.create_upload("rl/old/a")
    upload(files, store, "v1")
    assert store.uploads == {}
    left = store.create_upload("rl/old/b")
    now[0] = 3599.0
    upload(files, store, "v2")
    assert set(store.uploads) == {left}
    now[0] = 3601.0
    upload(files, store, "v3")
    assert store.uploads == {}
    assert count(store, "list_uploads") == 2


def test_without_a_prefix_a_new_identity_has_nothing_open(tmp_path: Path) -> None:
    """There only the identity's own uploads may be aborted; one that nobody wrote under before has none."""
    days_ago = dt.datetime.now(dt.UTC) - dt.timedelta(days=3)
    bare, files = Location("memory", ""), write(tmp_path / "c", contents())
    store = MemoryStore(clock=lambda: days_ago)
    upload(files, store, "v1", location=bare)
    assert count(store, "list_uploads") == 0
    store.delete(bare.key("v1", INDEX))
    left = store.create_upload(bare.key("v1", "a"))
    upload(files, store, "v1", location=bare)
    assert left not in store.uploads


# ---- whose knowledge it is


def test_stores_of_one_client_and_bucket_share_what_they_learn() -> None:
    options: Any = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "US-EAST-04A"}
    client, other = (s3_client("http://127.0.0.1:9", **options) for _ in range(2))
    learned = S3Store(client, "bucket").learned
    assert S3Store(client, "bucket").learned is learned
    assert S3Store(client, "another").learned is not learned
    assert S3Store(other, "bucket").learned is not learned
    gc.collect()  # clients of other tests
    known = len(module._LEARNED)
    client.close()
    del client
    gc.collect()
    assert len(module._LEARNED) == known - 1, "it ends with the client"


def test_a_store_without_a_place_for_it_is_asked_each_time(tmp_path: Path) -> None:
    store, files = MemoryStore(), write(tmp_path / "c", contents())
    del store.learned
    assert learned_of(store) is not learned_of(store)
    for identity in ("v1", "v2"):
        upload(files, store, identity)
    assert count(store, "list_uploads") == 2
    assert [key for call, key in store.calls if call == "put"].count(CLAIM("v2")) == 2


def test_a_streamed_upload_remembers_within_itself(tmp_path: Path) -> None:
    """A plugin's store has no place for it: the first object in each way is looked at, not all of them."""
    store, sides = MemoryStore(), side_files(tmp_path / "sides")
    del store.learned
    write_streamed(
        store,
        HERE,
        "v1",
        make_state(1),
        kind="full",
        side_files=sides,
        sizes=TINY,
        shard_bytes=4 << 10,
        upload_workers=1,
    )
    shards = [key for call, key in store.calls if call == "put" and "model-" in key]
    assert len(shards) > 2
    assert len([key for call, key in store.calls if call == "head" and "model-" in key]) <= 2


# ---- all of it: the requests of a run


def test_the_requests_of_a_run_s_second_publish(tmp_path: Path) -> None:
    """Streamed: a look, the claim, the shard, manifest and index. From a directory: a look, the claim, the objects."""
    store, sides = MemoryStore(), side_files(tmp_path / "sides")
    options: dict[str, Any] = {"kind": "full", "side_files": sides, "sizes": TINY}
    small = {name: tensor for name, tensor in make_state(1).items() if name.startswith("norm")}
    write_streamed(store, HERE, "v1", small, **options)
    since = len(store.calls)
    write_streamed(store, HERE, "v2", small, **options)
    shard = HERE.key("v2", "model-r00000-00000.safetensors")
    config, tokenizer = (HERE.key("v2", name) for name in ("config.json", "tokenizer.json"))
    made = calls(store, since)
    assert made[:3] == [("list_objects", HERE.prefix("v2")), ("put", CLAIM("v2")), ("put", shard)]
    assert sorted(made[3:5]) == [("put", config), ("put", tokenizer)]
    assert made[5:] == [("put", MANIFEST("v2")), ("put", HERE.key("v2", INDEX))]

    since = len(store.calls)
    upload(write(tmp_path / "c", contents()), store, "v3")
    made = calls(store, since)
    assert made[:2] == [("list_objects", HERE.prefix("v3")), ("put", CLAIM("v3"))]
    assert sorted(made[2:]) == sorted(("put", HERE.key("v3", name)) for name in contents())
    assert made[-1] == ("put", HERE.key("v3", INDEX))
