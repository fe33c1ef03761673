"""Manifests: built, written the same way each time, read strictly."""

import json

import attrs
import pytest

from cwtrain.errors import SnapshotError
from cwtrain.snapshots import build_manifest, manifest_to_bytes, parse_manifest


@attrs.frozen
class Sum:
    size_bytes: int
    sha256: str


def manifest(**changes):
    values = {
        "identity": "run-v000001",
        "type": "INCREMENTAL",
        "objects": {"b": Sum(2, "b" * 64), "a": Sum(0, "a" * 64)},
        "tensors": {"w": "00000001"},
        "run_id": "run",
        "version": "000001",
        "previous_identity": "run-v000000",
    }
    return build_manifest(**{**values, **changes})


def test_round_trip_and_extra_keys():
    made = manifest(step=7, schema_version=99)
    assert made["schema_version"] == 1
    assert made["objects"] == {"a": {"size": 0, "sha256": "a" * 64}, "b": {"size": 2, "sha256": "b" * 64}}
    assert made["deployment_id"] is None
    assert made["step"] == 7
    raw = manifest_to_bytes(made)
    assert raw == manifest_to_bytes(manifest(step=7))
    assert parse_manifest(raw) == made


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema_version": 2}, "schema_version 2"),
        ({"schema_version": None}, "schema_version None"),
        ({"schema_version": True}, "schema_version True"),
        ({"identity": 7}, "identity"),
        ({"run_id": 7}, "run_id"),
        ({"version": []}, "version"),
        ({"objects": None}, "objects"),
        ({"objects": {"a": {"size": -1, "sha256": "a" * 64}}}, "'a'"),
        ({"objects": {"a": {"size": 1, "sha256": None}}}, "'a'"),
        ({"tensors": []}, "tensors"),
        ({"tensors": {"w": "1"}}, "'w'"),
    ],
)
def test_wrong_manifests_are_refused_by_name(change, words):
    with pytest.raises(SnapshotError, match=words):
        parse_manifest({**manifest(), **change})


@pytest.mark.parametrize("raw", [b"", b"[]", b"{", b'{"a": 1, "a": 2}', b"\xff"])
def test_what_is_no_manifest(raw):
    with pytest.raises(SnapshotError):
        parse_manifest(raw)


def test_names_of_identities_are_checked():
    with pytest.raises(SnapshotError):
        manifest(identity="initial")
    json.dumps(manifest())
