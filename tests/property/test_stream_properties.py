"""Streamed objects of all sizes: what arrives is the head and then what was written, with its SHA-256."""

from __future__ import annotations

import hashlib
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from cwtrain.errors import ConnectionFailedError
from cwtrain.storage import Fault, Location, MemoryStore
from cwtrain.storage.stream import UPLOAD_KEY, StreamSizes, StreamUpload

PLACE = Location("memory", "rl")
SIZES = StreamSizes(pool_bytes=2048, block_bytes=64, part_bytes=128, single_bytes=512)


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 3000), min_size=1, max_size=6),
    heads=st.integers(0, 200),
    pieces=st.integers(1, 400),
    workers=st.integers(1, 4),
    lost=st.sampled_from(["", "put", "complete_upload"]),
    seed=st.integers(0, 1 << 16),
)
def test_what_arrives_is_what_was_written(
    sizes: list[int], heads: int, pieces: int, workers: int, lost: str, seed: int
) -> None:
    rng = random.Random(seed)
    faults = [Fault(call=lost, key="shard", error=ConnectionFailedError("lost"), after=True)] if lost else []
    store = MemoryStore(faults=faults)
    upload = StreamUpload(
        store=store,
        location=PLACE,
        identity="v1",
        upload_id="ours",
        workers=workers,
        sizes=SIZES,
        record_directory="/dev/null/nowhere",  # no record is kept where none can be
    )
    wanted: dict[str, bytes] = {}
    try:
        for number, size in enumerate(sizes):
            head, data = rng.randbytes(heads), rng.randbytes(size)
            wanted[f"shard-{number}"] = head + data
            known = size > SIZES.single_bytes and rng.random() < 0.5
            made = upload.begin(f"shard-{number}", head=head if known else None)
            for begin in range(0, size, pieces):
                made.write(data[begin : begin + pieces])
            made.finish(head)
        upload.wait()
        assert sum(map(len, upload._free)) <= SIZES.pool_bytes
        assert len(upload._free) * SIZES.block_bytes == upload._made_bytes
    finally:
        upload.close()
    found = {key.removeprefix(PLACE.prefix("v1")): one for key, one in store.objects.items() if "shard" in key}
    assert {name: one.body for name, one in found.items()} == wanted
    assert all(one.metadata[UPLOAD_KEY] == "ours" for one in found.values())
    assert {name: digest.sha256 for name, digest in upload.digests.items()} == {
        name: hashlib.sha256(data).hexdigest() for name, data in wanted.items()
    }
    assert store.uploads == {}
