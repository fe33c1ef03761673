"""A time that is over, in every step, while the store stands still, trickles or answers late.

The kind: a request under way when the time ends. It is cut, WaitTimeoutError names the step, and nothing is asked for
afterwards. Nothing here looks at a clock: the store never answers what it is asked, so that a call comes back at all
shows that it was cut.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from botocore.config import Config

from cwtrain.config import HotLoadConfig
from cwtrain.errors import WaitTimeoutError
from cwtrain.hotload import HotLoader, Publisher, SnapshotWriter
from cwtrain.plugins import Plugins
from cwtrain.storage import Location, s3_client, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.fake_service import FakeService
from helpers.requirements import require
from helpers.s3_servers import certificate
from helpers.scripted_s3 import Answer, Request, ScriptedS3, scripted_s3
from helpers.streamed import side_files
from helpers.tiny_checkpoint import write_full
from helpers.toy_trainer import ToyTrainer
from helpers.upload_files import contents, noise, write

SECONDS = 1.2
HERE = Location("weights", "run")
SHARD = "model-00001-of-00001.safetensors"
SMALL_PARTS = PartSizes(multipart_above_bytes=3 << 20, part_bytes=2 << 20)


@pytest.fixture(autouse=True)
def _settings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "US-EAST-04A")


class Stalled:
    """A store that does not answer ``operation`` on keys with ``part`` in them, until the test is over."""

    def __init__(self, operation: str, part: str = "", *, tls: Any = None) -> None:
        self.over = threading.Event()
        self.met = 0
        self.server = ScriptedS3(script=self._script)
        self._operation, self._part, self._tls = operation, part, tls

    def _script(self, request: Request, before: int) -> None:
        if not self.over.is_set() and request.operation == self._operation and self._part in request.key:
            self.met += 1
            self.over.wait(60)

    @contextlib.contextmanager
    def running(self) -> Iterator[str]:
        with scripted_s3(self.server, self._tls) as server:
            try:
                yield server.url
            finally:
                self.over.set()


def client_at(url: str, **more: Any) -> Any:
    """A client whose own time-outs are out of the question."""
    return s3_client(url, config=Config(read_timeout=50, connect_timeout=50), **more)


def loader_of(service: Any, s3: Any) -> HotLoader:
    return HotLoader(service, "dep", s3=s3, plugins=Plugins(), poll_interval=0.05)


STEPS = [
    ("ListObjectsV2", ""),
    ("PutObject", "_claims"),
    ("PutObject", ".safetensors"),
    ("HeadObject", ".safetensors"),
    ("PutObject", "_manifests"),
    ("PutObject", "index.json"),
]


@pytest.mark.parametrize(("operation", "part"), STEPS)
def test_a_publish_ends_while_the_store_stands_still(tmp_path: Path, operation: str, part: str) -> None:
    stalled, service = Stalled(operation, part), FakeService()
    with stalled.running() as url:
        loader = loader_of(service, client_at(url))
        with pytest.raises(WaitTimeoutError, match=rf"the {SECONDS:g} s of this call are over; it was .*{part}"):
            loader.within(SECONDS).publish(write_full(tmp_path / "c"), "v1")
        assert not stalled.over.is_set()
        asked = len(stalled.server.requests)
        assert stalled.met <= 2, "a request for each shard, and none again"
        assert service.count("create_hot_load") == 0
        stalled.over.set()
        done = loader.publish(tmp_path / "c", "v1")  # the same loader, whose own time is another one
        assert done.state.name == "COMPLETED"
        assert len(stalled.server.requests) > asked


@pytest.mark.parametrize("own", [True, False], ids=["own sockets", "botocore's"])
@pytest.mark.parametrize("scheme", ["http", "https"])
@pytest.mark.parametrize("operation", ["CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload"])
def test_parts_that_are_under_way_are_cut_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, scheme: str, own: bool
) -> None:
    monkeypatch.setenv("CWTRAIN_S3_OWN_SENDING", "1" if own else "0")
    tls, more = None, {}
    if scheme == "https":
        import ssl

        require("openssl")
        crt, key = certificate(tmp_path)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(crt, key)
        more = {"verify": str(crt)}
    stalled = Stalled(operation, tls=tls)
    objects = {SHARD: noise(1, 5 << 20), **contents(0)}
    files = write(tmp_path / "c", objects)
    with stalled.running() as url:
        loader = loader_of(FakeService(), client_at(url, **more))

        def upload(store: Any) -> Any:
            return upload_objects(
                files,
                store=store,
                location=HERE,
                identity="v1",
                workers=2,
                sizes=SMALL_PARTS,
                record_directory=str(tmp_path / "records"),
            )

        with pytest.raises(WaitTimeoutError):
            upload(loader.within(SECONDS * 2).store)
        assert not stalled.over.is_set()
        stalled.over.set()
        upload(loader.store)
        assert stalled.server.objects[HERE.key("v1", SHARD)][0] == objects[SHARD]
        if operation == "CompleteMultipartUpload":
            assert stalled.server.count("UploadPart") == 3, "parts that had arrived were sent again"


@pytest.mark.parametrize("step", ["_claims", "model-r", "config.json", "_manifests", "index.json"])
def test_a_writer_ends_while_the_store_stands_still(tmp_path: Path, step: str) -> None:
    stalled = Stalled("PutObject", step)
    with stalled.running() as url:
        store = loader_of(FakeService(), client_at(url)).store
        writer = SnapshotWriter(
            store, HERE, "v1", kind="full", side_files=side_files(tmp_path / "s"), deadline=SECONDS * 2
        )

        def write_all() -> None:
            writer.add("a", np.arange(1000, dtype=np.uint16))
            writer.finalise([writer.close()])

        with writer, pytest.raises(WaitTimeoutError, match=step):
            write_all()
        assert not stalled.over.is_set()


def publisher_at(tmp_path: Path, url: str, service: Any, **more: Any) -> tuple[Publisher, ToyTrainer]:
    trainer = ToyTrainer(tmp_path)
    settings = HotLoadConfig(deployment_id="dep", run_id="run", deadline=SECONDS * 3, state_dir=str(tmp_path / "state"))
    made = Publisher(
        settings,
        disk_dir=trainer.updates,
        base=trainer.base,
        client=service,
        s3=client_at(url),
        plugins=Plugins(),
        poll_interval=0.05,
        **more,
    )
    return made, trainer


@pytest.mark.parametrize("step", ["_claims/run/epoch", ".safetensors", "index.json"])
@pytest.mark.parametrize("fed", ["directory", "tensors"])
def test_a_publisher_ends_while_the_store_stands_still_and_goes_on_afterwards(
    tmp_path: Path, step: str, fed: str
) -> None:
    stalled, service = Stalled("PutObject", step), FakeService(polls=1)
    with stalled.running() as url:
        publisher, trainer = publisher_at(tmp_path, url, service, tensor_base="memory" if fed == "tensors" else None)
        tensors = {name: np.frombuffer(raw, np.uint8) for name, (_, _, raw) in trainer.tensors.items()}

        def publish() -> Any:
            if fed == "tensors":
                return publisher.publish_tensors(tensors, number=1)
            return publisher.publish_directory(path)

        path = trainer.step("full")
        with pytest.raises(WaitTimeoutError, match="are over; it was") as late:
            publish()
        assert "0.001" not in str(late.value)
        assert not stalled.over.is_set()
        assert service.count("create_hot_load") == 0
        stalled.over.set()
        assert publish().state.value == "COMPLETED"
        publisher.close()


@pytest.mark.parametrize("operation", ["HeadObject", "GetObject", "PutObject", "UploadPart", "ListObjectsV2"])
def test_a_clock_that_the_store_calls_skewed_once_is_no_end(tmp_path: Path, operation: str) -> None:
    """The refusal of a HEAD does not say why, so a GET is asked, which may find that it is over."""

    def script(request: Request, before: int) -> Answer | None:
        return Answer(403, "RequestTimeTooSkewed") if request.operation == operation and before == 1 else None

    server = ScriptedS3(script=script)
    objects = {SHARD: noise(1, 5 << 20), **contents(0)}
    with scripted_s3(server):
        store = loader_of(FakeService(), client_at(server.url)).store
        for identity in ("v1", "v2"):
            upload_objects(
                write(tmp_path / "c", objects), store=store, location=HERE, identity=identity, sizes=SMALL_PARTS
            )
            assert store.get(HERE.key(identity, SHARD)) == objects[SHARD]
            assert store.head(HERE.key(identity, SHARD)) is not None
        assert server.count(operation) > 1


class Trickling:
    """Something between the client and a store that lets the store's answers through a byte at a time."""

    def __init__(self, to: str) -> None:
        self._to = int(to.rpartition(":")[2])
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.over = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._to))
            threading.Thread(target=self._pass, args=(here, there, False), daemon=True).start()
            threading.Thread(target=self._pass, args=(there, here, True), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket, slowly: bool) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 if slowly else 65536):
                if slowly and self.over.wait(0.05):
                    break
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.over.set()
        self._listener.close()


def test_an_answer_that_trickles_in_is_cut_and_never_taken_for_a_whole_one(tmp_path: Path) -> None:
    """Each byte comes in time, so no time-out of a socket ends it. What was cut must not look like the whole answer."""
    server = ScriptedS3()
    server.objects["run/_manifests/v1.json"] = (b"[" + b"1," * 4000 + b"1]", {})
    with scripted_s3(server):
        trickle = Trickling(server.url)
        loader = loader_of(FakeService(), client_at(trickle.url)).within(SECONDS * 2)
        with pytest.raises(WaitTimeoutError, match=r"reading .*_manifests/v1\.json"):
            loader.read_manifest("v1")
        assert not trickle.over.is_set()
        trickle.close()


def test_a_client_that_has_a_limit_is_as_patient_as_before_without_one(tmp_path: Path) -> None:
    """The connections are shared: what was cut or limited for one call does not end another one."""
    server = ScriptedS3()
    server.objects["run/a"] = (b"x" * 100, {})
    with scripted_s3(server):
        loader = loader_of(FakeService(), client_at(server.url))
        limited, plain = loader.within(30.0).store, loader.store
        for _ in range(3):
            assert limited.get("run/a") == plain.get("run/a") == b"x" * 100
