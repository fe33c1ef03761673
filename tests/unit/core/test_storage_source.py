"""Files that change while they are hashed and sent."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cwtrain.errors import SnapshotChangedError, SnapshotError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.storage import Fault, Location, MemoryStore, upload_objects
from cwtrain.storage._source import SendingStopped, Source
from cwtrain.storage.upload import PartSizes
from helpers.upload_files import describe, noise, sha256, write

HERE = Location("memory")
SHARD = "model-00001-of-00001.safetensors"
SIZE = 60_000


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def overwrite(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(50_000)
        file.write(b"Z" * 1024)


def overwrite_unseen(path: Path) -> None:
    """As through a memory map, or on a file system with coarse times: the time stays."""
    about = os.stat(path)
    overwrite(path)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def append(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def truncate(path: Path) -> None:
    os.truncate(path, 20_000)


def truncate_unseen(path: Path) -> None:
    about = os.stat(path)
    os.truncate(path, 20_000)
    os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))


def rename_over(path: Path) -> None:
    path.with_suffix(".new").write_bytes(noise(9, SIZE))
    os.replace(path.with_suffix(".new"), path)


def unlink(path: Path) -> None:
    path.unlink()


CHANGES = [overwrite, overwrite_unseen, append, truncate, truncate_unseen]


@pytest.mark.parametrize("multipart", [True, False], ids=["multipart", "single"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_it_is_sent(tmp_path: Path, change: Callable[[Path], None], multipart: bool) -> None:
    """B21: a file that is written to between hashing and sending is an error, and nothing half is left."""
    files = write(tmp_path / "c", {SHARD: noise(1, SIZE), INDEX_NAME: b"{}"})
    call = "upload_part" if multipart else "put"
    store = MemoryStore(faults=[Fault(call=call, key="safetensors", action=lambda: change(tmp_path / "c" / SHARD))])
    sizes = PartSizes(multipart_above_bytes=20_000 if multipart else 1 << 20, part_bytes=8_000)
    with pytest.raises(SnapshotChangedError, match="changed after it was inspected") as changed:
        # One worker sends in order, so the change is always ahead of what was sent.
        upload_objects(
            files,
            store=store,
            location=HERE,
            identity="v1",
            workers=1,
            sizes=sizes,
            record_directory=str(tmp_path),
        )
    assert changed.value.file == str(tmp_path / "c" / SHARD)
    assert store.uploads == {}
    assert set(store.objects) == {HERE.claim_key("v1")}


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
