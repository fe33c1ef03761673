"""Run the cases of outages, stalls and late answers once in real time, on real parts.

    python tools/field_outages.py --list
    python tools/field_outages.py                    # every case, with each of its seconds
    python tools/field_outages.py --only store-503   # those whose name begins so

The suite shows the same on a clock of its own; this shows that the clock tells the truth. Cases are in
``tests/scenarios``. Progress goes to stderr, one JSON to stdout; ends with 0 only if everything holds.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

import needed

with needed.imports():
    from scenarios import Case, all_cases


def run_case(case: Case, seconds: float) -> dict[str, Any]:
    """Run one case with ``seconds`` and return its line of the report."""
    began = time.monotonic()
    line: dict[str, Any] = {"name": case.name, "seconds": seconds, "holds": True}
    try:
        line["found"] = dict(case.run(seconds))
    except Exception as error:  # noqa: BLE001 - whatever it is, the case does not hold
        traceback.print_exc()
        line |= {"holds": False, "error": f"{type(error).__name__}: {error}"}
    line["wall_seconds"] = round(time.monotonic() - began, 1)
    return line


def main(arguments: list[str] | None = None) -> int:
    """Run the cases that are asked for, and print what was found."""
    parser = argparse.ArgumentParser(description="Run cases of outages in real time.")
    parser.add_argument("--only", metavar="NAME", action="append", default=[], help="cases whose name begins so")
    parser.add_argument("--list", action="store_true", help="say what there is, run nothing")
    options = parser.parse_args(arguments)
    needed.need("cwtrain", "cwtrain_emulator", "zstandard", "numpy")
    cases = [one for one in all_cases() if not options.only or one.name.startswith(tuple(options.only))]
    if not cases:
        parser.error(f"no case begins with {', '.join(options.only)}; --list shows them")
    if options.list:
        shown = [{"name": one.name, "shows": one.shows, "seconds": one.seconds} for one in cases]
        print(json.dumps(shown, indent=1))
        return 0
    began = time.monotonic()
    lines: list[dict[str, Any]] = []
    for case in cases:
        for seconds in case.seconds:
            print(f"{case.name} {seconds:g} s: {case.shows} ...", file=sys.stderr, flush=True)
            line = run_case(case, seconds)
            lines.append({**line, "shows": case.shows})
            said = f"holds {line['found']}" if line["holds"] else f"FAILS: {line['error']}"
            print(f"{case.name} {seconds:g} s: {said} ({line['wall_seconds']} s)", file=sys.stderr, flush=True)
    holds = all(line["holds"] for line in lines)
    print(json.dumps({"holds": holds, "wall_seconds": round(time.monotonic() - began, 1), "cases": lines}, indent=1))
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
