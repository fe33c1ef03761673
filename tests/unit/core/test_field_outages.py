"""Outages of the store, on a clock of their own: one that ends is waited out in every step, whatever it looks like.

The kind: a store that says "later" (503, SlowDown, throttling, a conflict of two operations, a skewed clock once) or
does not answer. Nothing that has arrived is sent again, and one policy counts for every way into the bucket.
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import (
    ConnectionFailedError,
    CWTrainError,
    RequestTimeoutError,
    StorageAccessError,
    StorageError,
    WaitTimeoutError,
)
from cwtrain.hotload import HotLoader, SnapshotWriter, WeightMirror
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.plugins import Plugins
from cwtrain.storage import Fault, Location, MemoryStore, ObjectStore, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.fake_service import Clock, FakeService
from helpers.streamed import TINY, side_files
from helpers.tiny_checkpoint import write_full
from helpers.upload_files import contents, noise, write

HERE = Location("weights", "run")
SMALL_PARTS = PartSizes(multipart_above_bytes=20_000, part_bytes=10_000)
SHARD = "model-00001-of-00001.safetensors"


def refusal(status: int, code: str, **more: Any) -> StorageError:
    return StorageError(f"{status} {code}", status=status, code=code, **more)


PASSING = {
    "503": refusal(503, "ServiceUnavailable"),
    "SlowDown": refusal(503, "SlowDown"),
    "InternalError": refusal(500, "InternalError"),
    "InternalError in a 200": refusal(200, "InternalError"),
    "OperationAborted": refusal(409, "OperationAborted"),
    "RequestTimeout": refusal(400, "RequestTimeout"),
    "throttled": refusal(400, "ThrottlingException"),
    "429": refusal(429, "TooManyRequests"),
    "refused": ConnectionFailedError("connection refused"),
    "no answer": RequestTimeoutError("no answer in time"),
}


class Store(MemoryStore):
    """A store in memory that is away for so long from the first call that it meets. It counts the parts that arrive."""

    def __init__(self, clock: Clock, *, seconds: float, error: CWTrainError, call: str, key: str = "", nth: int = 1):
        self.ends: float | None = None

        def away() -> None:
            if self.ends is None:
                self.ends = clock.now + seconds
            if clock.now < self.ends:
                raise error

        super().__init__("weights", faults=[Fault(call=call, key=key, action=away, nth=nth, times=-1)])
        self.arrived: Counter[tuple[str, int]] = Counter()

    def upload_part(self, key: str, upload_id: str, number: int, body: Any) -> str:
        etag = super().upload_part(key, upload_id, number, body)
        with self._lock:
            self.arrived[key, number] += 1
        return etag


def loader_at(store: ObjectStore, clock: Clock, *, timeout: float = 60.0) -> HotLoader:
    service: Any = FakeService()
    return HotLoader(
        service, "dep", s3=store, plugins=Plugins(), timeout=timeout, clock=clock, sleep=clock.sleep, poll_interval=1.0
    )


STEPS = [
    ("list_objects", ""),
    ("put", "_claims"),
    ("put", "safetensors$"),
    ("put", "config"),
    ("head", "safetensors$"),
    ("put", "_manifests"),
    ("put", INDEX_NAME),
]


@pytest.mark.parametrize("seconds", [5, 20, 45])
@pytest.mark.parametrize(("call", "key"), STEPS)
def test_a_publish_waits_out_an_outage_in_each_step(tmp_path: Path, call: str, key: str, seconds: int) -> None:
    clock = Clock()
    store = Store(clock, seconds=seconds, error=PASSING["503"], call=call, key=key)
    done = loader_at(store, clock).publish(write_full(tmp_path / "c"), "v1")
    assert done.state.name == "COMPLETED"
    assert store.ends is not None, "the outage met nothing"
    assert store.ends <= clock.now < seconds + 60


@pytest.mark.parametrize("error", PASSING.values(), ids=PASSING)
@pytest.mark.parametrize(
    ("call", "nth"),
    [("create_upload", 1), ("upload_part", 2), ("complete_upload", 1)],
    ids=["create", "part", "complete"],
)
def test_a_shard_in_parts_is_gone_on_with(tmp_path: Path, call: str, nth: int, error: CWTrainError) -> None:
    """No byte of a part that has arrived is sent twice, and no multipart upload is given up."""
    clock = Clock()
    store = Store(clock, seconds=45, error=error, call=call, nth=nth)
    objects = {SHARD: noise(1, 55_000), **contents(0)}
    upload(tmp_path, loader_at(store, clock).store, objects)
    assert store.objects[HERE.key("v1", SHARD)].body == objects[SHARD]
    assert set(store.arrived.values()) == {1}
    assert len(store.arrived) == 6
    assert ("abort_upload", HERE.key("v1", SHARD)) not in store.calls
    assert store.uploads == {}


def upload(tmp_path: Path, store: ObjectStore, objects: dict[str, bytes]) -> Any:
    return upload_objects(
        write(tmp_path / "c", objects) if not (tmp_path / "c").exists() else described(tmp_path / "c", objects),
        store=store,
        location=HERE,
        identity="v1",
        workers=2,
        sizes=SMALL_PARTS,
        record_directory=str(tmp_path / "records"),
    )


def described(directory: Path, objects: dict[str, bytes]) -> list[Any]:
    from helpers.upload_files import describe

    return [describe(directory / name) for name in objects]


@pytest.mark.parametrize("error", [PASSING["503"], PASSING["refused"]], ids=["503", "refused"])
@pytest.mark.parametrize(
    ("call", "key"),
    [
        ("list_objects", ""),
        ("put", "_claims"),
        ("put", "model-r"),
        ("upload_part", ""),
        ("complete_upload", ""),
        ("put", "config"),
        ("put", "_manifests"),
        ("put", INDEX_NAME),
    ],
)
def test_a_stream_of_tensors_waits_out_an_outage(tmp_path: Path, call: str, key: str, error: CWTrainError) -> None:
    clock = Clock()
    store = Store(clock, seconds=45, error=error, call=call, key=key)
    loader = loader_at(store, clock)
    tensors = {"huge": np.arange(50_000, dtype=np.uint16), "small": np.zeros(10, np.float32)}
    with SnapshotWriter(
        loader.store, HERE, "v1", kind="full", side_files=side_files(tmp_path / "s"), sizes=TINY
    ) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
        writer.finalise([writer.close()])
    assert store.ends is not None
    assert clock.now >= 45
    assert set(store.arrived.values()) <= {1}
    assert not any(call == "abort_upload" for call, _ in store.calls)
    assert loader.trigger("v1").state.name == "COMPLETED"


@pytest.mark.parametrize("call", ["stream", "head", "list_objects"])
def test_reads_wait_out_an_outage(tmp_path: Path, call: str) -> None:
    """Manifests, chains and bases are read through the same store: verify, rollback, a mirror made from the bucket."""
    clock = Clock()
    store = MemoryStore("weights")
    write_full(tmp_path / "c")
    loader_at(store, clock).publish(tmp_path / "c", "v1")
    away = Store(clock, seconds=45, error=PASSING["SlowDown"], call=call)
    away.objects = store.objects
    loader = loader_at(away, clock)
    if call == "head":
        assert loader.store.head(HERE.key("v1", INDEX_NAME)) is not None
    elif call == "list_objects":
        assert len(list(loader.store.list_objects(HERE.prefix("v1")))) > 2
    else:
        assert loader.read_manifest("v1")["identity"] == "v1"
    assert clock.now >= 45
    assert loader.verify("v1").verified
    WeightMirror.from_bucket(tmp_path / "m", store=loader.store, location=HERE, identity="v1").close()


def test_a_listing_and_a_read_that_break_off_go_on_where_they_broke() -> None:
    clock = Clock()

    class Breaking(MemoryStore):
        broken = 0

        def stream(self, key: str, *, offset: int = 0, length: int | None = None) -> Any:
            for block in super().stream(key, offset=offset, length=length):
                yield block[:700_000]
                if self.broken < 3:
                    self.broken += 1
                    raise PASSING["refused"]
                yield block[700_000:]

        def list_objects(self, prefix: str) -> Any:
            for number, one in enumerate(super().list_objects(prefix)):
                if number == 2 and self.broken == 3:
                    self.broken += 1
                    raise PASSING["503"]
                yield one

    store = Breaking("weights")
    data = noise(1, 3 << 20)
    store.put("run/big", data)
    for name in "abcd":
        store.put(f"run/list/{name}", b"x")
    patient = loader_at(store, clock).store
    assert b"".join(patient.stream("run/big")) == data
    assert b"".join(patient.stream("run/big", offset=5, length=2_000_000)) == data[5:2_000_005]
    assert [one.key[-1] for one in patient.list_objects("run/list/")] == list("abcd")


def test_what_the_store_asks_for_is_the_least_pause(tmp_path: Path) -> None:
    """Retry-After; where it asks for more than the time that is left, the error says so at once."""
    clock = Clock()
    store = Store(clock, seconds=15, error=refusal(503, "SlowDown", retry_after=20.0), call="put", key="_claims")
    loader_at(store, clock).publish(write_full(tmp_path / "c"), "v1")
    assert max(clock.slept) >= 20.0
    clock = Clock()
    store = Store(clock, seconds=15, error=refusal(503, "SlowDown", retry_after=90.0), call="put", key="_claims")
    with pytest.raises(WaitTimeoutError, match=r"asks to wait 90 s, which is more than the 60 s left"):
        loader_at(store, clock).publish(write_full(tmp_path / "c"), "v2")
    assert clock.slept == []


@pytest.mark.parametrize(("times", "ends"), [(1, False), (2, True)])
def test_a_clock_that_is_called_skewed_once_is_no_end(tmp_path: Path, times: int, ends: bool) -> None:
    skewed = StorageAccessError("clock", status=403, code="RequestTimeTooSkewed")
    clock = Clock()
    store = MemoryStore("weights", faults=[Fault(call="put", key=INDEX_NAME, error=skewed, times=times)])
    loader = loader_at(store, clock)
    if ends:
        with pytest.raises(StorageAccessError, match="clock"):
            loader.publish(write_full(tmp_path / "c"), "v1")
    else:
        assert loader.publish(write_full(tmp_path / "c"), "v1").state.name == "COMPLETED"


@pytest.mark.parametrize(
    "final",
    [
        refusal(403, "AccessDenied"),
        refusal(400, "InvalidRequest"),
        refusal(501, "NotImplemented"),
    ],
    ids=["denied", "invalid", "not implemented"],
)
def test_what_does_not_pass_is_an_error_at_once(tmp_path: Path, final: StorageError) -> None:
    clock = Clock()
    store = MemoryStore("weights", faults=[Fault(call="head", key="_manifests|safetensors", error=final, times=-1)])
    with pytest.raises(StorageError) as caught:
        loader_at(store, clock).publish(write_full(tmp_path / "c"), "v1")
    assert caught.value is final
    assert clock.slept == []


# -- an outage that does not end ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [PASSING["503"], PASSING["refused"]], ids=["503", "refused"])
def test_a_time_that_ends_in_an_outage_names_the_step_and_what_the_store_said(
    tmp_path: Path, error: CWTrainError
) -> None:
    clock = Clock()
    store = Store(clock, seconds=1e9, error=error, call="put", key=INDEX_NAME)
    wanted = rf"the 20 s of this call are over; it was uploading s3://weights/.*{INDEX_NAME}: {error}"
    with pytest.raises(WaitTimeoutError) as late:
        loader_at(store, clock).within(20.0).publish(write_full(tmp_path / "c"), "v1")
    assert re.fullmatch(wanted, late.value.message)
    assert 20 <= clock.now < 21


def test_a_request_that_is_cut_because_the_time_is_over_is_no_fault_of_the_store(tmp_path: Path) -> None:
    """What a library says of the connection that was cut is no reason; one that the store gave before is."""
    clock = Clock()
    cut = ConnectionFailedError("Connection was closed before we received a valid response")

    def over() -> None:
        clock.sleep(30.0)
        raise cut

    step = "the 20 s of this call are over; it was uploading s3://weights/.*config.json"
    before = Fault(call="put", key="config.json", error=PASSING["503"])
    for name, faults, ending in (("v1", [], ""), ("v2", [before], ": 503 ServiceUnavailable")):
        last = Fault(call="put", key="config.json", action=over)
        loader = loader_at(MemoryStore("weights", faults=[*faults, last]), clock)
        with pytest.raises(WaitTimeoutError) as late:
            loader.within(20.0).publish(write_full(tmp_path / name), name, workers=1)
        assert re.fullmatch(step + ending, late.value.message)


def test_an_outage_that_does_not_end_is_given_up_after_timeout(tmp_path: Path) -> None:
    clock = Clock()
    store = Store(clock, seconds=1e9, error=PASSING["503"], call="put", key=INDEX_NAME)
    with pytest.raises(WaitTimeoutError, match=r"index.json: 503 ServiceUnavailable; gave up after \d+ tries in"):
        loader_at(store, clock, timeout=300.0).publish(write_full(tmp_path / "c"), "v1")
    assert 300 <= clock.now < 310


def test_a_store_that_has_never_answered_is_given_up_after_a_minute(tmp_path: Path) -> None:
    """Most often its address is wrong: then the error is the connection's own, with its hint."""
    clock = Clock()
    gone = ConnectionFailedError("no such host", hint="check CW_S3_ENDPOINT")
    store = Store(clock, seconds=1e9, error=gone, call="list_objects")
    with pytest.raises(ConnectionFailedError, match="no such host; gave up after"):
        loader_at(store, clock, timeout=1800.0).publish(write_full(tmp_path / "c"), "v1")
    assert 60 <= clock.now < 70


