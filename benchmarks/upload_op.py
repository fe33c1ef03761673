"""One upload in a fresh process, with what it cost: python upload_op.py WHO DIRECTORY ENDPOINT CA_BUNDLE IDENTITY

WHO is `ours`, `peer` (both call `upload_snapshot` of the `cwtrain` that this Python has), `stream` (`SnapshotWriter`,
the tensors in memory), or `floor` (SHA-256 of each file, then sendfile). Imports, inspection and the client are outside
the clock. Prints JSON: wall and CPU seconds, peak MiB.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

sys.path.append(os.path.dirname(os.path.abspath(__file__)))
import without

PART = 64 << 20


def cwtrain_upload(directory: str, endpoint: str, ca_bundle: str, identity: str) -> Callable[[], Any]:
    """Return the upload as users call it."""
    from cwtrain.hotload import inspect_snapshot, upload_snapshot

    client = client_of(endpoint, ca_bundle)
    snapshot = inspect_snapshot(directory)
    return lambda: upload_snapshot(snapshot, bucket="bench", identity=identity, s3=client)


def client_of(endpoint: str, ca_bundle: str) -> Any:
    """Return a client that has asked for something, so that what the first request costs is outside the clock."""
    from cwtrain.infra import s3_client

    keys = {"aws_access_key_id": "a", "aws_secret_access_key": "b", "region_name": "US-EAST-04A"}
    verify = {"verify": ca_bundle} if ca_bundle else {}
    client: Any = s3_client(endpoint, **keys, **verify)
    client.list_objects_v2(Bucket="bench", Prefix="nothing")
    return client


def streamed_upload(directory: str, endpoint: str, ca_bundle: str, identity: str) -> Callable[[], Any]:
    """Return the directory's tensors as a full snapshot from memory."""
    from operations import in_memory

    from cwtrain.hotload import SnapshotWriter
    from cwtrain.storage import Location, S3Store

    store = S3Store(client_of(endpoint, ca_bundle), "bench")
    tensors = in_memory(directory)

    def run() -> None:
        location = Location("bench", "")
        with SnapshotWriter(store, location, identity, kind="full", side_files=directory) as writer:
            for name, data, dtype, shape in tensors:
                writer.add(name, data, dtype=dtype, shape=shape)
            writer.finalise([writer.close()])

    return run


def floor_upload(directory: str, endpoint: str, identity: str) -> Callable[[], Any]:
    """Return SHA-256 and sendfile of every file, with one connection and nothing around it."""
    sock = socket.create_connection((urlsplit(endpoint).hostname, urlsplit(endpoint).port))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run() -> None:
        scratch = memoryview(bytearray(1 << 20))
        for name in sorted(os.listdir(directory)):
            fd = os.open(os.path.join(directory, name), os.O_RDONLY)
            digest = hashlib.sha256()
            while size := os.readv(fd, [scratch]):
                digest.update(scratch[:size])
            total = os.fstat(fd).st_size
            for begin in range(0, total, PART):
                end = min(total, begin + PART)
                target = f"/bench/{identity}/{name}.{begin}"
                sock.sendall(f"PUT {target} HTTP/1.1\r\nContent-Length: {end - begin}\r\n\r\n".encode())
                while begin < end:
                    begin += os.sendfile(sock.fileno(), fd, begin, end - begin)
                sock.recv(65536)
            os.close(fd)

    return run


def main(who: str, directory: str, endpoint: str, ca_bundle: str, identity: str) -> None:
    """Make it ready, run it once under the clock, print what it took."""
    without.apply()
    if who == "floor":
        operation = floor_upload(directory, endpoint, identity)
    elif who == "stream":
        operation = streamed_upload(directory, endpoint, ca_bundle, identity)
    else:
        operation = cwtrain_upload(directory, endpoint, ca_bundle, identity)
    before, began = os.times(), time.perf_counter()
    operation()
    wall, after = time.perf_counter() - began, os.times()
    print(
        json.dumps(
            {
                "wall": wall,
                "cpu": after.user + after.system - before.user - before.system,
                "user": after.user - before.user,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
