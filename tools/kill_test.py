"""Kill what must survive being killed, at instants that seeds pick, and look at what is left.

    python tools/kill_test.py mirror --seeds 200
    python tools/kill_test.py full --seeds 200
    python tools/kill_test.py upload --seeds 200
    python tools/kill_test.py publisher --seeds 200
    python tools/kill_test.py steps

`mirror` is an update of a `WeightMirror`, `full` a full snapshot being written; `steps` kills each kind of update of a
mirror before each call that it makes to the disk; `upload` is an upload to a real S3 server; `publisher` is a run of 40
versions on an emulator, killed and begun again on the same disk or on an empty one. Ends with 1 if anything was wrong,
and says with which seed.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

import needed


def run_mirror(options: argparse.Namespace) -> int:
    """Run the seeds of `mirror` or `full`, or all `steps`."""
    import kill_mirror

    ends: Counter[str] = Counter()
    wrong: list[str] = []
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cwtrain-kills-") as directory:
        work = Path(directory)
        chains = kill_mirror.Chains(work)
        if options.what == "steps":
            for kind in options.kind or kill_mirror.KINDS:
                kill_mirror.every_step(kind, work, chains, ends)
        else:
            for seed in range(options.first, options.first + options.seeds):
                try:
                    kill_mirror.COMMANDS[options.what](seed, work, chains, ends)
                except AssertionError as error:
                    wrong.append(f"seed {seed}: {error}")
                    print(wrong[-1], file=sys.stderr)
    seeds = "" if options.what == "steps" else f"{options.seeds} seeds, "
    return _report(options.what, seeds, ends, wrong, started)


def run_upload(options: argparse.Namespace) -> int:
    """Run the seeds of `upload`."""
    import kill_upload

    ends: Counter[str] = Counter()
    started = time.monotonic()
    wrong = kill_upload.kill_uploads(range(options.first, options.first + options.seeds), ends)
    return _report("upload", f"{options.seeds} seeds, ", ends, wrong, started)


def run_publisher(options: argparse.Namespace) -> int:
    """Run the seeds of `publisher`."""
    import kill_publisher

    ends: Counter[str] = Counter()
    started = time.monotonic()
    seeds = range(options.first, options.first + options.seeds)
    wrong = kill_publisher.kill_publishers(seeds, ends, versions=options.versions)
    return _report(options.what, f"{options.seeds} seeds, ", ends, wrong, started)


def _report(what: str, seeds: str, ends: Counter[str], wrong: list[str], started: float) -> int:
    kills = sum(count for end, count in ends.items() if end.startswith("killed"))
    print(f"{what}: {seeds}{kills} kills, {len(wrong)} wrong, {time.monotonic() - started:.0f} s")
    for end, count in sorted(ends.items()):
        print(f"  {count:6d}  {end}")
    return 1 if wrong else 0


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="what", required=True)
    for name, run in (("mirror", run_mirror), ("full", run_mirror), ("upload", run_upload)):
        command = commands.add_parser(name)
        command.add_argument("--seeds", type=int, default=12)
        command.add_argument("--first", type=int, default=0)
        command.set_defaults(run=run)
    command = commands.add_parser("publisher")
    command.add_argument("--seeds", type=int, default=12)
    command.add_argument("--first", type=int, default=0)
    command.add_argument("--versions", type=int, default=40)
    command.set_defaults(run=run_publisher)
    command = commands.add_parser("steps")
    command.add_argument("--kind", action="append", choices=["first", "next", "in-place", "one-pass", "undo"])
    command.set_defaults(run=run_mirror)
    options = parser.parse_args()
    emulator = ("cwtrain_emulator",) if options.what == "publisher" else ()
    needed.need("cwtrain", "zstandard", "numpy", *emulator)
    code: int = options.run(options)
    return code


if __name__ == "__main__":
    sys.exit(main())
