"""Memory of a mirror does not grow with the size of its tensors."""

import json
import subprocess
import sys

import pytest

from helpers import snapshot_files as sf

SIZE = 160 << 20

WORK = """
import resource, sys
from cwtrain.hotload import WeightMirror
import cwtrain.snapshots._sweep, cwtrain.hotload._mirror_in_place
base, root, delta, in_place = sys.argv[1:]
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
with WeightMirror.create(base, root, workers=1, in_place=in_place == "1") as mirror:
    mirror.apply_delta(delta)
    mirror.verify()
print((peak() - before) >> 10)
"""


@pytest.mark.parametrize("in_place", [False, True], ids=["slots", "in-place"])
def test_making_and_updating_take_bounded_memory(tmp_path, in_place):
    sf.write_json(tmp_path / "base" / "config.json", {})
    head = sf.with_header(json.dumps({"big": {"dtype": "U8", "shape": [SIZE], "data_offsets": [0, SIZE]}}))
    for name, last in (("base", b"\0"), ("new", b"\1")):
        (tmp_path / name).mkdir(exist_ok=True)
        with open(tmp_path / name / "model.safetensors", "wb") as file:
            file.write(head)
            file.seek(len(head) + SIZE - 1)
            file.write(last)
    from cwtrain.hotload.delta import write_delta

    write_delta(tmp_path / "base", tmp_path / "new", tmp_path / "d", version=1, base_version=0, workers=1)
    arguments = [str(tmp_path / name) for name in ("base", "m", "d")]
    told = subprocess.run(
        [sys.executable, "-c", WORK, *arguments, str(int(in_place))], capture_output=True, text=True, check=False
    )
    assert told.returncode == 0, told.stderr
    assert int(told.stdout) < 32
