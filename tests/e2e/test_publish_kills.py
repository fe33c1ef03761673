"""A publish that is killed at any moment is finished by the same command, without doing any of its work twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from cwtrain import HotLoader, InferenceClient
from cwtrain.storage import s3_client
from helpers.tiny_checkpoint import tiny_tensors, write_delta_by_hand, write_full

SCRIPT = Path(__file__).parents[1] / "helpers" / "publish_and_die.py"


@pytest.fixture(scope="module")
def service(emulator):
    """A deployment with a base on it, and what children need to reach it."""
    return emulator


@pytest.fixture
def environment(service):
    return {**os.environ, **service.env, "CWTRAIN_DISABLED_PLUGINS": ""}


def objects_of(service, prefix, bucket):
    s3 = s3_client(
        service.env["CW_S3_ENDPOINT"],
        region_name=service.env["AWS_REGION"],
        aws_access_key_id=service.env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=service.env["AWS_SECRET_ACCESS_KEY"],
    )
    pages = s3.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
    return {item["Key"]: item["LastModified"] for page in pages for item in page.get("Contents", [])}


@pytest.mark.parametrize(
    ("moment", "kind"),
    [
        ("upload:1", "full"),
        ("upload:2", "full"),
        ("upload:1", "delta"),
        ("between", "full"),
        ("between", "delta"),
        ("accepted", "delta"),
        ("waiting", "full"),
        ("waiting", "delta"),
    ],
)
def test_the_same_command_finishes_what_a_kill_left(service, deployment, environment, tmp_path, moment, kind):
    deployment_id = deployment["spec"]["id"]
    target = deployment["spec"]["hotLoad"]
    client = InferenceClient(service.env["COREWEAVE_API_TOKEN"], base_url=service.base_url)
    s3 = s3_client(
        service.env["CW_S3_ENDPOINT"],
        region_name=service.env["AWS_REGION"],
        aws_access_key_id=service.env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=service.env["AWS_SECRET_ACCESS_KEY"],
    )
    base = write_full(tmp_path / "base", tiny_tensors(0))
    loader = HotLoader(client, deployment_id, s3=s3, poll_interval=0.05)
    previous, checkpoint = "-", write_full(tmp_path / "next", tiny_tensors(1))
    if kind == "delta":
        loader.publish(base, "base")
        previous, checkpoint = "base", write_delta_by_hand(tmp_path / "delta", tiny_tensors(0), tiny_tensors(1))
    identity = f"v-{moment.replace(':', '-')}"
    prefix = f"{target.get('pathPrefix', '')}/{identity}/".lstrip("/")

    def run(when):
        command = [sys.executable, str(SCRIPT), deployment_id, checkpoint, identity, previous, when]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)

    killed = run(moment)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = objects_of(service, prefix, target["bucket"])
    if not moment.startswith("upload"):
        assert f"{prefix}model.safetensors.index.json" in left

    options = [] if previous == "-" else ["--previous-identity", previous]
    command = [sys.executable, "-m", "cwtrain", "hotload", "publish", "--deployment", deployment_id]
    command += ["--checkpoint", checkpoint, "--identity", identity, *options]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["status"]["state"] == "COMPLETED"

    now = objects_of(service, prefix, target["bucket"])
    assert {key: now[key] for key in left} == left, "an object that was there was sent again"
    of_identity = [one for one in client.list_hot_loads(deployment_id) if one.identity == identity]
    assert len(of_identity) == 1, "a second hot-load of the same work"
    assert loader.verify_served(identity).served
    assert loader.verify(identity).verified
    own = f"{target['pathPrefix']}/"  # other tests' kills leave theirs elsewhere in the bucket
    assert not s3.list_multipart_uploads(Bucket=target["bucket"], Prefix=own).get("Uploads", [])
