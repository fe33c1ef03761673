"""The service's side of its replicas: starts their processes, keeps them running, and talks to them.

A replica that ends without being asked to is started again, after a pause that grows with each death in a row.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import shutil
import signal
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cwtrain_emulator.channel import read_frame, write_frame
from cwtrain_emulator.faults import FaultBook
from cwtrain_emulator.snapshots import ChainEntry

__all__ = ["Pool", "Replica", "ReplicaError"]

_log = logging.getLogger("cwtrain_emulator.pool")

_LONGEST_PAUSE = 5.0
_STOP_SECONDS = 2.0


class ReplicaError(Exception):
    """A replica refused a request, or died over it; `status` is the HTTP status to answer with."""

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.retry_after = retry_after


@dataclass
class Replica:
    """One replica as the service sees it."""

    name: str
    zone: str
    deployment_id: str
    ordinal: int
    state: str = "STARTING"
    identity: str = ""
    error: str = ""
    max_length: int | None = None
    directory: Path = Path()
    load_id: str = ""
    restored: bool = False
    pid: int = 0
    deaths: int = 0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None
    writer: asyncio.StreamWriter | None = None
    answers: dict[int, asyncio.Queue[tuple[dict[str, Any], bytes]]] = field(default_factory=dict)

    @property
    def wanted(self) -> bool:
        """True until the replica is to be removed."""
        return not self.stopped.is_set()

    @property
    def serving(self) -> bool:
        """True when the replica has weights and can be asked."""
        return self.writer is not None and bool(self.identity)

    @property
    def connected(self) -> bool:
        """True when the replica's process has said hello and is there."""
        return self.writer is not None


