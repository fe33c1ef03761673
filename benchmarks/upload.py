"""What an upload costs the client: ours, the published wheel's, and the least that it can be.

    CWTRAIN_BENCH_OURS=.../python CWTRAIN_BENCH_PEER=.../python python benchmarks/upload.py [--size small|full]

Both are Pythons of one version, each with one of the two packages and without the other. The server throws the bytes
away and is a process of its own, so what is compared is the CPU of the client, user and system, each upload in a fresh
process. The floor is SHA-256 of each file and sendfile over one connection. Files lie in the page cache.

The snapshot is one of ours: its shards carry the checksum header and their SHA-256 is on record. `user's files` are the
same without the record. After each upload the server is asked for names and sizes of what it got.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import re
import statistics
import subprocess
import tempfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARD_MIB = {"small": 160, "full": 494}
SHARDS = 2
TENSORS = 8


def rows(
    size: str,
    rounds: int,
    *,
    ours: str | None = None,
    peer: str | None = None,
    directory: str | None = None,
    floor: bool = True,
) -> list[dict[str, Any]]:
    """Return the table's rows: metric, ours, peer (for the floor rows: the floor), ratio, unit, and the target.

    ``ours`` and ``peer`` are the two Pythons (else ``CWTRAIN_BENCH_OURS`` and ``CWTRAIN_BENCH_PEER``), ``directory`` is
    where the files are made (a temporary directory). The ratio is peer over ours, and ours over the floor. Without
    ``floor`` that one is left out.
    """
    ours = ours or os.environ["CWTRAIN_BENCH_OURS"]
    peer = peer or os.environ["CWTRAIN_BENCH_PEER"]
    with tempfile.TemporaryDirectory(prefix="cwtrain-bench-", dir=directory) as place:
        known, unknown = Path(place, "known"), Path(place, "unknown")
        make_snapshot(known, SHARD_MIB[size] << 20)
        unknown.mkdir()
        for file in known.iterdir():
            # Another file of the same bytes on disk: what is recorded about the first is not about the second.
            subprocess.run(["cp", "--reflink=auto", str(file), str(unknown)], check=True)
        record(ours, known)
        with sink(ours) as http_port:
            run = Runs(http_port, "http", "")
            operations = {
                "ours": lambda: run(ours, "ours", known),
                "peer": lambda: run(peer, "peer", known),
                "user": lambda: run(ours, "ours", unknown),
            }
            if floor:
                operations["floor"] = lambda: run(ours, "floor", known)
            else:  # the other side may gain from what is recorded about its own files, too
                operations["peer, user"] = lambda: run(peer, "peer", unknown)
            plain = interleaved(rounds, operations)
        crt, key = certificate(Path(place))
        with sink(ours, crt, key) as tls_port:
            run_tls = Runs(tls_port, "https", str(crt))
            tls = interleaved(
                rounds,
                {"ours": lambda: run_tls(ours, "ours", known), "peer": lambda: run_tls(peer, "peer", known)},
            )
    against_floor = "upload client CPU, http, against SHA-256 + sendfile"
    return [
        row("upload client CPU, http", plain, "ours", "peer", "cpu", ">= 2.3"),
        *([row(against_floor, plain, "ours", "floor", "cpu", "<= 1.3")] if floor else []),
        row("upload client CPU, http, user's files", plain, "user", "peer" if floor else "peer, user", "cpu", ""),
        row("upload client CPU, https", tls, "ours", "peer", "cpu", ">= 1.4"),
        row("upload wall time, http", plain, "ours", "peer", "wall", ""),
        row("upload peak memory, http", plain, "ours", "peer", "peak_mib", ""),
    ]


def row(
    metric: str, runs: dict[str, list[dict[str, float]]], one: str, other: str, what: str, target: str
) -> dict[str, Any]:
    """Return one row from the medians."""
    left = [run[what] for run in runs[one]]
    right = [run[what] for run in runs[other]]
    a, b = statistics.median(left), statistics.median(right)
    return {
        "metric": metric,
        "ours": round(a, 3),
        "peer": round(b, 3),
        "ratio": round(a / b if other == "floor" else b / a, 2),
        "unit": "MiB" if what == "peak_mib" else "s",
        "target": target,
        "spread": [[round(min(left), 3), round(max(left), 3)], [round(min(right), 3), round(max(right), 3)]],
    }


def interleaved(
    rounds: int, operations: dict[str, Callable[[], dict[str, float]]]
) -> dict[str, list[dict[str, float]]]:
    """Run all operations in each round, every second round backwards."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in operations}
    for number in range(rounds):
        for name in list(operations)[:: -1 if number % 2 else 1]:
            found[name].append(operations[name]())
    return found


