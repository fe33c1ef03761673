"""Upload a directory as `v1` and be killed when a number of requests is out.

python upload_and_die.py DIRECTORY BUCKET PREFIX RECORD_DIRECTORY REQUESTS
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cwtrain.models.snapshot import INDEX_NAME
from cwtrain.storage import Location, S3Store, s3_client, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.upload_files import describe


def main(directory: str, bucket: str, prefix: str, record: str, requests: str) -> None:
    client = s3_client()
    count = itertools.count(1)

    def die(**_: Any) -> None:
        if next(count) > int(requests):
            os.kill(os.getpid(), signal.SIGKILL)

    client.meta.events.register("before-send.s3", die)
    names = sorted(os.listdir(directory), key=lambda name: (name == INDEX_NAME, name))
    upload_objects(
        [describe(Path(directory, name)) for name in names],
        store=S3Store(client, bucket),
        location=Location(bucket, prefix),
        identity="v1",
        workers=2,
        sizes=PartSizes(multipart_above_bytes=8 << 20, part_bytes=5 << 20),
        record_directory=record,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
