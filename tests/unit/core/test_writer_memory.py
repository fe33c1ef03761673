"""The streaming writer's memory beside its base, and that sending begins while tensors are still coming."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from cwtrain.hotload import SnapshotWriter
from cwtrain.storage import Location, MemoryStore
from helpers.streamed import TINY, side_files

MIB = 1 << 20

_CHILD = """
import json, resource, sys
import numpy as np
from cwtrain.hotload import MemoryBase, SnapshotWriter, TensorType
from cwtrain.storage import Location, MemoryStore

peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


state = {f"t{number}": np.full(16 << 20, number, np.uint8) for number in range(8)}
base, store = MemoryBase(), MemoryStore()
base.begin(fill=True)
for name, tensor in state.items():
    base.declare(name, TensorType("U8", tensor.shape, tensor.nbytes))
    base.write(name, 0, memoryview(tensor))
base.commit("v0", checksums={})
for tensor in state.values():
    tensor[::200] += 1
before = peak()
with SnapshotWriter(store, Location("memory", "rl"), "v1", kind="delta", base=base, memory_bytes=%d) as writer:
    for name, tensor in state.items():
        writer.add(name, tensor)
    written = writer.finalise([writer.close()])
print(json.dumps({"grown": peak() - before, "changed": written.changed_tensors}))
"""


@pytest.mark.parametrize("budget", [128 * MIB, 144 * MIB], ids=["the least", "room for larger pieces"])
def test_a_delta_needs_no_more_than_its_budget_beside_the_base(budget: int) -> None:
    """128 MiB of tensors and as much of base, in tensors that are larger than a worker's buffers."""
    done = subprocess.run([sys.executable, "-c", _CHILD % budget], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["changed"] == 8
    assert found["grown"] < budget


_FORKED = """
import json, os
import numpy as np
from cwtrain.hotload import MemoryBase, SnapshotWriter, TensorType
from cwtrain.storage import Location, MemoryStore


def used(*processes):
    texts = [open(f"/proc/{process}/smaps_rollup").read() for process in processes]
    return sum(int(line.split()[1]) << 10 for text in texts for line in text.splitlines() if line.startswith("Pss:"))


tensor, base = np.ones(64 << 20, np.uint8), MemoryBase()
base.begin(fill=True)
base.declare("t", TensorType("U8", tensor.shape, tensor.nbytes))
base.write("t", 0, memoryview(tensor))
base.commit("v0", checksums={})
ours, theirs = os.pipe()
child = os.fork()
if not child:
    os.close(theirs)
    os.read(ours, 1)
    os._exit(0)
before = used(os.getpid(), child)
base.write("t", 0, memoryview(tensor))
print(json.dumps(used(os.getpid(), child) - before))
os.close(theirs)
os.waitpid(child, 0)
"""


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="tells no process's share of memory")
def test_a_base_is_not_copied_for_a_process_that_was_forked() -> None:
    """A data loader's workers are forked and stay: a base of many GiB must not be there twice."""
    done = subprocess.run([sys.executable, "-c", _FORKED], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) < 8 * MIB


def test_sending_begins_while_tensors_are_still_coming(tmp_path: Path) -> None:
    store = MemoryStore()
    rng = np.random.default_rng(1)
    sides = side_files(tmp_path / "sides")
    with SnapshotWriter(
        store, Location("memory", "rl"), "v1", kind="full", side_files=sides, sizes=TINY, shard_bytes=1000
    ) as writer:
        writer.add("first", rng.integers(0, 256, 5000, dtype=np.uint8))
        deadline = time.monotonic() + 30
        while "rl/v1/model-r00000-00000.safetensors" not in store.objects:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        writer.add("second", rng.integers(0, 256, 5000, dtype=np.uint8))
        writer.finalise([writer.close()])
