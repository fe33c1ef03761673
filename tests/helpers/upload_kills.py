"""Uploads that are killed at random instants and begun again, against a real S3 server.

Each seed makes a snapshot of its own, uploads it in a forked child that gets SIGKILL at a random instant, a few times,
and then uploads it to the end. What must hold is checked after each kill and at the end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs

from cwtrain.models.snapshot import INDEX_NAME, SnapshotFile
from cwtrain.storage import Location, S3Store, plan_upload, upload_objects
from cwtrain.storage.upload import PartSizes
from helpers.s3_servers import BUCKET, S3Server
from helpers.upload_files import INDEX, describe, noise, sha256

SIZES = PartSizes(multipart_above_bytes=6 << 20, part_bytes=5 << 20)


@attrs.define
class UploadKills:
    """One seed's snapshot and its uploads. ``directory`` is empty and the caller's to remove."""

    server: S3Server
    seed: int
    directory: Path
    kills: int = 0
    """How many uploads were killed before they were done."""
    files: list[SnapshotFile] = attrs.field(factory=list)

    def run(self) -> None:
        """Upload, kill, and upload again. Raises AssertionError with the seed when something is wrong."""
        rng = random.Random(self.seed)
        objects = _objects(rng)
        location = Location(BUCKET, f"kills/{self.seed}-{os.getpid()}-{time.monotonic_ns()}")
        files = self.files = self._write(objects, known=rng.random() < 0.5)
        workers = rng.randint(1, 6)
        client = self.server.client()
        store = S3Store(client, BUCKET)
        try:
            for _ in range(rng.randint(1, 4)):
                # Most of the work takes a fraction of a second: short delays are the interesting ones.
                self._kill(lambda: self._upload(files, location, workers), delay=rng.random() ** 2 * 0.8)
                self._check(store, location, objects, complete=False)
            self._upload(files, location, workers, store)
            self._check(store, location, objects, complete=True)
        finally:
            client.close()

    def _write(self, objects: dict[str, bytes], *, known: bool) -> list[SnapshotFile]:
        files = []
        for name, data in objects.items():
            (self.directory / name).write_bytes(data)
            file = describe(self.directory / name)
            files.append(attrs.evolve(file, sha256=sha256(data)) if known else file)
        return files

    def _upload(
        self, files: list[SnapshotFile], location: Location, workers: int, store: S3Store | None = None
    ) -> None:
        upload_objects(
            files,
            store=store or S3Store(self.server.client(), BUCKET),
            location=location,
            identity="v1",
            workers=workers,
            sizes=SIZES,
            record_directory=str(self.directory / "record"),
        )

    def _kill(self, work: Callable[[], None], *, delay: float) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if not child:
            code = 0
            try:
                work()
            except BaseException:
                traceback.print_exc()
                code = 1
            os._exit(code)
        time.sleep(delay)  # the instant is what is random here
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"seed {self.seed}: the upload failed by itself"
        self.kills += os.WIFSIGNALED(status)

    def _check(self, store: S3Store, location: Location, objects: dict[str, bytes], *, complete: bool) -> None:
        there = {one.key.removeprefix(location.prefix("v1")) for one in store.list_objects(location.prefix("v1"))}
        assert there <= set(objects), f"seed {self.seed}: {there - set(objects)} is no part of it"
        if complete or INDEX_NAME in there:
            assert there == set(objects), f"seed {self.seed}: the index is there without {set(objects) - there}"
        # Killed between the head and the body of a PUT, SeaweedFS keeps an empty object. It must be known for missing.
        torn: tuple[str, ...] = ()
        if not complete:
            plan = plan_upload(self.files, store=store, location=location, identity="v1")
            assert not plan.conflicts, f"seed {self.seed}: {plan.reasons}"
            torn = plan.missing
        for name in sorted(there):
            found, right = store.get(location.key("v1", name)), objects[name]
            if not found and name in torn:
                continue  # and the next upload has to bring its bytes
            if found != right:
                at = next((i for i, (a, b) in enumerate(zip(found, right, strict=False)) if a != b), None)
                about = f"{len(found)} of {len(right)} bytes, the first other one at {at}"
                raise AssertionError(f"seed {self.seed}: {name} has wrong bytes: {about}")
        if complete:
            left: list[Any] = list(store.list_uploads(location.root))
            assert not left, f"seed {self.seed}: {left} stayed open"


def _objects(rng: random.Random) -> dict[str, bytes]:
    objects = {"config.json": b"{}"}
    for number in range(rng.randint(1, 3)):
        size = rng.choice([rng.randint(0, 1 << 20), rng.randint(6 << 20, 14 << 20)])
        objects[f"model-{number:05d}.safetensors"] = noise(rng.randrange(1 << 30), size)
    return objects | {INDEX_NAME: INDEX}
