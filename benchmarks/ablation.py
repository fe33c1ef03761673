"""Rows of the group `ablation`: what a mechanism buys, as the cost without it over the cost with it.

Both sides are this checkout in the same environment, one with the mechanism switched off (`without.py`), interleaved.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import upload

HERE = Path(__file__).resolve().parent
SLOW_LINE = 40 << 20
"""Bytes a second that a connection to an object store gives where the parts of a file have to go side by side."""


def rows(bench: Any, row: Callable[..., Any], warm: Callable[..., None]) -> Iterator[Any]:
    """Yield the rows; ``row`` and ``warm`` are those of run.py."""
    yield from uploads(bench, row)
    yield from deltas(bench, row, warm)
    yield from command_line(bench, row)


def beside(
    bench: Any, row: Callable[..., Any], what: str, measure: Callable[[str], Any], **about: Any
) -> Iterator[Any]:
    """Measure with ("ours") and without ("peer") and yield two rows, CPU and wall time."""
    cpu = bench.interleave(row(f"{what}: CPU", **about), measure, rounds=bench.more_rounds)
    yield cpu
    wall = row(f"{what}: wall time", ours=cpu.ours, peer=cpu.peer, **about)
    costs = [(other["wall"], one["wall"]) for one, other in zip(cpu.ours, cpu.peer, strict=True)]
    without, with_it = (sorted(side)[len(side) // 2] for side in zip(*costs, strict=True))
    single = [other / one for other, one in costs]
    wall.ratio, wall.spread = without / with_it, (min(single), max(single))
    yield wall


def uploads(bench: Any, row: Callable[..., Any]) -> Iterator[Any]:
    """Own connections over http and https, for known files, users' files and streams; parts that overlap."""
    python = str(bench.ours)
    verified = "names and sizes at the server"
    with tempfile.TemporaryDirectory(prefix="cwtrain-bench-", dir=bench.work) as place:
        known, unknown = Path(place, "known"), Path(place, "unknown")
        for directory in (known, unknown):
            upload.make_snapshot(directory, upload.SHARD_MIB[bench.size] << 20)
        upload.record(python, known)
        crt, key = upload.certificate(Path(place))
        for scheme, arguments in (("http", ()), ("https", (crt, key))):
            with upload.sink(python, *arguments) as port:
                run = upload.Runs(port, scheme, str(crt) if scheme == "https" else "")
                for what, who, directory in (
                    ("known files", "ours", known),
                    ("users' files", "ours", unknown),
                    ("streams", "stream", known),
                ):

                    def measure(
                        side: str, run: Any = run, who: str = who, directory: Path = directory
                    ) -> dict[str, float]:
                        without = "own_connections" if side == "peer" else ""
                        return dict(run(python, who, directory, without=without))

                    yield from beside(bench, row, f"own connections, {scheme}, {what}", measure, verified=verified)
        with upload.sink(python, bytes_per_second=SLOW_LINE) as port:
            run = upload.Runs(port, "http", "")

            def overlapped(side: str) -> dict[str, float]:
                return dict(run(python, "ours", known, without="overlapped_parts" if side == "peer" else ""))

            note = f"no connection takes more than {SLOW_LINE >> 20} MiB/s"
            yield from beside(bench, row, "overlapped parts of known files", overlapped, verified=verified, note=note)


def deltas(bench: Any, row: Callable[..., Any], warm: Callable[..., None]) -> Iterator[Any]:
    """Compiled code for where two versions differ."""
    density = 0.012
    dense = bench.data("ablation", "--density", density)
    base, new, out = dense / "base", dense / f"d{density * 100:g}", bench.work / "delta-ablation"

    def measure(side: str) -> dict[str, float]:
        warm(base, new)
        without = "native" if side == "peer" else ""
        cost = bench.operation("ours", "write_delta", without=without, base=base, new=new, out=out)
        bench.check("delta", base, new, out)
        return dict(cost)

    yield from beside(
        bench, row, "cwtrain-native, write_delta, 1.2% changed", measure, verified="decoded independently"
    )


def command_line(bench: Any, row: Callable[..., Any]) -> Iterator[Any]:
    """Entry points read without `importlib.metadata`."""
    from run import clean, show_help

    def measure(side: str) -> dict[str, float]:
        environ = clean() | ({"CWTRAIN_BENCH_WITHOUT": "entry_points"} if side == "peer" else {})
        return dict(show_help([bench.ours, "-P", HERE / "without.py"], bench.work, environ))

    yield from beside(
        bench, row, "own reading of entry points, `cwtrain --help`", measure, verified="lists the commands"
    )
