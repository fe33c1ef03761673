"""Measure the project beside the published wheel: python benchmarks/run.py [--size small|full] [--only delta,cli,...]

With `--before COMMIT` the other side is not the wheel but the project's own code at that commit, which shows what a
change made slower. Writes a table, JSON and plots; the protocol is in README.md beside this file. Needs uv and a
Python 3.12; this file itself runs with any Python from 3.11, without packages.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import plot

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PEER = "cwtrain==1.0.*"
GROUPS = ("delta", "mirror", "publish", "upload", "sampler", "cli")
NAMED_GROUPS = ("ablation",)
"""Groups that run only when they are named: what they need beside the two environments they set up themselves."""
DENSITIES = (0.012, 0.03, 0.08, 0.4)
Cost = dict[str, float]


@dataclass
class Row:
    """One line of the table: a ratio, what it should be, and what it comes from."""

    metric: str
    unit: str = "x"
    """`x`: peer over ours, more is better. `<=`: less is better. `MiB`: a size that must not be exceeded."""
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    at_least: float | None = None
    aim: float | None = None
    ours: list[Cost] = field(default_factory=list)
    peer: list[Cost] = field(default_factory=list)
    verified: str = ""
    cores: float | None = None
    """How many cores two busy processes got, right before."""
    note: str = ""

    def verdict(self) -> str:
        """Return how the row stands to its target."""
        if self.ratio is None:
            return "not measured"
        if self.at_least is None:
            return ""
        holds = self.ratio >= self.at_least if self.unit == "x" else self.ratio <= self.at_least
        return "holds" if holds else "**below**"

    def middle(self, who: str, key: str = "cpu") -> float | None:
        """Return a side's median."""
        costs = getattr(self, who)
        values = [cost[key] for cost in costs if key in cost]
        return median(values) if values else None


# Environments --------------------------------------------------------------------------------------------------------


def find_python(given: str | None) -> str:
    """Return a Python 3.12: the given one, the first on the PATH that works, or pyenv's."""
    home = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    pyenv = sorted(home.glob("3.12*/bin/python3.12"))
    for python in (given, "python3.12", *map(str, pyenv)):
        if python is None or not shutil.which(python):
            continue
        code = "import sys; assert sys.version_info[:2] == (3, 12)"
        if subprocess.run([python, "-c", code], capture_output=True, check=False).returncode == 0:
            return python
    sys.exit("no Python 3.12 found; name one with --python")


def environment(place: Path, python: str, *packages: str) -> Path:
    """Return the Python of a fresh virtual environment with these packages, byte-compiled."""
    if not (place / "bin/python").exists():
        subprocess.run(["uv", "venv", "-q", "--python", python, str(place)], check=True)
    command = ["uv", "pip", "install", "-q", "--python", str(place / "bin/python")]
    members = ("cwtrain-core", "cwtrain-native", "cwtrain-rollout")
    again = [word for name in members for word in ("--reinstall-package", name)]
    subprocess.run([*command, *again, *packages], check=True)
    for unwanted in ("niquests", "awscrt"):
        code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({unwanted!r}) is not None)"
        subprocess.run([place / "bin/python", "-c", code], check=True)
    return place / "bin/python"


def core(tree: Path = ROOT) -> tuple[str, ...]:
    """Return the project's core with the extra `[fast]`, and the sampler, from this checkout or another."""
    members = ("cwtrain-core[fast]", "cwtrain-native", "cwtrain-rollout")
    return tuple(f"{name} @ {(tree / 'packages' / name.partition('[')[0]).as_uri()}" for name in members)


