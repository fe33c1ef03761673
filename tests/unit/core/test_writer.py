"""The streaming writer against a bucket in memory: what it writes, from which bases, and how little of it at once."""

from __future__ import annotations

import json
import pickle
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cwtrain.errors import ConfigError, SnapshotError, SnapshotLayoutError
from cwtrain.hotload import (
    CheckpointBase,
    MemoryBase,
    MirrorBase,
    SnapshotWriter,
    WeightMirror,
    inspect_snapshot,
    new_upload_id,
)
from cwtrain.hotload._writer_arguments import delta_bytes, encoders, piece_bytes, stream_sizes
from cwtrain.hotload.bases import BaseTensors, TensorType
from cwtrain.hotload.delta import write_delta
from cwtrain.hotload.verify import verify_snapshot
from cwtrain.hotload.writer import ShardReceipt, WrittenSnapshot
from cwtrain.snapshots._parallel import usable_cores
from cwtrain.storage import Location, MemoryStore
from helpers.streamed import (
    INDEX,
    TINY,
    download,
    filled,
    make_state,
    names_in,
    next_state,
    raw,
    side_files,
    tensors_in,
)
from helpers.streamed import write as write_with

PLACE = Location("memory", "rl")


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def sides(tmp_path: Path) -> Path:
    return side_files(tmp_path / "sides")


def write(store: MemoryStore, identity: str, state: dict[str, Any], **options: Any) -> WrittenSnapshot:
    return write_with(store, PLACE, identity, state, **{"sizes": TINY, "run_id": "run", **options})


def test_a_full_snapshot_is_what_inspection_and_verification_take(
    store: MemoryStore, sides: Path, tmp_path: Path
) -> None:
    state = make_state(1)
    written = write(store, "v1", state, kind="full", side_files=sides, version=1, deployment_id="d")
    assert tensors_in(store, PLACE, "v1") == {name: raw(tensor) for name, tensor in state.items()}
    checked = inspect_snapshot(download(store, PLACE, "v1", tmp_path / "v1"), verify="full")
    assert (checked.tensors, checked.tensor_bytes) == (len(state), written.raw_bytes)
    assert checked.warnings == ()
    assert verify_snapshot(store, PLACE, "v1").problems == ()
    names = names_in(store, PLACE, "v1")
    assert {"config.json", "tokenizer.json", INDEX} < set(names)
    assert "optimizer.pt" not in names
    assert all(name.startswith("model-r00000-0000") for name in names if name.endswith(".safetensors"))
    manifest = json.loads(store.get(PLACE.manifest_key("v1")))
    assert (manifest["type"], manifest["run_id"], manifest["version"], manifest["deployment_id"]) == (
        "FULL",
        "run",
        1,
        "d",
    )
    assert set(manifest["objects"]) == set(names)
    assert manifest["tensors"].keys() == state.keys()


def test_the_order_of_writes(store: MemoryStore, sides: Path) -> None:
    """The claim before any byte of weights, the manifest before the index, the index last."""
    write(store, "v1", make_state(1), kind="full", side_files=sides)
    keys = [key for call, key in store.calls if call in ("put", "create_upload", "complete_upload")]
    assert keys[0] == PLACE.claim_key("v1")
    assert keys[-2:] == [PLACE.manifest_key("v1"), PLACE.key("v1", INDEX)]


def test_objects_say_whose_they_are(store: MemoryStore, sides: Path) -> None:
    upload_id = new_upload_id()
    write(store, "v1", make_state(1), kind="full", side_files=sides, upload_id=upload_id)
    for name in names_in(store, PLACE, "v1"):
        assert store.objects[PLACE.key("v1", name)].metadata["cwtrain-upload"] == upload_id
    assert json.loads(store.get(PLACE.claim_key("v1")))["uuid"] == upload_id


def test_a_large_object_goes_in_parts_and_its_first_one_last(store: MemoryStore, sides: Path) -> None:
    """The header belongs to the first part, and what it says is known when the last frame is there."""
    state = {"huge": np.random.default_rng(1).integers(0, 256, 400_000, dtype=np.uint8), "small": np.zeros(3)}
    sent: list[int] = []
    upload_part = store.upload_part

    def noting(key: str, upload_id: str, number: int, body: Any) -> str:
        sent.append(number)
        return upload_part(key, upload_id, number, body)

    store.upload_part = noting  # type: ignore[method-assign]
    write(store, "v1", state, kind="full", side_files=sides)
    assert len(sent) > 20
    assert sent[-1] == 1
    assert sorted(sent) == list(range(1, len(sent) + 1))
    assert tensors_in(store, PLACE, "v1") == {name: raw(tensor) for name, tensor in state.items()}
    assert verify_snapshot(store, PLACE, "v1").problems == ()
    assert store.uploads == {}


