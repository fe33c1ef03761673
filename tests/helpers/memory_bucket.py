"""A bucket in memory, with the few calls that the emulator's S3 client has."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from cwtrain_emulator.s3.client import ObjectInfo, S3Error


class MemoryBucket:
    """Objects by (bucket, key). ``downloads`` counts files that were fetched; a bucket in ``closed`` is refused."""

    def __init__(self) -> None:
        self.objects: dict[tuple[str, str], bytes] = {}
        self.downloads = 0
        self.closed: set[str] = set()

    def put(self, bucket: str, prefix: str, files: Mapping[str, bytes]) -> None:
        for name, raw in files.items():
            self.objects[bucket, prefix + name] = raw

    def list_objects(self, bucket: str, prefix: str, *, limit: int = 1000) -> list[ObjectInfo]:
        if bucket in self.closed:
            raise S3Error(f"GET s3://{bucket}/: 403 AccessDenied", status=403, code="AccessDenied")
        return [
            ObjectInfo(key, len(raw), hashlib.md5(raw).hexdigest())
            for (owner, key), raw in self.objects.items()
            if owner == bucket and key.startswith(prefix)
        ]

    def get(self, bucket: str, key: str, *, limit: int = 1 << 20) -> bytes:
        try:
            return self.objects[bucket, key]
        except KeyError:
            raise S3Error(f"{key}: 404 NoSuchKey", status=404, code="NoSuchKey") from None

    def download(self, bucket: str, key: str, path: Path, *, size_bytes: int) -> None:
        self.downloads += 1
        path.write_bytes(self.get(bucket, key))

    def close(self) -> None:
        pass
