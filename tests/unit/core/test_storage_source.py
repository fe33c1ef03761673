"""Files that change while they are hashed and sent."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import attrs
import pytest

from cwtrain.errors import SnapshotChangedError, SnapshotError
from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.storage import Fault, Location, MemoryStore, upload_objects
from cwtrain.storage._buffers import Buffers
from cwtrain.storage._source import SendingStopped, Source
from cwtrain.storage.upload import PartSizes
from helpers.file_changes import (
    CHANGES,
    append,
    check_a_change_is_found,
    overwrite,
    overwrite_unseen,
    truncate,
    truncate_unseen,
)
from helpers.upload_files import describe, noise, sha256, write

HERE = Location("memory")
SHARD = "model-00001-of-00001.safetensors"
SIZE = 60_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rename_over(path: Path) -> None:
    path.with_suffix(".new").write_bytes(noise(9, SIZE))
    os.replace(path.with_suffix(".new"), path)


def unlink(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize("multipart", [True, False], ids=["multipart", "single"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_it_is_sent(tmp_path: Path, change: Callable[[Path], None], multipart: bool) -> None:
    """B21: a file that is written to between hashing and sending is an error, and nothing half is left."""
    (shard,) = write(tmp_path / "c", {SHARD: noise(1, SIZE)})
    check_a_change_is_found(shard, change, multipart=multipart)


@pytest.mark.parametrize("change", [rename_over, unlink])
def test_a_rename_does_no_harm(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """B21: the file is opened once, so what replaces it is not read."""
    files = write(tmp_path / "c", {SHARD: noise(1, SIZE), INDEX_NAME: b"{}"})
    store = MemoryStore(faults=[Fault(call="upload_part", action=lambda: change(tmp_path / "c" / SHARD))])
    sizes = PartSizes(multipart_above_bytes=20_000, part_bytes=8_000)
    upload_objects(files, store=store, location=HERE, identity="v1", sizes=sizes, record_directory=str(tmp_path))
    assert store.objects[HERE.key("v1", SHARD)].body == noise(1, SIZE)


@pytest.mark.parametrize("change", [*CHANGES[:1], append, truncate, truncate_unseen, rename_over, unlink])
def test_a_change_before_it_is_opened(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """B21: size, time and inode must be those that inspection saw."""
    files = write(tmp_path / "c", {SHARD: noise(1, SIZE), INDEX_NAME: b"{}"})
    change(tmp_path / "c" / SHARD)
    store = MemoryStore()
    with pytest.raises(SnapshotChangedError, match=SHARD):
        upload_objects(files, store=store, location=HERE, identity="v1")
    assert INDEX_NAME not in {key.rpartition("/")[2] for key in store.objects}


def test_a_copy_with_the_same_time_is_another_file(tmp_path: Path) -> None:
    files = write(tmp_path, {SHARD: noise(1, SIZE)})
    shutil.copy2(tmp_path / SHARD, tmp_path / "copy")
    os.replace(tmp_path / "copy", tmp_path / SHARD)
    with pytest.raises(SnapshotChangedError, match="another file took its place"):
        Source(files[0], part_bytes=8_000, stopped=threading.Event()).hash()


def test_a_change_while_it_is_hashed(tmp_path: Path) -> None:
    (file,) = write(tmp_path, {SHARD: noise(1, 3 << 20)})
    source = Source(file, part_bytes=1 << 20, stopped=threading.Event())
    real = source.readinto

    def readinto(offset: int, into: memoryview) -> int:
        if offset == 2 << 20:
            overwrite(tmp_path / SHARD)
        return real(offset, into)

    source.readinto = readinto  # type: ignore[method-assign]
    with pytest.raises(SnapshotChangedError, match="written to"):
        source.hash()
    source.close()


@pytest.mark.parametrize("size", [0, 1, 7_999, 8_000, 8_001, 60_000])
def test_parts_make_the_whole(tmp_path: Path, size: int) -> None:
    data = noise(size, size)
    (file,) = write(tmp_path, {SHARD: data})
    source = Source(file, part_bytes=8_000, stopped=threading.Event())
    assert source.hash().sha256 == sha256(data)
    counted: list[int] = []
    sent = []
    for part in range(source.parts):
        with source.body(part, on_bytes=counted.append, block=1_000) as body:
            sent.append(body.read())
            assert len(sent[-1]) == len(body)
    assert b"".join(sent) == data
    assert sum(counted) == size
    source.close()


def test_a_part_can_be_sent_again(tmp_path: Path, stack: ExitStack) -> None:
    """A request that is repeated starts over, and what it took before does not count."""
    data = noise(1, 10_000)
    (file,) = write(tmp_path, {SHARD: data})
    source = Source(file, part_bytes=8_000, stopped=threading.Event())
    source.hash()
    counted: list[int] = []
    body = stack.enter_context(source.body(0, on_bytes=counted.append, block=1_000))
    assert body.read(100) == data[:100]
    assert body.tell() == 100
    assert len(body) == 8_000
    assert body.seek(0, os.SEEK_END) == 8_000
    assert body.read(10) == b""
    assert body.seek(0) == 0
    assert body.read(5_000)[:10] == data[:10]
    body.seek(0)
    assert b"".join(iter(lambda: body.read(300), b"")) == data[:8_000]
    assert sum(counted) == 8_000
    with pytest.raises(ValueError, match="beginning"):
        body.seek(5)
    source.close()


def test_a_stopped_upload_stops_reading(tmp_path: Path, stack: ExitStack) -> None:
    (file,) = write(tmp_path, {SHARD: noise(1, 10_000)})
    stopped = threading.Event()
    source = Source(file, part_bytes=8_000, stopped=stopped)
    source.hash()
    body = stack.enter_context(source.body(0, on_bytes=lambda count: None))
    stopped.set()
    with pytest.raises(SendingStopped):
        body.read(1)
    with pytest.raises(SendingStopped):
        source.hash()
    source.close()


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1")
    file = describe(tmp_path / "x")
    (tmp_path / "x").unlink()
    (tmp_path / "x").symlink_to("x")
    with pytest.raises(SnapshotError, match="cannot be opened"):
        Source(file, part_bytes=8, stopped=threading.Event()).hash()


# ---- files whose SHA-256 is known


def known(path: Path, data: bytes, sha: str | None = None) -> SnapshotFile:
    (file,) = write(path, {SHARD: data})
    return attrs.evolve(file, sha256=sha or sha256(data))


class Reads:
    """Counts the bytes that a source reads."""

    def __init__(self, source: Source) -> None:
        self.count = 0
        self._real = source.readinto
        source.readinto = self  # type: ignore[method-assign, assignment]

    def __call__(self, offset: int, into: memoryview) -> int:
        size = self._real(offset, into)
        self.count += size
        return size


@pytest.mark.parametrize("size", [0, 1, 7_999, 8_000, 8_001, 60_000])
def test_a_known_file_is_read_once(tmp_path: Path, size: int) -> None:
    data = noise(size, size)
    source = Source(known(tmp_path, data), part_bytes=8_000, stopped=threading.Event())
    reads = Reads(source)
    assert source.learn().sha256 == sha256(data)
    assert reads.count == 0
    sent = bytearray()
    for part in range(source.parts):
        with source.body(part, on_bytes=lambda _: None, block=1_000) as body:
            for block in body.blocks():
                sent += block
    assert bytes(sent) == data
    assert reads.count == size
    source.close()


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("budget", [0, 8_000, 1 << 20])
@pytest.mark.parametrize("repeats", [False, True])
def test_parts_of_a_known_file_in_threads(tmp_path: Path, budget: int, repeats: bool) -> None:
    """Each part waits for its turn; with memory the next ones begin early, and any can be sent again."""
    data = noise(1, 60_000)
    source = Source(known(tmp_path, data), part_bytes=8_000, stopped=threading.Event())
    source.learn()
    buffers = Buffers(budget, after_bytes=1_000, slow=0.0)
    counted: list[int] = []
    turns = iter(range(source.parts))
    lock = threading.Lock()
    early = 0

    def send(_: int) -> tuple[int, bytes]:
        nonlocal early
        with lock:
            part = next(turns)
        with source.body(part, on_bytes=counted.append, block=1_000, buffers=buffers) as body:
            blocks = body.blocks()
            next(blocks)
            if part == 0:  # the others wait for their turn
                until(source.others_wait)
            got = [bytes(next(blocks)) for _ in range(2)]
            early += source._read_parts > part
            if repeats:
                return part, b"".join(map(bytes, body.blocks()))
            return part, data[part * 8_000 : part * 8_000 + 1_000] + b"".join([*got, *map(bytes, blocks)])

    with ThreadPoolExecutor(4) as pool:
        sent = dict(pool.map(send, range(source.parts)))
    assert b"".join(sent[part] for part in range(source.parts)) == data
    assert sum(counted) == len(data)
    assert (early > 0) == (budget > 0)
    source.close()


def test_a_part_that_was_not_asked_for_lets_the_next_one_begin(tmp_path: Path) -> None:
    data = noise(1, 20_000)
    source = Source(known(tmp_path, data), part_bytes=8_000, stopped=threading.Event())
    source.learn()
    with source.body(0, on_bytes=lambda _: None, block=1_000) as body:
        body.read(10)
    with source.body(1, on_bytes=lambda _: None, block=1_000) as body:
        assert b"".join(map(bytes, body.blocks())) == data[8_000:16_000]
        assert b"".join(map(bytes, body.blocks())) == data[8_000:16_000]
    source.close()


def test_a_turn_that_never_comes_ends_with_the_upload(tmp_path: Path) -> None:
    stopped = threading.Event()
    source = Source(known(tmp_path, noise(1, 20_000)), part_bytes=8_000, stopped=stopped)
    source.learn()
    threading.Timer(0.05, stopped.set).start()
    with pytest.raises(SendingStopped), source.body(1, on_bytes=lambda _: None):
        pass
    source.close()


@pytest.mark.parametrize("multipart", [True, False], ids=["multipart", "single"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_a_known_file_is_sent(tmp_path: Path, change: Callable[[Path], None], multipart: bool) -> None:
    """B21: also what no time shows is found, because what is sent is what is hashed."""
    check_a_change_is_found(known(tmp_path / "c", noise(1, SIZE)), change, multipart=multipart)


@pytest.mark.parametrize("part_bytes", [8_000, 1 << 20])
def test_a_digest_that_is_not_the_file_s(tmp_path: Path, part_bytes: int) -> None:
    """Whoever says what a file's SHA-256 is must be right: nothing arrives under a wrong one."""
    files = [known(tmp_path, noise(1, SIZE), sha256(b"other")), *write(tmp_path, {INDEX_NAME: b"{}"})]
    store = MemoryStore()
    sizes = PartSizes(multipart_above_bytes=part_bytes, part_bytes=part_bytes)
    with pytest.raises(SnapshotChangedError, match=SHARD):
        upload_objects(
            files, store=store, location=HERE, identity="v1", sizes=sizes, record_directory=str(tmp_path / "r")
        )
    assert set(store.objects) <= {HERE.claim_key("v1")}
    assert store.uploads == {}


