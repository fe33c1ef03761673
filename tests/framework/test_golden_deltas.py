"""Deltas that slime and miles wrote: inspected, verified on their base, decoded to their truth; or refused."""

import json
import os
from pathlib import Path

import pytest

from cwtrain.errors import SnapshotLayoutError
from cwtrain.hotload.delta import apply_delta, convert_delta
from cwtrain.models.snapshot import SnapshotKind
from cwtrain.snapshots import decode_delta, files_for_upload, inspect_snapshot
from helpers import snapshot_files as sf

SHARED = Path(os.environ.get("CWTRAIN_SHARED") or Path(__file__).parents[3] / "shared")
GOLDEN = SHARED / "golden"

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no recorded deltas of slime and miles in {GOLDEN}; set CWTRAIN_SHARED to their folder"
)

TAKEN = ["slime_xor_adler32", "miles_xor_adler32", "slime_xor_adler32_dup"]
REFUSED = {
    "slime_xor_xxh3-128": ["--update-weight-delta-checksum adler32"],
    "slime_overwrite_blake3": ["--update-weight-delta-encoding xor", "--update-weight-delta-checksum adler32"],
    "miles_overwrite_adler32": ["--update-weight-delta-encoding xor"],
}

LIBRARIES = {"xxh3": "xxhash", "blake3": "blake3"}


def update(folder, version) -> Path:
    return GOLDEN / folder / "updates" / f"weight_v{version:06d}"


def base_of(folder, version) -> Path:
    return GOLDEN / folder / ("base" if version == 1 else f"truth_v{version - 1}.safetensors")


def truth(folder, version):
    return sf.read_tensors(GOLDEN / folder / f"truth_v{version}.safetensors")[0]


def test_all_recordings_are_known():
    assert {path.name for path in GOLDEN.iterdir() if path.is_dir()} == {*TAKEN, *REFUSED}


@pytest.mark.parametrize("folder", TAKEN)
def test_taken_deltas_decode_to_their_truth(folder):
    tensors = sf.read_checkpoint(GOLDEN / folder / "base")
    for version in (1, 2, 3):
        directory, base = update(folder, version), base_of(folder, version)
        snapshot = inspect_snapshot(directory, verify="full", base=base)
        assert snapshot.kind is SnapshotKind.DELTA
        assert snapshot.previous_identity == f"weight_v{version - 1:06d}"
        assert not snapshot.left_out
        for name, new in decode_delta(base, directory):
            tensors[name] = (*tensors[name][:2], new)
        assert tensors == truth(folder, version)


@pytest.mark.parametrize("folder", [*TAKEN, *REFUSED])
def test_all_decode_convert_and_apply_to_their_truth(tmp_path, folder):
    """Whatever the encoding and the checksum: one function reads it, and what comes out is what the trainer had."""
    for package in [package for word, package in LIBRARIES.items() if word in folder]:
        pytest.importorskip(package, reason="the extra [checksums]")
    before, tensors = GOLDEN / folder / "base", sf.read_checkpoint(GOLDEN / folder / "base")
    for version in (1, 2, 3, 4):  # the fourth changed nothing
        want = truth(folder, min(version, 3))
        changed = dict(decode_delta(before, update(folder, version)))
        assert bool(changed) == (version < 4)
        converted = convert_delta(before, update(folder, version), tmp_path / f"converted{version}")
        assert inspect_snapshot(converted.path, verify="full", base=before, allow_empty_delta=True)
        assert sf.apply_delta(tensors, converted.path) == want
        apply_delta(before, update(folder, version), tmp_path / f"full{version}")
        before, tensors = tmp_path / f"full{version}", want
        assert sf.read_checkpoint(before) == want
        assert inspect_snapshot(before, verify="full").kind is SnapshotKind.FULL


@pytest.mark.parametrize("folder", TAKEN)
def test_a_wrong_base_is_noticed(folder):
    with pytest.raises(ValueError, match="Adler-32"):
        inspect_snapshot(update(folder, 2), verify="full", base=base_of(folder, 1))


@pytest.mark.parametrize("folder", TAKEN)
def test_the_empty_version(folder):
    with pytest.raises(SnapshotLayoutError, match="skip this version"):
        inspect_snapshot(update(folder, 4))
    snapshot = inspect_snapshot(update(folder, 4), allow_empty_delta=True, verify="full", base=base_of(folder, 4))
    assert snapshot.empty_delta
    assert list(decode_delta(base_of(folder, 4), update(folder, 4))) == []


@pytest.mark.parametrize("folder", REFUSED)
@pytest.mark.parametrize("version", [1, 2, 3, 4])
def test_others_are_refused_with_the_flag_to_set(folder, version):
    with pytest.raises(SnapshotLayoutError) as caught:
        inspect_snapshot(update(folder, version), allow_empty_delta=True)
    assert len(caught.value.problems) == len(REFUSED[folder])
    for flag, problem in zip(REFUSED[folder], caught.value.problems, strict=True):
        assert flag in problem
        assert "cwtrain snapshot convert" in problem


@pytest.mark.parametrize("version", [1, 2, 3])
def test_the_replicated_embedding_is_uploaded_once(tmp_path, version):
    folder = "slime_xor_adler32_dup"
    snapshot = inspect_snapshot(update(folder, version))
    assert snapshot.duplicates == ("model.embed_tokens.weight",)
    held = []
    for file in files_for_upload(snapshot, "run-v1"):
        data = file.head
        for offset, length in file.ranges:
            data += Path(file.path).read_bytes()[offset : offset + length]
        assert len(data) == file.size_bytes
        (tmp_path / file.name).write_bytes(data)
        if file.name.endswith(".safetensors"):
            held += sf.read_tensors(tmp_path / file.name)[0]
    assert sorted(held) == sorted(sf.read_index(tmp_path)["weight_map"])
    base = base_of(folder, version)
    old = sf.read_checkpoint(base) if base.is_dir() else sf.read_tensors(base)[0]
    assert sf.apply_delta(old, tmp_path) == truth(folder, version)
    assert json.loads((tmp_path / sf.INDEX).read_text())["metadata"]["version"] == "run-v1"


@pytest.mark.parametrize("folder", [*TAKEN, *REFUSED])
def test_their_base_is_a_full_snapshot(folder):
    snapshot = inspect_snapshot(GOLDEN / folder / "base")
    assert snapshot.kind is SnapshotKind.FULL
    assert snapshot.tensors == 10