class Runs:
    """Uploads to one sink, each under an identity of its own."""

    def __init__(self, port: int, scheme: str, ca_bundle: str) -> None:
        self._port, self._scheme, self._ca_bundle, self._count = port, scheme, ca_bundle, 0

    def __call__(self, python: str, who: str, directory: Path, *, without: str = "") -> dict[str, float]:
        """Run one upload in a fresh process and return what it printed; see `without.py` for what can be left out."""
        self._count += 1
        identity = f"v{self._count}"
        for file in directory.iterdir():
            with file.open("rb", buffering=0) as stream:
                while stream.read(1 << 20):  # into the page cache
                    pass
        endpoint = f"{self._scheme}://127.0.0.1:{self._port}"
        command = [python, str(HERE / "upload_op.py"), who, str(directory), endpoint, self._ca_bundle, identity]
        environ = {
            name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "CW_", "CWTRAIN_"))
        }
        if without:
            environ["CWTRAIN_BENCH_WITHOUT"] = without
        done = subprocess.run(command, check=False, capture_output=True, text=True, env=environ)
        if done.returncode:
            raise SystemExit(f"{who}: the upload failed\n{done.stderr[-3000:]}")
        if who != "floor":
            self._verify(identity, directory, names=who != "stream")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def _verify(self, identity: str, directory: Path, *, names: bool) -> None:
        """Compare names and sizes at the server, or, of what was streamed, all bytes together to 1 %."""
        wanted = {file.name: file.stat().st_size for file in directory.iterdir()}
        if self._scheme == "https":
            import ssl

            context = ssl.create_default_context(cafile=self._ca_bundle)
            connection: http.client.HTTPConnection = http.client.HTTPSConnection(
                "127.0.0.1", self._port, context=context
            )
        else:
            connection = http.client.HTTPConnection("127.0.0.1", self._port)
        with contextlib.closing(connection):
            connection.request("GET", f"/bench?prefix={identity}/")
            text = connection.getresponse().read().decode()
        found = {
            key.partition("/")[2]: int(size) for key, size in re.findall("<Key>(.*?)</Key><Size>(.*?)</Size>", text)
        }
        if not names and abs(sum(found.values()) / sum(wanted.values()) - 1) < 0.01:
            return
        if found != wanted:
            raise RuntimeError(f"the server has {found}, and {wanted} was uploaded")


@contextlib.contextmanager
def sink(python: str, *arguments: Path, bytes_per_second: int = 0) -> Iterator[int]:
    """Run a sink and give its port. ``bytes_per_second`` limits each connection."""
    command = [python, str(HERE / "upload_sink.py"), *map(str, arguments)]
    if bytes_per_second:
        command += ["--bytes-per-second", str(bytes_per_second)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline())
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()


def certificate(directory: Path) -> tuple[Path, Path]:
    """Make a certificate of 127.0.0.1 and return it with its key."""
    crt, key = directory / "crt.pem", directory / "key.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-keyout", str(key), "-out", str(crt)),
        ],
        check=True,
        capture_output=True,
    )
    return crt, key


def record(python: str, directory: Path) -> None:
    """Record the SHA-256 of each file, as our writers do."""
    code = "import sys; from cwtrain.snapshots._digests import record_digest; [record_digest(p) for p in sys.argv[1:]]"
    subprocess.run([python, "-c", code, *map(str, directory.iterdir())], check=True)


def make_snapshot(directory: Path, shard_bytes: int) -> None:
    """Write a full snapshot of random bytes with per-tensor checksums."""
    directory.mkdir(parents=True)
    weight_map = {}
    size = shard_bytes // TENSORS
    for number in range(1, SHARDS + 1):
        shard = f"model-{number:05d}-of-{SHARDS:05d}.safetensors"
        checksums: dict[str, str] = {}
        header: dict[str, Any] = {"__metadata__": checksums}
        with (directory / shard).open("wb") as file:
            room = 4096
            file.write(b" " * (8 + room))
            for tensor in range(TENSORS):
                name = f"layer.{number}.{tensor}.weight"
                data = os.urandom(size)
                file.write(data)
                checksums[name] = f"{zlib.adler32(data):08x}"
                offsets = [tensor * size, (tensor + 1) * size]
                header[name] = {"dtype": "U8", "shape": [size], "data_offsets": offsets}
                weight_map[name] = shard
            file.seek(0)
            file.write(room.to_bytes(8, "little") + json.dumps(header).encode().ljust(room))
    metadata = {"total_size": SHARDS * TENSORS * size, "checksum_format": "adler32"}
    index = {"metadata": metadata, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    (directory / "config.json").write_text('{"model_type": "bench"}')


def main() -> None:
    """Print the rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--size", choices=sorted(SHARD_MIB), default="small")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for one in rows(options.size, options.rounds):
        print(json.dumps(one))


if __name__ == "__main__":
    main()