class Pool:
    """All replicas of the service. Lives on one event loop.

    `on_change(replica)` is called after each change of a replica's state, `on_hello(replica)` when a process is ready
    to be told what to load.
    """

    def __init__(
        self,
        root: Path,
        *,
        s3: dict[str, Any],
        seed: int,
        swap_delay: float,
        engine: str = "numpy",
        limits: dict[str, Any],
        faults: FaultBook,
        on_hello: Callable[[Replica], None],
        on_change: Callable[[Replica], None],
    ) -> None:
        self._root = root
        self._s3 = s3
        self._seed = seed
        self._engine = engine
        self._swap_delay = swap_delay
        self._limits = limits
        self._faults = faults
        self._on_hello = on_hello
        self._on_change = on_change
        self._replicas: dict[str, Replica] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._server: asyncio.Server | None = None
        self._secret = secrets.token_hex(16)
        self._last_rid = 0

    async def start(self) -> None:
        """Listen for the replicas' connections."""
        self._server = await asyncio.start_server(self._connected, "127.0.0.1", 0)

    async def stop(self) -> None:
        """End every replica."""
        await asyncio.gather(*(self.remove(name, keep_files=True) for name in list(self._replicas)))
        if self._server is not None:
            self._server.close()

    def add(self, name: str, *, zone: str, deployment_id: str, ordinal: int) -> Replica:
        """Start a replica and keep it running; what it has on disk from before is used."""
        directory = self._root / deployment_id / name
        replica = Replica(name=name, zone=zone, deployment_id=deployment_id, ordinal=ordinal, directory=directory)
        self._replicas[name] = replica
        self._tasks[name] = asyncio.create_task(self._keep_running(replica))
        return replica

    async def remove(self, name: str, *, keep_files: bool) -> None:
        """End a replica; unless `keep_files`, what it has on disk goes too."""
        replica = self._replicas.pop(name, None)
        if replica is None:
            return
        replica.stopped.set()
        if replica.process is not None and replica.process.stdin is not None:
            replica.process.stdin.close()
        task = self._tasks.pop(name)
        done, _ = await asyncio.wait([task], timeout=_STOP_SECONDS)
        if not done:
            if replica.process is not None and replica.process.returncode is None:
                replica.process.kill()
            task.cancel()
            await asyncio.wait([task])
        if not keep_files:
            await asyncio.to_thread(_delete, replica.directory)

    def get(self, name: str) -> Replica | None:
        """Return a replica by name, or None."""
        return self._replicas.get(name)

    def of_deployment(self, deployment_id: str) -> list[Replica]:
        """Return a deployment's replicas in order."""
        found = [replica for replica in self._replicas.values() if replica.deployment_id == deployment_id]
        return sorted(found, key=lambda replica: replica.ordinal)

    def names(self) -> list[str]:
        """Return the names of all replicas."""
        return list(self._replicas)

    def load(
        self, replica: Replica, load_id: str, chain: Sequence[ChainEntry], *, hot_load: bool, reset_cache: bool = False
    ) -> None:
        """Tell a connected replica to materialise a chain and to serve it.

        In a hot-load each replica swaps later than its neighbour; else it may copy from those that serve.
        `reset_cache`: what was computed with other weights is forgotten.
        """
        replica.load_id = load_id
        if replica.writer is None:
            return
        others = [other for other in self.of_deployment(replica.deployment_id) if other is not replica]
        order = {
            "op": "load",
            "load_id": load_id,
            "chain": [entry.to_json() for entry in chain],
            "delay": self._swap_delay * replica.ordinal if hot_load else 0.0,
            "peers": [] if hot_load else [str(other.directory) for other in others if other.serving],
            "reset_cache": reset_cache,
            "faults": self._struck(replica, "load", chain[-1].identity),
        }
        write_frame(replica.writer, order)

    def release(self, fault_ids: list[str]) -> None:
        """Have what stands still because of these faults go on."""
        for replica in self._replicas.values():
            if replica.writer is not None and fault_ids:
                write_frame(replica.writer, {"op": "release", "faults": fault_ids})

    def _struck(self, replica: Replica, on: str, identity: str) -> list[dict[str, Any]]:
        struck = self._faults.take("replica", replica=replica.name, identity=identity, on=on)
        return [fault.to_json() for fault in struck]

    async def ask(self, replica: Replica, head: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
        """Send a request and return the answer's head and payload; raise ReplicaError."""
        async with contextlib.aclosing(self.stream(replica, head)) as answers:
            async for answer in answers:
                if answer[0]["op"] == "done":
                    return answer
        raise AssertionError("a stream ends with its last answer or with an error")

    async def stream(
        self, replica: Replica, head: dict[str, Any]
    ) -> AsyncGenerator[tuple[dict[str, Any], bytes], None]:
        """Send a request and yield each answer; the last one has the op ``done``. Raises ReplicaError.

        Leaving the iteration early, also by cancellation, tells the replica to stop.
        """
        if replica.writer is None:
            raise ReplicaError(503, f"replica {replica.name} is not running")
        self._last_rid += 1
        rid = self._last_rid
        answers: asyncio.Queue[tuple[dict[str, Any], bytes]] = asyncio.Queue()
        replica.answers[rid] = answers
        finished = False
        faults = self._struck(replica, "request", replica.identity) if head["op"] == "complete" else []
        try:
            write_frame(replica.writer, {**head, "rid": rid, "faults": faults})
            while not finished:
                answer, payload = await answers.get()
                finished = answer["op"] != "part"
                if answer["op"] == "error":
                    raise ReplicaError(
                        answer["status"],
                        answer["message"],
                        param=answer.get("param"),
                        retry_after=answer.get("retry_after"),
                    )
                yield answer, payload
        finally:
            replica.answers.pop(rid, None)
            if not finished and replica.writer is not None:
                write_frame(replica.writer, {"op": "cancel", "rid": rid})

    # Processes

    async def _keep_running(self, replica: Replica) -> None:
        while replica.wanted:
            try:
                await self._spawn(replica)
            except OSError:
                _log.exception("starting replica %s failed", replica.name)
            if replica.process is not None:
                code = await replica.process.wait()
                replica.process = None
                if replica.wanted:
                    _log.warning("replica %s ended with code %s; it is started again", replica.name, code)
            self._lost(replica)
            if replica.wanted:
                replica.deaths += 1
                pause = min(0.05 * 2 ** min(replica.deaths - 1, 10), _LONGEST_PAUSE)
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(replica.stopped.wait(), pause)

    async def _spawn(self, replica: Replica) -> None:
        assert self._server is not None
        single_thread = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        replica.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "cwtrain_emulator.replica.process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            env={**os.environ, **single_thread},
        )
        settings = {
            "parent": os.getpid(),
            "port": self._server.sockets[0].getsockname()[1],
            "secret": self._secret,
            "name": replica.name,
            "root": str(replica.directory),
            "s3": self._s3,
            "seed": self._seed,
            "engine": self._engine,
            "limits": self._limits,
        }
        assert replica.process.stdin is not None
        with contextlib.suppress(ConnectionError):
            replica.process.stdin.write(json.dumps(settings).encode() + b"\n")
            await replica.process.stdin.drain()
        if not replica.wanted:
            replica.process.stdin.close()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica = None
        try:
            hello, _ = await asyncio.wait_for(read_frame(reader), 10)
            replica = self._replicas.get(str(hello.get("name")))
            known = secrets.compare_digest(str(hello.get("secret")).encode(), self._secret.encode())
            if replica is None or not known or not replica.wanted:
                replica = None
                return
            replica.writer, replica.pid = writer, int(hello["pid"])
            self._on_hello(replica)
            while True:
                frame = await read_frame(reader)
                if replica.writer is not writer:
                    # The process has ended, and this was still on its way: news of the dead.
                    return
                self._received(replica, *frame)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError, ValueError, KeyError):
            return
        finally:
            writer.close()
            if replica is not None and replica.writer is writer and replica.wanted and replica.process is not None:
                # Its connection is gone, so it is of no use even if it still runs. Not by `process.kill`, which would
                # take the exit status of one that has ended away from the loop.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(replica.process.pid, signal.SIGKILL)

    def _received(self, replica: Replica, head: dict[str, Any], payload: bytes) -> None:
        if head["op"] == "state":
            replica.state, replica.identity, replica.error = head["state"], head["identity"], head["error"]
            replica.max_length = head["max_length"]
            if replica.state == "READY":
                replica.deaths = 0
            replica.load_id = head["load_id"]
            self._on_change(replica)
            return
        answers = replica.answers.get(head["rid"])
        if answers is not None:
            answers.put_nowait((head, payload))

    def _lost(self, replica: Replica) -> None:
        """Note that the process is gone, and end what waits for it."""
        replica.writer, replica.pid, replica.identity, replica.restored = None, 0, "", False
        replica.state, replica.error, replica.load_id = "STARTING", "", ""
        gone = {"op": "error", "status": 503, "message": f"replica {replica.name} died", "param": None}
        for answers in replica.answers.values():
            answers.put_nowait((gone, b""))
        if replica.wanted:
            self._on_change(replica)


def _delete(directory: Path) -> None:
    """Delete a replica's directory, and its deployment's when that is empty then."""
    shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        directory.parent.rmdir()
