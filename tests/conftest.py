"""What every test gets: `helpers` and the files of `tools/` importable, a clean environment, `needs` markers.

The environment is cleaned when this file is imported, before any fixture of any scope runs, so that a server started
once per session is as clean as a function under test.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
for _folder in (TESTS, TESTS.parent / "tools"):
    if str(_folder) not in sys.path:
        sys.path.insert(0, str(_folder))

_SETTINGS = ("COREWEAVE_", "CWTRAIN_", "CW_", "AWS_")
_KEPT = ("CWTRAIN_TEST_", "CWTRAIN_SHARED")
_LOOPBACK = "127.0.0.1,localhost,::1"


def _isolate(environ: os._Environ[str]) -> Path:
    """Drop every setting that cwtrain or the S3 client reads, and give the session a home of its own."""
    for name in list(environ):
        if name.startswith(_SETTINGS) and not name.startswith(_KEPT):
            del environ[name]
    # A proxy that downloads need must not be asked for the servers that tests start on loopback.
    for name in ("NO_PROXY", "no_proxy"):
        environ[name] = ",".join(filter(None, [environ.get(name), _LOOPBACK]))
    real = Path(environ.get("HOME", "/"))
    home = Path(tempfile.mkdtemp(prefix="cwtrain-tests-"))
    # The installers' caches stay where they are: tests that build and install need not download again.
    environ.setdefault("UV_CACHE_DIR", str(real / ".cache" / "uv"))
    environ.setdefault("UV_PYTHON_INSTALL_DIR", str(real / ".local" / "share" / "uv" / "python"))
    environ.setdefault("PIP_CACHE_DIR", str(real / ".cache" / "pip"))
    environ.setdefault("PYENV_ROOT", str(real / ".pyenv"))
    environ["HOME"] = str(home)
    environ["AWS_CONFIG_FILE"] = str(home / "no-aws-config")
    environ["AWS_SHARED_CREDENTIALS_FILE"] = str(home / "no-aws-credentials")
    environ["AWS_EC2_METADATA_DISABLED"] = "true"
    # The tests' matrices are tiny: more threads of the linear algebra only get into each other's way, and xdist's.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        environ.setdefault(name, "1")
    return home


_HOME = _isolate(os.environ)

# A shell's background jobs ignore SIGINT, and so would every program that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN and threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the session's home."""
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(autouse=True)
def _environment_is_restored() -> Iterator[None]:
    """Settings that a test, or the code it calls, leaves in `os.environ` do not reach the next test."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before) - {"PYTEST_CURRENT_TEST"}:
        del os.environ[name]
    for name, value in before.items():
        if name != "PYTEST_CURRENT_TEST" and os.environ.get(name) != value:
            os.environ[name] = value


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`@pytest.mark.needs("ceph")` skips with the reason and the command, or fails where the thing is required."""
    for marker in item.iter_markers("needs"):
        from helpers.requirements import require

        for what in marker.args:
            require(what)
