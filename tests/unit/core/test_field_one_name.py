"""A text is one name where several may be given, and neither its letters nor its parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cwtrain.errors import ConfigError
from cwtrain.hotload.bases import MemoryBase
from cwtrain.hotload.delta import write_full_snapshot
from cwtrain.hotload.writer import SnapshotWriter
from cwtrain.snapshots.checkpoint import open_checkpoint
from cwtrain.storage import Location, MemoryStore
from helpers.tiny_checkpoint import write_full

TENSORS = {name: ("F32", (1,), bytes(range(4))) for name in ("a", "b", "ab", "layer.ab")}


def test_one_name_keeps_one_tensor_of_a_snapshot(tmp_path: Path) -> None:
    source = write_full(tmp_path / "source", TENSORS)
    assert list(open_checkpoint(write_full_snapshot(source, tmp_path / "out", names="ab")).tensors) == ["ab"]
    with pytest.raises(ConfigError, match="names= has tensor 'abb'"):
        write_full_snapshot(source, tmp_path / "other", names="abb")


def test_one_name_is_read_into_a_base_without_those_that_are_parts_of_it(tmp_path: Path) -> None:
    base = MemoryBase()
    base.load(write_full(tmp_path / "source", TENSORS), "x", names="layer.ab")
    assert list(base.types()) == ["layer.ab"]


def test_one_name_is_all_that_a_writer_waits_for(tmp_path: Path) -> None:
    sides = write_full(tmp_path / "sides", TENSORS)
    store = MemoryStore()
    with SnapshotWriter(store, Location("memory", "p"), "x", kind="full", side_files=sides, names="ab") as writer:
        writer.add("ab", np.ones(1, np.float32))
        assert list(writer.finalise([writer.close()]).checksums) == ["ab"]
