"""`Emulator`: the whole service as child processes of this one, for tests and for the demo."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, NoReturn, SupportsIndex

if TYPE_CHECKING:
    from cwtrain_emulator.control_client import Control

__all__ = ["Emulator", "EmulatorError"]

_STOP_SECONDS = 15.0
_HERE: weakref.WeakSet[Emulator] = weakref.WeakSet()


def _after_fork() -> None:
    for emulator in list(_HERE):
        emulator._leave()


if hasattr(os, "register_at_fork"):  # not where nothing forks
    os.register_at_fork(after_in_child=_after_fork)


class EmulatorError(RuntimeError):
    """The emulator did not start; the message has the end of its log."""


class Emulator:
    """A running emulator, as ``python -m cwtrain_emulator serve`` starts it.

    Without `state_dir` everything is temporary and gone after `stop`; with one, `start` goes on where the last run
    stopped. `slots`, `queue`, `tokens_per_second` and `retry_after` are each replica's capacity. `port` 0 takes a free
    port. `extra_args` go to the command as they are. The processes end with this one, however it ends, unless it is
    `detached` and was left (`leave`). Not to be started twice at once; after `stop` it can be started again.

    In a forked process it says where it is and lets itself be controlled, but starts and ends nothing. It does not
    pickle: give another process `env`.
    """

    def __init__(
        self,
        state_dir: str | os.PathLike[str] | None = None,
        *,
        replicas: int = 2,
        port: int = 0,
        seed: int = 0,
        report_identity: bool = False,
        engine: str = "numpy",
        slots: int | None = None,
        queue: int | None = None,
        tokens_per_second: float | None = None,
        retry_after: str | None = None,
        bucket: str = "cwtrain-weights",
        s3_endpoint: str | None = None,
        start_timeout: float = 90.0,
        extra_args: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
        detached: bool = False,
    ) -> None:
        self._state_dir = None if state_dir is None else Path(state_dir).absolute()
        self._options = [f"--replicas={replicas}", f"--port={port}", f"--seed={seed}", f"--bucket={bucket}"]
        self._options.append(f"--engine={engine}")
        limits = {"slots": slots, "queue": queue, "tokens-per-second": tokens_per_second, "retry-after": retry_after}
        self._options += [f"--{name}={value}" for name, value in limits.items() if value is not None]
        if report_identity:
            self._options.append("--report-identity")
        if s3_endpoint is not None:
            self._options.append(f"--s3-endpoint={s3_endpoint}")
        self._options += [extra_args] if isinstance(extra_args, str) else extra_args
        self._start_timeout = start_timeout
        self._environ = environ
        self._detached = detached
        self._process: subprocess.Popen[bytes] | None = None
        self._temporary: Path | None = None
        self._log: IO[bytes] | None = None
        self._values: dict[str, Any] = {}
        self._owner = os.getpid()
        _HERE.add(self)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            "an Emulator stays in the process that started it and cannot be pickled: give the other process "
            "emulator.env (a dict of variables), or emulator.control"
        )

    def start(self) -> Emulator:
        """Start it and return when everything answers. Raises EmulatorError."""
        self._check_process()
        if self._process is not None:
            raise EmulatorError("the emulator is running already")
        if self._state_dir is None and self._temporary is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="cwtrain-emulator-"))
        state_dir = self._state_dir or self._temporary
        assert state_dir is not None
        state_dir.mkdir(parents=True, exist_ok=True)
        options = [*self._options, *(["--discard-state"] if self._temporary else [])]
        self._log = open(state_dir / "serve.log", "a+b")  # noqa: SIM115
        if not self._detached:
            options.append("--watch-stdin")
        command = [sys.executable, "-m", "cwtrain_emulator", "serve", f"--state-dir={state_dir}"]
        self._process = subprocess.Popen(
            [*command, *options],
            stdin=subprocess.DEVNULL if self._detached else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=None if self._environ is None else dict(self._environ),
            # A Ctrl-C on the terminal is this process's business; it stops the emulator when it is done.
            start_new_session=True,
        )
        try:
            self._values = json.loads(self._first_line())
        except BaseException:
            self.stop()
            raise
        return self

    def leave(self) -> dict[str, Any]:
        """Let a detached one run on by itself and return what it says of itself; `Control.stop` ends it then."""
        self._check_process()
        process, self._process, self._temporary = self._process, None, None
        assert process is not None
        assert process.stdout is not None
        assert self._log is not None
        process.stdout.close()
        self._log.close()
        self._log = None
        process.returncode = 0  # nobody here waits for it
        return self._values

    def stop(self) -> None:
        """End all its processes, and delete what was temporary.

        Does nothing when it is not running, and in a forked process.
        """
        if self._owner != os.getpid():
            return
        process, self._process = self._process, None
        if process is not None:
            assert process.stdout is not None
            if process.stdin is None:
                process.terminate()
            else:
                with contextlib.suppress(OSError):
                    process.stdin.close()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
        if self._log is not None:
            self._log.close()
            self._log = None
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = None

    def kill(self) -> None:
        """Kill the service, as a crash would; its children end with it. `start` then goes on with the same state."""
        self._check_process()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            kept, self._temporary = self._temporary, None
            self.stop()
            self._temporary = kept

    def __enter__(self) -> Emulator:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """Process id of the service."""
        return int(self._value("pid"))

    @property
    def base_url(self) -> str:
        """Origin of the API."""
        return str(self._value("base_url"))

    @property
    def gateway_url(self) -> str:
        """Origin that serves every deployment's model under ``/v1``; each gateway also has its own endpoint."""
        return str(self._value("gateway_url"))

    @property
    def page_url(self) -> str:
        """Where a browser shows what runs here."""
        return str(self._value("page_url"))

    @property
    def admin_token(self) -> str:
        """Token with the role Inference Admin."""
        return str(self._value("admin_token"))

    @property
    def viewer_token(self) -> str:
        """Token with the role Inference Viewer."""
        return str(self._value("viewer_token"))

    @property
    def s3_endpoint(self) -> str:
        """URL of the object store."""
        return str(self._value("s3_endpoint"))

    @property
    def bucket(self) -> str:
        """The bucket that is there."""
        return str(self._value("bucket"))

    @property
    def region(self) -> str:
        """The object store's region."""
        return str(self._value("region"))

    @property
    def access_key_id(self) -> str:
        """The trainer's key for the bucket."""
        return str(self._value("access_key_id"))

    @property
    def secret_access_key(self) -> str:
        """The trainer's secret for the bucket."""
        return str(self._value("secret_access_key"))

    @property
    def state_dir(self) -> Path:
        """Where its state is."""
        return Path(self._value("state_dir"))

    @property
    def control(self) -> Control:
        """Its own routes: status, reset, replicas, faults."""
        from cwtrain_emulator.control_client import Control

        return Control(self.base_url, self.admin_token)

    @property
    def env(self) -> dict[str, str]:
        """Every variable that a client of this emulator exports: API, token, store, keys, region."""
        return dict(self._value("env"))

    def _check_process(self) -> None:
        if self._owner != os.getpid():
            raise EmulatorError(
                f"this emulator belongs to process {self._owner}, and this is process {os.getpid()}, forked from it: "
                "start and end it there, or make another Emulator here"
            )

    def _leave(self) -> None:
        """Let go of a forked process's copy of the pipe by whose end the service knows that its owner has ended."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nothing:
                os.dup2(nothing.fileno(), self._process.stdin.fileno(), inheritable=False)

    def _value(self, name: str) -> Any:
        if self._process is None:
            raise EmulatorError("the emulator is not running")
        return self._values[name]

    def _first_line(self) -> bytes:
        """Return the line that `serve` prints when it is ready."""
        assert self._process is not None
        stdout = self._process.stdout
        assert stdout is not None
        lines: queue.Queue[bytes] = queue.Queue()
        threading.Thread(target=lambda: lines.put(stdout.readline()), daemon=True).start()
        try:
            line = lines.get(timeout=self._start_timeout)
        except queue.Empty:
            raise EmulatorError(
                f"the emulator did not start within {self._start_timeout:g} s{self._log_end()}"
            ) from None
        if not line.endswith(b"\n"):
            raise EmulatorError(f"the emulator did not start{self._log_end()}")
        return line

    def _log_end(self) -> str:
        assert self._log is not None
        # Through the open file: a start that fails with temporary state has deleted its directory already.
        text = (
            os.pread(self._log.fileno(), 1 << 20, max(0, os.fstat(self._log.fileno()).st_size - (1 << 20)))
            .decode(errors="replace")
            .strip()
        )
        return f"; the end of its log:\n{text[-2000:]}" if text else ""