def test_a_delta_is_what_write_delta_writes(store: MemoryStore, sides: Path, tmp_path: Path) -> None:
    """The same frames, tensor by tensor, as from two directories: one encoder, however the tensors come.

    With two workers, as pieces are of the same size then.
    """
    old, new = make_state(1, scale=8), next_state(make_state(1, scale=8), 2)
    base = filled(MemoryBase(), store, PLACE, old, sides)
    written = write(store, "v1", new, kind="delta", base=base, workers=2)
    write(store, "w1", new, kind="full", side_files=sides)
    before, after = (download(store, PLACE, name, tmp_path / name) for name in ("v0", "w1"))
    stats = write_delta(before, after, tmp_path / "delta", version=1, base_version=0)
    assert (written.changed_tensors, written.changed_bytes) == (stats.changed_tensors, stats.changed_bytes)
    assert frames(download(store, PLACE, "v1", tmp_path / "v1")) == frames(tmp_path / "delta")
    assert tensors_in(store, PLACE, "v1", old) == {name: raw(tensor) for name, tensor in new.items()}
    checked = inspect_snapshot(tmp_path / "v1", previous_identity="v0", verify="full", base=before)
    assert (checked.version, checked.base_version) == ("v1", "v0")


def frames(directory: Path) -> dict[str, bytes]:
    found = {}
    for path in directory.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + length])
        header.pop("__metadata__")
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            found[name] = data[8 + length + begin : 8 + length + end]
    return found


@pytest.mark.parametrize("kind", ["memory", "mirror", "checkpoint"])
def test_deltas_from_each_kind_of_base(store: MemoryStore, sides: Path, tmp_path: Path, kind: str) -> None:
    """Memory and mirror follow from version to version; a checkpoint stays, so its deltas hold all that changed."""
    states = [make_state(1)]
    for seed in (2, 3, 4):
        states.append(next_state(states[-1], seed))
    filled(MemoryBase(), store, PLACE, states[0], sides)
    start = download(store, PLACE, "v0", tmp_path / "v0")
    base: BaseTensors
    if kind == "memory":
        base = MemoryBase()
        base.load(start, "v0")
    elif kind == "mirror":
        base = MirrorBase(WeightMirror.create(start, tmp_path / "mirror"), "v0")
    else:
        base = CheckpointBase(start, "v0")
    for number in (1, 2, 3):
        write(store, f"v{number}", states[number], kind="delta", base=base, version=number)
        previous = 0 if kind == "checkpoint" else number - 1
        index = json.loads(store.get(PLACE.key(f"v{number}", INDEX)))
        assert index["metadata"]["base_version"] == f"v{previous}"
        assert tensors_in(store, PLACE, f"v{number}", states[previous]) == {
            name: raw(tensor) for name, tensor in states[number].items()
        }
    if isinstance(base, MirrorBase):
        mirror = base._mirror
        assert mirror.version == "3"
        mirror.verify()
        assert WeightMirrorBytes(mirror) == {name: raw(tensor) for name, tensor in states[3].items()}
        mirror.close()


def WeightMirrorBytes(mirror: WeightMirror) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    for tensor in mirror._checkpoint().tensors.values():
        with tensor.open() as file:
            found[tensor.name] = bytes(file.read(tensor.offset, tensor.size_bytes))
    return found


