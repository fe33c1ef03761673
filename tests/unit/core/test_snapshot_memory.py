"""B56: ordinary bounded reads. Memory does not grow with the size of a shard, and nothing is mapped."""

import json
import os
import random
import struct
import subprocess
import sys
import tracemalloc
import zlib
from pathlib import Path

import pytest

from cwtrain.errors import SnapshotLayoutError
from cwtrain.snapshots.header import read_header
from helpers import snapshot_files as sf

GIB = 1 << 30
SNAPSHOTS = Path(__file__).parents[3] / "packages/cwtrain-core/src/cwtrain"

LIMITED = """
import mmap, resource, sys
def refuse(*args, **kwargs):
    raise OSError(19, "No such device")
mmap.mmap = refuse
work, path, other = sys.argv[1:]
from cwtrain.snapshots import inspect_snapshot
if work == "headers":
    resource.setrlimit(resource.RLIMIT_AS, (512 << 20, 512 << 20))
    snapshot = inspect_snapshot(path)
    assert snapshot.total_bytes > 3 << 30
    print(snapshot.tensors)
else:
    import cwtrain.snapshots._codec
    inspect_snapshot(other)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if work == "delta":
        inspect_snapshot(path, verify="full", base=other)
    elif work == "full":
        inspect_snapshot(path, verify="full")
    else:
        from cwtrain.hotload.delta import write_delta
        write_delta(path, other, path + "-delta", version=1, base_version=0, workers=1)
    print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10)
"""


def limited(work, path, other="-") -> int:
    result = subprocess.run(
        [sys.executable, "-c", LIMITED, work, str(path), str(other)], capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


def sparse(directory: Path, name: str, size: int, *, metadata=None, tail: bytes = b"") -> Path:
    """Write a checkpoint of one tensor of ``size`` bytes, zeros but for ``tail``, that takes no room on the disk."""
    sf.write_json(directory / "config.json", {})
    header = {"big": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}
    if metadata:
        header["__metadata__"] = metadata
    head = sf.with_header(json.dumps(header))
    with open(directory / name, "wb") as file:
        file.write(head)
        file.truncate(len(head) + size)
        file.seek(len(head) + size - len(tail))
        file.write(tail)
    return directory


def test_b56_headers_of_a_huge_shard(tmp_path):
    """B56: a 3 GiB shard is inspected in an address space of 512 MiB."""
    assert limited("headers", sparse(tmp_path / "big", "model.safetensors", 3 * GIB)) == 1


def test_b56_verifying_a_delta_takes_bounded_memory(tmp_path):
    """B56: decoding a 192 MiB tensor against its base grows the process by less than 32 MiB."""
    size = 192 << 20
    base = sparse(tmp_path / "base", "model.safetensors", size)
    delta = tmp_path / "delta"
    delta.mkdir()
    value = 1
    for _ in range(size >> 20):
        value = zlib.adler32(bytes(1 << 20), value)
    blob = sf.frame(bytes(size))
    shard = sf.safetensors({"big": ("U8", [len(blob)], blob)}, {"big": f"{value:08x}"})
    (delta / "model-00000-of-00001.safetensors").write_bytes(shard)
    index = {"metadata": sf.DELTA_METADATA, "weight_map": {"big": "model-00000-of-00001.safetensors"}}
    sf.write_json(delta / sf.INDEX, index)
    assert limited("delta", delta, base) < 32


def test_b56_verifying_a_full_snapshot_takes_bounded_memory(tmp_path):
    """B56: checksums of a 192 MiB tensor are compared in blocks."""
    size = 192 << 20
    value = 1
    for _ in range(size >> 20):
        value = zlib.adler32(bytes(1 << 20), value)
    directory = sparse(tmp_path / "full", "model.safetensors", size, metadata={"big": f"{value:08x}"})
    index = {"metadata": {"checksum_format": "adler32"}, "weight_map": {"big": "model.safetensors"}}
    sf.write_json(directory / sf.INDEX, index)
    assert limited("full", directory, directory) < 16


def test_b56_writing_a_delta_takes_bounded_memory(tmp_path):
    """B56: one 192 MiB tensor is encoded within the documented budget, far below its size."""
    size = 192 << 20
    base = sparse(tmp_path / "base", "model.safetensors", size)
    new = sparse(tmp_path / "new", "model.safetensors", size, tail=b"changed")
    assert limited("write", base, new) < 48


HUGE = """
import os, re, sys
base, new, delta, out, workers, apply = sys.argv[1:]
from cwtrain.hotload.delta import apply_delta, write_delta
stats = write_delta(base, new, delta, version=1, base_version=0, workers=int(workers))
assert stats.encoder == {"public": "public"}.get(os.environ["CWTRAIN_DELTA_ENCODER"], "sequences")
if apply == "apply":
    apply_delta(base, delta, out, workers=int(workers))
# Not ru_maxrss: that is inherited from whoever started this process.
print(int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) >> 10)
"""


def peak_of_writing(tmp_path, base, new, *, encoder, workers=2, apply=True) -> int:
    """Return the whole process's peak in MiB, the interpreter and numpy included."""
    if not Path("/proc/self/status").exists():
        pytest.skip("peak memory is read from /proc")
    arguments = [str(tmp_path / "delta"), str(tmp_path / "out"), str(workers), "apply" if apply else "-"]
    result = subprocess.run(
        [sys.executable, "-c", HUGE, str(base), str(new), *arguments],
        env={**os.environ, "CWTRAIN_DELTA_ENCODER": encoder},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert result.returncode == 0, result.stderr
    return int(result.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["sequences", "numpy", "public"])
def test_b56_one_huge_tensor_is_encoded_and_applied_within_the_budget(tmp_path, encoder):
    """B56: two workers have 64 + 2 x 16 MiB for everything. (4 GiB takes as much: 56 MiB, measured by hand.)"""
    base = sparse(tmp_path / "base", "model.safetensors", GIB)
    new = sparse(tmp_path / "new", "model.safetensors", GIB, tail=bytes(range(1, 200)) * 50_000)
    assert peak_of_writing(tmp_path, base, new, encoder=encoder) <= 64 + 2 * 16


@pytest.mark.slow
@pytest.mark.parametrize("encoder", ["sequences", "numpy", "public"])
def test_b56_results_that_wait_are_bounded_where_nothing_compresses(tmp_path, encoder):
    """B56: four workers make frames as large as the tensor; what is not written yet stays within their budget."""
    size = 96 << 20
    base = sparse(tmp_path / "base", "model.safetensors", size)
    new = sparse(tmp_path / "new", "model.safetensors", size, tail=random.Random(1).randbytes(size))
    assert peak_of_writing(tmp_path, base, new, encoder=encoder, workers=4, apply=False) <= 64 + 4 * 16


def test_a_header_that_claims_too_much_costs_no_memory(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", 2 * GIB))
        file.truncate(3 * GIB)
    tracemalloc.start()
    try:
        with pytest.raises(SnapshotLayoutError, match="2147483648 bytes"):
            read_header(str(path))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_b56_nothing_is_memory_mapped():
    """B56: no module of ours that reads weights imports mmap."""
    files = [*SNAPSHOTS.glob("snapshots/*.py"), SNAPSHOTS / "hotload/delta.py"]
    assert len(files) > 10
    assert not [file.name for file in files if "import mmap" in file.read_text() or "memmap" in file.read_text()]
