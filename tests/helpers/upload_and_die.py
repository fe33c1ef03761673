"""Upload a directory as `v1` and get a signal when a number of requests of some operation is out.

python upload_and_die.py DIRECTORY BUCKET PREFIX RECORD_DIRECTORY SIGNAL REQUESTS [OPERATION]
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


def main(
    directory: str, bucket: str, prefix: str, record: str, name: str, requests: str, operation: str | None = None
) -> None:
    client = s3_client()
    count = itertools.count(1)
    # As the CLI does it: SIGTERM becomes an exception in the main thread.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))

    def die(**_: Any) -> None:
        if next(count) == int(requests) + 1:
            os.kill(os.getpid(), signal.Signals[name])

    client.meta.events.register(f"before-send.s3.{operation}" if operation else "before-send.s3", die)
    names = sorted(os.listdir(directory), key=lambda name: (name == INDEX_NAME, name))
    upload_objects(
        [describe(Path(directory, name)) for name in names],
        store=S3Store(client, bucket),
        location=Location(bucket, prefix),
        identity="v1",
        # With a second worker, SIGKILL may fall between the store's answer to its CreateMultipartUpload and our note of
        # it. Such an upload is nobody's until it is a day old; tools/kill_test.py counts them.
        workers=1 if name == "SIGKILL" else 2,
        sizes=PartSizes(multipart_above_bytes=8 << 20, part_bytes=5 << 20),
        record_directory=record,
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
