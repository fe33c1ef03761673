"""One operation in a fresh process, with what it cost: python operations.py NAME '{"argument": ...}'

Both sides run this file, each with its own Python, and call the public API of the `cwtrain` that this Python has.
Imports and what must be there before are outside the clock; so is what is written for the check afterwards. Prints
JSON: wall and CPU seconds (user + system), peak MiB, by how much that is above what the imports take, calls of fsync.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import without

Operation = tuple[Callable[[], Any], Callable[[], Any]]
"""What is timed, and what is done after that."""

fsyncs = 0
imported_mib = 0.0
"""The largest resident size when everything was imported, and nothing else had happened."""


def counted(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the call, counted."""

    def wrapper(*args: Any) -> Any:
        global fsyncs
        fsyncs += 1
        return call(*args)

    return wrapper


def nothing() -> None:
    """Do nothing."""


def first_use() -> None:
    """Write something tiny, so that what is imported or probed at first use is outside the clock."""
    global imported_mib
    import numpy as np
    import zstandard

    from cwtrain.hotload.delta import write_delta as write
    from cwtrain.hotload.delta import write_full_snapshot

    imported_mib = peak_mib()
    assert np.__version__
    assert zstandard.__version__
    with tempfile.TemporaryDirectory() as place:
        base, new, out, full = (f"{place}/{name}" for name in ("base", "new", "out", "full"))
        tiny(base, b"\0")
        tiny(new, b"\1")
        write(base, new, out, version="000001", base_version="000000")
        write_full_snapshot(base, full)


def tiny(directory: str, byte: bytes) -> None:
    """Write a checkpoint of one small tensor."""
    os.mkdir(directory)
    header = json.dumps({"w": {"dtype": "U8", "shape": [4096], "data_offsets": [0, 4096]}}).encode()
    header += b" " * (-len(header) % 8)
    data = len(header).to_bytes(8, "little") + header + byte * 4096
    Path(directory, "model-00001-of-00001.safetensors").write_bytes(data)
    index = {"metadata": {"total_size": 4096}, "weight_map": {"w": "model-00001-of-00001.safetensors"}}
    Path(directory, "model.safetensors.index.json").write_text(json.dumps(index))
    Path(directory, "config.json").write_text("{}")


def write_delta(base: str, new: str, out: str, number: int = 1) -> Operation:
    """Write a delta."""
    from cwtrain.hotload.delta import write_delta as write

    first_use()
    return lambda: write(base, new, out, version=f"{number:06d}", base_version=f"{number - 1:06d}"), nothing


def write_full(src: str, dest: str) -> Operation:
    """Write a full snapshot with checksums."""
    from cwtrain.hotload.delta import write_full_snapshot

    first_use()
    return lambda: write_full_snapshot(src, dest), nothing


def mirror_apply(base: str, root: str, deltas: list[str], dest: str) -> Operation:
    """Apply the last delta to a mirror of `base`; those before it are applied outside the clock."""
    mirror = make_mirror(base, root)
    for delta in deltas[:-1]:
        mirror.apply_delta(delta)
    return lambda: mirror.apply_delta(deltas[-1]), lambda: mirror.write_full_snapshot(dest)


def write_and_apply(base: str, root: str, before: str, old: str, new: str, out: str, dest: str) -> Operation:
    """Write the delta from `old` (what the mirror holds after `before`) to `new`, then apply it to the mirror."""
    from cwtrain.hotload.delta import write_delta as write

    mirror = make_mirror(base, root)
    mirror.apply_delta(before)

    def run() -> None:
        write(old, new, out, version="000002", base_version="000001")
        mirror.apply_delta(out)

    return run, lambda: mirror.write_full_snapshot(dest)


def advance(base: str, root: str, before: str, old: str, new: str, out: str, dest: str) -> Operation:
    """Do what `write_and_apply` does, in one pass (ours only)."""
    mirror = make_mirror(base, root)
    mirror.apply_delta(before)
    return lambda: mirror.write_delta(new, out, version=2), lambda: mirror.write_full_snapshot(dest)


def make_mirror(base: str, root: str) -> Any:
    """Return a new mirror."""
    from cwtrain.hotload import WeightMirror

    return WeightMirror.create(base, root, version="000000")