def age(path: Path) -> None:
    """Let the file look as if it had been written a while ago."""
    about = os.stat(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns - 10_000_000_000))


def test_what_was_hashed_is_remembered_as_long_as_the_file_is_the_same(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(noise(1, SIZE))
    age(tmp_path / SHARD)

    def reads(file: SnapshotFile) -> int:
        source = Source(file, part_bytes=8_000, stopped=threading.Event())
        count = Reads(source)
        assert source.learn().sha256 == sha256((tmp_path / SHARD).read_bytes())
        source.close()
        return count.count

    assert reads(describe(tmp_path / SHARD)) == SIZE
    assert reads(describe(tmp_path / SHARD)) == 0
    assert reads(attrs.evolve(describe(tmp_path / SHARD), inode=0)) == SIZE, "nobody looked which file it is"
    overwrite(tmp_path / SHARD)
    assert reads(describe(tmp_path / SHARD)) == SIZE
    assert reads(describe(tmp_path / SHARD)) == SIZE, "written a moment ago: another write might not show"


def test_a_remembered_digest_that_turns_out_wrong_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / SHARD).write_bytes(noise(1, SIZE))
    age(tmp_path / SHARD)
    files = [describe(tmp_path / SHARD), *write(tmp_path, {INDEX_NAME: b"{}"})]
    Source(files[0], part_bytes=8_000, stopped=threading.Event()).hash()
    overwrite_unseen(tmp_path / SHARD)
    store = MemoryStore()
    with pytest.raises(SnapshotChangedError):
        upload_objects(files, store=store, location=HERE, identity="v1", record_directory=str(tmp_path))
    upload_objects(files, store=store, location=HERE, identity="v1", record_directory=str(tmp_path))
    assert store.objects[HERE.key("v1", SHARD)].body == (tmp_path / SHARD).read_bytes()
