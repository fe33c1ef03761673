"""A small client of the emulator's own routes, on the standard library: for the command line, fixtures and tests."""

from __future__ import annotations

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["Control", "ControlError", "WhichError", "running"]

_RUNNING_FILE = "running.json"


class ControlError(RuntimeError):
    """The emulator refused, or is not there; the message says what to do."""


class WhichError(ControlError):
    """It was not said which emulator, or with which token."""


class Control:
    """The own routes of one running emulator, as the admin."""

    def __init__(self, base_url: str, token: str, *, timeout: float = 60.0) -> None:
        self._base_url = base_url.rstrip("/")
        self._token = token
        self._timeout = timeout

    @classmethod
    def find(
        cls, *, url: str | None = None, state_dir: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> Control:
        """Return the client of a running emulator: by its state directory, else by URL and COREWEAVE_API_TOKEN."""
        values = os.environ if environ is None else environ
        if state_dir is not None:
            found = running(state_dir)
            return cls(url or found["base_url"], found["admin_token"])
        address = url or values.get("COREWEAVE_API_URL", "")
        token = values.get("COREWEAVE_API_TOKEN", "").strip()
        if not address:
            raise WhichError("which emulator? give --state-dir or --url, or export what `emulator env` prints")
        if not re.match(r"https?://[^/\s]", address):
            raise WhichError(f"{address!r} is no http or https URL: correct --url, or COREWEAVE_API_URL")
        if not token:
            raise WhichError("COREWEAVE_API_TOKEN is not set: export what `emulator env` prints, or give --state-dir")
        return cls(address, token)

    def status(self) -> dict[str, Any]:
        """Return what runs: gateways, deployments with their replicas, the last hot-loads, faults."""
        return {**self.call("GET", "/state"), "faults": self.faults()}

    def reset(self) -> dict[str, Any]:
        """Forget all resources, hot-loads, objects and faults; return how many there were."""
        return self.call("POST", "/reset")

    def stop(self, *, patience: float = 30.0) -> dict[str, Any]:
        """End the emulator, its processes too, and return its pid and state directory when it has ended.

        Raises ControlError when it has not after `patience` seconds.
        """
        found = self.call("POST", "/stop")
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            if not (self._answers() or _held(Path(found["state_dir"]) / "lock")):
                return found
            time.sleep(0.05)
        raise ControlError(f"the emulator (pid {found['pid']}) was asked to stop, and has not after {patience:g} s")

    def _answers(self) -> bool:
        try:
            self.call("GET", "/health")
        except ControlError:
            return False
        return True

    def scale(self, deployment_id: str, count: int) -> list[str]:
        """Give a deployment another number of replicas and return their names."""
        names: list[str] = self.call("POST", f"/deployments/{deployment_id}/replicas", {"count": count})["replicas"]
        return names

    def credentials(self) -> dict[str, str]:
        """Return another key of the trainer, good for the same bucket."""
        return self.call("POST", "/credentials")

    def add_fault(self, target: str, kind: str, **values: Any) -> dict[str, Any]:
        """Add a fault and return it, with its id; ``docs/reference/faults.md`` says what `values` there are."""
        fault: dict[str, Any] = self.call("POST", "/faults", {"target": target, "kind": kind, **values})["fault"]
        return fault

    def faults(self) -> list[dict[str, Any]]:
        """Return all faults with their counts: `seen` requests matched, `struck` were struck."""
        found: list[dict[str, Any]] = self.call("GET", "/faults")["faults"]
        return found

    def clear_faults(self, fault_id: str | None = None) -> None:
        """Remove one fault, or all of them; what stands still because of it goes on."""
        self.call("DELETE", "/faults" if fault_id is None else f"/faults/{fault_id}")

    def call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Call one of the own routes; `path` begins after ``/emulator/v1``. Raises ControlError."""
        if not all("!" <= char <= "~" for char in self._token):
            raise ControlError("the token (COREWEAVE_API_TOKEN) holds a line end, a blank or the like")
        request = urllib.request.Request(  # noqa: S310
            f"{self._base_url}/emulator/v1{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self._token}", "Content-Type": "application/json"},
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=self._timeout) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except urllib.error.HTTPError as exc:
            raise ControlError(_refusal(exc)) from None
        except (OSError, ValueError) as exc:
            reason = exc.reason if isinstance(exc, urllib.error.URLError) else exc
            raise ControlError(
                f"no emulator answers at {self._base_url}: {reason}; run `cwtrain emulator start`, or correct it"
            ) from None


def _held(lock: Path) -> bool:
    """Return whether a process holds the lock of a state directory on this machine."""
    try:
        import fcntl

        with open(lock) as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (ImportError, OSError):  # no such locks here; or the directory is gone
        return False
    return False


def running(state_dir: Path) -> dict[str, Any]:
    """Return what `serve` has said of the emulator that runs on a state directory. Raises ControlError."""
    try:
        found: dict[str, Any] = json.loads((state_dir / _RUNNING_FILE).read_text())
        _ = found["base_url"], found["admin_token"], found["env"]
        return found
    except (OSError, ValueError, KeyError, TypeError):
        raise ControlError(
            f"no emulator runs on the state directory {state_dir}; start one with: "
            f"cwtrain emulator start --state-dir {state_dir}"
        ) from None


def _refusal(exc: urllib.error.HTTPError) -> str:
    with exc:
        raw = exc.read(65536)
    try:
        said = str(json.loads(raw)["message"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {exc.code}; is this the emulator?"
    if exc.code == 401:
        return f"{said}; export what `emulator start` printed, or give --state-dir"
    return said
