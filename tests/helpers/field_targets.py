"""What the check programs of the field cases call: functions of paths that raise where the library refuses."""

from __future__ import annotations

import os
import tempfile

from cwtrain.hotload import WeightMirror
from cwtrain.snapshots import inspect_snapshot, read_header


def inspect_directory(path: str) -> None:
    """`ckpt_dirs`: a checkpoint directory."""
    inspect_snapshot(path)


def open_file(path: str) -> None:
    """`st_files`: one safetensors file."""
    read_header(path)


def verify_on_base(base: str, delta: str) -> None:
    """`delta_chain`: a delta directory on a full checkpoint."""
    inspect_snapshot(delta, verify="full", base=base)


def mirror_on_base(base: str, delta: str) -> None:
    """`delta_chain`: a mirror made of a full checkpoint `full_N`, and a delta applied to it."""
    version = os.path.basename(base).removeprefix("full_")
    with (
        tempfile.TemporaryDirectory() as directory,
        WeightMirror.create(base, os.path.join(directory, "m"), version=version, workers=1) as mirror,
    ):
        try:
            mirror.apply_delta(delta)
        finally:
            mirror.verify()
