"""Deltas on disk: versions and predecessor, formats, checksums, duplicates, and the index that is uploaded."""

import json

import pytest

from cwtrain.errors import SnapshotChainError, SnapshotError, SnapshotLayoutError
from cwtrain.models.snapshot import INDEX_NAME, SnapshotKind
from cwtrain.snapshots import files_for_upload, index_for_upload, inspect_snapshot, local_snapshot_to_json
from helpers import snapshot_files as sf

SHARD = "model-00000-of-00001.safetensors"


@pytest.fixture
def delta(tmp_path):
    return sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))


def problems_of(path, **options):
    with pytest.raises(SnapshotLayoutError) as caught:
        inspect_snapshot(path, **options)
    return list(caught.value.problems)


def only_problem(path, **options):
    problems = problems_of(path, **options)
    assert len(problems) == 1, problems
    return problems[0]


def with_metadata(tmp_path, **changes):
    directory = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    index = sf.read_index(directory)
    index["metadata"] = {k: v for k, v in {**index["metadata"], **changes}.items() if v != "absent"}
    sf.write_json(directory / INDEX_NAME, index)
    return directory


def test_a_delta(delta):
    snapshot = inspect_snapshot(delta)
    assert snapshot.kind is SnapshotKind.DELTA
    assert (snapshot.version, snapshot.base_version) == ("000001", "000000")
    assert snapshot.previous_identity == "weight_v000000"
    assert [file.name for file in snapshot.files] == [SHARD, INDEX_NAME]
    assert set(snapshot.checksums) == {"layer.weight", "odd.weight"}
    assert snapshot.tensors == 2
    assert not snapshot.empty_delta
    data = json.loads(json.dumps(local_snapshot_to_json(snapshot)))
    assert data["type"] == "INCREMENTAL"
    assert data["incremental"] == {
        "previous_snapshot_identity": "weight_v000000", "compression_format": "ZSTD", "checksum_format": "ADLER32",
    }  # fmt: skip


def test_the_uploaded_index_names_identities_and_the_local_one_stays(delta):
    before = (delta / INDEX_NAME).read_bytes()
    snapshot = inspect_snapshot(delta, previous_identity="run-v000000")
    raw = index_for_upload(snapshot, "run-v000001")
    assert raw == index_for_upload(snapshot, "run-v000001")
    index = json.loads(raw)
    local = sf.read_index(delta)
    assert index["weight_map"] == local["weight_map"]
    assert index["metadata"] == {**local["metadata"], "version": "run-v000001", "base_version": "run-v000000"}
    files = files_for_upload(snapshot, "run-v000001")
    assert [file.name for file in files] == [SHARD, INDEX_NAME]
    assert (files[-1].head, files[-1].path, files[-1].size_bytes) == (raw, None, len(raw))
    assert (delta / INDEX_NAME).read_bytes() == before


def test_upload_needs_a_good_identity_and_another_predecessor(delta):
    snapshot = inspect_snapshot(delta)
    with pytest.raises(SnapshotError):
        index_for_upload(snapshot, "initial")
    with pytest.raises(SnapshotChainError):
        index_for_upload(snapshot, "weight_v000000")
    unknown = inspect_snapshot(delta, identity_for_version=lambda number: None)
    assert unknown.previous_identity is None
    with pytest.raises(SnapshotChainError):
        files_for_upload(unknown, "x")


def test_an_explicit_predecessor_wins(tmp_path, delta):
    def mapping(number):
        raise AssertionError("not asked")

    assert inspect_snapshot(delta, previous_identity="x", identity_for_version=mapping).previous_identity == "x"
    assert inspect_snapshot(delta, identity_for_version=lambda n: f"run-v{n}").previous_identity == "run-v0"
    read_back = with_metadata(tmp_path, version="run-v000002", base_version="run-v000001")
    assert inspect_snapshot(read_back, previous_identity="run-v000001").base_version == "run-v000001"
    assert "--previous-identity" in problems_of(read_back)[0]


