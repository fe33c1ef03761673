"""The service process: puts the parts together, says where they are, and takes them down again."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import logging
import os
import shlex
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from cwtrain_emulator.admin import admin_routes
from cwtrain_emulator.api.app import make_app
from cwtrain_emulator.api.controller import Controller, replica_names
from cwtrain_emulator.api.service import Service, gateway_zones
from cwtrain_emulator.control import RUNNING_FILE, control_routes
from cwtrain_emulator.faults import FaultBook
from cwtrain_emulator.gateway.app import Gateway, gateway_routes
from cwtrain_emulator.gateway.routing import Router
from cwtrain_emulator.keys import Keys, write_private
from cwtrain_emulator.late_files import LateFiles
from cwtrain_emulator.listeners import PortListeners, bind
from cwtrain_emulator.page.activity import Activity, LogProblems
from cwtrain_emulator.page.routes import page_routes, page_url
from cwtrain_emulator.replica.pool import Pool
from cwtrain_emulator.s3.client import S3Client, S3Config, S3Error, credentials_from_env
from cwtrain_emulator.s3.proxy import StoreProxy
from cwtrain_emulator.s3.weed import WeedServer
from cwtrain_emulator.settings import Settings
from cwtrain_emulator.store import Store

__all__ = ["ServeError", "description", "exports", "lock_state_dir", "serve"]

_log = logging.getLogger("cwtrain_emulator.serve")

_GRACE_SECONDS = 1.0
_RESTORE_SECONDS = 30.0
_PARENT_SECONDS = 1.0
_ANSWER_SECONDS = 0.2


class ServeError(RuntimeError):
    """The emulator cannot start; the message says why."""


def lock_state_dir(state_dir: Path) -> IO[str] | None:
    """Return a file that holds the state directory's lock until it is closed; raise ServeError when another has it.

    None where the platform has no such locks. The kernel frees the lock when the process ends, however it ends.
    """
    try:
        import fcntl
    except ImportError:
        return None
    file = open(state_dir / "lock", "w")  # noqa: SIM115
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ServeError(
            f"another emulator runs on the state directory {state_dir}; look at it with: "
            f"cwtrain emulator status --state-dir {state_dir}"
        ) from None
    return file


class _Emulator:
    """All parts of one running service."""

    def __init__(self, settings: Settings, listening: socket.socket, end: Callable[[], None]) -> None:
        self._settings = settings
        self._end = end
        self._listening = listening
        self.keys = Keys.load_or_create(settings.state_dir)
        self.store = Store(settings.state_dir / "state.sqlite3")
        self._weed: WeedServer | None = None
        self._activity = Activity(clock=time.time)
        self._log_problems = LogProblems(self._activity)
        self._faults = FaultBook()
        self._late_files = LateFiles()
        self._proxy: StoreProxy | None = None
        self._weed_task: asyncio.Task[None] | None = None
        self._listeners = PortListeners(settings.host, self._activity, self._faults)
        self._loop_task: asyncio.Task[None] | None = None
        self._pool: Pool | None = None
        self.service: Service

    async def start(self) -> None:
        """Start the store, then everything that needs it."""
        settings, keys = self._settings, self.keys
        logging.getLogger("cwtrain_emulator").addHandler(self._log_problems)
        s3_endpoint, service_key, session_token = await self._start_store()
        s3 = S3Config(s3_endpoint, *service_key, region=settings.region, session_token=session_token)
        controller = Controller(
            self.store,
            replicas=settings.replicas,
            zones_of=lambda deployment: gateway_zones(self.store, deployment),
            clock=time.time,
            root=settings.state_dir / "replicas",
        )
        pool = self._pool = Pool(
            settings.state_dir / "replicas",
            s3={
                "endpoint": s3.endpoint,
                "access_key": s3.access_key,
                "secret_key": s3.secret_key,
                "region": s3.region,
                "session_token": s3.session_token,
            },
            seed=settings.seed,
            swap_delay=settings.swap_delay_seconds,
            engine=settings.engine,
            limits={
                "slots": settings.slots,
                "queue": settings.queue,
                "tokens_per_second": settings.tokens_per_second,
                "retry_after": settings.retry_after,
            },
            faults=self._faults,
            on_hello=controller.restore,
            on_change=controller.replica_changed,
        )
        await pool.start()
        host, port = self._listening.getsockname()[:2]
        self.service = Service(
            settings=settings,
            keys=keys,
            store=self.store,
            controller=controller,
            pool=pool,
            bucket_reader=S3Client(s3),
            clock=time.time,
            host=f"[{host}]" if ":" in host else host,
            base_url=f"http://{f'[{host}]' if ':' in host else host}:{port}",
            s3_endpoint=s3_endpoint,
            faults=self._faults,
            clear_bucket=None if self._weed is None else self._weed.clear,
            spare_keys=[] if self._weed is None else keys.s3_spares,
        )
        self._faults.on_added = self._late_files.added
        self._faults.on_cleared = self._faults_cleared
        gateway = Gateway(self.service, Router(self.store, pool))
        self._listeners.attach(gateway)
        routes = [
            *gateway_routes(gateway, None),
            *admin_routes(self.service, gateway.log),
            *control_routes(self.service, gateway, self._end),
            *page_routes(self.service, self._activity),
        ]
        controller.start(pool, self._listeners)
        self._listeners.listen("", make_app(self.service, routes), self._listening)
        self._loop_task = asyncio.create_task(controller.run())
        self.store.set_meta("port", str(port))
        await self._replicas_are_back(pool)

    async def _replicas_are_back(self, pool: Pool) -> None:
        """Wait, within reason, until the replicas of the last run serve what they served."""
        deadline = time.monotonic() + _RESTORE_SECONDS
        names = [
            name for row in self.store.resources("deployment") for name in replica_names(row, self._settings.replicas)
        ]
        while time.monotonic() < deadline:
            replicas = [pool.get(name) for name in names]
            if all(replica is None or replica.restored for replica in replicas):
                return
            await asyncio.sleep(0.01)

    def _faults_cleared(self, ids: list[str]) -> None:
        assert self._pool is not None
        self._pool.release(ids)
        self._late_files.cleared(ids)

    async def stop(self) -> None:
        """Take everything down."""
        self._late_files.stop()
        logging.getLogger("cwtrain_emulator").removeHandler(self._log_problems)
        if self._loop_task is not None:
            self._loop_task.cancel()
        # Replicas before listeners: what waits for a replica gets its answer, and the server can end.
        if self._pool is not None:
            await self._pool.stop()
        await self._listeners.stop()
        if self._proxy is not None:
            await self._proxy.stop()
        if self._weed_task is not None:
            self._weed_task.cancel()
            await asyncio.gather(self._weed_task, return_exceptions=True)
        if self._weed is not None:
            await self._weed.stop(grace=_GRACE_SECONDS if self._settings.keep_state else 0.0)
        self.store.close()

    async def _start_store(self) -> tuple[str, tuple[str, str], str]:
        """Return the store's endpoint, and the service's key and session token for it."""
        settings = self._settings
        if settings.s3_endpoint is not None:
            access, secret, token = credentials_from_env(settings.environ)
            endpoint = settings.s3_endpoint.rstrip("/")
            await _check_bucket(S3Config(endpoint, access, secret, settings.region, token), settings.bucket)
            self._faults.targets = tuple(target for target in self._faults.targets if target != "store")
            return endpoint, (access, secret), token
        preferred = self.store.get_meta("s3_port")
        weed = self._weed = WeedServer(
            settings.state_dir / "s3",
            keys=self.keys,
            bucket=settings.bucket,
            region=settings.region,
            preferred_port=int(preferred) if preferred else None,
        )
        await weed.start()
        self._weed_task = asyncio.create_task(weed.keep_running())
        self.store.set_meta("s3_port", str(weed.port))
        callers = {access: "trainer" for access, _ in (self.keys.s3_trainer, *self.keys.s3_spares)}
        callers[self.keys.s3_service[0]] = "service"
        proxy = self._proxy = StoreProxy(self._faults, callers=callers, store_port=lambda: weed.port)
        preferred = self.store.get_meta("s3_proxy_port")
        await proxy.start(int(preferred) if preferred else None)
        self.store.set_meta("s3_proxy_port", str(proxy.port))
        return proxy.endpoint, self.keys.s3_service, ""


async def _check_bucket(config: S3Config, bucket: str) -> None:
    """Raise ServeError unless a given store has the bucket and lets us list it."""
    try:
        await asyncio.to_thread(S3Client(config, timeout=10.0).list_objects, bucket, f"{uuid.uuid4()}/")
    except S3Error as exc:
        raise ServeError(f"the bucket {bucket} at {config.endpoint} cannot be listed: {exc}") from exc


def description(service: Service) -> dict[str, Any]:
    """Return what `serve` prints: every URL, token and key, and the variables to export."""
    settings, keys = service.settings, service.keys
    if settings.s3_endpoint is None:
        access, secret, token = *keys.s3_trainer, ""
    else:
        access, secret, token = credentials_from_env(settings.environ)
    env = {
        "COREWEAVE_API_URL": service.base_url,
        "COREWEAVE_API_TOKEN": keys.admin_token,
        "CW_S3_ENDPOINT": service.s3_endpoint,
        "AWS_ACCESS_KEY_ID": access,
        "AWS_SECRET_ACCESS_KEY": secret,
        **({"AWS_SESSION_TOKEN": token} if token else {}),
        "AWS_REGION": settings.region,
    }
    return {
        "base_url": service.base_url,
        "gateway_url": service.base_url,
        "page_url": page_url(service),
        "admin_token": keys.admin_token,
        "viewer_token": keys.viewer_token,
        "s3_endpoint": service.s3_endpoint,
        "bucket": settings.bucket,
        "region": settings.region,
        "access_key_id": access,
        "secret_access_key": secret,
        "organization_id": keys.organization_id,
        "state_dir": str(settings.state_dir),
        "replicas": settings.replicas,
        "pid": os.getpid(),
        "env": env,
    }


def check_engine(engine: str) -> None:
    """Raise ServeError when the engine's packages are not installed; imports none of them."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if engine == "transformers" and missing:
        raise ServeError(
            f"the engine transformers needs {' and '.join(missing)}: pip install 'cwtrain-emulator[transformers]' "
            "(a CPU build of torch is enough)"
        )


