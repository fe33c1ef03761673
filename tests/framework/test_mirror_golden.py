"""The mirror follows what slime and miles really wrote: the xor deltas as they are, the others converted or not."""

import os
from pathlib import Path

import pytest

from cwtrain.errors import MirrorError, SnapshotChainError
from cwtrain.hotload import WeightMirror, inspect_snapshot
from cwtrain.hotload.delta import convert_delta
from helpers import snapshot_files as sf

SHARED = Path(os.environ.get("CWTRAIN_SHARED") or Path(__file__).parents[3] / "shared")
GOLDEN = SHARED / "golden"

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no recorded deltas of slime and miles in {GOLDEN}; set CWTRAIN_SHARED to their folder"
)

XOR = ["slime_xor_adler32", "miles_xor_adler32", "slime_xor_adler32_dup"]
OTHERS = {"slime_xor_xxh3-128": "xxhash", "slime_overwrite_blake3": "blake3", "miles_overwrite_adler32": None}


def update(folder, version):
    return GOLDEN / folder / "updates" / f"weight_v{version:06d}"


def truth(folder, version):
    return sf.read_tensors(GOLDEN / folder / f"truth_v{min(version, 3)}.safetensors")[0]


def follow(mirror, folder, deltas):
    for version in (1, 2, 3, 4):  # the fourth changed nothing
        report = mirror.apply_delta(deltas(version))
        assert mirror.version == report.version == f"{version:06d}"
        assert sf.read_checkpoint(mirror.path) == truth(folder, version)
        assert inspect_snapshot(mirror.path, verify="full").checksums == mirror.checksums
    assert not report.changed


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("folder", XOR)
def test_the_chain_as_it_was_written(tmp_path, folder, in_place):
    with WeightMirror.create(GOLDEN / folder / "base", tmp_path / "m", in_place=in_place) as mirror:
        with pytest.raises(SnapshotChainError, match="000001"):
            mirror.apply_delta(update(folder, 2))
        follow(mirror, folder, lambda version: update(folder, version))


@pytest.mark.parametrize("folder", OTHERS)
def test_other_formats_converted_first(tmp_path, folder):
    if OTHERS[folder]:
        pytest.importorskip(OTHERS[folder])
    with WeightMirror.create(GOLDEN / folder / "base", tmp_path / "m", in_place=True) as mirror:

        def converted(version):
            return convert_delta(mirror.path, update(folder, version), tmp_path / f"d{version}").path

        if "overwrite" in folder:
            with pytest.raises(MirrorError, match="only xor"):
                mirror.apply_delta(update(folder, 1))
        follow(mirror, folder, converted)


@pytest.mark.parametrize("folder", OTHERS)
def test_other_formats_as_they_are(tmp_path, folder):
    if OTHERS[folder]:
        pytest.importorskip(OTHERS[folder])
    with WeightMirror.create(GOLDEN / folder / "base", tmp_path / "m", in_place=False) as mirror:
        follow(mirror, folder, lambda version: update(folder, version))