def sources(commit: str, place: Path) -> Path:
    """Return a directory with the packages as they were at a commit of this repository."""
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    archive = subprocess.run(["git", "archive", commit, "packages"], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        sys.exit(f"{commit} cannot be read: {archive.stderr.decode().strip()}")
    subprocess.run(["tar", "-x", "-C", str(place)], input=archive.stdout, check=True)
    return place


def versions(python: Path) -> dict[str, str]:
    """Return what is installed there."""
    code = "import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))"
    return dict(json.loads(subprocess.run([python, "-c", code], capture_output=True, check=True).stdout))


# Measuring -----------------------------------------------------------------------------------------------------------


class Bench:
    """The two sides, the place for files, and how often to measure."""

    def __init__(
        self, *, ours: Path, peer: Path, work: Path, size: str, rounds: int, before: str | None = None
    ) -> None:
        self.ours, self.peer = ours, peer
        self.work, self.size, self.rounds = work, size, rounds
        self.before = before
        """The commit that the other side is, where it is not the published wheel."""
        self.more_rounds = max(5, rounds)
        """For rows that lie close to what is asked for."""
        self.cores: list[float] = []

    def calls(self, who: str) -> str:
        """Return by which of the two APIs a side is called: an earlier commit is called as we are."""
        return "ours" if self.before and who == "peer" else who

    def python(self, who: str) -> Path:
        """Return a side's Python."""
        return self.peer if who == "peer" else self.ours

    def operation(self, who: str, name: str, *, without: str = "", **arguments: Any) -> Cost:
        """Run one operation in a fresh process and return what it cost; see `without.py` for what can be left out."""
        command = [self.python(who), "-P", str(HERE / "operations.py"), name, json.dumps(arguments, default=str)]
        environ = clean() | ({"CWTRAIN_BENCH_WITHOUT": without} if without else {})
        done = subprocess.run(command, capture_output=True, text=True, cwd=self.work, env=environ, check=False)
        if done.returncode:
            sys.exit(f"{who}: {name} failed\n{done.stderr[-3000:]}")
        return dict(json.loads(done.stdout.splitlines()[-1]))

    def check(self, what: str, *paths: Path) -> None:
        """Have an output verified by code that is neither side's."""
        command = [self.ours, "-P", str(HERE / "check.py"), what, *map(str, paths)]
        done = subprocess.run(command, capture_output=True, text=True, env=clean(), check=False)
        if done.returncode:
            sys.exit(f"wrong output: {what} {' '.join(map(str, paths))}\n{done.stderr[-3000:]}")

    def data(self, name: str, *arguments: object, size: str | None = None) -> Path:
        """Return the directory with this benchmark data, of the run's size or another, making it at first use."""
        size = size or self.size
        place = self.work / "data" / f"{name}-{size}"
        if not (place / "done").exists():
            shutil.rmtree(place, ignore_errors=True)
            say(f"making data: {place.name}")
            command = [self.ours, str(HERE / "data.py"), place, "--size", size, *arguments]
            subprocess.run([str(word) for word in command], check=True, stdout=subprocess.DEVNULL)
            (place / "done").touch()
        return place

    def second_core(self) -> float:
        """Return how many cores two busy processes get now, and remember it."""
        command = [self.ours, "-P", str(HERE / "operations.py"), "spin", '{"seconds": 0.3}']
        spinning = [subprocess.Popen(command, stdout=subprocess.PIPE, env=clean()) for _ in range(2)]
        costs = [json.loads(one.communicate()[0]) for one in spinning]
        got = sum(cost["cpu"] / cost["wall"] for cost in costs)
        self.cores.append(got)
        return float(got)

    def interleave(
        self,
        row: Row,
        measure: Callable[[str], Cost],
        sides: Sequence[str] = ("ours", "peer"),
        rounds: int | None = None,
    ) -> Row:
        """Measure the sides A B, B A, A B, ... and put costs and ratio into the row."""
        row.cores = self.second_core()
        for number in range(rounds or self.rounds):
            for who in sides if number % 2 == 0 else sides[::-1]:
                getattr(row, "ours" if who == "ours" else "peer").append(measure(who))
        compare(row)
        tell(row)
        return row


def compare(row: Row, key: str = "cpu") -> None:
    """Put the ratio of the medians, and the smallest and largest of single rounds, into the row."""
    over = [(peer[key], ours[key]) for ours, peer in zip(row.ours, row.peer, strict=True)]
    single = [one / other if row.unit == "x" else other / one for one, other in over]
    peer, ours = (median(values) for values in zip(*over, strict=True))
    row.ratio = peer / ours if row.unit == "x" else ours / peer
    row.spread = min(single), max(single)


def clean() -> dict[str, str]:
    """Return an environment without anything that the sides could read settings from."""
    kept = ("PATH", "HOME", "TMPDIR", "LANG")
    return {key: os.environ[key] for key in kept if key in os.environ}


def warm(*directories: Path) -> None:
    """Read everything once, so that it is in the page cache."""
    buffer = bytearray(1 << 20)
    for directory in directories:
        for path in sorted(directory.glob("*")):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass


def say(text: str) -> None:
    """Tell how far it is, on standard error."""
    print(f"[{time.strftime('%H:%M:%S')}] {text}", file=sys.stderr, flush=True)


def tell(row: Row) -> None:
    """Say what a row came to."""
    if row.ratio is not None:
        say(f"{row.metric}: {number(row.ratio)} {row.unit} ({row.verdict() or 'no target'})")
    else:
        say(f"{row.metric}: {row.note}")


# Rows ----------------------------------------------------------------------------------------------------------------


def delta_rows(bench: Bench) -> Iterator[Row]:
    """Writers: deltas of four densities, of thousands of tensors, a full snapshot; against the peer and the floor."""
    dense = bench.data("dense", "--density", *DENSITIES)
    base = dense / "base"
    targets = {0.012: (3.0, 4.5), 0.03: (3.0, 4.5), 0.08: (2.2, 3.5), 0.4: (2.3, 3.0)}
    memory = Row("write_delta, peak memory against the peer's", unit="<=", at_least=1 / 8)
    grown = Row(
        "write_delta, peak memory beyond imports, MiB", unit="MiB", at_least=64 + 16 * (os.cpu_count() or 1), aim=60
    )
    for density in DENSITIES:
        new = dense / f"d{density * 100:g}"
        row = Row(f"write_delta, {density:.1%} changed", at_least=targets[density][0], aim=targets[density][1])
        yield write_row(bench, row, base, new, rounds=bench.more_rounds if density < 0.08 else None)
        small = density < 0.4
        size = Row(f"delta bytes, {density:.1%}", "<=", at_least=0.70 if small else 0.90, aim=0.67 if small else 0.85)
        size.ours, size.peer, size.verified = row.ours, row.peer, row.verified
        compare(size, "bytes")
        tell(size)
        yield size
        if density == DENSITIES[0] and bench.before:
            memory.ours, memory.peer = row.ours, row.peer
            compare(memory, "grown_mib")
        elif density == DENSITIES[0]:
            memory.ours, memory.peer = row.ours, row.peer
            compare(memory, "grown_mib")
            grown.ours = row.ours
            grown.ratio = grown.middle("ours", "grown_mib")
            limit = Row("write_delta, 1.2%, against the floor", "<=", at_least=1.25, aim=1.0)
            limit.note = "the other side is the floor: read both, XOR, Adler-32, zstd level 1, in one thread"

            def floor(who: str, new: Path = new) -> Cost:
                warm(base, new)
                if who == "floor":
                    return bench.operation(who, "floor", base=base, new=new)
                return write_once(bench, who, base, new)

            yield bench.interleave(limit, floor, ("ours", "floor"))
    judged = "" if bench.size == "full" else "the target is for the full size"
    for one in (memory,) if bench.before else (memory, grown):
        one.note = judged
        tell(one)
        yield one
    moe = bench.data("moe", "--model", "moe", "--density", DENSITIES[0])
    row = Row("write_delta, 9,216 small tensors", at_least=1.5, aim=2.5)
    yield write_row(bench, row, moe / "base", moe / "d1.2")
    yield full_row(bench, base)


def write_once(bench: Bench, who: str, base: Path, new: Path) -> Cost:
    """Write one delta, verify it, and return what it cost and its bytes."""
    out = bench.work / f"delta-{who}"
    cost = bench.operation(who, "write_delta", base=base, new=new, out=out)
    bench.check("delta", base, new, out)
    return {**cost, "bytes": sum(path.stat().st_size for path in out.iterdir())}


def write_row(bench: Bench, row: Row, base: Path, new: Path, rounds: int | None = None) -> Row:
    """Measure `write_delta`."""

    def measure(who: str) -> Cost:
        warm(base, new)
        return write_once(bench, who, base, new)

    row.verified = "decoded independently"
    return bench.interleave(row, measure, rounds=rounds)


def full_row(bench: Bench, base: Path) -> Row:
    """Measure `write_full_snapshot`."""

    def measure(who: str) -> Cost:
        warm(base)
        dest = bench.work / f"full-{who}"
        cost = bench.operation(who, "write_full", src=base, dest=dest)
        bench.check("same", base, dest)
        return cost

    row = Row(
        "full snapshot write", at_least=2.8, aim=3.5, verified="compared with the source, checksums computed again"
    )
    return bench.interleave(row, measure)


def mirror_rows(bench: Bench) -> Iterator[Row]:
    """A mirror in the middle of its life: the second delta is measured; then delta and mirror in one pass."""
    if not (ROOT / "packages/cwtrain-core/src/cwtrain/hotload/mirror.py").exists():
        yield Row("mirror apply, 1.2% / 8%", note="not built yet")
        return
    chain = bench.data("chain", "--chain", "--density", 0.012, 0.012, 0.07)
    base, one, two, three = (chain / name for name in ("base", "v1", "v2", "v3"))
    folded = bench.work / "folded"  # from v1 to v3: about 9 % at once
    links = {"one": (base, one), "two": (one, two), "eight": (one, three)}
    made: dict[tuple[str, str], Path] = {}
    for who in ("ours", "peer"):
        for link, (old, new) in links.items():
            bench.operation(who, "write_delta", base=old, new=new, out=folded)
            place = bench.work / f"link-{who}-{link}"
            shutil.rmtree(place, ignore_errors=True)
            folded.rename(place)
            renumber(place, "000001" if link == "one" else "000002", "000000" if link == "one" else "000001")
            made[who, link] = place
    for label, link, result, wanted, aim in (
        ("1.2%", "two", two, 6, 11),
        ("8%", "eight", three, 3.5, 5),
    ):

        def apply(who: str, link: str = link, result: Path = result, of: str | None = None) -> Cost:
            deltas = [made[of or who, "one"], made[of or who, link]]
            warm(*deltas)
            dest = bench.work / f"rebuilt-{who}"
            root = bench.work / f"mirror-{who}"
            cost = bench.operation(who, "mirror_apply", base=base, root=root, deltas=deltas, dest=dest)
            bench.check("same", result, dest)
            return cost

        row = Row(f"mirror apply, durable, {label}", at_least=wanted, aim=aim, verified="rebuilt and compared")
        bench.interleave(row, apply)
        apply("ours", of="peer")
        apply("peer", of="ours")
        row.verified += "; each also applied the other's deltas"
        row.note = fsync_note(row)
        yield row

    def advance(who: str) -> Cost:
        out, dest, root = (bench.work / f"{name}-{who}" for name in ("delta", "rebuilt", "mirror"))
        warm(one, two)
        name = "advance" if bench.calls(who) == "ours" else "write_and_apply"
        before = made[who, "one"]
        cost = bench.operation(who, name, base=base, root=root, before=before, old=one, new=two, out=out, dest=dest)
        bench.check("delta", one, two, out)
        bench.check("same", two, dest)
        return cost

    row = Row("delta and mirror advance in one pass", at_least=6, aim=9, verified="decoded; rebuilt and compared")
    bench.interleave(row, advance)
    row.note = f"the peer: write_delta, then apply. {fsync_note(row)}"
    yield row


def fsync_note(row: Row) -> str:
    """Return how often each side called fsync."""
    return f"calls of fsync: ours {row.middle('ours', 'fsyncs'):.0f}, the peer {row.middle('peer', 'fsyncs'):.0f}"


def renumber(delta: Path, version: str, base_version: str) -> None:
    """Give a delta other version numbers."""
    path = delta / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"] |= {"version": version, "base_version": base_version}
    path.write_text(json.dumps(index))


def show_help(command: Sequence[str | Path], work: Path, environ: dict[str, str]) -> Cost:
    """Return what a command's help costs, as a shell starts it: the medians of five."""
    costs = []
    for _ in range(5):
        began = time.perf_counter()
        process = subprocess.Popen([*command, "--help"], stdout=subprocess.PIPE, cwd=work, env=environ)
        assert process.stdout is not None
        shown = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        process.stdout.close()
        assert process.returncode == 0, process.returncode
        assert b"hotload" in shown
        # Its peak memory would be that of this process, from before the other program was loaded.
        costs.append({"wall": time.perf_counter() - began, "cpu": used.ru_utime + used.ru_stime})
    return {key: median(cost[key] for cost in costs) for key in costs[0]}


def cli_rows(bench: Bench) -> Iterator[Row]:
    """`cwtrain --help`, as a shell starts it."""

    def measure(who: str) -> Cost:
        return show_help([bench.python(who).parent / "cwtrain"], bench.work, clean())

    measure("ours"), measure("peer")  # the disk's and the byte code's first time
    row = Row("`cwtrain --help`, CPU", at_least=2, aim=3, verified="exit code 0, lists the commands")
    yield bench.interleave(row, measure, rounds=bench.more_rounds)


def upload_rows(bench: Bench) -> Iterator[Row]:
    """Uploads to a sink, by upload.py beside this file."""
    if not (HERE / "upload.py").exists():
        yield Row("upload client CPU, http / https", note="not built yet: benchmarks/upload.py is missing")
        return
    import upload

    found_rows = upload.rows(
        bench.size, bench.rounds, ours=bench.ours, peer=bench.peer, directory=bench.work, floor=not bench.before
    )
    for found in found_rows:
        key = {"MiB": "peak_mib"}.get(found["unit"], "wall" if "wall" in found["metric"] else "cpu")
        sign, _, wanted = found["target"].partition(" ")
        against_floor = sign == "<="
        row = Row(
            metric=found["metric"],
            unit="<=" if against_floor else "x",
            ratio=found["ratio"],
            at_least=float(wanted) if wanted else None,
            aim={2.3: 3.0, 1.3: 1.15, 1.4: 1.7}.get(float(wanted)) if wanted else None,
            ours=[{key: found["ours"]}],
            peer=[{key: found["peer"]}],
            verified="names and sizes at the server",
            note="the other side is the floor: SHA-256 and sendfile" if against_floor else "",
        )
        tell(row)
        yield row


def publish_rows(bench: Bench) -> Iterator[Row]:
    """Publishes to a service that completes every hot-load, by publish.py beside this file."""
    import publish

    yield from publish.rows(bench, Row, warm, tell)


def sampler_rows(bench: Bench) -> Iterator[Row]:
    """Rollout sampling, by sampler.py beside this file: both clients against one server that does nothing else."""
    import sampler

    share = 4 if bench.size == "full" else 1
    for metric, kind, groups, wanted, aim in (
        ("sampler, CPU per token, large answers", sampler.LARGE, 16 * share, 4.5, 6),
        ("sampler, CPU per request, small answers", sampler.SMALL, 2000 * share, 8, 13),
    ):
        row = Row(metric, at_least=wanted, aim=aim, verified="ids, log-probs and indices of every choice")
        with sampler.sink(bench.ours, kind["tokens"]) as url:
            rounds = bench.more_rounds if kind is sampler.SMALL else None
            measure = sampler.measure(bench.python, clean(), url, kind, groups, bench.calls)
            bench.interleave(row, measure, rounds=rounds)
        work = groups * kind["n"] * (kind["tokens"] if kind is sampler.LARGE else 1)
        per = {who: (row.middle(who) or 0.0) / work * 1e6 for who in ("ours", "peer")}
        unit = "token" if kind is sampler.LARGE else "request"
        row.note = f"microseconds per {unit}: the peer {number(per['peer'])}, ours {number(per['ours'])}"
        if kind is sampler.SMALL and not bench.before:
            seen = sampler.open_at_once(bench.ours, clean(), 1000)
            row.note += f"; of 1,000 groups of one process {seen['peak']} were open at the server at once"
        yield row


def ablation_rows(bench: Bench) -> Iterator[Row]:
    """What single mechanisms buy, by ablation.py beside this file."""
    import ablation

    yield from ablation.rows(bench, Row, warm)


ROWS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "delta": delta_rows,
    "mirror": mirror_rows,
    "publish": publish_rows,
    "upload": upload_rows,
    "sampler": sampler_rows,
    "cli": cli_rows,
    "ablation": ablation_rows,
}