def loader_for(endpoint: str, api: str) -> Any:
    """Return a HotLoader for the benchmark's service that has published something tiny: what a run does once."""
    from cwtrain.hotload import HotLoader
    from cwtrain.infra import InferenceClient, s3_client

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "US-EAST-04A"}
    s3: Any = s3_client(endpoint, **keys)
    client = InferenceClient("token-of-a-benchmark", base_url=api)
    loader = HotLoader(client, deployment_id="d", s3=s3)
    with tempfile.TemporaryDirectory() as place:
        tiny(f"{place}/tiny", b"\0")
        loader.publish(f"{place}/tiny", identity="tiny")
    return loader


def publish_delta_peer(base: str, new: str, out: str, endpoint: str, api: str) -> Operation:
    """Write a delta directory and publish it."""
    from cwtrain.hotload.delta import write_delta as write

    first_use()
    loader = loader_for(endpoint, api)

    def run() -> None:
        write(base, new, out, version="000001", base_version="000000")
        loader.publish(out, identity="v1", previous_identity="v0")

    return run, nothing


def publish_delta_ours(base: str, new: str, out: str, endpoint: str, api: str) -> Operation:
    """Stream the tensors of `new` as a delta on `base` and have it hot-loaded; nothing is written to `out`."""
    from cwtrain.hotload import CheckpointBase, SnapshotWriter

    first_use()
    loader = loader_for(endpoint, api)
    tensors = in_memory(new)

    def run() -> None:
        old = CheckpointBase(base, "v0")
        with SnapshotWriter(loader.store, loader.location, "v1", kind="delta", base=old) as writer:
            for name, data, dtype, shape in tensors:
                writer.add(name, data, dtype=dtype, shape=shape)
            written = writer.finalise([writer.close()])
        loader.trigger(written)

    return run, nothing


def publish_full_peer(new: str, out: str, endpoint: str, api: str) -> Operation:
    """Write a full snapshot with checksums and publish it."""
    from cwtrain.hotload.delta import write_full_snapshot

    first_use()
    loader = loader_for(endpoint, api)

    def run() -> None:
        write_full_snapshot(new, out)
        loader.publish(out, identity="v1")

    return run, nothing


def publish_full_ours(new: str, out: str, endpoint: str, api: str) -> Operation:
    """Stream the tensors of `new` as a full snapshot and have it hot-loaded; nothing is written to `out`."""
    from cwtrain.hotload import SnapshotWriter

    first_use()
    loader = loader_for(endpoint, api)
    tensors = in_memory(new)

    def run() -> None:
        with SnapshotWriter(loader.store, loader.location, "v1", kind="full", side_files=new) as writer:
            for name, data, dtype, shape in tensors:
                writer.add(name, data, dtype=dtype, shape=shape)
            written = writer.finalise([writer.close()])
        loader.trigger(written)

    return run, nothing


def in_memory(directory: str) -> list[tuple[str, bytearray, str, list[int]]]:
    """Return name, bytes, dtype and shape of each tensor of a checkpoint: a trainer has them in memory."""
    found = []
    for path in sorted(Path(directory).glob("*.safetensors")):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            for name, entry in header.items():
                begin, end = entry["data_offsets"]
                file.seek(8 + length + begin)
                data = bytearray(end - begin)
                assert file.readinto(data) == len(data)
                found.append((name, data, entry["dtype"], entry["shape"]))
    return found


def cut_chain_peer(base: str, root: str, deltas: list[str], dest: str, endpoint: str, api: str) -> Operation:
    """Rebuild the full snapshot from a mirror that followed the deltas, and publish it."""
    mirror = make_mirror(base, root)
    for delta in deltas:
        mirror.apply_delta(delta)
    loader = loader_for(endpoint, api)

    def run() -> None:
        mirror.write_full_snapshot(dest)
        loader.publish(dest, identity="v1")

    return run, nothing


def cut_chain_ours(base: str, root: str, deltas: list[str], dest: str, endpoint: str, api: str) -> Operation:
    """Publish a mirror that followed the deltas: it is a full snapshot, and nothing is written to `dest`."""
    mirror = make_mirror(base, root)
    for delta in deltas:
        mirror.apply_delta(delta)
    loader = loader_for(endpoint, api)
    return lambda: loader.publish(mirror, identity="v1"), nothing


