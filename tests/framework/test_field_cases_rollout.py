"""The check programs of recorded bug reports about rollout clients, run against our sampler."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("CWTRAIN_SHARED") or Path(__file__).parents[3] / "shared")
CASES = SHARED / "field" / "cases"
TESTS = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no {CASES}; set CWTRAIN_SHARED to the folder that has it")


def run(case: str, target: str, *, by_exit_code: bool = True) -> str:
    """Run a case; the exit code of some judges the library that had the bug, too, which depends on the machine."""
    done = subprocess.run(
        [sys.executable, str(CASES / case / "check.py"), "--target", f"helpers.field_rollout_targets:{target}"],
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0 or not by_exit_code, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_pool_cap() -> None:
    """B08: as many connections as the window says, and no more."""
    shown = run("pool_cap", "pool", by_exit_code=False)
    assert "target, concurrency 300: peak 300, requests 300" in shown
    assert "target, concurrency 8: peak 8, requests 64" in shown


def test_event_loop() -> None:
    """B09: one object, several event loops and threads."""
    assert run("event_loop", "loops").count("works") >= 4


def test_proxy_env() -> None:
    """B10: proxies of the environment are left alone."""
    assert "target reached the server; the proxy saw 0" in run("proxy_env", "single")


def test_retry_after() -> None:
    """B35: what the server asks for between tries is the least."""
    assert "Retry-After 86400: 0." in run("retry_after", "single")


@pytest.mark.slow
def test_keepalive_race() -> None:
    """B14: a connection that dies as it is used again."""
    shown = run("keepalive_race", "kept_alive")
    assert "target, idle close: 0 of 40 failed" in shown
    assert "target, closed after reading: 0 of 40 failed" in shown


WANTED = {
    "b22_max_tokens_zero": r"RolloutRequestError: .*max_tokens must be at least 1.*\| 2 requests, n sent \[1, '\?'\]",
    "b22_prompt_too_long": r"\[\(\(\), \(\), 'TRUNCATED'\)\] \| 3 requests, n sent \[1, '\?', 1\]",
    "b24_logprobs_missing_in_one_of_two": r"\[\(\(10, 11\).*\| 2 requests, n sent \[2, 1\]",
    "b24_logprobs_null": r"RolloutExhaustedError: .*\| 3 requests",
    "b24_no_tokens_stop": r"RolloutExhaustedError: .*\| 3 requests",
    "b24_prompt_ids_missing": r"\[\(\(10, 11\), \(-0.5, -0.25\), 'COMPLETED'\)\] \| 1 requests",
    "b24_token_ids_null": r"RolloutAnswerError: .*no token ids.*\| 2 requests",
    "b24_token_logprobs_hole": r"RolloutExhaustedError: .*\| 3 requests",
    "b25_one_logprob_less": r"RolloutExhaustedError: .*\| 3 requests",
    "b25_one_logprob_more": r"RolloutExhaustedError: .*\| 3 requests",
    "b25_usage_disagrees": r"\[\(\(1, 2, 3, 4, 5\).*\| 1 requests",
    "b51_floor_9999": r"\(-9999.0, -0.1\).*\| 1 requests",
    "b51_minus_infinity": r"RolloutExhaustedError: .*\| 3 requests",
    "b51_nan": r"RolloutExhaustedError: .*\| 3 requests",
    "b51_positive": r"RolloutExhaustedError: .*\| 3 requests",
    "b51_server_500_json_compliance": r"RolloutExhaustedError: .*\| 3 requests",
    "b51_strings": r"RolloutExhaustedError: .*\| 3 requests",
    "b52_all_equal": r"\[\(\(10, 11\).*\| 1 requests",
    "b52_index_twice": r"RolloutExhaustedError: .*\| 3 requests",
    "b52_one_missing": r"\(13, 14\).*\| 2 requests, n sent \[4, 1\]",
    "b52_one_too_many": r"\[\(\(10, 11\).*\| 1 requests",
    "b52_order_mixed": r"\[\(\(10, 11\).*\(11, 12\).*\| 1 requests",
}
"""What becomes of each scenario's answers with three attempts; the reasons are in the scenarios' own `expect`.

After the first refusal the endpoint's models are asked, once, for the length of the context ('?').
"""


def test_openai_answers() -> None:
    """B22, B24, B25, B51, B52: answers that break rollout clients."""
    lines = run("openai_answers", "answers").splitlines()
    found = {}
    for line, after in itertools.pairwise(lines):
        if scenario := re.match(r"ok\s+B\d+ (\w+)", line):
            found[scenario[1]] = after
    wrong = {name: found.get(name) for name, wanted in WANTED.items() if not re.search(wanted, found.get(name) or "")}
    assert not wrong
    assert set(found) == set(WANTED)
