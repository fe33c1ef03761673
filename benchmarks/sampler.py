"""Rows about rollouts, for run.py: a client's CPU for large and for small answers, and many groups open at once.

The server is `sampler_sink.py`, a process of its own that makes each answer once.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sampler_sink import answer

HERE = Path(__file__).resolve().parent
LARGE = {"tokens": 8000, "n": 8, "concurrency": 4}
SMALL = {"tokens": 16, "n": 1, "concurrency": 64}


@contextmanager
def sink(python: Path, tokens: int) -> Iterator[str]:
    """Give the base URL of a running server."""
    command = [python, "-P", str(HERE / "sampler_sink.py"), str(tokens)]
    environ = {"PYTHONPATH": str(HERE)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def once(python: Path, environ: dict[str, str], task: dict[str, Any]) -> dict[str, float]:
    """Run one batch in a fresh process, check what came, and return what it cost."""
    command = [python, "-P", str(HERE / "sampler_op.py"), json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, check=False)
    if done.returncode:
        raise SystemExit(f"{task['who']}: sampling failed\n{done.stderr[-3000:]}")
    cost: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    choices = json.loads(answer(task["n"], task["tokens"]))["choices"]
    groups = task["groups"]
    wanted = {
        "groups": groups,
        "indices": groups * sum(choice["index"] for choice in choices),
        "ids": groups * sum(sum(choice["token_ids"]) for choice in choices),
        "tokens": groups * sum(len(choice["token_ids"]) for choice in choices),
    }
    logprobs = groups * sum(sum(choice["logprobs"]["token_logprobs"]) for choice in choices)
    wrong = {name: cost[name] for name, value in wanted.items() if cost[name] != value}
    if wrong or abs(cost["logprobs"] - logprobs) > 1e-6 * abs(logprobs):
        raise SystemExit(f"wrong output: {task['who']}: {wrong or cost['logprobs']}")
    return cost


def measure(
    python: Callable[[str], Path],
    environ: dict[str, str],
    url: str,
    kind: dict[str, int],
    groups: int,
    calls: Callable[[str], str],
) -> Callable[[str], dict[str, float]]:
    """Return what measures one side once; the peer does a quarter of the groups, and is counted four times.

    ``calls`` tells by which of the two APIs a side is called.
    """

    def one(who: str) -> dict[str, float]:
        share = 4 if calls(who) == "peer" else 1
        cost = once(python(who), environ, {"who": calls(who), "url": url, "groups": groups // share, **kind})
        return {**cost, "cpu": cost["cpu"] * share, "wall": cost["wall"] * share}

    return one


def open_at_once(python: Path, environ: dict[str, str], count: int) -> dict[str, int]:
    """Send `count` groups that are answered only when all of them are open at the server; return what it saw."""
    code = f"""
import asyncio
from cwtrain_rollout import Group, RolloutConfig, Sampler, SamplingParams
groups = [Group(prompt=[1, 2, 3], n=1, extra={{"user": "together-{count}"}}) for _ in range({count})]
async def main(url):
    sampler = Sampler(RolloutConfig(base_url=url, model="m", concurrency={count}, timeout=60))
    found = await sampler.sample(groups, SamplingParams(max_tokens=4))
    assert len(found) == {count}
import sys
asyncio.run(main(sys.argv[1]))
"""
    with sink(python, 4) as url:
        subprocess.run([python, "-P", "-c", code, url], env=environ, check=True)
        with urllib.request.urlopen(url.removesuffix("/v1") + "/seen") as seen:
            found: dict[str, int] = json.loads(seen.read())
    if found["peak"] != count:
        raise SystemExit(f"{count} groups were sent, and {found['peak']} were open at once")
    return found
