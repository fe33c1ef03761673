"""The bandwidth limit: from the argument, else from the environment."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cwtrain.config import StorageConfig
from cwtrain.errors import ConfigError
from cwtrain.hotload import inspect_snapshot
from cwtrain.hotload.upload import upload_snapshot
from cwtrain.storage import MemoryStore
from helpers.tiny_checkpoint import write_full

NAME = "CWTRAIN_UPLOAD_MAX_BYTES_PER_SECOND"


def upload(tmp_path: Path, **more: Any) -> str:
    snapshot = inspect_snapshot(write_full(tmp_path / "ckpt"))
    return upload_snapshot(snapshot, bucket="memory", identity="v1", s3=MemoryStore(), **more)


def test_the_setting() -> None:
    assert StorageConfig.from_env({}).max_bytes_per_second is None
    assert StorageConfig.from_env({NAME: "1000000"}).max_bytes_per_second == 1_000_000
    assert StorageConfig.from_env({"CWTRAIN_S3_OWN_SENDING": "0"}).own_sending is False


def test_an_upload_reads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "fast")
    with pytest.raises(ConfigError, match=NAME):
        upload(tmp_path)
    monkeypatch.setenv(NAME, "100000000")
    assert upload(tmp_path) == "s3://memory/v1"


def test_the_argument_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "fast")
    assert upload(tmp_path, max_bytes_per_second=1e8) == "s3://memory/v1"
    with pytest.raises(ConfigError, match="max_bytes_per_second"):
        upload(tmp_path, max_bytes_per_second=0)