@pytest.mark.parametrize("options", [{"previous_identity": "initial"}, {"identity_for_version": lambda n: "initial"}])
def test_no_delta_on_the_deployments_own_weights(delta, options):
    problem = only_problem(delta, **options)
    assert "'initial'" in problem
    assert "full snapshot first" in problem
    assert problems_of(delta, previous_identity="")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"version": "000000"}, "not above base_version"),
        ({"version": "000001", "base_version": "000001"}, "not above base_version"),
        ({"version": "1", "base_version": "000001"}, "not above base_version"),
        ({"base_version": "absent"}, "base_version is missing"),
        ({"base_version": "-1"}, "'-1' is not a number"),
        ({"base_version": "latest"}, "'latest' is not a number"),
        ({"base_version": "0 "}, "'0 ' is not a number"),
        ({"base_version": "٠"}, "is not a number"),
        ({"base_version": ""}, "base_version is ''"),
        ({"base_version": 0}, "base_version is 0"),
        ({"base_version": None}, "base_version is None"),
        ({"version": "absent"}, "version is missing"),
        ({"version": "newest"}, "'newest' is not a number"),
        ({"version": True}, "version is True"),
    ],
)
def test_versions_are_strict_digits_that_go_up(tmp_path, changes, words):
    problem = only_problem(with_metadata(tmp_path, **changes))
    assert problem.startswith(INDEX_NAME)
    assert words in problem


def test_self_reference_is_refused_even_with_an_explicit_predecessor(tmp_path):
    directory = with_metadata(tmp_path, version="x", base_version="x")
    assert "its own base" in only_problem(directory, previous_identity="y")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"delta_encoding": "overwrite"}, "--update-weight-delta-encoding xor"),
        ({"delta_encoding": "xor_sparse"}, "cwtrain snapshot convert"),
        ({"delta_encoding": None}, "delta_encoding is None"),
        ({"delta_encoding": "absent"}, "delta_encoding is missing"),
        ({"compression_format": "lz4"}, "'zstd'"),
        ({"compression_format": "absent"}, "compression_format is missing"),
        ({"checksum_format": "xxh3-128"}, "--update-weight-delta-checksum adler32"),
        ({"checksum_format": "blake3"}, "cwtrain snapshot convert"),
        ({"checksum_format": "absent"}, "checksum_format is missing"),
    ],
)
def test_formats_that_the_service_does_not_take(tmp_path, changes, words):
    problem = only_problem(with_metadata(tmp_path, **changes))
    assert problem.startswith(INDEX_NAME)
    assert words in problem


@pytest.mark.parametrize("checksum", ["%x", "%08X", "0x%08x", "%d"])
def test_checksums_have_eight_lower_case_digits(tmp_path, checksum):
    """About 6 % of all values begin with a zero, so the padding matters."""
    old, new = sf.toy(0), sf.toy(0)
    new["packed"] = ("F4", [2, 3], bytes([1, 2, 9]))  # Adler-32 00150 00d: needs its zeros, and has a letter
    directory = sf.write_delta(tmp_path / "delta", old, new, checksum=checksum)
    assert "8 lower-case hex digits" in only_problem(directory)


def test_each_tensor_has_a_checksum(delta):
    tensors, sums = sf.read_tensors(delta / SHARD)
    sums.pop("odd.weight")
    (delta / SHARD).write_bytes(sf.safetensors(tensors, sums))
    assert "'odd.weight' has no checksum" in only_problem(delta)


def test_tensors_are_vectors_of_frame_bytes(delta):
    tensors, sums = sf.read_tensors(delta / SHARD)
    size = len(tensors["odd.weight"][2])
    for wrong in (("I8", [size]), ("U8", [1, size])):
        tensors["odd.weight"] = (*wrong, tensors["odd.weight"][2])
        (delta / SHARD).write_bytes(sf.safetensors(tensors, sums))
        assert "not a U8 vector" in only_problem(delta)
    tensors["odd.weight"] = ("U8", [0], b"")
    (delta / SHARD).write_bytes(sf.safetensors(tensors, sums))
    assert "not even an empty zstd frame" in only_problem(delta)


