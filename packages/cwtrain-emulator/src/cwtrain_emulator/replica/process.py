"""The process of one replica: ``python -m cwtrain_emulator.replica.process``, its settings as one JSON line on stdin.

It connects to the service, loads what it is told to load, and answers requests. It ends when the connection or its
standard input ends, so that it never outlives the service.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cwtrain_emulator import _guard
from cwtrain_emulator.channel import read_frame, write_frame
from cwtrain_emulator.engine.prefix_cache import DEFAULT_CACHE_BYTES, PrefixCache
from cwtrain_emulator.replica.capacity import Capacity, Full, Limits
from cwtrain_emulator.replica.generate import Completion, Context, RequestError, complete
from cwtrain_emulator.replica.materialise import NoWeightsError, Sabotage, SnapshotError, Workshop, hash_tensors
from cwtrain_emulator.replica.misfortunes import Misfortunes
from cwtrain_emulator.replica.serving import Served, activate, load
from cwtrain_emulator.s3.client import S3Client, S3Config
from cwtrain_emulator.snapshots import ChainEntry

_log = logging.getLogger("cwtrain_emulator.replica")


class Replica:
    """State and behaviour of this process; everything but loading happens on the event loop."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._served: Served | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="load")
        self._workshop: Workshop | None = None
        self._loads: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._requests: dict[int, asyncio.Task[None]] = {}
        limits = settings.get("limits", {})
        self._retry_after: str | None = limits.get("retry_after")
        self._capacity = Capacity(Limits(limits.get("slots"), limits.get("queue"), limits.get("tokens_per_second")))
        self._misfortunes = Misfortunes()
        self._context = Context(
            self._now,
            seed=settings["seed"],
            cache=PrefixCache(settings.get("prefix_cache_bytes", DEFAULT_CACHE_BYTES)),
            compute=ThreadPoolExecutor(1, thread_name_prefix="compute"),
        )

    async def run(self) -> None:
        """Serve until the connection ends."""
        settings = self._settings
        reader, self._writer = await asyncio.open_connection("127.0.0.1", settings["port"])
        self._send({"op": "hello", "name": settings["name"], "secret": settings["secret"], "pid": os.getpid()})
        if settings.get("engine") == "transformers":
            # Takes seconds: begun before the first weights come, in the thread that will load them (an import by two
            # threads at once can leave one of them with a package that is not whole).
            asyncio.get_running_loop().run_in_executor(self._loader, _import_transformers)
        loading = asyncio.create_task(self._load_in_turn())
        try:
            while True:
                head, _ = await read_frame(reader)
                await self._handle(head)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        finally:
            loading.cancel()
            for task in self._requests.values():
                task.cancel()

    async def _handle(self, head: dict[str, Any]) -> None:
        operation = head["op"]
        if operation == "load":
            self._loads.put_nowait(head)
        elif operation == "cancel":
            task = self._requests.get(head["rid"])
            if task is not None:
                task.cancel()
        elif operation == "release":
            await self._misfortunes.release(head["faults"])
        elif operation == "complete":
            self._start(head["rid"], self._complete(head))
        elif operation == "hashes":
            self._start(head["rid"], self._hashes(head["rid"]))

    def _start(self, rid: int, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._requests[rid] = task
        task.add_done_callback(lambda _: self._requests.pop(rid, None))

    # Weights

    async def _load_in_turn(self) -> None:
        while True:
            order = await self._loads.get()
            try:
                await self._load(order)
            except Exception as exc:  # noqa: BLE001 - becomes the errorReason
                _log.exception("loading failed")
                self._send_state(order, "ERROR", error=f"internal error: {type(exc).__name__}: {exc}")

    async def _load(self, order: dict[str, Any]) -> None:
        self._send_state(order, "UPDATING")
        chain = [ChainEntry.from_json(entry) for entry in order["chain"]]
        loop = asyncio.get_running_loop()
        await self._misfortunes.before(order["faults"])
        sabotage = self._misfortunes.sabotage(order["faults"])
        peers = [Path(peer) for peer in order["peers"]]
        try:
            served = await loop.run_in_executor(self._loader, self._prepare, chain, peers, sabotage)
        except NoWeightsError:
            self._send_state(order, "READY")
            return
        except SnapshotError as exc:
            self._send_state(order, "ERROR", error=str(exc))
            return
        # Replicas swap at different moments, as they do in a fleet.
        await asyncio.sleep(order["delay"])
        await self._swap(served, reset_cache=order.get("reset_cache", False))
        self._send_state(order, "READY")
        if self._workshop is not None:
            await loop.run_in_executor(self._loader, self._workshop.prune, served.generation)

    async def _swap(self, served: Served, *, reset_cache: bool) -> None:
        """Serve other weights from the next token on; requests in flight go on with what they remember."""
        async with self._context.gate:
            if served is not self._served:
                await asyncio.get_running_loop().run_in_executor(self._context.compute, activate, served)
            self._served = served
            if reset_cache and self._context.cache is not None:
                self._context.cache.clear()

    def _prepare(self, chain: list[ChainEntry], peers: list[Path], sabotage: Sabotage) -> Served:
        """Materialise a chain and load it; in the loader's thread."""
        if self._workshop is None:
            client = S3Client(S3Config(**self._settings["s3"]))
            self._workshop = Workshop(Path(self._settings["root"]), client)
        generation = self._workshop.materialise(chain, peers=peers, sabotage=sabotage)
        if self._served is not None and self._served.generation == generation:
            return self._served
        return load(generation, engine=self._settings.get("engine", "numpy"), previous=self._served)

    def _send_state(self, order: dict[str, Any], state: str, *, error: str = "") -> None:
        identity = self._served.identity if self._served is not None else ""
        engine = self._served.engine if self._served is not None else None
        self._send(
            {
                "op": "state",
                "load_id": order["load_id"],
                "state": state,
                "identity": identity,
                "error": error,
                "max_length": engine.max_length if engine is not None else None,
            }
        )

    # Requests

    def _now(self) -> Served:
        if self._served is None:
            raise RequestError(503, "no weights yet: the first hot-load has not been completed")
        return self._served

    async def _complete(self, head: dict[str, Any]) -> None:
        rid = head["rid"]
        emit = None
        if head["request"]["stream"]:

            def emit(fragments: list[dict[str, Any]]) -> None:
                # One choice per event, as vLLM sends them.
                for fragment in fragments:
                    self._send({"op": "part", "rid": rid}, _dump([fragment]))

        request, faults = head["request"], head["faults"]

        async def interruption(tokens: int) -> None:
            self._misfortunes.after_tokens(faults, tokens)

        try:
            sequences = request["n"] * len(request["prompts"])
            async with self._capacity.admit(sequences, interruption if faults else None) as turn:
                await self._misfortunes.before(faults)
                done = await complete(request, self._context, mode=head["mode"], emit=emit, faults=faults)
                await turn.step()
                self._misfortunes.after_tokens(faults, turn.steps, over=True)
                timing = turn.timing()
        except Full as exc:
            refusal = {"status": 429, "message": f"the replica is at capacity: {exc}", "retry_after": self._retry_after}
            self._send({"op": "error", "rid": rid, "param": None, **refusal})
        except RequestError as exc:
            self._send({"op": "error", "rid": rid, "status": exc.status, "message": str(exc), "param": exc.param})
        except Exception:  # noqa: BLE001 - logged, and answered as an error
            _log.exception("a request failed")
            self._send({"op": "error", "rid": rid, "status": 500, "message": "internal error", "param": None})
        else:
            self._send({**_done(rid, done), "timing": timing}, _dump(done.choices))

    async def _hashes(self, rid: int) -> None:
        served = self._served
        if served is None:
            self._send({"op": "done", "rid": rid, "identity": "", "tensors": {}})
            return
        try:
            found = await asyncio.get_running_loop().run_in_executor(None, hash_tensors, served.generation.checkpoint)
        except Exception as exc:  # noqa: BLE001 - becomes the answer
            self._send({"op": "error", "rid": rid, "status": 500, "message": str(exc), "param": None})
        else:
            self._send({"op": "done", "rid": rid, "identity": served.identity, "tensors": found})

    def _send(self, head: dict[str, Any], payload: bytes = b"") -> None:
        if self._writer is not None and not self._writer.is_closing():
            write_frame(self._writer, head, payload)


def _import_transformers() -> None:
    from cwtrain_emulator.engine.transformers_engine import prepare

    prepare()


def _done(rid: int, done: Completion) -> dict[str, Any]:
    usage = {
        "prompt_tokens": done.prompt_tokens,
        "completion_tokens": done.completion_tokens,
        "total_tokens": done.prompt_tokens + done.completion_tokens,
    }
    head = {"op": "done", "rid": rid, "usage": usage, "record": done.record, "tokens": done.tokens}
    return head if done.prompt_token_ids is None else {**head, "prompt_token_ids": done.prompt_token_ids}


def _dump(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()


def _end_with_stdin() -> None:
    """End this process when the service's end of the pipe closes."""
    while os.read(0, 4096):
        pass
    os._exit(0)


def main() -> None:
    """Read the settings and serve."""
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    # A Ctrl-C on the terminal goes to the whole group; the service decides when its replicas end.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    line = b""
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            return
        line += chunk
    settings = json.loads(line)
    _guard.die_with_parent(settings["parent"])
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    asyncio.run(Replica(settings).run())


if __name__ == "__main__":
    main()
