"""Shards on several nodes: each rank sends its own, rank 0 publishes from headers alone, against a bucket in memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cwtrain.errors import IntegrationError, SnapshotLayoutError
from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.snapshots import inspect_snapshot
from cwtrain.snapshots._digests import recorded_digest
from cwtrain.storage import Location
from cwtrain.storage.memory import MemoryStore
from cwtrain_slime._parts import PartsSender, Send, Spread, _record, headers, local_shards, send, spread_of
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand

MINE, THEIRS = "model-00000-of-00002.safetensors", "model-00001-of-00002.safetensors"
LOCATION = Location(bucket="b", path_prefix="p")


@pytest.fixture
def nodes(tmp_path: Path) -> tuple[Path, Path]:
    """Rank 0's and rank 1's directories of one version: a shard each, the index with rank 0."""
    old, new = tiny_tensors(0), tiny_tensors(1)
    other = {**old, "embed.weight": ("BF16", (4, 2), bytes(range(1, 17)))}
    whole = tmp_path / "0"
    write_delta_by_hand(whole, old, new)
    os.rename(whole / "model-00000-of-00001.safetensors", whole / MINE)
    part = tmp_path / "1"
    write_delta_by_hand(part, old, other)
    os.rename(part / "model-00000-of-00001.safetensors", part / THEIRS)
    (part / INDEX_NAME).unlink()
    index = json.loads((whole / INDEX_NAME).read_text())
    index["weight_map"] = {"layer.weight": MINE, "embed.weight": THEIRS}
    (whole / INDEX_NAME).write_text(json.dumps(index))
    return whole, part


def question(nodes: tuple[Path, Path]) -> Send:
    spread = spread_of([local_shards(node) for node in nodes])
    assert spread is not None
    return Send(bucket="b", path_prefix="p", identity="run-v000001", run_id="run", workers=2, spread=spread)


def test_a_rank_sends_what_only_it_has(nodes: tuple[Path, Path]) -> None:
    store = MemoryStore("b")
    asked = question(nodes)
    assert asked.spread.elsewhere == (THEIRS,)
    assert send(nodes[0], 0, asked, s3=store) == {}, "rank 0's publisher sends rank 0's"
    sent = send(nodes[1], 1, asked, s3=store)
    assert list(sent) == [THEIRS]
    assert store.get(LOCATION.key("run-v000001", THEIRS)) == (nodes[1] / THEIRS).read_bytes()
    assert store.head(LOCATION.key("run-v000001", INDEX_NAME)) is None
    assert send(nodes[1], 1, asked, s3=store) == sent, "again, after a kill: nothing is sent twice, nothing conflicts"


def test_headers_are_enough_to_inspect(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    """The stand-in has header, size and the record of the real bytes, and no weights."""
    asked = question(nodes)
    (part,) = headers(nodes[1], 1, asked.spread)
    assert part.size_bytes == (nodes[1] / THEIRS).stat().st_size
    assert headers(nodes[0], 0, asked.spread) == []
    laid = tmp_path / "laid"
    laid.mkdir()
    for path in nodes[0].iterdir():
        (laid / path.name).symlink_to(path)
    with (laid / THEIRS).open("wb") as file:
        file.write(part.header)
        file.truncate(part.size_bytes)
    (sha256,) = send(nodes[1], 1, asked, s3=MemoryStore("b")).values()
    _record(laid / THEIRS, sha256)
    snapshot = inspect_snapshot(laid, previous_identity="run-v000000")
    assert snapshot.tensors == 2
    (file,) = [one for one in snapshot.files if one.name == THEIRS]
    assert file.sha256 == sha256


def test_a_shard_that_a_shared_disk_shows_late_is_not_written_to(nodes: tuple[Path, Path], tmp_path: Path) -> None:
    """Rank 0 did not see it when the ranks told what they have, and sees it now: it stays as the trainer wrote it."""
    (part,) = headers(nodes[1], 1, question(nodes).spread)
    before = (nodes[1] / THEIRS).read_bytes()
    late = nodes[0] / THEIRS
    late.write_bytes(before)
    publisher: Any = SimpleNamespace(state_dir=tmp_path / "state")
    talk: Any = None
    with PartsSender().sending(nodes[0], [part], talk, Spread(owners={MINE: 0, THEIRS: 1}), publisher) as directory:
        assert (directory / MINE).is_symlink()
        assert not (directory / THEIRS).is_symlink()
        assert (directory / THEIRS).stat().st_size == len(before)
    assert late.read_bytes() == before


def test_a_disk_without_extended_attributes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "setxattr", refuse)
    path = tmp_path / "part"
    path.write_bytes(b"x")
    with pytest.raises(IntegrationError, match="extended attributes") as caught:
        _record(path, "0" * 64)
    assert "CWTRAIN_HOTLOAD_STATE_DIR" in str(caught.value.hint)
    about = path.stat()
    assert recorded_digest(str(path), inode=about.st_ino, size_bytes=1, mtime_ns=about.st_mtime_ns) is None


@pytest.mark.parametrize("raw", [b"", b"<html></html> and more", b"\x00" * 64], ids=["empty", "a page", "zeros"])
def test_a_shard_that_is_none_is_named(raw: bytes, nodes: tuple[Path, Path]) -> None:
    asked = question(nodes)
    (nodes[1] / THEIRS).write_bytes(raw)
    with pytest.raises(SnapshotLayoutError, match="no safetensors file"):
        headers(nodes[1], 1, asked.spread)


def test_what_lies_where_nothing_was_written(tmp_path: Path) -> None:
    assert local_shards(tmp_path / "nowhere") == {"shards": {}, "named": None}
    (tmp_path / INDEX_NAME).write_text("[]")
    assert local_shards(tmp_path) == {"shards": {INDEX_NAME: 2}, "named": None}
