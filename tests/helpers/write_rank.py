"""One rank of a trainer that publishes with the streaming writer; the ranks' collective is a directory.

python write_rank.py JSON, with endpoint, prefix, rank, ranks, directory, versions; see ``Job``.
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import sys
import time
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cwtrain.errors import CWTrainError
from cwtrain.hotload import MemoryBase, SnapshotWriter
from cwtrain.storage import Location, S3Store, s3_client
from cwtrain.storage.stream import StreamSizes
from helpers.s3_servers import BUCKET, REGION, TRAINER
from helpers.streamed import make_state, next_state

SIZES = StreamSizes(pool_bytes=48 << 20, block_bytes=1 << 20, part_bytes=5 << 20, single_bytes=5 << 20)
"""Servers refuse smaller parts."""
SCALE = 20
_SECONDS = 60.0


@attrs.frozen(kw_only=True)
class Job:
    """What a rank does: version 0 is a full snapshot, each further one a delta."""

    endpoint: str
    prefix: str
    directory: str
    rank: int = 0
    ranks: int = 1
    versions: int = 1
    identity: str = "v"
    fails_at: int | None = None
    """The version in which this rank adds something that is no tensor."""
    dies_at: tuple[str, int] | None = None
    """The S3 operation and the how manieth request of it at which the process kills itself."""


def states(count: int) -> list[dict[str, Any]]:
    """Return the versions that all ranks work on."""
    found = [make_state(1, scale=SCALE)]
    for number in range(1, count):
        found.append(next_state(found[-1], number))
    return found


def main(job: Job) -> int:
    client = s3_client(job.endpoint, region_name=REGION, aws_access_key_id=TRAINER[0], aws_secret_access_key=TRAINER[1])
    if job.dies_at is not None:
        operation, at = job.dies_at
        count = itertools.count(1)

        def die(**_: Any) -> None:
            if next(count) == at:
                os.kill(os.getpid(), signal.SIGKILL)

        client.meta.events.register(f"before-send.s3.{operation}", die)
    store, location, base = S3Store(client, BUCKET), Location(BUCKET, job.prefix), MemoryBase()
    meeting = Path(job.directory)
    for number, state in enumerate(states(job.versions)):
        mine = [name for at, name in enumerate(state) if at % job.ranks == job.rank]
        options: dict[str, Any] = {"kind": "delta"} if number else {"kind": "full", "side_files": meeting / "sides"}
        with SnapshotWriter(
            store,
            location,
            f"{job.identity}{number}",
            rank=job.rank,
            ranks=job.ranks,
            upload_id=f"upload-{job.identity}{number}",
            run_id="run",
            base=base,
            sizes=SIZES,
            **options,
        ) as writer:
            try:
                for name in mine:
                    writer.add(name, object() if job.fails_at == number else state[name])
                receipt = writer.close(raises=False)
            except CWTrainError as error:
                receipt = writer.failure(error)
            say(meeting / f"{number}.{job.rank}", receipt)
            if job.rank == 0:
                receipts = [hear(meeting / f"{number}.{rank}") for rank in range(job.ranks)]
                try:
                    written = writer.finalise(receipts)
                except CWTrainError as error:
                    written = error
                say(meeting / f"{number}.done", written)
            else:
                written = hear(meeting / f"{number}.done")
            if isinstance(written, CWTrainError):
                print(f"{type(written).__name__}: {written}", file=sys.stderr)
                return 1
            if job.rank:
                writer.commit(written)
    client.close()
    return 0


def say(path: Path, what: Any) -> None:
    path.with_suffix(path.suffix + ".tmp").write_bytes(pickle.dumps(what))
    os.rename(path.with_suffix(path.suffix + ".tmp"), path)


def hear(path: Path) -> Any:
    deadline = time.monotonic() + _SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} did not come")
        time.sleep(0.02)
    return pickle.loads(path.read_bytes())


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    told["dies_at"] = tuple(told["dies_at"]) if told.get("dies_at") else None
    sys.exit(main(Job(**told)))