def beside_before(row: Row) -> Row:
    """Judge a row against the same code of an earlier commit: nothing falls by more than 5 %."""
    row.aim = None
    row.at_least = 0.95 if row.unit == "x" else 1.05
    return row


def growth(bench: Bench) -> dict[str, dict[str, list[tuple[float, float]]]]:
    """Return how the CPU of `write_delta` grows with bytes and with the number of tensors: (size, seconds) by side."""
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    shapes = {
        "bytes": [("layers", layers) for layers in (2, 6, 16)],
        "tensors": [("tensors", layers) for layers in (3, 12, 48)],
    }
    for what, models in shapes.items():
        found[what] = {"ours": [], "peer": []}
        for kind, layers in models:
            place = bench.data(f"grow-{kind}-{layers}", "--model", f"{kind}:{layers}", "--density", DENSITIES[0])
            base = place / "base"
            row = write_row(bench, Row(f"growth: {layers} layers of {kind}"), base, place / "d1.2", rounds=2)
            index = json.loads((base / "model.safetensors.index.json").read_text())
            across = index["metadata"]["total_size"] / 1e6 if what == "bytes" else len(index["weight_map"])
            for who in ("ours", "peer"):
                found[what][who].append((across, row.middle(who) or 0.0))
    return found


# Reports -------------------------------------------------------------------------------------------------------------