@pytest.mark.parametrize("step", ["upload_part", "complete_upload"])
@pytest.mark.parametrize("known", [False, True], ids=["hashed first", "known SHA-256"])
def test_the_next_upload_goes_on_with_the_parts_that_arrived(tmp_path: Path, step: str, known: bool) -> None:
    """After the last failure, too: the parts are kept, and what has arrived is not sent again."""
    clock = Clock()
    objects = {SHARD: noise(1, 55_000), **contents(0)}
    store = Store(clock, seconds=1e9, error=PASSING["503"], call=step, nth=4 if step == "upload_part" else 1)
    if known:  # then the parts that are there are read all the same: those after them are hashed after them
        upload(tmp_path, MemoryStore("weights"), objects)
    with pytest.raises(WaitTimeoutError):
        upload(tmp_path, loader_at(store, clock).store, objects)
    assert len(store.uploads) == 1
    before = dict(store.arrived)
    assert before
    store.ends = 0.0  # it is back
    report = upload(tmp_path, loader_at(store, clock).store, objects)
    assert store.objects[HERE.key("v1", SHARD)].body == objects[SHARD]
    assert set(store.arrived.values()) == {1}
    assert store.uploads == {}
    assert report.uploaded_bytes <= sum(map(len, objects.values())) - 10_000 * (len(before) - 1)
    assert list((tmp_path / "records").glob("*.json")) == []


