"""The word for what was verified says what was verified: never more than was read and compared."""

from __future__ import annotations

import json

import pytest

from cwtrain.snapshots import inspect_snapshot
from helpers import snapshot_files as sf
from helpers.run_cli import run


@pytest.fixture
def base(tmp_path):
    return sf.write_full(tmp_path / "base", sf.toy(0))


@pytest.fixture
def delta(tmp_path):
    return sf.write_delta(tmp_path / "delta", sf.toy(0), sf.toy(1))


@pytest.fixture
def wrong(tmp_path):
    """A delta with a flipped bit where only the result shows it: its frames are whole."""
    other = {name: (kind, shape, bytes(255 - byte for byte in raw)) for name, (kind, shape, raw) in sf.toy(1).items()}
    sf.write_delta(tmp_path / "other", sf.toy(0), other)
    directory = sf.write_delta(tmp_path / "wrong", sf.toy(0), sf.toy(1))
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    shard = directory / next(iter(index["weight_map"].values()))
    tensors, metadata = sf.read_tensors(shard)
    flipped, _ = sf.read_tensors(tmp_path / "other" / shard.name)
    shard.write_bytes(sf.safetensors({name: flipped[name] for name in tensors}, metadata))
    return directory


@pytest.mark.parametrize("command", [["snapshot", "verify"], ["hotload", "inspect", "--verify"]], ids=" ".join)
def test_a_delta_without_its_base_is_verified_as_far_as_its_frames(command, base, delta, wrong):
    for directory in (delta, wrong):
        done = run(*command, str(directory))
        assert (done.code, done.data["verified"]) == (0, "frames")
        assert "no checksum" in done.err + str(done.data["warnings"])
        assert "--base" in done.err + str(done.data["warnings"])
    done = run(*command, str(delta), "--base", str(base))
    assert (done.code, done.data["verified"], done.data["warnings"]) == (0, "full", [])
    assert run(*command, str(wrong), "--base", str(base)).code == 1


def test_a_full_snapshot_without_checksums_is_verified_as_far_as_its_headers(tmp_path, base):
    assert inspect_snapshot(base, verify="full").verified == "headers"
    run("snapshot", "full", str(base), str(tmp_path / "summed"))
    assert inspect_snapshot(tmp_path / "summed", verify="full").verified == "full"
    assert inspect_snapshot(tmp_path / "summed").verified == "headers"
