"""Real S3 servers, started once for the whole run and only when a test asks for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from helpers.requirements import require
from helpers.s3_servers import S3Server, ceph, seaweedfs, server_directory


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    with server_directory() as directory, seaweedfs(directory) as server:
        yield server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[S3Server]:
    require("ceph")
    with server_directory() as directory, ceph(directory) as server:
        yield server
