from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import zstandard

from cwtrain_emulator.replica.materialise import NoWeightsError, Sabotage, SnapshotError, Workshop, hash_tensors
from cwtrain_emulator.snapshots import ChainEntry, listing_digest
from helpers import tiny_delta
from helpers.memory_bucket import MemoryBucket
from helpers.tiny_delta import Tensor

BASE: dict[str, Tensor] = {
    "a": ("BF16", [3, 4], bytes(range(24))),
    "b": ("F32", [5], bytes(range(20))),
    "c": ("F8_E4M3", [7], b"\x01" * 7),
    "scalar": ("BF16", [], b"\x80\x3f"),
}


class Scene:
    """A bucket and one replica's workshop on it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bucket = MemoryBucket()
        self.workshop = self.fresh()

    def fresh(self) -> Workshop:
        return Workshop(self.root, self.bucket)  # type: ignore[arg-type]

    def publish(self, identity: str, files: Mapping[str, bytes], *, delta: bool = True) -> ChainEntry:
        prefix = f"p/{identity}/"
        self.bucket.put("w", prefix, files)
        listed = self.bucket.list_objects("w", prefix)
        digest = listing_digest((info.key.removeprefix(prefix), info.size_bytes, info.etag) for info in listed)
        return ChainEntry(identity, "INCREMENTAL" if delta else "FULL", "w", prefix, "h", digest)

    def full(self, identity: str = "v0", tensors: Mapping[str, Tensor] = BASE, **options: Any) -> ChainEntry:
        return self.publish(identity, tiny_delta.full_snapshot(tensors, **options), delta=False)

    def delta(
        self, old: Mapping[str, Tensor], new: Mapping[str, Tensor], identity: str, previous: str, **options: Any
    ) -> ChainEntry:
        files = tiny_delta.delta_snapshot(old, new, version=identity, base_version=previous, **options)
        return self.publish(identity, files)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.root.iterdir())


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


def _hashes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in tensors.items()}


@pytest.mark.parametrize("content_size", [True, False])
def test_a_chain_becomes_the_trainer_s_bytes(scene: Scene, content_size: bool) -> None:
    one = tiny_delta.nudged(BASE, seed=1, names=["a"])
    two = tiny_delta.nudged(one, seed=2)
    chain = [
        scene.full(checksums=True),
        scene.delta(BASE, one, "v1", "v0", content_size=content_size),
        scene.delta(one, two, "v2", "v1", content_size=content_size),
    ]
    made = scene.workshop.materialise(chain)
    assert made.identity == "v2"
    assert made.tensors == hash_tensors(made.checkpoint) == _hashes(two)
    assert json.loads((made.checkpoint / "config.json").read_text()) == {"model_type": "none"}
    assert scene.files() == ["gen-00000001"]


def test_a_delta_on_what_is_there_fetches_the_delta_alone_and_leaves_the_old_one_whole(scene: Scene) -> None:
    one = tiny_delta.nudged(BASE, seed=1)
    full = scene.full()
    old = scene.workshop.materialise([full])
    before = scene.bucket.downloads
    made = scene.workshop.materialise([full, scene.delta(BASE, one, "v1", "v0")])
    assert scene.bucket.downloads == before + 1
    assert made.tensors == _hashes(one)
    assert hash_tensors(old.checkpoint) == _hashes(BASE)
    assert scene.workshop.materialise([full]) == old


def test_a_restarted_replica_uses_its_disk_if_the_bytes_are_right(scene: Scene) -> None:
    full = scene.full()
    made = scene.workshop.materialise([full])
    before = scene.bucket.downloads
    assert scene.fresh().materialise([full]) == made
    assert scene.bucket.downloads == before
    shard = next(made.checkpoint.glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    again = scene.fresh().materialise([full])
    assert scene.bucket.downloads > before
    assert again.tensors == _hashes(BASE)


def test_what_a_killed_process_left_half_done_is_removed(scene: Scene) -> None:
    (scene.root / "tmp-1" / "checkpoint").mkdir(parents=True)
    (scene.root / "gen-00000007").mkdir()
    scene.fresh()
    assert scene.files() == []


def test_other_bytes_under_an_identity_are_another_snapshot(scene: Scene) -> None:
    scene.workshop.materialise([scene.full()])
    other = tiny_delta.nudged(BASE, seed=9)
    assert scene.workshop.materialise([scene.full(tensors=other)]).tensors == _hashes(other)


def test_old_generations_are_pruned(scene: Scene) -> None:
    made = [scene.workshop.materialise([scene.full(f"v{number}")]) for number in range(4)]
    scene.workshop.prune(made[-1])
    assert scene.files() == ["gen-00000003", "gen-00000004"]
    scene.workshop.prune(made[2])
    assert scene.files() == ["gen-00000003", "gen-00000004"]


def test_at_most_63_deltas_are_replayed(scene: Scene) -> None:
    def chain(length: int) -> list[ChainEntry]:
        current, entries = dict(BASE), [scene.full()]
        for number in range(1, length + 1):
            following = tiny_delta.nudged(current, seed=number, names=["a"])
            entries.append(scene.delta(current, following, f"v{number}", f"v{number - 1}"))
            current = following
        return entries

    entries = chain(64)
    with pytest.raises(SnapshotError, match="64 deltas would have to be replayed"):
        scene.workshop.materialise(entries)
    assert scene.workshop.materialise(entries[:64]).identity == "v63"
    assert scene.workshop.materialise(entries).identity == "v64"


def test_a_late_one_copies_from_a_peer_what_it_need_not_fetch(
    scene: Scene, tmp_path_factory: pytest.TempPathFactory
) -> None:
    one = tiny_delta.nudged(BASE, seed=1)
    chain = [scene.full(), scene.delta(BASE, one, "v1", "v0")]
    made = scene.workshop.materialise(chain)
    before = scene.bucket.downloads
    late = Workshop(tmp_path_factory.mktemp("late"), scene.bucket)  # type: ignore[arg-type]
    copied = late.materialise(chain, peers=[scene.root])
    assert scene.bucket.downloads == before
    assert hash_tensors(copied.checkpoint) == _hashes(one)
    assert copied.directory != made.directory
    # Part of a chain is worth copying, too.
    two = tiny_delta.nudged(one, seed=2)
    chain.append(scene.delta(one, two, "v2", "v1"))
    later = Workshop(tmp_path_factory.mktemp("later"), scene.bucket)  # type: ignore[arg-type]
    assert later.materialise(chain, peers=[scene.root]).tensors == _hashes(two)
    assert scene.bucket.downloads == before + 1


def test_a_peer_whose_bytes_are_wrong_is_not_believed(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> None:
    full = scene.full()
    made = scene.workshop.materialise([full])
    shard = next(made.checkpoint.glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 1
    shard.write_bytes(damaged)
    late = Workshop(tmp_path_factory.mktemp("late"), scene.bucket)  # type: ignore[arg-type]
    assert late.materialise([full], peers=[scene.root, scene.root / "nothing"]).tensors == _hashes(BASE)
    assert [path.name for path in late._root.iterdir()] == ["gen-00000001"]


@pytest.mark.parametrize("checksums", [True, False])
def test_damage_is_noticed_and_leaves_no_trace(scene: Scene, checksums: bool) -> None:
    full = scene.full(checksums=checksums)
    with pytest.raises(SnapshotError, match="Adler-32" if checksums else r"\.safetensors"):
        scene.workshop.materialise([full], sabotage=Sabotage(damage=True))
    assert scene.files() == []
    scene.workshop.materialise([full])
    chain = [full, scene.delta(BASE, tiny_delta.nudged(BASE, seed=1), "v1", "v0")]
    with pytest.raises(SnapshotError, match="Adler-32"):
        scene.workshop.materialise(chain, sabotage=Sabotage(damage=True))
    made = scene.workshop.materialise(chain)
    # What is there already is made anew, to be damaged.
    with pytest.raises(SnapshotError, match="Adler-32"):
        scene.workshop.materialise(chain, sabotage=Sabotage(damage=True))
    assert scene.workshop.materialise(chain) == made


def test_base_weights_are_looked_for_and_may_be_missing(scene: Scene) -> None:
    entry = ChainEntry("initial", "FULL", "w", "base/")
    with pytest.raises(NoWeightsError):
        scene.workshop.materialise([entry])
    scene.bucket.put("w", "base/", tiny_delta.full_snapshot(BASE))
    assert scene.workshop.materialise([entry]).identity == "initial"
    scene.bucket.closed.add("w")
    with pytest.raises(SnapshotError, match="AccessDenied"):
        scene.workshop.materialise([entry])


NEW = tiny_delta.nudged(BASE, seed=1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sums": {"a": "00000000"}}, "'a' has Adler-32 .* after the delta, expected '00000000'"),
        ({"metadata": {"delta_encoding": "overwrite"}}, "delta_encoding is 'overwrite', expected 'xor'"),
        ({"metadata": {"checksum_format": "xxh3-128"}}, "checksum_format"),
        ({"metadata": {"base_version": "v9"}}, "base_version is 'v9', expected 'v0'"),
    ],
)
def test_a_wrong_delta_changes_nothing(scene: Scene, options: dict[str, Any], message: str) -> None:
    full = scene.full()
    old = scene.workshop.materialise([full])
    with pytest.raises(SnapshotError, match=message):
        scene.workshop.materialise([full, scene.delta(BASE, NEW, "v1", "v0", **options)])
    assert scene.files() == [old.directory.name]
    assert hash_tensors(old.checkpoint) == _hashes(BASE)


def _replace_shard(files: dict[str, bytes], tensors: Mapping[str, Tensor], sums: Mapping[str, str]) -> dict[str, bytes]:
    return {**files, "model-00000-of-00001.safetensors": tiny_delta.shard(tensors, sums)}


def test_frames_that_do_not_fit_their_tensor_are_refused(scene: Scene) -> None:
    full = scene.full()
    files = tiny_delta.delta_snapshot(BASE, NEW, version="v1", base_version="v0", names=["a"])
    sums = {"a": tiny_delta.adler(NEW["a"][2])}
    compress = zstandard.ZstdCompressor().compress
    good = compress(bytes(24))
    cases = {
        "claims 1000000000 bytes": _claiming(1_000_000_000),
        "claims 25 bytes": compress(bytes(25)),
        "not one zstd frame": good + good,
        "not one zstd frame of 24": b"no frame at all",
        "not one zstd frame of 24 bytes": good[:-2],
    }
    for message, frame in cases.items():
        wrong = _replace_shard(files, {"a": ("U8", [len(frame)], frame)}, sums)
        with pytest.raises(SnapshotError, match=message):
            scene.workshop.materialise([full, scene.publish("v1", wrong)])
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(23))
    wrong = _replace_shard(files, {"a": ("U8", [len(unsized)], unsized)}, sums)
    with pytest.raises(SnapshotError, match="the frame has 23 bytes, the tensor has 24"):
        scene.workshop.materialise([full, scene.publish("v1", wrong)])


def _claiming(size: int) -> bytes:
    """Return a frame whose header says `size` bytes of content (and has one empty block)."""
    return b"\x28\xb5\x2f\xfd\xe0" + size.to_bytes(8, "little") + b"\x01\x00\x00"


def test_a_delta_that_does_not_match_its_index_or_its_base_is_refused(scene: Scene) -> None:
    full = scene.full()
    files = tiny_delta.delta_snapshot(BASE, NEW, version="v1", base_version="v0", names=["a"])
    doubled = tiny_delta.delta_snapshot(BASE, NEW, version="v1", base_version="v0", names=["a", "b"])
    shard = "model-00000-of-00001.safetensors"
    with pytest.raises(SnapshotError, match="do not agree about b"):
        scene.workshop.materialise([full, scene.publish("v1", {**files, shard: doubled[shard]})])
    stranger = {**BASE, "x": BASE["a"]}
    with pytest.raises(SnapshotError, match="'x', which the chain's full snapshot does not have"):
        scene.workshop.materialise([full, scene.delta(stranger, tiny_delta.nudged(stranger, seed=1), "v2", "v0")])
    cut = {**files, shard: files[shard][:-3]}
    with pytest.raises(SnapshotError, match="bytes, but header and data need"):
        scene.workshop.materialise([full, scene.publish("v1", cut)])


def test_a_full_snapshot_is_checked_against_the_checksums_it_records(scene: Scene) -> None:
    files = tiny_delta.full_snapshot(BASE, shards=1, checksums=True)
    name = "model-00001-of-00001.safetensors"
    damaged = bytearray(files[name])
    damaged[-1] ^= 1
    with pytest.raises(SnapshotError, match="has Adler-32"):
        scene.workshop.materialise([scene.publish("v0", {**files, name: bytes(damaged)}, delta=False)])


def test_objects_that_vanish_are_named(scene: Scene) -> None:
    full = scene.full()
    del scene.bucket.objects["w", "p/v0/model-00002-of-00002.safetensors"]
    with pytest.raises(SnapshotError, match="gone from the bucket: model-00002"):
        scene.workshop.materialise([full])
