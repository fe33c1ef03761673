"""Rows of the group `publish`: from new weights to a COMPLETED hot-load, and what streaming costs in memory and time.

Both sides get the same: the base checkpoint, the new one, a bucket and an API (`publish_sink.py`, another process). The
peer writes a directory and publishes it. Ours streams: the new tensors are in memory, as at a trainer (the peer's lie
in files, which a trainer had to write first), and go to `SnapshotWriter`; nothing is written to the disk. What the
bucket then holds is fetched and verified.

A delta is published of the full size in the small run too: about 25 ms of requests belong to each publish whatever its
size, a quarter of what a delta of 81 MB takes and a fortieth of what one of 988 MB does. The small one has a row, too.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Service:
    """A running service for one publish after the other."""

    def __init__(self, bucket_port: int, api_port: int) -> None:
        self.bucket_port = bucket_port
        self.places = {
            "endpoint": f"http://127.0.0.1:{bucket_port}",
            "api": f"http://127.0.0.1:{api_port}",
        }

    def fetch(self, identity: str, directory: Path) -> Path:
        """Fetch a snapshot from the bucket into a new directory."""
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.bucket_port)) as connection:
            connection.request("GET", f"/bench?prefix=rl/{identity}/")
            names = re.findall("<Key>(.*?)</Key>", connection.getresponse().read().decode())
            for name in names:
                connection.request("GET", f"/bench/{name}")
                (directory / name.rpartition("/")[2]).write_bytes(connection.getresponse().read())
        return directory


@contextlib.contextmanager
def service(python: Path) -> Iterator[Service]:
    """Run the service; each publish gets a fresh one."""
    command = [str(python), str(HERE / "publish_sink.py")]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        ports = child.stdout.readline().split()
        yield Service(int(ports[0]), int(ports[1]))
    finally:
        child.stdin.close()
        child.wait()
        child.stdout.close()


def rows(bench: Any, row: Callable[..., Any], warm: Callable[..., None], tell: Callable[[Any], None]) -> Iterator[Any]:
    """Yield the rows; ``row``, ``warm`` and ``tell`` are those of run.py."""
    chain = bench.data("chain", "--chain", "--density", 0.012, 0.012, 0.07)
    base, one, two = (chain / name for name in ("base", "v1", "v2"))

    def delta(who: str, old: Path, new: Path) -> dict[str, float]:
        warm(old, new)
        out = bench.work / f"published-{who}"
        with service(bench.ours) as running:
            cost = bench.operation(
                who, f"publish_delta_{bench.calls(who)}", base=old, new=new, out=out, **running.places
            )
            bench.check("delta", old, new, running.fetch("v1", bench.work / f"fetched-{who}"))
        return dict(cost)

    def full(who: str) -> dict[str, float]:
        warm(one)
        out = bench.work / f"published-{who}"
        with service(bench.ours) as running:
            cost = bench.operation(who, f"publish_full_{bench.calls(who)}", new=one, out=out, **running.places)
            bench.check("same", one, running.fetch("v1", bench.work / f"fetched-{who}"))
        return dict(cost)

    if bench.size == "full":
        old, new = base, one
    else:
        real = bench.data("publish", "--density", 0.012, size="full")
        old, new = real / "base", real / "d1.2"
        found = row("publish delta, 1.2% changed, http, small", verified="fetched and decoded")
        found.note = "the same as the next row, of the small checkpoint"
        yield bench.interleave(found, lambda who: delta(who, base, one))
    found = row("publish delta, 1.2% changed, http", at_least=3.5, aim=5, verified="fetched and decoded")
    found.note = "988 MB in any run. The peer: write_delta, then publish; ours: tensors in memory, streamed"
    yield bench.interleave(found, lambda who: delta(who, old, new), rounds=bench.more_rounds)
    found = row("publish full, http", at_least=2.5, aim=3.2, verified="fetched and compared")
    found.note = "with per-tensor checksums. The peer: write_full_snapshot, then publish; ours: streamed"
    yield bench.interleave(found, full)

    made: dict[str, list[Path]] = {}
    for who in ("ours", "peer"):
        made[who] = []
        for number, (old, new) in enumerate(((base, one), (one, two)), start=1):
            place = bench.work / f"cut-{who}-{number}"
            bench.operation(who, "write_delta", base=old, new=new, out=place, number=number)
            made[who].append(place)

    def cut(who: str) -> dict[str, float]:
        warm(*made[who])
        root, dest = bench.work / f"mirror-{who}", bench.work / f"rebuilt-{who}"
        with service(bench.ours) as running:
            places = {"base": base, "root": root, "deltas": made[who], "dest": dest, **running.places}
            cost = bench.operation(who, f"cut_chain_{bench.calls(who)}", **places)
            bench.check("same", two, running.fetch("v1", bench.work / f"fetched-{who}"))
        return dict(cost)

    found = row("chain cut (rebuild + publish full)", at_least=2.5, verified="fetched and compared")
    found.note = "the peer: the mirror's write_full_snapshot, then publish; ours: the mirror is published as it lies"
    yield bench.interleave(found, cut)
    yield from streaming(bench, row, tell)


def streaming(bench: Any, row: Callable[..., Any], tell: Callable[[Any], None]) -> Iterator[Any]:
    """Yield the rows of 1 GB in memory that is streamed as a delta: memory beside the base, overlap of its two halves.

    The bandwidth is limited so that the upload takes as long as encoding does: there an overlap shows most.
    """
    size = 1000
    costs: list[dict[str, float]] = []
    earlier: list[dict[str, float]] = []
    sides = {"ours": costs, "peer": earlier} if bench.before else {"ours": costs}
    with service(bench.ours) as running:
        for number in range(bench.rounds):
            for who in list(sides)[:: -1 if number % 2 else 1]:
                first = 10 * (number + bench.rounds * (who == "peer")) + 1
                arguments = {"size_mib": size, "first": first, **running.places}
                sides[who].append(bench.operation(who, "stream_delta", **arguments))
    if earlier:
        yield from streaming_beside_before(row, tell, costs, earlier, size)
        return
    what = f"stream {size} MiB in memory as a delta"
    found = row(f"{what}: memory beside base and tensors, MiB", unit="MiB", at_least=320)
    found.ours, found.ratio = costs, max(cost["extra_mib"] for cost in costs)
    found.note = "the budget is 320 MiB with the interpreter and its libraries, which are not counted here"
    tell(found)
    yield found
    found = row(f"{what}: time against the slower of encode and upload", unit="<=", at_least=1.3, aim=1.15)
    found.ours = costs
    found.ratio = sorted(cost["over_slower"] for cost in costs)[len(costs) // 2]
    found.spread = min(cost["over_slower"] for cost in costs), max(cost["over_slower"] for cost in costs)
    sums = sorted(cost["over_sum"] for cost in costs)
    found.note = f"against their sum: {sums[len(sums) // 2]:.2f}; one after the other would be 1"
    tell(found)
    yield found


def streaming_beside_before(
    row: Callable[..., Any], tell: Callable[[Any], None], ours: list[Any], earlier: list[Any], size: int
) -> Iterator[Any]:
    """Yield the same rows against an earlier commit: what each side's median comes to."""
    for metric, key in (("memory beside base and tensors", "extra_mib"), ("CPU", "cpu")):
        found = row(f"stream {size} MiB in memory as a delta: {metric}", unit="<=", ours=ours, peer=earlier)
        middle = [sorted(cost[key] for cost in costs)[len(costs) // 2] for costs in (ours, earlier)]
        found.ratio = middle[0] / middle[1]
        tell(found)
        yield found
