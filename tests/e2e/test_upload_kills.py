"""SIGKILL at random instants of an upload, a dozen fixed seeds; `tools/kill_test.py upload` runs as many as wanted."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.s3_servers import S3Server, seaweedfs, server_directory
from helpers.upload_kills import UploadKills


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with server_directory() as directory, seaweedfs(directory) as server:
        yield server


@pytest.mark.parametrize("seed", range(12))
def test_killed_uploads_end_well(server: S3Server, tmp_path: Path, seed: int) -> None:
    UploadKills(server, seed, tmp_path).run()
