"""`cwtrain demo` as a user runs it: a process of its own, a real emulator, real hot-loads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from helpers.run_cli import program, without_override

STEPS = 6
LIMIT = 240.0
CPUS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def demo(*options: str, **settings: Any) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "cwtrain", "demo", *options]
    environ = os.environ | CPUS | settings.pop("environ", {})
    return subprocess.Popen(command, env=environ, stdin=subprocess.DEVNULL, **settings)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("demo")
    state, report = folder / "state", folder / "report.html"
    process = demo(
        *("--steps", str(STEPS), "--seed", "1", "--state-dir", str(state), "--report", str(report)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        out, err = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 0, err.decode()[-4000:]
    return {"result": json.loads(out), "err": err.decode(), "state": state, "report": report}


def test_the_reward_rises_and_the_weights_match(finished: dict[str, Any]) -> None:
    result = finished["result"]
    assert result["weights_match"] is True
    assert result["reward_rose"] is True
    assert result["reward_end"] > result["reward_start"]
    assert result["logprobs_match"] is True
    assert result["logprob_mismatches"] == 0
    assert result["logprob_difference"] < 1e-4
    assert result["seed"] == 1


def test_every_version_was_published_and_served(finished: dict[str, Any]) -> None:
    versions = finished["result"]["versions"]
    assert [version["version"] for version in versions] == list(range(STEPS + 1))
    assert [version["kind"] for version in versions] == ["FULL", "DELTA", "DELTA", "FULL", "DELTA", "DELTA", "FULL"]
    for version in versions:
        assert version["bytes"] > 0
        assert version["ratio"] >= 1.0
        assert version["hot_load_id"]
        assert version["changed_tensors"] > 0
    assert len({version["identity"] for version in versions}) == STEPS + 1
    replicas = finished["result"]["replicas"]
    assert len(replicas) == 2
    assert set(replicas.values()) == {versions[-1]["identity"]}


def test_the_rest_of_the_result(finished: dict[str, Any]) -> None:
    result = finished["result"]
    phases = {"start", "create", "sample", "learn", "write", "encode", "upload", "publish", "check", "stop", "total"}
    assert phases <= set(result["seconds"])
    assert all(seconds >= 0 for seconds in result["seconds"].values())
    assert len(result["steps"]) == STEPS
    sampler = result["sampler"]
    assert sampler["samples"] == sum(step["samples"] for step in result["steps"])
    assert sampler["completion_tokens"] == sum(step["tokens"] for step in result["steps"])
    assert sampler["requests"] == STEPS * 8
    assert result["state_dir"] == str(finished["state"])
    assert (finished["state"] / "trained" / "config.json").is_file()
    assert finished["report"].read_text().startswith("<!doctype html>")


def test_versions_go_from_memory_into_the_bucket(finished: dict[str, Any]) -> None:
    """Nothing is written to the disk for them: there are the emulator's files, the first model and the last weights."""
    state = finished["state"]
    assert {path.name for path in state.iterdir()} == {"base", "emulator", "trained"}
    theirs = state / "emulator"
    ours = [path for path in state.rglob("*.safetensors") if theirs not in path.parents]
    assert sorted({path.parent.name for path in ours}) == ["base", "trained"]
    for version in finished["result"]["versions"]:
        assert 0 < version["write_seconds"] <= version["seconds"]
        assert version["encode_seconds"] > 0
        assert version["upload_seconds"] > 0


def test_progress_is_plain_lines_away_from_a_terminal(finished: dict[str, Any]) -> None:
    lines = finished["err"].splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert len(steps) == STEPS
    assert "reward " in steps[0]
    assert "kind delta" in steps[0]
    assert "\x1b" not in finished["err"]
    assert "Traceback" not in finished["err"]


def test_the_same_seed_gives_the_same_rewards(finished: dict[str, Any]) -> None:
    process = demo("--steps", "3", "--seed", "1", "--replicas", "1", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    try:
        out, _ = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    again = json.loads(out)
    assert again["weights_match"] is True
    assert again["state_dir"] is None
    # fewer steps on fewer replicas: what it has in common with the longer run is equal to the last digit
    rewards = [step["reward"] for step in again["steps"]]
    assert rewards == [step["reward"] for step in finished["result"]["steps"]][: len(rewards)]


def _alive(mark: str) -> list[str]:
    """Return the command lines of all living processes with `mark` in their environment."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if mark.encode() in (entry / "environ").read_bytes():
                found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found


def _until_none_is_left(mark: str, seconds: float) -> list[str]:
    deadline = time.monotonic() + seconds
    while (left := _alive(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc, which is not here")
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_stopped_in_the_middle_it_leaves_no_process(tmp_path: Path, number: signal.Signals, code: int) -> None:
    mark = f"CWTRAIN_TEST_MARK={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    process = demo(
        *("--steps", "1000", "--seed", "2"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        environ={name: value, "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    assert process.stderr is not None
    assert process.stdout is not None
    try:
        for line in process.stderr:
            if line.startswith(b"step 1 "):
                break
        assert len(_alive(mark)) > 3, "the emulator's processes carry the mark"
        process.send_signal(number)
        rest = process.stderr.read().decode()
        assert process.wait(timeout=60) == code, rest
        assert process.stdout.read() == b""
        assert "Traceback" not in rest
        assert _until_none_is_left(mark, 30.0) == []
        if number is not signal.SIGKILL:
            assert list(tmp_path.iterdir()) == [], "the temporary directory is removed"
    finally:
        process.kill()
        process.stdout.close()
        process.stderr.close()
        process.wait()


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--steps", "1"], "--steps"),
        (["--replicas", "0"], "--replicas"),
        (["--engine", "transformers"], "transformers"),
        (["--model", "/no/such/model"], "--model"),
        (["--report", "/no/such/directory/report.html"], "--report"),
    ],
)
def test_wrong_usage_is_said_at_once(options: list[str], says: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cwtrain", "demo", *options], capture_output=True, timeout=LIMIT, check=False
    )
    assert done.returncode == 2
    assert done.stdout == b""
    assert says in done.stderr.decode()


def test_a_report_that_could_not_be_written_is_refused_before_the_training(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    done = program("demo", "--report", str(tmp_path / "report.html"), before=without_override)
    assert (done.code, done.out) == (2, "")
    assert "--report" in done.err


def test_a_directory_that_is_used_already_is_refused(tmp_path: Path) -> None:
    (tmp_path / "something").write_text("")
    done = subprocess.run(
        [sys.executable, "-m", "cwtrain", "demo", "--state-dir", str(tmp_path)],
        capture_output=True,
        timeout=LIMIT,
        check=False,
    )
    assert done.returncode == 2
    assert "not empty" in done.stderr.decode()
    assert [path.name for path in tmp_path.iterdir()] == ["something"]