def serve(
    settings: Settings,
    *,
    as_shell: bool,
    watch_stdin: bool,
    write: Callable[[dict[str, Any]], None] | None = None,
) -> None:
    """Run the emulator until SIGINT, SIGTERM or, with `watch_stdin`, the end of standard input.

    Prints one JSON line (`as_shell`: export lines; `write`: what that makes of it) when everything answers. Raises
    ServeError or WeedError when it cannot start.
    """
    check_engine(settings.engine)
    settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    lock = lock_state_dir(settings.state_dir)
    try:
        asyncio.run(_serve(settings, as_shell=as_shell, watch_stdin=watch_stdin, write=write))
    finally:
        if lock is not None:
            lock.close()


async def _serve(
    settings: Settings, *, as_shell: bool, watch_stdin: bool, write: Callable[[dict[str, Any]], None] | None
) -> None:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    if watch_stdin:
        _stop_at_end_of_stdin(stop)
    try:
        listening = _listening_socket(settings)
    except OSError as exc:
        raise ServeError(str(exc)) from exc
    loop = asyncio.get_running_loop()

    def end() -> None:
        loop.call_later(_ANSWER_SECONDS, stop.set)  # not at once: who asked for it gets an answer first

    emulator = _Emulator(settings, listening, end)
    starting = asyncio.create_task(emulator.start())
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            values = description(emulator.service)
            write_private(settings.state_dir / RUNNING_FILE, json.dumps(values))
            _announce(values, as_shell=as_shell, write=write)
            await stopping
        else:
            starting.cancel()
            await asyncio.wait([starting])
    finally:
        stopping.cancel()
        await emulator.stop()
        (settings.state_dir / RUNNING_FILE).unlink(missing_ok=True)


