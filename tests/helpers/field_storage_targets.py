"""Our code as the targets that the field cases about storage call."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cwtrain.storage import Location, S3Store, s3_client, upload_objects
from cwtrain.storage.store import Body
from cwtrain.storage.upload import PartSizes
from helpers.upload_files import describe


def factory(endpoint_url: str) -> Any:
    """The client of ``tls_trailer``."""
    return s3_client(endpoint_url)


def upload(client: Any, bucket: str, key: str, path: str, on_first_read: Callable[[], None]) -> None:
    """The upload of ``mutating_file``: one file, in parts, to a key that the case chooses."""

    class OneKey(S3Store):
        """Puts the object where the case looks for it, and tells it when the file has been hashed."""

        def create_upload(self, _: str, *, metadata: Mapping[str, str] | None = None) -> str:
            upload_id = super().create_upload(key, metadata=metadata)
            on_first_read()
            return upload_id

        def upload_part(self, _: str, upload_id: str, number: int, body: Body) -> str:
            return super().upload_part(key, upload_id, number, body)

        def complete_upload(self, _: str, upload_id: str, etags: Any, *, if_absent: bool = False) -> None:
            super().complete_upload(key, upload_id, etags, if_absent=if_absent)

        def abort_upload(self, _: str, upload_id: str) -> None:
            super().abort_upload(key, upload_id)

        def head(self, asked: str) -> Any:
            return super().head(key if asked.endswith(".safetensors") else asked)

    with tempfile.TemporaryDirectory() as record:
        upload_objects(
            [describe(Path(path), "model.safetensors")],
            store=OneKey(client, bucket),
            location=Location(bucket),
            identity="v1",
            sizes=PartSizes(multipart_above_bytes=8 << 20, part_bytes=5 << 20),
            record_directory=record,
        )