@pytest.mark.parametrize("change", ["the upload is gone", "other bytes", "other parts"])
def test_parts_that_are_of_no_use_any_more_are_sent_anew(tmp_path: Path, change: str) -> None:
    clock = Clock()
    objects = {SHARD: noise(1, 55_000), **contents(0)}
    store = Store(clock, seconds=1e9, error=PASSING["503"], call="upload_part", nth=4)
    with pytest.raises(WaitTimeoutError):
        upload(tmp_path, loader_at(store, clock).store, objects)
    store.ends = 0.0  # it is back
    (left,) = store.uploads
    if change == "the upload is gone":
        del store.uploads[left]
    elif change == "other parts":
        store.uploads[left].parts = dict.fromkeys(store.uploads[left].parts, b"another part")
    else:
        (record,) = (tmp_path / "records").glob("*.json")
        record.write_text(record.read_text().replace('"sha256": "', '"sha256": "f'))
    upload(tmp_path, loader_at(store, clock).store, objects)
    assert store.objects[HERE.key("v1", SHARD)].body == objects[SHARD]
    assert not any(upload_id == left for upload_id in store.uploads)


def test_a_refusal_still_gives_the_parts_up(tmp_path: Path) -> None:
    clock = Clock()
    denied = StorageAccessError("denied", status=403, code="AccessDenied")
    store = Store(clock, seconds=70, error=denied, call="upload_part", nth=3)
    with pytest.raises(StorageAccessError):
        upload(tmp_path, loader_at(store, clock).store, {SHARD: noise(1, 55_000), **contents(0)})
    assert store.uploads == {}