def _listening_socket(settings: Settings) -> socket.socket:
    """Return the API's socket: the port asked for, else the one of the last time, else any."""
    if settings.port:
        sock = bind(settings.host, settings.port)
        if sock.getsockname()[1] != settings.port:
            sock.close()
            raise ServeError(f"port {settings.port} on {settings.host} is taken; give another, or 0 for any")
        return sock
    preferred = None
    if (settings.state_dir / "state.sqlite3").exists():
        store = Store(settings.state_dir / "state.sqlite3")
        preferred = store.get_meta("port")
        store.close()
    return bind(settings.host, int(preferred) if preferred else None)


def exports(values: dict[str, Any]) -> str:
    """Return what a shell sources to reach the emulator that `values` describe."""
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in values["env"].items())


def _announce(values: dict[str, Any], *, as_shell: bool, write: Callable[[dict[str, Any]], None] | None) -> None:
    if write is not None:
        write(values)
    elif sys.stdout is None:
        raise ServeError("standard output is closed, and so nobody learns where the emulator is")
    else:
        sys.stdout.write(exports(values) if as_shell else json.dumps(values) + "\n")
    sys.stdout.flush()
    said = f"cwtrain emulator at {values['base_url']}, bucket {values['bucket']}; watch it at {values['base_url']}/"
    with contextlib.suppress(OSError, ValueError, AttributeError):  # full, closed, none: it runs all the same
        sys.stderr.write(f"{said}\n")
        sys.stderr.flush()


def _stop_on_signals(stop: asyncio.Event) -> None:
    """A first SIGINT or SIGTERM asks to stop; a second one ends the process, and its children with it."""
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if stop.is_set():
            os._exit(130)
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        try:
            loop.add_signal_handler(number, asked)
        except NotImplementedError:
            signal.signal(number, lambda *_: loop.call_soon_threadsafe(asked))


def _stop_at_end_of_stdin(stop: asyncio.Event) -> None:
    """Stop when standard input ends, which the parent holds open, or when the parent is another one than now.

    The second is for a parent with forked children, which hold the pipe open after its death.
    """
    loop = asyncio.get_running_loop()
    parent = os.getppid()

    def watch() -> None:
        while os.read(0, 4096):
            pass
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(stop.set)

    def look() -> None:
        if os.getppid() != parent:
            stop.set()
        else:
            loop.call_later(_PARENT_SECONDS, look)

    look()
    threading.Thread(target=watch, daemon=True).start()
