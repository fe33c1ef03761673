"""The command line against the emulator: check, publish, delta, roll back, read back, as a person does it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cwtrain.hotload.delta import write_delta
from helpers.run_cli import run

Fixture = Any


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    """Two checkpoints of the emulator's engine, and the delta from the first to the second."""
    from cwtrain_emulator.engine.model_io import make_model

    for seed in (0, 1):
        make_model(tmp_path / f"full{seed}", vocab_size=16, hidden_size=4, context=4, seed=seed)
    write_delta(tmp_path / "full0", tmp_path / "full1", tmp_path / "delta", version="1", base_version="0")
    return [str(tmp_path / name) for name in ("full0", "full1", "delta")]


def test_the_life_of_two_versions(emulator: Fixture, deployment: Fixture, bucket: Fixture, models: list[str]) -> None:
    env, here = emulator.env, ("--deployment", deployment["spec"]["id"])
    full, _, delta = models
    prefix = deployment["spec"]["hotLoad"]["pathPrefix"]

    checked = run("hotload", "check", *here, env=env)
    assert checked.code == 0, checked.err
    assert {"deployment", "bucket", "path_prefix", "uri", "result"} <= set(checked.data)
    assert checked.data["uri"] == f"s3://{bucket.name}/{prefix}/"
    assert checked.data["result"] == "ok"

    publish = ("hotload", "publish", *here, "--checkpoint", full, "--identity", "v0")
    plan = run(*publish, "--dry-run", env=env)
    assert plan.data["kind"] == "FULL", plan.err
    assert plan.data["upload_bytes"] == plan.data["total_bytes"]
    assert run("hotload", "list", *here, env=env).data == []

    first = run(*publish, env=env)
    assert first.data["status"]["state"] == "COMPLETED", first.err
    assert "2/2 replicas" in first.err
    again = run(*publish, "-o", "id", env=env)
    assert again.out.strip() == first.data["spec"]["id"]

    second = run(
        *("hotload", "publish", *here, "--checkpoint", delta, "--identity", "v1", "--previous-identity", "v0"),
        *("--reset-prompt-cache", "--workers", "2"),
        env=env,
    )
    assert second.data["spec"]["type"] == "INCREMENTAL", second.err
    assert second.data["spec"]["prompt_cache_policy"] == "RESET_ALL"
    hot_load = second.data["spec"]["id"]
    replicas = run("hotload", "status", hot_load, env=env).data["replicas"]
    assert {replica["current_snapshot_identity"] for replica in replicas} == {"v1"}

    back = run("hotload", "rollback", *here, "--identity", "v0", env=env)
    assert back.data["spec"]["identity"] == "v0", back.err
    forth = run("hotload", "trigger", *here, "--identity", "v1", "--no-wait", env=env)
    assert forth.data["spec"]["type"] == "INCREMENTAL", forth.err
    waited = run("hotload", "wait", forth.data["spec"]["id"], env=env)
    assert waited.data["status"]["state"] == "COMPLETED", waited.err
    listed = run("hotload", "list", *here, env=env).data
    assert [one["spec"]["identity"] for one in listed] == ["v1", "v0", "v1", "v0"]

    verified = run("hotload", "verify", *here, "--identity", "v0", env=env)
    assert verified.data["problems"] == [], verified.err
    bucket.client.put_object(Bucket=bucket.name, Key=f"{prefix}/v0/config.json", Body=b"{}")
    spoiled = run("hotload", "verify", *here, "--identity", "v0", env=env)
    assert (spoiled.code, spoiled.out) == (1, "")
    assert "config.json" in spoiled.err


def test_a_publish_under_a_taken_identity_writes_nothing(
    emulator: Fixture, deployment: Fixture, models: list[str]
) -> None:
    here = ("--deployment", deployment["spec"]["id"], "--identity", "v0")
    assert run("hotload", "publish", *here, "--checkpoint", models[0], env=emulator.env).code == 0
    other = run("hotload", "publish", *here, "--checkpoint", models[1], env=emulator.env)
    assert (other.code, other.out) == (1, "")
    assert "v0" in other.err
    assert "next: " in other.err


def preflight(env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cwtrain.integrations.preflight"],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_preflight(emulator: Fixture, deployment: Fixture) -> None:
    named = {"CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"]}
    done = preflight({**emulator.env, **named})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"] == "ok"

    wrong = preflight({**emulator.env, **named, "AWS_SECRET_ACCESS_KEY": "wrong"})
    assert (wrong.returncode, wrong.stdout) == (1, "")
    assert wrong.stderr.startswith("error: ")
    assert emulator.secret_access_key not in wrong.stderr

    nothing = preflight({"CWTRAIN_HOTLOAD_TIMEOUT": "nan"})
    assert (nothing.returncode, nothing.stdout) == (1, "")
    for name in ("CWTRAIN_HOTLOAD_DEPLOYMENT_ID", "CWTRAIN_HOTLOAD_TIMEOUT", "COREWEAVE_API_TOKEN"):
        assert name in nothing.stderr


def test_a_check_whose_answer_is_lost_leaves_no_upload_open(
    emulator: Fixture, deployment: Fixture, bucket: Fixture, faults: Fixture
) -> None:
    """The client repeats what begins an upload, and the store has done it the first time."""
    prefix = f"{deployment['spec']['hotLoad']['pathPrefix']}/_preflight/"
    cut = faults.add("store", "cut", method="POST", path=prefix, times=1)
    checked = run("hotload", "check", "--deployment", deployment["spec"]["id"], env=emulator.env)
    assert checked.code == 0, checked.err
    assert faults.struck(cut) == 1
    assert "Uploads" not in bucket.client.list_multipart_uploads(Bucket=bucket.name, Prefix=prefix)


def test_doctor_checks_the_bucket_of_the_named_deployment(emulator: Fixture, deployment: Fixture) -> None:
    done = run("doctor", env={**emulator.env, "CWTRAIN_HOTLOAD_DEPLOYMENT_ID": deployment["spec"]["id"]})
    assert done.data["bucket"]["result"] == "ok", done.err
    assert done.data["storage"]["endpoint_source"] == "CW_S3_ENDPOINT"
    assert done.data["problems"] == []
    for secret in (emulator.admin_token, emulator.secret_access_key):
        assert secret not in done.out + done.err