def test_a_complete_whose_answer_is_lost_and_whose_repeat_fails_for_ever_was_made(tmp_path: Path) -> None:
    """Ceph answers 500 to the repeat: the object is looked for before each."""
    clock = Clock()
    objects = {SHARD: noise(1, 55_000), **contents(0)}
    failed = refusal(500, "InternalError")
    lost = Fault(call="complete_upload", error=ConnectionFailedError("lost"), after=True)
    store = MemoryStore("weights", faults=[lost, Fault(call="complete_upload", error=failed, nth=2, times=-1)])
    upload(tmp_path, loader_at(store, clock).store, objects)
    assert store.objects[HERE.key("v1", SHARD)].body == objects[SHARD]
    assert clock.now < 10


def test_no_try_is_made_after_somebody_stopped_the_upload(tmp_path: Path) -> None:
    """Ctrl-C in an outage: the threads that wait for the store end, and ask for nothing more."""
    met = threading.Event()

    def away() -> None:
        met.set()
        raise PASSING["503"]

    store = MemoryStore("weights", faults=[Fault(call="put", key="safetensors", action=away, times=-1)])
    service: Any = FakeService()
    loader = HotLoader(service, "dep", s3=store, plugins=Plugins())

    def interrupt(event: Any) -> None:
        if event.upload is not None and met.is_set():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        loader.publish(write_full(tmp_path / "c"), "v1", on_progress=interrupt)
    asked = len(store.calls)
    for thread in threading.enumerate():
        if thread.name.startswith("cwtrain-upload"):
            thread.join(60)
            assert not thread.is_alive()
    assert len(store.calls) == asked
    assert service.count("create_hot_load") == 0