def number(value: float | None) -> str:
    """Return a number for the table."""
    return "" if value is None else f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    lines = [
        "| metric | measured | rounds from - to | at least | aim | | CPU s, peer : ours | wall s | peak MiB | notes |",
        "| --- | ---: | ---: | ---: | ---: | --- | ---: | ---: | ---: | --- |",
    ]
    for row in rows:
        sign = {"x": "x", "<=": "", "MiB": ""}[row.unit]
        wanted = ["" if row.at_least is None else f"{'<= ' if row.unit != 'x' else ''}{number(row.at_least)}{sign}"]
        wanted.append("" if row.aim is None else f"{number(row.aim)}{sign}")
        spread = "" if row.spread is None else f"{number(row.spread[0])} - {number(row.spread[1])}"
        sides = []
        for key in ("cpu", "wall", "peak_mib"):
            values = [row.middle(who, key) for who in ("peer", "ours")]
            sides.append(" : ".join(filter(None, map(number, values))))
        value = "" if row.ratio is None else f"**{number(row.ratio)}{sign}**"
        cells = [row.metric, value, spread, *wanted, row.verdict(), *sides, row.note]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, ""])


def write_reports(out: Path, found: dict[str, Any], rows: Sequence[Row]) -> None:
    """Write `report.json`, `table.md` and the plots."""
    (out / "report.json").write_text(json.dumps(found, indent=1) + "\n")
    (out / "table.md").write_text(table(rows))
    bars = [
        (row.metric.replace("`", ""), row.ratio, row.at_least)
        for row in rows
        if row.unit == "x" and row.ratio is not None and row.at_least is not None
    ]
    if bars:
        other = found["before"] or "the published wheel"
        title = f"CPU: how many times less than {other} ({found['size']} size)"
        (out / "performance-ratios.svg").write_text(plot.bars(bars, title))
    if grown := found["growth"]:
        panels = [("bytes of the checkpoint", "MB", grown["bytes"]), ("number of tensors", "tensors", grown["tensors"])]
        (out / "performance-growth.svg").write_text(plot.lines(panels, "write_delta, 1.2 % changed: cost against size"))


