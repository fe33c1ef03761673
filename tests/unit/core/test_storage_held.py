"""Files that their owner holds while they are sent: read once for their SHA-256, and sent from where they lie."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from cwtrain.errors import SnapshotChangedError
from cwtrain.models.snapshot import SnapshotFile
from cwtrain.storage import Location
from cwtrain.storage._part_bodies import FileSpan, HeldBody
from cwtrain.storage._source import SendingStopped, Source
from helpers.file_changes import CHANGES, check_a_change_is_found
from helpers.upload_files import noise, sha256, write

HERE = Location("memory")
SHARD = "model-00001-of-00001.safetensors"
SIZE = 60_000


def held(directory: Path, data: bytes) -> SnapshotFile:
    (file,) = write(directory, {SHARD: data})
    return attrs.evolve(file, held=True)


def bytes_of(span: FileSpan | memoryview) -> bytes:
    return os.pread(span.fd, span.size, span.offset) if isinstance(span, FileSpan) else bytes(span)


@pytest.mark.parametrize("size", [0, 1, 7_999, 8_000, 8_001, SIZE])
def test_it_is_read_once_and_sent_from_where_it_lies(tmp_path: Path, size: int) -> None:
    data = noise(size, size)
    source = Source(held(tmp_path, data), part_bytes=8_000, stopped=threading.Event())
    read: list[int] = []
    real = source.readinto

    def readinto(offset: int, into: memoryview) -> int:
        read.append(real(offset, into))
        return read[-1]

    source.readinto = readinto  # type: ignore[method-assign]
    assert source.learn().sha256 == sha256(data)
    counted: list[int] = []
    sent = []
    for part in range(source.parts):
        with source.body(part, on_bytes=counted.append, block=1_000) as body:
            assert isinstance(body, HeldBody)
            for span in body.spans():
                assert isinstance(span, FileSpan)
                assert 0 < len(span) <= 1_000
                sent.append(bytes_of(span))
            assert body.tell() == len(body)
    assert b"".join(sent) == data
    assert sum(counted) == sum(read) == size
    source.close()


def test_bytes_of_ours_and_ranges_in_their_order(tmp_path: Path) -> None:
    data, head = noise(1, SIZE), noise(2, 1_234)
    file = attrs.evolve(
        held(tmp_path, data), head=head, ranges=((40_000, 9_000), (0, 25_000)), size_bytes=len(head) + 34_000
    )
    source = Source(file, part_bytes=1 << 20, stopped=threading.Event())
    wanted = head + data[40_000:49_000] + data[:25_000]
    assert source.learn().sha256 == sha256(wanted)
    with source.body(0, on_bytes=lambda _: None, block=1_000) as body:
        assert isinstance(body, HeldBody)
        assert b"".join(map(bytes_of, body.spans())) == wanted
        assert b"".join(map(bytes, body.blocks())) == wanted, "as over TLS"
        body.seek(0)
        assert body.read() == wanted, "as boto3 reads it"
    source.close()


def test_it_is_sent_again_from_its_beginning(tmp_path: Path) -> None:
    data = noise(1, 8_000)
    source = Source(held(tmp_path, data), part_bytes=8_000, stopped=threading.Event())
    source.learn()
    counted: list[int] = []
    with source.body(0, on_bytes=counted.append, block=3_000) as body:
        assert isinstance(body, HeldBody)
        next(body.spans())
        assert b"".join(map(bytes_of, body.spans())) == data
        assert counted == [3_000, -3_000, 3_000, 3_000, 2_000]
    source.close()


def test_a_stopped_upload_stops(tmp_path: Path) -> None:
    stopped = threading.Event()
    source = Source(held(tmp_path, noise(1, 8_000)), part_bytes=8_000, stopped=stopped)
    source.learn()
    with source.body(0, on_bytes=lambda _: None, block=1_000) as body:
        assert isinstance(body, HeldBody)
        spans = body.spans()
        next(spans)
        stopped.set()
        with pytest.raises(SendingStopped):
            next(spans)
    source.close()


def test_a_request_that_hangs_reads_no_other_file(tmp_path: Path) -> None:
    """An upload that is interrupted leaves a hanging thread behind; its file's number is another file's by then."""
    data = noise(1, 8_000)
    source = Source(held(tmp_path, data), part_bytes=8_000, stopped=threading.Event())
    source.learn()
    with source.body(0, on_bytes=lambda _: None, block=4_000) as body:
        assert isinstance(body, HeldBody)
        span = next(body.spans())
        source.close()
        (tmp_path / "other").write_bytes(bytes(8_000))
        others = [os.open(tmp_path / "other", os.O_RDONLY) for _ in range(3)]
        try:
            assert bytes_of(span) == data[:4_000]
        finally:
            for fd in others:
                os.close(fd)
    assert isinstance(span, FileSpan)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(span.fd)


@pytest.mark.parametrize("multipart", [True, False], ids=["multipart", "single"])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_while_it_is_sent(tmp_path: Path, change: Callable[[Path], None], multipart: bool) -> None:
    """B21: an owner that breaks its word is found out, and nothing half is left."""
    check_a_change_is_found(held(tmp_path / "c", noise(1, SIZE)), change, multipart=multipart)


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_after_the_last_byte_was_taken(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """What the kernel sends from the file may leave later, so the file is looked at once more when all has arrived."""
    source = Source(held(tmp_path, noise(1, SIZE)), part_bytes=SIZE, stopped=threading.Event())
    source.learn()

    def send() -> None:
        with source.body(0, on_bytes=lambda _: None) as body:
            body.read()
            change(tmp_path / SHARD)

    with pytest.raises(SnapshotChangedError, match=SHARD):
        send()
    source.close()