def test_a_full_snapshot_between_deltas_cuts_the_chain_and_fills_the_base(
    store: MemoryStore, sides: Path, tmp_path: Path
) -> None:
    states = [make_state(1)]
    for seed in (2, 3, 4):
        states.append(next_state(states[-1], seed, 0.3))
    base = filled(MemoryBase(), store, PLACE, states[0], sides)
    mirror = WeightMirror.create(download(store, PLACE, "v0", tmp_path / "v0"), tmp_path / "mirror")
    for kept, prefix in ((base, "a"), (MirrorBase(mirror, "v0"), "b")):
        write(store, f"{prefix}1", states[1], kind="delta", base=kept)
        write(store, f"{prefix}2", states[2], kind="full", base=kept, side_files=sides)
        write(store, f"{prefix}3", states[3], kind="delta", base=kept)
        assert tensors_in(store, PLACE, f"{prefix}2") == {name: raw(tensor) for name, tensor in states[2].items()}
        assert tensors_in(store, PLACE, f"{prefix}3", states[2]) == {
            name: raw(tensor) for name, tensor in states[3].items()
        }
    mirror.verify()
    mirror.close()


def test_an_empty_delta_is_reported_and_leaves_nothing(store: MemoryStore, sides: Path) -> None:
    """A version in which nothing changed is skipped, and the base goes on from where it was."""
    state = make_state(1)
    base = filled(MemoryBase(), store, PLACE, state, sides)
    before = dict(store.objects)
    written = write(store, "v1", state, kind="delta", base=base)
    assert (written.empty, written.changed_tensors, written.uploaded_bytes) == (True, 0, 0)
    assert store.objects == before
    assert base.identity == "v0"
    after = next_state(state, 2)
    assert not write(store, "v2", after, kind="delta", base=base).empty
    assert tensors_in(store, PLACE, "v2", state) == {name: raw(tensor) for name, tensor in after.items()}


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_the_tensor_may_be_changed_when_add_returns(store: MemoryStore, sides: Path, workers: int) -> None:
    """B18's kind: trainers gather into one buffer again and again, so nothing reads it once add has returned."""
    old = {f"t{number}": np.full(1 << 20, number, np.uint8) for number in range(12)}
    base = filled(MemoryBase(), store, PLACE, old, sides)
    buffer = np.empty(1 << 20, np.uint8)
    with SnapshotWriter(store, PLACE, "v1", kind="delta", base=base, workers=workers) as writer:
        for number, name in enumerate(old):
            buffer[:] = number + 100
            writer.add(name, buffer)
            buffer[:] = 0
        writer.finalise([writer.close()])
    assert tensors_in(store, PLACE, "v1", old) == {
        name: bytes([number + 100]) * (1 << 20) for number, name in enumerate(old)
    }


def test_a_small_model_takes_no_other_thread_than_the_callers(store: MemoryStore, sides: Path) -> None:
    """Threads that take turns at the interpreter cost a trainer more than they save: below 1 GiB one encodes."""
    old, new = make_state(1, scale=8), next_state(make_state(1, scale=8), 2)
    base = filled(MemoryBase(), store, PLACE, old, sides)
    with SnapshotWriter(store, PLACE, "v1", kind="delta", base=base, sizes=TINY) as writer:
        for name, tensor in new.items():
            writer.add(name, tensor)
        assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("cwtrain-encode")]
        writer.finalise([writer.close()])
    assert encoders(None, 320 << 20, work_bytes=200 << 30) == min(8, usable_cores())
    assert encoders(3, 320 << 20, work_bytes=1) == 3


@pytest.mark.parametrize(("workers", "piece"), [(1, 2 << 20), (2, 1 << 20)])
def test_a_thread_that_encodes_alone_takes_larger_pieces(
    store: MemoryStore, sides: Path, workers: int, piece: int
) -> None:
    """Differences around the edges of pieces of either size come through, and the memory for them is set aside."""
    size = 5 * (1 << 20) + 12345
    old = {"t": np.zeros(size, np.uint8)}
    new = {"t": old["t"].copy()}
    edges = [edge + by for edge in range(0, size, 1 << 20) for by in (-1, 0, 1)]
    new["t"][[place for place in (*edges, size - 1) if 0 <= place < size]] = 7
    base = filled(MemoryBase(), store, PLACE, old, sides)
    write(store, "v1", new, kind="delta", base=base, workers=workers)
    assert tensors_in(store, PLACE, "v1", old) == {"t": new["t"].tobytes()}
    assert piece_bytes(320 << 20, workers) == piece
    assert piece_bytes(128 << 20, workers) == 1 << 20
    least = 64 + 16 * max(workers, piece >> 20)
    assert stream_sizes(320 << 20, workers).pool_bytes == (320 - least) << 20


