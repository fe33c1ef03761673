"""Real S3 servers and what the conformance tests share, made once for the whole run and only when a test asks.

The emulator is imported at use: the storage suite also runs where core is installed alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from helpers.requirements import require
from helpers.s3_servers import S3Server, ceph, seaweedfs, server_directory

if TYPE_CHECKING:
    from cwtrain_emulator.emulator import Emulator
    from cwtrain_emulator.pytest_plugin import Bucket
    from helpers.emulator_api import Api


@pytest.fixture(scope="session")
def seaweedfs_server() -> Iterator[S3Server]:
    with server_directory() as directory, seaweedfs(directory) as server:
        yield server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[S3Server]:
    require("ceph")
    with server_directory() as directory, ceph(directory) as server:
        yield server


@pytest.fixture(scope="session")
def service(emulator: Emulator) -> Iterator[Api]:
    """The API with the role Inference Admin."""
    from helpers.emulator_api import Api

    made = Api(emulator.base_url, emulator.admin_token)
    yield made
    made.close()


@pytest.fixture(scope="session")
def common_gateway(service: Api) -> str:
    """The id of a READY gateway in one zone."""
    found: str = service.gateway()["spec"]["id"]
    return found


@pytest.fixture(scope="session")
def store(emulator: Emulator) -> Bucket:
    """The bucket, with one client for the whole run."""
    from helpers.conformance import bucket_of

    return bucket_of(emulator)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The files of a very small model of the emulator's own engine."""
    from cwtrain_emulator.engine.model_io import make_model

    directory = tmp_path_factory.mktemp("tiny-model")
    make_model(directory, vocab_size=8, hidden_size=2, context=1, seed=1, max_length=32)
    return {path.name: path.read_bytes() for path in directory.iterdir()}
