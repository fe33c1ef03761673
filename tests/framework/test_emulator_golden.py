"""The emulator's own reader on deltas that slime and miles wrote."""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path

import pytest

from cwtrain_emulator.replica.materialise import SnapshotError, apply_delta, hash_tensors
from cwtrain_emulator.snapshots import delta_problems, parse_index
from helpers import tiny_delta

SHARED = Path(os.environ.get("CWTRAIN_SHARED") or Path(__file__).parents[3] / "shared")
GOLDEN = SHARED / "golden"
INDEX = "model.safetensors.index.json"

pytestmark = pytest.mark.skipif(
    not GOLDEN.is_dir(), reason=f"no recorded deltas of slime and miles in {GOLDEN}; set CWTRAIN_SHARED to their folder"
)


def _copy(source: Path, target: Path) -> Path:
    target.mkdir()
    for path in source.iterdir():
        shutil.copyfile(path, target / path.name)
    return target


@pytest.mark.parametrize("folder", ["slime_xor_adler32", "miles_xor_adler32"])
def test_their_deltas_lead_to_their_truth(folder: str, tmp_path: Path) -> None:
    checkpoint = _copy(GOLDEN / folder / "base", tmp_path / "checkpoint")
    for version in (1, 2, 3):
        delta = GOLDEN / folder / "updates" / f"weight_v{version:06d}"
        apply_delta(checkpoint, delta, parse_index((delta / INDEX).read_bytes()))
        truth = tiny_delta.read_tensors(
            {"t.safetensors": (GOLDEN / folder / f"truth_v{version}.safetensors").read_bytes()}
        )
        expected = {name: hashlib.sha256(raw).hexdigest() for name, (_, _, raw) in truth.items()}
        found = hash_tensors(checkpoint)
        assert {name: found[name] for name in expected} == expected


def test_a_tensor_in_two_shards_is_refused_and_not_applied_twice(tmp_path: Path) -> None:
    checkpoint = _copy(GOLDEN / "slime_xor_adler32_dup" / "base", tmp_path / "checkpoint")
    delta = GOLDEN / "slime_xor_adler32_dup" / "updates" / "weight_v000001"
    with pytest.raises(SnapshotError, match="do not agree about"):
        apply_delta(checkpoint, delta, parse_index((delta / INDEX).read_bytes()))


@pytest.mark.parametrize(
    ("folder", "what"),
    [
        ("slime_xor_xxh3-128", "checksum_format"),
        ("slime_overwrite_blake3", "delta_encoding"),
        ("miles_overwrite_adler32", "delta_encoding"),
    ],
)
def test_what_the_service_does_not_take_is_named(folder: str, what: str) -> None:
    raw = (GOLDEN / folder / "updates" / "weight_v000001" / INDEX).read_bytes()
    assert any(what in problem for problem in delta_problems(parse_index(raw), identity="v1", previous="v0"))