@pytest.mark.parametrize("shared", [False, True], ids=["a rank's own", "shared"])
def test_a_rank_is_given_threads_for_what_it_compares(shared: bool) -> None:
    """A base in a rank's memory has that rank's tensors only; one on the disk has those of all ranks."""

    class Declared(MemoryBase):
        @property
        def shared(self) -> bool:
            return shared

        def types(self) -> dict[str, TensorType]:
            return {f"t{number}": TensorType("BF16", (1 << 30,), 2 << 30) for number in range(4)}

    assert delta_bytes(Declared(), 4) == (2 << 30 if shared else 8 << 30)


def test_a_checkpoint_on_the_disk_is_streamed_without_a_copy(store: MemoryStore, sides: Path, tmp_path: Path) -> None:
    """So a chain is cut from a mirror: each byte is read, hashed and sent once."""
    old, new = make_state(1, scale=8), next_state(make_state(1, scale=8), 2)
    filled(MemoryBase(), store, PLACE, old, sides)
    start = download(store, PLACE, "v0", tmp_path / "v0")
    with WeightMirror.create(start, tmp_path / "mirror") as mirror:
        write(store, "v1", new, kind="delta", base=MirrorBase(mirror, "v0"), version=1)
        with SnapshotWriter(store, PLACE, "v1-full", kind="full", side_files=mirror.path, sizes=TINY) as writer:
            writer.add_checkpoint(mirror.path)
            written = writer.finalise([writer.close()])
        assert written.checksums == mirror.checksums
    assert tensors_in(store, PLACE, "v1-full") == {name: raw(tensor) for name, tensor in new.items()}
    checkpoint = download(store, PLACE, "v1-full", tmp_path / "v1-full")
    with SnapshotWriter(store, PLACE, "v2", kind="delta", base=CheckpointBase(start, "v0"), sizes=TINY) as writer:
        writer.add_checkpoint(checkpoint)
        writer.finalise([writer.close()])
    assert tensors_in(store, PLACE, "v2", old) == tensors_in(store, PLACE, "v1-full")


@pytest.mark.parametrize("encoder", ["sequences", "public"])
def test_with_and_without_the_faster_encoder(
    store: MemoryStore, sides: Path, monkeypatch: pytest.MonkeyPatch, encoder: str
) -> None:
    monkeypatch.setenv("CWTRAIN_ZSTD_ENCODER", encoder)
    old, new = make_state(1, scale=8), next_state(make_state(1, scale=8), 2)
    base = filled(MemoryBase(), store, PLACE, old, sides)
    write(store, "v1", new, kind="delta", base=base, workers=3)
    assert tensors_in(store, PLACE, "v1", old) == {name: raw(tensor) for name, tensor in new.items()}


def test_shards_grow_or_have_the_size_that_is_asked_for(store: MemoryStore, sides: Path) -> None:
    state = {f"t{number}": np.zeros(10_000, np.uint8) for number in range(20)}
    write(store, "v1", state, kind="full", side_files=sides, shard_bytes=30_000)
    assert len([name for name in names_in(store, PLACE, "v1") if name.endswith(".safetensors")]) == 7
    write(store, "v2", state, kind="full", side_files=sides, sizes=None)
    assert len([name for name in names_in(store, PLACE, "v2") if name.endswith(".safetensors")]) == 1


# -- several ranks -----------------------------------------------------------------------------------------------------


def write_ranks(
    store: MemoryStore,
    identity: str,
    state: dict[str, Any],
    bases: list[Any],
    *,
    spoil: Callable[[list[ShardReceipt]], list[ShardReceipt]] = list,
    **options: Any,
) -> WrittenSnapshot:
    """Write with as many ranks as bases, in turn; the receipts go the way of a collective, pickled."""
    upload_id = new_upload_id()
    writers = [
        SnapshotWriter(
            store, PLACE, identity, rank=rank, ranks=len(bases), upload_id=upload_id, base=base, sizes=TINY, **options
        )
        for rank, base in enumerate(bases)
    ]
    try:
        for number, (name, tensor) in enumerate(state.items()):
            writers[number % len(writers)].add(name, tensor)
        receipts = pickle.loads(pickle.dumps([writer.close(raises=False) for writer in writers]))
        written = pickle.loads(pickle.dumps(writers[0].finalise(spoil(receipts))))
        for writer in writers[1:]:
            writer.commit(written)
        return written
    finally:
        for writer in writers:
            writer.abort()