def stream_delta(size_mib: int, first: int, endpoint: str, api: str) -> Operation:
    """Stream tensors in memory as deltas: once as fast as it goes, and once over a line as slow as encoding is."""
    import numpy as np

    from cwtrain.hotload import MemoryBase, SnapshotWriter, TensorType

    first_use()
    loader = loader_for(endpoint, api)
    random = np.random.default_rng(first)
    tensors = {f"layer.{n}.weight": random.integers(0, 1 << 16, 4 << 20, dtype=np.uint16) for n in range(size_mib // 8)}
    base = MemoryBase()
    base.begin(fill=True)
    for name, values in tensors.items():
        base.declare(name, TensorType("BF16", values.shape, values.nbytes))
        base.write(name, 0, memoryview(values).cast("B"))
    base.commit("v0", checksums={})

    def step() -> None:
        """Change about 2 % of the elements."""
        for values in tensors.values():
            values[random.integers(0, values.size, values.size // 50)] += 1

    def write(identity: str, limit: float | None) -> tuple[float, Any]:
        step()
        began = time.perf_counter()
        with SnapshotWriter(
            loader.store, loader.location, identity, kind="delta", base=base, max_bytes_per_second=limit
        ) as writer:
            for name, values in tensors.items():
                writer.add(name, values, dtype="BF16")
            written = writer.finalise([writer.close()])
        return time.perf_counter() - began, written

    held = current_mib()
    write(f"s{first}", None)
    encoding, written = write(f"s{first + 1}", None)
    size = written.uploaded_bytes

    def run() -> None:
        limit = size / encoding
        whole, again = write(f"s{first + 2}", limit)
        upload = again.uploaded_bytes / limit
        # Until the last tensor was taken; a shared machine does not give two runs the same speed.
        encode = again.seconds["produce"] + again.seconds["add"] - again.seconds["blocked"]
        results.update(
            extra_mib=peak_mib() - held,
            encode_seconds=encode,
            upload_seconds=upload,
            whole_seconds=whole,
            over_slower=whole / max(encode, upload),
            over_sum=whole / (encode + upload),
        )

    return run, nothing


results: dict[str, float] = {}
"""What an operation says beside its cost."""


def current_mib() -> float:
    """Return the resident size now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / (1 << 20)


def floor(base: str, new: str) -> Operation:
    """Read both, XOR, Adler-32 and zstd level 1 of each MiB, in one thread; nothing is written."""
    import numpy as np
    import zstandard

    try:
        from zlib_ng.zlib_ng import adler32
    except ImportError:
        from zlib import adler32
    size = 1 << 20
    one, two = (np.empty(size, dtype=np.uint8) for _ in range(2))
    compressor = zstandard.ZstdCompressor(level=1)

    def run() -> None:
        for name in sorted(os.listdir(base)):
            if not name.endswith(".safetensors"):
                continue
            with Path(base, name).open("rb", buffering=0) as old, Path(new, name).open("rb", buffering=0) as current:
                while count := old.readinto(one):
                    current.readinto(two)
                    adler32(two[:count])
                    np.bitwise_xor(one[:count], two[:count], out=one[:count])
                    compressor.compress(one[:count])

    return run, nothing


def spin(seconds: float) -> Operation:
    """Be busy for some seconds: how much CPU one gets."""

    def run() -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            pass

    return run, nothing


OPERATIONS: dict[str, Callable[..., Operation]] = {
    function.__name__: function
    for function in (
        *(write_delta, write_full, mirror_apply, write_and_apply, advance, floor, spin, stream_delta),
        *(publish_delta_ours, publish_delta_peer, publish_full_ours, publish_full_peer, cut_chain_ours, cut_chain_peer),
    )
}


def settle() -> None:
    """Wait until nothing runs that was begun before: OpenBLAS, of numpy, spins for 0.1 s in a thread of its own."""
    before = spent()
    while True:
        time.sleep(0.03)
        now = spent()
        if now - before < 0.003:
            return
        before = now


def spent() -> float:
    """Return the user and system seconds of this process and those that it started."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def peak_mib() -> float:
    """Return the largest resident size so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(name: str, arguments: str) -> None:
    """Make it ready, run it once under the clock, print what it took."""
    without.apply()
    os.fsync, os.fdatasync = counted(os.fsync), counted(os.fdatasync)
    given = json.loads(arguments)
    for key in ("out", "dest", "root"):
        shutil.rmtree(given.get(key, ""), ignore_errors=True)
    timed, afterwards = OPERATIONS[name](**given)
    os.sync()
    settle()
    synced, before, began = fsyncs, spent(), time.perf_counter()
    timed()
    wall, cpu = time.perf_counter() - began, spent() - before
    result = {
        "wall": wall,
        "cpu": cpu,
        "peak_mib": peak_mib(),
        "grown_mib": peak_mib() - imported_mib,
        "fsyncs": fsyncs - synced,
        **results,
    }
    afterwards()
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
