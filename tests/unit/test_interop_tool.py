"""`tools/interop.py` itself runs in CI, with the published client; here is what it judges with."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest

import interop


def test_two_views_of_one_thing() -> None:
    theirs = {"id": "a", "at": "2026-01-02T03:04:05+00:00", "list": [{"x": 1}, {"x": 2}], "gone": 1, "empty": []}
    ours = {"id": "b", "at": "2026-01-02T03:04:05Z", "list": [{"x": 1}, {"x": 3}], "more": {"y": None}, "empty": []}
    assert interop.compare("a view", theirs, ours) == {
        "only_theirs": ["gone"],
        "only_ours": ["more.y"],
        "values": {"id": ["a", "b"], "list[1].x": [2, 3]},
        "spelling": ["at"],
    }
    assert interop.compare("a view", theirs, theirs) == {}


def test_a_known_difference_is_told_and_not_judged() -> None:
    theirs, ours = {"path": "full0", "files": ["full0/a"]}, {"path": "/x/full0", "files": ["a", "b"]}
    found = interop.compare("hotload inspect, of a delta", theirs, ours)
    assert set(found) == {"known"}
    assert set(found["known"]) == {"path", "files[]"}
    assert set(interop.compare("hotload list", theirs, ours)) == {"values", "only_ours"}


def test_a_step_that_fails_is_noted_and_the_run_goes_on(capsys: pytest.CaptureFixture[str]) -> None:
    run = interop.Run()
    with run.step("one"):
        interop.expect(False, "it holds", {"saw": 1})
    with run.step("two", "api"):
        interop.expect(True, "it holds", None)
    with run.step("three"):
        run.same("a view", {"a": 1, "b": 2}, {"b": 2})
    assert [(entry["step"], entry["ok"]) for entry in run.steps] == [("one", False), ("two", True), ("three", False)]
    assert "it holds; saw {'saw': 1}" in run.steps[0]["problem"]
    assert run.differences == {"a view": {"only_theirs": ["a"]}}
    assert "FAILED one" in capsys.readouterr().err


def test_a_checksum_is_changed_and_nothing_else(tmp_path: Path) -> None:
    delta = tmp_path / "delta"
    delta.mkdir()
    header = {"__metadata__": {"t": "0badcafe"}, "t": {"dtype": "U8", "shape": [3], "data_offsets": [0, 3]}}
    text = json.dumps(header).encode()
    (delta / "a.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + b"abc")
    (delta / "index.json").write_bytes(b"{}")
    wrong = interop.with_wrong_checksum(delta, tmp_path / "wrong")
    raw = (wrong / "a.safetensors").read_bytes()
    assert raw[8 + len(text) :] == b"abc"
    assert json.loads(raw[8 : 8 + len(text)])["__metadata__"] == {"t": "00000001"}
    assert (wrong / "index.json").read_bytes() == b"{}"
    assert set(interop.tensor_hashes(delta)) == {"t"}