def test_ranks_write_together_what_one_would_write(store: MemoryStore, sides: Path) -> None:
    states = [make_state(1), next_state(make_state(1), 2), next_state(next_state(make_state(1), 2), 3)]
    alone, together = MemoryBase(), [MemoryBase() for _ in range(3)]
    write(store, "a0", states[0], kind="full", base=alone, side_files=sides)
    write_ranks(store, "b0", states[0], together, kind="full", side_files=sides)
    assert tensors_in(store, PLACE, "a0") == tensors_in(store, PLACE, "b0")
    for number in (1, 2):
        one = write(store, f"a{number}", states[number], kind="delta", base=alone)
        all_ = write_ranks(store, f"b{number}", states[number], together, kind="delta")
        assert tensors_in(store, PLACE, f"a{number}", states[number - 1]) == tensors_in(
            store, PLACE, f"b{number}", states[number - 1]
        )
        assert (one.tensors, one.changed_tensors, one.changed_bytes, one.raw_bytes, one.checksums) == (
            all_.tensors,
            all_.changed_tensors,
            all_.changed_bytes,
            all_.raw_bytes,
            dict(sorted(all_.checksums.items(), key=lambda item: list(states[0]).index(item[0]))),
        )
    shards = {name for name in names_in(store, PLACE, "b0") if name.endswith(".safetensors")}
    assert {name[:12] for name in shards} == {"model-r00000", "model-r00001", "model-r00002"}


def test_a_rank_without_a_change_is_no_problem(store: MemoryStore, sides: Path) -> None:
    state = {"a": np.zeros(100), "b": np.zeros(100)}
    bases = [MemoryBase(), MemoryBase()]
    write_ranks(store, "v0", state, bases, kind="full", side_files=sides)
    after = {"a": np.zeros(100), "b": np.ones(100)}
    assert write_ranks(store, "v1", after, bases, kind="delta").changed_tensors == 1
    assert names_in(store, PLACE, "v1") == ["model-r00001-00000.safetensors", INDEX]
    assert write_ranks(store, "v2", after, bases, kind="delta").empty


def test_all_ranks_may_share_a_base(store: MemoryStore, sides: Path, tmp_path: Path) -> None:
    old, new = make_state(1), next_state(make_state(1), 2)
    filled(MemoryBase(), store, PLACE, old, sides)
    start = download(store, PLACE, "v0", tmp_path / "v0")
    write_ranks(store, "v1", new, [CheckpointBase(start, "v0") for _ in range(4)], kind="delta")
    assert tensors_in(store, PLACE, "v1", old) == {name: raw(tensor) for name, tensor in new.items()}
    del new["scalar"]
    with pytest.raises(SnapshotError, match=r"1 tensors were not added by any rank \('scalar'\)"):
        write_ranks(store, "v2", new, [CheckpointBase(start, "v0") for _ in range(4)], kind="delta")


def test_receipts_that_do_not_make_a_snapshot(store: MemoryStore, sides: Path) -> None:
    """One rank's failure fails all, and leaves nothing that looks published."""
    state = make_state(1)

    def attempt(name: str, spoil: Callable[[list[ShardReceipt]], list[ShardReceipt]]) -> str:
        bases = [MemoryBase() for _ in range(3)]
        with pytest.raises(SnapshotError) as caught:
            write_ranks(store, name, state, bases, spoil=spoil, kind="full", side_files=sides)
        assert INDEX not in names_in(store, PLACE, name)
        assert PLACE.manifest_key(name) not in store.objects
        assert [base.identity for base in bases] == [None] * 3
        return str(caught.value)

    assert "there is no receipt of rank 2 of 3" in attempt("n1", lambda found: found[:2])
    assert "rank 1 has more than one receipt" in attempt("n2", lambda found: [*found, found[1]])

    def failed(found: list[ShardReceipt]) -> list[ShardReceipt]:
        with SnapshotWriter(store, PLACE, "n3", kind="full", rank=1, ranks=3, upload_id=found[0].upload_id) as writer:
            return [found[0], writer.failure(MemoryError("no memory")), found[2]]

    assert "rank 1 failed: MemoryError: no memory" in attempt("n3", failed)

    def foreign(found: list[ShardReceipt]) -> list[ShardReceipt]:
        with SnapshotWriter(store, PLACE, "n4", kind="full", rank=1, ranks=3, upload_id="another") as writer:
            return [found[0], writer.close(), found[2]]

    assert "the receipt of rank 1 is of another snapshot (n4, another)" in attempt("n4", foreign)


