"""Uploads for all inputs: any object made of any pieces in any parts, resumed from any part of the way."""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.storage import Location, MemoryStore, plan_upload, upload_objects
from cwtrain.storage._source import Source
from cwtrain.storage.upload import PartSizes
from helpers.upload_files import describe, noise, sha256

HERE = Location("memory")
FILE_BYTES = 500


@settings(deadline=None, max_examples=60)
@given(
    head=st.binary(max_size=60),
    ranges=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 100)), max_size=5),
    part_bytes=st.integers(1, 200),
    reads=st.lists(st.integers(1, 50), min_size=1, max_size=4),
    known=st.booleans(),
)
def test_parts_of_any_object_make_the_whole(
    head: bytes, ranges: list[tuple[int, int]], part_bytes: int, reads: list[int], known: bool
) -> None:
    data = noise(1, FILE_BYTES)
    wanted = head + b"".join(data[offset : offset + length] for offset, length in ranges)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "shard")
        path.write_bytes(data)
        about = os.stat(path)
        file = SnapshotFile(
            name="shard",
            size_bytes=len(wanted),
            path=str(path),
            head=head,
            ranges=tuple(ranges),
            file_bytes=FILE_BYTES,
            mtime_ns=about.st_mtime_ns,
            inode=about.st_ino,
            device=about.st_dev,
            sha256=sha256(wanted) if known else None,
        )
        source = Source(file, part_bytes=part_bytes, stopped=threading.Event())
        assert source.learn().sha256 == sha256(wanted)
        sent = bytearray()
        for part in range(source.parts):
            with source.body(part, on_bytes=lambda count: None, block=7) as body:
                body.read(reads[0])
                body.seek(0)  # a repeated request
                turn = 0
                while piece := body.read(reads[turn % len(reads)]):
                    sent += piece
                    turn += 1
        source.close()
    assert bytes(sent) == wanted


@settings(deadline=None, max_examples=40)
@given(
    sizes=st.lists(st.integers(0, 300), min_size=1, max_size=6),
    there=st.sets(st.integers(0, 5)),
    workers=st.integers(1, 4),
    part_bytes=st.integers(20, 100),
)
def test_any_partial_upload_is_completed(sizes: list[int], there: set[int], workers: int, part_bytes: int) -> None:
    objects = {f"object-{number}.json": noise(number, size) for number, size in enumerate(sizes)} | {INDEX_NAME: b"{}"}
    store = MemoryStore()
    present = {name for number, name in enumerate(objects) if number in there and name != INDEX_NAME}
    for name in present:
        store.put(HERE.key("v1", name), objects[name], metadata={"cwtrain-sha256": sha256(objects[name])})
    with tempfile.TemporaryDirectory() as directory:
        files = []
        for name, data in objects.items():
            Path(directory, name).write_bytes(data)
            files.append(describe(Path(directory, name)))
        plan = plan_upload(files, store=store, location=HERE, identity="v1")
        report = upload_objects(
            files,
            store=store,
            location=HERE,
            identity="v1",
            workers=workers,
            sizes=PartSizes(multipart_above_bytes=100, part_bytes=part_bytes),
            record_directory=directory + "/record",
        )
    assert set(plan.existing) == set(report.reused) == present
    assert plan.missing == report.uploaded
    assert plan.upload_bytes == report.uploaded_bytes
    assert {name: store.get(HERE.key("v1", name)) for name in objects} == objects
    assert store.uploads == {}