def test_an_empty_delta_only_where_allowed(tmp_path):
    directory = sf.write_delta(tmp_path / "delta", sf.toy(1), sf.toy(1))
    assert "skip this version" in only_problem(directory)
    snapshot = inspect_snapshot(directory, allow_empty_delta=True, verify="full")
    assert snapshot.empty_delta
    assert [file.name for file in snapshot.files] == [INDEX_NAME]
    assert local_snapshot_to_json(snapshot)["empty_delta"] is True
    (directory / SHARD).write_bytes(sf.safetensors({"a": ("U8", [1], b"x")}, {"a": "00000001"}))
    assert "left over" in only_problem(directory, allow_empty_delta=True)


def test_all_problems_of_a_delta_at_once(tmp_path):
    directory = with_metadata(tmp_path, delta_encoding="overwrite", checksum_format="blake3", base_version="x")
    (directory / "model-00007-of-00008.safetensors").write_bytes(b"")
    (directory / "config.json").write_text("7")
    assert len(problems_of(directory, previous_identity="initial")) == 5


def duplicated(tmp_path, *, spare=False, change=None):
    """Write the delta of `delta` with `layer.weight` in a second shard too, as slime does across pipeline stages."""
    directory = sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))
    tensors, sums = sf.read_tensors(directory / SHARD)
    (directory / SHARD).unlink()
    other = {"layer.weight": tensors["layer.weight"]}
    first = other if spare else {"odd.weight": tensors["odd.weight"], **other}
    second = tensors if spare else other
    first_sums = {name: sums[name] for name in first}
    if change:
        change(first, first_sums)
    names = ["model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"]
    (directory / names[0]).write_bytes(sf.safetensors(first, first_sums))
    (directory / names[1]).write_bytes(sf.safetensors(second, {name: sums[name] for name in second}))
    index = sf.read_index(directory)
    index["weight_map"] = {**dict.fromkeys(first, names[0]), **dict.fromkeys(second, names[1])}
    sf.write_json(directory / INDEX_NAME, index)
    return directory


def upload(snapshot, out):
    """Write the objects of a snapshot into a directory, byte by byte as an upload sends them."""
    out.mkdir()
    for file in files_for_upload(snapshot, "v1"):
        data = file.head
        for offset, length in file.ranges:
            with open(file.path, "rb") as handle:
                handle.seek(offset)
                data += handle.read(length)
        assert len(data) == file.size_bytes
        (out / file.name).write_bytes(data)
    return out


def test_a_duplicate_is_uploaded_once(tmp_path):
    snapshot = inspect_snapshot(duplicated(tmp_path), verify="full", base=sf.write_full(tmp_path / "base", sf.toy(0)))
    assert snapshot.duplicates == ("layer.weight",)
    assert snapshot.tensors == 2
    assert len(snapshot.warnings) == 1
    out = upload(snapshot, tmp_path / "out")
    shards = [sf.read_tensors(path) for path in sorted(out.glob("*.safetensors"))]
    assert [list(tensors) for tensors, _ in shards] == [["odd.weight"], ["layer.weight"]]
    assert [set(sums) for _, sums in shards] == [{"odd.weight"}, {"layer.weight"}]
    assert sf.apply_delta(sf.toy(0), out) == sf.toy(1)


def test_a_shard_of_nothing_but_duplicates_is_left_out(tmp_path):
    """slime writes one when a stage changed only the embedding it shares with the last stage; no index names it."""
    snapshot = inspect_snapshot(duplicated(tmp_path, spare=True))
    assert snapshot.left_out == ("model-00000-of-00002.safetensors",)
    assert "copies" in snapshot.warnings[0]
    assert sf.apply_delta(sf.toy(0), upload(snapshot, tmp_path / "out")) == sf.toy(1)


@pytest.mark.parametrize("spare", [False, True])
@pytest.mark.parametrize("what", ["checksum", "bytes"])
def test_duplicates_that_differ_are_refused(tmp_path, spare, what):
    def change(tensors, sums):
        if what == "checksum":
            sums["layer.weight"] = "00000001"
        else:
            blob = tensors["layer.weight"][2]
            tensors["layer.weight"] = ("U8", [len(blob)], blob[:-1] + bytes([blob[-1] ^ 1]))

    problem = only_problem(duplicated(tmp_path, spare=spare, change=change))
    assert "left over" in problem if spare else f"another {what}" in problem or f"other {what}" in problem