def test_ranks_whose_bases_differ(store: MemoryStore, sides: Path) -> None:
    """B27's kind: one rank's base is not what was published; together they would be no version at all."""
    states = [make_state(1), next_state(make_state(1), 2), next_state(make_state(1), 3)]
    bases = [MemoryBase(), MemoryBase()]
    write_ranks(store, "v0", states[0], bases, kind="full", side_files=sides)
    stale = MemoryBase()
    write_ranks(store, "w0", states[0], [MemoryBase(), stale], kind="full", side_files=sides)
    with pytest.raises(SnapshotError, match="rank 1 wrote a delta on 'w0', not on 'v0'"):
        write_ranks(store, "v1", states[1], [bases[0], stale], kind="delta")
    assert INDEX not in names_in(store, PLACE, "v1")


def test_a_tensor_that_two_ranks_add(store: MemoryStore, sides: Path) -> None:
    upload_id = new_upload_id()
    receipts = []
    writers = []
    for rank in range(2):
        writer = SnapshotWriter(
            store, PLACE, "v1", kind="full", rank=rank, ranks=2, upload_id=upload_id, side_files=sides
        )
        writer.add("tied", np.ones(3))
        receipts.append(writer.close())
        writers.append(writer)
    with pytest.raises(SnapshotError, match=r"1 tensors come from more than one rank \('tied'\)"):
        writers[0].finalise(receipts)
    writers[1].abort()


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"kind": "sparse"}, "neither 'full' nor 'delta'"),
        ({"kind": "full"}, "needs side_files="),
        ({"kind": "full", "rank": 2, "ranks": 2, "upload_id": "u"}, "rank=2 is not one of ranks=2"),
        ({"kind": "full", "ranks": 2}, "upload_id= is not given"),
        ({"kind": "full", "previous_identity": "v0"}, "previous_identity='v0' is of a delta"),
        ({"kind": "delta"}, "a delta needs base="),
        ({"kind": "full", "rank": 1, "ranks": 2, "upload_id": "u", "memory_bytes": 1 << 20}, "is not enough"),
        (
            {
                "kind": "full",
                "rank": 1,
                "ranks": 2,
                "upload_id": "u",
                "max_bytes_per_second": float("nan"),
                "upload_workers": 0,
                "shard_bytes": -1,
            },
            "upload_workers=0 and shard_bytes=-1 and max_bytes_per_second=nan: must be above zero",
        ),
        ({"kind": "full", "rank": 1, "ranks": 2, "upload_id": "u", "workers": 0}, "workers=0"),
    ],
)
def test_arguments_that_do_not_fit_together(store: MemoryStore, options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        SnapshotWriter(store, PLACE, "v1", **options)
    assert store.calls == []


def test_side_files_are_looked_at_before_anything_is_written(store: MemoryStore, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(SnapshotLayoutError, match=r"config\.json: is not there") as caught:
        SnapshotWriter(store, PLACE, "v1", kind="full", side_files=tmp_path)
    assert "merge it" in str(caught.value)
    (tmp_path / "adapter_config.json").unlink()
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(SnapshotLayoutError, match="is not a JSON object"):
        SnapshotWriter(store, PLACE, "v1", kind="full", side_files=tmp_path)


def test_a_base_of_another_identity_or_of_none(store: MemoryStore, sides: Path) -> None:
    with pytest.raises(SnapshotError, match="holds no whole version"):
        SnapshotWriter(store, PLACE, "v1", kind="delta", base=MemoryBase(), previous_identity="v0")
    base = filled(MemoryBase(), store, PLACE, make_state(1), sides)
    with pytest.raises(SnapshotError, match="the base holds 'v0', so there is no delta on 'other'"):
        SnapshotWriter(store, PLACE, "v1", kind="delta", base=base, previous_identity="other")
    with pytest.raises(SnapshotError, match="which it applies to itself"):
        SnapshotWriter(store, PLACE, "v0", kind="delta", base=base)


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("norm.weight", np.zeros(12, np.float32), r"is F32 \[12\], but F32 \[11\] there"),
        ("norm.weight", np.zeros(11, np.float64), r"is F64 \[11\], but F32 \[11\] there"),
        ("new", np.zeros(2), "not in it"),
    ],
)
def test_a_tensor_that_does_not_fit_the_base(
    store: MemoryStore, sides: Path, name: str, tensor: Any, says: str
) -> None:
    base = filled(MemoryBase(), store, PLACE, make_state(1), sides)
    with (
        pytest.raises(SnapshotError, match=says),
        SnapshotWriter(store, PLACE, "v1", kind="delta", base=base) as writer,
    ):
        writer.add(name, tensor)
    assert base.identity == "v0"  # nothing was written to it yet


