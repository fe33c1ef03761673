"""SeaweedFS as the emulator's bucket: find the program, choose ports, start it, make the bucket, stop it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import random
import shutil
import socket
import sys
import time
from pathlib import Path
from typing import Any

from cwtrain_emulator import _guard
from cwtrain_emulator.keys import Keys
from cwtrain_emulator.s3.client import S3Client, S3Config, S3Error

__all__ = ["WeedError", "WeedServer", "find_weed"]

_log = logging.getLogger("cwtrain_emulator.weed")

# S3, master, volume, filer, admin; each but S3's also has a gRPC port 10000 above, and S3's too.
_PORTS = 5
# Below the usual range of ephemeral ports (32768 up), gRPC ports included, so that no outgoing connection takes one.
_LOWEST_PORT, _HIGHEST_PORT = 12_000, 22_000
_START_SECONDS = 60.0
_READABLE_SECONDS = 20.0
_RETRY_SECONDS = 1.0
_LAST_LINES = 8


class WeedError(RuntimeError):
    """SeaweedFS is missing or did not start; the message says what to do."""


def find_weed() -> str:
    """Return the path of the `weed` program: beside this Python, else on PATH; raise WeedError when there is none."""
    beside = shutil.which("weed", path=os.path.dirname(sys.executable))
    found = beside or shutil.which("weed")
    if not found:
        raise WeedError(
            "the program `weed` (SeaweedFS) was not found; install it with: pip install 'cwtrain-emulator[s3]', "
            "or give another store with --s3-endpoint"
        )
    return found


class WeedServer:
    """One SeaweedFS process with its data in `directory`, which is ours alone."""

    def __init__(self, directory: Path, *, keys: Keys, bucket: str, region: str, preferred_port: int | None) -> None:
        self._directory = directory
        self._keys = keys
        self._bucket = bucket
        self._region = region
        self._preferred_port = preferred_port
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False
        self.port = 0

    @property
    def endpoint(self) -> str:
        """URL of the S3 port."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Start the store and make the bucket; raise WeedError when it does not answer."""
        self._stopping = False
        program = find_weed()
        for directory in (self._directory / "data", self._directory / "log"):
            directory.mkdir(parents=True, exist_ok=True)
        config = self._write_config()
        deadline = time.monotonic() + _START_SECONDS
        for attempt in range(5):
            self.port = _free_ports(self._preferred_port if attempt == 0 else None)
            self._process = await self._spawn(program, config)
            if await self._answers(deadline):
                self._preferred_port = self.port
                return
            await self._end(grace=0.0)
        log = self._directory / "weed.log"
        with contextlib.suppress(OSError):  # the file may be gone before anyone can look: a temporary directory
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-_LAST_LINES:]
            raise WeedError("\n  ".join([f"SeaweedFS did not start; {log} ends with:", *said]))
        raise WeedError(f"SeaweedFS did not start; its output is in {log}")

    async def keep_running(self) -> None:
        """Start the store again whenever it ends without being asked to; until this is cancelled, or it is stopped."""
        while not self._stopping:
            if self._process is not None:
                code = await self._process.wait()
                if self._stopping:
                    return
                _log.warning("SeaweedFS ended with code %s; it is started again", code)
            try:
                await self.start()
            except WeedError:
                _log.exception("SeaweedFS cannot be started again; trying on")
                await asyncio.sleep(_RETRY_SECONDS)

    async def clear(self) -> int:
        """Delete every object and every unfinished upload of the bucket; return how many objects there were."""
        access, secret = self._keys.s3_admin
        client = S3Client(S3Config(self.endpoint, access, secret, self._region))
        return await asyncio.to_thread(client.clear_bucket, self._bucket)

    async def stop(self, *, grace: float) -> None:
        """Stop the store: ask, and kill it after `grace` seconds."""
        self._stopping = True
        await self._end(grace=grace)

    async def _end(self, *, grace: float) -> None:
        process, self._process = self._process, None
        if process is None or process.returncode is not None:
            return
        if grace > 0:
            process.terminate()
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), grace)
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()

    async def _spawn(self, program: str, config: Path) -> asyncio.subprocess.Process:
        directory, port = self._directory, self.port
        arguments = [
            f"-logdir={directory / 'log'}",
            "mini",
            f"-dir={directory / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            f"-s3.port={port}",
            f"-master.port={port + 1}",
            f"-volume.port={port + 2}",
            f"-filer.port={port + 3}",
            f"-admin.port={port + 4}",
            "-s3.domainName=localhost",
            f"-s3.config={config}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
        ]
        guard = [sys.executable, "-I", "-S", _guard.__file__, str(os.getpid()), program]
        with open(directory / "weed.log", "wb") as log:
            return await asyncio.create_subprocess_exec(
                *guard,
                *arguments,
                stdin=asyncio.subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "GOMEMLIMIT": os.environ.get("GOMEMLIMIT", "400MiB")},
                start_new_session=True,
            )

    async def _answers(self, deadline: float) -> bool:
        """Wait until the bucket exists and is read; False when the process ended or time ran out.

        On a busy machine a store that was killed lists its objects some seconds before it can read them: its volumes
        have not been heard of yet. Should none be readable for long, their data is lost, and waiting brings none back.
        """
        access, secret = self._keys.s3_admin
        client = S3Client(S3Config(self.endpoint, access, secret, self._region), timeout=5.0, attempts=1)
        patience: float | None = None
        while time.monotonic() < deadline and self._process is not None and self._process.returncode is None:
            readable = await asyncio.to_thread(_try_bucket, client, self._bucket)
            if readable:
                return True
            if readable is False:
                patience = patience or time.monotonic() + _READABLE_SECONDS
                if time.monotonic() > patience:
                    _log.warning("SeaweedFS lists objects that it cannot read; their data may be lost")
                    return True
            await asyncio.sleep(0.02)
        return False

    def _write_config(self) -> Path:
        bucket = self._bucket

        def identity(name: str, keys: list[tuple[str, str]], actions: list[str]) -> dict[str, Any]:
            credentials = [{"accessKey": access, "secretKey": secret} for access, secret in keys]
            return {"name": name, "credentials": credentials, "actions": actions}

        reader = [f"Read:{bucket}", f"List:{bucket}"]
        identities = [
            identity("admin", [self._keys.s3_admin], ["Admin", "Read", "Write", "List", "Tagging"]),
            identity("service", [self._keys.s3_service], reader),
            identity(
                "trainer",
                [self._keys.s3_trainer, *self._keys.s3_spares],
                [*reader, f"Write:{bucket}", f"Tagging:{bucket}"],
            ),
        ]
        path = self._directory / "s3.json"
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump({"identities": identities}, file)
        return path


def _try_bucket(client: S3Client, bucket: str) -> bool | None:
    """Make the bucket; return True when its objects can be read, False when only listed, None when neither."""
    try:
        client.create_bucket(bucket)
        return client.can_read(bucket)
    except S3Error:
        return None
    finally:
        client.close()


def _free_ports(preferred: int | None) -> int:
    """Return a port P such that P to P+4 and the ports 10000 above them are free now."""
    candidates = [preferred] if preferred else []
    candidates += [random.randrange(_LOWEST_PORT, _HIGHEST_PORT, _PORTS) for _ in range(200)]  # noqa: S311
    for base in candidates:
        if all(_is_free(port) for port in (*range(base, base + _PORTS), *range(base + 10_000, base + 10_000 + _PORTS))):
            return base
    raise WeedError("no ten free ports for SeaweedFS between 12000 and 32000")


def _is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As servers bind: a port in TIME_WAIT is free, one that is listened on is not.
        if os.name == "posix":
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