def main() -> None:
    """Measure what was asked for and write the reports."""
    parser = argparse.ArgumentParser(description="Measure the project beside the published wheel.")
    parser.add_argument("--size", choices=["small", "full"], default="small")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"some of: %(default)s,{','.join(NAMED_GROUPS)}")
    parser.add_argument("--rounds", type=int, help="default: 3 for small, 5 for full")
    parser.add_argument("--out", type=Path, default=ROOT / "build/benchmarks", help="reports, data and environments")
    parser.add_argument("--python", help="a Python 3.12")
    parser.add_argument("--before", metavar="COMMIT", help="measure beside the code of that commit, not the wheel")
    parser.add_argument("--ours", metavar="COMMIT", help="measure that commit, not this checkout")
    options = parser.parse_args()
    if unknown := set(options.only.split(",")) - set(ROWS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    rounds = options.rounds or (9 if options.before else 5 if options.size == "full" else 3)
    out = options.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    began, load = time.time(), os.getloadavg()
    python = find_python(options.python)
    say("making the environments")
    if options.before:
        peer = environment(out / "before", python, *core(sources(options.before, out / "sources-before")))
    else:
        peer = environment(out / "peer", python, PEER)
    ours = environment(out / "ours", python, *core(sources(options.ours, out / "sources") if options.ours else ROOT))
    bench = Bench(ours=ours, peer=peer, work=out, size=options.size, rounds=rounds, before=options.before)
    rows: list[Row] = []
    grown: dict[str, Any] = {}

    def report() -> None:
        machine = {
            "cpus": os.cpu_count(),
            "load_before": load,
            "load_after": os.getloadavg(),
            "cores_for_two_processes": bench.cores,
            "kernel": os.uname().release,
        }
        found = {
            "size": options.size,
            "rounds": rounds,
            "before": options.before,
            "seconds": time.time() - began,
            "machine": machine,
            "ours": installed[0],
            "peer": installed[1],
            "rows": [asdict(row) | {"verdict": row.verdict()} for row in rows],
            "growth": grown,
        }
        write_reports(out, found, rows)

    installed = versions(ours), versions(peer)
    for group in ROWS:
        if group in options.only.split(","):
            found = list(ROWS[group](bench))
            rows += map(beside_before, found) if options.before else found
            report()
    if "delta" in options.only.split(",") and not options.before:
        grown = growth(bench)
    report()
    print(table(rows))
    cores = f"{median(bench.cores):.2f} of 2" if bench.cores else "?"
    say(f"{time.time() - began:.0f} s; two busy processes had {cores} cores (median); reports in {out}")


if __name__ == "__main__":
    main()