def test_a_tensor_that_is_left_out_is_not_unchanged(store: MemoryStore, sides: Path) -> None:
    state = make_state(1)
    base = filled(MemoryBase(), store, PLACE, state, sides)
    del state["scalar"]
    with pytest.raises(SnapshotError, match="1 tensors of the base were not added, for example 'scalar'"):
        write(store, "v1", state, kind="delta", base=base)
    with pytest.raises(SnapshotError, match=r"1 tensors were not added by any rank \('scalar'\)"):
        write(store, "v2", state, kind="full", side_files=sides, names=make_state(1).keys())
    with SnapshotWriter(store, PLACE, "v3", kind="full", side_files=sides) as writer:
        writer.add("norm.weight", np.zeros(2))
        with pytest.raises(SnapshotError, match=r"'norm\.weight' comes twice"):
            writer.add("norm.weight", np.zeros(2))


def test_an_error_is_raised_again_and_spoils_the_base(store: MemoryStore, sides: Path) -> None:
    """B05's kind: a base in memory that was half replaced is none; the next snapshot is a full one, which fills it."""
    state, after = make_state(1), next_state(make_state(1), 2)
    base = filled(MemoryBase(), store, PLACE, state, sides)
    writer = SnapshotWriter(store, PLACE, "v1", kind="delta", base=base)
    writer.add("embed.weight", after["embed.weight"])
    with pytest.raises(SnapshotError, match="has no bytes to read"):
        writer.add("norm.weight", object())
    with pytest.raises(SnapshotError, match="has no bytes to read"):
        writer.close()
    assert (
        writer.close(raises=False).error
        == "SnapshotError: tensor 'norm.weight' is a object, which has no bytes to read"
    )
    writer.abort()
    with pytest.raises(SnapshotError, match="holds no whole version"):
        write(store, "v2", after, kind="delta", base=base)
    write(store, "v3", after, kind="full", base=base, side_files=sides)
    last = next_state(after, 3)
    write(store, "v4", last, kind="delta", base=base)
    assert tensors_in(store, PLACE, "v4", after) == {name: raw(tensor) for name, tensor in last.items()}


def test_a_mirror_keeps_its_version_when_a_snapshot_fails(store: MemoryStore, sides: Path, tmp_path: Path) -> None:
    state, after = make_state(1), next_state(make_state(1), 2)
    filled(MemoryBase(), store, PLACE, state, sides)
    with WeightMirror.create(download(store, PLACE, "v0", tmp_path / "v0"), tmp_path / "mirror") as mirror:
        base = MirrorBase(mirror, "v0")
        with SnapshotWriter(store, PLACE, "v1", kind="delta", base=base) as writer:
            for name, tensor in after.items():
                writer.add(name, tensor)
            writer.close()
        assert (mirror.version, base.identity) == ("0", "v0")
        mirror.verify()
        write(store, "v2", after, kind="delta", base=base)
        mirror.verify()
        assert WeightMirrorBytes(mirror) == {name: raw(tensor) for name, tensor in after.items()}


def test_a_writer_is_for_one_snapshot(store: MemoryStore, sides: Path) -> None:
    with SnapshotWriter(store, PLACE, "v1", kind="full", side_files=sides) as writer:
        writer.add("a", np.zeros(2))
        receipt = writer.close()
        assert writer.close() == receipt
        with pytest.raises(SnapshotError, match="comes after close"):
            writer.add("b", np.zeros(2))
    with SnapshotWriter(store, PLACE, "v2", kind="full", side_files=sides) as writer:
        writer.add("a", np.zeros(2))
        writer.finalise([writer.close()])
        with pytest.raises(SnapshotError, match="finalised already"):
            writer.add("b", np.zeros(2))
    assert INDEX in names_in(store, PLACE, "v2")
